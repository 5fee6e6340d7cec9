//! What clients ask for, as data.
//!
//! Responsible for a [`Scenario`]: engines, requests, aborts and restarts, as JSON, so that a run can be
//! replayed and shrunk. [`Scenario::random`] makes one from a seed.

use serde::{Deserialize, Serialize};

use crate::config::{EngineConfig, FailurePolicy, Role, SchedulerConfig};
use crate::model::{GroupKind, Model};
use crate::pool::Reuse;
use crate::rng::{Rng, mix};
use crate::run::{Faults, Options};

/// A prompt, as a recipe: equal prefixes give equal tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prompt {
    /// Which of the shared beginnings it has.
    pub prefix: u32,
    /// How many tokens of it.
    pub shared: u32,
    /// Tokens in all, at least 1.
    pub length: u32,
    /// What the rest is made from.
    pub salt: u32,
}

impl Prompt {
    /// Its tokens.
    #[must_use]
    pub fn tokens(&self) -> Vec<u32> {
        let token = |seed: u64, place: u32| (mix(seed << 32 | u64::from(place)) >> 33) as u32;
        let one = |place| match place < self.shared {
            true => token(u64::from(self.prefix) | 1 << 31, place),
            false => token(u64::from(self.salt), place),
        };
        (0..self.length).map(one).collect()
    }
}

/// Which engines a request goes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Route {
    /// One engine does it all.
    Local {
        /// Its place among the engines.
        engine: usize,
    },
    /// One computes the prompt, another generates.
    Split {
        /// The place of the first.
        prefill: usize,
        /// The place of the second.
        decode: usize,
    },
}

/// When a client goes away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Abort {
    /// So many ticks after it came; 0: in the same tick.
    After(u32),
    /// So many ticks after its request began to wait for a load.
    WhileLoading(u32),
    /// In front of the second engine, which hears of the request and at once of its end.
    Rejected,
    /// Between the engines: the second one never hears of it.
    Abandoned,
}

/// A client's request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientRequest {
    /// Its name; the engines' ids are made from it.
    pub name: String,
    /// Its prompt.
    pub prompt: Prompt,
    /// What else its content depends on.
    #[serde(default)]
    pub extra_key: String,
    /// How many tokens it wants, at least 1.
    pub max_tokens: u32,
    /// The tick that it comes in.
    pub arrival: u64,
    /// Through which engines.
    pub route: Route,
    /// When the client goes away.
    #[serde(default)]
    pub abort: Option<Abort>,
    /// The router drops transfer parameters that it does not know (`kvferry`).
    #[serde(default)]
    pub typed_router: bool,
}

/// An engine that goes away and comes back with nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restart {
    /// Its place among the engines.
    pub engine: usize,
    /// When.
    pub tick: u64,
}

/// A run, as data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scenario {
    /// What every engine computes.
    pub model: Model,
    /// The engines.
    pub engines: Vec<EngineConfig>,
    /// The requests.
    pub requests: Vec<ClientRequest>,
    /// Restarts.
    #[serde(default)]
    pub restarts: Vec<Restart>,
    /// Whether requests may end with an explicit failure; otherwise that is a violation.
    pub failures_allowed: bool,
}

impl Scenario {
    /// One from a seed: the same for the same options.
    #[must_use]
    pub fn random(options: &Options) -> Self {
        let mut rng = Rng::part(options.seed, "scenario");
        let harsh = options.faults == Faults::Harsh;
        let mut model = Model {
            heads: options.max_ranks.max(1),
            ..Model::default()
        };
        if options.max_groups > 1 && rng.chance(50) {
            model.groups.push(GroupKind::Window {
                tokens: rng.between(1, 12),
            });
            model.layers = vec![0, 1, 0];
        }
        let engines: Vec<EngineConfig> = [
            ("prefill", Role::Prefill),
            ("decode", Role::Decode),
            ("both", Role::Both),
        ]
        .into_iter()
        .take(if rng.chance(40) { 3 } else { 2 })
        .map(|(name, role)| engine(&mut rng, options, name, role))
        .collect();
        // Everybody has the same ranks: other pairs are topology's.
        let ranks = engines[0].ranks;
        let engines: Vec<_> = engines
            .into_iter()
            .map(|engine| EngineConfig { ranks, ..engine })
            .collect();
        let mut arrival = 0;
        let requests = (0..options.requests)
            .map(|number| {
                arrival += u64::from(rng.below(4));
                request(&mut rng, options, number, arrival, engines.len())
            })
            .collect();
        let restarts = match harsh && options.restarts {
            true => (0..rng.between(1, 3))
                .map(|_| Restart {
                    engine: rng.below(engines.len() as u32) as usize,
                    tick: u64::from(rng.between(1, arrival as u32 + 20)),
                })
                .collect(),
            false => Vec::new(),
        };
        let failures_allowed = options.faults != Faults::None;
        Self {
            model,
            engines,
            requests,
            restarts,
            failures_allowed,
        }
    }
}

fn engine(rng: &mut Rng, options: &Options, name: &str, role: Role) -> EngineConfig {
    let calm = options.faults == Faults::None;
    let ranks = match options.max_ranks {
        0 | 1 => 1,
        most if rng.chance(50) => most,
        _ => 1,
    };
    EngineConfig {
        name: name.into(),
        role,
        ranks,
        scheduler: SchedulerConfig {
            block_tokens: 4,
            // Requests have at most 48 + 12 tokens: the small pools preempt, and hold nothing up for good.
            blocks: if calm { 256 } else { rng.between(20, 80) },
            max_running: rng.between(1, 8),
            token_budget: rng.between(4, 64),
            chunked: true,
            // Without it requests get into each other's way more often.
            reserve: rng.chance(70),
            asynchronous: rng.chance(50),
            lookahead: if rng.chance(30) { rng.between(1, 6) } else { 0 },
            failure_policy: match rng.chance(50) {
                true => FailurePolicy::Recompute,
                false => FailurePolicy::Fail,
            },
            zero_percent: if rng.chance(30) { 20 } else { 0 },
            keeps_last: options.keeps_last,
            less_percent: if rng.chance(30) { 20 } else { 0 },
            reuse: if rng.chance(50) {
                Reuse::Newest
            } else {
                Reuse::Vllm
            },
            ..SchedulerConfig::default()
        },
        forward_ticks: (0, if rng.chance(50) { rng.below(4) } else { 0 }),
        report_delay: if calm { 0 } else { rng.below(4) },
        interleaved: rng.chance(50),
        seed: rng.bits(),
    }
}

fn request(
    rng: &mut Rng,
    options: &Options,
    number: u32,
    arrival: u64,
    engines: usize,
) -> ClientRequest {
    let length = if rng.chance(10) {
        1
    } else {
        rng.between(1, 48)
    };
    let route = match rng.below(10) {
        0 => Route::Local {
            engine: rng.below(engines as u32) as usize,
        },
        // The third engine computes prompts for others and generates from others' prompts.
        1..=2 if engines > 2 => Route::Split {
            prefill: 2,
            decode: 1,
        },
        3..=4 if engines > 2 => Route::Split {
            prefill: 0,
            decode: 2,
        },
        _ => Route::Split {
            prefill: 0,
            decode: 1,
        },
    };
    let percent = match options.faults {
        Faults::None => 0,
        Faults::Mixed | Faults::Lying => 15,
        Faults::Harsh => 40,
    };
    let abort = rng.chance(percent).then(|| match rng.below(8) {
        0 | 1 => Abort::WhileLoading(rng.below(4)),
        2 => Abort::Rejected,
        3 if options.abandon => Abort::Abandoned,
        _ => Abort::After(rng.below(60)),
    });
    ClientRequest {
        name: format!("cmpl-{number}"),
        prompt: Prompt {
            prefix: rng.below(3),
            shared: if rng.chance(50) { rng.below(40) } else { 0 },
            length,
            salt: number,
        },
        extra_key: if rng.chance(10) {
            "lora".into()
        } else {
            String::new()
        },
        max_tokens: rng.between(1, 12),
        arrival,
        route,
        abort,
        typed_router: options.faults == Faults::Harsh && rng.chance(10),
    }
}

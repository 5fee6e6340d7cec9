//! The simulator's engines in processes of their own, with `RemotePrefill` over UCX between them: random
//! arrivals, aborts, preemptions and rejections from a seed. Every rule of the simulator holds in each
//! process, every request gets the right tokens or an explicit failure, and nothing is left.

use std::time::{Duration, Instant};

use kvferry_sim::{Abort, Faults, Options, Route, Scenario};
use kvferry_tests::harness::{Case, PATIENCE};
use kvferry_tests::roles::{Leg, LegEnd, Simulated, SimulatedChild};
use serde_json::json;

const REQUESTS: u32 = 15;

enum Stage {
    Coming,
    /// In this engine, under this id.
    Leg {
        engine: usize,
        id: String,
        last: bool,
    },
    Ended,
}

struct Run {
    seed: u64,
    scenario: Scenario,
    engines: Vec<SimulatedChild>,
    stages: Vec<Stage>,
    tick: u64,
    right: u32,
    failed: u32,
    /// Tokens that each engine loaded.
    loaded: Vec<u64>,
}

impl Run {
    fn new(seed: u64, faults: Faults) -> Self {
        let options = Options {
            requests: REQUESTS,
            seed,
            faults,
            restarts: false,
            ..Options::default()
        };
        let scenario = Scenario::random(&options);
        let engines = scenario.engines.iter().map(|config| {
            let engine = Simulated {
                config: config.clone(),
                model: scenario.model.clone(),
            };
            SimulatedChild::start(&engine, &[("UCX_NET_DEVICES", Some("lo"))])
        });
        Self {
            seed,
            engines: engines.collect(),
            stages: scenario.requests.iter().map(|_| Stage::Coming).collect(),
            loaded: vec![0; scenario.engines.len()],
            scenario,
            tick: 0,
            right: 0,
            failed: 0,
        }
    }

    fn check(&self, breach: &str) {
        assert_eq!(breach, "", "seed {}, tick {}", self.seed, self.tick);
    }

    fn leg(&mut self, place: usize, engine: usize, suffix: &str, leg: Leg, last: bool) {
        let id = format!("{}{suffix}", leg.id);
        let rejected = leg.rejected;
        let breach = self.engines[engine].add(Leg {
            id: id.clone(),
            ..leg
        });
        self.check(&breach);
        self.stages[place] = if rejected {
            Stage::Ended
        } else {
            Stage::Leg { engine, id, last }
        };
    }

    fn arrive(&mut self) {
        for place in 0..self.stages.len() {
            let request = self.scenario.requests[place].clone();
            if !matches!(self.stages[place], Stage::Coming) || request.arrival > self.tick {
                continue;
            }
            let export = json!({"do_remote_decode": true, "do_remote_prefill": false});
            let (engine, suffix, params, last) = match request.route {
                Route::Local { engine } => (engine, "", None, true),
                Route::Split { prefill, .. } => (prefill, "-p", export.as_object().cloned(), false),
            };
            let leg = Leg {
                id: request.name,
                prompt: request.prompt.tokens(),
                max_tokens: if last { request.max_tokens } else { 1 },
                params,
                extra_key: request.extra_key,
                rejected: false,
            };
            self.leg(place, engine, suffix, leg, last);
        }
    }

    fn go_away(&mut self) {
        for place in 0..self.stages.len() {
            let request = &self.scenario.requests[place];
            let due = match request.abort {
                Some(Abort::After(ticks) | Abort::WhileLoading(ticks)) => {
                    self.tick >= request.arrival + u64::from(ticks)
                }
                _ => false,
            };
            if let Stage::Leg { engine, id, .. } = &self.stages[place]
                && due
            {
                let breach = self.engines[*engine].abort(id);
                self.check(&breach);
                self.stages[place] = Stage::Ended;
            }
        }
    }

    fn ended(&mut self, at: usize, end: LegEnd) {
        let of = |stage: &Stage| matches!(stage, Stage::Leg { engine, id, .. } if *engine == at && *id == end.id);
        // Its client may have gone away.
        let Some(place) = self.stages.iter().position(of) else {
            return;
        };
        let request = self.scenario.requests[place].clone();
        let last = matches!(self.stages[place], Stage::Leg { last: true, .. });
        if !end.well {
            assert!(
                self.scenario.failures_allowed,
                "seed {}: {end:?}",
                self.seed
            );
            self.failed += 1;
            self.stages[place] = Stage::Ended;
            return;
        }
        let prompt = request.prompt.tokens();
        let tokens = if last { request.max_tokens } else { 1 };
        let expected = self
            .scenario
            .model
            .reference(&prompt, &request.extra_key, tokens);
        assert_eq!(end.generated, expected, "seed {}: {}", self.seed, end.id);
        self.right += u32::from(last);
        let Route::Split { decode, .. } = request.route else {
            self.stages[place] = Stage::Ended;
            return;
        };
        if last || request.abort == Some(Abort::Abandoned) {
            self.stages[place] = Stage::Ended;
            return;
        }
        let leg = Leg {
            id: request.name,
            prompt,
            max_tokens: request.max_tokens,
            params: end.params,
            extra_key: request.extra_key,
            rejected: request.abort == Some(Abort::Rejected),
        };
        self.leg(place, decode, "-d", leg, true);
    }

    /// Plays it to its end.
    fn play(mut self) -> (u32, u32, u64) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            self.tick += 1;
            self.arrive();
            self.go_away();
            let mut idle = true;
            for at in 0..self.engines.len() {
                let ticked = self.engines[at].step(1);
                self.check(&ticked.breach);
                idle &= ticked.idle;
                self.loaded[at] = ticked.loaded;
                for end in ticked.ended {
                    self.ended(at, end);
                }
            }
            let over = self
                .stages
                .iter()
                .all(|stage| matches!(stage, Stage::Ended));
            if over && idle {
                break;
            }
            let seed = self.seed;
            assert!(Instant::now() < deadline, "seed {seed}: not over in time");
            if over {
                // A lease has to end by its time.
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        for at in 0..self.engines.len() {
            let breach = self.engines[at].end();
            self.check(&breach);
            self.engines[at].child.finish_well();
        }
        (self.right, self.failed, self.loaded.iter().sum())
    }
}

fn every_rule_holds_between_processes(faults: Faults) {
    let seeds = std::env::var("KVFERRY_SIM_SEEDS").ok();
    let seeds: u64 = seeds.map_or(10, |text| text.parse().unwrap());
    let (mut right, mut loaded) = (0, 0);
    for seed in 1..=seeds {
        let (well, failed, tokens) = Run::new(seed, faults).play();
        if faults == Faults::None {
            assert_eq!((well, failed), (REQUESTS, 0), "seed {seed}");
        }
        right += well;
        loaded += tokens;
    }
    assert!(right > 0 && loaded > 0, "{right} right, {loaded} loaded");
}

pub(crate) fn cases() -> Vec<Case> {
    [
        ("none", Faults::None),
        ("mixed", Faults::Mixed),
        ("harsh", Faults::Harsh),
    ]
    .map(|(name, faults)| {
        Case::new(
            format!("every_rule_holds_between_processes::{name}"),
            move || every_rule_holds_between_processes(faults),
        )
    })
    .into()
}

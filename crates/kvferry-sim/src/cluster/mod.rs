//! Several engines with a router between them.
//!
//! Responsible for playing a [`Scenario`]: the router is vLLM's toy proxy (a first leg with
//! `do_remote_decode` and one token, a second leg with whatever the first one returned), clients go
//! away, engines restart. Judges every request's end: the right tokens, or an explicit failure.

mod engines;
mod router;

pub use engines::{ClusterEngine, Engines};

use std::time::{Duration, Instant};

use kvferry_wire::RequestId;

use crate::config::EngineConfig;
use crate::engine::Halves;
use crate::model::Model;
use crate::report::Report;
use crate::scheduler::Counts;
use crate::violation::{Breach, SimError, Violation};
use crate::workload::{ClientRequest, Route, Scenario};

/// Turns in which something happens, but no request ends, after which engines are said to run in
/// circles.
const BUSY_TURNS: u64 = 20_000;

/// What a connector is made for.
#[derive(Clone, Copy, Debug)]
pub struct EngineSpec<'a> {
    /// The engine.
    pub config: &'a EngineConfig,
    /// What it computes.
    pub model: &'a Model,
    /// Counts its lives: 0, and one more after every restart.
    pub life: u32,
}

/// Why a factory made nothing.
pub type FactoryError = Box<dyn std::error::Error + Send + Sync>;

/// Makes connectors.
pub trait ConnectorFactory {
    /// Both halves for an engine. Before a restart the halves of the life before were dropped.
    ///
    /// # Errors
    /// Its own; the run ends.
    fn build(&mut self, spec: &EngineSpec<'_>) -> Result<Halves, FactoryError>;

    /// The engine's workers have taken their blocks: the time to pass their descriptions to the
    /// scheduler half (`set_xfer_handshake_metadata`).
    ///
    /// # Errors
    /// Its own; the run ends.
    fn registered(&mut self, _spec: &EngineSpec<'_>) -> Result<(), FactoryError> {
        Ok(())
    }

    /// The engine is about to be dropped, as by a crash.
    fn stopping(&mut self, _spec: &EngineSpec<'_>) {}

    /// A turn of the whole cluster begins: the time, for connectors that live by it.
    fn tick(&mut self, _tick: u64) {}

    /// Something happened in a turn. Connectors with threads may let them have the processor.
    fn busy(&mut self) {}

    /// Nothing happened in a turn. Connectors with threads may wait here for an event, shortly.
    fn idle(&mut self) {
        std::thread::yield_now();
    }
}

/// How long nothing may happen before a run is stuck: so many turns *and* so much time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// Turns. For connectors whose time is the turn.
    pub idle_ticks: u64,
    /// Time. For connectors with threads; zero for others.
    pub time: Duration,
}

/// How a client's request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// With these tokens, which are right.
    Tokens(Vec<u32>),
    /// The client went away.
    Aborted,
    /// It failed, and the client was told.
    Failed(&'static str),
}

#[derive(Clone, Debug, PartialEq)]
enum Stage {
    Coming,
    /// In an engine, under an id; the last leg if there is no other after it.
    Leg {
        engine: usize,
        id: RequestId,
        last: bool,
        parked_since: Option<u64>,
    },
    Ended(Outcome),
}

struct Client {
    request: ClientRequest,
    prompt: Vec<u32>,
    stage: Stage,
}

struct Slot<E> {
    config: EngineConfig,
    engine: Option<E>,
    life: u32,
    /// Of lives that are over.
    counts: Counts,
}

/// Engines and clients.
pub struct Cluster<'f, F: Engines + ?Sized> {
    scenario: Scenario,
    patience: Patience,
    factory: &'f mut F,
    slots: Vec<Slot<F::Engine>>,
    clients: Vec<Client>,
    tick: u64,
    restarts: u32,
}

impl<'f, F: Engines + ?Sized> Cluster<'f, F> {
    /// Starts the engines.
    ///
    /// # Errors
    /// A configuration, memory, or a connector that could not be made.
    pub fn new(
        scenario: Scenario,
        patience: Patience,
        factory: &'f mut F,
    ) -> Result<Self, SimError> {
        check(&scenario)?;
        let clients = scenario.requests.iter().map(|request| Client {
            prompt: request.prompt.tokens(),
            request: request.clone(),
            stage: Stage::Coming,
        });
        let slots = scenario.engines.iter().map(|config| Slot {
            config: config.clone(),
            engine: None,
            life: 0,
            counts: Counts::default(),
        });
        let mut cluster = Self {
            patience,
            factory,
            slots: slots.collect(),
            clients: clients.collect(),
            tick: 0,
            restarts: 0,
            scenario,
        };
        (0..cluster.slots.len()).try_for_each(|place| cluster.start(place))?;
        Ok(cluster)
    }

    fn start(&mut self, place: usize) -> Result<(), SimError> {
        let slot = &mut self.slots[place];
        let spec = EngineSpec {
            config: &slot.config,
            model: &self.scenario.model,
            life: slot.life,
        };
        slot.engine = Some(self.factory.start(&spec)?);
        Ok(())
    }

    /// Plays the scenario to its end, and compares the end with the start.
    ///
    /// # Errors
    /// [`SimError::Breach`] for the first rule that was broken; others if an engine could not be
    /// started again.
    pub fn run(&mut self) -> Result<(), SimError> {
        let mut idle_since: Option<(u64, Instant)> = None;
        let (mut ended, mut busy, mut since) = (0, 0, Instant::now());
        while !self.is_over() {
            if self.turn()? {
                idle_since = None;
                let now = self.ended();
                if now > ended {
                    (ended, busy, since) = (now, 0, Instant::now());
                }
                busy += 1;
                // What a connector with threads waits for takes time, not turns.
                if busy > BUSY_TURNS && since.elapsed() >= self.patience.time {
                    let left = self.clients.len() - ended;
                    return Err(self.breach(Violation::NoEnd { turns: busy, left }).into());
                }
                self.factory.after_turn(true);
                continue;
            }
            self.factory.after_turn(false);
            let (tick, time) = *idle_since.get_or_insert_with(|| (self.tick, Instant::now()));
            if self.tick - tick > self.patience.idle_ticks && time.elapsed() >= self.patience.time {
                let stuck = self.engines().find(|engine| !engine.is_idle());
                return Err(stuck.map(F::Engine::stuck).unwrap_or_else(|| {
                    let violation = Violation::Simulator("no client is served");
                    self.breach(violation).into()
                }));
            }
        }
        let mut engines = self
            .slots
            .iter_mut()
            .filter_map(|slot| slot.engine.as_mut());
        engines.try_for_each(F::Engine::check_end)
    }

    fn ended(&self) -> usize {
        let ended = |client: &&Client| matches!(client.stage, Stage::Ended(_));
        self.clients.iter().filter(ended).count()
    }

    fn is_over(&self) -> bool {
        let mut engines = self.engines();
        self.ended() == self.clients.len() && engines.all(F::Engine::is_idle)
    }

    fn breach(&self, violation: Violation) -> Breach {
        Breach {
            engine: "router".into(),
            tick: self.tick,
            violation,
        }
    }

    /// One turn: arrivals, aborts, restarts, a tick of every engine. True if anything happened.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn turn(&mut self) -> Result<bool, SimError> {
        self.tick += 1;
        self.factory.turn(self.tick);
        let mut progress = self.arrive()?;
        progress |= self.go_away()?;
        let due = |restart: &&crate::workload::Restart| restart.tick == self.tick;
        let restarts: Vec<_> = self.scenario.restarts.iter().filter(due).copied().collect();
        for restart in restarts {
            self.restart(restart.engine)?;
        }
        for place in 0..self.slots.len() {
            let Some(engine) = &mut self.slots[place].engine else {
                continue;
            };
            progress |= engine.step()?;
            for output in engine.take_outputs() {
                progress = true;
                self.output(place, output)?;
            }
        }
        Ok(progress)
    }

    fn restart(&mut self, place: usize) -> Result<(), SimError> {
        let slot = &mut self.slots[place];
        let spec = EngineSpec {
            config: &slot.config,
            model: &self.scenario.model,
            life: slot.life,
        };
        if let Some(engine) = slot.engine.take() {
            slot.counts = slot.counts.plus(engine.counts());
            self.factory.stop(&spec, engine);
        }
        slot.life += 1;
        self.restarts += 1;
        for client in &mut self.clients {
            if matches!(client.stage, Stage::Leg { engine, .. } if engine == place) {
                client.stage = Stage::Ended(Outcome::Failed("its engine went away"));
            }
        }
        self.start(place)
    }

    /// How every request ended, in the scenario's order; `None` for one that has not.
    pub fn outcomes(&self) -> impl Iterator<Item = Option<&Outcome>> {
        self.clients.iter().map(|client| match &client.stage {
            Stage::Ended(outcome) => Some(outcome),
            _ => None,
        })
    }

    /// The engines, to look at.
    pub fn engines(&self) -> impl Iterator<Item = &F::Engine> {
        self.slots.iter().filter_map(|slot| slot.engine.as_ref())
    }

    /// The figures so far.
    #[must_use]
    pub fn report(&self) -> Report {
        let mut report = Report {
            requests: self.clients.len() as u32,
            ticks: self.tick,
            restarts: self.restarts,
            ..Report::default()
        };
        let mut digest = xxhash_rust::xxh3::Xxh3::new();
        for outcome in self.outcomes().flatten() {
            match outcome {
                Outcome::Tokens(tokens) => {
                    report.finished += 1;
                    report.tokens += tokens.len() as u64;
                }
                Outcome::Aborted => report.aborted += 1,
                Outcome::Failed(_) => report.failed += 1,
            }
            digest.update(format!("{outcome:?}").as_bytes());
        }
        report.digest = digest.digest();
        let engine = |slot: &Slot<F::Engine>| {
            let now = slot.engine.as_ref().map(F::Engine::counts);
            (
                slot.config.name.clone(),
                slot.counts.plus(now.unwrap_or_default()),
            )
        };
        report.engines = self.slots.iter().map(engine).collect();
        report
    }
}

fn check(scenario: &Scenario) -> Result<(), SimError> {
    let engines = scenario.engines.len();
    let refuse = |field, reason| Err(SimError::Config { field, reason });
    let mut places: Vec<_> = scenario
        .restarts
        .iter()
        .map(|restart| restart.engine)
        .collect();
    let mut names = std::collections::BTreeSet::new();
    for request in &scenario.requests {
        match request.route {
            Route::Local { engine } => places.push(engine),
            Route::Split { prefill, decode } => places.extend([prefill, decode]),
        }
        if request.prompt.length == 0 || request.max_tokens == 0 {
            return refuse("requests", format!("{} has no token", request.name));
        }
        if !names.insert(&request.name) {
            return refuse("requests.name", format!("{} is there twice", request.name));
        }
    }
    match places.into_iter().find(|&place| place >= engines) {
        Some(place) => refuse(
            "engine",
            format!("there is no engine {place}, only {engines}"),
        ),
        None => Ok(()),
    }
}

//! What a cluster drives: engines in this process, or anywhere else.

use kvferry_wire::RequestId;

use super::{ConnectorFactory, EngineSpec};
use crate::engine::SimEngine;
use crate::request::{NewRequest, Output, State};
use crate::scheduler::Counts;
use crate::violation::SimError;

/// An engine of a cluster. Its errors end the run.
#[allow(clippy::missing_errors_doc, reason = "all of them are the same")]
pub trait ClusterEngine {
    /// A request comes in.
    fn add(&mut self, request: NewRequest) -> Result<(), SimError>;

    /// A request is refused before it is admitted.
    fn reject(&mut self, request: NewRequest) -> Result<(), SimError>;

    /// A client goes away; nothing if the request has ended.
    fn abort(&mut self, id: &RequestId) -> Result<(), SimError>;

    /// One tick. True if anything happened.
    fn step(&mut self) -> Result<bool, SimError>;

    /// Requests that ended since the last call.
    fn take_outputs(&mut self) -> Vec<Output>;

    /// Whether a request waits for its load.
    fn is_parked(&self, id: &RequestId) -> bool;

    /// Whether nothing is left to be done.
    fn is_idle(&self) -> bool;

    /// Its figures.
    fn counts(&self) -> Counts;

    /// What it is when it makes no progress.
    fn stuck(&self) -> SimError;

    /// Compares the end with the start.
    fn check_end(&mut self) -> Result<(), SimError>;
}

impl ClusterEngine for SimEngine {
    fn add(&mut self, request: NewRequest) -> Result<(), SimError> {
        Ok(Self::add(self, request)?)
    }

    fn reject(&mut self, request: NewRequest) -> Result<(), SimError> {
        Ok(Self::reject(self, request)?)
    }

    fn abort(&mut self, id: &RequestId) -> Result<(), SimError> {
        Ok(Self::abort(self, id)?)
    }

    fn step(&mut self) -> Result<bool, SimError> {
        Ok(Self::step(self)?)
    }

    fn take_outputs(&mut self) -> Vec<Output> {
        Self::take_outputs(self)
    }

    fn is_parked(&self, id: &RequestId) -> bool {
        self.scheduler().state(id) == Some(State::Parked)
    }

    fn is_idle(&self) -> bool {
        Self::is_idle(self)
    }

    fn counts(&self) -> Counts {
        self.scheduler().counts()
    }

    fn stuck(&self) -> SimError {
        Self::stuck(self).into()
    }

    fn check_end(&mut self) -> Result<(), SimError> {
        Ok(Self::check_end(self)?)
    }
}

/// Starts the engines of a cluster, and lets time pass.
pub trait Engines {
    /// Its engines.
    type Engine: ClusterEngine;

    /// Starts an engine. The life before, if there was one, was stopped.
    ///
    /// # Errors
    /// Why there is none; the run ends.
    fn start(&mut self, spec: &EngineSpec<'_>) -> Result<Self::Engine, SimError>;

    /// Ends an engine, as by a crash.
    fn stop(&mut self, spec: &EngineSpec<'_>, engine: Self::Engine);

    /// A turn of the whole cluster begins.
    fn turn(&mut self, tick: u64);

    /// Something happened in a turn, or nothing.
    fn after_turn(&mut self, progress: bool);
}

/// Engines in this process, around a factory's connectors.
impl<F: ConnectorFactory + ?Sized> Engines for F {
    type Engine = SimEngine;

    fn start(&mut self, spec: &EngineSpec<'_>) -> Result<SimEngine, SimError> {
        let failed = |source| SimError::Factory {
            engine: spec.config.name.clone(),
            source,
        };
        let halves = self.build(spec).map_err(failed)?;
        let engine = SimEngine::new(spec.config.clone(), spec.model, halves)?;
        self.registered(spec).map_err(failed)?;
        Ok(engine)
    }

    fn stop(&mut self, spec: &EngineSpec<'_>, engine: SimEngine) {
        self.stopping(spec);
        drop(engine);
    }

    fn turn(&mut self, tick: u64) {
        self.tick(tick);
    }

    fn after_turn(&mut self, progress: bool) {
        if progress {
            self.busy();
        } else {
            self.idle();
        }
    }
}

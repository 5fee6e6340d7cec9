//! An engine that ends with its scope.
//!
//! Invariant: the progress thread does not outlive the handle. UCX takes itself down when the process
//! exits, and must not be in use by then, also if a command ends with an error.

use std::ops::Deref;
use std::time::Duration;

use kvferry_engine::{Engine, EngineError};

/// Time that an engine gets to end.
const PATIENCE: Duration = Duration::from_secs(5);

/// A started engine.
pub(crate) struct RunningEngine(Engine);

impl RunningEngine {
    pub(crate) const fn new(engine: Engine) -> Self {
        Self(engine)
    }

    /// Shuts the engine down and says how that went.
    pub(crate) fn shutdown(self) -> Result<(), EngineError> {
        self.0.shutdown(PATIENCE)
    }
}

impl Deref for RunningEngine {
    type Target = Engine;

    fn deref(&self) -> &Engine {
        &self.0
    }
}

impl Drop for RunningEngine {
    fn drop(&mut self) {
        // An engine that was shut down says so, and that is all.
        let _ = self.0.shutdown(PATIENCE);
    }
}

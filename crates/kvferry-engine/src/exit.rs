//! The end of the process.
//!
//! UCX's destructors run at exit, whatever other threads do; a progress thread that is inside UCX
//! then takes the process down by a signal. So progress threads are known here, and are asked to
//! end before that. An engine that was shut down is not known any more and costs nothing.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam::channel::bounded;

use crate::command::Command;
use crate::shared::Shared;

/// How long the end of the process waits for progress threads.
pub(crate) const EXIT_LIMIT: Duration = Duration::from_secs(2);

static RUNNING: Mutex<Vec<Arc<Shared>>> = Mutex::new(Vec::new());
static ENDED: Condvar = Condvar::new();

fn running() -> MutexGuard<'static, Vec<Arc<Shared>>> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Exists for as long as an engine's progress thread uses its fabric.
pub(crate) struct Running(Arc<Shared>);

impl Running {
    pub(crate) fn new(shared: &Arc<Shared>) -> Self {
        running().push(Arc::clone(shared));
        Self(Arc::clone(shared))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Done already unless the thread ends by a panic, which then is one of the end itself.
        if std::thread::panicking() {
            self.0
                .mark_panicked("a panic while the engine was taken down");
        }
        self.0.mark_stopped();
        self.0.refuse_commands();
        running().retain(|shared| !Arc::ptr_eq(shared, &self.0));
        ENDED.notify_all();
    }
}

/// Has every progress thread end, and waits for them at most `limit`. Called at the end of the
/// process; of a forked child too, where no engine is ours and nothing is done.
pub(crate) fn end_all(limit: Duration) {
    let deadline = Instant::now() + limit;
    let mut engines = running();
    for shared in engines.iter() {
        let (reply, _) = bounded(1);
        // Refused by an engine that ends already, or that belongs to a parent process.
        let _ = shared.submit(Command::Shutdown { deadline, reply });
    }
    while engines.iter().any(|shared| shared.is_ours()) {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        engines = ENDED
            .wait_timeout(engines, left)
            .unwrap_or_else(PoisonError::into_inner)
            .0;
    }
}

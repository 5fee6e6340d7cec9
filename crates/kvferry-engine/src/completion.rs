//! The one outcome of a transfer, and the moment its memory is quiet.
//!
//! A cell is shared by one handle and the progress thread. The thread sets the outcome once and
//! later, or at the same time, marks the cell quiesced; the handle polls, waits or awaits.
//!
//! Invariant: whoever waits, by thread or by waker, is woken once both have happened, whatever the
//! interleaving; of several wakers the last one counts. `tests/loom` checks it.

use std::sync::PoisonError;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::sync::{Condvar, Mutex, MutexGuard};

#[derive(Debug)]
struct State<T> {
    outcome: Option<T>,
    quiesced: bool,
    waker: Option<Waker>,
}

/// Where a transfer's outcome appears, exactly once.
#[derive(Debug)]
pub(crate) struct CompletionCell<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

impl<T: Clone> CompletionCell<T> {
    pub(crate) fn new() -> Self {
        Self {
            state: Mutex::new(State {
                outcome: None,
                quiesced: false,
                waker: None,
            }),
            changed: Condvar::new(),
        }
    }

    /// Sets the outcome. The first one stays; later ones are ignored, and false is returned.
    pub(crate) fn complete(&self, outcome: T) -> bool {
        let mut state = self.lock();
        if state.outcome.is_some() {
            return false;
        }
        state.outcome = Some(outcome);
        self.notify(state);
        true
    }

    /// Marks that nothing of the transfer can touch memory any more.
    pub(crate) fn quiesce(&self) {
        let mut state = self.lock();
        state.quiesced = true;
        self.notify(state);
    }

    pub(crate) fn outcome(&self) -> Option<T> {
        self.lock().outcome.clone()
    }

    pub(crate) fn is_quiesced(&self) -> bool {
        self.lock().quiesced
    }

    /// Waits for the outcome and for quiet; `None` if `timeout` passes first.
    pub(crate) fn wait(&self, timeout: Duration) -> Option<T> {
        let deadline = Instant::now().checked_add(timeout);
        let mut state = self.lock();
        loop {
            if let (Some(outcome), true) = (&state.outcome, state.quiesced) {
                return Some(outcome.clone());
            }
            let left = match deadline {
                Some(deadline) => deadline.saturating_duration_since(Instant::now()),
                None => Duration::MAX,
            };
            if left.is_zero() {
                return None;
            }
            state = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// The future's side of [`CompletionCell::wait`].
    pub(crate) fn poll(&self, context: &Context<'_>) -> Poll<T> {
        let mut state = self.lock();
        if let (Some(outcome), true) = (&state.outcome, state.quiesced) {
            return Poll::Ready(outcome.clone());
        }
        match &mut state.waker {
            Some(waker) => waker.clone_from(context.waker()),
            none => *none = Some(context.waker().clone()),
        }
        Poll::Pending
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // A panic cannot leave the state half written: every change is one assignment.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn notify(&self, mut state: MutexGuard<'_, State<T>>) {
        let waker = state.waker.take();
        drop(state);
        self.changed.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn the_first_outcome_stays() {
        let cell = CompletionCell::new();
        assert!(cell.complete(1));
        assert!(!cell.complete(2));
        assert_eq!(cell.outcome(), Some(1));
        assert!(!cell.is_quiesced());
        assert_eq!(cell.wait(Duration::ZERO), None);
        cell.quiesce();
        assert_eq!(cell.wait(Duration::ZERO), Some(1));
    }

    #[test]
    fn a_waiting_thread_is_woken() {
        let cell = Arc::new(CompletionCell::new());
        let waiter = {
            let cell = Arc::clone(&cell);
            std::thread::spawn(move || cell.wait(Duration::from_secs(60)))
        };
        cell.complete(7);
        cell.quiesce();
        assert_eq!(waiter.join().unwrap(), Some(7));
    }
}

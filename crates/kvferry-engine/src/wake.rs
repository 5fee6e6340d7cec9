//! Waking a thread that sleeps in `poll`, such as the progress thread.
//!
//! Any number of threads submit to some queue and then call [`Waker::wake`]; one thread sleeps:
//! [`Waker::about_to_sleep`], a look at the queue, `poll` if it is empty, [`Waker::awake`].
//!
//! Invariants: a submission is seen, either by that look or by the event that ends the sleep; and
//! an event ends one sleep, not every later one too. `tests/loom` checks both.

use crate::sync::{AtomicBool, AtomicU64, Event, EventFd, Ordering};

/// An event that is signalled only when somebody sleeps.
#[derive(Debug)]
pub(crate) struct Waker {
    event: Event,
    asleep: AtomicBool,
    /// Signals that are on their way: their sender has taken the flag, and we have not yet taken
    /// them. Only the sleeper looks at it.
    owed: AtomicU64,
}

impl Waker {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self {
            event: Event::new()?,
            asleep: AtomicBool::new(false),
            owed: AtomicU64::new(0),
        })
    }

    /// Ends the current sleep, or the next one if it has been announced. Call after submitting.
    pub(crate) fn wake(&self) {
        // Every change of the flag is a swap that acquires and releases, so all of them stand in one
        // order: either this one finds the sleep announced, or the announcement comes behind it and
        // sees what was submitted before.
        if self.asleep.swap(false, Ordering::AcqRel) {
            self.event.add_one();
        }
    }

    /// Announces a sleep. The caller must look at its queue once more after this.
    pub(crate) fn about_to_sleep(&self) {
        self.asleep.swap(true, Ordering::AcqRel);
    }

    /// Ends an announced sleep, from the sleeper's side.
    pub(crate) fn awake(&self) {
        let mut owed = self.owed.load(Ordering::Relaxed);
        if !self.asleep.swap(false, Ordering::AcqRel) {
            // Somebody has signalled, or is about to.
            owed += 1;
        }
        if owed > 0 {
            // What is not there yet is taken after a later sleep, which it ends at once. Left where
            // it is, it would end them all.
            owed = owed.saturating_sub(self.event.take());
            self.owed.store(owed, Ordering::Relaxed);
        }
    }

    pub(crate) fn fd(&self) -> EventFd<'_> {
        self.event.fd()
    }
}

//! The engine's `sync.rs` over loom.
//!
//! loom's `Condvar::wait_timeout` never times out. That is the stricter reading of a wait: a thread
//! that nobody wakes does not come back, and loom reports a deadlock.

pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering};
pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};

/// What to wait for.
pub(crate) type EventFd<'a> = &'a Event;

/// An eventfd as the kernel makes it: a count under a lock, and a queue of those who wait for it.
#[derive(Debug)]
pub(crate) struct Event {
    count: Mutex<u64>,
    changed: Condvar,
}

impl Event {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self {
            count: Mutex::new(0),
            changed: Condvar::new(),
        })
    }

    pub(crate) fn add_one(&self) {
        *self.count.lock().unwrap() += 1;
        self.changed.notify_all();
    }

    pub(crate) fn take(&self) -> u64 {
        std::mem::take(&mut self.count.lock().unwrap())
    }

    pub(crate) fn fd(&self) -> EventFd<'_> {
        self
    }

    /// What `poll` does: waits until there is a count, and leaves it.
    pub(crate) fn poll(&self) {
        let mut count = self.count.lock().unwrap();
        while *count == 0 {
            count = self.changed.wait(count).unwrap();
        }
    }

    /// `poll` that does not wait.
    pub(crate) fn is_readable(&self) -> bool {
        *self.count.lock().unwrap() > 0
    }
}

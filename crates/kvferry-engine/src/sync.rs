//! What our own concurrent types are made of: std's primitives, and an event that `poll` can wait for.
//!
//! `wake.rs` and `completion.rs` take everything that threads share from here. `tests/loom` compiles
//! those two files once more, beside a file of this name that has loom's primitives, and tries
//! every interleaving; so what is added here is added there.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};

use rustix::event::{EventfdFlags, eventfd};

/// What to wait for: readable while the event's count is not zero.
pub(crate) type EventFd<'a> = BorrowedFd<'a>;

/// An eventfd: a count that threads add to and one thread takes.
#[derive(Debug)]
pub(crate) struct Event(OwnedFd);

impl Event {
    pub(crate) fn new() -> std::io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self(eventfd(0, flags)?))
    }

    /// Adds one.
    pub(crate) fn add_one(&self) {
        // The only failure is a full counter, and then whoever waits wakes anyway.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Takes the count, which is zero then.
    pub(crate) fn take(&self) -> u64 {
        let mut count = [0; 8];
        // A count of zero is an error to `read`, which leaves the bytes as they are.
        let _ = rustix::io::read(&self.0, &mut count);
        u64::from_ne_bytes(count)
    }

    pub(crate) fn fd(&self) -> EventFd<'_> {
        self.0.as_fd()
    }
}

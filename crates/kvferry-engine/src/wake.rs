//! Waking the progress thread.
//!
//! Invariant: a caller that submitted and then called [`Waker::wake`] is seen, either by the look at
//! the queue that follows [`Waker::about_to_sleep`] or by the event that ends the sleep.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering, fence};

use rustix::event::{EventfdFlags, eventfd};

/// An eventfd that is written to only when somebody sleeps.
#[derive(Debug)]
pub(crate) struct Waker {
    fd: OwnedFd,
    asleep: AtomicBool,
}

impl Waker {
    pub(crate) fn new() -> std::io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self {
            fd,
            asleep: AtomicBool::new(false),
        })
    }

    /// Ends the current sleep, or the next one if it has been announced. Call after submitting.
    pub(crate) fn wake(&self) {
        // Orders the submission before the look at the flag; pairs with `about_to_sleep`.
        fence(Ordering::SeqCst);
        if self.asleep.swap(false, Ordering::SeqCst) {
            // The only failure is a full counter, and then the sleeper wakes anyway.
            let _ = rustix::io::write(&self.fd, &1_u64.to_ne_bytes());
        }
    }

    /// Announces a sleep. The caller must look at its queue once more after this.
    pub(crate) fn about_to_sleep(&self) {
        self.asleep.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Ends an announced sleep, from the sleeper's side.
    pub(crate) fn awake(&self) {
        if !self.asleep.swap(false, Ordering::SeqCst) {
            // Somebody has written, or is about to: take the event if it is there. One that comes
            // later costs one empty turn of the loop.
            let _ = rustix::io::read(&self.fd, &mut [0_u8; 8]);
        }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

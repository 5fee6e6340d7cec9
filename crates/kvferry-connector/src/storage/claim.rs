//! Who may touch a block's memory.
//!
//! An I/O thread claims a block's memory for the short time of a copy. Everything slow, the disk
//! above all, happens without a claim; so a block can be taken back at any time, without waiting.

use std::sync::atomic::{AtomicU8, Ordering};

const WAITING: u8 = 0;
const COPYING: u8 = 1;
const OVER: u8 = 2;
const TAKEN_BACK: u8 = 3;

/// The claim on one block for one job.
#[derive(Debug, Default)]
pub(super) struct Claim(AtomicU8);

impl Claim {
    /// The copy begins; false if the block was taken back.
    #[must_use]
    pub(super) fn begin(&self) -> bool {
        self.step(WAITING, COPYING)
    }

    /// The copy is over; false if the block was taken back while it ran, and what was copied out of
    /// it may be anything.
    ///
    /// A copy that is confirmed here was over before anything that follows a [`Self::take_back`]:
    /// both change the same word, one after the other.
    #[must_use]
    pub(super) fn end(&self) -> bool {
        self.step(COPYING, OVER)
    }

    /// Takes the block back if nothing has begun. True if it did.
    #[must_use]
    pub(super) fn cancel(&self) -> bool {
        self.step(WAITING, TAKEN_BACK)
    }

    /// Whether the copy is over: nothing touches the block any more.
    pub(super) fn is_over(&self) -> bool {
        self.0.load(Ordering::Acquire) == OVER
    }

    /// Takes the block back, also from under a copy *out of* it, which is void then. True if it was
    /// not over.
    pub(super) fn take_back(&self) -> bool {
        let back = |state| (state < OVER).then_some(TAKEN_BACK);
        self.0
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, back)
            .is_ok()
    }

    /// Whether the block was taken back.
    pub(super) fn is_taken_back(&self) -> bool {
        self.0.load(Ordering::Acquire) == TAKEN_BACK
    }

    fn step(&self, from: u8, to: u8) -> bool {
        self.0
            .compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_that_was_taken_back_is_not_touched() {
        let claim = Claim::default();
        assert!(claim.cancel() && claim.is_taken_back() && !claim.is_over());
        assert!(!claim.begin() && !claim.end() && !claim.cancel());
        let claim = Claim::default();
        assert!(claim.take_back() && !claim.begin());
        assert!(!claim.take_back());
    }

    #[test]
    fn a_copy_that_runs_is_waited_for_or_void() {
        let claim = Claim::default();
        assert!(claim.begin() && !claim.cancel() && !claim.is_over());
        assert!(claim.end() && claim.is_over() && !claim.take_back() && !claim.cancel());
        let claim = Claim::default();
        assert!(claim.begin() && claim.take_back());
        assert!(
            !claim.end(),
            "a copy counts although its block was taken back"
        );
    }
}

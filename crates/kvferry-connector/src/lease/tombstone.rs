//! When ended leases are forgotten.
//!
//! The answers themselves stay with the [`Lease`](super::state::Lease). Since every tombstone
//! lives equally long, a queue in the order of ends is also in the order of deadlines.

use std::collections::VecDeque;
use std::time::Instant;

use kvferry_wire::Epoch;

#[derive(Debug, Default)]
pub(super) struct Tombstones {
    order: VecDeque<(Instant, Epoch)>,
}

impl Tombstones {
    pub(super) fn push(&mut self, until: Instant, epoch: Epoch) {
        self.order.push_back((until, epoch));
    }

    /// Takes one that is to be forgotten at `now`.
    pub(super) fn pop_due(&mut self, now: Instant) -> Option<Epoch> {
        self.order
            .pop_front_if(|(until, _)| *until <= now)
            .map(|(_, epoch)| epoch)
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.order.front().map(|(until, _)| *until)
    }

    pub(super) fn len(&self) -> usize {
        self.order.len()
    }
}

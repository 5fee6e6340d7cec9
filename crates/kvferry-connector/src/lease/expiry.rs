//! When leases expire: a heap whose entries may be out of date.
//!
//! Renewing a lease and ending it do not touch the heap. An entry is compared with the lease's
//! own deadline when it gets to the top: it is dropped if the lease has ended, and moved if the
//! deadline has. A lease that is held always has an entry at or before its deadline, and at most
//! two (from its reservation and its activation).

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Instant;

use kvferry_wire::Epoch;

/// Out-of-date entries that are tolerated before looking for them pays.
const SLACK: usize = 64;

#[derive(Debug, Default)]
pub(super) struct ExpiryHeap {
    heap: BinaryHeap<Reverse<(Instant, Epoch)>>,
}

impl ExpiryHeap {
    pub(super) fn push(&mut self, deadline: Instant, epoch: Epoch) {
        self.heap.push(Reverse((deadline, epoch)));
    }

    /// The next lease to expire and when, by `deadline_of`, which knows the leases that are held.
    pub(super) fn next(
        &mut self,
        deadline_of: impl Fn(Epoch) -> Option<Instant>,
    ) -> Option<(Instant, Epoch)> {
        loop {
            let &Reverse((entry, epoch)) = self.heap.peek()?;
            match deadline_of(epoch) {
                Some(deadline) if deadline <= entry => return Some((deadline, epoch)),
                Some(deadline) => {
                    self.heap.pop();
                    self.push(deadline, epoch);
                }
                None => {
                    self.heap.pop();
                }
            }
        }
    }

    /// Drops entries of ended leases once they outnumber those of the `held` ones, so that the
    /// heap's size follows the number of leases held and its cost per end stays constant.
    pub(super) fn tidy(&mut self, held: usize, is_held: impl Fn(Epoch) -> bool) {
        if held == 0 {
            self.heap.clear();
        } else if self.heap.len() > 4 * held + SLACK {
            self.heap.retain(|Reverse((_, epoch))| is_held(*epoch));
        } else {
            return;
        }
        self.heap.shrink_to(2 * self.heap.len() + SLACK);
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.heap.len()
    }
}

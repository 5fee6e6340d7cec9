//! What is done when operations of an ended transfer do not end.
//!
//! UCX cannot cancel a GET. So the steps are, each with the same time limit: post nothing more and wait;
//! close the endpoint; destroy the worker and make another; keep the memory, and say so. A copy cannot
//! be broken off at all: closing the endpoint and destroying the worker are skipped for it. Whatever the
//! step, the transfer is quiesced when its last operation is reported, and not before.

use std::collections::BTreeSet;
use std::time::Instant;

use super::core::{Action, Core};
use crate::counters::{add, subtract};
use crate::fabric::Fabric;
use crate::lane::Lane;

/// What has been tried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Tried {
    /// Nothing more is posted.
    #[default]
    Waiting,
    /// The endpoint is being closed.
    Closing,
    /// The worker was destroyed.
    Resetting,
    /// Everything.
    All,
}

/// When the next step is due, by slots.
#[derive(Debug, Default)]
pub(super) struct Escalations(BTreeSet<(Instant, u32)>);

impl Escalations {
    pub(super) fn insert(&mut self, due: Instant, slot: u32) {
        self.0.insert((due, slot));
    }

    pub(super) fn remove(&mut self, slot: u32) {
        self.0.retain(|&(_, other)| other != slot);
    }

    pub(super) fn next(&self) -> Option<Instant> {
        self.0.first().map(|&(due, _)| due)
    }

    fn take_due(&mut self, now: Instant) -> Option<u32> {
        let &(due, slot) = self.0.first().filter(|(due, _)| *due <= now)?;
        self.0.remove(&(due, slot));
        Some(slot)
    }
}

impl Core {
    /// Takes the next step for transfers whose operations have not ended. True if there was one.
    pub(super) fn escalate(&mut self) -> bool {
        let mut any = false;
        while let Some(slot) = self.escalations.take_due(self.now) {
            any = true;
            self.next_step(slot);
        }
        any
    }

    fn next_step(&mut self, slot: u32) {
        let step = self.shared.config.escalation_step;
        let Some(state) = self.transfers.in_slot(slot) else {
            return;
        };
        let (peer, operations, bytes) = (state.peer, state.in_flight, state.total);
        let one_sided = state.lane == Lane::Native;
        let next = match state.tried {
            Tried::Waiting if one_sided => Tried::Closing,
            Tried::Closing => Tried::Resetting,
            Tried::Waiting | Tried::Resetting => Tried::All,
            Tried::All => return,
        };
        state.tried = next;
        match next {
            Tried::Closing => {
                add(&self.counters().forced_closes, 1);
                let reason =
                    format!("{operations} reads did not end {step:?} after their transfer");
                // Lost already if it was the reason for the transfer's end.
                self.lose(peer, &reason);
            }
            Tried::Resetting => {
                tracing::error!(
                    peer,
                    operations,
                    "reads outlast the close of their endpoint; the data worker is destroyed"
                );
                self.actions.push(Action::Reset);
            }
            Tried::Waiting | Tried::All => {
                tracing::error!(
                    peer,
                    operations,
                    bytes,
                    "operations do not end; their memory is kept until they do"
                );
                add(&self.counters().kept_bytes, bytes);
                return;
            }
        }
        self.escalations.insert(self.now + step, slot);
    }

    /// A transfer is quiet: nothing more is tried.
    pub(super) fn is_quiet(&mut self, slot: u32, tried: Tried, bytes: u64) {
        self.escalations.remove(slot);
        if tried == Tried::All {
            subtract(&self.counters().kept_bytes, bytes);
        }
    }

    /// Destroys what carries one-sided reads and makes it anew.
    pub(super) fn reset(&mut self, fabric: &mut dyn Fabric) {
        add(&self.counters().worker_resets, 1);
        if let Err(error) = fabric.reset(self) {
            tracing::error!(%error, "there are no one-sided reads any more");
        }
        if let Some(started) = self.shared.started.get() {
            started.set_addresses(fabric.addresses());
        }
    }
}

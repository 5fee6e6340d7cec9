//! What the table counts.

use kvferry_wire::lease::Verdict;

/// What has happened since the table was made. Values only grow.
///
/// Of the releases that were kept early, each is matched, dropped or still waiting:
/// `early_kept == early_matched + early_dropped + LeaseGauges::early`. Of the leases, each has
/// ended or is held: `reserved == released + expired + revoked + LeaseTable::held()`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeaseCounters {
    /// Leases reserved.
    pub reserved: u64,
    /// Leases activated.
    pub activated: u64,
    /// Leases that ended because every expected reader had released them.
    pub released: u64,
    /// Leases that ended because their time ran out.
    pub expired: u64,
    /// Leases that ended because the scheduler half or a shutdown took them back.
    pub revoked: u64,
    /// Readers recorded, which is the number of first answers `Valid`.
    pub readers: u64,
    /// Releases of a reader already recorded, answered from memory.
    pub resent: u64,
    /// Refused releases by cause.
    pub refused: Refusals,
    /// Refused releases whose lease had ended and is still remembered.
    pub late: u64,
    /// Releases kept because their lease was not issued yet; a resent one counts once.
    pub early_kept: u64,
    /// Kept releases whose lease was then issued, whatever the answer was.
    pub early_matched: u64,
    /// Kept releases that were given up: their epoch was skipped, they waited too long, their
    /// peer is gone, or this rank shuts down.
    pub early_dropped: u64,
    /// Renewals of leases that are held.
    pub renewed: u64,
    /// Renewals of leases that are gone.
    pub renewals_gone: u64,
    /// Renewals of leases that were not issued yet.
    pub renewals_unknown: u64,
    /// Activations and revocations of leases that had ended already.
    pub plan_too_late: u64,
}

/// Refused releases by the [`Verdict`] that was answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Refusals {
    /// [`Verdict::Ended`]
    pub ended: u64,
    /// [`Verdict::UnknownInstance`]
    pub unknown_instance: u64,
    /// [`Verdict::UnknownEpoch`]
    pub unknown_epoch: u64,
    /// [`Verdict::RequestMismatch`]
    pub request_mismatch: u64,
    /// [`Verdict::ConsumersMismatch`]
    pub consumers_mismatch: u64,
    /// [`Verdict::RepeatedReader`]
    pub repeated_reader: u64,
    /// [`Verdict::Overloaded`]
    pub overloaded: u64,
}

impl Refusals {
    /// All of them together.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.ended
            + self.unknown_instance
            + self.unknown_epoch
            + self.request_mismatch
            + self.consumers_mismatch
            + self.repeated_reader
            + self.overloaded
    }

    /// Counts an answer, unless it is [`Verdict::Valid`].
    pub(super) const fn count(&mut self, verdict: Verdict) {
        let counter = match verdict {
            Verdict::Valid => return,
            Verdict::Ended => &mut self.ended,
            Verdict::UnknownInstance => &mut self.unknown_instance,
            Verdict::UnknownEpoch => &mut self.unknown_epoch,
            Verdict::RequestMismatch => &mut self.request_mismatch,
            Verdict::ConsumersMismatch => &mut self.consumers_mismatch,
            Verdict::RepeatedReader => &mut self.repeated_reader,
            Verdict::Overloaded => &mut self.overloaded,
        };
        *counter += 1;
    }
}

/// What the table holds at the moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeaseGauges {
    /// Leases reserved and not yet activated.
    pub reserved: usize,
    /// Leases activated and not yet ended.
    pub activated: usize,
    /// Ended leases whose answers are remembered.
    pub tombstones: usize,
    /// Releases that wait for their lease to be issued.
    pub early: usize,
}

impl LeaseGauges {
    /// Leases that have not ended.
    #[must_use]
    pub const fn held(&self) -> usize {
        self.reserved + self.activated
    }
}

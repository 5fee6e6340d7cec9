//! What the scheduler half has counted.

use crate::contract::LoadFailure;

/// Failed loads by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FailedLoads {
    /// The peer could not be reached, or was lost.
    pub peer: u64,
    /// The lease had ended.
    pub lease: u64,
    /// The read took too long.
    pub stalled: u64,
    /// The peer refused, or does not fit.
    pub rejected: u64,
    /// The lease, or what the blocks' checksums are, was not confirmed in time.
    pub unconfirmed: u64,
    /// Checksums differ.
    pub corrupt: u64,
    /// The request was aborted.
    pub aborted: u64,
    /// Anything of this process.
    pub local: u64,
}

impl FailedLoads {
    pub(super) const fn count(&mut self, failure: LoadFailure) {
        let place = match failure {
            LoadFailure::Peer => &mut self.peer,
            LoadFailure::Lease => &mut self.lease,
            LoadFailure::Stalled => &mut self.stalled,
            LoadFailure::Rejected => &mut self.rejected,
            LoadFailure::Unconfirmed => &mut self.unconfirmed,
            LoadFailure::Corrupt => &mut self.corrupt,
            LoadFailure::Aborted => &mut self.aborted,
            LoadFailure::Storage | LoadFailure::Local => &mut self.local,
        };
        *place += 1;
    }

    /// All of them.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.peer
            + self.lease
            + self.stalled
            + self.rejected
            + self.unconfirmed
            + self.corrupt
            + self.aborted
            + self.local
    }
}

/// Counters and gauges of [`RemoteScheduler`](super::RemoteScheduler).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoteStats {
    /// Now: offers that wait to be asked for.
    pub loads_waiting: u64,
    /// Now: loads that workers run.
    pub loads_running: u64,
    /// Now: leases of requests that have not finished.
    pub leases_reserved: u64,
    /// Now: leases that hold blocks of finished requests.
    pub leases_held: u64,
    /// Offers taken in.
    pub offers: u64,
    /// Loads given to workers.
    pub loads: u64,
    /// Loads that brought everything, on every rank.
    pub loaded: u64,
    /// Loads that did not.
    pub failed: FailedLoads,
    /// Offers released without a read: a full local hit, another connector, a threshold.
    pub released_unread: u64,
    /// Offers whose lease was lost before a read.
    pub lost: u64,
    /// Reports of loads that nobody waits for any more.
    pub late_reports: u64,
    /// Requests whose blocks are or were held for others.
    pub exported: u64,
    /// Reserved leases taken back.
    pub revoked: u64,
    /// Reserved leases that ended by themselves.
    pub spoiled: u64,
    /// Ends of a rank's part of a held lease: every reader had released it.
    pub parts_released: u64,
    /// Likewise: its time was over.
    pub parts_expired: u64,
    /// Likewise: taken back.
    pub parts_revoked: u64,
    /// Transfer parameters that could not be read.
    pub malformed: u64,
    /// Transfer parameters without kvferry's part.
    pub unleased: u64,
    /// Transfer parameters for the other role.
    pub ignored: u64,
    /// Offers whose blocks do not fit ours.
    pub refused: u64,
}

//! What a rank reports after a step.

use std::fmt;

use kvferry_wire::RequestId;
use serde::{Deserialize, Serialize};

use crate::{remote, storage};

/// Why a load did not bring what it was to bring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum LoadFailure {
    /// The peer could not be reached, or was lost.
    Peer,
    /// The lease had ended before the read was over, or the peer does not know it.
    Lease,
    /// The read took too long.
    Stalled,
    /// The peer refused the read, or what it describes does not fit.
    Rejected,
    /// The peer did not confirm the lease in time, or did not say what its blocks' checksums are.
    Unconfirmed,
    /// The bytes that came are not those that the peer holds.
    Corrupt,
    /// The request was aborted.
    Aborted,
    /// A file was missing, too short, or not what it should be.
    Storage,
    /// Something of this process failed.
    Local,
}

impl LoadFailure {
    /// The word for it, in log lines and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Peer => "peer",
            Self::Lease => "lease",
            Self::Stalled => "stalled",
            Self::Rejected => "rejected",
            Self::Unconfirmed => "unconfirmed",
            Self::Corrupt => "corrupt",
            Self::Aborted => "aborted",
            Self::Storage => "storage",
            Self::Local => "local",
        }
    }
}

impl fmt::Display for LoadFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A block that was to be loaded and does not hold what it should.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct FailedBlock {
    /// The cache group.
    pub group: u32,
    /// The block's id in this engine.
    pub block: u32,
}

/// An async load that is over on one rank: nothing writes to its blocks any more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Received {
    /// The request.
    pub request: RequestId,
    /// Why it failed, or nothing.
    pub failure: Option<LoadFailure>,
    /// The blocks that count as not loaded; empty for success.
    pub failed: Vec<FailedBlock>,
}

/// What only the reporting connector's scheduler half understands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReportPart {
    /// Of [`RemotePrefill`](crate::remote).
    Remote(remote::Report),
    /// Of [`SharedStorage`](crate::storage).
    Storage(storage::Report),
    /// Of a MultiConnector: what each child reported, in their order.
    Multi(Vec<WorkerReport>),
}

/// A rank's report.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerReport {
    /// Async loads that are over, each planned one once.
    pub received: Vec<Received>,
    /// Finished requests whose blocks nobody reads any more, each held one once.
    pub sent: Vec<RequestId>,
    /// The rest; `None` for nothing.
    pub part: Option<ReportPart>,
}

impl WorkerReport {
    /// Whether there is nothing in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.received.is_empty() && self.sent.is_empty() && self.part.is_none()
    }
}

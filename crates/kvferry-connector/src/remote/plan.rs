//! What passes between the halves of [`RemotePrefill`](super).

use kvferry_wire::params::Source;
use kvferry_wire::{Epoch, Instance, LeaseId, RequestId};
use serde::{Deserialize, Serialize};

use crate::lease::{End, StepLeases};

/// A lease that a consumer was given.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteLease {
    /// The request here.
    pub request: RequestId,
    /// The lease there, under the producer's own request id.
    pub lease: LeaseId,
    /// Where.
    pub source: Source,
    /// How many readers the lease expects in all, over all ranks of all consumers, per producer rank.
    pub consumers: u32,
    /// How long the lease lives without a renewal, in milliseconds.
    pub duration_ms: u64,
}

/// Blocks of one cache group, there and here, in the same order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupPairs {
    /// The group.
    pub group: u32,
    /// The producer's ids.
    pub remote: Vec<u32>,
    /// Ours; as many.
    pub local: Vec<u32>,
}

/// A load: read, release, report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Load {
    /// The request here.
    pub request: RequestId,
    /// What is read; at least one block.
    pub blocks: Vec<GroupPairs>,
}

/// Orders of one step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The scheduler half, in plans that issue leases.
    pub instance: Option<Instance>,
    /// The lease part: what this engine issues.
    pub leases: StepLeases,
    /// Leases of others to keep alive from now on.
    pub hold: Vec<RemoteLease>,
    /// Held leases to read under, and to release then. Reported as received.
    pub load: Vec<Load>,
    /// Held leases to release without reading; not reported.
    pub release: Vec<RequestId>,
    /// Loads to be broken off. They are reported all the same.
    pub abort: Vec<RequestId>,
}

impl Plan {
    /// Whether it asks for nothing. It says up to where epochs were issued all the same.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let Self {
            // Goes with leases.
            instance: _,
            leases,
            hold,
            load,
            release,
            abort,
        } = self;
        let lists = hold.is_empty() && load.is_empty() && release.is_empty() && abort.is_empty();
        lists && leases.is_empty()
    }
}

/// What a rank tells the scheduler half.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Ends of this rank's parts of our leases.
    pub ended: Vec<(Epoch, End)>,
    /// Held leases that are known to be lost before anything was read.
    pub lost: Vec<RequestId>,
}

//! A request whose blocks another engine holds for it.

use std::time::Instant;

use kvferry_engine::{Peer, PeerId, Transfer, TransferError};
use kvferry_wire::Verdict;

use super::verifying::Verifying;
use crate::contract::{FailedBlock, LoadFailure};
use crate::lease::Ticket;
use crate::remote::{GroupPairs, RemoteLease};

/// One rank's part of the lease.
#[derive(Debug, Default)]
pub(super) struct Part {
    /// It is kept alive under this number.
    pub(super) hold: Option<Ticket>,
    /// It is being released under this number.
    pub(super) release: Option<Ticket>,
    /// The connection that either goes over; `None` while there is none.
    pub(super) peer: Option<PeerId>,
    /// What its release came to; `None` as long as that is not known.
    pub(super) answer: Option<Answer>,
}

/// What became of a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// It was answered.
    Verdict(Verdict),
    /// It was not.
    Nothing,
}

/// How far a request has come.
#[derive(Debug)]
pub(super) enum Phase {
    /// Its lease is kept alive.
    Held,
    /// It is to be read and waits: for the peer, or for other loads to end.
    Waiting { until: Instant },
    /// It is being read.
    Reading(Reading),
    /// What was read is compared with what the producer holds.
    Verifying(Box<Verifying>),
    /// It is released; `reading` if its load is reported when that is confirmed.
    Releasing { reading: bool },
}

/// A read under way.
#[derive(Debug)]
pub(super) struct Reading {
    /// Whom it is read from.
    pub(super) peer: Peer,
    /// One per group; `None` once it has ended.
    pub(super) transfers: Vec<Option<Transfer>>,
    /// The first failure, and what was said of it.
    pub(super) failure: Option<(LoadFailure, String)>,
    /// Bytes that have arrived, in so many runs.
    pub(super) bytes: u64,
    pub(super) operations: u64,
}

impl Reading {
    pub(super) const fn of(peer: Peer) -> Self {
        Self {
            peer,
            transfers: Vec::new(),
            failure: None,
            bytes: 0,
            operations: 0,
        }
    }
}

/// The request.
#[derive(Debug)]
pub(super) struct Borrowed {
    /// The load's number, by which producers know the reader; never used again.
    pub(super) load: u64,
    pub(super) lease: RemoteLease,
    /// By rank of the producer.
    pub(super) parts: Vec<Part>,
    pub(super) phase: Phase,
    /// What is read, once that is asked for.
    pub(super) blocks: Vec<GroupPairs>,
    /// A rank says that the lease is gone.
    pub(super) lost: bool,
    /// The request was given up while it was read.
    pub(super) aborted: bool,
    /// When its last byte had arrived.
    pub(super) quiet_at: Option<Instant>,
}

impl Borrowed {
    pub(super) fn new(load: u64, lease: RemoteLease) -> Self {
        let parts = (0..lease.source.ranks).map(|_| Part::default()).collect();
        Self {
            load,
            lease,
            parts,
            phase: Phase::Held,
            blocks: Vec::new(),
            lost: false,
            aborted: false,
            quiet_at: None,
        }
    }

    /// All blocks that were to be read.
    pub(super) fn failed_blocks(&self) -> Vec<FailedBlock> {
        let of = |group: &GroupPairs| {
            let number = group.group;
            let blocks = group.local.clone();
            blocks.into_iter().map(move |block| FailedBlock {
                group: number,
                block,
            })
        };
        self.blocks.iter().flat_map(of).collect()
    }

    /// Whether a rank is not told what it should be, for lack of a connection.
    pub(super) fn lacks_links(&self) -> bool {
        let mut parts = self.parts.iter();
        match self.phase {
            Phase::Releasing { .. } => {
                parts.any(|part| part.answer.is_none() && part.peer.is_none())
            }
            _ => !self.lost && parts.any(|part| part.hold.is_none()),
        }
    }

    /// Whether its load will be reported, whatever is heard of the lease.
    pub(super) const fn is_reading(&self) -> bool {
        matches!(self.phase, Phase::Reading(_) | Phase::Verifying(_))
    }

    /// Whether every rank's release has come to an end.
    pub(super) fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Releasing { reading: false })
            && self.parts.iter().all(|part| part.answer.is_some())
    }
}

/// What a failed transfer means for its load.
pub(super) fn failure_of(error: &TransferError) -> LoadFailure {
    match error {
        TransferError::Cancelled => LoadFailure::Aborted,
        TransferError::Stalled { .. } => LoadFailure::Stalled,
        TransferError::PeerLost(_) | TransferError::Operation(_) | TransferError::Protocol(_) => {
            LoadFailure::Peer
        }
        TransferError::Rejected { .. } => LoadFailure::Rejected,
        _ => LoadFailure::Local,
    }
}

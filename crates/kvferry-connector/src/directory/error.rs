//! What can go wrong with a directory, for its server, a publishing rank and a client.

use std::fmt;
use std::time::Duration;

use kvferry_wire::{EngineId, Instance, Rank, WireError};
use thiserror::Error;

/// Why a directory could not start.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BindError {
    /// A configured value is outside its range.
    #[error("directory configuration: {field} is {value}, expected {expected}")]
    Config {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What is allowed.
        expected: &'static str,
    },
    /// Somebody listens on the address already.
    #[error(
        "the directory cannot listen on {address}: the address is in use by another process or \
         another directory of this one; choose another port, or port 0 for any free one"
    )]
    InUse {
        /// The address.
        address: String,
    },
    /// The address is none that this host can listen on.
    #[error(
        "the directory cannot listen on {address}: {source}; give an address of this host and a port that this user may listen on"
    )]
    Listen {
        /// The address.
        address: String,
        /// The operating system's answer.
        source: std::io::Error,
    },
    /// A thread or a descriptor could not be had.
    #[error("the directory on {address} cannot start: {step}: {source}")]
    System {
        /// The address.
        address: String,
        /// What was tried.
        step: &'static str,
        /// The operating system's answer.
        source: std::io::Error,
    },
}

/// Why a description was not taken into the directory. The rank's previous entry stays.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PublishError {
    /// The bytes are no valid description.
    #[error("rank {rank} published no valid description: {source}")]
    Invalid {
        /// The publishing rank.
        rank: Rank,
        /// What is wrong with the bytes.
        source: WireError,
    },
    /// The description is another rank's.
    #[error(
        "rank {rank} published the description of rank {described}; publish it under that rank"
    )]
    OtherRank {
        /// The publishing rank.
        rank: Rank,
        /// The rank in the description.
        described: Rank,
    },
    /// The description is another engine's.
    #[error(
        "rank {rank} published a description of engine {described}, but the directory belongs to \
         engine {engine}; give both the same engine id"
    )]
    OtherEngine {
        /// The publishing rank.
        rank: Rank,
        /// The engine in the description.
        described: EngineId,
        /// The directory's engine.
        engine: EngineId,
    },
    /// The description names another scheduler half.
    #[error(
        "rank {rank} published a description with instance {described}, but the directory's \
         instance is {instance}; the rank belongs to an earlier start of the engine, restart it"
    )]
    OtherInstance {
        /// The publishing rank.
        rank: Rank,
        /// The instance in the description.
        described: Instance,
        /// The directory's instance.
        instance: Instance,
    },
    /// The directory is full.
    #[error("rank {rank} cannot be published: {max} ranks are, and a directory holds no more")]
    TooManyRanks {
        /// The publishing rank.
        rank: Rank,
        /// The limit.
        max: usize,
    },
}

/// What a client was doing when its time ran out or its connection failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Stage {
    /// Looking up the host's name.
    Resolving,
    /// Connecting.
    Connecting,
    /// Sending the request.
    Sending,
    /// Receiving the reply.
    Receiving,
    /// Decoding the descriptions in the reply.
    Decoding,
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Resolving => "looking up the name",
            Self::Connecting => "connecting",
            Self::Sending => "sending the request",
            Self::Receiving => "waiting for the reply",
            Self::Decoding => "decoding the reply",
        })
    }
}

/// Why [`fetch`](super::fetch) has no listing.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DirectoryError {
    /// The request cannot be written, for example because it names too many ranks.
    #[error("the request to the directory at {address} is not valid: {source}")]
    Request {
        /// The directory's address.
        address: String,
        /// What is wrong with it.
        source: WireError,
    },
    /// The address has no `host:port` form, or its name is unknown.
    #[error("the directory's address {address} is not usable: {reason}; expected host:port")]
    Resolve {
        /// The address as given.
        address: String,
        /// Why not.
        reason: String,
    },
    /// Nobody listens there.
    #[error(
        "no directory at {address}: the connection was refused; is the producer running, and is that its \
         directory's port?"
    )]
    ConnectionRefused {
        /// The directory's address.
        address: String,
    },
    /// The whole call's deadline passed.
    #[error(
        "the directory at {address} did not answer within {deadline:?} ({stage}); check that the \
         address is a kvferry directory's, that a firewall lets the port through and that the \
         producer is not stopped"
    )]
    TimedOut {
        /// The directory's address.
        address: String,
        /// How far the call got.
        stage: Stage,
        /// The deadline that the caller set.
        deadline: Duration,
    },
    /// The connection ended before the reply did.
    #[error(
        "{address} closed the connection without a complete reply: it is not a kvferry directory, \
         or one that is overloaded or shutting down; check the address, then try again"
    )]
    Closed {
        /// The directory's address.
        address: String,
    },
    /// Any other failure of the network.
    #[error("the directory at {address} cannot be reached ({stage}): {source}")]
    Io {
        /// The directory's address.
        address: String,
        /// How far the call got.
        stage: Stage,
        /// The operating system's answer.
        source: std::io::Error,
    },
    /// The answer is no frame of a directory.
    #[error(
        "{address} answered with something that is not a kvferry directory's reply ({source}); \
         check the port"
    )]
    NotADirectory {
        /// The address.
        address: String,
        /// What is wrong with the frame's header.
        source: WireError,
    },
    /// The other side runs a kvferry whose formats this one does not read.
    #[error(
        "the directory at {address} belongs to an incompatible version of kvferry: {source}; run \
         the same version on both sides"
    )]
    Version {
        /// The directory's address.
        address: String,
        /// The versions.
        source: WireError,
    },
    /// The directory refused the request.
    #[error("the directory at {address} refused the request: {reason}")]
    Refused {
        /// The directory's address.
        address: String,
        /// The directory's words.
        reason: String,
    },
    /// The reply's frame is right and its content is not.
    #[error(
        "the directory at {address} sent a reply that is not valid: {reason}; this is a bug in it"
    )]
    Malformed {
        /// The directory's address.
        address: String,
        /// What is wrong.
        reason: String,
    },
    /// Ranks that were asked for are not published.
    #[error(
        "the directory at {address} has no entry for {}; published of those asked for: {}. Wait \
         until every rank of the producer has started, or check which ranks it has",
        list(.missing),
        list(.present)
    )]
    MissingRanks {
        /// The directory's address.
        address: String,
        /// Asked for and not there, in order.
        missing: Vec<Rank>,
        /// Asked for and there, in order.
        present: Vec<Rank>,
    },
}

impl DirectoryError {
    /// Whether the same call may succeed later without anybody changing anything: the producer is
    /// starting, restarting or overloaded.
    #[must_use]
    pub const fn is_transient(&self) -> bool {
        matches!(
            self,
            Self::ConnectionRefused { .. }
                | Self::TimedOut { .. }
                | Self::Closed { .. }
                | Self::MissingRanks { .. }
        )
    }
}

/// At most eight ranks as text, so that an error stays one line.
fn list(ranks: &[Rank]) -> String {
    const SHOWN: usize = 8;
    if ranks.is_empty() {
        return "none".to_owned();
    }
    let mut text = ranks
        .iter()
        .take(SHOWN)
        .map(Rank::to_string)
        .collect::<Vec<_>>()
        .join(", ");
    if let Some(more @ 1..) = ranks.len().checked_sub(SHOWN) {
        text.push_str(&format!(" and {more} more"));
    }
    text
}

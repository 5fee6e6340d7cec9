//! What can go wrong, in three kinds that are never confused: this request
//! ([`ErrorClass::Local`]), this connection ([`ErrorClass::Peer`]), this reference
//! ([`ErrorClass::Rejected`]). Only the second closes an endpoint.

use std::any::Any;
use std::fmt;
use std::time::Duration;

use kvferry_wire::{Incarnation, MemoryKind, RejectCode, WireError};
use thiserror::Error;

use crate::lane::Lane;
use crate::memory::MemoryError;
use crate::memory::memlock::PinnedMemory;

/// Whom an error concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorClass {
    /// This request only; the peer and its other requests are fine.
    Local,
    /// The peer or the way to it. A lost peer takes all its transfers along; a single operation or
    /// deadline that failed may be the first sign of it.
    Peer,
    /// What was asked for: the peer is fine and refuses (lease, bounds, version).
    Rejected,
}

/// A failure that the fabric reports, in UCX's words where it is UCX.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{call} failed: {status}")]
pub struct FabricError {
    /// The call that failed, for example `ucp_ep_create`.
    pub call: &'static str,
    /// The status as text, with the transports in force where that explains it.
    pub status: String,
}

impl FabricError {
    pub(crate) fn new(call: &'static str, status: impl Into<String>) -> Self {
        Self {
            call,
            status: status.into(),
        }
    }
}

/// What a panic said, as far as it said it in words.
///
/// ```
/// let panic = std::panic::catch_unwind(|| panic!("no {}", "reason")).unwrap_err();
/// assert_eq!(kvferry_engine::panic_message(&*panic), "no reason");
/// ```
#[must_use]
pub fn panic_message(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("a panic without words")
}

/// Why an engine did not start or does not answer.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The fabric could not be set up.
    #[error("the engine cannot start: {0}")]
    Fabric(#[from] FabricError),
    /// A thread or a descriptor could not be had.
    #[error("the engine cannot start: {step}: {source}")]
    System {
        /// What was tried.
        step: &'static str,
        /// The operating system's answer.
        source: std::io::Error,
    },
    /// A configured value is outside its range.
    #[error("configuration: {field} is {value}, expected {expected}")]
    Config {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What is allowed.
        expected: &'static str,
    },
    /// The engine was shut down.
    #[error("the engine has been shut down")]
    Stopped,
    /// A part of the engine, or a service, panicked, and the progress thread has ended.
    #[error("the engine's progress thread panicked: {reason}; start the process anew")]
    Panicked {
        /// What the panic said.
        reason: String,
    },
    /// The progress thread did not answer in time.
    #[error(
        "the engine did not answer {what} within {waited:?}; a service may be blocking its thread"
    )]
    NoAnswer {
        /// What was asked.
        what: &'static str,
        /// How long was waited.
        waited: Duration,
    },
    /// The handle was carried over a fork.
    #[error(
        "this engine belongs to process {owner}, this is {here}: UCX does not survive fork; start a new engine"
    )]
    Forked {
        /// The process that started the engine.
        owner: u32,
        /// The process that used it.
        here: u32,
    },
    /// A description or id could not be built.
    #[error(transparent)]
    Wire(#[from] WireError),
}

/// Why a region was not registered. Carries address, length, kind and cause.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// Part of the range is registered already.
    #[error(
        "{bytes} bytes of {kind} memory at {address:#x} overlap the registered {other_bytes} bytes at \
         {other_address:#x}; register a range once, whole"
    )]
    Overlap {
        /// Start of the new range.
        address: u64,
        /// Its length.
        bytes: u64,
        /// Its kind.
        kind: MemoryKind,
        /// Start of the registered range.
        other_address: u64,
        /// Its length.
        other_bytes: u64,
    },
    /// More regions than a description can hold.
    #[error(
        "{count} regions are registered already, at most {max} can be described; register fewer, larger ranges"
    )]
    TooMany {
        /// Regions there are.
        count: usize,
        /// The cap.
        max: usize,
    },
    /// Some page of the range is not mapped in this process.
    #[error(
        "{bytes} bytes of {kind} memory at {address:#x} cannot be registered: not all of it is mapped \
         ({status}); check address and length"
    )]
    NotMapped {
        /// Start of the range.
        address: u64,
        /// Its length.
        bytes: u64,
        /// Its kind.
        kind: MemoryKind,
        /// The operating system's words.
        status: String,
    },
    /// The range would be registered in more chunks than a description can hold keys for.
    #[error(
        "{bytes} bytes of {kind} memory at {address:#x} cannot be registered: {chunks} chunks of \
         {chunk_bytes} bytes, beside {others} of other regions, are more than the {max} that can be \
         described; raise max_registration_bytes"
    )]
    TooManyChunks {
        /// Start of the range.
        address: u64,
        /// Its length.
        bytes: u64,
        /// Its kind.
        kind: MemoryKind,
        /// Length of a chunk: the limit for one registration.
        chunk_bytes: u64,
        /// Chunks of the range.
        chunks: u64,
        /// Chunks that are registered already.
        others: u64,
        /// The cap.
        max: u64,
    },
    /// The range would be pinned, and the system's limit does not allow that. Nothing was tried.
    #[error("{bytes} bytes of {kind} memory at {address:#x} cannot be registered: {pinned}")]
    Memlock {
        /// Start of the range.
        address: u64,
        /// Its length.
        bytes: u64,
        /// Its kind.
        kind: MemoryKind,
        /// Limit and need.
        pinned: PinnedMemory,
    },
    /// The fabric refused.
    #[error(
        "{bytes} bytes of {kind} memory at {address:#x} cannot be registered: {}{source}{}",
        Prefix(chunk),
        Suffix(pinned)
    )]
    Fabric {
        /// Start of the range.
        address: u64,
        /// Its length.
        bytes: u64,
        /// Its kind.
        kind: MemoryKind,
        /// The chunk that was refused, where there are several. The others were taken back.
        chunk: Option<Box<ChunkOfRegion>>,
        /// The fabric's words, with UCX's status.
        source: FabricError,
        /// Limit and need, where the fabric pins memory and a limit holds.
        pinned: Option<PinnedMemory>,
    },
    /// The engine did not take the request.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// A part of a region that is registered by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("chunk {index} of {count} ({bytes} bytes at {address:#x})")]
#[non_exhaustive]
pub struct ChunkOfRegion {
    /// Its number, from 0.
    pub index: u64,
    /// Chunks of the region.
    pub count: u64,
    /// Start of the chunk.
    pub address: u64,
    /// Its length.
    pub bytes: u64,
}

struct Prefix<'a>(&'a Option<Box<ChunkOfRegion>>);

impl fmt::Display for Prefix<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|chunk| write!(f, "{chunk}: "))
    }
}

struct Suffix<'a>(&'a Option<PinnedMemory>);

impl fmt::Display for Suffix<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|pinned| {
            write!(
                f,
                "; memory is pinned here, by every device on its own: {pinned}"
            )
        })
    }
}

/// Why a table was not added.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TableError {
    /// The table does not fit its region, or has a size of zero.
    #[error("the table is refused: {0}")]
    Refused(#[from] WireError),
    /// Too many tables for one description.
    #[error("{count} tables exist already, at most {max} can be described")]
    TooMany {
        /// Tables there are.
        count: usize,
        /// The cap.
        max: usize,
    },
    /// The region belongs to another engine.
    #[error("region {region} belongs to another engine")]
    ForeignRegion {
        /// The region's number in its own engine.
        region: u32,
    },
    /// The engine was shut down, or the handle was carried over a fork.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// Why a region is still registered.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DeregisterError {
    /// Operations or peers still use it. It is given up when they are done.
    #[error(
        "region {region} is busy: {operations} operations{} still use it after {waited:?}",
        .peers.iter().map(|peer| format!(", peer {peer}")).collect::<String>()
    )]
    Busy {
        /// The region's number.
        region: u32,
        /// Operations in flight.
        operations: u64,
        /// Peers that have not said that they let go of it: engine id and rank.
        peers: Vec<String>,
        /// How long was waited.
        waited: Duration,
    },
    /// The engine did not take the request.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// Why a peer was not connected.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// No endpoint could be made.
    #[error("peer {peer} cannot be reached over any of {tried}: {source}")]
    Unreachable {
        /// The peer's engine id.
        peer: String,
        /// The transports and devices of this host.
        tried: String,
        /// UCX's words.
        source: FabricError,
    },
    /// The peer did not answer the greeting in time.
    #[error("peer {peer} did not answer the greeting within {waited:?}, with {tried}")]
    NoAnswer {
        /// The peer's engine id.
        peer: String,
        /// What carried the greeting: transports and devices.
        tried: String,
        /// How long was waited.
        waited: Duration,
    },
    /// An attempt failed a moment ago; this one was not made. What needs the peer is better done
    /// without it now.
    #[error("peer {peer} is not tried for another {retry_in:?}: {last}")]
    BackingOff {
        /// The peer's engine id and rank.
        peer: String,
        /// When an attempt is made again.
        retry_in: Duration,
        /// Why the last attempt failed.
        last: Box<ConnectError>,
    },
    /// The peer, or whoever sits at its address, refused the greeting.
    #[error("peer {peer} refused the greeting: {reason}")]
    Refused {
        /// The peer's engine id.
        peer: String,
        /// Its reason.
        reason: String,
    },
    /// The connection broke while greeting.
    #[error("the connection to peer {peer} broke during the greeting, with {tried}: {reason}")]
    Lost {
        /// The peer's engine id.
        peer: String,
        /// What carried the greeting: transports and devices.
        tried: String,
        /// What broke.
        reason: String,
    },
    /// The lane that was asked for cannot be used with this peer.
    #[error("lane {lane} cannot be used with peer {peer}: {reason}")]
    LaneUnavailable {
        /// The peer's engine id.
        peer: String,
        /// The lane.
        lane: Lane,
        /// Why not.
        reason: String,
    },
    /// `require_rdma` is set, and the peer's blocks would not come by a real GET.
    #[error(
        "peer {peer} has no RDMA, which require_rdma asks for: {reason}; found here: {found}; to this \
         peer: {transports}"
    )]
    NoRdma {
        /// The peer's engine id.
        peer: String,
        /// Why not.
        reason: String,
        /// The transports and devices of this host.
        found: String,
        /// What the connection to the peer uses.
        transports: String,
    },
    /// A description of this very engine, of one that differs in what must be equal, or something
    /// else that makes no sense.
    #[error("the description is refused: {reason}")]
    BadDescription {
        /// What is wrong.
        reason: String,
    },
    /// The engine did not take the request.
    #[error("{0}")]
    Engine(String),
}

/// Why a read was not started.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The two tables describe different blocks.
    #[error("the tables differ in {field}: {ours} here, {theirs} at the peer")]
    Mismatch {
        /// The field.
        field: &'static str,
        /// Our value.
        ours: String,
        /// The peer's value.
        theirs: String,
    },
    /// A local block id is out of range.
    #[error("local block {block} is out of range: the table has {count} blocks")]
    LocalBlock {
        /// The id.
        block: u32,
        /// Blocks there are.
        count: u32,
    },
    /// A remote block id is out of range.
    #[error("remote block {block} is out of range: the peer's table has {count} blocks")]
    RemoteBlock {
        /// The id.
        block: u32,
        /// Blocks there are.
        count: u32,
    },
    /// More blocks or tables than one request can name.
    #[error(
        "the read names {blocks} runs of blocks in {tables} tables, which is more than one request holds; split it"
    )]
    TooLarge {
        /// Runs of block ids.
        blocks: usize,
        /// Tables.
        tables: usize,
    },
    /// The remote table was described by another life of the peer.
    #[error(
        "the remote table belongs to incarnation {table}, the peer is {peer}; take the table from this peer"
    )]
    StaleTable {
        /// Who described the table.
        table: Incarnation,
        /// The connected peer.
        peer: Incarnation,
    },
    /// The peer has given up the region of a remote table.
    #[error(
        "the peer has withdrawn region {region} with its table {table}; fetch its description again"
    )]
    Withdrawn {
        /// The peer's number for the region.
        region: u32,
        /// The peer's number for the table.
        table: u32,
    },
    /// A local table belongs to another engine or its region is gone.
    #[error("local table {table} belongs to another engine or its region was deregistered")]
    LocalTable {
        /// The table's number.
        table: u32,
    },
    /// A destination is not host memory and the lane copies with the processor.
    #[error("lane {lane} cannot write {kind} memory")]
    Kind {
        /// The lane.
        lane: Lane,
        /// The destination's kind.
        kind: MemoryKind,
    },
    /// The peer is gone.
    #[error("the peer is gone: {0}")]
    PeerGone(String),
    /// The engine was shut down, or the handle was carried over a fork.
    #[error("{0}")]
    Engine(String),
}

impl ReadError {
    /// Whom the failure concerns.
    #[must_use]
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::StaleTable { .. } | Self::Withdrawn { .. } | Self::RemoteBlock { .. } => {
                ErrorClass::Rejected
            }
            Self::PeerGone(_) => ErrorClass::Peer,
            Self::Mismatch { .. }
            | Self::LocalBlock { .. }
            | Self::TooLarge { .. }
            | Self::LocalTable { .. }
            | Self::Kind { .. }
            | Self::Engine(_) => ErrorClass::Local,
        }
    }
}

/// Why there are no checksums of blocks.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ChecksumError {
    /// A block id is out of range.
    #[error("block {block} is out of range: the table has {count} blocks")]
    Block {
        /// The id.
        block: u32,
        /// Blocks there are.
        count: u32,
    },
    /// The processor cannot read the memory.
    #[error("the blocks of table {table} are in {kind} memory, which the processor cannot read")]
    NotHost {
        /// The table's number.
        table: u32,
        /// The kind of its memory.
        kind: MemoryKind,
    },
    /// A table belongs to another engine or its region is gone.
    #[error("table {table} belongs to another engine or its region was deregistered")]
    LocalTable {
        /// The table's number.
        table: u32,
    },
    /// The memory cannot be read.
    #[error("{0}")]
    Memory(String),
    /// The engine was shut down, or the handle was carried over a fork.
    #[error("{0}")]
    Engine(String),
}

impl From<MemoryError> for ChecksumError {
    fn from(error: MemoryError) -> Self {
        Self::Memory(error.to_string())
    }
}

impl From<EngineError> for ChecksumError {
    fn from(error: EngineError) -> Self {
        Self::Engine(error.to_string())
    }
}

/// Why a transfer failed.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum TransferError {
    /// The caller cancelled it.
    #[error("the transfer was cancelled")]
    Cancelled,
    /// The engine shut down.
    #[error("the engine was shut down during the transfer")]
    Stopped,
    /// A local copy failed.
    #[error("a local copy failed: {0}")]
    Memory(String),
    /// The request could not be written.
    #[error("the request could not be written: {0}")]
    Request(String),
    /// The deadline passed.
    #[error("the peer stalled: {done} of {total} bytes after {waited:?}")]
    Stalled {
        /// Bytes that had arrived.
        done: u64,
        /// Bytes asked for.
        total: u64,
        /// The time that was given.
        waited: Duration,
    },
    /// The connection broke.
    #[error("the peer was lost: {0}")]
    PeerLost(String),
    /// One of the transfer's operations failed in the fabric.
    #[error("an operation failed: {0}")]
    Operation(FabricError),
    /// The peer broke the protocol.
    #[error("the peer broke the protocol: {0}")]
    Protocol(String),
    /// The peer refused the read.
    #[error("the peer refused the read: {code} ({detail})")]
    Rejected {
        /// Its reason.
        code: RejectCode,
        /// The id it objects to.
        detail: u64,
    },
}

impl TransferError {
    /// Whom the failure concerns.
    #[must_use]
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Cancelled | Self::Stopped | Self::Memory(_) | Self::Request(_) => {
                ErrorClass::Local
            }
            Self::Stalled { .. } | Self::PeerLost(_) | Self::Operation(_) | Self::Protocol(_) => {
                ErrorClass::Peer
            }
            Self::Rejected { .. } => ErrorClass::Rejected,
        }
    }
}

impl From<MemoryError> for TransferError {
    fn from(error: MemoryError) -> Self {
        Self::Memory(error.to_string())
    }
}

/// Why a message was not sent.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SendError {
    /// Larger than a message may be, or empty.
    #[error("a message of {bytes} bytes cannot be sent: 1 to {max} are allowed")]
    Size {
        /// Its size.
        bytes: usize,
        /// The cap.
        max: usize,
    },
    /// The peer is gone.
    #[error("the peer is gone: {0}")]
    PeerGone(String),
    /// The engine was shut down, or the handle was carried over a fork.
    #[error("{0}")]
    Engine(String),
}

//! The seam between the progress loop and what moves bytes.
//!
//! A [`Fabric`] connects, sends, posts reads, progresses and disconnects; it knows nothing of peers,
//! transfers or lanes. [`UcxFabric`](crate::UcxFabric) is the product, [`LoopbackFabric`] copies
//! within one process. [`FaultFabric`] injects faults into either.
//!
//! # Contract for whoever adds one
//! * One thread owns a fabric and makes every call; a fabric need not be `Send`.
//! * Nothing blocks. [`Fabric::progress`] reports through the [`Sink`], which never calls back into
//!   the fabric (the borrow checker sees to that).
//! * Every [`Posted::Pending`] is followed by exactly one report, also when the endpoint is closed;
//!   [`Posted::Done`] by none. An error is reported once and nothing follows it.
//! * A local range given to [`Fabric::read`] is not touched after the report of its operation.
//! * After [`Fabric::close`] the endpoint's operations end, then [`Sink::closed`] comes, once. Copies are
//!   not broken off: they end by themselves.
//! * Segments arrive whole, unaltered, and at most once each; their order is not promised.

mod copiers;
mod fault;
mod loopback;

use std::num::NonZeroUsize;
use std::os::fd::BorrowedFd;
use std::time::Instant;

use kvferry_wire::{Addresses, UcxVersion};

pub use crate::error::FabricError;
pub use crate::memory::CopyBatch;
use crate::memory::{CopyError, CopyStats, MemoryRegion};
use crate::warning::StartWarning;
pub(crate) use copiers::Copiers;
pub use fault::{Fault, FaultControl, FaultFabric, FaultRates};
pub use loopback::{LoopbackFabric, LoopbackNetwork};

/// An endpoint's number, chosen by the caller and never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EndpointId(pub u64);

/// A read's number, chosen by the caller and reported back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReadToken(pub u64);

/// A peer's key to one of its regions, imported for one endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KeyId(pub u64);

/// A registered region, as the fabric numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RegionHandle(pub u64);

/// Whether one-sided reads exist: in a fabric, or to one peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NativeReads {
    /// Every byte of a read is moved without the peer's processor.
    Real,
    /// Reads work, by messages that the peer's thread answers.
    Emulated,
    /// There are none, for this reason.
    Unavailable(String),
}

/// What a fabric can do.
#[derive(Clone, Debug)]
pub struct Capabilities {
    /// A name for logs: `ucx` or `loopback`.
    pub name: &'static str,
    /// The UCX that is loaded, if the fabric is UCX.
    pub ucx: Option<UcxVersion>,
    /// Largest segment that fits one transport fragment, header included, in bytes.
    pub max_segment_bytes: usize,
    /// One-sided reads, at best; what an endpoint got is said by [`Fabric::native_reads`].
    pub native: NativeReads,
    /// The transports and devices that were found here, for errors and logs.
    pub transports: String,
    /// Whether a loopback device is among those.
    pub loopback: bool,
    /// The longest range that can be registered at once, in bytes; longer regions are registered in
    /// chunks. `None` where no limit is known.
    pub max_registration_bytes: Option<u64>,
    /// Whether a registration of host memory pins it, and so counts against `RLIMIT_MEMLOCK`.
    pub pins_memory: bool,
    /// What was found at the start and is not as it should be.
    pub warnings: Vec<StartWarning>,
}

/// What became of a post.
#[derive(Debug)]
pub enum Posted<T> {
    /// It has completed; nothing is reported later.
    Done(T),
    /// It goes on; a report follows.
    Pending,
}

/// A buffer that holds one outgoing segment.
#[derive(Debug)]
pub struct SendBuffer {
    pub(crate) bytes: Box<[u8]>,
    pub(crate) filled: usize,
}

impl SendBuffer {
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            bytes: vec![0; capacity].into_boxed_slice(),
            filled: 0,
        }
    }

    /// A buffer that holds this segment, for tests of fabrics and of peers.
    #[must_use]
    pub fn holding(segment: &[u8]) -> Self {
        Self {
            bytes: segment.into(),
            filled: segment.len(),
        }
    }

    /// The segment.
    #[must_use]
    pub fn segment(&self) -> &[u8] {
        &self.bytes[..self.filled]
    }
}

/// One one-sided read.
#[derive(Debug)]
pub struct ReadOperation<'a> {
    /// The peer's key.
    pub key: KeyId,
    /// Address in the peer's process.
    pub remote_address: u64,
    /// Where the bytes go.
    pub local: &'a MemoryRegion,
    /// Our registration of it, or of the chunk that all bytes lie in.
    pub local_handle: RegionHandle,
    /// Offset in `local`.
    pub local_offset: u64,
    /// How many bytes.
    pub bytes: u64,
}

/// How a batch of copies has ended.
#[derive(Debug)]
pub struct CopyEnd {
    pub(crate) batch: Box<CopyBatch>,
    pub(crate) result: Result<CopyStats, CopyError>,
}

/// A registration's result.
#[derive(Debug)]
pub struct Registered {
    /// The fabric's number for it.
    pub handle: RegionHandle,
    /// The packed key that peers need for one-sided reads, if there are any.
    pub key: Option<Vec<u8>>,
}

/// Where a fabric's reports go, during [`Fabric::progress`].
pub trait Sink {
    /// A segment has arrived. The bytes are valid during the call only.
    fn segment(&mut self, bytes: &[u8]);
    /// A segment has been sent, or will never be.
    fn sent(&mut self, endpoint: EndpointId, buffer: SendBuffer, result: Result<(), FabricError>);
    /// A read has ended.
    fn read_done(&mut self, token: ReadToken, result: Result<(), FabricError>);
    /// A batch of copies has ended.
    fn copy_done(&mut self, token: ReadToken, end: CopyEnd);
    /// An endpoint has failed; it must still be closed.
    fn endpoint_failed(&mut self, endpoint: EndpointId, error: FabricError);
    /// An endpoint is closed and every operation on it has been reported.
    fn closed(&mut self, endpoint: EndpointId);
    /// Something arrived that no kvferry sends.
    fn protocol_error(&mut self, what: &'static str);
}

/// Whether the progress thread may sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Armed {
    /// Nothing is pending; the event descriptors will say when something is.
    Idle,
    /// Something came up: progress again.
    Busy,
}

/// What moves bytes. See the module's contract.
pub trait Fabric {
    /// What this fabric can do; constant over its life.
    fn capabilities(&self) -> &Capabilities;
    /// Where peers reach this engine.
    fn addresses(&self) -> Addresses;
    /// Registers a region, or a chunk of one, of at most `max_registration_bytes`.
    ///
    /// # Errors
    /// The fabric's own words; nothing is registered then.
    fn register(&mut self, memory: &MemoryRegion) -> Result<Registered, FabricError>;
    /// Ends a registration. No operation uses it any more.
    fn deregister(&mut self, region: RegionHandle);
    /// Makes an endpoint. Whether the peer is there shows later.
    ///
    /// # Errors
    /// If the addresses are unusable; there is no endpoint then.
    fn connect(&mut self, endpoint: EndpointId, to: &Addresses) -> Result<(), FabricError>;
    /// What the endpoint got for one-sided reads. Where it is `Unavailable`, no key can be imported.
    fn native_reads(&self, endpoint: EndpointId) -> NativeReads;
    /// What carries the endpoint's messages and data, for logs.
    fn transports(&self, endpoint: EndpointId) -> String;
    /// Sends a segment.
    ///
    /// # Errors
    /// The buffer comes back with the error.
    fn send(
        &mut self,
        endpoint: EndpointId,
        buffer: SendBuffer,
    ) -> Result<Posted<SendBuffer>, (SendBuffer, FabricError)>;
    /// Imports a peer's key for use on one endpoint; it is given up with the endpoint.
    ///
    /// # Errors
    /// If the endpoint has no one-sided reads or the key is unreadable.
    fn import_key(&mut self, endpoint: EndpointId, key: &[u8]) -> Result<KeyId, FabricError>;
    /// Gives up a key before its endpoint ends. No operation uses it any more; a key of another
    /// endpoint, or one that was given up, is left alone.
    fn forget_key(&mut self, endpoint: EndpointId, key: KeyId);
    /// Posts a one-sided read.
    ///
    /// # Errors
    /// Nothing was posted then.
    fn read(
        &mut self,
        endpoint: EndpointId,
        token: ReadToken,
        operation: &ReadOperation<'_>,
    ) -> Result<Posted<()>, FabricError>;
    /// Hands a batch of copies out of the peer's memory on this host to the copy threads. A report
    /// follows, with the batch.
    ///
    /// # Errors
    /// The batch comes back with the error; nothing of it is copied.
    fn copy(
        &mut self,
        endpoint: EndpointId,
        token: ReadToken,
        batch: Box<CopyBatch>,
    ) -> Result<(), (Box<CopyBatch>, FabricError)>;
    /// How many copy threads there are to be; before the first batch.
    fn set_copy_threads(&mut self, threads: NonZeroUsize);
    /// Destroys what carries one-sided reads and makes it anew, because a closed endpoint's reads did
    /// not end. Every open endpoint with a data side fails; [`Fabric::addresses`] may be others
    /// afterwards.
    ///
    /// # Errors
    /// If it cannot be made anew; there are no one-sided reads then.
    fn reset(&mut self, sink: &mut dyn Sink) -> Result<(), FabricError>;
    /// Closes an endpoint at once, ending its operations with an error.
    fn close(&mut self, endpoint: EndpointId);
    /// Moves things on; true if anything happened.
    fn progress(&mut self, sink: &mut dyn Sink) -> bool;
    /// Prepares for sleep.
    fn arm(&mut self) -> Armed;
    /// Descriptors that become readable when there is something to progress: at most one per context
    /// and one of the copy threads. An array, because the progress thread asks before every sleep.
    fn event_fds(&self) -> [Option<BorrowedFd<'_>>; 3];
    /// Gives everything up, waiting for open operations until `deadline`. False if copies are still
    /// under way, which may still write.
    fn shutdown(&mut self, sink: &mut dyn Sink, deadline: Instant) -> bool;
}

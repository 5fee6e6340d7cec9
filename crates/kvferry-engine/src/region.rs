//! Registered regions: what the engine, its tables and its operations share.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use kvferry_wire::RegionDescription;

use crate::chunks::Chunks;
use crate::error::DeregisterError;
use crate::fabric::{RegionHandle, Registered};
use crate::memory::MemoryRegion;
use crate::shared::Shared;

/// A region as the progress thread and operations see it.
pub(crate) struct RegionInner {
    pub(crate) id: u32,
    pub(crate) memory: MemoryRegion,
    pub(crate) chunks: Chunks,
    /// One per chunk.
    pub(crate) handles: Vec<RegionHandle>,
    /// One per chunk, or none without one-sided reads.
    keys: Vec<Vec<u8>>,
    /// Operations that may touch the memory; the region stays registered until this is zero.
    operations: AtomicU64,
    /// Whether a description has named it. What nobody was told of, nobody holds.
    described: AtomicBool,
}

impl RegionInner {
    /// `registered` has one registration for each chunk, in their order.
    pub(crate) fn new(
        id: u32,
        memory: MemoryRegion,
        chunks: Chunks,
        registered: Vec<Registered>,
    ) -> Self {
        let handles = registered.iter().map(|chunk| chunk.handle).collect();
        // A region without one of them cannot be read, so the others are of no use.
        let keys: Option<Vec<_>> = registered.into_iter().map(|chunk| chunk.key).collect();
        Self {
            id,
            memory,
            chunks,
            handles,
            keys: keys.unwrap_or_default(),
            operations: AtomicU64::new(0),
            described: AtomicBool::new(false),
        }
    }

    /// The registration of the chunk that a byte lies in.
    pub(crate) fn handle_at(&self, offset: u64) -> Option<RegionHandle> {
        let index = usize::try_from(self.chunks.index_of(offset)).ok()?;
        self.handles.get(index).copied()
    }

    pub(crate) fn operations(&self) -> u64 {
        self.operations.load(Ordering::Acquire)
    }

    pub(crate) fn is_described(&self) -> bool {
        self.described.load(Ordering::Acquire)
    }

    /// What peers are told. The caller has the catalog locked, so that the region is either
    /// described before it is given up, or is in no description any more.
    pub(crate) fn describe(&self) -> RegionDescription {
        self.described.store(true, Ordering::Release);
        RegionDescription {
            id: self.id,
            base: self.memory.address(),
            bytes: self.memory.bytes(),
            kind: self.memory.kind(),
            chunk_bytes: self.chunks.chunk_bytes(),
            keys: self.keys.clone(),
        }
    }
}

/// Keeps a region registered while an operation uses it.
pub(crate) struct RegionHold(Arc<RegionInner>);

impl RegionHold {
    pub(crate) fn new(region: &Arc<RegionInner>) -> Self {
        region.operations.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(region))
    }
}

impl std::ops::Deref for RegionHold {
    type Target = RegionInner;
    fn deref(&self) -> &RegionInner {
        &self.0
    }
}

impl Drop for RegionHold {
    fn drop(&mut self) {
        self.0.operations.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A registered region.
///
/// Registering the same range again gives another `Region` over the same registration; the range is
/// given up when the last of them is dropped or deregistered, the last operation on it has ended and
/// every peer has let go of it.
/// Dropping never blocks: a region in use is left to the progress thread and counted in
/// [`quarantined_regions`](crate::CounterSnapshot::quarantined_regions).
pub struct Region {
    pub(crate) inner: Arc<RegionInner>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) released: bool,
}

impl Region {
    /// The region's number, by which tables and peers name it.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.inner.id
    }

    /// The memory itself.
    #[must_use]
    pub fn memory(&self) -> &MemoryRegion {
        &self.inner.memory
    }

    /// Registrations that the region takes: more than one where its length is above the limit for one.
    #[must_use]
    pub fn chunks(&self) -> u64 {
        self.inner.chunks.count()
    }

    /// Operations that use the region now.
    #[must_use]
    pub fn operations(&self) -> u64 {
        self.inner.operations()
    }

    /// Gives the region up and waits until nothing uses it. Its tables are withdrawn first, so that
    /// no new read starts; then peers that may know it are asked to let go, and one that does not
    /// within `withdraw_timeout` of the configuration is disconnected. After `Ok` nobody touches
    /// the memory any more.
    ///
    /// # Errors
    /// [`DeregisterError::Busy`] if operations or peers still use it after `timeout`; it is then
    /// given up when they are done ([`quarantined_regions`](crate::CounterSnapshot::quarantined_regions)
    /// counts it until then). [`DeregisterError::Engine`] if the engine does not answer.
    pub fn deregister(mut self, timeout: Duration) -> Result<(), DeregisterError> {
        self.released = true;
        self.shared.release_region(&self.inner, Some(timeout))
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if !self.released {
            // Without a timeout nothing is waited for, and a stopped engine holds nothing.
            let _ = self.shared.release_region(&self.inner, None);
        }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "region {}: {:?}", self.inner.id, self.inner.memory)
    }
}

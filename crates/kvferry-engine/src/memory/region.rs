//! A range of memory and what keeps it alive.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use kvferry_wire::MemoryKind;
use thiserror::Error;

use super::pool::HostPool;

/// Why a range of memory cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// A region or pool of zero bytes.
    #[error("a memory region of 0 bytes was asked for at {address:#x}; give at least 1 byte")]
    Empty {
        /// Where it would have started.
        address: u64,
    },
    /// The range leaves the address space.
    #[error("{bytes} bytes at {address:#x} do not fit the address space; check the length")]
    Overflow {
        /// Start of the range.
        address: u64,
        /// Its length.
        bytes: u64,
    },
    /// An access reaches outside a region.
    #[error("{bytes} bytes at offset {offset} reach outside a region of {region_bytes} bytes")]
    OutOfBounds {
        /// Offset of the access.
        offset: u64,
        /// Length of the access.
        bytes: u64,
        /// Length of the region.
        region_bytes: u64,
    },
    /// The region is not host memory, so the processor cannot copy it.
    #[error("a region of {kind} memory cannot be copied by the processor")]
    NotHost {
        /// The kind it has.
        kind: MemoryKind,
    },
    /// A pool that is larger than the memory there is.
    #[error(
        "a host pool of {bytes} bytes was asked for, {available} bytes of memory are available; ask for less"
    )]
    NoMemory {
        /// Size of the pool.
        bytes: u64,
        /// What the machine or the control group has left.
        available: u64,
    },
    /// A pool was to have huge pages of a size that the system does not have.
    #[error(
        "there are no huge pages of {wanted} bytes here; the sizes that this system has are {sizes:?} bytes"
    )]
    HugePageSize {
        /// The size asked for; 0 where the system has no default.
        wanted: u64,
        /// The sizes there are.
        sizes: Vec<u64>,
    },
    /// There were not enough huge pages for a pool.
    #[error(
        "a host pool of {bytes} bytes takes {need} huge pages of {page_bytes} bytes, and {free} are free \
         ({step}: {source}); reserve more (/proc/sys/vm/nr_hugepages, or nr_hugepages in \
         /sys/kernel/mm/hugepages), or allow ordinary pages"
    )]
    HugePages {
        /// What was tried.
        step: &'static str,
        /// Size of the pool.
        bytes: u64,
        /// Size of a huge page.
        page_bytes: u64,
        /// Huge pages that the pool takes.
        need: u64,
        /// Huge pages that can be had: neither taken nor reserved, or allowed beyond the reservation
        /// (`nr_overcommit_hugepages`).
        free: u64,
        /// The operating system's answer.
        source: std::io::Error,
    },
    /// The operating system refused memory for a pool.
    #[error(
        "{step} for a host pool of {bytes} bytes failed: {source}; free memory or ask for less"
    )]
    Pool {
        /// What was tried.
        step: &'static str,
        /// Size of the pool.
        bytes: u64,
        /// The operating system's answer.
        source: std::io::Error,
    },
}

/// A range of memory that can be registered with an engine.
///
/// Cheap to clone; a clone is the same range. A region over a [`HostPool`] keeps the pool alive, a
/// borrowed one relies on its caller's promise.
#[derive(Clone)]
pub struct MemoryRegion {
    base: NonNull<u8>,
    bytes: usize,
    kind: MemoryKind,
    owner: Option<Arc<HostPool>>,
}

// SAFETY: the type is a pointer with a length; all access through it is by raw copy, and the
// constructors' contracts keep the memory mapped for as long as any clone is in use, on any thread.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above. Shared access never creates references to the bytes, so concurrent copies are
// ordinary data movement like that of a device, which the callers order with leases.
unsafe impl Sync for MemoryRegion {}

impl MemoryRegion {
    /// Borrows host memory that somebody else owns (for example a tensor of an engine).
    ///
    /// # Safety
    /// From this call until every clone is gone, and every engine that it was registered with has
    /// deregistered it or has been shut down:
    /// * the `bytes` bytes at `base` stay mapped, readable and writable;
    /// * nobody holds a Rust reference to any of them while a transfer may write them.
    ///
    /// # Errors
    /// [`MemoryError::Empty`] and [`MemoryError::Overflow`].
    pub unsafe fn borrowed(base: NonNull<u8>, bytes: usize) -> Result<Self, MemoryError> {
        // SAFETY: the contract is the same, with the kind said.
        unsafe { Self::borrowed_kind(base, bytes, MemoryKind::Host) }
    }

    /// Borrows memory of a stated kind. The kind is passed to UCX and never guessed.
    ///
    /// # Safety
    /// As [`MemoryRegion::borrowed`]; `kind` is what the memory really is.
    ///
    /// # Errors
    /// [`MemoryError::Empty`] and [`MemoryError::Overflow`].
    pub unsafe fn borrowed_kind(
        base: NonNull<u8>,
        bytes: usize,
        kind: MemoryKind,
    ) -> Result<Self, MemoryError> {
        Self::checked(base, bytes, kind, None)
    }

    pub(super) fn of_pool(base: NonNull<u8>, pool: Arc<HostPool>) -> Result<Self, MemoryError> {
        let bytes = pool.bytes();
        Self::checked(base, bytes, MemoryKind::Host, Some(pool))
    }

    fn checked(
        base: NonNull<u8>,
        bytes: usize,
        kind: MemoryKind,
        owner: Option<Arc<HostPool>>,
    ) -> Result<Self, MemoryError> {
        let address = base.as_ptr().expose_provenance() as u64;
        if bytes == 0 {
            return Err(MemoryError::Empty { address });
        }
        if bytes > isize::MAX as usize || address.checked_add(bytes as u64).is_none() {
            return Err(MemoryError::Overflow {
                address,
                bytes: bytes as u64,
            });
        }
        Ok(Self {
            base,
            bytes,
            kind,
            owner,
        })
    }

    /// `bytes` bytes of it, from `offset` on, as a region that keeps the same memory alive.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`], [`MemoryError::Empty`].
    pub(crate) fn part(&self, offset: u64, bytes: u64) -> Result<Self, MemoryError> {
        let base = self.pointer(offset, bytes)?;
        Self::checked(base, bytes as usize, self.kind, self.owner.clone())
    }

    /// Address of the first byte in this process.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.base.as_ptr().expose_provenance() as u64
    }

    /// Length in bytes, at least 1.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// What kind of memory it is.
    #[must_use]
    pub fn kind(&self) -> MemoryKind {
        self.kind
    }

    /// The pool that owns the memory, if it was made by kvferry.
    #[must_use]
    pub fn pool(&self) -> Option<&Arc<HostPool>> {
        self.owner.as_ref()
    }

    /// Copies bytes out of the region.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`], [`MemoryError::NotHost`].
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), MemoryError> {
        let from = self.host_range(offset, out.len() as u64)?;
        // SAFETY: `from` covers `out.len()` bytes inside the region (checked), which the
        // constructor's contract keeps mapped; `out` is exclusive, so the two do not overlap unless
        // the caller broke the contract.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    /// Copies bytes into the region.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`], [`MemoryError::NotHost`].
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        let to = self.host_range(offset, bytes.len() as u64)?;
        // SAFETY: `to` covers `bytes.len()` bytes inside the region (checked), mapped by contract;
        // nobody holds a reference to them, by contract.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Fills part of the region with one byte value.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`], [`MemoryError::NotHost`].
    pub fn fill(&self, offset: u64, bytes: u64, value: u8) -> Result<(), MemoryError> {
        let to = self.host_range(offset, bytes)?;
        // SAFETY: as in `write_at`.
        unsafe { std::ptr::write_bytes(to.as_ptr(), value, bytes as usize) };
        Ok(())
    }

    /// Copies `bytes` bytes from one region to another (or within one).
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`], [`MemoryError::NotHost`].
    pub fn copy(
        from: &Self,
        from_offset: u64,
        to: &Self,
        to_offset: u64,
        bytes: u64,
    ) -> Result<(), MemoryError> {
        let source = from.host_range(from_offset, bytes)?;
        let target = to.host_range(to_offset, bytes)?;
        // SAFETY: both ranges are inside their regions (checked) and mapped by contract; `copy`
        // allows them to overlap.
        unsafe { std::ptr::copy(source.as_ptr(), target.as_ptr(), bytes as usize) };
        Ok(())
    }

    /// Asks the operating system whether every page of a host region is mapped here.
    ///
    /// # Errors
    /// Its answer, `ENOMEM` for a hole.
    pub(crate) fn check_mapped(&self) -> std::io::Result<()> {
        let page = rustix::param::page_size() as u64;
        let start = self.address() & !(page - 1);
        let end = self.address() + self.bytes();
        // One byte of answer per page; asked in pieces so that the buffer stays small.
        let mut pages = [0_u8; 4096];
        let mut at = start;
        while at < end {
            let piece = (end - at).min(page * pages.len() as u64);
            // SAFETY: mincore only reads the page tables; any address and length are allowed, and
            // the vector has room for one byte per page of `piece`.
            let status = unsafe {
                libc::mincore(
                    std::ptr::with_exposed_provenance_mut(at as usize),
                    piece as usize,
                    pages.as_mut_ptr(),
                )
            };
            if status != 0 {
                return Err(std::io::Error::last_os_error());
            }
            at += piece;
        }
        Ok(())
    }

    /// The pointer for `bytes` bytes at `offset`, for UCX.
    pub(crate) fn pointer(&self, offset: u64, bytes: u64) -> Result<NonNull<u8>, MemoryError> {
        check_range(offset, bytes, self.bytes())?;
        // SAFETY: offset <= bytes of the region (checked), so the result is inside it or one past
        // its end.
        Ok(unsafe { self.base.add(offset as usize) })
    }

    /// True if both are the same range of memory.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        (self.base, self.bytes, self.kind) == (other.base, other.bytes, other.kind)
    }

    pub(super) fn host_range(&self, offset: u64, bytes: u64) -> Result<NonNull<u8>, MemoryError> {
        if self.kind != MemoryKind::Host {
            return Err(MemoryError::NotHost { kind: self.kind });
        }
        self.pointer(offset, bytes)
    }
}

/// Refuses what reaches outside of `region_bytes` bytes.
pub(super) fn check_range(offset: u64, bytes: u64, region_bytes: u64) -> Result<(), MemoryError> {
    match offset.checked_add(bytes) {
        Some(end) if end <= region_bytes => Ok(()),
        _ => Err(MemoryError::OutOfBounds {
            offset,
            bytes,
            region_bytes,
        }),
    }
}

impl fmt::Debug for MemoryRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} bytes of {} memory at {:#x}",
            self.bytes,
            self.kind,
            self.address()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(bytes: usize) -> MemoryRegion {
        HostPool::new(bytes).unwrap().region().unwrap()
    }

    #[test]
    fn bytes_go_in_and_out_by_copy() {
        let region = region(4096);
        region.write_at(100, b"kvferry").unwrap();
        let mut out = [0; 9];
        region.read_at(99, &mut out).unwrap();
        assert_eq!(&out, b"\0kvferry\0");
        MemoryRegion::copy(&region, 100, &region, 102, 7).unwrap();
        region.read_at(99, &mut out).unwrap();
        assert_eq!(&out, b"\0kvkvferr");
    }

    #[test]
    fn accesses_outside_are_refused_with_their_numbers() {
        let region = region(4096);
        let error = region.write_at(4090, b"kvferry").unwrap_err();
        assert_eq!(
            error.to_string(),
            "7 bytes at offset 4090 reach outside a region of 4096 bytes"
        );
        assert!(region.read_at(u64::MAX, &mut [0; 2]).is_err());
        assert!(region.read_at(4096, &mut []).is_ok());
        assert!(region.fill(0, 4097, 1).is_err());
    }

    #[test]
    fn empty_and_overflowing_ranges_are_refused() {
        let base = NonNull::<u8>::dangling();
        // SAFETY: both constructors refuse, so nothing is ever accessed.
        let (empty, overflow) = unsafe {
            (
                MemoryRegion::borrowed(base, 0),
                MemoryRegion::borrowed(base, usize::MAX),
            )
        };
        assert!(matches!(
            empty.unwrap_err(),
            MemoryError::Empty { address: 1 }
        ));
        assert!(matches!(
            overflow.unwrap_err(),
            MemoryError::Overflow {
                bytes: u64::MAX,
                ..
            }
        ));
    }

    #[test]
    fn device_memory_is_never_touched_by_the_processor() {
        let kind = MemoryKind::Cuda { device: 3 };
        // SAFETY: the kind is not host, so no copy is ever made.
        let region = unsafe { MemoryRegion::borrowed_kind(NonNull::dangling(), 64, kind) }.unwrap();
        assert_eq!(
            region.read_at(0, &mut [0]).unwrap_err().to_string(),
            "a region of cuda:3 memory cannot be copied by the processor"
        );
    }
}

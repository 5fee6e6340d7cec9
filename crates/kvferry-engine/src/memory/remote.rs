//! Memory of other processes on this host: pools that are mapped here, and processes that are read.
//!
//! Invariant: a [`RemotePool`] is mapped read-only and its file cannot shrink, so a load from it never
//! faults, whatever becomes of the peer. A [`RemoteProcess`] says which life of which engine it means;
//! every read from it proves that it is still that one.

use std::fmt;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use kvferry_wire::Incarnation;
use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{SealFlags, fcntl_get_seals, fstat};

use super::region::{MemoryError, check_range};

/// Length of an [`IncarnationWord`].
pub(super) const WORD_BYTES: usize = 16;

/// A pool of a peer, mapped read-only.
pub(crate) struct RemotePool {
    map: MmapRaw,
    bytes: u64,
}

impl RemotePool {
    /// Maps a pool of `bytes` bytes that a peer has sent the descriptor of.
    ///
    /// # Errors
    /// Why it is not safe or not possible to map it, in words for the refusal of a lane.
    pub(crate) fn map(fd: OwnedFd, bytes: u64) -> Result<Self, String> {
        let failed = |step: &str, error: &dyn fmt::Display| format!("{step} of its pool: {error}");
        let seals = fcntl_get_seals(&fd).map_err(|error| failed("reading the seals", &error))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err("its pool is not sealed against shrinking".into());
        }
        let size = fstat(&fd).map_err(|error| failed("reading the size", &error))?;
        let size = u64::try_from(size.st_size).unwrap_or(0);
        if size < bytes {
            return Err(format!("its pool has {size} bytes, its region {bytes}"));
        }
        let length = usize::try_from(size).map_err(|error| failed("mapping", &error))?;
        // All of the file: its end is where its pages end, also if they are huge.
        let map = MmapOptions::new()
            .len(length)
            .map_raw_read_only(&File::from(fd))
            .map_err(|error| failed("mapping", &error))?;
        Ok(Self { map, bytes })
    }

    /// Where `bytes` bytes at `offset` are mapped.
    pub(super) fn pointer(&self, offset: u64, bytes: u64) -> Result<NonNull<u8>, MemoryError> {
        check_range(offset, bytes, self.bytes)?;
        let outside = MemoryError::OutOfBounds {
            offset,
            bytes,
            region_bytes: self.bytes,
        };
        let base = NonNull::new(self.map.as_mut_ptr()).ok_or(outside)?;
        // SAFETY: offset and bytes lie within the pool (checked), which is mapped whole.
        Ok(unsafe { base.add(offset as usize) })
    }
}

impl fmt::Debug for RemotePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of a peer's pool", self.bytes)
    }
}

/// The bytes by which a process proves which life of an engine it is: they lie at an address that
/// peers are told, for as long as the engine lives.
pub(crate) struct IncarnationWord(Box<[u8; WORD_BYTES]>);

impl IncarnationWord {
    pub(crate) fn new(incarnation: Incarnation) -> Self {
        Self(Box::new(incarnation.to_bytes()))
    }

    /// Where they lie in this process.
    pub(crate) fn address(&self) -> u64 {
        self.0.as_ptr().expose_provenance() as u64
    }
}

impl Drop for IncarnationWord {
    fn drop(&mut self) {
        // Whoever reads this address later finds no engine, also before the memory is used again.
        // SAFETY: the box is live and exclusive; volatile, as nobody in this process reads it again.
        unsafe { std::ptr::write_volatile(&raw mut *self.0, [0; WORD_BYTES]) };
    }
}

/// A life of an engine in another process of this host, whose memory this process may read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RemoteProcess {
    /// As this process numbers it.
    pub(crate) pid: i32,
    /// Where its incarnation word lies.
    pub(crate) word: u64,
    pub(crate) incarnation: Incarnation,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::HostPool;
    use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};

    fn descriptor(pool: &HostPool) -> OwnedFd {
        pool.fd().try_clone_to_owned().unwrap()
    }

    #[test]
    fn a_peers_pool_is_mapped_and_outlives_it() {
        let pool = HostPool::new(10_000).unwrap();
        pool.region().unwrap().write_at(9_000, b"kvferry").unwrap();
        let mapped = RemotePool::map(descriptor(&pool), 10_000).unwrap();
        drop(pool);
        let from = mapped.pointer(9_000, 7).unwrap();
        let mut out = [0; 7];
        // SAFETY: inside the mapping, by `pointer`.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), out.as_mut_ptr(), 7) };
        assert_eq!(&out, b"kvferry");
        assert!(mapped.pointer(9_999, 2).is_err());
        assert!(mapped.pointer(u64::MAX, 2).is_err());
    }

    #[test]
    fn what_could_fault_is_not_mapped() {
        let pool = HostPool::new(4096).unwrap();
        let error = RemotePool::map(descriptor(&pool), 4097).unwrap_err();
        assert_eq!(error, "its pool has 4096 bytes, its region 4097");
        let unsealed = memfd_create("unsealed", MemfdFlags::ALLOW_SEALING).unwrap();
        fallocate(&unsealed, FallocateFlags::empty(), 0, 4096).unwrap();
        let error = RemotePool::map(unsealed, 4096).unwrap_err();
        assert_eq!(error, "its pool is not sealed against shrinking");
        let other = std::fs::File::open("/dev/null").unwrap();
        assert!(RemotePool::map(other.into(), 1).is_err());
    }
}

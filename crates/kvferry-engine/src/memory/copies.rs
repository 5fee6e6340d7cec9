//! Copies out of memory of other processes on this host, in batches.
//!
//! Responsible for the bounds of every piece and for the copying. Not responsible for who may read
//! what, or for the threads that run it.
//!
//! Invariant: a batch writes to its pieces' local ranges and nowhere else, only while
//! [`CopyBatch::run`] runs; it keeps pools and regions of ours alive until it is cleared.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use kvferry_wire::Incarnation;
use thiserror::Error;

use super::region::{MemoryError, MemoryRegion};
use super::remote::{RemotePool, RemoteProcess, WORD_BYTES};

/// Most pieces that one batch has: what one `process_vm_readv` takes beside the incarnation word.
pub(crate) const MAX_PIECES: usize = 1023;

/// Why a batch failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(crate) enum CopyError {
    /// There is no such process any more.
    #[error("process {pid} is gone")]
    Gone { pid: i32 },
    /// Another process has its number, or another life of the engine its memory.
    #[error("process {pid} is not incarnation {expected} any more")]
    Stranger { pid: i32, expected: Incarnation },
    /// The system does not let us read it.
    #[error("this process may not read the memory of process {pid} (EPERM)")]
    Denied { pid: i32 },
    /// The peer has no memory there.
    #[error("process {pid} has no readable memory at {address:#x}")]
    Fault { pid: i32, address: u64 },
    /// Anything else.
    #[error("process_vm_readv of process {pid} failed: {status}")]
    System { pid: i32, status: String },
}

/// What a batch took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CopyStats {
    /// Calls of `process_vm_readv`; 0 for copies out of a mapped pool.
    pub(crate) calls: u64,
    /// Calls that moved less than was asked for.
    pub(crate) short: u64,
}

#[derive(Clone, Copy)]
struct Piece {
    /// In our address space (a mapped pool) or in the peer's (a process).
    from: u64,
    to: NonNull<u8>,
    bytes: usize,
}

/// Pieces to copy out of one peer's memory into ours. Made by lanes, run by copy threads, and used
/// again.
#[derive(Default)]
pub struct CopyBatch {
    /// `None` for pieces of mapped pools.
    process: Option<RemoteProcess>,
    pieces: Vec<Piece>,
    bytes: u64,
    regions: Vec<MemoryRegion>,
    pools: Vec<Arc<RemotePool>>,
}

// SAFETY: the pointers are into regions and pools that the batch keeps, which any thread may copy from
// and to (see `MemoryRegion`).
unsafe impl Send for CopyBatch {}

impl CopyBatch {
    /// Empties a batch for other pieces, of a process or, without one, of mapped pools; its room stays.
    pub(crate) fn reset(&mut self, process: Option<RemoteProcess>) {
        self.process = process;
        self.pieces.clear();
        self.bytes = 0;
        self.regions.clear();
        self.pools.clear();
    }

    /// Adds `bytes` bytes at `offset` of a mapped pool.
    ///
    /// # Errors
    /// If either side reaches outside; nothing is added then.
    pub(crate) fn add_from_pool(
        &mut self,
        pool: &Arc<RemotePool>,
        offset: u64,
        to: (&MemoryRegion, u64),
        bytes: u64,
    ) -> Result<(), MemoryError> {
        let from = pool.pointer(offset, bytes)?.as_ptr().expose_provenance() as u64;
        self.add(from, to, bytes)?;
        if !self.pools.iter().any(|known| Arc::ptr_eq(known, pool)) {
            self.pools.push(Arc::clone(pool));
        }
        Ok(())
    }

    /// Adds `bytes` bytes at an address of the process.
    ///
    /// # Errors
    /// If our side reaches outside of its region; nothing is added then.
    pub(crate) fn add_from_process(
        &mut self,
        address: u64,
        to: (&MemoryRegion, u64),
        bytes: u64,
    ) -> Result<(), MemoryError> {
        self.add(address, to, bytes)
    }

    fn add(
        &mut self,
        from: u64,
        (region, offset): (&MemoryRegion, u64),
        bytes: u64,
    ) -> Result<(), MemoryError> {
        let to = region.host_range(offset, bytes)?;
        self.pieces.push(Piece {
            from,
            to,
            bytes: bytes as usize,
        });
        self.bytes += bytes;
        if !self.regions.iter().any(|known| known.is_same(region)) {
            self.regions.push(region.clone());
        }
        Ok(())
    }

    /// How many pieces it has.
    pub(crate) fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Bytes of all its pieces.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Copies everything.
    pub(crate) fn run(&self, vectors: &mut Vectors) -> Result<CopyStats, CopyError> {
        match &self.process {
            None => {
                for piece in &self.pieces {
                    let from = std::ptr::with_exposed_provenance::<u8>(piece.from as usize);
                    // SAFETY: `from` lies in a pool and `to` in a region of ours (both checked when
                    // the piece was added), both kept by the batch. They are mappings of different
                    // memory, or of one pool that a test reads into itself, which `copy` allows.
                    unsafe { std::ptr::copy(from, piece.to.as_ptr(), piece.bytes) };
                }
                Ok(CopyStats::default())
            }
            Some(process) => self.read_process(process, vectors),
        }
    }

    fn read_process(
        &self,
        process: &RemoteProcess,
        vectors: &mut Vectors,
    ) -> Result<CopyStats, CopyError> {
        let mut stats = CopyStats::default();
        // The first piece that is not whole, and what of it is there.
        let (mut piece, mut done) = (0, 0);
        while let Some(first) = self.pieces.get(piece) {
            let asked = vectors.fill(process.word, &self.pieces[piece..], done);
            let moved = vectors.read(process)?;
            stats.calls += 1;
            stats.short += u64::from(moved < asked);
            if moved == 0 {
                let address = first.from + done as u64;
                let pid = process.pid;
                return Err(CopyError::Fault { pid, address });
            }
            let mut left = moved;
            while let Some(next) = self.pieces.get(piece) {
                let missing = next.bytes - done;
                if left < missing {
                    done += left;
                    break;
                }
                left -= missing;
                (piece, done) = (piece + 1, 0);
            }
        }
        Ok(stats)
    }
}

impl fmt::Debug for CopyBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CopyBatch")
            .field("process", &self.process)
            .field("pieces", &self.pieces.len())
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

/// Whether this process may read that one now.
///
/// # Errors
/// As [`CopyBatch::run`] has them.
pub(crate) fn probe(process: &RemoteProcess) -> Result<(), CopyError> {
    let mut vectors = Vectors::default();
    vectors.fill(process.word, &[], 0);
    vectors.read(process).map(|_| ())
}

/// Room for the arguments of `process_vm_readv`; one per copy thread.
#[derive(Default)]
pub(crate) struct Vectors {
    word: Box<[u8; WORD_BYTES]>,
    local: Vec<libc::iovec>,
    remote: Vec<libc::iovec>,
}

impl Vectors {
    /// Prepares a call for the word and as many pieces as it takes, the first without its `skip` first
    /// bytes. Returns how many bytes of pieces that asks for.
    fn fill(&mut self, word: u64, pieces: &[Piece], skip: usize) -> usize {
        let remote = |address: u64, length: usize| libc::iovec {
            iov_base: std::ptr::without_provenance_mut(address as usize),
            iov_len: length,
        };
        self.local.clear();
        self.remote.clear();
        self.local.push(libc::iovec {
            iov_base: self.word.as_mut_ptr().cast(),
            iov_len: WORD_BYTES,
        });
        self.remote.push(remote(word, WORD_BYTES));
        let (mut asked, mut skip) = (0, skip);
        for piece in pieces.iter().take(MAX_PIECES) {
            let length = piece.bytes - skip;
            self.local.push(libc::iovec {
                // SAFETY: `skip` is less than the piece's length, so this stays inside of it.
                iov_base: unsafe { piece.to.add(skip) }.as_ptr().cast(),
                iov_len: length,
            });
            self.remote.push(remote(piece.from + skip as u64, length));
            asked += length;
            skip = 0;
        }
        asked
    }

    /// Makes the prepared call, and judges the word. Returns the bytes of pieces that were moved.
    fn read(&mut self, process: &RemoteProcess) -> Result<usize, CopyError> {
        let pid = process.pid;
        // Whatever an earlier call has left there proves nothing.
        self.word.fill(0);
        // SAFETY: the local ranges are our word and ranges of regions that the batch keeps, writable
        // by the contract of `MemoryRegion`; the remote ones the kernel checks.
        let moved = unsafe {
            libc::process_vm_readv(
                pid,
                self.local.as_ptr(),
                self.local.len() as libc::c_ulong,
                self.remote.as_ptr(),
                self.remote.len() as libc::c_ulong,
                0,
            )
        };
        let Ok(moved) = usize::try_from(moved) else {
            let error = std::io::Error::last_os_error();
            return Err(match error.raw_os_error() {
                Some(libc::ESRCH) => CopyError::Gone { pid },
                Some(libc::EPERM) => CopyError::Denied { pid },
                // The word is read first: where it cannot be read there is no engine of ours.
                Some(libc::EFAULT) => CopyError::Stranger {
                    pid,
                    expected: process.incarnation,
                },
                _ => CopyError::System {
                    pid,
                    status: error.to_string(),
                },
            });
        };
        if moved < WORD_BYTES || *self.word != process.incarnation.to_bytes() {
            return Err(CopyError::Stranger {
                pid,
                expected: process.incarnation,
            });
        }
        Ok(moved - WORD_BYTES)
    }
}

#[cfg(test)]
mod tests;

//! Host memory made for sharing with other processes.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, memfd_create};

use super::huge::{self, HugePages};
use super::region::{MemoryError, MemoryRegion};

/// How a [`HostPool`] is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostPoolOptions {
    /// Whether it is backed with huge pages.
    pub huge_pages: HugePages,
    /// Their size in bytes, one of those in `/sys/kernel/mm/hugepages` (2 MiB and 1 GiB on most
    /// systems); `None` for the system's default size.
    pub huge_page_bytes: Option<u64>,
}

/// Host memory owned by kvferry: a sealed memfd, mapped shared.
///
/// All pages exist when the constructor returns, so that "no space" is an error there and not a
/// SIGBUS later; the file can neither shrink nor grow, so that a peer that maps it is as safe. A peer
/// can map it for reading only (from Linux 5.1 on).
///
/// ```
/// use kvferry_engine::HostPool;
///
/// let memory = HostPool::new(1 << 20)?.region()?;
/// memory.write_at(4096, b"block 1")?;
/// let mut bytes = [0; 7];
/// memory.read_at(4096, &mut bytes)?;
/// assert_eq!(&bytes, b"block 1");
/// // An access outside says so, with its numbers.
/// assert!(memory.write_at(1 << 20, b"x").is_err());
/// # Ok::<(), kvferry_engine::MemoryError>(())
/// ```
#[derive(Debug)]
pub struct HostPool {
    file: File,
    /// The whole file: what was asked for, rounded up to whole huge pages where it has some.
    map: MmapRaw,
    bytes: usize,
    page_bytes: u64,
}

impl HostPool {
    /// Makes a pool of `bytes` zeroed bytes.
    ///
    /// # Errors
    /// [`MemoryError::Empty`] for zero bytes, [`MemoryError::NoMemory`] if that much is not there,
    /// [`MemoryError::Pool`] with the step that failed.
    #[allow(
        clippy::new_ret_no_self,
        reason = "a pool is shared from its first moment"
    )]
    pub fn new(bytes: usize) -> Result<Arc<Self>, MemoryError> {
        Self::with_options(bytes, HostPoolOptions::default())
    }

    /// Makes a pool with options.
    ///
    /// # Errors
    /// As [`HostPool::new`], and where huge pages are required [`MemoryError::HugePages`] with the
    /// number of free ones and [`MemoryError::HugePageSize`].
    pub fn with_options(bytes: usize, options: HostPoolOptions) -> Result<Arc<Self>, MemoryError> {
        if bytes == 0 {
            return Err(MemoryError::Empty { address: 0 });
        }
        match options.huge_pages {
            HugePages::Never => {}
            HugePages::Require => return Self::huge(bytes, options.huge_page_bytes),
            HugePages::IfAvailable => match Self::huge(bytes, options.huge_page_bytes) {
                Ok(pool) => return Ok(pool),
                Err(error) => tracing::info!(%error, "a host pool gets ordinary pages"),
            },
        }
        check_available(bytes as u64)?;
        let failed = |(step, source)| MemoryError::Pool {
            step,
            bytes: bytes as u64,
            source,
        };
        let (file, map) = allocate(bytes, MemfdFlags::empty()).map_err(failed)?;
        Ok(Arc::new(Self {
            file,
            map,
            bytes,
            page_bytes: rustix::param::page_size() as u64,
        }))
    }

    fn huge(bytes: usize, page_bytes: Option<u64>) -> Result<Arc<Self>, MemoryError> {
        let sizes = huge::sizes();
        let wanted = page_bytes.or_else(huge::default_size);
        let page_bytes =
            wanted
                .filter(|size| sizes.contains(size))
                .ok_or(MemoryError::HugePageSize {
                    wanted: wanted.unwrap_or(0),
                    sizes,
                })?;
        let need = (bytes as u64).div_ceil(page_bytes);
        let failed = |(step, source)| MemoryError::HugePages {
            step,
            bytes: bytes as u64,
            page_bytes,
            need,
            free: huge::obtainable(page_bytes).unwrap_or(0),
            source,
        };
        // Asked first: allocating would take all there are from others before it failed.
        if huge::obtainable(page_bytes).is_some_and(|pages| need > pages) {
            return Err(failed(("counting", rustix::io::Errno::NOMEM.into())));
        }
        let length = need
            .checked_mul(page_bytes)
            .and_then(|length| usize::try_from(length).ok())
            .ok_or(MemoryError::Overflow {
                address: 0,
                bytes: bytes as u64,
            })?;
        // The size goes into the flags as the logarithm, as `MFD_HUGE_2MB` has it.
        let size = MemfdFlags::from_bits_retain(page_bytes.trailing_zeros() << MFD_HUGE_SHIFT);
        let (file, map) = allocate(length, MemfdFlags::HUGETLB | size).map_err(failed)?;
        Ok(Arc::new(Self {
            file,
            map,
            bytes,
            page_bytes,
        }))
    }

    /// Size in bytes, as asked for.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Size of the pages that back it, in bytes: more than the system's page size with huge pages.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// The whole pool as one region.
    ///
    /// # Errors
    /// None in practice; the signature is [`MemoryRegion`]'s.
    pub fn region(self: &Arc<Self>) -> Result<MemoryRegion, MemoryError> {
        match NonNull::new(self.map.as_mut_ptr()) {
            Some(base) => MemoryRegion::of_pool(base, Arc::clone(self)),
            None => Err(MemoryError::Empty { address: 0 }),
        }
    }

    /// The memfd, to hand to a peer on the same host. Its length is [`bytes`](Self::bytes), rounded up
    /// to whole huge pages where the pool has some. From Linux 5.1 on it cannot be mapped for writing.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Where the size of huge pages begins in the flags of `memfd_create`.
const MFD_HUGE_SHIFT: u32 = 26;

/// Makes a memfd of `length` bytes with all its pages, maps and seals it; or the step that failed.
fn allocate(
    length: usize,
    flags: MemfdFlags,
) -> Result<(File, MmapRaw), (&'static str, io::Error)> {
    let failed = |step| move |error: rustix::io::Errno| (step, error.into());
    let flags = flags | MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = memfd_create("kvferry-pool", flags).map_err(failed("memfd_create"))?;
    fallocate(&fd, FallocateFlags::empty(), 0, length as u64).map_err(failed("fallocate"))?;
    let file = File::from(fd);
    let map = MmapOptions::new()
        .len(length)
        .map_raw(&file)
        .map_err(|error| ("mmap", error))?;
    seal(&file).map_err(failed("sealing"))?;
    Ok((file, map))
}

/// Seals a pool's file after its own mapping is made: its length is fixed, and nobody else can write.
fn seal(file: &File) -> rustix::io::Result<()> {
    let fixed = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    match fcntl_add_seals(file, fixed | SealFlags::FUTURE_WRITE) {
        // Linux before 5.1 does not know it.
        Err(rustix::io::Errno::INVAL) => fcntl_add_seals(file, fixed),
        result => result,
    }
}

/// Refuses a pool that the machine, or the control group that we run in, has no memory for.
///
/// A memfd has no size limit of its own: without this look, allocating its pages would take all
/// memory first and then have the kernel kill somebody. Huge pages are reserved, so there the
/// allocation itself answers.
fn check_available(bytes: u64) -> Result<(), MemoryError> {
    match available_memory() {
        Some(available) if bytes > available => Err(MemoryError::NoMemory { bytes, available }),
        _ => Ok(()),
    }
}

/// Bytes of memory that can be had now: the machine's, or what the control group that we run in has
/// left if that is less. `None` where the system does not say.
#[must_use]
pub fn available_memory() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok();
    let machine = meminfo.as_deref().and_then(meminfo_available);
    [machine, cgroup_available()].into_iter().flatten().min()
}

/// `MemAvailable`, the kernel's estimate of what can be had without swapping.
fn meminfo_available(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// What the control group has left, if it has a limit. Both versions are asked.
fn cgroup_available() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let number =
        |path: String| -> Option<u64> { std::fs::read_to_string(path).ok()?.trim().parse().ok() };
    groups
        .lines()
        .filter_map(|line| {
            let (hierarchy, rest) = line.split_once(':')?;
            let (controllers, group) = rest.split_once(':')?;
            let (root, limit, usage) = if hierarchy == "0" {
                ("/sys/fs/cgroup", "memory.max", "memory.current")
            } else if controllers
                .split(',')
                .any(|controller| controller == "memory")
            {
                (
                    "/sys/fs/cgroup/memory",
                    "memory.limit_in_bytes",
                    "memory.usage_in_bytes",
                )
            } else {
                return None;
            };
            let limit = number(format!("{root}{group}/{limit}"))?;
            let usage = number(format!("{root}{group}/{usage}")).unwrap_or(0);
            Some(limit.saturating_sub(usage))
        })
        .min()
}

#[cfg(test)]
mod tests;

//! Host memory made for sharing with other processes.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, memfd_create};

use super::region::{MemoryError, MemoryRegion};

/// How a [`HostPool`] is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostPoolOptions {
    /// Back the pool with huge pages of the system's default size. Fails where none are reserved.
    pub huge_pages: bool,
}

/// Host memory owned by kvferry: a sealed memfd, mapped shared.
///
/// All pages exist when the constructor returns, so that "no space" is an error there and not a
/// SIGBUS later; the file can neither shrink nor grow, so that a peer that maps it is as safe.
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
    map: MmapRaw,
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
    /// As [`HostPool::new`].
    pub fn with_options(bytes: usize, options: HostPoolOptions) -> Result<Arc<Self>, MemoryError> {
        if bytes == 0 {
            return Err(MemoryError::Empty { address: 0 });
        }
        if !options.huge_pages {
            check_available(bytes as u64)?;
        }
        let failed = |step| {
            move |error: rustix::io::Errno| MemoryError::Pool {
                step,
                bytes: bytes as u64,
                source: error.into(),
            }
        };
        let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        if options.huge_pages {
            flags |= MemfdFlags::HUGETLB;
        }
        let fd = memfd_create("kvferry-pool", flags).map_err(failed("memfd_create"))?;
        fallocate(&fd, FallocateFlags::empty(), 0, bytes as u64).map_err(failed("fallocate"))?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(failed("sealing"))?;
        let file = File::from(fd);
        let map = MmapOptions::new()
            .len(bytes)
            .map_raw(&file)
            .map_err(|source| MemoryError::Pool {
                step: "mmap",
                bytes: bytes as u64,
                source,
            })?;
        Ok(Arc::new(Self { file, map }))
    }

    /// Size in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.map.len()
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

    /// The memfd, to hand to a peer on the same host.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
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
mod tests {
    use super::*;
    use rustix::fs::{fcntl_get_seals, ftruncate};

    #[test]
    fn a_pool_is_zeroed_sealed_and_of_the_size_asked_for() {
        let pool = HostPool::new(10_000).unwrap();
        assert_eq!(pool.bytes(), 10_000);
        let mut out = vec![1; 10_000];
        pool.region().unwrap().read_at(0, &mut out).unwrap();
        assert!(out.iter().all(|&byte| byte == 0));
        assert!(
            fcntl_get_seals(pool.fd())
                .unwrap()
                .contains(SealFlags::SHRINK | SealFlags::GROW)
        );
        assert!(ftruncate(pool.fd(), 1).is_err());
    }

    #[test]
    fn a_pool_that_does_not_fit_is_an_error_with_its_size() {
        let error = HostPool::new(1 << 60).unwrap_err();
        assert!(
            matches!(error, MemoryError::NoMemory { bytes, .. } if bytes == 1 << 60),
            "{error}"
        );
        assert!(matches!(
            HostPool::new(0).unwrap_err(),
            MemoryError::Empty { .. }
        ));
    }

    #[test]
    fn meminfo_is_read_in_bytes() {
        let text = "MemTotal:       16384 kB\nMemAvailable:       8192 kB\nBuffers: 1 kB\n";
        assert_eq!(meminfo_available(text), Some(8 << 20));
        assert_eq!(meminfo_available("MemAvailable: many\n"), None);
        assert_eq!(meminfo_available(""), None);
    }

    #[test]
    fn a_region_keeps_its_pool_alive() {
        let region = HostPool::new(4096).unwrap().region().unwrap();
        region.write_at(0, b"x").unwrap();
        assert_eq!(Arc::strong_count(region.pool().unwrap()), 1);
    }
}

//! How much memory may be pinned.
//!
//! Responsible for the limit that the kernel holds registrations with a device against, before one is
//! tried: afterwards it says no more than "cannot allocate memory". Follows `ib_umem_get` of Linux:
//! pages count once per registration and device, against the soft limit `RLIMIT_MEMLOCK`, and
//! `CAP_IPC_LOCK` in the initial user namespace lifts it.

use std::fmt;
use std::fs;

use rustix::process::{Resource, getrlimit};

/// `CAP_IPC_LOCK`, the number of the bit in a capability set.
const CAP_IPC_LOCK: u32 = 14;

/// The initial user namespace, as `/proc/self/ns/user` names it. The inode number is part of the
/// kernel's interface (`PROC_USER_INIT_INO`).
const INITIAL_USER_NAMESPACE: &str = "user:[4026531837]";

/// A limit on pinned memory and what a registration would need of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PinnedMemory {
    /// The soft limit `RLIMIT_MEMLOCK`, in bytes.
    pub limit: u64,
    /// Pinned by this process before, in bytes.
    pub pinned: u64,
    /// Pinned with the registration, in bytes: `pinned` and the registration in whole pages.
    pub need: u64,
}

impl fmt::Display for PinnedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            limit,
            pinned,
            need,
        } = self;
        write!(
            f,
            "it takes {need} bytes of pinned memory, {pinned} of them pinned before, and the limit \
             (RLIMIT_MEMLOCK) is {limit}; raise it with `ulimit -l`, LimitMEMLOCK= of the systemd \
             unit or docker's --ulimit memlock=-1, or give the process CAP_IPC_LOCK"
        )
    }
}

/// The limit that holds for this thread, and what it would need with `more` bytes pinned on top of
/// what is. `ours` is what the caller knows to be pinned. `None` without a limit.
pub(crate) fn need(ours: u64, more: u64) -> Option<PinnedMemory> {
    let limit = getrlimit(Resource::Memlock).current?;
    let status = fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let namespace = fs::read_link("/proc/thread-self/ns/user").unwrap_or_default();
    if has_ipc_lock(&status) && namespace.as_os_str() == INITIAL_USER_NAMESPACE {
        return None;
    }
    // The kernel's count has other libraries' registrations; ours is for where it has none.
    let pinned = vm_pin(&status).unwrap_or(0).max(ours);
    Some(PinnedMemory {
        limit,
        pinned,
        need: pinned.saturating_add(more),
    })
}

/// Bytes of the pages that a range touches.
pub(crate) fn in_pages(address: u64, bytes: u64) -> u64 {
    let page = rustix::param::page_size() as u64;
    let end = address.saturating_add(bytes);
    end.div_ceil(page)
        .saturating_sub(address / page)
        .saturating_mul(page)
}

fn has_ipc_lock(status: &str) -> bool {
    let effective = field(status, "CapEff:").and_then(|hex| u64::from_str_radix(hex, 16).ok());
    effective.is_some_and(|set| set & (1 << CAP_IPC_LOCK) != 0)
}

/// Memory that this process has pinned, as the kernel counts it.
fn vm_pin(status: &str) -> Option<u64> {
    let kib: u64 = field(status, "VmPin:")?
        .strip_suffix("kB")?
        .trim()
        .parse()
        .ok()?;
    kib.checked_mul(1024)
}

fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status
        .lines()
        .find_map(|line| line.strip_prefix(name))
        .map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_says_of_a_thread_is_read() {
        let status = "Name:\tx\nVmLck:\t       1 kB\nVmPin:\t    8192 kB\n\
            CapPrm:\t000001ffffffffff\nCapEff:\t0000000000004000\n";
        assert_eq!(vm_pin(status), Some(8 << 20));
        assert!(has_ipc_lock(status));
        assert!(!has_ipc_lock(&status.replace("4000", "3fff")));
        assert!(!has_ipc_lock("CapEff:\tmany\n"));
        assert_eq!(vm_pin(""), None);
    }

    #[test]
    fn every_page_that_a_range_touches_counts() {
        let page = rustix::param::page_size() as u64;
        assert_eq!(in_pages(page, page), page);
        assert_eq!(in_pages(page, 1), page);
        assert_eq!(in_pages(page - 1, 2), 2 * page);
        assert_eq!(in_pages(0, 10 * page + 1), 11 * page);
    }
}

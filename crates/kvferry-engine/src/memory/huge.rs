//! Huge pages: whether a pool is to have them, and what the system has.
//!
//! Responsible for their sizes and numbers as the kernel tells them. Not for taking them: a pool tries,
//! and what is said here explains a failure.

use std::fs;

/// Whether a [`HostPool`](super::HostPool) is backed with huge pages.
///
/// The default is [`Never`](Self::Never): huge pages are few, reserved by an administrator, and often
/// meant for another program, which would miss them; reads across processes gain nothing by them
/// (measured). Registering does, since a device needs an entry for each page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum HugePages {
    /// Ordinary pages.
    #[default]
    Never,
    /// Huge pages if there are enough, otherwise ordinary ones;
    /// [`HostPool::page_bytes`](super::HostPool::page_bytes) says what it became.
    IfAvailable,
    /// Huge pages, or an error.
    Require,
}

/// Where the kernel describes each size of huge pages.
const DIRECTORY: &str = "/sys/kernel/mm/hugepages";

/// The sizes that this system has, in bytes, ascending.
pub(super) fn sizes() -> Vec<u64> {
    let entries = fs::read_dir(DIRECTORY).into_iter().flatten().flatten();
    let mut sizes: Vec<u64> = entries
        .filter_map(|entry| size_of_entry(&entry.file_name().to_string_lossy()))
        .collect();
    sizes.sort_unstable();
    sizes
}

/// `hugepages-2048kB` is 2 MiB.
fn size_of_entry(name: &str) -> Option<u64> {
    let kib: u64 = name
        .strip_prefix("hugepages-")?
        .strip_suffix("kB")?
        .parse()
        .ok()?;
    kib.checked_mul(1024)
        .filter(|bytes| bytes.is_power_of_two())
}

/// The size that is meant where none is named.
pub(super) fn default_size() -> Option<u64> {
    let meminfo = fs::read_to_string("/proc/meminfo").ok()?;
    meminfo_size(&meminfo)
}

fn meminfo_size(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("Hugepagesize:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
        .filter(|bytes| bytes.is_power_of_two())
}

/// Huge pages of a size that can be had: those that nobody has taken or reserved, and those that may
/// be made beyond the reservation. Others may take them at any time.
pub(super) fn obtainable(page_bytes: u64) -> Option<u64> {
    let number = |file: &str| -> Option<u64> {
        let path = format!("{DIRECTORY}/hugepages-{}kB/{file}", page_bytes / 1024);
        fs::read_to_string(path).ok()?.trim().parse().ok()
    };
    let free = number("free_hugepages")?.saturating_sub(number("resv_hugepages")?);
    let beyond = number("nr_overcommit_hugepages").zip(number("surplus_hugepages"));
    Some(free + beyond.map_or(0, |(allowed, made)| allowed.saturating_sub(made)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_the_kernel_writes_them() {
        assert_eq!(size_of_entry("hugepages-2048kB"), Some(2 << 20));
        assert_eq!(size_of_entry("hugepages-1048576kB"), Some(1 << 30));
        assert_eq!(size_of_entry("hugepages-3kB"), None);
        assert_eq!(size_of_entry("hugepages-manykB"), None);
        let meminfo = "HugePages_Free:        0\nHugepagesize:       2048 kB\nHugetlb: 0 kB\n";
        assert_eq!(meminfo_size(meminfo), Some(2 << 20));
        assert_eq!(meminfo_size("Hugepagesize: 0 kB\n"), None);
        assert_eq!(meminfo_size(""), None);
    }
}

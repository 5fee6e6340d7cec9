//! What a process holds, read from /proc.

use serde::{Deserialize, Serialize};

/// What a process held at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resources {
    /// Resident memory in KiB.
    pub rss_kib: u64,
    /// Open descriptors.
    pub fds: u64,
    /// Mappings.
    pub maps: u64,
}

impl Resources {
    /// This process, now.
    #[must_use]
    pub(super) fn now() -> Self {
        // Exact, unlike statm, whose count lags behind by some pages per thread.
        let rollup = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
        let rss = rollup.lines().find_map(|line| line.strip_prefix("Rss:"));
        let rss = rss.unwrap().trim().trim_end_matches(" kB");
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        Self {
            rss_kib: rss.parse().unwrap(),
            fds: std::fs::read_dir("/proc/self/fd").unwrap().count() as u64,
            maps: maps.lines().count() as u64,
        }
    }

    /// This and `more`.
    #[must_use]
    pub fn and(&self, more: &Self) -> Self {
        Self {
            rss_kib: self.rss_kib + more.rss_kib,
            fds: self.fds + more.fds,
            maps: self.maps + more.maps,
        }
    }

    /// Whether nothing of it is more than `limit` says.
    #[must_use]
    pub fn is_within(&self, limit: &Self) -> bool {
        self.rss_kib <= limit.rss_kib && self.fds <= limit.fds && self.maps <= limit.maps
    }
}

/// User and system time of this process in milliseconds.
pub(super) fn cpu_ms() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    // The command's name may hold spaces; the fields start behind its bracket.
    let fields: Vec<&str> = stat
        .rsplit_once(')')
        .unwrap()
        .1
        .split_whitespace()
        .collect();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    ticks * 1000 / rustix::param::clock_ticks_per_second()
}

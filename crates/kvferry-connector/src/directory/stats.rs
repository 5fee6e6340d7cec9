//! What a directory counts, and the snapshot that its owner sees.

use std::sync::atomic::{AtomicU64, Ordering};

/// What a directory has done since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DirectoryStats {
    /// Connections accepted.
    pub connections: u64,
    /// Requests answered with entries.
    pub served: u64,
    /// Requests answered with a refusal.
    pub refused: u64,
    /// Connections closed because a request or a reply took too long.
    pub timed_out: u64,
    /// Connections closed because of bytes that are no request, or half of one.
    pub garbage: u64,
    /// Connections closed to make room for another.
    pub evicted: u64,
    /// Connections that could not be accepted, for example for lack of descriptors.
    pub accept_failed: u64,
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) connections: AtomicU64,
    pub(super) served: AtomicU64,
    pub(super) refused: AtomicU64,
    pub(super) timed_out: AtomicU64,
    pub(super) garbage: AtomicU64,
    pub(super) evicted: AtomicU64,
    pub(super) accept_failed: AtomicU64,
}

pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl Counters {
    pub(super) fn snapshot(&self) -> DirectoryStats {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        DirectoryStats {
            connections: get(&self.connections),
            served: get(&self.served),
            refused: get(&self.refused),
            timed_out: get(&self.timed_out),
            garbage: get(&self.garbage),
            evicted: get(&self.evicted),
            accept_failed: get(&self.accept_failed),
        }
    }
}

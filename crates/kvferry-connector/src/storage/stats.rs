//! What the halves count, and the snapshots that their owners see.

use std::sync::atomic::{AtomicU64, Ordering};

/// What a scheduler half has done since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StorageSchedulerStats {
    /// Lookups on disk, one per request and preemption.
    pub lookups: u64,
    /// Lookups that found no block of the prompt.
    pub misses: u64,
    /// Lookups that had no answer in time.
    pub lookups_late: u64,
    /// Blocks that could not be looked up, because of an error that is not "no such file".
    pub lookup_errors: u64,
    /// Loads that succeeded on all ranks.
    pub hits: u64,
    /// Tokens of those.
    pub hit_tokens: u64,
    /// Loads that failed on some rank.
    pub loads_failed: u64,
    /// Blocks whose save was planned.
    pub saves: u64,
    /// Blocks that were not saved because too many waited.
    pub saves_skipped: u64,
    /// Saves that were taken back because their block had a new owner.
    pub saves_revoked: u64,
    /// Calls and reports for requests that are unknown or finished.
    pub unknown: u64,
    /// Loads that are under way now.
    pub pending_loads: u64,
    /// Saves that are under way now.
    pub pending_saves: u64,
    /// Finished requests whose blocks are held now.
    pub held: u64,
}

/// What a worker half has done since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StorageWorkerStats {
    /// Blocks that were read from disk, checked, and put in place.
    pub hits: u64,
    /// Their bytes, headers not counted.
    pub bytes_loaded: u64,
    /// Blocks without a file.
    pub misses: u64,
    /// Files that were not what they should be: damaged, cut off, of another version. Removed.
    pub corrupt: u64,
    /// Blocks that could not be read or put in place, for other reasons.
    pub load_errors: u64,
    /// Blocks whose load was broken off: aborted, or too slow.
    pub loads_cancelled: u64,
    /// Blocks that were written.
    pub blocks_saved: u64,
    /// Their bytes, headers not counted.
    pub bytes_saved: u64,
    /// Blocks that had a file already.
    pub already_stored: u64,
    /// Blocks that could not be written.
    pub save_failures: u64,
    /// Saves that were given up: their block had a new owner, or the end came.
    pub saves_cancelled: u64,
    /// Saves that failed because the disk did not answer in time: those that were late, and those that were not begun
    /// because every thread was.
    pub saves_stalled: u64,
    /// Files that were removed to make room.
    pub evicted: u64,
    /// Their bytes, headers included.
    pub evicted_bytes: u64,
    /// Loads that are under way now, by request.
    pub pending_loads: u64,
    /// Blocks that are to be written, or are being written, now.
    pub pending_saves: u64,
}

#[derive(Debug, Default)]
pub(super) struct WorkerCounters {
    pub(super) hits: AtomicU64,
    pub(super) bytes_loaded: AtomicU64,
    pub(super) misses: AtomicU64,
    pub(super) corrupt: AtomicU64,
    pub(super) load_errors: AtomicU64,
    pub(super) loads_cancelled: AtomicU64,
    pub(super) blocks_saved: AtomicU64,
    pub(super) bytes_saved: AtomicU64,
    pub(super) already_stored: AtomicU64,
    pub(super) save_failures: AtomicU64,
    pub(super) saves_cancelled: AtomicU64,
    pub(super) saves_stalled: AtomicU64,
    pub(super) evicted: AtomicU64,
    pub(super) evicted_bytes: AtomicU64,
    pub(super) pending_loads: AtomicU64,
    pub(super) pending_saves: AtomicU64,
}

pub(super) fn add(counter: &AtomicU64, number: u64) {
    counter.fetch_add(number, Ordering::Relaxed);
}

pub(super) fn subtract(counter: &AtomicU64, number: u64) {
    counter.fetch_sub(number, Ordering::Relaxed);
}

impl WorkerCounters {
    pub(super) fn snapshot(&self) -> StorageWorkerStats {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        StorageWorkerStats {
            hits: get(&self.hits),
            bytes_loaded: get(&self.bytes_loaded),
            misses: get(&self.misses),
            corrupt: get(&self.corrupt),
            load_errors: get(&self.load_errors),
            loads_cancelled: get(&self.loads_cancelled),
            blocks_saved: get(&self.blocks_saved),
            bytes_saved: get(&self.bytes_saved),
            already_stored: get(&self.already_stored),
            save_failures: get(&self.save_failures),
            saves_cancelled: get(&self.saves_cancelled),
            saves_stalled: get(&self.saves_stalled),
            evicted: get(&self.evicted),
            evicted_bytes: get(&self.evicted_bytes),
            pending_loads: get(&self.pending_loads),
            pending_saves: get(&self.pending_saves),
        }
    }
}

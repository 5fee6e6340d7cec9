//! What a worker half has counted.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::contract::LoadFailure;
use crate::distribution::{Distribution, Times};

/// What [`RemoteWorker`](super::RemoteWorker) counts on its rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoaderStats {
    /// Now: loads whose blocks are being read.
    pub reading: u64,
    /// The most there were at a time.
    pub reading_max: u64,
    /// Reads started.
    pub started: u64,
    /// Blocks read, each over all layers of its group; of loads whose reads have succeeded.
    pub blocks: u64,
    /// Bytes read, of failed loads too.
    pub bytes: u64,
    /// The contiguous runs that they came in.
    pub operations: u64,
    /// Time during which at least one load was being read, in microseconds.
    pub reading_us: u64,
    /// Loads that brought everything and were confirmed.
    pub loaded: u64,
    /// Loads that were reported as failed.
    pub failed: u64,
    /// Blocks whose checksums were compared with the producer's.
    pub verified: u64,
    /// Those of them that differed.
    pub corrupt: u64,
    /// Blocks whose checksums consumers were told.
    pub checksums_sent: u64,
    /// Questions about checksums that were refused, and messages on their channel that could not be read.
    pub checksums_refused: u64,
    /// Times from the moment at which a rank of a producer was wanted to the end of its greeting, where it was
    /// reached: its directory, the connection, the greeting.
    pub handshake: Distribution,
    /// Times from the last byte of a successful read to the answer to its release.
    pub confirmation: Distribution,
    /// Times from the last byte of a successful read to the comparison of its checksums.
    pub verifying: Distribution,
    /// Times from the end of a lease to the report with which the blocks under it are freed.
    pub freeing: Distribution,
}

/// The same, as the loader writes them.
#[derive(Debug, Default)]
pub(super) struct LoaderCounters {
    reading: AtomicU64,
    reading_max: AtomicU64,
    started: AtomicU64,
    blocks: AtomicU64,
    bytes: AtomicU64,
    operations: AtomicU64,
    reading_us: AtomicU64,
    loaded: AtomicU64,
    failed: AtomicU64,
    verified: AtomicU64,
    corrupt: AtomicU64,
    checksums_sent: AtomicU64,
    checksums_refused: AtomicU64,
    handshake: Times,
    confirmation: Times,
    verifying: Times,
    freeing: Times,
}

impl LoaderCounters {
    pub(super) fn started(&self) {
        self.started.fetch_add(1, Ordering::Relaxed);
        let reading = self.reading.fetch_add(1, Ordering::Relaxed) + 1;
        self.reading_max.fetch_max(reading, Ordering::Relaxed);
    }

    pub(super) fn quiet(&self, blocks: usize, bytes: u64, operations: u64) {
        self.reading.fetch_sub(1, Ordering::Relaxed);
        self.blocks.fetch_add(blocks as u64, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.operations.fetch_add(operations, Ordering::Relaxed);
    }

    pub(super) fn was_reading(&self, time: Duration) {
        let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.reading_us.fetch_add(us, Ordering::Relaxed);
    }

    pub(super) fn connected(&self, after: Duration) {
        self.handshake.count(after);
    }

    pub(super) fn confirmed(&self, after: Duration) {
        self.confirmation.count(after);
    }

    pub(super) fn verified(&self, blocks: usize, corrupt: usize, after: Duration) {
        self.verified.fetch_add(blocks as u64, Ordering::Relaxed);
        self.corrupt.fetch_add(corrupt as u64, Ordering::Relaxed);
        self.verifying.count(after);
    }

    pub(super) fn checksums_sent(&self, blocks: usize) {
        self.checksums_sent
            .fetch_add(blocks as u64, Ordering::Relaxed);
    }

    pub(super) fn checksums_refused(&self) {
        self.checksums_refused.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn freeing(&self, after: Duration) {
        self.freeing.count(after);
    }

    pub(super) fn reported(&self, failure: Option<LoadFailure>) {
        let place = match failure {
            None => &self.loaded,
            Some(_) => &self.failed,
        };
        place.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn snapshot(&self) -> LoaderStats {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        LoaderStats {
            reading: of(&self.reading),
            reading_max: of(&self.reading_max),
            started: of(&self.started),
            blocks: of(&self.blocks),
            bytes: of(&self.bytes),
            operations: of(&self.operations),
            reading_us: of(&self.reading_us),
            loaded: of(&self.loaded),
            failed: of(&self.failed),
            verified: of(&self.verified),
            corrupt: of(&self.corrupt),
            checksums_sent: of(&self.checksums_sent),
            checksums_refused: of(&self.checksums_refused),
            handshake: self.handshake.snapshot(),
            confirmation: self.confirmation.snapshot(),
            verifying: self.verifying.snapshot(),
            freeing: self.freeing.snapshot(),
        }
    }
}

//! What a worker half has counted.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::contract::LoadFailure;

/// Counters of [`RemoteWorker`](super::RemoteWorker)'s loads on this rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoaderStats {
    /// Now: loads whose blocks are being read.
    pub reading: u64,
    /// The most there were at a time.
    pub reading_max: u64,
    /// Reads started.
    pub started: u64,
    /// Bytes read, of failed loads too.
    pub bytes: u64,
    /// Loads that brought everything and were confirmed.
    pub loaded: u64,
    /// Loads that were reported as failed.
    pub failed: u64,
    /// Answers to releases of successful reads.
    pub confirmed: u64,
    /// Time from the last byte to that answer, summed up, in microseconds.
    pub confirm_us: u64,
    /// The longest of them, in microseconds.
    pub confirm_us_max: u64,
}

/// The same, as the loader writes them.
#[derive(Debug, Default)]
pub(super) struct LoaderCounters {
    reading: AtomicU64,
    reading_max: AtomicU64,
    started: AtomicU64,
    bytes: AtomicU64,
    loaded: AtomicU64,
    failed: AtomicU64,
    confirmed: AtomicU64,
    confirm_us: AtomicU64,
    confirm_us_max: AtomicU64,
}

impl LoaderCounters {
    pub(super) fn started(&self) {
        self.started.fetch_add(1, Ordering::Relaxed);
        let reading = self.reading.fetch_add(1, Ordering::Relaxed) + 1;
        self.reading_max.fetch_max(reading, Ordering::Relaxed);
    }

    pub(super) fn quiet(&self, bytes: u64) {
        self.reading.fetch_sub(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn confirmed(&self, after: Duration) {
        let us = u64::try_from(after.as_micros()).unwrap_or(u64::MAX);
        self.confirmed.fetch_add(1, Ordering::Relaxed);
        self.confirm_us.fetch_add(us, Ordering::Relaxed);
        self.confirm_us_max.fetch_max(us, Ordering::Relaxed);
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
            bytes: of(&self.bytes),
            loaded: of(&self.loaded),
            failed: of(&self.failed),
            confirmed: of(&self.confirmed),
            confirm_us: of(&self.confirm_us),
            confirm_us_max: of(&self.confirm_us_max),
        }
    }
}

//! How soon a worker that could not be reached is tried again.
//!
//! Responsible for the spacing of attempts. Not responsible for the attempts: whoever asks within
//! the window is told at once, so that it can do without the peer.
//!
//! Invariant: at most [`MAX_WORKERS`] workers are remembered, each with one life.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use kvferry_wire::{Description, EngineId, Incarnation, Rank};

use crate::error::ConnectError;

/// Workers remembered at once; the one whose window ended first makes room.
const MAX_WORKERS: usize = 4096;

struct Failures {
    incarnation: Incarnation,
    /// In a row.
    count: u32,
    /// No attempt before this.
    until: Instant,
    last: ConnectError,
}

/// Workers of which the last attempt failed.
pub(super) struct Backoff {
    workers: HashMap<(EngineId, Rank), Failures>,
    min: Duration,
    max: Duration,
    /// State of the jitter's random numbers.
    random: u64,
}

/// A worker may not be tried yet.
#[derive(Debug)]
pub(super) struct Early {
    pub(super) retry_in: Duration,
    pub(super) last: ConnectError,
}

impl Backoff {
    /// Windows from `min`, doubled up to `max`. A `min` of zero turns them off.
    pub(super) fn new(min: Duration, max: Duration, seed: u64) -> Self {
        Self {
            workers: HashMap::new(),
            min,
            max,
            random: seed,
        }
    }

    /// Whether the worker may be tried now.
    ///
    /// # Errors
    /// How long not, and why.
    pub(super) fn check(&mut self, to: &Description, now: Instant) -> Result<(), Early> {
        self.forget_old(now);
        let worker = (to.engine.clone(), to.rank);
        let Some(failures) = self.workers.get(&worker) else {
            return Ok(());
        };
        if failures.incarnation != to.incarnation {
            // Somebody else at that place: nothing is known of it.
            self.workers.remove(&worker);
            return Ok(());
        }
        match failures.until.saturating_duration_since(now) {
            Duration::ZERO => Ok(()),
            retry_in => Err(Early {
                retry_in,
                last: failures.last.clone(),
            }),
        }
    }

    /// An attempt has failed.
    pub(super) fn failed(&mut self, to: &Description, now: Instant, why: ConnectError) {
        if self.min.is_zero() {
            return;
        }
        let worker = (to.engine.clone(), to.rank);
        let earlier = self.workers.remove(&worker);
        let earlier = earlier.filter(|earlier| earlier.incarnation == to.incarnation);
        let count = earlier.map_or(0, |earlier| earlier.count).saturating_add(1);
        self.make_room();
        let until = now + self.window(count);
        let failures = Failures {
            incarnation: to.incarnation,
            count,
            until,
            last: why,
        };
        self.workers.insert(worker, failures);
    }

    /// The worker has answered, or has come by itself.
    pub(super) fn reached(&mut self, peer: &Description) {
        self.workers.remove(&(peer.engine.clone(), peer.rank));
    }

    /// The time behind the `count`-th failure in a row: doubled each time, then up to a quarter
    /// shorter, so that those who failed together do not come back together.
    fn window(&mut self, count: u32) -> Duration {
        let doubled = 1_u32
            .checked_shl(count - 1)
            .and_then(|n| self.min.checked_mul(n));
        let whole = doubled.unwrap_or(self.max).min(self.max);
        // SplitMix64 (Steele, Lea and Flood, 2014).
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        whole - (whole / 1024) * (((z ^ (z >> 31)) % 256) as u32)
    }

    /// Forgets those that nobody has tried for a while.
    fn forget_old(&mut self, now: Instant) {
        let patience = 2 * self.max;
        self.workers
            .retain(|_, failures| now.saturating_duration_since(failures.until) < patience);
    }

    fn make_room(&mut self) {
        if self.workers.len() >= MAX_WORKERS {
            let first = self.workers.iter().min_by_key(|(_, other)| other.until);
            if let Some(first) = first.map(|(worker, _)| worker.clone()) {
                self.workers.remove(&first);
            }
        }
    }
}

#[cfg(test)]
mod tests;

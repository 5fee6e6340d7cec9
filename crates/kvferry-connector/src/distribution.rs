//! How long something takes: counted in buckets, so that a dashboard can ask for quantiles.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The buckets' upper bounds in microseconds, each included; what is longer than the last is in one more.
pub const BOUNDS_US: [u64; 16] = [
    50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000,
    1_000_000, 5_000_000, 30_000_000,
];

/// Times that were counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Distribution {
    /// How many there were in each bucket: those of [`BOUNDS_US`], and what is longer.
    pub buckets: [u64; BOUNDS_US.len() + 1],
    /// Their sum, in microseconds.
    pub sum_us: u64,
    /// The longest, in microseconds.
    pub max_us: u64,
}

impl Distribution {
    /// How many there were.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }
}

/// The same, written to by whoever measures.
#[derive(Debug, Default)]
pub(crate) struct Times {
    buckets: [AtomicU64; BOUNDS_US.len() + 1],
    sum_us: AtomicU64,
    max_us: AtomicU64,
}

impl Times {
    pub(crate) fn count(&self, time: Duration) {
        let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let bucket = BOUNDS_US.partition_point(|&bound| bound < us);
        if let Some(bucket) = self.buckets.get(bucket) {
            bucket.fetch_add(1, Ordering::Relaxed);
        }
        self.sum_us.fetch_add(us, Ordering::Relaxed);
        self.max_us.fetch_max(us, Ordering::Relaxed);
    }

    pub(crate) fn snapshot(&self) -> Distribution {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Distribution {
            buckets: std::array::from_fn(|bucket| of(&self.buckets[bucket])),
            sum_us: of(&self.sum_us),
            max_us: of(&self.max_us),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_in_the_first_bucket_that_has_room_for_it() {
        let times = Times::default();
        for us in [0, 50, 51, 100, 1_000_000, 30_000_001] {
            times.count(Duration::from_micros(us));
        }
        let seen = times.snapshot();
        let mut expected = [0; 17];
        for (bucket, count) in [(0, 2), (1, 2), (13, 1), (16, 1)] {
            expected[bucket] = count;
        }
        assert_eq!(seen.buckets, expected);
        assert_eq!((seen.count(), seen.max_us), (6, 30_000_001));
        assert_eq!(seen.sum_us, 50 + 51 + 100 + 1_000_000 + 30_000_001);
    }
}

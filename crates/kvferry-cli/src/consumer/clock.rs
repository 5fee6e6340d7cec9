//! The time during which something was being read.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

#[derive(Debug, Default)]
struct State {
    reads: u32,
    since: Option<Instant>,
    total: Duration,
}

/// Adds up the wall time during which at least one read was in flight.
#[derive(Debug, Default)]
pub(super) struct ReadClock(Mutex<State>);

impl ReadClock {
    /// A read is about to start.
    pub(super) fn enter(&self) {
        self.enter_at(Instant::now());
    }

    /// A read has ended.
    pub(super) fn leave(&self) {
        self.leave_at(Instant::now());
    }

    /// The time so far; that of reads in flight is not in it.
    pub(super) fn elapsed(&self) -> Duration {
        self.with(|state| state.total)
    }

    fn enter_at(&self, now: Instant) {
        self.with(|state| {
            if state.reads == 0 {
                state.since = Some(now);
            }
            state.reads += 1;
        });
    }

    fn leave_at(&self, now: Instant) {
        self.with(|state| {
            state.reads -= 1;
            if state.reads == 0
                && let Some(since) = state.since.take()
            {
                state.total += now.saturating_duration_since(since);
            }
        });
    }

    fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_reads_count_once_and_gaps_do_not() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let clock = ReadClock::default();
        clock.enter_at(at(0));
        clock.enter_at(at(5));
        clock.leave_at(at(10));
        clock.leave_at(at(12));
        clock.enter_at(at(100));
        clock.leave_at(at(103));
        assert_eq!(clock.elapsed(), Duration::from_millis(15));
    }
}

//! Keeps a log readable when a peer misbehaves at full speed.
//!
//! Responsible for deciding whether a line is written. Not responsible for counting what
//! happened: counters count every case, also those that are not logged.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::{Duration, Instant};

/// A line of one kind about one peer is written at most this often (C119).
pub(crate) const LOG_PERIOD: Duration = Duration::from_secs(10);

/// More kinds and peers than this are not told apart for long.
const MAX_KEYS: usize = 1024;

/// Admits one line per period and counts those it held back.
#[derive(Debug)]
pub struct LogLimit {
    period: Duration,
    last: Option<Instant>,
    suppressed: u64,
}

impl LogLimit {
    /// A limit of one line per `period`.
    #[must_use]
    pub const fn new(period: Duration) -> Self {
        Self {
            period,
            last: None,
            suppressed: 0,
        }
    }

    /// Whether a line may be written at `now`. `Some` carries the number of lines that were held
    /// back since the last one that was admitted.
    pub fn admit(&mut self, now: Instant) -> Option<u64> {
        if let Some(last) = self.last
            && now.saturating_duration_since(last) < self.period
        {
            self.suppressed += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.suppressed))
    }

    fn is_recent(&self, now: Instant) -> bool {
        self.last
            .is_some_and(|last| now.saturating_duration_since(last) < self.period)
    }
}

/// A limit of its own, one line in 10 s, for each kind of line and whoever it is about.
#[derive(Debug, Default)]
pub struct LogLimits(HashMap<u64, LogLimit>);

impl LogLimits {
    /// As [`LogLimit::admit`], for lines of this kind about `whose`.
    pub fn admit(&mut self, kind: &'static str, whose: &str, now: Instant) -> Option<u64> {
        let mut key = DefaultHasher::new();
        (kind, whose).hash(&mut key);
        if self.0.len() >= MAX_KEYS {
            self.0.retain(|_, limit| limit.is_recent(now));
        }
        if self.0.len() >= MAX_KEYS {
            // Whoever makes up names gets no more lines than that.
            key = DefaultHasher::new();
            kind.hash(&mut key);
        }
        self.0
            .entry(key.finish())
            .or_insert_with(|| LogLimit::new(LOG_PERIOD))
            .admit(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_per_period_and_the_next_one_says_how_many_were_held_back() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut limit = LogLimit::new(Duration::from_secs(1));
        assert_eq!(limit.admit(at(0)), Some(0));
        assert_eq!(limit.admit(at(1)), None);
        assert_eq!(limit.admit(at(999)), None);
        assert_eq!(limit.admit(at(1_000)), Some(2));
        assert_eq!(limit.admit(at(1_500)), None);
        assert_eq!(limit.admit(at(9_000)), Some(1));
        assert_eq!(limit.admit(at(20_000)), Some(0));
    }
    #[test]
    fn c119_kinds_and_peers_have_limits_of_their_own_and_made_up_names_share_one() {
        let start = Instant::now();
        let mut limits = LogLimits::default();
        assert_eq!(limits.admit("lost", "a", start), Some(0));
        assert_eq!(limits.admit("lost", "b", start), Some(0));
        assert_eq!(limits.admit("refused", "a", start), Some(0));
        assert_eq!(limits.admit("lost", "a", start), None);
        let written = (0..10_000)
            .filter(|n| limits.admit("lost", &format!("name {n}"), start).is_some())
            .count();
        assert!(written <= MAX_KEYS, "{written} lines");
        assert!(limits.0.len() <= MAX_KEYS + 1);
        // What is old is forgotten.
        let later = start + LOG_PERIOD;
        assert_eq!(limits.admit("lost", "c", later), Some(0));
        assert_eq!(limits.0.len(), 1);
    }
}

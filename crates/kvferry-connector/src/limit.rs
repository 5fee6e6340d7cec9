//! Keeps a log readable when a peer misbehaves at full speed.
//!
//! Responsible for deciding whether a line is written. Not responsible for counting what
//! happened: counters count every case, also those that are not logged.

use std::time::{Duration, Instant};

/// Admits one line per period and counts those it held back.
#[derive(Debug)]
pub(crate) struct LogLimit {
    period: Duration,
    last: Option<Instant>,
    suppressed: u64,
}

impl LogLimit {
    /// A limit of one line per `period`.
    pub(crate) const fn new(period: Duration) -> Self {
        Self {
            period,
            last: None,
            suppressed: 0,
        }
    }

    /// Whether a line may be written at `now`. `Some` carries the number of lines that were held
    /// back since the last one that was admitted.
    pub(crate) fn admit(&mut self, now: Instant) -> Option<u64> {
        if let Some(last) = self.last
            && now.saturating_duration_since(last) < self.period
        {
            self.suppressed += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.suppressed))
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
}

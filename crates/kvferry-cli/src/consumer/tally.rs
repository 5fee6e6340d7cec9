//! What the slots of a run have done together, and what went wrong.

use std::sync::{Mutex, PoisonError};

/// Failures that are listed; more are only counted.
const LISTED: usize = 20;

/// Sums over the requests of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    /// Requests that were verified and whose lease was confirmed.
    pub(crate) requests: u64,
    /// Blocks that were read, each over all layers.
    pub(crate) blocks: u64,
    /// Bytes that reads said they had moved.
    pub(crate) bytes: u64,
    /// Bytes of those that were what they should be, in requests that count.
    pub(crate) verified_bytes: u64,
    /// Contiguous runs that were read.
    pub(crate) operations: u64,
    /// The first failures.
    pub(crate) failures: Vec<String>,
    /// Failures beyond those.
    pub(crate) more_failures: u64,
}

impl Totals {
    pub(crate) fn fail(&mut self, failure: String) {
        if self.failures.contains(&failure) {
            // Such as the producer's end, which every slot sees.
        } else if self.failures.len() < LISTED {
            self.failures.push(failure);
        } else {
            self.more_failures += 1;
        }
    }
}

/// The totals while several threads add to them.
#[derive(Debug, Default)]
pub(super) struct Tally(Mutex<Totals>);

impl Tally {
    pub(super) fn add(&self, add: impl FnOnce(&mut Totals)) {
        add(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub(super) fn fail(&self, failure: String) {
        self.add(|totals| totals.fail(failure));
    }

    pub(super) fn take(self) -> Totals {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_listed_once_and_not_without_end() {
        let tally = Tally::default();
        for n in 0..LISTED + 5 {
            tally.fail(format!("failure {n}"));
            tally.fail("failure 0".to_owned());
        }
        let totals = tally.take();
        assert_eq!((totals.failures.len(), totals.more_failures), (LISTED, 5));
    }
}

//! What came of a run.

use serde::{Deserialize, Serialize};

use crate::scheduler::Counts;

/// A run's figures. Equal for equal scenarios, as long as the connectors are deterministic.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The seed, where the scenario was made from one.
    pub seed: u64,
    /// Requests that clients sent.
    pub requests: u32,
    /// Those that have the right tokens.
    pub finished: u32,
    /// Those that failed explicitly.
    pub failed: u32,
    /// Those whose client went away.
    pub aborted: u32,
    /// Tokens that clients got.
    pub tokens: u64,
    /// Turns of the whole cluster.
    pub ticks: u64,
    /// Restarts of engines.
    pub restarts: u32,
    /// What each engine's scheduler counted, over all of its lives, by its name.
    pub engines: Vec<(String, Counts)>,
    /// A digest of every request's end.
    pub digest: u64,
    /// The rule that was broken, which ended the run.
    pub violation: Option<String>,
}

impl Counts {
    /// Both together.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            steps: self.steps + other.steps,
            computed_tokens: self.computed_tokens + other.computed_tokens,
            local_tokens: self.local_tokens + other.local_tokens,
            loaded_tokens: self.loaded_tokens + other.loaded_tokens,
            loads: self.loads + other.loads,
            failed_loads: self.failed_loads + other.failed_loads,
            zeroed_offers: self.zeroed_offers + other.zeroed_offers,
            put_off: self.put_off + other.put_off,
            preemptions: self.preemptions + other.preemptions,
            held: self.held + other.held,
            aborted_loads: self.aborted_loads + other.aborted_loads,
        }
    }
}

impl Report {
    /// What all engines counted.
    #[must_use]
    pub fn total(&self) -> Counts {
        self.engines
            .iter()
            .fold(Counts::default(), |sum, &(_, counts)| sum.plus(counts))
    }
}

//! `kvferry sim`, as a function.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::cluster::{Cluster, ConnectorFactory, Patience};
use crate::report::Report;
use crate::violation::SimError;
use crate::workload::Scenario;

/// How much goes wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Faults {
    /// Nothing: every request must end with the right tokens.
    #[default]
    None,
    /// Some aborts, late reports and small pools.
    Mixed,
    /// Many aborts, routers that drop parameters, restarts.
    Harsh,
    /// As mixed, and reads that say that they brought something and did not: only checksums tell.
    Lying,
}

impl Faults {
    /// What it is called on a command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Mixed => "mixed",
            Self::Harsh => "harsh",
            Self::Lying => "lying",
        }
    }
}

/// What to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// How many requests.
    pub requests: u32,
    /// The seed of everything.
    pub seed: u64,
    /// How much goes wrong. A factory may inject faults of its own by it.
    pub faults: Faults,
    /// Ranks of an engine, at most. Others than 1 and this are not drawn.
    pub max_ranks: u32,
    /// Cache groups, at most; 2 allows models with a sliding window.
    pub max_groups: u32,
    /// Whether [`Faults::Harsh`] restarts engines.
    pub restarts: bool,
    /// Whether engines are kinder than vLLM with windows ([`SchedulerConfig::keeps_last`](crate::SchedulerConfig)).
    pub keeps_last: bool,
    /// Whether clients go away between the engines, so that a lease has to expire.
    pub abandon: bool,
    /// How long nothing may happen.
    pub patience: Patience,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            requests: 100,
            seed: 0,
            faults: Faults::None,
            max_ranks: 2,
            max_groups: 2,
            restarts: true,
            keeps_last: true,
            abandon: true,
            patience: Patience {
                idle_ticks: 2000,
                time: Duration::from_secs(60),
            },
        }
    }
}

/// Runs the scenario of a seed. A rule that was broken is in [`Report::violation`].
///
/// # Errors
/// Everything else: a configuration, memory, or a connector that could not be made.
pub fn run(options: &Options, factory: &mut dyn ConnectorFactory) -> Result<Report, SimError> {
    let scenario = Scenario::random(options);
    let mut cluster = Cluster::new(scenario, options.patience, factory)?;
    let ended = cluster.run();
    let mut report = cluster.report();
    report.seed = options.seed;
    match ended {
        Ok(()) => {}
        Err(SimError::Breach(breach)) => report.violation = Some(breach.to_string()),
        Err(error) => return Err(error),
    }
    Ok(report)
}

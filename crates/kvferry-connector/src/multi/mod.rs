//! `MultiConnector`: an ordered list of connectors as one.
//!
//! Responsible for which child loads, for counting over children, and for whose parameters are whose. Not
//! responsible for anything that moves bytes.
//!
//! Every child is asked and the first that offers loads; only that one sees the external tokens. All
//! children save. Invariants: per request one load, and none after it has ended, until the request
//! is preempted; per rank one "received", from the child that loads; per rank one "sent", after the last
//! child that holds the blocks.

mod config;
mod params;
mod plan;
mod scheduler;
mod stats;
mod worker;

pub use crate::contract::Role;
pub use config::{
    BuildError, ChildConfig, ChildFactory, ConnectorKind, MultiConfig, MultiConfigError,
};
pub use plan::{Chosen, Holding, Plan};
pub use scheduler::{ComposeError, MultiScheduler};
pub use stats::{MultiSchedulerStats, MultiWorkerStats};
pub use worker::MultiWorker;

#[cfg(test)]
mod tests;

//! `RemotePrefill`: blocks that another engine has computed are read out of its memory, under a lease,
//! and released by notification.

mod config;
mod plan;
mod scheduler;
mod stats;
mod worker;

pub use crate::contract::{Reach, Role};
pub use config::{RemoteConfig, RemoteError};
pub use kvferry_wire::params::Source;
pub use plan::{GroupPairs, Load, Plan, RemoteLease, Report};
pub use scheduler::RemoteScheduler;
pub use stats::{FailedLoads, RemoteStats};
pub use worker::{LoaderStats, RemoteWorker};

/// The rank that the engine and its directory know by this number.
const fn rank_of(number: u32) -> kvferry_wire::Rank {
    kvferry_wire::Rank {
        pp: 0,
        // At most `MAX_RANKS`.
        tp: number as u16,
    }
}

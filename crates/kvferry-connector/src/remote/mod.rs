//! `RemotePrefill`: blocks that another engine has computed are read out of its memory, under a lease,
//! and released by notification.

mod config;
mod params;
mod plan;
mod scheduler;
mod stats;

pub use config::{RemoteConfig, RemoteError, Role};
pub use params::{
    Asked, MAX_DURATION_MS, MAX_GROUP_BLOCKS, MAX_GROUPS, MAX_RANKS, PARAMS_VERSION, ParamsError,
    RemoteOffer,
};
pub use plan::{GroupPairs, Load, Plan, RemoteLease, Report, Source};
pub use scheduler::RemoteScheduler;
pub use stats::{FailedLoads, RemoteStats};

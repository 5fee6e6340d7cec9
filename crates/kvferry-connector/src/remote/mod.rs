//! `RemotePrefill`: blocks that another engine has computed are read out of its memory, under a lease,
//! and released by notification.

mod params;
mod plan;

pub use params::{
    Asked, MAX_DURATION_MS, MAX_GROUP_BLOCKS, MAX_GROUPS, MAX_RANKS, PARAMS_VERSION, ParamsError,
    RemoteOffer,
};
pub use plan::{GroupPairs, Load, Plan, RemoteLease, Report, Source};

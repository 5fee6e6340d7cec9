//! `RemotePrefill`: blocks that another engine has computed are read out of its memory, under a lease,
//! and released by notification.

mod plan;

pub use plan::{GroupPairs, Load, Plan, RemoteLease, Report, Source};

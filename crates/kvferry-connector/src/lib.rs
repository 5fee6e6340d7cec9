//! What a connector needs on top of the engine: finding peers, leases, and notify-to-free.

pub mod directory;
pub mod lease;
mod limit;

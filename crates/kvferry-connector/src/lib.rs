//! What a connector needs on top of the engine: finding peers, leases and notify-to-free; and the
//! connectors themselves, with the contract that a scheduler and its workers drive them by.

pub mod contract;
pub mod directory;
pub mod discovery;
pub mod distribution;
pub mod lease;
mod load_state;
pub mod metrics;
pub mod multi;
mod nearest;
pub mod remote;
pub mod settings;
pub mod storage;

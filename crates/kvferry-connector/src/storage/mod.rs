//! `SharedStorage`: full blocks as content-addressed files in a directory that any number of engines
//! share.
//!
//! Responsible for saving every full block once, for finding the blocks of a prompt again, and for
//! the size of the directory. Not responsible for blocks in GPU memory, or for blocks that are not
//! full.
//!
//! Invariants: bytes that are put into a block are those that were saved under its key, or the load
//! has failed; no thread touches a block's memory after the block was reported; nothing here waits
//! for a disk on the scheduler's or the engine's thread.

mod budget;
mod claim;
mod config;
mod file;
mod io;
mod key;
mod layout;
mod log;
mod lookup;
mod plan;
mod request;
mod saves;
mod scheduler;
mod stats;
mod worker;

pub use budget::RoomError;
pub use config::{
    MAX_GROUPS, MAX_IO_THREADS, MAX_TIME, StorageConfig, StorageConfigError, StorageSettings,
};
pub use key::BlockKey;
pub use plan::{KeyedBlock, Load, Plan, Report, Save};
pub use scheduler::StorageScheduler;
pub use stats::{StorageSchedulerStats, StorageWorkerStats};
pub use worker::{OpenStorageError, StorageWorker};

#[cfg(test)]
mod tests;

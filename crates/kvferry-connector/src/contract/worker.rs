//! A worker half, and the blocks that it is given.

use std::thread::JoinHandle;
use std::time::Duration;

use kvferry_engine::{MemoryRegion, panic_message};
use thiserror::Error;

use super::{StepPlan, WorkerReport};
use crate::metrics::Figures;

/// The blocks of one layer on this rank.
#[derive(Clone, Debug)]
pub struct CacheLayer {
    /// The layer's number among all layers of the model.
    pub layer: u32,
    /// The cache group that it belongs to.
    pub group: u32,
    /// The memory.
    pub memory: MemoryRegion,
    /// Where block 0 begins in it, in bytes.
    pub offset: u64,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Bytes from one block to the next, at least `block_bytes`.
    pub block_stride: u64,
    /// How many blocks, at least 1.
    pub blocks: u32,
}

/// A cache group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheGroup {
    /// Tokens of a block, at least 1.
    pub block_tokens: u32,
}

/// All blocks of a rank.
#[derive(Clone, Debug)]
pub struct CacheLayout {
    /// The groups; their number is their place.
    pub groups: Vec<CacheGroup>,
    /// The layers, of all groups.
    pub layers: Vec<CacheLayer>,
}

/// Why a rank's blocks were not taken.
#[derive(Clone, Debug, Error)]
#[error("layer {layer}: {reason}")]
pub struct RegisterCacheError {
    /// The layer.
    pub layer: u32,
    /// What is wrong with it, with values.
    pub reason: String,
}

/// A thread of a rank's half has ended by itself. What it held is never reported: a read that was under way may still
/// write into its blocks, so that nothing may be said of them, and nobody may have them. Whoever gets this ends the
/// engine's process; its supervisor starts it anew.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "the {thread} of rank {rank} has ended by itself: {reason}; its loads and held blocks are never reported, so that \
     requests would wait for ever: restart the server"
)]
pub struct WorkerLost {
    /// The rank.
    pub rank: u32,
    /// Which thread.
    pub thread: &'static str,
    /// Why, in its own words.
    pub reason: String,
}

impl WorkerLost {
    /// Of a thread that has ended although nobody had told it to.
    pub(crate) fn of(rank: u32, thread: &'static str, ended: JoinHandle<()>) -> Self {
        let reason = match ended.join() {
            Ok(()) => "it returned without being told to".to_owned(),
            Err(panic) => format!("it panicked: {}", panic_message(&*panic)),
        };
        Self::found(rank, thread, reason)
    }

    /// The same, with the reason known; says so in the log.
    pub(crate) fn found(rank: u32, thread: &'static str, reason: String) -> Self {
        tracing::error!(
            rank,
            thread,
            reason,
            "a thread has ended by itself; the server must be restarted"
        );
        Self {
            rank,
            thread,
            reason,
        }
    }
}

/// A connector's worker half, for one rank.
///
/// The engine calls these from one thread, around its forward; none of them waits for a peer or a
/// disk, but for [`shutdown`](Self::shutdown).
pub trait WorkerConnector: Send {
    /// Takes the rank's blocks; once, before the first step.
    ///
    /// # Errors
    /// What does not fit, with the layer.
    fn register(&mut self, layout: &CacheLayout) -> Result<(), RegisterCacheError>;

    /// Before any connector of this rank begins the step: what still reads blocks that have a new
    /// owner from this step on lets go of them. Afterwards the engine may write to these blocks, also
    /// before the step begins. Nothing for a connector that reads blocks only while they are owned or
    /// held.
    fn release_blocks(&mut self, plan: &StepPlan) {
        let _ = plan;
    }

    /// A step begins: everything that earlier steps were to write is written. Loads of the plan start
    /// here.
    fn begin_step(&mut self, plan: StepPlan);

    /// The step's forward is over: what it was to write is written. Saves of the plan start here.
    fn end_step(&mut self);

    /// What has ended since the last report.
    ///
    /// # Errors
    /// [`WorkerLost`], from then on always: the rank cannot go on, and reports nothing any more.
    fn take_report(&mut self) -> Result<WorkerReport, WorkerLost>;

    /// Adds what this rank has counted. Cheap: no waiting, so a figure of another thread may be that of the call
    /// before.
    fn figures(&mut self, figures: &mut Figures) {
        let _ = figures;
    }

    /// Ends everything: leases may end by themselves for up to `within`, then they are revoked.
    fn shutdown(&mut self, within: Duration);
}

//! What can be wrong, in a connector or in the simulator.
//!
//! Responsible for one name per rule. The first group are vLLM's own assertions, the second rules of
//! [`kvferry_connector::contract`], the third what holds of blocks and bytes whatever happens. A run
//! ends at its first violation.

use kvferry_connector::contract::{RegisterCacheError, WorkerLost};
use kvferry_engine::MemoryError;
use kvferry_wire::RequestId;
use thiserror::Error;

/// Which report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A load is over.
    Received,
    /// A finished request is not needed any more.
    Sent,
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Received => "received",
            Self::Sent => "sent",
        })
    }
}

/// A rule that was broken.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Violation {
    // vLLM's assertions.
    /// A completion for a request that the scheduler no longer has: late, duplicate, or never there.
    #[error("{request:?} was reported as {kind}, but the scheduler does not have it (any more)")]
    UnknownCompletion {
        /// The request.
        request: RequestId,
        /// As what.
        kind: Kind,
    },
    /// A load was reported for a request that does not wait for one.
    #[error("{request:?} was reported as received, but does not wait for a load")]
    ReceivedNotParked {
        /// The request.
        request: RequestId,
    },
    /// A request that still runs was reported as sent.
    #[error("{request:?} was reported as sent, but has not finished")]
    SentUnfinished {
        /// The request.
        request: RequestId,
    },
    /// The wrong kind of completion for one that finished.
    #[error("{request:?} has finished and waits for another report than `{kind}`")]
    WrongCompletion {
        /// The request.
        request: RequestId,
        /// What was reported.
        kind: Kind,
    },
    /// An async load of zero tokens.
    #[error("the lookup of {request:?} offered 0 tokens as an async load")]
    EmptyAsyncOffer {
        /// The request.
        request: RequestId,
    },
    /// An offer past the prompt, or of the whole prompt as a sync load.
    #[error(
        "the lookup of {request:?} offered {offered} tokens after {computed} computed ones, of a prompt of {prompt} \
         ({})",
        if *.asynchronous { "async: at most the prompt" } else { "sync: at most the prompt less one token" }
    )]
    OfferTooLong {
        /// The request.
        request: RequestId,
        /// Tokens computed.
        computed: u32,
        /// Tokens offered.
        offered: u32,
        /// Tokens of the prompt.
        prompt: u32,
        /// Whether it was an async load.
        asynchronous: bool,
    },

    // The contract.
    /// A rank has lost a thread, and reports nothing any more.
    #[error(transparent)]
    WorkerLost(#[from] WorkerLost),
    /// A rank reported the same twice.
    #[error("rank {rank} reported {request:?} as {kind} twice")]
    ReportedTwice {
        /// The rank.
        rank: u32,
        /// The request.
        request: RequestId,
        /// As what.
        kind: Kind,
    },
    /// A load was offered again, or put off, after one was consumed.
    #[error("{request:?} was offered {tokens} tokens (0: later) after its load was consumed")]
    OfferedAgain {
        /// The request.
        request: RequestId,
        /// Tokens offered.
        tokens: u32,
    },
    /// Another load was offered after as many failed ones as are allowed.
    #[error("{request:?} was offered a load after {failed} failed ones")]
    TooManyTries {
        /// The request.
        request: RequestId,
        /// Loads that failed.
        failed: u32,
    },
    /// "Later" for longer than was said.
    #[error("{request:?} was put off for longer than its first answer said, by more than 10 s")]
    LaterOverdue {
        /// The request.
        request: RequestId,
    },
    /// Blocks were to be held for sending while they are still being loaded.
    #[error("{request:?} ended during its load, and the answer was to hold its blocks")]
    HoldDuringLoad {
        /// The request.
        request: RequestId,
    },
    /// Nothing was to be held.
    #[error("{request:?} ended without blocks, and the answer was to hold them")]
    HoldWithoutBlocks {
        /// The request.
        request: RequestId,
    },
    /// A block was reported as failed that was not to be loaded.
    #[error("block {block} of group {group} failed for {request:?}, which was not to load it")]
    FailedBlockNotLoaded {
        /// The request.
        request: RequestId,
        /// The cache group.
        group: u32,
        /// The block.
        block: u32,
    },
    /// Nothing happened for too long.
    #[error(
        "nothing happens any more: {waiting} requests wait, {parked} for loads; {held} hold blocks after their end; \
             the connector has pending work: {pending}"
    )]
    Stuck {
        /// Requests that wait.
        waiting: usize,
        /// Those of them that wait for a load.
        parked: usize,
        /// Requests that ended and whose blocks are held.
        held: usize,
        /// What the connector says.
        pending: bool,
    },
    /// The engines compute, but no request ends.
    #[error("no request has ended in {turns} turns in which something happened; {left} are left")]
    NoEnd {
        /// Turns in which something happened.
        turns: u64,
        /// Requests that have not ended.
        left: usize,
    },

    // Blocks and bytes.
    /// A block was freed that nobody had.
    #[error("block {block} was freed, but nobody refers to it")]
    FreedTwice {
        /// The block.
        block: u32,
    },
    /// A block's reference count is wrong.
    #[error("block {block} of group {group}: {counted} refer to it, the pool says {pool}")]
    References {
        /// The cache group.
        group: u32,
        /// The block.
        block: u32,
        /// Counted over all requests.
        counted: u32,
        /// The pool's count.
        pool: u32,
    },
    /// A block is in the free queue although it is in use, or the other way round.
    #[error(
        "block {block} of group {group} is in the free queue: {queued}, which it should not be"
    )]
    FreeQueue {
        /// The cache group.
        group: u32,
        /// The block.
        block: u32,
        /// Whether it is queued.
        queued: bool,
    },
    /// Two requests have a block that is not in the prefix cache.
    #[error("block {block} of group {group} has {owners} owners, and is not cached content")]
    OwnedTwice {
        /// The cache group.
        group: u32,
        /// The block.
        block: u32,
        /// How many.
        owners: u32,
    },
    /// A block that a load still writes to is somebody else's, or findable in the prefix cache.
    #[error(
        "block {block} of group {group} is being loaded for {request:?}, and is shared or cached"
    )]
    SharedDuringLoad {
        /// The request that it is loaded for.
        request: RequestId,
        /// The cache group.
        group: u32,
        /// The block.
        block: u32,
    },
    /// A request that only waits has blocks.
    #[error(
        "{request:?} waits and has neither a load nor loaded blocks, but holds {blocks} blocks"
    )]
    BlocksWhileWaiting {
        /// The request.
        request: RequestId,
        /// How many.
        blocks: usize,
    },
    /// Bytes are not what they should be.
    #[error(
        "{what}: group {group} block {block}, token {token} of it, layer {layer} on rank {rank} has wrong bytes"
    )]
    WrongBytes {
        /// Of what.
        what: &'static str,
        /// The cache group.
        group: u32,
        /// The block.
        block: u32,
        /// The token's place in the block.
        token: u32,
        /// The layer.
        layer: u32,
        /// The rank.
        rank: u32,
    },
    /// A block was written after it was freed and before it was handed out again.
    #[error(
        "block {block} of group {group} was written while it was free (layer {layer} on rank {rank})"
    )]
    LateWrite {
        /// The cache group.
        group: u32,
        /// The block.
        block: u32,
        /// The layer.
        layer: u32,
        /// The rank.
        rank: u32,
    },
    /// A request has other tokens than the model gives.
    #[error("{request} generated {got:?}, which should be {expected:?}")]
    WrongTokens {
        /// The request.
        request: String,
        /// What it generated.
        got: Vec<u32>,
        /// What the model gives.
        expected: Vec<u32>,
    },
    /// A request that should have tokens, or an end, has none.
    #[error("{request} ended without a result: {why}")]
    NoResult {
        /// The request.
        request: String,
        /// What happened instead.
        why: String,
    },
    /// Something is left at the end.
    #[error("at the end {left}")]
    Leftover {
        /// What, with numbers.
        left: String,
    },
    /// Halves may be in processes of their own.
    #[error("{what} does not come through between the halves: {reason}")]
    Unsent {
        /// What was to be sent.
        what: &'static str,
        /// What became of it.
        reason: String,
    },
    /// A token looks back at a block that a window has dropped: the whole prompt was offered where its last token needs
    /// one (or the simulator is wrong).
    #[error(
        "position {position} of cache group {group} is looked at and has no block; the whole prompt was offered, and its \
         last token needs one that the window has dropped"
    )]
    NoBlock {
        /// The position.
        position: u32,
        /// The group.
        group: u32,
    },
    /// The simulator's own bookkeeping does not fit together.
    #[error("the simulator is wrong: {0}")]
    Simulator(&'static str),
    /// The simulator's own memory access failed.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// A violation, with where and when.
#[derive(Debug, Error)]
#[error("engine {engine}, tick {tick}: {violation}")]
pub struct Breach {
    /// The engine's name.
    pub engine: String,
    /// The engine's tick.
    pub tick: u64,
    /// What was broken.
    #[source]
    pub violation: Violation,
}

/// Why a run could not be made, or ended.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SimError {
    /// A configuration that cannot work.
    #[error("{field}: {reason}")]
    Config {
        /// The field.
        field: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// There was no memory for a rank's blocks.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A worker did not take its rank's blocks.
    #[error("rank {rank}: {source}")]
    Register {
        /// The rank.
        rank: u32,
        /// Its answer.
        source: RegisterCacheError,
    },
    /// The factory could not make a connector.
    #[error("no connector for engine {engine}: {source}")]
    Factory {
        /// The engine's name.
        engine: String,
        /// The factory's error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A rule was broken.
    #[error(transparent)]
    Breach(#[from] Breach),
}

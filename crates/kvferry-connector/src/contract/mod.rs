//! What a scheduler and its workers ask of a connector.
//!
//! A connector has two halves. The *scheduler half* ([`SchedulerConnector`]) lives beside the
//! scheduler, decides what is loaded, saved and held, and touches no block. A *worker half*
//! ([`WorkerConnector`]) lives beside each rank's blocks and moves them. They may be in different
//! processes: what passes between them is one [`StepPlan`] per step downwards and one
//! [`WorkerReport`] per rank and step upwards, both plain data.
//!
//! The order of calls is vLLM V1's:
//!
//! ```text
//! scheduler   on_new_request
//!             matched_tokens      any number of times, pure
//!             after_alloc         once per scheduled request, again after an async load
//!             build_step          once per step, also the empty ones
//! worker      release_blocks, begin_step, (forward), end_step, take_report
//! scheduler   request_finished    while the step's output is processed
//!             on_report           afterwards, with the reports of all ranks in one
//! ```
//!
//! What the types keep true: a lookup takes `&self`; an offer of zero tokens, of more than the
//! prompt, or of the whole prompt as a sync load cannot be written ([`Matched`]); a load that was
//! planned is reported once per rank and once in all ([`Aggregator`]).

mod aggregate;
mod matched;
mod plan;
mod reach;
mod report;
mod role;
mod scheduler;
mod worker;

pub use aggregate::{Aggregated, Aggregator};
pub use matched::{Matched, Offer};
pub use plan::StepPlan;
pub use reach::Reach;
pub use report::{FailedBlock, LoadFailure, Received, ReportPart, WorkerReport};
pub use role::Role;
pub use scheduler::{
    Allocation, Capabilities, Finish, Finished, FinishedRequest, GroupBlocks, Params, RequestView,
    Scheduled, SchedulerConnector, StepView,
};
pub use worker::{
    CacheGroup, CacheLayer, CacheLayout, RegisterCacheError, WorkerConnector, WorkerLost,
};

/// The block that no request owns: it stands where a group keeps nothing (a window that has moved
/// on), and is never read or written.
pub const NULL_BLOCK: u32 = 0;

//! The scheduler half, and what it is shown of requests and steps.

use kvferry_wire::RequestId;
use serde::{Deserialize, Serialize};

use super::{Aggregated, Matched, StepPlan};
use crate::metrics::Figures;

pub use kvferry_wire::params::Params;

/// A request as the scheduler has it.
#[derive(Clone, Copy, Debug)]
pub struct RequestView<'a> {
    /// Its id in this scheduler.
    pub id: &'a RequestId,
    /// Its token ids as far as they are known, the prompt first.
    pub tokens: &'a [u32],
    /// How many of them are the prompt, at least 1.
    pub prompt: u32,
    /// What came with it, from the client or a router. Not to be trusted.
    pub params: Option<&'a Params>,
    /// What else its content depends on (a LoRA, a cache salt, images), as one opaque string that is
    /// equal for equal content; empty for nothing.
    pub extra_key: &'a str,
}

impl<'a> RequestView<'a> {
    /// The prompt's token ids.
    #[must_use]
    pub fn prompt_tokens(&self) -> &'a [u32] {
        let end = (self.prompt as usize).min(self.tokens.len());
        &self.tokens[..end]
    }
}

/// Block ids per cache group, each list in the order of token positions. [`NULL_BLOCK`](super::NULL_BLOCK)
/// stands where a group keeps nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupBlocks<'a>(pub &'a [Vec<u32>]);

/// The blocks that a request was given.
#[derive(Clone, Copy, Debug)]
pub struct Allocation<'a> {
    /// All of its blocks, also those that were found in the prefix cache.
    pub blocks: GroupBlocks<'a>,
    /// Tokens that the scheduler's own prefix cache had; after a load, all that count as computed.
    pub local_computed: u32,
    /// Tokens that this connector is to load: what it offered, or less, or none (another child was
    /// chosen; a scheduler's own reasons).
    pub external: u32,
}

/// A request in a step.
#[derive(Clone, Copy, Debug)]
pub struct Scheduled<'a> {
    /// The request.
    pub request: RequestView<'a>,
    /// Blocks that it was given since the last step it was in; all of them if `renewed`.
    pub new_blocks: GroupBlocks<'a>,
    /// It is in a step for the first time, or for the first time since it was preempted.
    pub renewed: bool,
    /// Tokens that were computed (or loaded) before this step.
    pub computed: u32,
    /// Tokens that this step computes, at least 1.
    pub tokens: u32,
}

/// What the scheduler has decided for a step.
#[derive(Clone, Copy, Debug)]
pub struct StepView<'a> {
    /// The step's number; ascends.
    pub number: u64,
    /// Requests that compute something; none in an empty step.
    pub scheduled: &'a [Scheduled<'a>],
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// It stopped by itself.
    Stopped,
    /// It has as many tokens as were asked for, which is how a prefill for others ends.
    Length,
    /// The client went away.
    Aborted,
    /// It was refused or failed.
    Failed,
}

/// A request that ends.
#[derive(Clone, Copy, Debug)]
pub struct FinishedRequest<'a> {
    /// The request.
    pub request: RequestView<'a>,
    /// All of its blocks that `computed` reaches into.
    pub blocks: GroupBlocks<'a>,
    /// Tokens that were computed, with those of steps and of a load that are still under way.
    pub computed: u32,
    /// Tokens of steps that are still under way.
    pub in_flight: u32,
    /// How it ended.
    pub how: Finish,
}

/// What becomes of the blocks of a request that ends.
#[derive(Clone, Debug, PartialEq)]
pub enum Finished {
    /// They are free at once.
    Free,
    /// They stay until every rank has reported the request as sent.
    Hold {
        /// What the client is to pass to whoever reads them.
        params: Option<Params>,
    },
}

/// What a connector is, for the scheduler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// A request fails if this connector cannot deliver what it promised to others.
    pub requires_delivery: bool,
    /// Its errors cost what it would have saved, and nothing else.
    pub best_effort: bool,
    /// Cache groups whose blocks it loads; `None` for all.
    pub loaded_groups: Option<Vec<u32>>,
    /// The block layout that it needs, by the engine's name; `None` for any.
    pub layout: Option<String>,
    /// It may read a block after it was freed (by a window that moved on, a preemption), until
    /// [`release_blocks`](super::WorkerConnector::release_blocks) of the step that gives it to
    /// somebody. Nobody may change a free block's bytes before that; vLLM does not.
    pub reads_freed: bool,
}

/// A connector's scheduler half.
///
/// No call waits for a peer, a worker or a disk that is slow. Ids that are unknown, or known to be
/// finished, are ignored and counted.
pub trait SchedulerConnector: Send {
    /// What it is; constant.
    fn capabilities(&self) -> Capabilities;

    /// A request has come in. It may be finished without any other call.
    fn on_new_request(&mut self, request: &RequestView<'_>);

    /// What it has of the prompt beyond the first `computed` tokens. May be asked at any time and any
    /// number of times; says [`Matched::None`] once a load was consumed or failed.
    fn matched_tokens(&self, request: &RequestView<'_>, computed: u32) -> Matched;

    /// The request has its blocks. Called for every request that is scheduled, also if nothing is
    /// to be loaded, also if another connector was chosen, and once more after an async load, with
    /// no external tokens. The only place where the state of a load changes.
    fn after_alloc(&mut self, request: &RequestView<'_>, allocation: &Allocation<'_>);

    /// The plan of a step, for every rank; also for empty steps.
    fn build_step(&mut self, step: &StepView<'_>) -> StepPlan;

    /// These requests lost their blocks and will be scheduled anew.
    fn preempted(&mut self, requests: &[RequestId]);

    /// A request ends. The blocks of one whose async load is under way are the scheduler's to keep
    /// until the load is reported; the answer is [`Finished::Free`] then.
    fn request_finished(&mut self, finished: &FinishedRequest<'_>) -> Finished;

    /// Adds what it has counted. Cheap: no waiting.
    fn figures(&self, figures: &mut Figures) {
        let _ = figures;
    }

    /// What all ranks have reported.
    fn on_report(&mut self, report: &Aggregated);

    /// Whether something waits for a report, so that steps are needed although no request computes.
    fn has_pending_work(&self) -> bool;

    /// No new work: what is held for others may end by itself, and workers are told.
    fn begin_shutdown(&mut self);
}

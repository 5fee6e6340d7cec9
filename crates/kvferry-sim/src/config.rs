//! What an engine is like.

use serde::{Deserialize, Serialize};

use crate::model::{MAX_HEAD_BYTES, Model};
use crate::pool::Reuse;
use crate::violation::SimError;

/// What happens to a request whose load failed (`kv_load_failure_policy`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailurePolicy {
    /// It fails; vLLM's default.
    #[default]
    Fail,
    /// It is looked up again, and computed where nothing is offered any more.
    Recompute,
}

/// A scheduler's settings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SchedulerConfig {
    /// Tokens of a block, at least 1.
    pub block_tokens: u32,
    /// Blocks of every cache group, the null block among them; at least 2.
    pub blocks: u32,
    /// Requests that may run at once, at least 1.
    pub max_running: u32,
    /// Tokens that a step may compute, at least 1.
    pub token_budget: u32,
    /// Whether a prompt may be computed in parts. Without it, longer prompts than the budget are refused.
    pub chunked: bool,
    /// Whether a request is admitted only if all of it fits, and a load only if it leaves the prompts that
    /// are under way what they still need, as vLLM does (`scheduler_reserve_full_isl`). Otherwise
    /// requests that have loaded blocks can stand in each other's way.
    pub reserve: bool,
    /// Whether the next step is scheduled before the output of the last one is processed.
    pub asynchronous: bool,
    /// Slots for that many more tokens are allocated to running requests, as for speculative decoding.
    pub lookahead: u32,
    /// Whether after a load of the whole prompt the blocks are there that its last token looks at, which is computed
    /// again. With windows vLLM may have dropped one; connectors are not to offer the whole prompt there.
    pub keeps_last: bool,
    /// What happens when a load fails.
    pub failure_policy: FailurePolicy,
    /// Loads that a request may have; an offer after so many failed ones is a violation. At least 1.
    pub max_tries: u32,
    /// In so many of 100 cases an offer is taken as zero tokens (as with prompt logprobs).
    pub zero_percent: u32,
    /// In so many of 100 cases fewer tokens than offered are taken; not with windows, of which a peer
    /// has only what the whole offer needs.
    pub less_percent: u32,
    /// Which free block is handed out next.
    pub reuse: Reuse,
    /// A seed for the order in which blocks are free at first; nothing for that of their ids.
    pub scatter: Option<u64>,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self {
            block_tokens: 4,
            blocks: 65,
            max_running: 8,
            token_budget: 32,
            chunked: true,
            reserve: true,
            asynchronous: false,
            lookahead: 0,
            keeps_last: true,
            failure_policy: FailurePolicy::Fail,
            max_tries: 2,
            zero_percent: 0,
            less_percent: 0,
            reuse: Reuse::Vllm,
            scatter: None,
        }
    }
}

/// What an engine is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// It computes prompts for others.
    Prefill,
    /// It generates from what others have computed.
    Decode,
    /// Both.
    #[default]
    Both,
}

/// An engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EngineConfig {
    /// Its name, also its engine id.
    pub name: String,
    /// What it is for.
    pub role: Role,
    /// Its ranks (tensor parallel), at least 1.
    pub ranks: u32,
    /// Its scheduler.
    pub scheduler: SchedulerConfig,
    /// The ticks that a forward takes, at least and at most; drawn for each. With 0 a step is over in
    /// the tick that it is scheduled in. Steps that compute nothing always take 0.
    pub forward_ticks: (u32, u32),
    /// A rank's report may be processed up to so many steps after the one it is of.
    pub report_delay: u32,
    /// Whether the layers of a block lie side by side in memory, so that blocks of one layer are
    /// strided; otherwise each layer is in one piece.
    pub interleaved: bool,
    /// The seed of everything that the engine draws.
    pub seed: u64,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            name: "engine".into(),
            role: Role::Both,
            ranks: 1,
            scheduler: SchedulerConfig::default(),
            forward_ticks: (0, 0),
            report_delay: 0,
            interleaved: false,
            seed: 0,
        }
    }
}

impl EngineConfig {
    /// Refuses what cannot work.
    ///
    /// # Errors
    /// [`SimError::Config`] with the field.
    pub fn check(&self, model: &Model) -> Result<(), SimError> {
        let scheduler = &self.scheduler;
        let groups = model.groups.len() as u32;
        let refuse = |field, reason: String| Err(SimError::Config { field, reason });
        for (field, value) in [
            ("ranks", self.ranks),
            ("block_tokens", scheduler.block_tokens),
            ("max_running", scheduler.max_running),
            ("token_budget", scheduler.token_budget),
            ("max_tries", scheduler.max_tries),
            ("heads", model.heads),
            ("groups", groups),
        ] {
            if value == 0 {
                return refuse(field, "is 0; give at least 1".into());
            }
        }
        if scheduler.blocks < 2 {
            return refuse(
                "blocks",
                format!("{} leave none beside the null block", scheduler.blocks),
            );
        }
        if !(8..=MAX_HEAD_BYTES).contains(&model.head_bytes) {
            return refuse(
                "head_bytes",
                format!("{} is not 8 to {MAX_HEAD_BYTES}", model.head_bytes),
            );
        }
        if !self.ranks.is_multiple_of(model.heads) && !model.heads.is_multiple_of(self.ranks) {
            let (heads, ranks) = (model.heads, self.ranks);
            return refuse(
                "ranks",
                format!("{heads} heads cannot be shared out to {ranks}"),
            );
        }
        if let Some(group) = (0..groups).find(|group| !model.layers.contains(group)) {
            return refuse("layers", format!("none is of cache group {group}"));
        }
        if let Some(group) = model.layers.iter().find(|&&group| group >= groups) {
            return refuse("layers", format!("there is no cache group {group}"));
        }
        Ok(())
    }
}

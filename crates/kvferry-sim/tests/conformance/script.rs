//! What a scenario says, and what a real vLLM did with it.

use std::path::{Path, PathBuf};

use kvferry_connector::contract::Matched;
use kvferry_sim::{Call, EngineConfig, FailurePolicy, NewRequest, SchedulerConfig};
use kvferry_wire::RequestId;
use serde::Deserialize;

/// A file of `scenarios/`. The fields mean the same to `record_hooks.py`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Script {
    #[serde(rename = "about")]
    _about: String,
    pub(crate) options: Options,
    pub(crate) requests: Vec<Request>,
    /// Turns of the engine.
    pub(crate) steps: u32,
    pub(crate) recorded: Recorded,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Options {
    blocks: u32,
    max_running: u32,
    token_budget: u32,
    failure_policy: FailurePolicy,
}

#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Request {
    pub(crate) id: RequestId,
    /// Its length in tokens.
    prompt: u32,
    /// Prompts of one seed begin alike; those of two differ from the first token on.
    seed: u32,
    max_tokens: u32,
    /// The step before which it comes.
    pub(crate) add: u32,
    /// The step before which its client goes away.
    pub(crate) abort: Option<u32>,
    /// The step during whose forward its client goes away.
    pub(crate) abort_in: Option<u32>,
    /// It is refused before it is admitted.
    #[serde(default)]
    pub(crate) reject: bool,
    /// Offers are taken as nothing, as with prompt logprobs.
    #[serde(default)]
    pub(crate) zeroed: bool,
    /// One for each load; when they are used up, nothing is offered.
    #[serde(default)]
    pub(crate) offers: Vec<Offer>,
    /// Held at its end, and sent so many steps after its workers were told of it.
    pub(crate) hold: Option<u32>,
}

#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Offer {
    /// The first so many tokens.
    upto: u32,
    #[serde(default)]
    pub(crate) sync: bool,
    /// An async load is reported so many steps after the one in which it was begun.
    #[serde(default)]
    pub(crate) takes: u32,
    pub(crate) failed: Option<Failed>,
    /// Before this step the lookup is put off.
    #[serde(default)]
    later_until: u32,
}

/// What of a load fails.
#[derive(Clone, Deserialize)]
#[serde(untagged)]
pub(crate) enum Failed {
    /// Blocks, by their places in the request's table.
    Blocks(Vec<usize>),
    /// `"request"`: everything, and it is not said which blocks.
    Request(#[allow(dead_code, reason = "there is only one word")] String),
}

/// What was recorded, and from what.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Recorded {
    pub(crate) vllm: String,
    #[serde(rename = "torch")]
    _torch: String,
    block_size: u32,
    num_gpu_blocks: u32,
    max_num_seqs: u32,
    max_num_batched_tokens: u32,
    async_scheduling: bool,
    scheduler_reserve_full_isl: bool,
    watermark: f64,
    prefix_caching: bool,
    #[serde(rename = "model_runner")]
    _model_runner: u32,
    kv_load_failure_policy: FailurePolicy,
    pub(crate) calls: Vec<Call>,
}

pub(crate) fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/conformance/scenarios")
}

impl Script {
    pub(crate) fn read(name: &str) -> Self {
        let text = std::fs::read_to_string(folder().join(name).with_extension("json")).unwrap();
        serde_json::from_str(&text).unwrap()
    }

    /// An engine like the one that was recorded.
    pub(crate) fn config(&self) -> EngineConfig {
        let (options, recorded) = (&self.options, &self.recorded);
        assert_eq!(
            (
                options.blocks,
                options.max_running,
                options.token_budget,
                options.failure_policy
            ),
            (
                recorded.num_gpu_blocks,
                recorded.max_num_seqs,
                recorded.max_num_batched_tokens,
                recorded.kv_load_failure_policy
            ),
            "the script was changed after it was recorded: scripts/record-hooks"
        );
        // What the simulator has no setting for.
        assert!(recorded.scheduler_reserve_full_isl && recorded.prefix_caching);
        assert_eq!(recorded.watermark, 0.0);
        let zeroed = self.requests.iter().filter(|request| request.zeroed);
        let zeroed = zeroed.count();
        assert!(
            zeroed == 0 || zeroed == self.requests.len(),
            "all or none: the simulator draws"
        );
        EngineConfig {
            scheduler: SchedulerConfig {
                block_tokens: recorded.block_size,
                blocks: recorded.num_gpu_blocks,
                max_running: recorded.max_num_seqs,
                token_budget: recorded.max_num_batched_tokens,
                asynchronous: recorded.async_scheduling,
                failure_policy: recorded.kv_load_failure_policy,
                zero_percent: if zeroed > 0 { 100 } else { 0 },
                max_tries: 9,
                ..SchedulerConfig::default()
            },
            forward_ticks: match self.aborts_in_forward() {
                true => (1, 1),
                false => (0, 0),
            },
            ..EngineConfig::default()
        }
    }

    pub(crate) fn aborts_in_forward(&self) -> bool {
        self.requests
            .iter()
            .any(|request| request.abort_in.is_some())
    }
}

impl Request {
    /// The same tokens as `prompt` in `record_hooks.py` makes.
    pub(crate) fn prompt(&self) -> Vec<u32> {
        (0..self.prompt)
            .map(|place| 1 + (self.seed * 37 + place * 7) % 500)
            .collect()
    }

    pub(crate) fn to_new(&self) -> NewRequest {
        NewRequest {
            id: self.id.clone(),
            prompt: self.prompt(),
            max_tokens: self.max_tokens,
            params: None,
            extra_key: String::new(),
        }
    }
}

impl Offer {
    pub(crate) fn answer(&self, step: u32, prompt: u32, computed: u32) -> Matched {
        if step < self.later_until {
            return Matched::Later(std::time::Duration::from_secs(600));
        }
        match self.sync {
            true => Matched::load_sync(prompt, computed, self.upto),
            false => Matched::load_async(prompt, computed, self.upto),
        }
    }
}

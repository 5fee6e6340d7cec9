//! One engine of a run: the reference scheduler and `RemotePrefill`, with real memory.
//!
//! Responsible for setting both up as a serving engine would, from a plan. Not for requests, which
//! whoever has the engine puts in.

use kvferry_connector::contract::{Role as RemoteRole, SchedulerConnector, WorkerConnector};
use kvferry_connector::remote::{RemoteConfig, RemoteScheduler, RemoteWorker};
use kvferry_engine::{Engine, EngineConfig, LaneChoice, Service};
use kvferry_sim::{
    EngineConfig as SimConfig, Halves, MAX_HEAD_BYTES, Model, Role, SchedulerConfig, SimEngine,
};
use kvferry_wire::demo::DEMO_BLOCK_TOKENS;
use kvferry_wire::{DEMO_CHANNEL, DemoPlan, EngineId, Instance};

use crate::error::CliError;

/// Time for the blocks of one load: any number of them, over the slowest lane.
const READ_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(60);

/// Tokens that a step computes.
const TOKEN_BUDGET: u32 = 8192;

/// What an engine is to be.
pub(crate) struct Setup {
    pub(crate) id: EngineId,
    pub(crate) role: Role,
    pub(crate) lane: LaneChoice,
    pub(crate) allow_emulation: bool,
    /// Where the directory of a producer listens.
    pub(crate) listen: (String, u16),
    /// Who answers on the demo's channel.
    pub(crate) service: Box<dyn Service>,
}

/// An engine without memory, which can talk to others.
pub(crate) struct Half {
    config: RemoteConfig,
    instance: Instance,
    role: Role,
    worker: RemoteWorker,
}

impl Half {
    /// Starts the engine.
    pub(crate) fn start(setup: Setup) -> Result<Self, CliError> {
        let instance = Instance::random()?;
        let mut config = RemoteConfig::new(setup.id.clone(), vec![DEMO_BLOCK_TOKENS]);
        config.role = match setup.role {
            Role::Prefill => RemoteRole::Producer,
            Role::Decode => RemoteRole::Consumer,
            Role::Both => RemoteRole::Both,
        };
        (config.listen_host, config.listen_port) = setup.listen;
        config.lane = setup.lane;
        config.read_timeout = READ_TIMEOUT;
        let mut engine = EngineConfig::new(setup.id);
        engine.allow_emulation = setup.allow_emulation;
        let service = setup.service;
        let worker = RemoteWorker::start_with(config.clone(), instance, 0, engine, |builder| {
            builder.service(DEMO_CHANNEL, service).start()
        })?;
        Ok(Self {
            config,
            instance,
            role: setup.role,
            worker,
        })
    }

    pub(crate) fn engine(&self) -> &Engine {
        self.worker.engine()
    }

    /// The connector's scheduler half.
    pub(crate) fn scheduler(&self) -> Result<RemoteScheduler, CliError> {
        Ok(RemoteScheduler::new(self.config.clone(), self.instance)?)
    }

    /// Gives it a scheduler and blocks. `scheduler` and `worker` stand around the halves.
    pub(crate) fn with_blocks(
        self,
        plan: &DemoPlan,
        blocks: u32,
        scheduler: Box<dyn SchedulerConnector>,
        worker: impl FnOnce(RemoteWorker) -> Box<dyn WorkerConnector>,
    ) -> Result<SimEngine, CliError> {
        let config = SimConfig {
            name: self.config.engine.as_str().to_owned(),
            role: self.role,
            scheduler: SchedulerConfig {
                block_tokens: DEMO_BLOCK_TOKENS,
                blocks,
                token_budget: TOKEN_BUDGET,
                // As after a long time of service: blocks that follow one another are rare.
                scatter: Some(plan.seed),
                ..SchedulerConfig::default()
            },
            seed: plan.seed,
            ..SimConfig::default()
        };
        let halves = Halves {
            scheduler,
            workers: vec![worker(self.worker)],
        };
        Ok(SimEngine::new(config, &model(plan), halves)?)
    }
}

/// The model whose blocks have the plan's sizes.
pub(crate) fn model(plan: &DemoPlan) -> Model {
    let token = plan.block_bytes / u64::from(DEMO_BLOCK_TOKENS);
    // Heads as long as they may be; 8 bytes always do.
    let fits = |bytes: &u32| token.is_multiple_of(u64::from(*bytes));
    let head_bytes = (8..=MAX_HEAD_BYTES)
        .rev()
        .step_by(8)
        .find(fits)
        .unwrap_or(8);
    Model {
        layers: vec![0; plan.layers as usize],
        heads: (token / u64::from(head_bytes)) as u32,
        head_bytes,
        // Every request has the same length.
        stop_every: 0,
        ..Model::default()
    }
}

/// Bytes of so many blocks, unless that overflows.
pub(crate) fn bytes_of(plan: &DemoPlan, blocks: u32) -> Option<u64> {
    (u64::from(plan.layers) * u64::from(blocks)).checked_mul(plan.block_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_models_blocks_have_the_plans_bytes() {
        for block_bytes in [128, 4096, 32768, 128 * 10_007, 1 << 20] {
            let plan = DemoPlan {
                requests: 1,
                blocks: 1,
                block_bytes,
                layers: 3,
                seed: 0,
            };
            let model = model(&plan);
            let (heads, bytes) = (u64::from(model.heads), u64::from(model.head_bytes));
            assert_eq!(heads * bytes * 16, block_bytes);
            assert!((8..=256).contains(&bytes) && bytes.is_multiple_of(8));
            assert_eq!(model.layers.len(), 3);
            assert_eq!(bytes_of(&plan, 7), Some(21 * block_bytes));
        }
    }
}

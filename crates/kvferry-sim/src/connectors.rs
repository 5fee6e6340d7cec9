//! The real connectors, for runs of the simulator: `RemotePrefill` over a fabric with or without faults,
//! `SharedStorage` in a directory, and both under a `MultiConnector`.
//!
//! Responsible for making both halves of an engine and for telling the directory about its ranks. The
//! threads behind them make a run's order depend on the machine: what is checked holds in every order.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kvferry_connector::contract::{
    Reach, Role as ConnectorRole, SchedulerConnector, WorkerConnector,
};
use kvferry_connector::directory::DirectoryServer;
use kvferry_connector::lease::{BorrowConfig, LeaseConfig};
use kvferry_connector::multi::{MultiScheduler, MultiWorker};
use kvferry_connector::remote::{RemoteConfig, RemoteScheduler, RemoteWorker};
use kvferry_connector::storage::{StorageConfig, StorageScheduler, StorageSettings, StorageWorker};
use kvferry_engine::fabric::{Fault, FaultControl, FaultFabric, FaultRates};
use kvferry_engine::{Engine, EngineBuilder, EngineConfig, LoopbackFabric, LoopbackNetwork};
use kvferry_wire::{EngineId, Instance, Rank};

use crate::cluster::{ConnectorFactory, EngineSpec, FactoryError};
use crate::config::Role;
use crate::engine::Halves;
use crate::model::GroupKind;
use crate::rng::Rng;
use crate::run::Faults;

/// What carries the engines of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carrier {
    /// The in-process fabric.
    Loopback,
    /// UCX, over its loopback device.
    Ucx,
}

impl Carrier {
    /// What it is called on a command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Loopback => "loopback",
            Self::Ucx => "ucx",
        }
    }
}

/// Which connectors an engine has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Connectors {
    /// `RemotePrefill` alone.
    Remote,
    /// `SharedStorage` alone, in this directory; one per run.
    Storage(PathBuf),
    /// A `MultiConnector` of both, in that order.
    Multi(PathBuf),
}

/// Room for files, in bytes: enough for some of a run's blocks, so that there are evictions.
const STORAGE_BYTES: u64 = 4 << 20;

/// How many of a thousand operations lie, where they do.
const LIES: u16 = 100;

/// Makes connectors for every engine of a run.
pub struct RealFactory {
    connectors: Connectors,
    carrier: Carrier,
    faults: Faults,
    network: LoopbackNetwork,
    rng: Rng,
    lease: Duration,
    /// The latest life of each engine: its ranks' engines, and where they are published.
    lives: HashMap<String, Life>,
}

struct Life {
    engines: Vec<Engine>,
    directory: Option<Arc<DirectoryServer>>,
}

impl RealFactory {
    /// Engines over this carrier. Beyond what the run's scenario does, with faults between them where
    /// the carrier is in this process.
    #[must_use]
    pub fn new(connectors: Connectors, carrier: Carrier, faults: Faults, seed: u64) -> Self {
        Self {
            connectors,
            carrier,
            faults,
            network: LoopbackNetwork::new(),
            rng: Rng::part(seed, "connectors"),
            lease: Duration::from_secs(2),
            lives: HashMap::new(),
        }
    }

    fn rates(&mut self) -> FaultRates {
        let most = match self.faults {
            Faults::None => return FaultRates::none(),
            Faults::Mixed | Faults::Lying => 3,
            Faults::Harsh => 12,
        };
        let lies = if self.faults == Faults::Lying {
            LIES
        } else {
            0
        };
        [
            Fault::ConnectRefused,
            Fault::SendRefused,
            Fault::SendLost,
            Fault::SendFailed,
            Fault::ReadRefused,
            Fault::ReadStuck,
            Fault::ReadFailed,
            Fault::CopyRefused,
            Fault::CopyFailed,
            Fault::SegmentLost,
            Fault::EndpointFailed,
        ]
        .into_iter()
        .fold(FaultRates::none(), |rates, fault| {
            rates.with(fault, self.rng.below(most + 1) as u16)
        })
        .with(Fault::SendDelayed, 50)
        .with(Fault::ReadDelayed, 50)
        .with(Fault::SegmentReordered, 20)
        .with(Fault::SegmentDuplicated, 5)
        .with(Fault::ReadEmpty, lies)
        .with(Fault::CopyEmpty, lies)
        .with(Fault::SegmentCorrupted, lies)
    }

    fn config(&self, spec: &EngineSpec<'_>) -> Result<RemoteConfig, FactoryError> {
        let groups = spec.model.groups.len();
        let block_tokens = vec![spec.config.scheduler.block_tokens; groups];
        let mut config = RemoteConfig::new(EngineId::new(&*spec.config.name)?, block_tokens);
        config.reach = reach(spec);
        config.role = role(spec);
        config.ranks = spec.config.ranks;
        config.lease = LeaseConfig {
            duration: self.lease,
            lease_max: Duration::from_secs(20),
            ..LeaseConfig::default()
        };
        config.borrow = BorrowConfig {
            confirm_timeout: Duration::from_millis(1500),
            resend_after: Duration::from_millis(100),
            lease_max: Duration::from_secs(20),
        };
        config.read_timeout = Duration::from_secs(1);
        config.verify = self.faults == Faults::Lying;
        config.connect_timeout = Duration::from_secs(2);
        Ok(config)
    }

    fn remote(&mut self, spec: &EngineSpec<'_>) -> Result<Made, FactoryError> {
        let config = self.config(spec)?;
        let instance = Instance::random()?;
        let scheduler = RemoteScheduler::new(config.clone(), instance)?;
        let mut workers: Vec<Box<dyn WorkerConnector>> = Vec::new();
        let mut engines = Vec::new();
        for rank in 0..config.ranks {
            let worker = self.worker(&config, rank)?;
            engines.push(worker.engine().clone());
            workers.push(Box::new(worker));
        }
        let life = Life {
            engines,
            directory: scheduler.directory(),
        };
        self.lives.insert(spec.config.name.clone(), life);
        Ok((Box::new(scheduler), workers))
    }

    fn worker(&mut self, config: &RemoteConfig, rank: u32) -> Result<RemoteWorker, FactoryError> {
        let mut engine = EngineConfig::new(config.engine.clone());
        engine.ping_interval = Duration::from_millis(100);
        engine.suspect_after = Duration::from_millis(500);
        engine.dead_after = Duration::from_millis(500);
        engine.escalation_step = Duration::from_millis(100);
        engine.reconnect_backoff_max = Duration::from_millis(200);
        let rates = self.rates();
        let seed = self.rng.bits();
        let (carrier, network) = (self.carrier, self.network.clone());
        let start = move |builder: EngineBuilder| match carrier {
            Carrier::Ucx => builder.start(),
            Carrier::Loopback => builder.start_on(move || {
                let control = FaultControl::new(seed, rates)?;
                FaultFabric::new(LoopbackFabric::new(&network, 4096)?, &control)
            }),
        };
        if carrier == Carrier::Ucx {
            engine.net_devices = Some("lo".to_owned());
        }
        // As in vLLM, workers are made first, and learn the instance from a plan.
        let worker = RemoteWorker::start_with(config.clone(), None, rank, engine, start)?;
        Ok(worker)
    }
}

const fn role(spec: &EngineSpec<'_>) -> ConnectorRole {
    match spec.config.role {
        Role::Prefill => ConnectorRole::Producer,
        Role::Decode => ConnectorRole::Consumer,
        Role::Both => ConnectorRole::Both,
    }
}

fn reach(spec: &EngineSpec<'_>) -> Vec<Reach> {
    let of = |kind: &GroupKind| match *kind {
        GroupKind::Full => Reach::All,
        GroupKind::Window { tokens } => Reach::Window(tokens),
    };
    spec.model.groups.iter().map(of).collect()
}

type Made = (Box<dyn SchedulerConnector>, Vec<Box<dyn WorkerConnector>>);

fn storage(spec: &EngineSpec<'_>, path: PathBuf) -> Result<Made, FactoryError> {
    let groups = spec.model.groups.len();
    let config = StorageConfig {
        settings: StorageSettings {
            max_bytes: STORAGE_BYTES,
            ..StorageSettings::at(path)
        },
        model: "simulated".to_owned(),
        layout: "opaque".to_owned(),
        block_tokens: vec![spec.config.scheduler.block_tokens; groups],
        reach: reach(spec),
        role: role(spec),
        world: spec.config.ranks,
        one_pool: false,
    };
    let scheduler = StorageScheduler::new(config.clone())?;
    let worker = |rank| -> Result<Box<dyn WorkerConnector>, FactoryError> {
        Ok(Box::new(StorageWorker::open(config.clone(), rank)?))
    };
    let workers = (0..spec.config.ranks)
        .map(worker)
        .collect::<Result<_, _>>()?;
    Ok((Box::new(scheduler), workers))
}

impl ConnectorFactory for RealFactory {
    fn build(&mut self, spec: &EngineSpec<'_>) -> Result<Halves, FactoryError> {
        self.lives.remove(&spec.config.name);
        match self.connectors.clone() {
            Connectors::Remote => {
                let (scheduler, workers) = self.remote(spec)?;
                Ok(Halves { scheduler, workers })
            }
            Connectors::Storage(path) => {
                let (scheduler, workers) = storage(spec, path)?;
                Ok(Halves { scheduler, workers })
            }
            Connectors::Multi(path) => {
                let (remote, remotes) = self.remote(spec)?;
                let (storage, storages) = storage(spec, path)?;
                let workers = remotes.into_iter().zip(storages);
                let workers = workers.map(|(remote, storage)| -> Box<dyn WorkerConnector> {
                    Box::new(MultiWorker::new(vec![remote, storage]))
                });
                Ok(Halves {
                    scheduler: Box::new(MultiScheduler::new(
                        vec![remote, storage],
                        spec.config.ranks,
                    )?),
                    workers: workers.collect(),
                })
            }
        }
    }

    fn registered(&mut self, spec: &EngineSpec<'_>) -> Result<(), FactoryError> {
        let Some(life) = self.lives.get(&spec.config.name) else {
            return Ok(());
        };
        let Some(directory) = &life.directory else {
            return Ok(());
        };
        for (tp, engine) in (0..).zip(&life.engines) {
            directory.publish(Rank { pp: 0, tp }, engine.describe()?.encode()?)?;
        }
        Ok(())
    }

    fn stopping(&mut self, spec: &EngineSpec<'_>) {
        // Its port goes with it.
        self.lives.remove(&spec.config.name);
    }

    fn busy(&mut self) {
        std::thread::yield_now();
    }

    fn idle(&mut self) {
        // Loads and leases end on threads of their own.
        std::thread::sleep(Duration::from_millis(1));
    }
}

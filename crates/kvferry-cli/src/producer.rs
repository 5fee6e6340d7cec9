//! The producer: an engine with a small pool of blocks, the lease service, a directory, and a
//! thread that prepares requests.
//!
//! Invariant: a block goes back to the free ones only when the lease service reports the end of its
//! lease.

mod service;
mod worker;

use std::net::SocketAddr;
use std::time::Duration;

use crossbeam::channel::{self, Receiver, RecvTimeoutError, Sender};
use kvferry_connector::directory::{DirectoryConfig, DirectoryServer};
use kvferry_connector::lease::{LeaseConfig, LeaseService};
use kvferry_engine::fabric::NativeReads;
use kvferry_engine::{Engine, EngineConfig};
use kvferry_wire::{DEMO_CHANNEL, DemoPlan, EngineId, Instance, LEASE_CHANNEL, Rank, UcxVersion};

use self::service::DemoService;
use self::worker::{Ask, Worker};
use crate::blocks::{Blocks, Shape};
use crate::error::CliError;
use crate::running::RunningEngine;

pub(crate) use self::worker::WorkerEnd;

/// Requests that the pool has blocks for. Further ones wait until a lease ends.
const REQUESTS_AT_ONCE: u32 = 6;

/// Time that the engine, its region or the directory gets to end.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a producer holds.
pub(crate) fn shape(plan: &DemoPlan) -> Shape {
    Shape {
        layers: plan.layers,
        // At most 65,536 times 6.
        count: plan.blocks.saturating_mul(REQUESTS_AT_ONCE),
        block_bytes: plan.block_bytes,
    }
}

/// A producer that serves until it is stopped.
pub(crate) struct Producer {
    engine: RunningEngine,
    directory: DirectoryServer,
    asks: Sender<Ask>,
    end: Receiver<WorkerEnd>,
}

impl Producer {
    /// Starts everything and publishes it at `listen`.
    pub(crate) fn start(
        plan: &DemoPlan,
        listen: &str,
        allow_emulation: bool,
    ) -> Result<Self, CliError> {
        let instance = Instance::random()?;
        let id = EngineId::new(format!("serve-{}", std::process::id()))?;
        let (leases, control) = LeaseService::new(instance, LeaseConfig::default())?;
        let (asks, asked) = channel::unbounded();
        let (answers, answered) = channel::unbounded();
        let mut config = EngineConfig::new(id.clone());
        config.instance = Some(instance);
        config.allow_emulation = allow_emulation;
        let engine = Engine::builder(config)
            .service(LEASE_CHANNEL, Box::new(leases))
            .service(
                DEMO_CHANNEL,
                Box::new(DemoService::new(asks.clone(), answered)),
            )
            .start()
            .map(RunningEngine::new)?;
        let for_wake = Engine::clone(&engine);
        // An engine that has stopped needs no waking.
        control.wake_with(move || drop(for_wake.wake_services()));

        let blocks = Blocks::new(&engine, shape(plan))?;
        let worker = Worker::new(
            plan.clone(),
            instance,
            blocks,
            Engine::clone(&engine),
            control,
            asked,
            answers,
        );
        let (ended, end) = channel::bounded(1);
        std::thread::Builder::new()
            .name("kvf-producer".to_owned())
            .spawn(move || {
                // Nobody listens if the producer was dropped; then the process ends anyway.
                let _ = ended.send(worker.run());
            })
            .map_err(CliError::system("starting the producer's thread"))?;

        let mut config = DirectoryConfig::new(id);
        config.instance = Some(instance);
        let directory = DirectoryServer::bind(listen, config)?;
        directory.publish(Rank::default(), engine.describe()?.encode()?)?;
        Ok(Self {
            engine,
            directory,
            asks,
            end,
        })
    }

    /// Where consumers find it.
    pub(crate) fn address(&self) -> SocketAddr {
        self.directory.local_addr()
    }

    pub(crate) fn ucx_version(&self) -> Option<UcxVersion> {
        self.engine.ucx_version()
    }

    /// Whether its one-sided reads are emulated.
    pub(crate) fn emulates(&self) -> bool {
        self.engine.native_reads() == Some(NativeReads::Emulated)
    }

    /// Reports the end of the producer's thread, should that come before it was told to.
    pub(crate) const fn end(&self) -> &Receiver<WorkerEnd> {
        &self.end
    }

    /// Shuts down in order: no new leases; those that are held may end `within` this time and are
    /// revoked then; memory, engine and directory are given up.
    pub(crate) fn stop(self, within: Duration) -> Result<WorkerEnd, CliError> {
        // If the thread has ended already, its end is waiting.
        let _ = self.asks.send(Ask::Stop { within });
        let patience = within + PATIENCE;
        let end = self
            .end
            .recv_timeout(patience)
            .map_err(|error| match error {
                RecvTimeoutError::Timeout => CliError::Late {
                    what: "the producer's thread did not end",
                    waited: patience,
                },
                RecvTimeoutError::Disconnected => {
                    CliError::Producer("has ended without saying why".to_owned())
                }
            })?;
        self.directory.shutdown(PATIENCE);
        self.engine.shutdown()?;
        Ok(end)
    }
}

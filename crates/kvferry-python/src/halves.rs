//! The connectors of an engine, made of its setup.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kvferry_connector::contract::{SchedulerConnector, WorkerConnector};
use kvferry_connector::directory::DirectoryServer;
use kvferry_connector::multi::{MultiScheduler, MultiWorker};
use kvferry_connector::remote::{RemoteScheduler, RemoteWorker};
use kvferry_connector::settings::Settings;
use kvferry_connector::storage::{StorageConfig, StorageScheduler, StorageSettings, StorageWorker};
use kvferry_engine::Engine;
use kvferry_wire::Instance;
use pyo3::prelude::*;

use crate::setup::{Kind, Setup};
use crate::{configuration, engine};

/// A scheduler half, and where its ranks are published.
pub(crate) struct Scheduler {
    pub(crate) half: Box<dyn SchedulerConnector>,
    pub(crate) directory: Option<Arc<DirectoryServer>>,
    pub(crate) address: Option<SocketAddr>,
    /// Whether it looks at tokens, not only at their number.
    pub(crate) reads_tokens: bool,
}

/// A worker half.
pub(crate) struct Worker {
    pub(crate) half: Box<dyn WorkerConnector>,
    /// For its description; `None` where nobody connects.
    pub(crate) engine: Option<Engine>,
    /// How long its leases are waited for at the end.
    pub(crate) shutdown: Duration,
}

impl Setup {
    fn storage_config(&self, settings: StorageSettings) -> PyResult<StorageConfig> {
        Ok(StorageConfig {
            settings,
            model: self.model.clone(),
            layout: self.layout.clone(),
            block_tokens: self.block_tokens.clone(),
            reach: self.reach.clone(),
            role: self.role()?,
            world: self.ranks,
            // vLLM's groups share one pool of blocks.
            one_pool: true,
        })
    }

    pub(crate) fn scheduler(&self) -> PyResult<Scheduler> {
        let storage = |settings| -> PyResult<Box<dyn SchedulerConnector>> {
            let half = StorageScheduler::new(self.storage_config(settings)?).map_err(engine)?;
            Ok(Box::new(half))
        };
        if self.connector == Kind::Storage {
            return Ok(Scheduler {
                half: storage(self.storage_only()?.storage)?,
                directory: None,
                address: None,
                reads_tokens: true,
            });
        }
        let settings = self.settings()?;
        let config = self.remote(&settings)?;
        let instance = Instance::random().map_err(engine)?;
        let remote = RemoteScheduler::new(config, instance).map_err(engine)?;
        let (directory, address) = (remote.directory(), remote.directory_address());
        let remote: Box<dyn SchedulerConnector> = Box::new(remote);
        let (half, reads_tokens) = match settings.storage() {
            None => (remote, false),
            Some(settings) => {
                let children = vec![remote, storage(settings)?];
                let multi = MultiScheduler::new(children, self.ranks).map_err(configuration)?;
                (Box::new(multi) as Box<dyn SchedulerConnector>, true)
            }
        };
        Ok(Scheduler {
            half,
            directory,
            address,
            reads_tokens,
        })
    }

    /// Starts the rank's engine; loads UCX.
    pub(crate) fn worker(
        &self,
        rank: u32,
        fingerprint: impl IntoIterator<Item = (String, String)>,
    ) -> PyResult<Worker> {
        let storage = |settings| -> PyResult<Box<dyn WorkerConnector>> {
            let half = StorageWorker::open(self.storage_config(settings)?, rank).map_err(engine)?;
            Ok(Box::new(half))
        };
        if self.connector == Kind::Storage {
            return Ok(Worker {
                half: storage(self.storage_only()?.storage)?,
                engine: None,
                shutdown: Settings::default().shutdown_timeout,
            });
        }
        let settings = self.settings()?;
        let mut config = settings.engine(self.engine_id()?);
        config.ucx_library = self.ucx_library.clone();
        config.compatibility = self.compatibility.clone();
        config.compatibility.extend(fingerprint);
        let remote = self.remote(&settings)?;
        // The scheduler half is made after its workers, and draws the instance.
        let remote = RemoteWorker::start(remote, None, rank, config).map_err(engine)?;
        let started = remote.engine().clone();
        for warning in started.warnings() {
            tracing::warn!(%warning, "found when the engine started");
        }
        let remote: Box<dyn WorkerConnector> = Box::new(remote);
        let half = match settings.storage() {
            None => remote,
            Some(settings) => Box::new(MultiWorker::new(vec![remote, storage(settings)?])),
        };
        Ok(Worker {
            half,
            engine: Some(started),
            shutdown: settings.shutdown_timeout,
        })
    }
}

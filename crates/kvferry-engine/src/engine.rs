//! The engine's handle: start, memory, tables, peers, shutdown.

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use crossbeam::channel::bounded;
use kvferry_wire::description::{MAX_KEYS, MAX_REGIONS, MAX_TABLES};
use kvferry_wire::{Description, Incarnation, MemoryKind, UcxVersion, check_table};

use crate::chunks::Chunks;
use crate::command::{Command, ConnectCommand};
use crate::config::{EngineConfig, incompatibility};
use crate::counters::CounterSnapshot;
use crate::error::{ConnectError, EngineError, RegisterError, SendError, TableError};
use crate::exit::Running;
use crate::fabric::{Fabric, FabricError, NativeReads, Registered};
use crate::lane::LaneChoice;
use crate::memory::{Inserted, MemoryRegion};
use crate::peer::Peer;
use crate::progress::Progress;
use crate::region::{Region, RegionInner};
use crate::same_host::ShareServer;
use crate::service::{PeerId, Service};
use crate::shared::{Catalog, LONGEST, Shared, Started, deadline_in};
use crate::table::{LocalTable, Table, TableSpec};
use crate::ucx::{UcxFabric, UcxOptions};
use crate::warning::StartWarning;

/// A transfer engine: one progress thread, its regions, its peers.
///
/// A handle is cheap to clone, `Send` and `Sync`. The engine lives until [`shutdown`](Self::shutdown)
/// or until the last handle is dropped; it does not survive `fork`.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

struct Inner {
    shared: Arc<Shared>,
    next_transfer: Arc<AtomicU64>,
}

/// Collects what an engine is started with.
pub struct EngineBuilder {
    config: EngineConfig,
    services: Vec<(u16, Box<dyn Service>)>,
}

impl EngineBuilder {
    /// Adds a service for a channel. A later service for the same channel replaces an earlier one.
    #[must_use]
    pub fn service(mut self, channel: u16, service: Box<dyn Service>) -> Self {
        self.services.retain(|(other, _)| *other != channel);
        self.services.push((channel, service));
        self
    }

    /// Starts an engine over UCX.
    ///
    /// # Errors
    /// [`EngineError`]: a configured value out of range, or what UCX says, with the transports and devices
    /// in force.
    pub fn start(self) -> Result<Engine, EngineError> {
        let options = UcxOptions::from(&self.config);
        self.start_on(move || UcxFabric::new(&options))
    }

    /// Starts an engine over a fabric that `make` makes, on the progress thread.
    ///
    /// # Errors
    /// [`EngineError`]: a configured value out of range, or `make`'s error.
    pub fn start_on<F, M>(self, make: M) -> Result<Engine, EngineError>
    where
        F: Fabric + 'static,
        M: FnOnce() -> Result<F, FabricError> + Send + 'static,
    {
        self.config.validate()?;
        let shared = Arc::new(Shared::new(self.config)?);
        let (sender, receiver) = bounded(1);
        let for_thread = Arc::clone(&shared);
        let services = self.services;
        std::thread::Builder::new()
            .name("kvferry-progress".into())
            .spawn(move || {
                let _running = Running::new(&for_thread);
                let fabric = match make() {
                    Ok(fabric) => fabric,
                    Err(error) => {
                        for_thread.mark_stopped();
                        let _ = sender.send(Err(EngineError::Fabric(error)));
                        return;
                    }
                };
                let started = Started::new(fabric.capabilities().clone(), fabric.addresses());
                // Set once, here, before anybody can ask.
                let _ = for_thread.started.set(started);
                match Progress::new(fabric, for_thread, services) {
                    Ok(progress) => {
                        let _ = sender.send(Ok(()));
                        progress.run();
                    }
                    Err(error) => {
                        let _ = sender.send(Err(error));
                    }
                }
            })
            .map_err(|source| EngineError::System {
                step: "starting a thread",
                source,
            })?;
        let patience = shared.config.command_timeout;
        let answer = Shared::answer(&receiver, "its start", patience);
        if answer.is_err() {
            // It may still start; then it is to end at once.
            let (reply, _) = bounded(1);
            let deadline = deadline_in(Duration::ZERO);
            let _ = shared.submit(Command::Shutdown { deadline, reply });
        }
        answer??;
        if let Err(error) = ShareServer::start(&shared) {
            let (reply, _) = bounded(1);
            let deadline = deadline_in(Duration::ZERO);
            let _ = shared.submit(Command::Shutdown { deadline, reply });
            return Err(error);
        }
        Ok(Engine {
            inner: Arc::new(Inner {
                shared,
                next_transfer: Arc::default(),
            }),
        })
    }
}

impl Engine {
    /// Begins to set up an engine.
    #[must_use]
    pub fn builder(config: EngineConfig) -> EngineBuilder {
        EngineBuilder {
            config,
            services: Vec::new(),
        }
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.inner.shared
    }

    /// This life of the engine.
    #[must_use]
    pub fn incarnation(&self) -> Incarnation {
        self.shared().incarnation
    }

    /// The engine's configuration.
    #[must_use]
    pub fn config(&self) -> &EngineConfig {
        &self.shared().config
    }

    /// The UCX that is loaded; `None` over another fabric.
    #[must_use]
    pub fn ucx_version(&self) -> Option<UcxVersion> {
        self.shared().ucx_version()
    }

    /// Whether one-sided reads exist here, and if not, why.
    #[must_use]
    pub fn native_reads(&self) -> Option<NativeReads> {
        self.shared()
            .started
            .get()
            .map(|started| started.capabilities.native.clone())
    }

    /// What was found at the start and is not as it should be, though the engine runs: for whoever
    /// looks for the reason of something else later. Each was logged as a warning, too.
    #[must_use]
    pub fn warnings(&self) -> Vec<StartWarning> {
        let started = self.shared().started.get();
        started.map_or_else(Vec::new, |started| started.capabilities.warnings.clone())
    }

    /// The engine's counters now.
    #[must_use]
    pub fn counters(&self) -> CounterSnapshot {
        self.shared().counters.snapshot()
    }

    /// Registers memory. The same range again is one registration, counted. A region longer than
    /// `max_registration_bytes` (of the configuration, or of the fabric) is registered in chunks, all
    /// of them or none.
    ///
    /// # Errors
    /// [`RegisterError`], with address, length, kind and cause.
    pub fn register(&self, memory: &MemoryRegion) -> Result<Region, RegisterError> {
        let shared = self.shared();
        shared.check()?;
        let _turn = shared
            .registering
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let (kind, address, bytes) = (memory.kind(), memory.address(), memory.bytes());
        let chunks = Chunks::new(bytes, shared.max_registration_bytes());
        let id = {
            let mut catalog = shared.catalog();
            let (id, count) = (catalog.next_region, catalog.regions.len());
            let found = catalog.map.insert(kind, address, bytes, id).map_err(
                |(other_address, other_bytes)| RegisterError::Overlap {
                    address,
                    bytes,
                    kind,
                    other_address,
                    other_bytes,
                },
            )?;
            match found {
                Inserted::New if count >= MAX_REGIONS => {
                    catalog.map.remove(kind, address);
                    return Err(RegisterError::TooMany {
                        count,
                        max: MAX_REGIONS,
                    });
                }
                Inserted::New => {
                    if let Err(error) = check_chunks(&catalog, memory, chunks) {
                        catalog.map.remove(kind, address);
                        return Err(error);
                    }
                    catalog.next_region += 1;
                    id
                }
                Inserted::Again(id) => {
                    let inner = catalog.region(id).cloned();
                    // Registrations take turns, so what is in the map is in the list.
                    let inner = inner.ok_or(EngineError::Stopped)?;
                    return Ok(self.region(inner));
                }
            }
        };
        let result = self.register_new(memory, chunks);
        let mut catalog = shared.catalog();
        match result {
            Ok(registered) => {
                let inner = Arc::new(RegionInner::new(id, memory.clone(), chunks, registered));
                catalog.regions.push(Arc::clone(&inner));
                drop(catalog);
                Ok(self.region(inner))
            }
            Err(error) => {
                catalog.map.remove(kind, address);
                Err(error)
            }
        }
    }

    fn register_new(
        &self,
        memory: &MemoryRegion,
        chunks: Chunks,
    ) -> Result<Vec<Registered>, RegisterError> {
        let (kind, address, bytes) = (memory.kind(), memory.address(), memory.bytes());
        if kind == MemoryKind::Host {
            memory
                .check_mapped()
                .map_err(|error| RegisterError::NotMapped {
                    address,
                    bytes,
                    kind,
                    status: error.to_string(),
                })?;
        }
        let patience = self.shared().config.command_timeout;
        let region = memory.clone();
        self.shared()
            .ask("a registration", patience, |reply| Command::Register {
                memory: region,
                chunks,
                reply,
            })?
    }

    fn region(&self, inner: Arc<RegionInner>) -> Region {
        Region {
            inner,
            shared: Arc::clone(self.shared()),
            released: false,
        }
    }

    /// Adds a table of blocks inside a region; peers that connect from now on learn of it.
    ///
    /// # Errors
    /// [`TableError`] naming the size that is zero or does not fit.
    pub fn add_table(&self, region: &Region, spec: TableSpec) -> Result<Table, TableError> {
        self.shared().check()?;
        let mut catalog = self.shared().catalog();
        let known = catalog.region(region.id());
        if !known.is_some_and(|known| Arc::ptr_eq(known, &region.inner)) {
            return Err(TableError::ForeignRegion {
                region: region.id(),
            });
        }
        let count = catalog.tables.len();
        if count >= MAX_TABLES {
            return Err(TableError::TooMany {
                count,
                max: MAX_TABLES,
            });
        }
        let description = spec.describe(catalog.next_table, region.id());
        check_table(&description, region.memory().bytes())?;
        catalog.next_table += 1;
        let table = Table(Arc::new(LocalTable {
            description,
            region: Arc::clone(&region.inner),
        }));
        catalog.tables.push(table.clone());
        Ok(table)
    }

    /// What peers need to connect: addresses, regions and tables as they are now. Its size depends
    /// on the number of regions, their chunks and tables, not on the number of blocks.
    ///
    /// # Errors
    /// [`EngineError::Stopped`].
    pub fn describe(&self) -> Result<Description, EngineError> {
        self.shared().check()?;
        self.shared().describe().ok_or(EngineError::Stopped)
    }

    /// Connects to a peer and waits until it has answered the greeting, at most `connect_timeout`
    /// of the configuration. A peer that is connected already is returned at once, with the lane that is
    /// asked for and the tables of this description. Not for an engine's or a scheduler's hot thread.
    ///
    /// # Errors
    /// [`ConnectError`] naming the peer and the cause.
    pub fn connect(
        &self,
        description: Description,
        lane: LaneChoice,
    ) -> Result<Peer, ConnectError> {
        let shared = self.shared();
        let bad = |reason: String| ConnectError::BadDescription { reason };
        if description.incarnation == shared.incarnation {
            return Err(bad("it is this engine's own".into()));
        }
        description
            .validate()
            .map_err(|error| bad(error.to_string()))?;
        let ours = &shared.config.compatibility;
        if let Some(difference) = incompatibility(ours, &description.compatibility) {
            return Err(bad(difference));
        }
        let timeout = shared.config.connect_timeout;
        let deadline = deadline_in(timeout);
        // The progress thread answers by `timeout`; more than that and it is stuck.
        let patience = timeout + shared.config.command_timeout;
        let answer = shared.ask("a connection", patience, |reply| {
            Command::Connect(Box::new(ConnectCommand {
                description: Arc::new(description),
                timeout,
                reply,
            }))
        });
        let greeted = answer.map_err(|error| ConnectError::Engine(error.to_string()))??;
        Ok(Peer {
            peer: Arc::new(crate::lane::handle(shared, greeted, lane, deadline)?),
            shared: Arc::clone(shared),
            next_transfer: Arc::clone(&self.inner.next_transfer),
        })
    }

    /// Sends a message to the service on `channel` of a peer that a [`Service`] was told of. As [`Peer::send`], but a
    /// message to a peer that is gone is dropped and counted.
    ///
    /// # Errors
    /// [`SendError`] if the message is empty or larger than 16 MiB less a header, or if the engine was shut down.
    pub fn send(&self, peer: PeerId, channel: u16, payload: Vec<u8>) -> Result<(), SendError> {
        self.shared().send(peer, channel, payload)
    }

    /// Has every service's [`on_tick`](Service::on_tick) called soon.
    ///
    /// # Errors
    /// [`EngineError::Stopped`], [`EngineError::Forked`].
    pub fn wake_services(&self) -> Result<(), EngineError> {
        self.shared().submit(Command::WakeServices)
    }

    /// Whether it runs: its progress thread has neither been shut down nor panicked. After a panic every transfer ends
    /// and calls fail, but services are gone, and what they were to tell nobody tells.
    ///
    /// # Errors
    /// [`EngineError::Panicked`], from before the first transfer ends by that; [`EngineError::Stopped`],
    /// [`EngineError::Forked`].
    pub fn check(&self) -> Result<(), EngineError> {
        self.shared().check_panicked()?;
        self.shared().check()
    }

    /// Says goodbye to all peers, ends what is in flight and stops the progress thread, all by
    /// `timeout`. Every handle is of no use afterwards.
    ///
    /// # Errors
    /// [`EngineError::NoAnswer`] if the thread did not end in time, [`EngineError::Stopped`] or
    /// [`EngineError::Panicked`] if it had ended before.
    pub fn shutdown(&self, timeout: Duration) -> Result<(), EngineError> {
        let deadline = deadline_in(timeout);
        self.shared().ask(
            "the shutdown",
            timeout.min(LONGEST) + Duration::from_secs(1),
            |reply| Command::Shutdown { deadline, reply },
        )
    }
}

/// Refuses a region of more chunks than a description has room for.
fn check_chunks(
    catalog: &Catalog,
    memory: &MemoryRegion,
    chunks: Chunks,
) -> Result<(), RegisterError> {
    let of = |region: &Arc<RegionInner>| region.chunks.count();
    let (others, max) = (catalog.regions.iter().map(of).sum(), MAX_KEYS as u64);
    if chunks.count().saturating_add(others) <= max {
        return Ok(());
    }
    Err(RegisterError::TooManyChunks {
        address: memory.address(),
        bytes: memory.bytes(),
        kind: memory.kind(),
        chunk_bytes: chunks.chunk_bytes(),
        chunks: chunks.count(),
        others,
        max,
    })
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Nobody waits: the thread says goodbye and ends by itself. An engine that was shut down,
        // or a handle in a forked child, has nothing to say.
        let (reply, _) = bounded(1);
        let deadline = deadline_in(Duration::from_secs(2));
        let _ = self.shared.submit(Command::Shutdown { deadline, reply });
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("engine_id", &self.config().engine_id)
            .field("incarnation", &self.incarnation())
            .field("stopped", &self.shared().is_stopped())
            .finish_non_exhaustive()
    }
}

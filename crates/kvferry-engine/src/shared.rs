//! What the handles and the progress thread of one engine share.
//!
//! The catalog (regions and tables) is written by handles under a lock and read by the progress
//! thread once per read request, never per block.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, bounded};
use crossbeam::queue::SegQueue;
use kvferry_wire::{Addresses, Description, Incarnation, RegionSet, UcxVersion};

use crate::command::{Command, Holders, ReleaseRegion};
use crate::config::EngineConfig;
use crate::counters::{Counters, add, subtract};
use crate::error::{DeregisterError, EngineError, SendError};
use crate::fabric::Capabilities;
use crate::memory::{IncarnationWord, RegionMap};
use crate::peer::check_payload;
use crate::region::{RegionHold, RegionInner};
use crate::same_host::{SameHost, ShareServer, host_identity};
use crate::service::PeerId;
use crate::table::Table;
use crate::wake::Waker;

/// What the fabric said when it started.
#[derive(Debug)]
pub(crate) struct Started {
    pub(crate) capabilities: Capabilities,
    /// Changed by a reset of the fabric.
    addresses: Mutex<Addresses>,
}

impl Started {
    pub(crate) fn new(capabilities: Capabilities, addresses: Addresses) -> Self {
        Self {
            capabilities,
            addresses: Mutex::new(addresses),
        }
    }

    pub(crate) fn addresses(&self) -> Addresses {
        let addresses = self.addresses.lock();
        addresses.unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn set_addresses(&self, addresses: Addresses) {
        *self
            .addresses
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = addresses;
    }
}

/// Regions and tables that exist.
#[derive(Default)]
pub(crate) struct Catalog {
    pub(crate) map: RegionMap,
    pub(crate) next_region: u32,
    pub(crate) regions: Vec<Arc<RegionInner>>,
    /// Regions that were and are no more; descriptions that peers have may still name them.
    pub(crate) withdrawn: RegionSet,
    pub(crate) next_table: u32,
    pub(crate) tables: Vec<Table>,
}

impl Catalog {
    /// Tables are few and their ids ascend, so a search by halves serves.
    pub(crate) fn table(&self, id: u32) -> Option<&Table> {
        let place = self.tables.binary_search_by_key(&id, Table::id).ok()?;
        self.tables.get(place)
    }

    pub(crate) fn region(&self, id: u32) -> Option<&Arc<RegionInner>> {
        self.regions.iter().find(|region| region.id == id)
    }
}

pub(crate) struct Shared {
    pub(crate) config: EngineConfig,
    pub(crate) incarnation: Incarnation,
    /// Where peers on this host find the incarnation in our memory.
    pub(crate) word: IncarnationWord,
    pub(crate) host: String,
    /// The unix socket, unless it is off.
    pub(crate) share: OnceLock<ShareServer>,
    /// What peers on this host share with us, by their lives.
    pub(crate) same_host: Mutex<HashMap<Incarnation, Arc<SameHost>>>,
    /// Whether it was said that copies from this host's processes are not permitted.
    pub(crate) warned_of_permission: AtomicBool,
    pub(crate) counters: Counters,
    pub(crate) commands: SegQueue<Command>,
    pub(crate) waker: Waker,
    pub(crate) catalog: Mutex<Catalog>,
    /// Registrations happen one after the other, so that an identical range is found registered.
    pub(crate) registering: Mutex<()>,
    pub(crate) started: OnceLock<Started>,
    stopped: AtomicBool,
    /// What the panic said that ended the progress thread.
    panicked: OnceLock<String>,
    pid: u32,
}

impl Shared {
    pub(crate) fn new(config: EngineConfig) -> Result<Self, EngineError> {
        let waker = Waker::new().map_err(|source| EngineError::System {
            step: "eventfd",
            source,
        })?;
        let incarnation = Incarnation::random()?;
        Ok(Self {
            config,
            incarnation,
            word: IncarnationWord::new(incarnation),
            host: host_identity(),
            share: OnceLock::new(),
            same_host: Mutex::default(),
            warned_of_permission: AtomicBool::new(false),
            counters: Counters::default(),
            commands: SegQueue::new(),
            waker,
            catalog: Mutex::default(),
            registering: Mutex::new(()),
            started: OnceLock::new(),
            stopped: AtomicBool::new(false),
            panicked: OnceLock::new(),
            pid: std::process::id(),
        })
    }

    pub(crate) fn catalog(&self) -> MutexGuard<'_, Catalog> {
        self.catalog.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// False in a process that inherited the engine over a fork.
    pub(crate) fn is_ours(&self) -> bool {
        std::process::id() == self.pid
    }

    /// Refuses a stopped engine and a handle that was carried over a fork.
    pub(crate) fn check(&self) -> Result<(), EngineError> {
        let here = std::process::id();
        if here != self.pid {
            return Err(EngineError::Forked {
                owner: self.pid,
                here,
            });
        }
        if self.stopped.load(Ordering::Acquire) {
            self.check_panicked()?;
            return Err(EngineError::Stopped);
        }
        Ok(())
    }

    /// Notes that the progress thread has panicked; the first call counts. Before anything ends by it, so that whoever
    /// sees such an end can know.
    pub(crate) fn mark_panicked(&self, reason: &str) {
        let _ = self.panicked.set(reason.to_owned());
    }

    /// Says so from the panic on, also while the fabric is still being taken down.
    pub(crate) fn check_panicked(&self) -> Result<(), EngineError> {
        match self.panicked.get() {
            Some(reason) => Err(EngineError::Panicked {
                reason: reason.clone(),
            }),
            None => Ok(()),
        }
    }

    pub(crate) fn submit(&self, command: Command) -> Result<(), EngineError> {
        self.check()?;
        self.push(command)
    }

    /// Hands a command over, or refuses it.
    fn push(&self, command: Command) -> Result<(), EngineError> {
        self.commands.push(command);
        // Either this thread sees that the engine has stopped, or the progress thread's last look
        // sees the command; pairs with `mark_stopped`.
        fence(Ordering::SeqCst);
        if self.is_stopped() {
            // The progress thread may have looked at the queue for the last time before the push.
            self.refuse_commands();
            return Err(EngineError::Stopped);
        }
        self.waker.wake();
        Ok(())
    }

    /// Answers the commands that came too late for the progress thread.
    pub(crate) fn refuse_commands(&self) {
        while let Some(command) = self.commands.pop() {
            if matches!(&command, Command::Release(release) if release.waiter.is_none()) {
                subtract(&self.counters.quarantined_regions, 1);
            }
            command.refuse();
        }
    }

    /// Has a message sent to a peer's service.
    pub(crate) fn send(
        &self,
        peer: PeerId,
        channel: u16,
        payload: Vec<u8>,
    ) -> Result<(), SendError> {
        check_payload(payload.len())?;
        self.submit(Command::Send {
            peer,
            channel,
            payload,
        })
        .map_err(|error| SendError::Engine(error.to_string()))
    }

    /// Submits a command that answers, and waits for the answer.
    pub(crate) fn ask<T>(
        &self,
        what: &'static str,
        timeout: Duration,
        command: impl FnOnce(Sender<T>) -> Command,
    ) -> Result<T, EngineError> {
        let (sender, receiver) = bounded(1);
        self.submit(command(sender))?;
        Self::answer(&receiver, what, timeout)
    }

    pub(crate) fn answer<T>(
        receiver: &Receiver<T>,
        what: &'static str,
        timeout: Duration,
    ) -> Result<T, EngineError> {
        receiver.recv_timeout(timeout).map_err(|error| match error {
            RecvTimeoutError::Timeout => EngineError::NoAnswer {
                what,
                waited: timeout,
            },
            RecvTimeoutError::Disconnected => EngineError::Stopped,
        })
    }

    /// Called by the progress thread when it takes no more commands, before its last look at them.
    pub(crate) fn mark_stopped(&self) {
        self.stopped.store(true, Ordering::Release);
        fence(Ordering::SeqCst);
        if let Some(share) = self.share.get() {
            share.stop();
        }
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Takes one registration off a region; with the last, withdraws its tables and has the
    /// progress thread give it up.
    pub(crate) fn release_region(
        &self,
        region: &Arc<RegionInner>,
        wait: Option<Duration>,
    ) -> Result<(), DeregisterError> {
        // First of all: in a forked child another thread of the parent may have held the lock.
        self.check()?;
        {
            let mut catalog = self.catalog();
            let memory = &region.memory;
            if !catalog.map.remove(memory.kind(), memory.address()) {
                return Ok(());
            }
            catalog
                .tables
                .retain(|table| table.description().region != region.id);
            catalog.regions.retain(|other| other.id != region.id);
            catalog.withdrawn.insert(region.id);
        }
        let Some(timeout) = wait else {
            let release = ReleaseRegion {
                region: Arc::clone(region),
                waiter: None,
            };
            // Counted before anybody can look, and by whoever ends it no more.
            add(&self.counters.quarantined_regions, 1);
            return Ok(self.push(Command::Release(release))?);
        };
        let (sender, receiver) = bounded(1);
        let release = ReleaseRegion {
            region: Arc::clone(region),
            waiter: Some((deadline_in(timeout), sender)),
        };
        self.submit(Command::Release(release))?;
        // The progress thread answers by `timeout`; more than that and it is stuck.
        let patience = timeout.min(LONGEST) + self.config.command_timeout;
        match Self::answer(&receiver, "a deregistration", patience)? {
            Holders {
                operations: 0,
                peers,
            } if peers.is_empty() => Ok(()),
            Holders { operations, peers } => Err(DeregisterError::Busy {
                region: region.id,
                operations,
                peers,
                waited: timeout,
            }),
        }
    }

    /// Holds the regions of local tables, or says which table is not there. The catalog is locked, so that a region
    /// is either held before it is given up, or its table is gone already.
    pub(crate) fn hold<'a>(
        &self,
        tables: impl IntoIterator<Item = &'a Table>,
    ) -> Result<Vec<RegionHold>, u32> {
        let catalog = self.catalog();
        let mut holds: Vec<RegionHold> = Vec::new();
        for table in tables {
            let known = catalog.table(table.id());
            if !known.is_some_and(|known| Arc::ptr_eq(&known.0, &table.0)) {
                return Err(table.id());
            }
            let region = table.region();
            if !holds.iter().any(|hold| hold.id == region.id) {
                holds.push(RegionHold::new(region));
            }
        }
        Ok(holds)
    }

    /// What peers are told. `None` before the fabric has started.
    pub(crate) fn describe(&self) -> Option<Description> {
        let started = self.started.get()?;
        let catalog = self.catalog();
        Some(Description {
            engine: self.config.engine_id.clone(),
            incarnation: self.incarnation,
            rank: self.config.rank,
            instance: self.config.instance,
            kvferry_version: env!("CARGO_PKG_VERSION").into(),
            ucx: started.capabilities.ucx,
            host: self.host.clone(),
            addresses: started.addresses(),
            compatibility: self.config.compatibility.clone(),
            regions: catalog
                .regions
                .iter()
                .map(|region| region.describe())
                .collect(),
            tables: catalog
                .tables
                .iter()
                .map(|table| table.description().clone())
                .collect(),
            unix_socket: self.share.get().map(|share| share.name().to_owned()),
        })
    }

    /// What a peer on this host shares, if it has been asked.
    pub(crate) fn same_host(&self) -> MutexGuard<'_, HashMap<Incarnation, Arc<SameHost>>> {
        self.same_host
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The longest range that may be registered at once, by configuration or by the fabric.
    pub(crate) fn max_registration_bytes(&self) -> Option<u64> {
        let page = rustix::param::page_size() as u64;
        let of_fabric = self.started.get()?.capabilities.max_registration_bytes;
        // Whole pages, as in the configuration, so that chunks of a region in pages share none.
        let of_fabric = of_fabric.map(|bytes| (bytes / page).max(1) * page);
        [of_fabric, self.config.max_registration_bytes]
            .into_iter()
            .flatten()
            .min()
    }

    pub(crate) fn ucx_version(&self) -> Option<UcxVersion> {
        self.started.get()?.capabilities.ucx
    }
}

/// The moment `timeout` from now. A day stands for anything longer, which the clock may not hold.
pub(crate) fn deadline_in(timeout: Duration) -> Instant {
    Instant::now() + timeout.min(LONGEST)
}

/// What longer timeouts are taken for.
pub(crate) const LONGEST: Duration = Duration::from_secs(86_400);

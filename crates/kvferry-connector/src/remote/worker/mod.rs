//! The worker half: one rank's engine, its leases, and the loader.
//!
//! Responsible for what passes between the engine's step and the threads behind it. Never waits in a
//! step: plans go into queues, and what has ended is taken out of them.

mod checksums;
mod leases;
mod links;
mod loader;
mod lost;
mod request;
mod stats;
mod verifying;

use std::collections::HashMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender, unbounded};
use kvferry_engine::fabric::NativeReads;
use kvferry_engine::{
    Engine, EngineBuilder, EngineConfig, EngineError, Lane, LaneChoice, Region, Table, TableSpec,
};
use kvferry_wire::checksum::CHECKSUM_CHANNEL;
use kvferry_wire::lease::LEASE_CHANNEL;
use kvferry_wire::{Epoch, Instance, MemoryKind, Rank, RequestId};

use self::checksums::{ChecksumService, Hashing, Place};
use self::links::Links;
use self::loader::{Done, Event, Loader};
use self::stats::LoaderCounters;
pub use self::stats::LoaderStats;
use super::{RemoteConfig, RemoteError, Report, rank_of};
use crate::contract::{
    CacheLayout, RegisterCacheError, ReportPart, StepPlan, WorkerConnector, WorkerLost,
    WorkerReport,
};
use crate::lease::{
    BorrowControl, LeaseControl, LeaseEvent, LeaseService, LeaseSnapshot, StepLeases,
};
use crate::metrics::{ENGINE, Figures, LEASES, LOADER, LOADER_TIMES};

/// Time for the engine itself to end, on top of what leases were given.
const ENGINE_LIMIT: Duration = Duration::from_secs(5);

/// `RemotePrefill`, the worker half of one rank.
#[derive(Debug)]
pub struct RemoteWorker {
    config: RemoteConfig,
    rank: u32,
    engine: Engine,
    /// The scheduler half, once it is known.
    instance: Option<Instance>,
    leases: LeaseControl,
    borrow: BorrowControl,
    events: Sender<Event>,
    /// Taken by the loader when blocks are there.
    inbox: Option<Receiver<Event>>,
    done: (Sender<Done>, Receiver<Done>),
    loader: Option<JoinHandle<()>>,
    /// The thread that computes checksums, once blocks are there.
    hashing: Place,
    hasher: Option<JoinHandle<()>>,
    regions: Vec<Region>,
    sent: Sent,
    /// What the next report tells the scheduler half.
    own: Report,
    counters: Arc<LoaderCounters>,
    /// Once a thread has ended by itself.
    lost: Option<WorkerLost>,
    is_shut_down: bool,
}

/// Which requests are to be reported as sent: those whose lease has ended and that are known to have
/// finished, in whatever order the two come.
#[derive(Debug, Default)]
struct Sent {
    activated: HashMap<Epoch, RequestId>,
    requests: HashMap<Epoch, RequestId>,
    /// With when they have.
    ended: HashMap<Epoch, Instant>,
    due: Vec<(RequestId, Instant)>,
}

impl Sent {
    fn plan(&mut self, leases: &StepLeases) {
        for (epoch, request) in &leases.reserve {
            self.requests.insert(*epoch, request.clone());
        }
        for epoch in &leases.activate {
            if let Some(request) = self.requests.remove(epoch) {
                if let Some(at) = self.ended.remove(epoch) {
                    self.due.push((request, at));
                } else {
                    self.activated.insert(*epoch, request);
                }
            }
        }
        for epoch in &leases.revoke {
            self.requests.remove(epoch);
            self.ended.remove(epoch);
        }
    }

    fn ended(&mut self, epoch: Epoch, at: Instant) {
        if let Some(request) = self.activated.remove(&epoch) {
            self.due.push((request, at));
        } else if self.requests.contains_key(&epoch) {
            self.ended.insert(epoch, at);
        }
    }
}

impl RemoteWorker {
    /// Starts the engine of a rank. `instance` is the scheduler half's; a worker that is made before that
    /// half learns it from the first plan with a lease. `engine` says how the engine is to be set up, but for
    /// its id, rank and instance.
    ///
    /// # Errors
    /// A setting that is out of range, or what the engine says.
    pub fn start(
        config: RemoteConfig,
        instance: impl Into<Option<Instance>>,
        rank: u32,
        engine: EngineConfig,
    ) -> Result<Self, RemoteError> {
        Self::start_with(config, instance, rank, engine, EngineBuilder::start)
    }

    /// The same, with the engine started by `start`: over another fabric, or with more services.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_with(
        config: RemoteConfig,
        instance: impl Into<Option<Instance>>,
        rank: u32,
        mut engine: EngineConfig,
        start: impl FnOnce(EngineBuilder) -> Result<Engine, EngineError>,
    ) -> Result<Self, RemoteError> {
        config.validate()?;
        if rank >= config.ranks {
            return Err(RemoteError::Config {
                field: "rank",
                value: rank.to_string(),
                expected: "less than the number of ranks",
            });
        }
        engine.engine_id = config.engine.clone();
        engine.rank = rank_of(rank);
        engine.instance = instance.into();
        engine.connect_timeout = engine.connect_timeout.min(config.connect_timeout);
        let (events, inbox) = unbounded();
        // Until the half's name is known nobody can know a lease.
        let named = engine.instance;
        let instance = named.map_or_else(Instance::random, Ok)?;
        let (mut service, leases) = LeaseService::new(instance, config.lease)?;
        let to_loader = events.clone();
        let borrow = service.borrow(config.borrow, move |event| {
            // The loader may have ended.
            let _ = to_loader.send(Event::Borrow(event));
        });
        let (hashing, counters) = (Place::default(), Arc::<LoaderCounters>::default());
        let checksums =
            ChecksumService::new(Arc::clone(&hashing), events.clone(), Arc::clone(&counters));
        let builder = Engine::builder(engine)
            .service(LEASE_CHANNEL, Box::new(service))
            .service(CHECKSUM_CHANNEL, Box::new(checksums));
        let engine = start(builder)?;
        let setting = match config.lane {
            _ if engine.config().require_rdma => Some("require_rdma"),
            LaneChoice::Pinned(Lane::Native) => Some("lane native"),
            _ => None,
        };
        if let (Some(setting), Some(NativeReads::Unavailable(reason))) =
            (setting, engine.native_reads())
        {
            return Err(RemoteError::NoRdma { setting, reason });
        }
        let waking = engine.clone();
        // A stopped engine needs no waking.
        leases.wake_with(move || drop(waking.wake_services()));
        Ok(Self {
            config,
            rank,
            engine,
            instance: named,
            leases,
            borrow,
            events,
            inbox: Some(inbox),
            done: unbounded(),
            loader: None,
            hashing,
            hasher: None,
            regions: Vec::new(),
            sent: Sent::default(),
            own: Report::default(),
            counters,
            lost: None,
            is_shut_down: false,
        })
    }

    /// What consumers are told of this rank; after [`register`](WorkerConnector::register). For
    /// [`RemoteScheduler::publish`](super::RemoteScheduler::publish).
    ///
    /// # Errors
    /// If the engine has stopped.
    pub fn describe(&self) -> Result<Vec<u8>, RemoteError> {
        Ok(self.engine.describe()?.encode()?)
    }

    /// The rank as its engine counts.
    #[must_use]
    pub const fn rank(&self) -> Rank {
        rank_of(self.rank)
    }

    /// The engine.
    #[must_use]
    pub const fn engine(&self) -> &Engine {
        &self.engine
    }

    /// What its loads have come to.
    #[must_use]
    pub fn loader_stats(&self) -> LoaderStats {
        self.counters.snapshot()
    }

    /// Counters and gauges of its leases; waits for up to `timeout`.
    ///
    /// # Errors
    /// [`LeaseControlError`](crate::lease::LeaseControlError).
    pub fn lease_snapshot(
        &self,
        timeout: Duration,
    ) -> Result<LeaseSnapshot, crate::lease::LeaseControlError> {
        self.leases.snapshot(timeout)
    }

    fn tables(&mut self, layout: &CacheLayout) -> Result<Vec<Vec<Table>>, RegisterCacheError> {
        let mut groups: Vec<Vec<Table>> = layout.groups.iter().map(|_| Vec::new()).collect();
        let mut regions: HashMap<(u64, u64), usize> = HashMap::new();
        for layer in &layout.layers {
            let wrong = |reason: String| RegisterCacheError {
                layer: layer.layer,
                reason,
            };
            let count = groups.len();
            let group = groups.get_mut(layer.group as usize).ok_or_else(|| {
                wrong(format!(
                    "cache group {}, but there are {count}",
                    layer.group
                ))
            })?;
            let memory = (layer.memory.address(), layer.memory.bytes());
            let region = match regions.get(&memory) {
                Some(&region) => region,
                None => {
                    let region = self
                        .engine
                        .register(&layer.memory)
                        .map_err(|error| wrong(error.to_string()))?;
                    self.regions.push(region);
                    regions.insert(memory, self.regions.len() - 1);
                    self.regions.len() - 1
                }
            };
            let spec = TableSpec {
                block_stride: layer.block_stride,
                group: layer.group,
                ..TableSpec::dense(layer.block_bytes, layer.blocks)
                    .at(layer.offset)
                    .layer(layer.layer)
            };
            let region = self.regions.get(region);
            let region = region.ok_or_else(|| wrong("its region is gone".to_owned()))?;
            let table = self
                .engine
                .add_table(region, spec)
                .map_err(|error| wrong(error.to_string()))?;
            group.push(table);
        }
        Ok(groups)
    }

    /// Refuses memory whose checksums cannot be computed, if they are to be.
    fn check_kinds(&self, layout: &CacheLayout) -> Result<(), RegisterCacheError> {
        let verifies = self.config.verify && self.config.role.loads();
        let mut layers = layout.layers.iter();
        match layers.find(|layer| verifies && layer.memory.kind() != MemoryKind::Host) {
            None => Ok(()),
            Some(layer) => Err(RegisterCacheError {
                layer: layer.layer,
                reason: format!(
                    "its blocks are in {} memory, and checksums are computed in host memory only; set verify to false",
                    layer.memory.kind()
                ),
            }),
        }
    }

    fn end(&mut self, within: Duration) {
        if std::mem::replace(&mut self.is_shut_down, true) {
            return;
        }
        let by = Instant::now() + within;
        let drained = self.leases.drain(within).is_ok();
        let _ = self.events.send(Event::Stop { by });
        if drained {
            self.wait_drained(by + Duration::from_secs(1));
        }
        if let Some(loader) = self.loader.take() {
            // It ends by the same time.
            if loader.join().is_err() {
                tracing::error!("the loader panicked");
            }
        }
        if let Some(hashing) = self.hashing.get() {
            hashing.stop();
        }
        if let Some(hasher) = self.hasher.take()
            && hasher.join().is_err()
        {
            tracing::error!("the thread of checksums panicked");
        }
        for region in self.regions.drain(..) {
            // Whoever reads it still is told that it goes; the memory waits for that, not we.
            drop(region);
        }
        if let Err(error) = self.engine.shutdown(ENGINE_LIMIT) {
            tracing::warn!(%error, "the engine did not end in time");
        }
    }

    fn wait_drained(&mut self, by: Instant) {
        while let Ok(event) = self.leases.events().recv_deadline(by) {
            let is_last = matches!(event, LeaseEvent::Drained { .. });
            self.lease_event(event);
            if is_last {
                return;
            }
        }
    }

    fn lease_event(&mut self, event: LeaseEvent) {
        match event {
            LeaseEvent::Ended(ended, at) => {
                let epoch = ended.lease.epoch;
                self.own.ended.push((epoch, ended.how));
                self.sent.ended(epoch, at);
            }
            LeaseEvent::PlanRefused(error) => {
                tracing::error!(%error, "a plan was refused: its leases do not exist");
            }
            LeaseEvent::Drained { revoked } => tracing::debug!(revoked, "leases drained"),
        }
    }
}

impl WorkerConnector for RemoteWorker {
    fn register(&mut self, layout: &CacheLayout) -> Result<(), RegisterCacheError> {
        let wrong = |reason: String| RegisterCacheError { layer: 0, reason };
        let sizes = layout.groups.iter().map(|group| group.block_tokens);
        if !sizes.eq(self.config.block_tokens.iter().copied()) {
            return Err(wrong(format!(
                "groups {:?}, but block_tokens is {:?}",
                layout.groups, self.config.block_tokens
            )));
        }
        let Some(inbox) = self.inbox.take() else {
            return Err(wrong("blocks were registered before".to_owned()));
        };
        self.check_kinds(layout)?;
        let tables = self.tables(layout)?;
        let (hashing, hasher) = Hashing::start(self.engine.clone(), tables.clone())
            .map_err(|error| wrong(format!("no thread: {error}")))?;
        // Blocks are registered once, as was checked above.
        let _ = self.hashing.set(hashing.clone());
        self.hasher = Some(hasher);
        let links = Links::new(
            self.engine.clone(),
            self.config.lane,
            self.config.connect_timeout,
            tables,
            self.events.clone(),
            Arc::clone(&self.counters),
        );
        let loader = Loader::new(
            self.config.clone(),
            self.rank,
            self.engine.clone(),
            links,
            self.borrow.clone(),
            self.config.verify.then_some(hashing),
            self.events.clone(),
            self.done.0.clone(),
            Arc::clone(&self.counters),
        );
        let thread = std::thread::Builder::new()
            .name("kvferry-loader".into())
            .spawn(move || loader.run(&inbox))
            .map_err(|error| wrong(format!("no thread: {error}")))?;
        self.loader = Some(thread);
        Ok(())
    }

    fn begin_step(&mut self, plan: StepPlan) {
        let StepPlan::Remote(mut plan) = plan else {
            tracing::error!("another connector's plan");
            return;
        };
        if let Some(instance) = plan.instance.take()
            && self.instance != Some(instance)
        {
            self.instance = Some(instance);
            if let Err(error) = self.leases.adopt(instance) {
                tracing::error!(%error, "the scheduler half's name is lost");
            }
        }
        let leases = std::mem::take(&mut plan.leases);
        if !leases.is_empty() {
            self.sent.plan(&leases);
            if let Err(error) = self.leases.apply(leases) {
                tracing::error!(%error, "a plan's leases are lost");
            }
        }
        if !plan.is_empty() {
            // Without a loader nothing was registered, and nothing can be asked for.
            let _ = self.events.send(Event::Plan(plan));
        }
    }

    fn end_step(&mut self) {}

    fn take_report(&mut self) -> Result<WorkerReport, WorkerLost> {
        let mut all = WorkerReport::default();
        while let Ok(event) = self.leases.events().try_recv() {
            self.lease_event(event);
        }
        for (request, ended_at) in self.sent.due.drain(..) {
            self.counters.freeing(ended_at.elapsed());
            all.sent.push(request);
        }
        while let Ok(done) = self.done.1.try_recv() {
            match done {
                Done::Received(received) => all.received.push(received),
                Done::Lost(request) => self.own.lost.push(request),
            }
        }
        if self.own != Report::default() {
            all.part = Some(ReportPart::Remote(std::mem::take(&mut self.own)));
        }
        // After what was taken out: an end that comes of a thread's end is seen with it.
        self.check_threads()?;
        Ok(all)
    }

    fn figures(&mut self, figures: &mut Figures) {
        let loader = self.counters.snapshot();
        figures.add(LOADER, &loader);
        figures.add_times(LOADER_TIMES, &loader);
        figures.add(ENGINE, &self.engine.counters());
        figures.add(LEASES, &self.leases.latest());
    }

    fn shutdown(&mut self, within: Duration) {
        self.end(within);
    }
}

impl Drop for RemoteWorker {
    fn drop(&mut self) {
        self.end(Duration::ZERO);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn epoch(value: u64) -> Epoch {
        Epoch::new(value).unwrap()
    }

    fn request(value: u64) -> RequestId {
        RequestId::new(format!("r{value}")).unwrap()
    }

    /// In whatever order the end of a lease and the plan that activates it come: sent once. A lease that
    /// was revoked, or ended before anything was held under it, sends nothing and leaves nothing.
    #[test]
    fn c102_a_request_is_sent_once_when_it_has_finished_and_its_lease_has_ended() {
        let plan = |reserve: &[u64], activate: &[u64], revoke: &[u64]| StepLeases {
            issued_up_to: 9,
            reserve: reserve.iter().map(|n| (epoch(*n), request(*n))).collect(),
            activate: activate.iter().copied().map(epoch).collect(),
            revoke: revoke.iter().copied().map(epoch).collect(),
        };
        let mut sent = Sent::default();
        let at = Instant::now();
        let due = |sent: &mut Sent| -> Vec<RequestId> {
            sent.due.drain(..).map(|(request, _)| request).collect()
        };
        sent.plan(&plan(&[1, 2, 3, 4], &[1], &[]));
        sent.ended(epoch(1), at);
        sent.ended(epoch(1), at);
        assert_eq!(due(&mut sent), [request(1)]);
        // The release has overtaken the plan.
        sent.ended(epoch(2), at);
        assert!(sent.due.is_empty());
        sent.plan(&plan(&[], &[2], &[]));
        assert_eq!(due(&mut sent), [request(2)]);
        sent.ended(epoch(3), at);
        sent.plan(&plan(&[], &[], &[3, 4]));
        sent.ended(epoch(4), at);
        sent.ended(epoch(7), at);
        assert!(sent.due.is_empty() && sent.ended.is_empty());
        assert!(sent.activated.is_empty() && sent.requests.is_empty());
    }
}

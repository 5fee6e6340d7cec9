//! Two engines with their schedulers' and workers' halves.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvferry_connector::contract::{
    Aggregated, Aggregator, Allocation, CacheGroup, CacheLayer, CacheLayout, Finish, Finished,
    FinishedRequest, GroupBlocks, Params, Received, RequestView, Scheduled, SchedulerConnector,
    StepView, WorkerConnector,
};
use kvferry_connector::remote::{RemoteConfig, RemoteScheduler, RemoteWorker, Role};
use kvferry_engine::{
    EngineBuilder, EngineConfig, FaultControl, FaultFabric, HostPool, LoopbackFabric,
    LoopbackNetwork, MemoryRegion, Replies, Sender, Service,
};
use kvferry_wire::{EngineId, Instance, RequestId};

/// No wait of any test is longer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Tokens of a block.
pub(crate) const TOKENS: u32 = 16;
/// Bytes of a block in one layer, unless a test says otherwise.
const BYTES: u64 = 512;
/// Layers of a cache group.
const LAYERS: u32 = 2;
/// Blocks of a rank.
pub(crate) const BLOCKS: u32 = 64;
/// What blocks hold before anybody writes.
pub(crate) const POISON: u8 = 0xdd;

pub(crate) fn id(text: &str) -> RequestId {
    RequestId::new(text).unwrap()
}

/// Waits for something that happens without steps.
pub(crate) fn until(what: &str, mut happened: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !happened() {
        assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// What carries the engines.
#[derive(Clone)]
pub(crate) enum Fabric {
    Loopback(LoopbackNetwork),
    Faulty(LoopbackNetwork, FaultControl),
    /// With a service that panics once it is told to.
    Buggy(LoopbackNetwork, FaultControl, Arc<AtomicBool>),
    Ucx,
}

struct Bug(Arc<AtomicBool>);

impl Service for Bug {
    fn on_message(&mut self, _: Sender, _: &[u8], _: &mut Replies) {}

    fn on_tick(&mut self, _: Instant, _: &mut Replies) -> Option<Instant> {
        assert!(!self.0.load(Ordering::Relaxed), "a bug");
        None
    }
}

impl Fabric {
    pub(crate) fn loopback() -> Self {
        Self::Loopback(LoopbackNetwork::new())
    }

    fn worker(
        &self,
        config: &RemoteConfig,
        instance: Instance,
        rank: u32,
        tune: fn(&mut EngineConfig),
    ) -> RemoteWorker {
        let mut engine = EngineConfig::new(config.engine.clone());
        engine.suspect_after = Duration::from_millis(800);
        engine.dead_after = Duration::from_millis(800);
        engine.ping_interval = Duration::from_millis(200);
        engine.escalation_step = Duration::from_millis(200);
        engine.net_devices = Some("lo".to_owned());
        tune(&mut engine);
        let start = |builder: EngineBuilder| match self.clone() {
            Self::Loopback(network) => {
                builder.start_on(move || LoopbackFabric::new(&network, 4096))
            }
            Self::Faulty(network, control) => builder
                .start_on(move || FaultFabric::new(LoopbackFabric::new(&network, 4096)?, &control)),
            Self::Buggy(network, control, panics) => builder
                .service(99, Box::new(Bug(panics)))
                .start_on(move || FaultFabric::new(LoopbackFabric::new(&network, 4096)?, &control)),
            Self::Ucx => builder.start(),
        };
        RemoteWorker::start_with(config.clone(), instance, rank, engine, start).unwrap()
    }
}

/// A request and the tokens of its prompt.
#[derive(Clone)]
pub(crate) struct Request {
    pub(crate) id: RequestId,
    tokens: Vec<u32>,
    params: Option<Params>,
}

impl Request {
    pub(crate) fn new(name: &str, prompt: u32, params: Option<Params>) -> Self {
        Self {
            id: id(name),
            tokens: (0..prompt).collect(),
            params,
        }
    }

    /// One whose blocks are to be held.
    pub(crate) fn export(name: &str, prompt: u32) -> Self {
        let params = serde_json::json!({"do_remote_decode": true});
        Self::new(name, prompt, params.as_object().cloned())
    }

    pub(crate) fn view(&self) -> RequestView<'_> {
        RequestView {
            id: &self.id,
            tokens: &self.tokens,
            prompt: self.tokens.len() as u32,
            params: self.params.as_ref(),
            extra_key: "",
        }
    }
}

/// One engine.
pub(crate) struct Side {
    pub(crate) scheduler: RemoteScheduler,
    pub(crate) workers: Vec<RemoteWorker>,
    pub(crate) memory: Vec<MemoryRegion>,
    ranks: Aggregator,
    /// Steps taken.
    pub(crate) steps: u64,
    groups: Vec<u32>,
    block_bytes: u64,
}

/// How a side is set up, apart from its connector.
pub(crate) struct Setup<'a> {
    /// What carries the engine of a rank.
    pub(crate) fabric: &'a dyn Fn(u32) -> Fabric,
    /// Bytes of a block in one layer.
    pub(crate) block_bytes: u64,
    /// Changes the engines' settings.
    pub(crate) tune: fn(&mut EngineConfig),
}

pub(crate) fn config(name: &str, role: Role) -> RemoteConfig {
    RemoteConfig {
        role,
        ..RemoteConfig::new(EngineId::new(name).unwrap(), vec![TOKENS])
    }
}

impl Side {
    pub(crate) fn new(config: &RemoteConfig, fabric: &Fabric) -> Self {
        let setup = Setup {
            fabric: &|_| fabric.clone(),
            block_bytes: BYTES,
            tune: |_| {},
        };
        Self::with(config, &setup)
    }

    pub(crate) fn with(config: &RemoteConfig, setup: &Setup<'_>) -> Self {
        let instance = Instance::random().unwrap();
        let scheduler = RemoteScheduler::new(config.clone(), instance).unwrap();
        let mut side = Self {
            scheduler,
            workers: Vec::new(),
            memory: Vec::new(),
            ranks: Aggregator::new(config.ranks),
            steps: 0,
            groups: config.block_tokens.clone(),
            block_bytes: setup.block_bytes,
        };
        for rank in 0..config.ranks {
            let mut worker = (setup.fabric)(rank).worker(config, instance, rank, setup.tune);
            let bytes = side.offset(side.groups.len() as u32, 0, 0);
            let region = HostPool::new(bytes as usize).unwrap().region().unwrap();
            region.fill(0, bytes, POISON).unwrap();
            side.memory.push(region);
            worker.register(&side.layout(rank)).unwrap();
            side.scheduler
                .publish(worker.rank(), worker.describe().unwrap())
                .unwrap();
            side.workers.push(worker);
        }
        side
    }

    /// A rank's blocks.
    pub(crate) fn layout(&self, rank: u32) -> CacheLayout {
        let block_bytes = self.block_bytes;
        let groups = 0..self.groups.len() as u32;
        let layers = groups.flat_map(|group| (0..LAYERS).map(move |layer| (group, layer)));
        let layers = layers.map(|(group, layer)| CacheLayer {
            layer: group * LAYERS + layer,
            group,
            memory: self.memory[rank as usize].clone(),
            offset: self.offset(group, layer, 0),
            block_bytes,
            block_stride: block_bytes,
            blocks: BLOCKS,
        });
        let block_tokens = self.groups.iter();
        CacheLayout {
            groups: block_tokens
                .map(|&block_tokens| CacheGroup { block_tokens })
                .collect(),
            layers: layers.collect(),
        }
    }

    fn offset(&self, group: u32, layer: u32, block: u32) -> u64 {
        u64::from((group * LAYERS + layer) * BLOCKS + block) * self.block_bytes
    }

    /// One step in which these requests compute something.
    pub(crate) fn step(&mut self, scheduled: &[&Request]) -> Aggregated {
        self.steps += 1;
        let scheduled: Vec<Scheduled<'_>> = scheduled
            .iter()
            .map(|request| Scheduled {
                request: request.view(),
                new_blocks: GroupBlocks(&[]),
                renewed: true,
                computed: 0,
                tokens: request.view().prompt,
            })
            .collect();
        let step = StepView {
            number: self.steps,
            scheduled: &scheduled,
        };
        let plan = self.scheduler.build_step(&step);
        let mut reports = Vec::new();
        for (rank, worker) in (0..).zip(&mut self.workers) {
            worker.begin_step(plan.clone());
            worker.end_step();
            reports.push((rank, worker.take_report().unwrap()));
        }
        let all = self.ranks.take(reports);
        self.scheduler.on_report(&all);
        all
    }

    /// Steps until a report has what is looked for.
    pub(crate) fn step_until<T>(
        &mut self,
        what: &str,
        mut found: impl FnMut(&Aggregated) -> Option<T>,
    ) -> T {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(found) = found(&self.step(&[])) {
                return found;
            }
            assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Steps until a load is reported.
    pub(crate) fn received(&mut self, request: &Request) -> Received {
        self.step_until("a load's report", |report| {
            let mut received = report.received.iter();
            received.find(|it| it.request == request.id).cloned()
        })
    }

    /// Steps until a request is reported as sent.
    pub(crate) fn sent(&mut self, request: &Request) {
        self.step_until("a request sent", |report| {
            report.sent.contains(&request.id).then_some(())
        });
    }

    /// Computes a request whole, into these blocks, and ends it as a prefill does.
    pub(crate) fn prefill(&mut self, request: &Request, blocks: &[u32], byte: u8) -> Params {
        self.scheduler.on_new_request(&request.view());
        self.step(&[request]);
        self.write(blocks, byte);
        self.export(request, &[blocks.to_vec()])
    }

    /// Ends a request as a prefill does, whose blocks are held then.
    pub(crate) fn export(&mut self, request: &Request, blocks: &[Vec<u32>]) -> Params {
        match self.finish_groups(request, blocks, Finish::Length) {
            Finished::Hold {
                params: Some(params),
            } => params,
            other => panic!("not held: {other:?}"),
        }
    }

    pub(crate) fn finish(&mut self, request: &Request, blocks: &[u32], how: Finish) -> Finished {
        self.finish_groups(request, &[blocks.to_vec()], how)
    }

    fn finish_groups(&mut self, request: &Request, blocks: &[Vec<u32>], how: Finish) -> Finished {
        self.scheduler.request_finished(&FinishedRequest {
            request: request.view(),
            blocks: GroupBlocks(blocks),
            computed: request.view().prompt,
            in_flight: 0,
            how,
        })
    }

    /// Takes a request in, looks it up and gives it blocks, as far as it gets tokens.
    pub(crate) fn admit(&mut self, request: &Request, blocks: &[u32], computed: u32) -> u32 {
        self.scheduler.on_new_request(&request.view());
        let matched = self.scheduler.matched_tokens(&request.view(), computed);
        self.alloc(request, blocks, computed, matched.tokens());
        matched.tokens()
    }

    pub(crate) fn alloc(&mut self, request: &Request, blocks: &[u32], local: u32, external: u32) {
        self.alloc_groups(request, &[blocks.to_vec()], local, external);
    }

    pub(crate) fn alloc_groups(
        &mut self,
        request: &Request,
        blocks: &[Vec<u32>],
        local: u32,
        external: u32,
    ) {
        let allocation = Allocation {
            blocks: GroupBlocks(blocks),
            local_computed: local,
            external,
        };
        self.scheduler.after_alloc(&request.view(), &allocation);
    }

    /// Renewals that a rank has answered. From the first one on, the reader's side is connected too.
    pub(crate) fn renewed(&self, rank: usize) -> u64 {
        let leases = self.workers[rank].lease_snapshot(PATIENCE).unwrap();
        leases.counters.renewed
    }

    /// Writes blocks in every layer of every rank: the byte, one more per block, and the rank on top.
    pub(crate) fn write(&self, blocks: &[u32], byte: u8) {
        self.write_in(0, blocks, byte);
    }

    /// The same in this cache group.
    pub(crate) fn write_in(&self, group: u32, blocks: &[u32], byte: u8) {
        for (rank, memory) in (0..).zip(&self.memory) {
            for (place, block) in (0..).zip(blocks) {
                for layer in 0..LAYERS {
                    let offset = self.offset(group, layer, *block);
                    let value = value(byte, place, rank);
                    memory.fill(offset, self.block_bytes, value).unwrap();
                }
            }
        }
    }

    /// Bytes of blocks that are not what [`write`](Self::write) with these arguments leaves.
    pub(crate) fn wrong(&self, blocks: &[u32], byte: u8) -> usize {
        self.wrong_in(0, blocks, byte)
    }

    /// The same in this cache group.
    pub(crate) fn wrong_in(&self, group: u32, blocks: &[u32], byte: u8) -> usize {
        self.count(group, blocks, |place, rank| value(byte, place, rank))
    }

    /// Bytes of blocks that are not poison.
    pub(crate) fn touched(&self, blocks: &[u32]) -> usize {
        self.touched_in(0, blocks)
    }

    /// The same in this cache group.
    pub(crate) fn touched_in(&self, group: u32, blocks: &[u32]) -> usize {
        self.count(group, blocks, |_, _| POISON)
    }

    fn count(&self, group: u32, blocks: &[u32], expected: impl Fn(u8, u8) -> u8) -> usize {
        let mut wrong = 0;
        let mut bytes = vec![0; self.block_bytes as usize];
        for (rank, memory) in (0..).zip(&self.memory) {
            for (place, block) in (0..).zip(blocks) {
                for layer in 0..LAYERS {
                    let offset = self.offset(group, layer, *block);
                    memory.read_at(offset, &mut bytes).unwrap();
                    let expected = expected(place, rank);
                    wrong += bytes.iter().filter(|byte| **byte != expected).count();
                }
            }
        }
        wrong
    }
}

fn value(byte: u8, place: u8, rank: u8) -> u8 {
    byte.wrapping_add(place)
        .wrapping_add(rank.wrapping_mul(100))
}

/// A producer and a consumer.
pub(crate) fn pair(fabric: &Fabric) -> (Side, Side) {
    pair_of(fabric, |_| {})
}

/// A producer and a consumer with these settings changed.
pub(crate) fn pair_of(fabric: &Fabric, change: impl Fn(&mut RemoteConfig)) -> (Side, Side) {
    let side = |name, role| {
        let mut config = config(name, role);
        change(&mut config);
        Side::new(&config, fabric)
    };
    (
        side("prefill", Role::Producer),
        side("decode", Role::Consumer),
    )
}

/// Has the consumer connected and the lease kept alive.
pub(crate) fn connected(producer: &Side, consumer: &mut Side, request: &Request) {
    consumer.scheduler.on_new_request(&request.view());
    consumer.step(&[]);
    until("a renewal", || producer.renewed(0) > 0);
}

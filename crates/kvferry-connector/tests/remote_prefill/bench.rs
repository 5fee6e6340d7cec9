//! Two engines with their schedulers' and workers' halves.

use std::time::{Duration, Instant};

use kvferry_connector::contract::{
    Aggregated, Aggregator, Allocation, CacheGroup, CacheLayer, CacheLayout, Finish, Finished,
    FinishedRequest, GroupBlocks, Params, Received, RequestView, Scheduled, SchedulerConnector,
    StepView, WorkerConnector,
};
use kvferry_connector::remote::{RemoteConfig, RemoteScheduler, RemoteWorker, Role};
use kvferry_engine::{
    EngineBuilder, EngineConfig, FaultControl, FaultFabric, HostPool, LoopbackFabric,
    LoopbackNetwork, MemoryRegion,
};
use kvferry_wire::{EngineId, Instance, RequestId};

/// No wait of any test is longer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Tokens of a block.
pub(crate) const TOKENS: u32 = 16;
/// Bytes of a block in one layer.
const BYTES: u64 = 512;
const LAYERS: u32 = 2;
/// Blocks of a rank.
pub(crate) const BLOCKS: u32 = 64;
/// What blocks hold before anybody writes.
pub(crate) const POISON: u8 = 0xdd;

pub(crate) fn id(text: &str) -> RequestId {
    RequestId::new(text).unwrap()
}

/// What carries the engines.
#[derive(Clone)]
pub(crate) enum Fabric {
    Loopback(LoopbackNetwork),
    Faulty(LoopbackNetwork, FaultControl),
    Ucx,
}

impl Fabric {
    pub(crate) fn loopback() -> Self {
        Self::Loopback(LoopbackNetwork::new())
    }

    fn worker(&self, config: &RemoteConfig, instance: Instance, rank: u32) -> RemoteWorker {
        let mut engine = EngineConfig::new(config.engine.clone());
        engine.suspect_after = Duration::from_millis(800);
        engine.dead_after = Duration::from_millis(800);
        engine.ping_interval = Duration::from_millis(200);
        engine.escalation_step = Duration::from_millis(200);
        engine.net_devices = Some("lo".to_owned());
        let start = |builder: EngineBuilder| match self.clone() {
            Self::Loopback(network) => {
                builder.start_on(move || LoopbackFabric::new(&network, 4096))
            }
            Self::Faulty(network, control) => builder
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
    steps: u64,
}

pub(crate) fn config(name: &str, role: Role) -> RemoteConfig {
    RemoteConfig {
        role,
        ..RemoteConfig::new(EngineId::new(name).unwrap(), vec![TOKENS])
    }
}

impl Side {
    pub(crate) fn new(config: &RemoteConfig, fabric: &Fabric) -> Self {
        let instance = Instance::random().unwrap();
        let scheduler = RemoteScheduler::new(config.clone(), instance).unwrap();
        let (mut workers, mut memory) = (Vec::new(), Vec::new());
        for rank in 0..config.ranks {
            let mut worker = fabric.worker(config, instance, rank);
            let bytes = u64::from(LAYERS) * u64::from(BLOCKS) * BYTES;
            let region = HostPool::new(bytes as usize).unwrap().region().unwrap();
            region.fill(0, bytes, POISON).unwrap();
            worker.register(&Self::layout(&region)).unwrap();
            scheduler
                .publish(worker.rank(), worker.describe().unwrap())
                .unwrap();
            workers.push(worker);
            memory.push(region);
        }
        Self {
            scheduler,
            workers,
            memory,
            ranks: Aggregator::new(config.ranks),
            steps: 0,
        }
    }

    /// A rank's blocks.
    pub(crate) fn layout(memory: &MemoryRegion) -> CacheLayout {
        let layers = (0..LAYERS).map(|layer| CacheLayer {
            layer,
            group: 0,
            memory: memory.clone(),
            offset: u64::from(layer) * u64::from(BLOCKS) * BYTES,
            block_bytes: BYTES,
            block_stride: BYTES,
            blocks: BLOCKS,
        });
        CacheLayout {
            groups: vec![CacheGroup {
                block_tokens: TOKENS,
            }],
            layers: layers.collect(),
        }
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
            reports.push((rank, worker.take_report()));
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
        match self.finish(request, blocks, Finish::Length) {
            Finished::Hold {
                params: Some(params),
            } => params,
            other => panic!("not held: {other:?}"),
        }
    }

    pub(crate) fn finish(&mut self, request: &Request, blocks: &[u32], how: Finish) -> Finished {
        self.scheduler.request_finished(&FinishedRequest {
            request: request.view(),
            blocks: GroupBlocks(&[blocks.to_vec()]),
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
        let allocation = Allocation {
            blocks: GroupBlocks(&[blocks.to_vec()]),
            local_computed: local,
            external,
        };
        self.scheduler.after_alloc(&request.view(), &allocation);
    }

    /// Writes blocks in every layer of every rank: the byte, one more per block, and the rank on top.
    pub(crate) fn write(&self, blocks: &[u32], byte: u8) {
        for (rank, memory) in (0..).zip(&self.memory) {
            for (place, block) in (0..).zip(blocks) {
                for layer in 0..LAYERS {
                    memory
                        .fill(offset(layer, *block), BYTES, value(byte, place, rank))
                        .unwrap();
                }
            }
        }
    }

    /// Bytes of blocks that are not what [`write`](Self::write) with these arguments leaves.
    pub(crate) fn wrong(&self, blocks: &[u32], byte: u8) -> usize {
        self.count(blocks, |place, rank| value(byte, place, rank))
    }

    /// Bytes of blocks that are not poison.
    pub(crate) fn touched(&self, blocks: &[u32]) -> usize {
        self.count(blocks, |_, _| POISON)
    }

    fn count(&self, blocks: &[u32], expected: impl Fn(u8, u8) -> u8) -> usize {
        let mut wrong = 0;
        for (rank, memory) in (0..).zip(&self.memory) {
            for (place, block) in (0..).zip(blocks) {
                for layer in 0..LAYERS {
                    let mut bytes = vec![0; BYTES as usize];
                    memory.read_at(offset(layer, *block), &mut bytes).unwrap();
                    let expected = expected(place, rank);
                    wrong += bytes.iter().filter(|byte| **byte != expected).count();
                }
            }
        }
        wrong
    }
}

fn offset(layer: u32, block: u32) -> u64 {
    u64::from(layer * BLOCKS + block) * BYTES
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

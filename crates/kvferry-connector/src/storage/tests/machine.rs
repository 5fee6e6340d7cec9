//! An engine made of a scheduler half, one or two ranks, and blocks whose bytes say what they are.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kvferry_engine::{HostPool, MemoryRegion};
use kvferry_wire::RequestId;

use super::super::*;
use crate::contract::*;

pub(super) const BLOCK: u32 = 4;
pub(super) const BLOCKS: u32 = 64;
const LAYERS: u32 = 3;
const BYTES: u64 = 96;
/// Bytes of a block, of all layers.
pub(super) const PAYLOAD: u64 = LAYERS as u64 * BYTES;

pub(super) fn id(text: &str) -> RequestId {
    RequestId::new(text).unwrap()
}

/// Waits for an event, with plenty of room.
pub(super) fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !done() {
        assert!(Instant::now() < deadline, "{what} did not happen");
        std::thread::sleep(Duration::from_micros(200));
    }
}

pub(super) fn config(path: &Path) -> StorageConfig {
    let mut settings = StorageSettings::at(path);
    settings.io_threads = 2;
    // Lookups are never late unless a test wants it.
    settings.lookup_timeout_ms = 60_000;
    StorageConfig {
        settings,
        model: "tiny".to_owned(),
        layout: "LBHNC float32".to_owned(),
        block_tokens: vec![BLOCK],
        reach: Vec::new(),
        role: Role::Both,
        world: 1,
        one_pool: false,
    }
}

pub(super) struct Rank {
    pub(super) worker: StorageWorker,
    pub(super) memory: MemoryRegion,
}

impl Rank {
    pub(super) fn new(config: &StorageConfig, rank: u32) -> Self {
        let mut worker = StorageWorker::open(config.clone(), rank).unwrap();
        let groups = config.block_tokens.len() as u64;
        let bytes = groups * u64::from(LAYERS * BLOCKS) * BYTES;
        let memory = HostPool::new(bytes as usize).unwrap().region().unwrap();
        memory.fill(0, bytes, 0xAA).unwrap();
        let layers = (0..groups as u32 * LAYERS).map(|layer| CacheLayer {
            layer,
            group: layer / LAYERS,
            memory: memory.clone(),
            offset: u64::from(layer * BLOCKS) * BYTES,
            block_bytes: BYTES,
            block_stride: BYTES,
            blocks: BLOCKS,
        });
        let layers = layers.collect();
        let group = |&block_tokens: &u32| CacheGroup { block_tokens };
        let groups = config.block_tokens.iter().map(group).collect();
        worker.register(&CacheLayout { groups, layers }).unwrap();
        Self { worker, memory }
    }

    pub(super) fn fill(&self, group: u32, block: u32, value: u8) {
        for layer in group * LAYERS..(group + 1) * LAYERS {
            let at = u64::from(layer * BLOCKS + block) * BYTES;
            self.memory
                .fill(at, BYTES, value.wrapping_add(layer as u8))
                .unwrap();
        }
    }

    /// The value that the block was filled with, if all of it was.
    pub(super) fn value(&self, group: u32, block: u32) -> Option<u8> {
        let mut values = Vec::new();
        for layer in group * LAYERS..(group + 1) * LAYERS {
            let at = u64::from(layer * BLOCKS + block) * BYTES;
            let mut bytes = [0; BYTES as usize];
            self.memory.read_at(at, &mut bytes).unwrap();
            values.extend(bytes.map(|byte| byte.wrapping_sub(layer as u8)));
        }
        values
            .iter()
            .all(|&value| value == values[0])
            .then_some(values[0])
    }
}

pub(super) struct Machine {
    pub(super) scheduler: StorageScheduler,
    pub(super) ranks: Vec<Rank>,
    aggregator: Aggregator,
    step: u64,
    /// All that was reported.
    pub(super) received: Vec<Received>,
    pub(super) sent: Vec<RequestId>,
    pub(super) plans: Vec<Plan>,
}

pub(super) struct Job<'a> {
    pub(super) id: RequestId,
    pub(super) tokens: &'a [u32],
    pub(super) prompt: u32,
}

pub(super) fn job<'a>(name: &str, tokens: &'a [u32]) -> Job<'a> {
    Job {
        id: id(name),
        tokens,
        prompt: tokens.len() as u32,
    }
}

impl<'a> Job<'a> {
    pub(super) fn view(&self) -> RequestView<'_> {
        RequestView {
            id: &self.id,
            tokens: self.tokens,
            prompt: self.prompt,
            params: None,
            extra_key: "",
        }
    }
}

impl Machine {
    pub(super) fn new(config: &StorageConfig) -> Self {
        Self {
            scheduler: StorageScheduler::new(config.clone()).unwrap(),
            ranks: (0..config.world)
                .map(|rank| Rank::new(config, rank))
                .collect(),
            aggregator: Aggregator::new(config.world),
            step: 0,
            received: Vec::new(),
            sent: Vec::new(),
            plans: Vec::new(),
        }
    }

    pub(super) fn fill(&self, block: u32, value: u8) {
        for (rank, number) in self.ranks.iter().zip(0..) {
            rank.fill(0, block, value + number * 100);
        }
    }

    pub(super) fn value(&self, block: u32) -> Option<u8> {
        self.ranks[0].value(0, block)
    }

    /// The lookup's answer once it is known.
    pub(super) fn matched(&self, job: &Job<'_>, computed: u32) -> Matched {
        let mut answer = Matched::None;
        until("an answer", || {
            answer = self.scheduler.matched_tokens(&job.view(), computed);
            !matches!(answer, Matched::Later(_))
        });
        answer
    }

    /// A new request, and what is offered to it.
    pub(super) fn offer(&mut self, job: &Job<'_>, computed: u32) -> u32 {
        self.scheduler.on_new_request(&job.view());
        self.matched(job, computed).tokens()
    }

    pub(super) fn alloc(
        &mut self,
        job: &Job<'_>,
        blocks: &[u32],
        local_computed: u32,
        external: u32,
    ) {
        let blocks = [blocks.to_vec()];
        self.scheduler.after_alloc(
            &job.view(),
            &Allocation {
                blocks: GroupBlocks(&blocks),
                local_computed,
                external,
            },
        );
    }

    pub(super) fn plan(&mut self, scheduled: &[Scheduled<'_>]) -> StepPlan {
        self.step += 1;
        let number = self.step;
        let plan = self.scheduler.build_step(&StepView { number, scheduled });
        let StepPlan::Storage(storage) = &plan else {
            panic!("{plan:?}");
        };
        self.plans.push(storage.clone());
        plan
    }

    pub(super) fn begin(&mut self, plan: &StepPlan) {
        for rank in &mut self.ranks {
            rank.worker.release_blocks(plan);
            rank.worker.begin_step(plan.clone());
        }
    }

    pub(super) fn end(&mut self) {
        for rank in &mut self.ranks {
            rank.worker.end_step();
        }
    }

    pub(super) fn report(&mut self) {
        let reports = self
            .ranks
            .iter_mut()
            .zip(0..)
            .map(|(rank, number)| (number, rank.worker.take_report().unwrap()));
        let all = self.aggregator.take(reports.collect::<Vec<_>>());
        self.scheduler.on_report(&all);
        self.received.extend(all.received);
        self.sent.extend(all.sent);
    }

    /// A whole step.
    pub(super) fn step(&mut self, scheduled: &[Scheduled<'_>]) {
        let plan = self.plan(scheduled);
        self.begin(&plan);
        self.end();
        self.report();
    }

    /// Computes a request's tokens from `computed` to `end`, in blocks that it is given now.
    pub(super) fn compute(&mut self, job: &Job<'_>, blocks: &[u32], computed: u32, end: u32) {
        let new_blocks = [blocks.to_vec()];
        self.step(&[Scheduled {
            request: job.view(),
            new_blocks: GroupBlocks(&new_blocks),
            renewed: true,
            computed,
            tokens: end - computed,
        }]);
    }

    pub(super) fn finish(&mut self, job: &Job<'_>, blocks: &[u32]) -> Finished {
        let blocks = [blocks.to_vec()];
        self.scheduler.request_finished(&FinishedRequest {
            request: job.view(),
            blocks: GroupBlocks(&blocks),
            computed: job.tokens.len() as u32,
            in_flight: 0,
            how: Finish::Length,
        })
    }

    /// Empty steps until nothing is pending.
    pub(super) fn settle(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.scheduler.has_pending_work() {
            assert!(Instant::now() < deadline, "{:?}", self.scheduler);
            self.step(&[]);
            std::thread::sleep(Duration::from_micros(200));
        }
        until("the end of all writes", || {
            self.ranks
                .iter()
                .all(|rank| rank.worker.stats().pending_saves == 0)
        });
    }

    /// A request from beginning to end, computed in whole, in these blocks filled with these values.
    pub(super) fn run(&mut self, job: &Job<'_>, blocks: &[(u32, u8)]) {
        for &(block, value) in blocks {
            self.fill(block, value);
        }
        let ids: Vec<u32> = blocks.iter().map(|&(block, _)| block).collect();
        self.scheduler.on_new_request(&job.view());
        self.alloc(job, &ids, 0, 0);
        self.compute(job, &ids, 0, job.tokens.len() as u32);
        self.finish(job, &ids);
        self.settle();
    }

    /// Loads what is offered to a new request into these blocks; how that ended.
    pub(super) fn load(&mut self, job: &Job<'_>, blocks: &[u32]) -> Received {
        let tokens = self.offer(job, 0);
        assert!(tokens > 0);
        self.alloc(job, blocks, 0, tokens);
        self.settle();
        self.received.pop().unwrap()
    }

    pub(super) fn worker(&self) -> StorageWorkerStats {
        self.ranks[0].worker.stats()
    }
}

/// All block files under a directory.
pub(super) fn files(path: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(path).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path));
        } else if path.extension().is_some_and(|extension| extension == "kv") {
            found.push(path);
        }
    }
    found.sort();
    found
}

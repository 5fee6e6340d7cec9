//! What this project began with: `RemotePrefill` and `SharedStorage` under one `MultiConnector`, and what
//! goes wrong there elsewhere.

use std::fs::DirEntry;
use std::path::Path;
use std::time::{Duration, Instant};

use kvferry_connector::contract::{
    Aggregated, Aggregator, Allocation, GroupBlocks, Matched, Scheduled, SchedulerConnector,
    StepView, WorkerConnector,
};
use kvferry_connector::multi::{MultiScheduler, MultiWorker};
use kvferry_connector::remote::{RemoteScheduler, Role};
use kvferry_connector::storage::{StorageConfig, StorageScheduler, StorageSettings, StorageWorker};

use crate::bench::{Fabric, PATIENCE, Request, Side, TOKENS, config};

/// The first byte of what the producer holds.
const BYTE: u8 = 10;
/// Where it holds a prompt of 64 tokens, and where that is loaded.
const THERE: [u32; 4] = [9, 3, 4, 5];
const HERE: [u32; 4] = [20, 21, 22, 23];

/// A consumer with both connectors, and the producer that it reads from.
struct Bench {
    producer: Side,
    scheduler: MultiScheduler,
    worker: MultiWorker,
    /// The consumer's side without its connector: its blocks, to look at.
    consumer: Side,
    ranks: Aggregator,
    steps: u64,
    files: tempfile::TempDir,
}

impl Bench {
    fn new() -> Self {
        let fabric = Fabric::loopback();
        let producer = Side::new(&config("prefill", Role::Producer), &fabric);
        // A side whose remote halves become children of the MultiConnector.
        let mut consumer = Side::new(&config("decode", Role::Consumer), &fabric);
        let files = tempfile::tempdir().unwrap();
        let storage = StorageConfig {
            settings: StorageSettings::at(files.path()),
            model: "model".into(),
            layout: "layout".into(),
            block_tokens: vec![TOKENS],
            reach: Vec::new(),
            role: Role::Both,
            world: 1,
            one_pool: true,
        };
        let remote_worker = consumer.workers.remove(0);
        let mut storage_worker = StorageWorker::open(storage.clone(), 0).unwrap();
        storage_worker.register(&consumer.layout(0)).unwrap();
        let empty = config("unused", Role::Consumer);
        let unused = RemoteScheduler::new(empty, kvferry_wire::Instance::random().unwrap());
        let remote = std::mem::replace(&mut consumer.scheduler, unused.unwrap());
        let children: Vec<Box<dyn SchedulerConnector>> = vec![
            Box::new(remote),
            Box::new(StorageScheduler::new(storage).unwrap()),
        ];
        Self {
            producer,
            scheduler: MultiScheduler::new(children, 1).unwrap(),
            worker: MultiWorker::new(vec![Box::new(remote_worker), Box::new(storage_worker)]),
            consumer,
            ranks: Aggregator::new(1),
            steps: 0,
            files,
        }
    }

    /// A bench, and a request of this many tokens that has come in and that the producer holds, in these
    /// blocks.
    fn with_offer(prompt: u32, blocks: &[u32]) -> (Self, Request) {
        let mut bench = Self::new();
        let prefilled = Request::export("p", prompt);
        let params = bench.producer.prefill(&prefilled, blocks, BYTE);
        bench.producer.step(&[]);
        let request = Request::new("d", prompt, Some(params));
        bench.scheduler.on_new_request(&request.view());
        (bench, request)
    }

    /// A step in which this request, which has these blocks, computes some tokens behind others.
    fn step(&mut self, computing: Option<(&Request, &[u32], u32, u32)>) -> Aggregated {
        self.steps += 1;
        let blocks = [computing.map(|it| it.1.to_vec()).unwrap_or_default()];
        let scheduled: Vec<Scheduled<'_>> = computing
            .iter()
            .map(|(request, _, computed, tokens)| Scheduled {
                request: request.view(),
                new_blocks: GroupBlocks(&blocks),
                renewed: true,
                computed: *computed,
                tokens: *tokens,
            })
            .collect();
        let step = StepView {
            number: self.steps,
            scheduled: &scheduled,
        };
        let plan = self.scheduler.build_step(&step);
        self.worker.begin_step(plan);
        self.worker.end_step();
        let report = self.ranks.take([(0, self.worker.take_report().unwrap())]);
        if !report.is_empty() {
            self.scheduler.on_report(&report);
        }
        report
    }

    fn until<T>(&mut self, what: &str, mut found: impl FnMut(&mut Self) -> Option<T>) -> T {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(found) = found(self) {
                return found;
            }
            assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The answer of a lookup, once it is one.
    fn matched(&mut self, request: &Request, computed: u32) -> Matched {
        self.until("a lookup", |bench| {
            let matched = bench.scheduler.matched_tokens(&request.view(), computed);
            (!matches!(matched, Matched::Later(_))).then_some(matched)
        })
    }

    fn alloc(&mut self, request: &Request, blocks: &[u32], local: u32, external: u32) {
        let allocation = Allocation {
            blocks: GroupBlocks(&[blocks.to_vec()]),
            local_computed: local,
            external,
        };
        self.scheduler.after_alloc(&request.view(), &allocation);
    }

    /// Loads what is offered into these blocks; the tokens.
    fn load(&mut self, request: &Request, blocks: &[u32]) -> u32 {
        let tokens = self.matched(request, 0).tokens();
        self.alloc(request, blocks, 0, tokens);
        let failure = self.until("a load", |bench| {
            let report = bench.step(None);
            let mut received = report.received.iter();
            received
                .find(|it| it.request == request.id)
                .map(|it| it.failure)
        });
        assert_eq!(failure, None);
        // vLLM asks and gives once more after the load.
        assert_eq!(self.matched(request, tokens), Matched::None);
        self.alloc(request, blocks, tokens, 0);
        tokens
    }

    /// Releases that the producer has recorded, and leases that ended by them.
    fn releases(&self) -> (u64, u64) {
        let snapshot = self.producer.workers[0].lease_snapshot(PATIENCE).unwrap();
        (snapshot.counters.readers, snapshot.counters.released)
    }

    fn released(&mut self, leases: u64) {
        self.until("the release", |bench| {
            (bench.releases().1 == leases).then_some(())
        });
    }

    fn loads(&self) -> Vec<u64> {
        self.scheduler.stats().loads
    }

    fn wrong(&self, blocks: &[u32]) -> usize {
        self.consumer.wrong(blocks, BYTE)
    }

    /// Files in the store.
    fn files(&self) -> usize {
        fn below(directory: &Path) -> usize {
            let entries = std::fs::read_dir(directory).unwrap().map(Result::unwrap);
            let count = |entry: DirEntry| match entry.file_type().unwrap().is_dir() {
                true => below(&entry.path()),
                false => usize::from(entry.path().extension().is_some_and(|it| it == "kv")),
            };
            entries.map(count).sum()
        }
        below(self.files.path())
    }
}

/// (a) C4, C102: lookups happen again after a finished async load, and neither child loads twice; also where the
/// store has the blocks by then.
#[test]
fn c4_after_a_load_neither_child_loads_again() {
    let (mut bench, request) = Bench::with_offer(64, &THERE);
    assert_eq!(bench.load(&request, &HERE), 64);
    assert_eq!(bench.wrong(&HERE), 0);
    assert_eq!(bench.loads(), [1, 0]);
    // Its last token is computed, and its blocks are saved with that.
    bench.step(Some((&request, &HERE, 63, 1)));
    for computed in [64, 0, 16] {
        assert_eq!(bench.matched(&request, computed), Matched::None);
        bench.alloc(&request, &HERE, computed, 0);
    }
    for _ in 0..20 {
        assert_eq!(bench.step(None).received, []);
    }
    assert_eq!(bench.loads(), [1, 0]);
    assert_eq!(bench.releases(), (1, 1));
}

/// (b) The scheduler cannot place the request for several steps, or preempts it: one release.
#[test]
fn a_request_that_waits_and_is_preempted_releases_once() {
    let (mut bench, request) = Bench::with_offer(64, &THERE);
    for _ in 0..10 {
        assert_eq!(bench.matched(&request, 0).tokens(), 64);
        bench.step(None);
    }
    assert_eq!(bench.releases(), (0, 0));
    assert_eq!(bench.load(&request, &HERE), 64);
    bench.released(1);
    for _ in 0..3 {
        bench.scheduler.preempted(std::slice::from_ref(&request.id));
        // What was remote is used up; nothing was saved, so there is nothing in the store either.
        assert_eq!(bench.matched(&request, 0), Matched::None);
        bench.alloc(&request, &[30, 31, 32, 33], 0, 0);
        bench.step(None);
    }
    assert_eq!(bench.loads(), [1, 0]);
    assert_eq!(bench.releases(), (1, 1));
}

/// (c) The consumer has a full prefix hit: nothing is read, and the producer's blocks are freed.
#[test]
fn c1_a_full_prefix_hit_frees_the_producers_blocks() {
    let (mut bench, request) = Bench::with_offer(64, &THERE);
    // vLLM caps local hits at the last token's block; the rest is one block, which it was given anyway.
    assert_eq!(bench.matched(&request, 63), Matched::None);
    bench.alloc(&request, &HERE, 64, 0);
    bench.step(None);
    bench.released(1);
    let sent = bench.producer.step(&[]).sent;
    assert_eq!(sent.len(), 1);
    assert_eq!(bench.loads(), [0, 0]);
    assert_eq!(bench.consumer.touched(&HERE), 0);
}

/// (d) C100: the store was not chosen, and saves what the step says, in the blocks that the request really has.
#[test]
fn c100_the_child_that_was_not_chosen_saves_the_real_blocks() {
    let (mut bench, request) = Bench::with_offer(64, &THERE);
    assert_eq!(bench.load(&request, &HERE), 64);
    bench.step(Some((&request, &HERE, 63, 1)));
    // Another request that begins with the same tokens, and has no parameters: once they are saved, the
    // store has all four blocks. An answer stands, so each look is a request of its own.
    let mut looks = 0;
    let same = bench.until("the saves", |bench| {
        bench.step(None);
        looks += 1;
        let look = Request::new(&format!("look-{looks}"), 70, None);
        bench.scheduler.on_new_request(&look.view());
        (bench.matched(&look, 0).tokens() == 64).then_some(look)
    });
    let other = [40, 41, 42, 43];
    assert_eq!(bench.files(), 4);
    assert_eq!(bench.load(&same, &other), 64);
    assert_eq!(bench.wrong(&other), 0);
    assert_eq!(bench.loads(), [1, 1]);
    assert_eq!(bench.releases(), (1, 1));
}

/// (e) A prompt shorter than a block moves, and leaves no file: only full blocks are saved.
#[test]
fn a_prompt_shorter_than_a_block_is_loaded_and_not_saved() {
    let (mut bench, request) = Bench::with_offer(5, &[9]);
    assert_eq!(bench.load(&request, &[20]), 5);
    assert_eq!(bench.wrong(&[20]), 0);
    bench.step(Some((&request, &[20], 4, 1)));
    bench.released(1);
    let same = Request::new("same", 5, None);
    bench.scheduler.on_new_request(&same.view());
    assert_eq!(bench.matched(&same, 0), Matched::None);
    assert_eq!(bench.loads(), [1, 0]);
    assert_eq!(bench.files(), 0);
}

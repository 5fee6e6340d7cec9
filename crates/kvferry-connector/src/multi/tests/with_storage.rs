//! A scripted child in front, shared storage behind it.

use std::time::{Duration, Instant};

use kvferry_engine::{HostPool, MemoryRegion};

use super::script::*;
use crate::contract::*;
use crate::storage::{StorageConfig, StorageScheduler, StorageSettings, StorageWorker};

fn machine(path: &std::path::Path, first: &Scripted) -> (Machine, Hand, MemoryRegion) {
    let mut settings = StorageSettings::at(path);
    settings.io_threads = 1;
    settings.lookup_timeout_ms = 60_000;
    let config = StorageConfig {
        settings,
        model: "tiny".to_owned(),
        layout: "LBHNC float32".to_owned(),
        block_tokens: vec![4],
        reach: Vec::new(),
        role: Role::Both,
        world: 1,
        one_pool: true,
    };
    let memory = HostPool::new(16 * 64).unwrap().region().unwrap();
    let hand = Hand::default();
    let storage = StorageScheduler::new(config.clone()).unwrap();
    let worker = StorageWorker::open(config, 0).unwrap();
    let mut machine = Machine::new(
        vec![Box::new(first.clone()), Box::new(storage)],
        vec![vec![Box::new(hand.clone()), Box::new(worker)]],
    );
    let layers = vec![CacheLayer {
        layer: 0,
        group: 0,
        memory: memory.clone(),
        offset: 0,
        block_bytes: 64,
        block_stride: 64,
        blocks: 16,
    }];
    let groups = vec![CacheGroup { block_tokens: 4 }];
    machine.workers[0]
        .register(&CacheLayout { groups, layers })
        .unwrap();
    (machine, hand, memory)
}

fn fill(memory: &MemoryRegion, block: u64) {
    memory.fill(block * 64, 64, 10 + block as u8).unwrap();
}

fn byte(memory: &MemoryRegion, block: u64) -> u8 {
    let mut bytes = [0; 64];
    memory.read_at(block * 64, &mut bytes).unwrap();
    assert!(bytes.iter().all(|&byte| byte == bytes[0]));
    bytes[0]
}

fn settle(machine: &mut Machine) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while machine.scheduler.has_pending_work() {
        assert!(Instant::now() < deadline, "{:?}", machine.scheduler);
        machine.step(&[]);
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn matched(machine: &Machine, request: &RequestView<'_>) -> Matched {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let answer = machine.scheduler.matched_tokens(request, 0);
        if !matches!(answer, Matched::Later(_)) {
            return answer;
        }
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn scheduled<'a>(request: RequestView<'a>, blocks: &'a [Vec<u32>], computed: u32) -> Scheduled<'a> {
    Scheduled {
        request,
        new_blocks: GroupBlocks(blocks),
        renewed: true,
        computed,
        tokens: 12 - computed,
    }
}

#[test]
fn c100_c106_storage_saves_what_another_child_loaded_and_the_blocks_wait_for_both() {
    let directory = tempfile::tempdir().unwrap();
    let first = Scripted::new(offer(8));
    first.get().finish = Finished::Hold { params: None };
    let (mut machine, hand, memory) = machine(directory.path(), &first);
    let a = id("a");
    let request = view(&a, None);
    machine.scheduler.on_new_request(&request);
    assert_eq!(matched(&machine, &request), offer(8));
    let blocks = [vec![1, 2, 3]];
    machine.alloc(&request, &blocks, 0, 8);
    machine.step(&[]);
    // Nothing of it is saved while somebody else loads it.
    fill(&memory, 1);
    fill(&memory, 2);
    hand.received("a", None);
    machine.report();
    machine.alloc(&request, &blocks, 8, 0);
    fill(&memory, 3);
    let plan = machine.plan(&[scheduled(request, &blocks, 8)]);
    assert_eq!(machine.finish(request), Finished::Hold { params: None });
    machine.workers[0].begin_step(plan);
    machine.workers[0].end_step();
    hand.sent("a");
    machine.step(&[]);
    settle(&mut machine);
    assert_eq!(machine.sent.len(), 1);
    // Another engine finds it all.
    let first = Scripted::new(Matched::None);
    let (mut other, _, memory) = self::machine(directory.path(), &first);
    other.scheduler.on_new_request(&request);
    assert_eq!(matched(&other, &request).tokens(), 12);
    other.alloc(&request, &[vec![7, 8, 9]], 0, 12);
    settle(&mut other);
    assert_eq!(other.received[0].failure, None);
    assert_eq!([7, 8, 9].map(|block| byte(&memory, block)), [11, 12, 13]);
    assert_eq!(first.calls().last().unwrap(), "alloc a [[7, 8, 9]] 0 0");
}

#[test]
fn c91_c108_a_best_effort_childs_failure_costs_a_recomputation_and_no_request() {
    let directory = tempfile::tempdir().unwrap();
    let first = Scripted::new(Matched::None);
    let (mut machine, _, memory) = machine(directory.path(), &first);
    let (a, b) = (id("a"), id("b"));
    let blocks = [vec![1, 2, 3]];
    for block in 1..4 {
        fill(&memory, block);
    }
    machine.scheduler.on_new_request(&view(&a, None));
    machine.step(&[scheduled(view(&a, None), &blocks, 0)]);
    machine.finish(view(&a, None));
    settle(&mut machine);
    let request = view(&b, None);
    machine.scheduler.on_new_request(&request);
    assert_eq!(matched(&machine, &request).tokens(), 12);
    std::fs::remove_dir_all(directory.path()).unwrap();
    let blocks = [vec![4, 5, 6]];
    machine.alloc(&request, &blocks, 0, 12);
    settle(&mut machine);
    let received = machine.received.pop().unwrap();
    assert_eq!(
        (received.failure, received.failed.len()),
        (Some(LoadFailure::Storage), 3)
    );
    // Computed, with a directory that is gone: the saves fail and nobody notices.
    assert_eq!(machine.scheduler.matched_tokens(&request, 0), Matched::None);
    machine.alloc(&request, &blocks, 0, 0);
    machine.step(&[scheduled(request, &blocks, 0)]);
    machine.finish(request);
    settle(&mut machine);
    assert!(machine.received.is_empty());
    assert_eq!(machine.scheduler.stats().loads_failed, [0, 1]);
}

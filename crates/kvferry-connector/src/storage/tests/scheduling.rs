//! What is offered, when; what is saved, when.

use super::super::*;
use super::machine::*;
use crate::contract::*;

const TOKENS: [u32; 14] = [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12, 13, 14];

#[test]
fn full_blocks_come_back_byte_for_byte_and_the_rest_is_not_saved() {
    let directory = tempfile::tempdir().unwrap();
    let mut first = Machine::new(&config(directory.path()));
    first.run(&job("a", &TOKENS), &[(5, 10), (6, 20), (7, 30), (8, 40)]);
    assert_eq!(files(directory.path()).len(), 3);
    let stats = first.worker();
    assert_eq!((stats.blocks_saved, stats.bytes_saved), (3, 3 * PAYLOAD));
    drop(first);
    // Another engine, later.
    let mut second = Machine::new(&config(directory.path()));
    let received = second.load(&job("b", &TOKENS), &[11, 3, 9, 4]);
    assert_eq!((received.failure, received.failed), (None, Vec::new()));
    let values = [11, 3, 9].map(|block| second.value(block));
    assert_eq!(values, [Some(10), Some(20), Some(30)]);
    // Untouched: the block that is not full, and everybody else's.
    for block in (0..BLOCKS).filter(|block| ![11, 3, 9].contains(block)) {
        let mut byte = [0; 1];
        second.ranks[0]
            .memory
            .read_at(u64::from(block) * 96, &mut byte)
            .unwrap();
        assert_eq!(byte, [0xAA], "block {block}");
    }
    let stats = second.worker();
    assert_eq!(
        (stats.hits, stats.bytes_loaded, stats.misses),
        (3, 3 * PAYLOAD, 0)
    );
    let stats = second.scheduler.stats();
    assert_eq!((stats.lookups, stats.hits, stats.hit_tokens), (1, 1, 12));
}

#[test]
fn c12_what_is_offered_begins_where_the_computed_tokens_end() {
    let directory = tempfile::tempdir().unwrap();
    let mut machine = Machine::new(&config(directory.path()));
    machine.run(&job("a", &TOKENS), &[(5, 10), (6, 20), (7, 30), (8, 40)]);
    // The first block goes: those behind it are there all the same.
    let job_b = job("b", &TOKENS);
    let chain = machine.plans.iter().flat_map(|plan| &plan.save);
    let keys: Vec<BlockKey> = chain.map(|save| save.block.key).collect();
    let paths = files(directory.path());
    let of = |key: BlockKey| {
        paths
            .iter()
            .find(|path| path.ends_with(format!("{key}.kv")))
            .unwrap()
    };
    std::fs::remove_file(of(keys[0])).unwrap();
    assert_eq!(machine.offer(&job_b, 0), 0);
    let offered = [4, 8, 12, 5, 13].map(|computed| machine.matched(&job_b, computed).tokens());
    assert_eq!(offered, [8, 4, 0, 0, 0]);
    // A gap ends it.
    std::fs::remove_file(of(keys[2])).unwrap();
    let job_c = job("c", &TOKENS);
    machine.offer(&job_c, 0);
    assert_eq!(machine.matched(&job_c, 4).tokens(), 4);
    // Only the blocks of external tokens are loaded, at their positions.
    machine.alloc(&job_c, &[21, 22, 23, 24], 4, 4);
    machine.settle();
    assert_eq!(machine.value(22), Some(20));
    assert_eq!((machine.value(21), machine.value(23)), (None, None));
}

#[test]
fn a_whole_prompt_may_be_loaded_but_nothing_that_saves_one_token() {
    let directory = tempfile::tempdir().unwrap();
    let mut machine = Machine::new(&config(directory.path()));
    machine.run(&job("a", &TOKENS[..8]), &[(5, 10), (6, 20)]);
    assert_eq!(machine.offer(&job("b", &TOKENS[..8]), 0), 8);
    let directory = tempfile::tempdir().unwrap();
    let mut small = config(directory.path());
    small.block_tokens = vec![1];
    let mut machine = Machine::new(&small);
    machine.run(&job("a", &TOKENS[..3]), &[(5, 10), (6, 20), (7, 30)]);
    let job_b = job("b", &TOKENS[..3]);
    // Of three tokens the last one is computed anyway: two are saved, from token 1 on one.
    assert_eq!(machine.offer(&job_b, 0), 3);
    assert_eq!(machine.matched(&job_b, 1), Matched::None);
    assert_eq!(machine.offer(&job("c", &TOKENS[..1]), 0), 0);
}

#[test]
fn c4_lookups_are_idempotent_and_a_finished_load_is_not_offered_again() {
    let directory = tempfile::tempdir().unwrap();
    let mut machine = Machine::new(&config(directory.path()));
    machine.run(&job("a", &TOKENS), &[(5, 10), (6, 20), (7, 30), (8, 40)]);
    let b = job("b", &TOKENS);
    assert_eq!(machine.offer(&b, 0), 12);
    for _ in 0..10 {
        assert_eq!(machine.matched(&b, 0).tokens(), 12);
    }
    assert_eq!(machine.scheduler.stats().lookups, 2);
    machine.alloc(&b, &[11, 12, 13, 14], 0, 12);
    assert_eq!(machine.matched(&b, 0), Matched::None);
    machine.settle();
    assert_eq!(machine.matched(&b, 0), Matched::None);
    // The second call after an async load.
    machine.alloc(&b, &[11, 12, 13, 14], 12, 0);
    assert_eq!(machine.matched(&b, 0), Matched::None);
    let loads: usize = machine.plans.iter().map(|plan| plan.load.len()).sum();
    assert_eq!(
        (loads, machine.received.len(), machine.worker().hits),
        (1, 1, 3)
    );
    // Preempted: what was loaded once may be loaded again.
    machine.scheduler.preempted(std::slice::from_ref(&b.id));
    assert_eq!(machine.matched(&b, 0).tokens(), 12);
}

#[test]
fn c9_loads_that_end_in_any_order_are_usable_and_who_waits_holds_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let prompts: Vec<Vec<u32>> = (0..4)
        .map(|first| (first * 100..first * 100 + 8).collect())
        .collect();
    let mut machine = Machine::new(&config(directory.path()));
    for (prompt, number) in prompts.iter().zip(0_u8..) {
        let blocks = [(10, number * 10 + 1), (11, number * 10 + 2)];
        machine.run(&job(&format!("seed-{number}"), prompt), &blocks);
    }
    let names: Vec<String> = (0..4).map(|number| format!("r{number}")).collect();
    let jobs: Vec<Job<'_>> = names
        .iter()
        .zip(&prompts)
        .map(|(name, prompt)| job(name, prompt))
        .collect();
    for job in &jobs {
        assert_eq!(machine.offer(job, 0), 8);
    }
    // Nothing is planned for who was only asked.
    let plan = machine.plan(&[]);
    assert_eq!(plan, StepPlan::Storage(Plan::default()));
    // Allocated out of order; the second one is not allocated at all.
    for (&index, block) in [3, 0, 2].iter().zip([20, 22, 24]) {
        machine.alloc(&jobs[index], &[block, block + 1], 0, 8);
    }
    machine.settle();
    let mut received: Vec<_> = machine.received.drain(..).collect();
    received.sort_by(|a, b| a.request.cmp(&b.request));
    let ids: Vec<&str> = received
        .iter()
        .map(|received| received.request.as_str())
        .collect();
    assert_eq!(ids, ["r0", "r2", "r3"]);
    assert!(received.iter().all(|received| received.failure.is_none()));
    for (block, value) in [(20, 31), (21, 32), (22, 1), (23, 2), (24, 21), (25, 22)] {
        assert_eq!(machine.value(block), Some(value), "block {block}");
    }
    // They are scheduled in yet another order, and each is done; the one that waited still can.
    for index in [2, 3, 0] {
        let block = 20 + 2 * [1, 9, 2, 0][index];
        machine.alloc(&jobs[index], &[block, block + 1], 8, 0);
        assert_eq!(
            machine.finish(&jobs[index], &[block, block + 1]),
            Finished::Free
        );
    }
    assert_eq!(machine.matched(&jobs[1], 0).tokens(), 8);
    assert_eq!(machine.scheduler.stats().unknown, 0);
}

#[test]
fn c105_a_save_reads_its_block_when_the_step_that_wrote_it_is_over() {
    let directory = tempfile::tempdir().unwrap();
    let mut machine = Machine::new(&config(directory.path()));
    let a = job("a", &TOKENS[..8]);
    machine.scheduler.on_new_request(&a.view());
    machine.alloc(&a, &[5, 6], 0, 0);
    let new_blocks = [vec![5, 6]];
    let plan = machine.plan(&[Scheduled {
        request: a.view(),
        new_blocks: GroupBlocks(&new_blocks),
        renewed: true,
        computed: 0,
        tokens: 8,
    }]);
    machine.begin(&plan);
    // The forward runs, long enough for any thread to have started. Nothing may read the blocks yet.
    for _ in 0..20 {
        machine.report();
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    assert_eq!(machine.worker().pending_saves, 0);
    machine.fill(5, 77);
    machine.fill(6, 78);
    machine.end();
    machine.settle();
    let mut other = Machine::new(&config(directory.path()));
    other.load(&job("b", &TOKENS[..8]), &[1, 2]);
    assert_eq!((other.value(1), other.value(2)), (Some(77), Some(78)));
}

#[test]
fn chunks_and_generated_tokens_are_saved_as_blocks_fill_up_each_once() {
    let directory = tempfile::tempdir().unwrap();
    let mut machine = Machine::new(&config(directory.path()));
    let mut a = job("a", &TOKENS[..6]);
    machine.scheduler.on_new_request(&a.view());
    machine.alloc(&a, &[5, 6], 0, 0);
    let saved = |machine: &Machine| machine.plans.last().unwrap().save.len();
    let step = |machine: &mut Machine, a: &Job<'_>, blocks: &[u32], renewed, computed, tokens| {
        let new_blocks = [blocks.to_vec()];
        machine.step(&[Scheduled {
            request: a.view(),
            new_blocks: GroupBlocks(&new_blocks),
            renewed,
            computed,
            tokens,
        }]);
        saved(machine)
    };
    // A chunk of the prompt, the rest, then one token after the other; known and computed.
    assert_eq!(step(&mut machine, &a, &[5], true, 0, 3), 0);
    assert_eq!(step(&mut machine, &a, &[6], false, 3, 3), 1);
    a.tokens = &TOKENS[..7];
    assert_eq!(step(&mut machine, &a, &[], false, 6, 1), 0);
    // Two tokens of which one is a guess: the block is not full of known tokens.
    assert_eq!(step(&mut machine, &a, &[], false, 6, 2), 0);
    a.tokens = &TOKENS[..9];
    assert_eq!(step(&mut machine, &a, &[7], false, 7, 2), 1);
    assert_eq!(step(&mut machine, &a, &[], false, 8, 1), 0);
    machine.settle();
    let saves: Vec<&Save> = machine.plans.iter().flat_map(|plan| &plan.save).collect();
    let blocks: Vec<u32> = saves.iter().map(|save| save.block.block).collect();
    assert_eq!(blocks, [5, 6]);
    assert_eq!(files(directory.path()).len(), 2);
}

#[test]
fn c43_null_blocks_and_groups_are_kept_apart() {
    let directory = tempfile::tempdir().unwrap();
    let mut two = config(directory.path());
    two.block_tokens = vec![4, 8];
    let mut machine = Machine::new(&two);
    let a = job("a", &TOKENS[..8]);
    machine.scheduler.on_new_request(&a.view());
    for (group, block, value) in [(0, 6, 20), (1, 6, 30)] {
        machine.ranks[0].fill(group, block, value);
    }
    let new_blocks = [vec![NULL_BLOCK, 6], vec![6]];
    machine.step(&[Scheduled {
        request: a.view(),
        new_blocks: GroupBlocks(&new_blocks),
        renewed: true,
        computed: 0,
        tokens: 8,
    }]);
    machine.settle();
    // Two files, and no hit: the first block of group 0 is nowhere.
    assert_eq!(files(directory.path()).len(), 2);
    assert_eq!(
        (
            machine.worker().save_failures,
            machine.scheduler.stats().saves
        ),
        (0, 2)
    );
    assert_eq!(machine.offer(&job("b", &TOKENS[..8]), 0), 0);
    // Once it is there, the group's blocks go where they belong.
    machine.ranks[0].fill(0, 5, 10);
    let new_blocks = [vec![5, 6], vec![6]];
    let c = job("c", &TOKENS[..8]);
    machine.scheduler.on_new_request(&c.view());
    machine.matched(&c, 0);
    machine.step(&[Scheduled {
        request: c.view(),
        new_blocks: GroupBlocks(&new_blocks),
        renewed: true,
        computed: 0,
        tokens: 8,
    }]);
    machine.settle();
    let d = job("d", &TOKENS[..8]);
    assert_eq!(machine.offer(&d, 0), 8);
    let blocks = [vec![11, NULL_BLOCK], vec![13]];
    let blocks = GroupBlocks(&blocks);
    let allocation = Allocation {
        blocks,
        local_computed: 0,
        external: 8,
    };
    machine.scheduler.after_alloc(&d.view(), &allocation);
    machine.settle();
    assert_eq!(machine.received.pop().unwrap().failure, None);
    let rank = &machine.ranks[0];
    assert_eq!((rank.value(0, 11), rank.value(1, 13)), (Some(10), Some(30)));
    assert_eq!((rank.value(0, 13), rank.value(1, 11)), (None, None));
    assert_eq!(rank.value(0, NULL_BLOCK), None);
}

#[test]
fn c106_blocks_are_held_until_the_last_save_of_the_last_rank_is_over() {
    let directory = tempfile::tempdir().unwrap();
    let mut two = config(directory.path());
    two.world = 2;
    let mut machine = Machine::new(&two);
    let a = job("a", &TOKENS);
    machine.scheduler.on_new_request(&a.view());
    machine.fill(5, 10);
    let new_blocks = [vec![5, 6, 7, 8]];
    let plan = machine.plan(&[Scheduled {
        request: a.view(),
        new_blocks: GroupBlocks(&new_blocks),
        renewed: true,
        computed: 0,
        tokens: 14,
    }]);
    assert_eq!(
        machine.finish(&a, &[5, 6, 7, 8]),
        Finished::Hold { params: None }
    );
    // Only one rank gets that far.
    let last = machine.plan(&[]);
    for plan in [plan.clone(), last.clone()] {
        machine.ranks[0].worker.begin_step(plan);
        machine.ranks[0].worker.end_step();
    }
    until("the first rank's saves", || {
        machine.report();
        machine.ranks[0].worker.stats().blocks_saved == 3
    });
    machine.report();
    machine.report();
    assert!(machine.sent.is_empty() && machine.scheduler.stats().held == 1);
    for plan in [plan, last] {
        machine.ranks[1].worker.begin_step(plan);
        machine.ranks[1].worker.end_step();
    }
    machine.settle();
    assert_eq!(machine.sent, [id("a")]);
    let stats = machine.scheduler.stats();
    assert_eq!((stats.held, stats.pending_saves, stats.unknown), (0, 0, 0));
    // A file per rank, each with its own bytes.
    assert_eq!(files(directory.path()).len(), 6);
    let received = machine.load(&job("b", &TOKENS), &[21, 22, 23, 24]);
    assert_eq!(received.failure, None);
    let values: Vec<_> = machine.ranks.iter().map(|rank| rank.value(0, 21)).collect();
    assert_eq!(values, [Some(10), Some(110)]);
    // Without one rank's file there is no block.
    let gone = files(directory.path())
        .into_iter()
        .find(|path| path.to_str().unwrap().contains("1-of-2"));
    std::fs::remove_file(gone.unwrap()).unwrap();
    assert!(machine.offer(&job("c", &TOKENS), 0) < 12);
}

#[test]
fn c11_c10_unknown_and_finished_requests_are_counted_and_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    let mut machine = Machine::new(&config(directory.path()));
    let a = job("a", &TOKENS);
    assert_eq!(
        machine.scheduler.matched_tokens(&a.view(), 0),
        Matched::None
    );
    assert_eq!(machine.finish(&a, &[]), Finished::Free);
    machine.scheduler.preempted(std::slice::from_ref(&a.id));
    machine.alloc(&a, &[1], 0, 0);
    machine.compute(&a, &[1], 0, 4);
    machine.scheduler.on_report(&Aggregated {
        received: vec![Received {
            request: id("a"),
            failure: None,
            failed: Vec::new(),
        }],
        sent: vec![id("a")],
        parts: vec![(0, ReportPart::Storage(Report { ended: vec![7] }))],
    });
    assert_eq!(machine.scheduler.stats().unknown, 7);
    assert!(!machine.scheduler.has_pending_work());
    // A load that was asked for is reported even so.
    machine.alloc(&a, &[1, 2], 0, 8);
    machine.settle();
    let received = machine.received.pop().unwrap();
    let failed = [1, 2].map(|block| FailedBlock { group: 0, block });
    assert_eq!(
        (received.failure, received.failed),
        (Some(LoadFailure::Storage), failed.to_vec())
    );
}

#[test]
fn an_empty_step_has_an_empty_plan_of_a_few_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let mut machine = Machine::new(&config(directory.path()));
    let plan = machine.plan(&[]);
    assert_eq!(plan, StepPlan::Storage(Plan::default()));
    assert!(rmp_serde::to_vec(&plan).unwrap().len() < 32);
    machine.begin(&plan);
    assert!(machine.ranks[0].worker.take_report().unwrap().is_empty());
}

#[test]
fn at_the_end_nothing_is_offered_or_saved_and_what_is_under_way_ends() {
    let directory = tempfile::tempdir().unwrap();
    let mut machine = Machine::new(&config(directory.path()));
    machine.run(&job("a", &TOKENS), &[(5, 10), (6, 20), (7, 30), (8, 40)]);
    let b = job("b", &TOKENS);
    assert_eq!(machine.offer(&b, 0), 12);
    machine.scheduler.begin_shutdown();
    assert_eq!(machine.matched(&b, 0), Matched::None);
    let other: Vec<u32> = (50..58).collect();
    let c = job("c", &other);
    machine.scheduler.on_new_request(&c.view());
    machine.compute(&c, &[1, 2], 0, 8);
    assert_eq!(machine.scheduler.stats().saves, 3);
    let rank = &mut machine.ranks[0];
    rank.worker.shutdown(std::time::Duration::from_secs(60));
    assert_eq!(files(directory.path()).len(), 3);
    assert!(rank.worker.take_report().unwrap().is_empty());
}

#[test]
fn saves_at_the_end_are_written_before_the_threads_go() {
    let directory = tempfile::tempdir().unwrap();
    let mut machine = Machine::new(&config(directory.path()));
    let a = job("a", &TOKENS);
    machine.scheduler.on_new_request(&a.view());
    machine.compute(&a, &[5, 6, 7, 8], 0, 14);
    machine.ranks[0]
        .worker
        .shutdown(std::time::Duration::from_secs(60));
    assert_eq!(files(directory.path()).len(), 3);
    assert_eq!(machine.worker().pending_saves, 0);
}

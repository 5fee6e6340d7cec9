//! Blocks that change their owner while they are saved or loaded.

use super::machine::*;
use crate::contract::*;

const TOKENS: [u32; 8] = [9, 8, 7, 6, 5, 4, 3, 2];
const OTHERS: [u32; 8] = [70, 71, 72, 73, 74, 75, 76, 77];

fn scheduled<'a>(job: &'a Job<'_>, blocks: &'a [Vec<u32>], computed: u32) -> Scheduled<'a> {
    Scheduled {
        request: job.view(),
        new_blocks: GroupBlocks(blocks),
        renewed: true,
        computed,
        tokens: 8 - computed,
    }
}

/// Keeps the only I/O thread of a rank busy until dropped, by the lock that a save waits for.
fn busy(machine: &mut Machine, path: &std::path::Path) -> std::fs::File {
    let usage = std::fs::File::open(path.join(".kvferry-usage")).unwrap();
    usage.lock().unwrap();
    let busy = job("busy", &[1, 2, 3, 4]);
    machine.scheduler.on_new_request(&busy.view());
    machine.compute(&busy, &[60], 0, 4);
    usage
}

fn one_thread(path: &std::path::Path) -> Machine {
    let mut config = config(path);
    config.settings.io_threads = 1;
    Machine::new(&config)
}

#[test]
fn c7_a_save_whose_block_has_a_new_owner_never_reads_it() {
    let directory = tempfile::tempdir().unwrap();
    let mut machine = one_thread(directory.path());
    let usage = busy(&mut machine, directory.path());
    let (a, b) = (job("a", &TOKENS), job("b", &OTHERS));
    machine.scheduler.on_new_request(&a.view());
    machine.fill(5, 10);
    machine.fill(6, 20);
    machine.compute(&a, &[5, 6], 0, 8);
    // Preempted with both saves waiting; block 6 is given to somebody else, block 5 to nobody yet.
    machine.scheduler.preempted(std::slice::from_ref(&a.id));
    machine.scheduler.on_new_request(&b.view());
    machine.alloc(&b, &[6, 7], 0, 0);
    let blocks = [vec![6, 7]];
    let plan = machine.plan(&[scheduled(&b, &blocks, 0)]);
    assert_eq!(machine.plans.last().unwrap().revoke.len(), 1);
    machine.begin(&plan);
    // The step writes what b has.
    machine.fill(6, 66);
    machine.fill(7, 77);
    machine.end();
    drop(usage);
    machine.settle();
    let stats = machine.worker();
    assert_eq!((stats.saves_cancelled, stats.blocks_saved), (1, 4));
    let mut other = Machine::new(&config(directory.path()));
    assert_eq!(other.load(&job("a", &TOKENS), &[1, 2]).failed.len(), 0);
    assert_eq!(other.value(1), Some(10));
    assert_eq!(
        other.worker().hits,
        1,
        "the block that was not saved is there"
    );
    assert_eq!(other.load(&job("b", &OTHERS), &[3, 4]).failure, None);
    assert_eq!((other.value(3), other.value(4)), (Some(66), Some(77)));
}

#[test]
fn c7_a_block_for_a_load_or_for_another_place_of_the_same_request_is_a_new_owners_too() {
    let directory = tempfile::tempdir().unwrap();
    let mut machine = one_thread(directory.path());
    let usage = busy(&mut machine, directory.path());
    let (a, b, c) = (job("a", &TOKENS), job("b", &OTHERS), job("c", &OTHERS));
    machine.scheduler.on_new_request(&a.view());
    machine.compute(&a, &[5, 6], 0, 8);
    // Block 6 slides out of a window, and comes back at the end: same request, other content.
    let blocks = [vec![6]];
    let again = Scheduled {
        renewed: false,
        computed: 8,
        tokens: 1,
        ..scheduled(&a, &blocks, 0)
    };
    machine.plan(&[again]);
    assert_eq!(machine.plans.last().unwrap().revoke.len(), 1);
    // A block for somebody's load, of whichever connector: at the allocation already.
    machine.scheduler.on_new_request(&b.view());
    machine.alloc(&b, &[5, 7], 0, 0);
    machine.plan(&[]);
    assert_eq!(machine.plans.last().unwrap().revoke.len(), 1);
    // Shared by the prefix cache: still what it was.
    machine.scheduler.on_new_request(&c.view());
    machine.compute(&c, &[8, 9], 0, 8);
    let d = job("d", &OTHERS);
    machine.scheduler.on_new_request(&d.view());
    machine.alloc(&d, &[8, 10], 4, 0);
    let blocks = [vec![8, 10]];
    machine.plan(&[scheduled(&d, &blocks, 4)]);
    assert!(machine.plans.last().unwrap().revoke.is_empty());
    assert_eq!(machine.scheduler.stats().saves_revoked, 2);
    drop(usage);
}

#[test]
fn a_preempted_request_loads_again_only_if_its_load_was_good() {
    let directory = tempfile::tempdir().unwrap();
    let mut machine = Machine::new(&config(directory.path()));
    machine.run(&job("seed", &TOKENS), &[(5, 10), (6, 20)]);
    let (good, bad, declined) = (
        job("good", &TOKENS),
        job("bad", &TOKENS),
        job("declined", &TOKENS),
    );
    for job in [&good, &bad, &declined] {
        assert_eq!(machine.offer(job, 0), 8);
    }
    machine.alloc(&good, &[11, 12], 0, 8);
    // Preempted before it is reported.
    machine.scheduler.preempted(std::slice::from_ref(&good.id));
    machine.settle();
    assert_eq!(machine.matched(&good, 0).tokens(), 8);
    machine.alloc(&declined, &[13, 14], 0, 0);
    assert_eq!(machine.matched(&declined, 0), Matched::None);
    for path in files(directory.path()) {
        std::fs::write(path, b"").unwrap();
    }
    machine.alloc(&bad, &[15, 16], 0, 8);
    machine.settle();
    machine
        .scheduler
        .preempted(&[bad.id.clone(), declined.id.clone()]);
    assert_eq!(machine.matched(&bad, 0), Matched::None);
    // The files are gone, which a new lookup sees.
    assert_eq!(machine.matched(&declined, 0), Matched::None);
    machine.run(&job("again", &TOKENS), &[(5, 10), (6, 20)]);
    machine
        .scheduler
        .preempted(&[bad.id.clone(), declined.id.clone()]);
    assert_eq!(machine.matched(&bad, 0), Matched::None);
    assert_eq!(machine.matched(&declined, 0).tokens(), 8);
}

#[test]
fn too_many_saves_are_not_planned_and_those_that_wait_too_long_are_given_up() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = config(directory.path());
    config.settings.io_threads = 1;
    config.settings.max_pending_saves = 2;
    config.settings.io_timeout_ms = 1_000;
    let mut machine = Machine::new(&config);
    let usage = busy(&mut machine, directory.path());
    let a = job("a", &TOKENS);
    machine.scheduler.on_new_request(&a.view());
    machine.compute(&a, &[5, 6], 0, 8);
    let stats = machine.scheduler.stats();
    assert_eq!((stats.saves, stats.saves_skipped), (2, 1));
    // The disk does not answer, and the blocks are free all the same.
    assert_eq!(machine.finish(&a, &[5, 6]), Finished::Hold { params: None });
    until("the hold to end", || {
        machine.step(&[]);
        !machine.scheduler.has_pending_work()
    });
    assert_eq!(machine.sent, [id("a")]);
    machine.fill(5, 99);
    drop(usage);
    machine.settle();
    assert!(
        machine.worker().blocks_saved <= 1,
        "a save read a block that was given back"
    );
}

#[test]
fn c7_c43_in_one_pool_a_block_of_another_group_is_the_same_memory() {
    for one_pool in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let mut config = config(directory.path());
        config.settings.io_threads = 1;
        config.block_tokens = vec![BLOCK, BLOCK];
        config.one_pool = one_pool;
        let mut machine = Machine::new(&config);
        let usage = std::fs::File::open(directory.path().join(".kvferry-usage")).unwrap();
        usage.lock().unwrap();
        let (a, b) = (job("a", &TOKENS[..4]), job("b", &OTHERS[..4]));
        machine.scheduler.on_new_request(&a.view());
        machine.scheduler.on_new_request(&b.view());
        let blocks = [vec![NULL_BLOCK], vec![5]];
        let step = |job, blocks, tokens| Scheduled {
            tokens,
            ..scheduled(job, blocks, 0)
        };
        machine.step(&[step(&a, &blocks, 4)]);
        assert_eq!(machine.plans.last().unwrap().save.len(), 1);
        // Group 1 gives its block up, and group 0 of somebody else gets that id.
        let blocks = [vec![5], vec![NULL_BLOCK]];
        machine.plan(&[step(&b, &blocks, 3)]);
        let revoked = machine.plans.last().unwrap().revoke.len();
        assert_eq!(revoked, usize::from(one_pool));
        drop(usage);
    }
}

/// The step in which the block's last token becomes known comes after the one that computed it (async
/// scheduling), and by then a window has moved on from the block.
fn saved_late(given: impl FnOnce(&mut Machine, &Job<'_>)) {
    let directory = tempfile::tempdir().unwrap();
    let mut machine = Machine::new(&config(directory.path()));
    let early = Job {
        prompt: 3,
        ..job("a", &[1, 2, 3])
    };
    machine.scheduler.on_new_request(&early.view());
    machine.alloc(&early, &[7], 0, 0);
    machine.fill(7, 10);
    machine.compute(&early, &[7], 0, 4);
    let late = Job {
        tokens: &[1, 2, 3, 4],
        ..early
    };
    given(&mut machine, &late);
    // What the step writes.
    machine.fill(7, 20);
    machine.end();
    machine.report();
    machine.settle();
    let reader = job("reader", &[1, 2, 3, 4, 5, 6]);
    assert_eq!(machine.offer(&reader, 0), 0, "{:?}", machine.plans);
    assert_eq!(machine.worker().blocks_saved, 0);
}

#[test]
fn c7_a_block_that_left_the_window_and_is_the_requests_again_is_not_saved_as_what_it_was() {
    saved_late(|machine, job| {
        let again = [vec![7]];
        let plan = machine.plan(&[continued(job, &again, 4)]);
        machine.begin(&plan);
    });
}

#[test]
fn c7_a_block_that_left_the_window_and_is_somebody_elses_is_not_saved() {
    let blocks = [vec![7]];
    let nothing = [vec![]];
    let other = Job {
        prompt: 2,
        ..job("b", &[8, 9])
    };
    for first in [true, false] {
        saved_late(|machine, job| {
            machine.scheduler.on_new_request(&other.view());
            machine.alloc(&other, &blocks[0], 0, 0);
            let given = scheduled(&other, &blocks, 0);
            let mut step = vec![continued(job, &nothing, 4), given];
            if first {
                step.reverse();
            }
            let plan = machine.plan(&step);
            machine.begin(&plan);
        });
        // One that runs already, and grows: the scheduler half hears of it with the step only.
        saved_late(|machine, job| {
            machine.scheduler.on_new_request(&other.view());
            let mut step = vec![continued(job, &nothing, 4), continued(&other, &blocks, 0)];
            if first {
                step.reverse();
            }
            let plan = machine.plan(&step);
            machine.begin(&plan);
        });
    }
}

#[test]
fn a_block_that_left_the_window_and_is_nobodys_is_saved() {
    let directory = tempfile::tempdir().unwrap();
    let mut machine = Machine::new(&config(directory.path()));
    let tokens = [1, 2, 3, 4, 5];
    let early = Job {
        prompt: 3,
        ..job("a", &tokens[..3])
    };
    machine.scheduler.on_new_request(&early.view());
    machine.alloc(&early, &[7], 0, 0);
    machine.fill(7, 10);
    machine.compute(&early, &[7], 0, 4);
    let late = Job {
        tokens: &tokens,
        ..early
    };
    machine.step(&[continued(&late, &[vec![8]], 4)]);
    machine.settle();
    assert_eq!(machine.worker().blocks_saved, 1);
    let reader = job("reader", &[1, 2, 3, 4, 5, 6]);
    assert_eq!(machine.load(&reader, &[20]).failure, None);
    assert_eq!(machine.value(20), Some(10));
}

/// A step of one token of a request that runs already, with these blocks more.
fn continued<'a>(job: &'a Job<'_>, blocks: &'a [Vec<u32>], computed: u32) -> Scheduled<'a> {
    Scheduled {
        renewed: false,
        tokens: 1,
        ..scheduled(job, blocks, computed)
    }
}

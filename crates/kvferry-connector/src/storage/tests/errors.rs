//! Files that are not what they should be, disks that do not answer.

use std::fs;
use std::path::{Path, PathBuf};

use super::super::*;
use super::machine::*;
use crate::contract::*;

const TOKENS: [u32; 12] = [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12];

/// A machine whose directory has three blocks, 10, 20 and 30, and the files of those.
fn seeded(path: &Path) -> (Machine, Vec<PathBuf>) {
    let mut machine = Machine::new(&config(path));
    machine.run(&job("seed", &TOKENS), &[(5, 10), (6, 20), (7, 30)]);
    let saves = machine.plans.iter().flat_map(|plan| &plan.save);
    let all = files(path);
    let of = |save: &Save| {
        let name = format!("{}.kv", save.block.key);
        all.iter()
            .find(|path| path.ends_with(&name))
            .unwrap()
            .clone()
    };
    let files = saves.map(of).collect();
    (machine, files)
}

fn failed(blocks: &[u32]) -> Vec<FailedBlock> {
    blocks
        .iter()
        .map(|&block| FailedBlock { group: 0, block })
        .collect()
}

/// The same story for every kind of damage: a failed load that names its block, nothing written, the
/// file removed, and the block saved again once it was computed.
fn damaged(damage: impl FnOnce(&Path)) {
    let directory = tempfile::tempdir().unwrap();
    let (mut machine, paths) = seeded(directory.path());
    damage(&paths[1]);
    let b = job("b", &TOKENS);
    let received = machine.load(&b, &[11, 12, 13]);
    assert_eq!(received.failure, Some(LoadFailure::Storage));
    assert_eq!(received.failed, failed(&[12]));
    assert_eq!((machine.value(11), machine.value(13)), (Some(10), Some(30)));
    let mut bytes = [0; 96];
    machine.ranks[0]
        .memory
        .read_at(12 * 96, &mut bytes)
        .unwrap();
    assert_eq!(bytes, [0xAA; 96], "something of a bad file was written");
    let stats = machine.worker();
    assert_eq!(
        (stats.corrupt, stats.misses, stats.load_errors, stats.hits),
        (1, 0, 0, 2)
    );
    assert!(!paths[1].exists(), "a bad file is left for the next one");
    // C90: no hit. C91: not offered again, the second try is to compute it.
    let stats = machine.scheduler.stats();
    assert_eq!(
        (stats.hits, stats.hit_tokens, stats.loads_failed),
        (0, 0, 1)
    );
    assert_eq!(machine.matched(&b, 0), Matched::None);
    machine.fill(12, 20);
    machine.alloc(&b, &[11, 12, 13], 0, 0);
    machine.compute(&b, &[11, 12, 13], 4, 12);
    machine.settle();
    assert_eq!(machine.finish(&b, &[11, 12, 13]), Finished::Free);
    let received = machine.load(&job("c", &TOKENS), &[21, 22, 23]);
    assert_eq!(received.failure, None);
    assert_eq!(machine.value(22), Some(20));
}

#[test]
fn c90_c91_a_damaged_file_fails_the_load_is_removed_and_written_again() {
    damaged(|path| {
        let mut bytes = fs::read(path).unwrap();
        bytes[200] ^= 1;
        fs::write(path, bytes).unwrap();
    });
}

#[test]
fn c90_c91_a_file_that_was_cut_off_fails_the_load() {
    damaged(|path| {
        let file = fs::OpenOptions::new().write(true).open(path).unwrap();
        file.set_len(150).unwrap();
    });
}

#[test]
fn c90_c91_a_file_of_another_version_fails_the_load() {
    damaged(|path| {
        let mut bytes = fs::read(path).unwrap();
        bytes[8] = 9;
        fs::write(path, bytes).unwrap();
    });
}

#[test]
fn c90_c91_a_file_of_another_block_fails_the_load() {
    damaged(|path| {
        let other = files(path.ancestors().nth(5).unwrap());
        let other = other.iter().find(|other| *other != path).unwrap();
        fs::copy(other, path).unwrap();
    });
}

#[test]
fn c44_c92_failures_are_reported_by_request_group_and_block() {
    let directory = tempfile::tempdir().unwrap();
    let (mut machine, paths) = seeded(directory.path());
    let (b, c) = (job("b", &TOKENS), job("c", &TOKENS));
    assert_eq!((machine.offer(&b, 0), machine.offer(&c, 0)), (12, 12));
    // Two files vanish between lookup and load.
    fs::remove_file(&paths[0]).unwrap();
    fs::remove_file(&paths[2]).unwrap();
    machine.alloc(&b, &[11, 12, 13], 0, 12);
    machine.alloc(&c, &[21, 22, 23], 4, 4);
    machine.settle();
    machine.received.sort_by(|a, b| a.request.cmp(&b.request));
    let [of_b, of_c] = &machine.received[..] else {
        panic!("{:?}", machine.received);
    };
    let (storage, both) = (Some(LoadFailure::Storage), failed(&[11, 13]));
    assert_eq!((of_b.failure, &of_b.failed), (storage, &both));
    assert_eq!((of_c.failure, of_c.failed.len()), (None, 0));
    assert_eq!((machine.worker().misses, machine.worker().corrupt), (2, 0));
    assert_eq!(machine.scheduler.stats().hits, 1);
}

#[test]
fn c91_blocks_of_a_failed_load_are_not_saved_unless_they_are_computed() {
    let directory = tempfile::tempdir().unwrap();
    let (mut machine, paths) = seeded(directory.path());
    let b = job("b", &TOKENS);
    assert_eq!(machine.offer(&b, 0), 12);
    fs::remove_file(&paths[1]).unwrap();
    machine.alloc(&b, &[11, 12, 13], 0, 12);
    machine.settle();
    assert_eq!(machine.received[0].failed, failed(&[12]));
    // A scheduler that goes on behind the hole all the same: it costs one request, not the store.
    machine.compute(&b, &[11, 12, 13], 8, 12);
    machine.settle();
    assert!(!paths[1].exists());
    let saved = machine
        .plans
        .iter()
        .flat_map(|plan| &plan.save)
        .filter(|save| save.block.block == 12);
    assert_eq!(saved.count(), 0);
    // The same with a chunk that begins in the middle of the block.
    let c = job("c", &TOKENS);
    machine.finish(&b, &[11, 12, 13]);
    assert_eq!(machine.offer(&c, 0), 4);
    machine.alloc(&c, &[21, 22, 23], 0, 12);
    machine.settle();
    machine.compute(&c, &[21, 22, 23], 6, 12);
    machine.settle();
    assert!(!paths[1].exists());
    // Computed from its beginning, it is saved.
    let d = job("d", &TOKENS);
    machine.finish(&c, &[21, 22, 23]);
    assert_eq!(machine.offer(&d, 0), 4);
    machine.alloc(&d, &[31, 32, 33], 0, 12);
    machine.settle();
    machine.fill(32, 20);
    machine.compute(&d, &[31, 32, 33], 4, 12);
    machine.settle();
    assert!(paths[1].exists());
    assert_eq!(
        machine.load(&job("e", &TOKENS), &[41, 42, 43]).failure,
        None
    );
    assert_eq!(machine.value(42), Some(20));
}

#[test]
fn c108_a_save_that_fails_costs_the_save_and_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    let mut machine = Machine::new(&config(directory.path()));
    // A file where the directory of the namespace is to be: no save can work.
    let namespace = key::namespace(&config(directory.path())).to_string();
    fs::write(directory.path().join(&namespace[..32]), b"in the way").unwrap();
    let a = job("a", &TOKENS);
    assert_eq!(machine.offer(&a, 0), 0);
    machine.compute(&a, &[5, 6, 7], 0, 12);
    machine.finish(&a, &[5, 6, 7]);
    machine.settle();
    let stats = machine.worker();
    assert_eq!(
        (stats.save_failures, stats.blocks_saved, stats.pending_saves),
        (3, 0, 0)
    );
    assert!(machine.received.is_empty() && machine.sent.len() <= 1);
    let stats = machine.scheduler.stats();
    assert_eq!(
        (stats.held, stats.pending_saves, stats.lookup_errors),
        (0, 0, 3)
    );
}

#[test]
fn c23_an_aborted_load_is_reported_once_and_its_blocks_are_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    let (mut machine, _) = seeded(directory.path());
    // Before it started.
    let b = job("b", &TOKENS);
    assert_eq!(machine.offer(&b, 0), 12);
    machine.alloc(&b, &[11, 12, 13], 0, 12);
    assert_eq!(machine.finish(&b, &[11, 12, 13]), Finished::Free);
    machine.settle();
    assert_eq!(machine.received[0].failed, failed(&[11, 12, 13]));
    assert_eq!((machine.received.len(), machine.worker().hits), (1, 0));
    // While it runs: whatever was not read by then is not read any more.
    let c = job("c", &TOKENS);
    assert_eq!(machine.offer(&c, 0), 12);
    machine.alloc(&c, &[21, 22, 23], 0, 12);
    let plan = machine.plan(&[]);
    machine.begin(&plan);
    assert_eq!(machine.finish(&c, &[21, 22, 23]), Finished::Free);
    let plan = machine.plan(&[]);
    machine.begin(&plan);
    until("the report", || {
        machine.report();
        machine.received.len() == 2
    });
    // From here on the blocks are somebody else's.
    let loaded = machine.worker().hits;
    let bad = &machine.received[1].failed;
    assert_eq!(loaded as usize + bad.len(), 3);
    for block in [21, 22, 23] {
        machine.fill(block, 99);
    }
    machine.settle();
    machine.ranks[0]
        .worker
        .shutdown(std::time::Duration::from_secs(60));
    for block in [21, 22, 23] {
        assert_eq!(machine.value(block), Some(99));
    }
    assert_eq!(machine.received.len(), 2);
    // The first one's save may have been over when it finished.
    assert!(machine.sent.len() <= 1, "{:?}", machine.sent);
}

#[test]
fn blocks_that_a_rank_does_not_have_and_plans_of_others_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (mut machine, _) = seeded(directory.path());
    let b = job("b", &TOKENS);
    assert_eq!(machine.offer(&b, 0), 12);
    machine.alloc(&b, &[11, BLOCKS, u32::MAX], 0, 12);
    machine.settle();
    let received = machine.received.pop().unwrap();
    assert_eq!(received.failure, Some(LoadFailure::Local));
    assert_eq!(received.failed, failed(&[BLOCKS, u32::MAX]));
    machine.begin(&StepPlan::Remote(crate::remote::Plan::default()));
    assert!(machine.ranks[0].worker.take_report().unwrap().is_empty());
    // Registered twice; a rank that there is not; a directory that cannot be.
    let layout = CacheLayout {
        groups: vec![CacheGroup {
            block_tokens: BLOCK,
        }],
        layers: Vec::new(),
    };
    assert!(machine.ranks[0].worker.register(&layout).is_err());
    let error = StorageWorker::open(config(directory.path()), 1).unwrap_err();
    assert_eq!(
        error.to_string(),
        "shared storage: rank 1 of 1 ranks; ranks count from 0"
    );
    let error = StorageWorker::open(config(Path::new("/proc/kvferry")), 0).unwrap_err();
    assert!(
        matches!(error, OpenStorageError::Directory(RoomError::Io { .. })),
        "{error}"
    );
}

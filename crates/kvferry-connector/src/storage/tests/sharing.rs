//! Several instances and several processes on one directory.

use std::path::Path;
use std::process::Command;

use super::super::*;
use super::machine::*;
use crate::contract::*;

/// Prompts that overlap: prompt `n` has `n % 3` blocks of its own behind a common one.
fn prompt(number: u32) -> Vec<u32> {
    let own = (1..=number % 3)
        .flat_map(|block| (0..BLOCK).map(move |token| number * 100 + block * 10 + token));
    (0..BLOCK).chain(own).collect()
}

/// What a block of a prompt holds: a function of its content only, as in an engine.
fn value(tokens: &[u32]) -> u8 {
    (tokens.iter().sum::<u32>() % 90) as u8 + 1
}

/// Saves and loads prompts, and checks every byte that comes back. Returns blocks loaded.
fn work(path: &Path, rounds: u32, max_bytes: u64, salt: u32) -> u64 {
    let mut config = config(path);
    config.settings.max_bytes = max_bytes;
    let mut machine = Machine::new(&config);
    for round in 0..rounds {
        let tokens = prompt((round * 7 + salt) % 23);
        let name = format!("{salt}-{round}");
        let job = job(&name, &tokens);
        let blocks: Vec<u32> = (1..=tokens.len() as u32 / BLOCK)
            .map(|block| block + 8 * (round % 4))
            .collect();
        let values: Vec<u8> = tokens.chunks(BLOCK as usize).map(value).collect();
        let offered = machine.offer(&job, 0);
        machine.alloc(&job, &blocks, 0, offered);
        machine.settle();
        // What failed is computed, and so is what was not offered.
        let failed = machine
            .received
            .pop()
            .map_or(Vec::new(), |received| received.failed);
        for ((&block, &value), index) in blocks.iter().zip(&values).zip(0_u32..) {
            let bad = failed.iter().any(|failed| failed.block == block);
            if (index + 1) * BLOCK <= offered && !bad {
                assert_eq!(machine.value(block), Some(value), "round {round}");
            } else {
                machine.fill(block, value);
            }
        }
        machine.compute(&job, &blocks, 0, tokens.len() as u32);
        machine.finish(&job, &blocks);
        machine.settle();
    }
    assert_eq!(machine.worker().corrupt, 0);
    machine.worker().hits
}

#[test]
fn two_instances_on_one_directory_see_each_others_blocks_and_never_a_half_written_one() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let hits: Vec<u64> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2)
            .map(|salt| scope.spawn(move || work(path, 120, 1 << 20, salt)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    assert!(hits.iter().all(|&hits| hits > 100), "{hits:?}");
    // Every block once: the common one, and those of its own of each prompt.
    let expected = 1 + (0..23).map(|number| number % 3).sum::<usize>();
    assert_eq!(files(path).len(), expected);
}

const CHILD: &str = "KVFERRY_TEST_STORAGE_CHILD";

#[test]
fn several_processes_keep_one_directory_within_its_size() {
    let bound = 12 * (PAYLOAD + 64);
    if let Ok(path) = std::env::var(CHILD) {
        // A child of the test below, with this very name.
        let salt = std::process::id() % 23;
        work(Path::new(&path), 60, bound, salt);
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let name = "storage::tests::sharing::several_processes_keep_one_directory_within_its_size";
    let mut children: Vec<_> = (0..3)
        .map(|_| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", name, "--nocapture"])
                .env(CHILD, directory.path())
                .spawn()
                .unwrap()
        })
        .collect();
    let mut most = 0;
    until("the end of all children", || {
        // Under the lock no room is made or taken, so that the sum is one moment's.
        if let Ok(usage) = std::fs::File::open(directory.path().join(".kvferry-usage")) {
            usage.lock().unwrap();
            most = most.max(bytes(directory.path()));
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
        children
            .iter_mut()
            .all(|child| child.try_wait().unwrap().is_some())
    });
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    // Room is reserved before a file is written, so at no time there were more bytes than allowed.
    // (A file that each of the six threads renames meanwhile may be counted under both names.)
    assert!(
        most <= bound + 6 * (PAYLOAD + 64),
        "{most} bytes, {bound} allowed"
    );
    let left = bytes(directory.path());
    assert!(left <= bound && left > 0, "{left} bytes, {bound} allowed");
}

fn bytes(path: &Path) -> u64 {
    let mut sum = 0;
    for entry in std::fs::read_dir(path).into_iter().flatten().flatten() {
        let Ok(metadata) = entry.metadata() else {
            continue;
        };
        if metadata.is_dir() {
            sum += bytes(&entry.path());
        } else if entry.file_name() != ".kvferry-usage" {
            sum += metadata.len();
        }
    }
    sum
}

#[test]
fn another_model_layout_or_world_finds_nothing_and_disturbs_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let tokens: Vec<u32> = (0..8).collect();
    let mut machine = Machine::new(&config(directory.path()));
    machine.run(&job("a", &tokens), &[(5, 10), (6, 20)]);
    for change in [
        (|config| config.model = "other".to_owned()) as fn(&mut StorageConfig),
        |config| config.layout = "other".to_owned(),
        |config| config.world = 2,
        |config| config.block_tokens = vec![2],
    ] {
        let mut other = config(directory.path());
        change(&mut other);
        let mut other = Machine::new(&other);
        assert_eq!(other.offer(&job("b", &tokens), 0), 0);
        other.run(&job("c", &tokens), &[(5, 30), (6, 40), (7, 50), (8, 60)]);
    }
    assert_eq!(machine.load(&job("d", &tokens), &[11, 12]).failure, None);
    assert_eq!((machine.value(11), machine.value(12)), (Some(10), Some(20)));
    // And what else a request depends on.
    let e = job("e", &tokens);
    let view = RequestView {
        extra_key: "lora",
        ..e.view()
    };
    machine.scheduler.on_new_request(&view);
    until("an answer", || {
        !matches!(
            machine.scheduler.matched_tokens(&view, 0),
            Matched::Later(_)
        )
    });
    assert_eq!(machine.scheduler.matched_tokens(&view, 0), Matched::None);
}

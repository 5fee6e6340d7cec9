//! Copies within one process, which may read itself; other processes are in the workspace's tests.

use super::*;
use crate::memory::remote::IncarnationWord;
use crate::memory::{HostPool, MemoryRegion};
use proptest::prelude::*;

fn region(bytes: usize) -> MemoryRegion {
    HostPool::new(bytes).unwrap().region().unwrap()
}

fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|n| (n * 31 + n / 251) as u8).collect()
}

fn ourselves(word: &IncarnationWord, incarnation: Incarnation) -> RemoteProcess {
    RemoteProcess {
        pid: i32::try_from(std::process::id()).unwrap(),
        word: word.address(),
        incarnation,
    }
}

fn of_process(process: RemoteProcess) -> CopyBatch {
    let mut batch = CopyBatch::default();
    batch.reset(Some(process));
    batch
}

fn incarnation(byte: u8) -> Incarnation {
    Incarnation::from_bytes([byte; 16]).unwrap()
}

fn contents(region: &MemoryRegion) -> Vec<u8> {
    let mut out = vec![0; region.bytes() as usize];
    region.read_at(0, &mut out).unwrap();
    out
}

#[test]
fn more_pieces_than_one_call_takes_are_read_in_full_calls() {
    let count = MAX_PIECES * 2 + 5;
    let (from, to) = (region(count * 8), region(count * 8));
    from.write_at(0, &pattern(count * 8)).unwrap();
    let word = IncarnationWord::new(incarnation(7));
    let mut batch = of_process(ourselves(&word, incarnation(7)));
    for n in 0..count as u64 {
        let at = from.address() + (count as u64 - 1 - n) * 8;
        batch.add_from_process(at, (&to, n * 8), 8).unwrap();
    }
    let stats = batch.run(&mut Vectors::default()).unwrap();
    assert_eq!(stats, CopyStats { calls: 3, short: 0 });
    let expected: Vec<u8> = pattern(count * 8)
        .chunks(8)
        .rev()
        .flatten()
        .copied()
        .collect();
    assert!(contents(&to) == expected);
}

#[test]
fn another_life_is_noticed_by_its_word() {
    let (from, to) = (region(64), region(64));
    let word = IncarnationWord::new(incarnation(7));
    let mut process = ourselves(&word, incarnation(8));
    let run = |process: &RemoteProcess| {
        let mut batch = of_process(process.clone());
        batch
            .add_from_process(from.address(), (&to, 0), 64)
            .unwrap();
        batch.run(&mut Vectors::default()).unwrap_err()
    };
    let stranger = |process: &RemoteProcess| CopyError::Stranger {
        pid: process.pid,
        expected: process.incarnation,
    };
    assert_eq!(run(&process), stranger(&process));
    assert_eq!(probe(&process), Err(stranger(&process)));
    process.incarnation = incarnation(7);
    probe(&process).unwrap();
    // The engine has ended; its process lives on.
    drop(word);
    assert_eq!(run(&process), stranger(&process));
    process.word = 8;
    assert_eq!(run(&process), stranger(&process));
    // No process has this number: they end at 4,194,304.
    process.pid = i32::MAX;
    assert_eq!(run(&process), CopyError::Gone { pid: i32::MAX });
}

#[test]
fn memory_that_is_not_there_is_named_and_what_was_read_stays() {
    let (from, to) = (region(4096), region(4096));
    from.write_at(0, &pattern(4096)).unwrap();
    let word = IncarnationWord::new(incarnation(7));
    let process = ourselves(&word, incarnation(7));
    let mut batch = of_process(process.clone());
    batch
        .add_from_process(from.address(), (&to, 0), 1024)
        .unwrap();
    batch.add_from_process(16, (&to, 1024), 1024).unwrap();
    batch
        .add_from_process(from.address(), (&to, 2048), 1024)
        .unwrap();
    let error = batch.run(&mut Vectors::default()).unwrap_err();
    let pid = process.pid;
    assert_eq!(error, CopyError::Fault { pid, address: 16 });
    let out = contents(&to);
    assert!(out[..1024] == pattern(4096)[..1024]);
    assert!(out[1024..].iter().all(|&byte| byte == 0));
}

#[test]
fn pieces_outside_are_refused_on_either_side() {
    let pool = HostPool::new(4096).unwrap();
    let fd = pool.fd().try_clone_to_owned().unwrap();
    let mapped = Arc::new(RemotePool::map(fd, 4096).unwrap());
    let to = region(4096);
    let mut batch = CopyBatch::default();
    assert!(batch.add_from_pool(&mapped, 4090, (&to, 0), 7).is_err());
    assert!(batch.add_from_pool(&mapped, 0, (&to, 4090), 7).is_err());
    assert!(batch.add_from_process(0, (&to, u64::MAX), 7).is_err());
    assert_eq!((batch.len(), batch.bytes()), (0, 0));
}

proptest! {
    /// Any pieces, from a pool and from a process: the same bytes as one copy each.
    #[test]
    fn batches_copy_what_their_pieces_say(
        pieces in prop::collection::vec((0_u64..4000, 0_u64..64, 1_u64..96), 0..40),
    ) {
        let pool = HostPool::new(4096).unwrap();
        let from = pool.region().unwrap();
        from.write_at(0, &pattern(4096)).unwrap();
        let mapped = Arc::new(RemotePool::map(pool.fd().try_clone_to_owned().unwrap(), 4096).unwrap());
        let word = IncarnationWord::new(incarnation(7));
        let (one, other) = (region(64 * 96), region(64 * 96));
        let mut expected = vec![0; 64 * 96];
        let mut by_map = CopyBatch::default();
        let mut by_call = of_process(ourselves(&word, incarnation(7)));
        for &(offset, slot, bytes) in &pieces {
            let to = slot * 96;
            by_map.add_from_pool(&mapped, offset, (&one, to), bytes).unwrap();
            by_call.add_from_process(from.address() + offset, (&other, to), bytes).unwrap();
            let source = &pattern(4096)[offset as usize..(offset + bytes) as usize];
            expected[to as usize..(to + bytes) as usize].copy_from_slice(source);
        }
        let mut vectors = Vectors::default();
        by_map.run(&mut vectors).unwrap();
        let stats = by_call.run(&mut vectors).unwrap();
        prop_assert_eq!(stats.calls, u64::from(!pieces.is_empty()));
        prop_assert!(contents(&one) == expected);
        prop_assert!(contents(&other) == expected);
    }
}

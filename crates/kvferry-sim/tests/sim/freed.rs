//! What is in blocks that are free, and in blocks that were handed out.

use std::slice;

use kvferry_sim::{EngineConfig, SchedulerConfig, SimEngine, Violation};

use super::puppet::*;

/// An engine in which a client went away, with the id of its last block, which is not full and so found
/// by nobody, and what was in it.
fn freed(reads_freed: bool) -> (Puppet, SimEngine, u32, Vec<u8>) {
    let puppet = Puppet::default();
    puppet.0.lock().unwrap().reads_freed = reads_freed;
    let scheduler = SchedulerConfig {
        blocks: 16,
        token_budget: 64,
        ..SchedulerConfig::default()
    };
    let config = EngineConfig {
        scheduler,
        ..EngineConfig::default()
    };
    let (puppet, mut engine) = puppet.engine_around(config, &windowed());
    engine.add(request("a", 7, 8)).unwrap();
    engine.step().unwrap();
    let block = engine.scheduler().blocks(&id("a")).unwrap()[1][1];
    let held = puppet.bytes(1, block);
    engine.abort(&id("a")).unwrap();
    engine.step().unwrap();
    (puppet, engine, block, held)
}

#[test]
fn a_free_block_keeps_its_bytes_for_a_connector_that_reads_it_and_has_nothing_for_others() {
    let (puppet, _, block, held) = freed(true);
    assert_eq!(puppet.bytes(1, block), held);
    let (puppet, _, block, held) = freed(false);
    assert_eq!(puppet.bytes(1, block), vec![0xa5; held.len()]);
}

#[test]
fn c7_a_block_has_nothing_for_its_old_owner_once_it_was_to_let_go() {
    let (puppet, mut engine, block, held) = freed(true);
    puppet.0.lock().unwrap().watched = Some((1, block));
    let mut other = request("c", 56, 3);
    other.prompt.reverse();
    engine.add(other).unwrap();
    engine.step().unwrap();
    let tables = engine.scheduler().blocks(&id("c")).unwrap();
    assert!(tables[1].contains(&block), "{tables:?}");
    let seen = puppet.0.lock().unwrap().seen.clone();
    let nothing = vec![0xa5; held.len()];
    assert_eq!(seen, [("release_blocks", held), ("begin_step", nothing)]);
}

#[test]
fn c7_a_write_to_a_free_block_is_found_also_where_the_connector_may_read_it() {
    let (puppet, mut engine, block, _) = freed(true);
    {
        let state = puppet.0.lock().unwrap();
        let mut layers = state.layouts[0].layers.iter();
        let layer = layers.find(|layer| layer.group == 1).unwrap();
        let at = layer.offset + u64::from(block) * layer.block_stride;
        let mut byte = 0;
        layer
            .memory
            .read_at(at, slice::from_mut(&mut byte))
            .unwrap();
        layer.memory.write_at(at, &[!byte]).unwrap();
    }
    let mut other = request("c", 56, 1);
    other.prompt.reverse();
    engine.add(other).unwrap();
    let violation = until_broken(&mut engine);
    assert!(
        matches!(violation, Violation::LateWrite { .. }),
        "{violation}"
    );
}

//! What is in blocks that are free, and in blocks that were handed out.

use std::slice;

use kvferry_sim::{EngineConfig, SchedulerConfig, SimEngine, Violation};

use super::puppet::*;

/// An engine in which the window of `b` has moved on from a block that no one can find: `a` has an equal
/// one. With the block's id, and what was in it.
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
    for name in ["a", "b"] {
        engine.add(request(name, 7, 8)).unwrap();
    }
    engine.step().unwrap();
    let block = engine.scheduler().blocks(&id("b")).unwrap()[1][0];
    let full = puppet.bytes(1, block);
    while engine.scheduler().blocks(&id("b")).unwrap()[1][0] == block {
        engine.step().unwrap();
    }
    engine.step().unwrap();
    (puppet, engine, block, full)
}

#[test]
fn a_free_block_keeps_its_bytes_for_a_connector_that_reads_it_and_has_nothing_for_others() {
    let (puppet, _, block, full) = freed(true);
    assert_eq!(puppet.bytes(1, block), full);
    let (puppet, _, block, full) = freed(false);
    assert_eq!(puppet.bytes(1, block), vec![0xa5; full.len()]);
}

#[test]
fn c7_a_block_has_nothing_for_its_old_owner_once_it_was_to_let_go() {
    let (puppet, mut engine, block, full) = freed(true);
    puppet.0.lock().unwrap().watched = Some((1, block));
    engine.abort(&id("a")).unwrap();
    engine.abort(&id("b")).unwrap();
    let mut other = request("c", 56, 3);
    other.prompt.reverse();
    engine.add(other).unwrap();
    engine.step().unwrap();
    let tables = engine.scheduler().blocks(&id("c")).unwrap();
    assert!(tables[1].contains(&block), "{tables:?}");
    let seen = puppet.0.lock().unwrap().seen.clone();
    let nothing = vec![0xa5; full.len()];
    assert_eq!(seen, [("release_blocks", full), ("begin_step", nothing)]);
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

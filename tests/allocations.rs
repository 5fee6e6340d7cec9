//! No allocation per block on the hot path: a read of eight times as many blocks allocates as often.
//!
//! The allocator counts, for the whole process: both engines' threads and the caller's.

#![allow(missing_docs, clippy::unwrap_used)]

use std::time::Duration;

use kvferry_engine::wire::EngineId;
use kvferry_engine::{
    BlockPair, Engine, EngineConfig, HostPool, LaneChoice, LoopbackFabric, LoopbackNetwork,
    TableSpec,
};
use kvferry_tests::counting::{Counting, allocations};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const BLOCKS: u32 = 16_384;
const BLOCK_BYTES: u64 = 256;

fn engine(network: Option<&LoopbackNetwork>, name: &str) -> Engine {
    let mut config = EngineConfig::new(EngineId::new(name).unwrap());
    config.allow_emulation = true;
    let builder = Engine::builder(config);
    match network.cloned() {
        Some(network) => builder
            .start_on(move || LoopbackFabric::new(&network, 64 << 10))
            .unwrap(),
        None => builder.start().unwrap(),
    }
}

/// Allocations of one read of `count` scattered blocks.
fn allocated_by(network: Option<&LoopbackNetwork>, lane: &str, counts: [u32; 2]) -> [u64; 2] {
    let (producer, consumer) = (engine(network, "producer"), engine(network, "consumer"));
    let table = |engine: &Engine| {
        let pool = HostPool::new((u64::from(BLOCKS) * BLOCK_BYTES) as usize).unwrap();
        let region = engine.register(&pool.region().unwrap()).unwrap();
        let table = engine
            .add_table(&region, TableSpec::dense(BLOCK_BYTES, BLOCKS))
            .unwrap();
        (region, table)
    };
    let (_theirs, _) = table(&producer);
    let (_ours, local) = table(&consumer);
    let lane: LaneChoice = lane.parse().unwrap();
    let peer = consumer
        .connect(producer.describe().unwrap(), lane)
        .unwrap();
    let tables = vec![(local, peer.tables().next().unwrap())];
    let read = |count: u32| {
        let pairs: Vec<BlockPair> = (0..count)
            .map(|n| BlockPair::new(n, n.wrapping_mul(4099) % BLOCKS))
            .collect();
        let before = allocations();
        let report = peer
            .read(&tables, &pairs)
            .unwrap()
            .wait(Duration::from_secs(60));
        let report = report.unwrap().unwrap();
        assert_eq!(report.bytes, u64::from(count) * BLOCK_BYTES);
        assert!(
            report.operations > u64::from(count) / 2,
            "the blocks are scattered"
        );
        allocations() - before
    };
    // Queues, buffers and tables reach their sizes first.
    for count in [counts[1], counts[0], counts[1]] {
        read(count);
    }
    counts.map(read)
}

#[test]
fn a_read_allocates_as_often_whatever_its_blocks() {
    // One test, so that nothing else counts.
    let network = LoopbackNetwork::new();
    for network in [Some(&network), None] {
        for lane in ["served", "native"] {
            let [few, many] = allocated_by(network, lane, [1024, 8192]);
            println!("{lane}, loopback {}: {few} and {many}", network.is_some());
            // A segment that waits, or a timer that comes due, may add a few; a block may not.
            assert!(
                many <= few + 200,
                "{lane}: {few} allocations for 1,024 blocks, {many} for 8,192"
            );
        }
    }
}

//! Reads: every lane that exists, with the transport lists that matter.

use std::time::Duration;

use kvferry_tests::harness::{Case, Child, Environment};
use kvferry_tests::roles::{Counted, Layout, Read, ReadResult, Settings, Started};
use serde_json::Value;

use super::support::{consumer, publish, publisher};

/// `UCX_TLS` unset and tcp alone.
pub(crate) const TRANSPORTS: [(&str, Option<&str>); 2] = [("default", None), ("tcp", Some("tcp"))];

const PRODUCER: Layout = Layout {
    layers: 3,
    blocks: 200,
    block_bytes: 4096,
};
const CONSUMER: Layout = Layout {
    layers: 3,
    blocks: 100,
    block_bytes: 4096,
};

/// 60 blocks in 36 runs of ids: every third pair has two neighbours behind it.
fn scattered() -> Vec<(u32, u32)> {
    let mut pairs = Vec::new();
    for group in 0..12_u32 {
        let (local, remote) = (group * 8, (group * 53) % 190);
        pairs.extend([
            (local, remote),
            (local + 1, remote + 1),
            (local + 2, remote + 2),
        ]);
        pairs.extend([(local + 5, remote + 7), (local + 4, remote + 9)]);
    }
    pairs
}

struct Pair {
    producer: Child,
    started: Started,
}

fn producer(layout: Layout, environment: Environment<'_>) -> Pair {
    let producer = Child::start("producer", &layout, environment);
    let started = producer.hear();
    Pair { producer, started }
}

fn read(pair: &Pair, lane: &str, layout: Layout, pairs: Vec<(u32, u32)>) -> Read {
    Read {
        from: pair.started.description.clone(),
        lane: lane.into(),
        layout,
        pairs,
        timeout_ms: 0,
        wait: false,
    }
}

fn same_bytes_and_counts(lane: &'static str, transports: Option<&'static str>) {
    let environment = [("UCX_TLS", transports)];
    let mut pair = producer(PRODUCER, &environment);
    let mut consumer = Child::start(
        "read",
        &read(&pair, lane, CONSUMER, scattered()),
        &environment,
    );
    let result: ReadResult = consumer.hear();
    let bytes = 3 * 60 * 4096;
    assert_eq!(result.error, "");
    assert_eq!(
        (result.bytes, result.wrong_bytes, result.quarantined_bytes),
        (bytes, 0, 0)
    );
    assert_eq!(
        (result.operations, result.runs),
        (3 * 36, 3 * 36),
        "operations equal runs"
    );
    assert_eq!(result.lane, lane);
    assert!(result.transports.contains("tcp"), "{}", result.transports);
    let by_lane = (result.served_bytes, result.native_bytes);
    let counted: Counted = pair.producer.ask("count");
    if lane == "native" {
        assert_eq!(by_lane, (0, bytes));
        // The greeting, and one GET per run.
        assert_eq!(
            result.ucx_operations,
            result.messages_sent + result.operations
        );
        assert_eq!(counted.bytes_served, 0);
    } else {
        assert_eq!(by_lane, (bytes, 0));
        assert!(result.ucx_operations > 0);
        assert_eq!(counted.bytes_served, bytes);
    }
    assert!(counted.ucx_operations > 0);
    consumer.finish_well();
    pair.producer.finish_well();
}

/// C47: the producer's engine takes no steps; its main thread waits on a pipe and its progress
/// thread in poll. The read completes all the same.
fn c47_read_from_a_producer_whose_engine_sleeps() {
    let environment = [("UCX_TLS", Some("tcp"))];
    let mut pair = producer(PRODUCER, &environment);
    let mut request = read(&pair, "served", CONSUMER, scattered());
    request.wait = true;
    let mut consumer = Child::start("read", &request, &environment);
    let _: Value = consumer.hear();
    // Past every spin and every greeting: the producer's thread is asleep.
    assert!(consumer.is_quiet_for(Duration::from_millis(300)));
    let before: Counted = pair.producer.ask("count");
    assert!(before.sleeps > 0, "the producer has not slept");
    consumer.tell("go");
    let result: ReadResult = consumer.hear();
    assert_eq!((result.error.as_str(), result.bytes), ("", 3 * 60 * 4096));
    assert_eq!(result.wrong_bytes, 0);
    let after: Counted = pair.producer.ask("count");
    assert_eq!(after.bytes_served - before.bytes_served, result.bytes);
    consumer.finish_well();
    pair.producer.finish_well();
}

/// C124: one read that names 100,000 scattered blocks.
fn c124_a_hundred_thousand_descriptors(lane: &'static str) {
    let blocks = 100_000_u32;
    let layout = Layout {
        layers: 1,
        blocks,
        block_bytes: 256,
    };
    let mut pair = producer(layout, &[]);
    // 48,271 has no factor in common with the count: every block once, none beside its neighbour.
    let pairs: Vec<(u32, u32)> = (0..blocks)
        .map(|n| (n, (u64::from(n) * 48_271 % u64::from(blocks)) as u32))
        .collect();
    let mut consumer = Child::start("read", &read(&pair, lane, layout, pairs), &[]);
    let result: ReadResult = consumer.hear();
    assert_eq!((result.error.as_str(), result.wrong_bytes), ("", 0));
    assert_eq!(result.bytes, u64::from(blocks) * 256);
    assert!(result.operations <= result.runs, "{result:?}");
    consumer.finish_well();
    pair.producer.finish_well();
}

/// A producer that dies while it is read costs the read, by its deadline, and nothing else.
fn a_killed_producer_fails_the_read(lane: &'static str) {
    let environment = [("UCX_TLS", Some("tcp"))];
    let mut pair = producer(PRODUCER, &environment);
    let mut request = read(&pair, lane, CONSUMER, scattered());
    request.wait = true;
    let mut consumer = Child::start("read", &request, &environment);
    let _: Value = consumer.hear();
    pair.producer.kill();
    consumer.tell("go");
    let result: ReadResult = consumer.hear();
    assert!(!result.error.is_empty());
    assert_eq!((result.bytes, result.quarantined_bytes), (0, 0));
    assert_eq!(result.wrong_bytes, 0, "nothing was written");
    consumer.finish_well();
}

/// C125: what is said at the handshake grows with regions and tables, not with blocks: the producer's description
/// as it is published and read over, and the consumer's own, which goes out in its greeting.
fn c125_the_handshake_does_not_grow_with_blocks() {
    const SMALL: u64 = 64;
    let mut said = Vec::new();
    for blocks in [1_000, 60_000] {
        let (mut child, published) = publish(&publisher("producer", blocks, SMALL), &[]);
        let consumer = consumer(Settings::default(), blocks, SMALL);
        let description = published.description.unpack();
        assert_eq!(description.tables.len(), 2);
        let theirs = description.encode().unwrap().len();
        let ours = consumer.engine.describe().unwrap().encode().unwrap().len();
        let peer = consumer.connect(description, "served");
        consumer.reads(&peer, 0);
        said.push([theirs, ours]);
        child.finish_well();
    }
    for side in [0, 1] {
        // A number of six digits may take two bytes more than one of four.
        let grown = said[1][side].abs_diff(said[0][side]);
        assert!(grown <= 32, "{said:?}");
    }
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = vec![Case::new(
        "c125_the_handshake_does_not_grow_with_blocks",
        c125_the_handshake_does_not_grow_with_blocks,
    )];
    for lane in ["served", "native"] {
        for (name, transports) in TRANSPORTS {
            cases.push(Case::new(
                format!("same_bytes_and_counts::{lane}::{name}"),
                move || {
                    same_bytes_and_counts(lane, transports);
                },
            ));
        }
        cases.push(Case::new(
            format!("c124_a_hundred_thousand_descriptors::{lane}"),
            move || {
                c124_a_hundred_thousand_descriptors(lane);
            },
        ));
        cases.push(Case::new(
            format!("a_killed_producer_fails_the_read::{lane}"),
            move || {
                a_killed_producer_fails_the_read(lane);
            },
        ));
    }
    cases.push(Case::new(
        "c47_read_from_a_producer_whose_engine_sleeps",
        c47_read_from_a_producer_whose_engine_sleeps,
    ));
    cases
}

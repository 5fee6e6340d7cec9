//! Consumers that are killed in the middle of their connecting.

use std::time::Duration;

use kvferry_tests::harness::Case;
use kvferry_tests::roles::{EngineChild, EngineSpec, Layout};

const LAYOUT: Layout = Layout {
    layers: 1,
    blocks: 4,
    block_bytes: 4096,
};

const ROUNDS: u32 = 40;

/// C52, C86: a consumer is killed a moment after it began to connect, another moment each time. The producer
/// lives, keeps nothing of it, and serves the next one. UCX 1.13 aborts a process that is still answering
/// another's first message when that one dies, unless the first message has to wait for its connection.
fn c52_a_consumer_that_is_killed_while_it_connects_takes_nobody_with_it() {
    let plain = |spec: EngineSpec| {
        let spec = EngineSpec {
            emulation: false,
            ..spec
        };
        EngineChild::start(&spec, &[])
    };
    let consumer = || plain(EngineSpec::consumer(LAYOUT));
    let mut producer = plain(EngineSpec::producer(LAYOUT));
    let description = producer.describe();
    for round in 0..ROUNDS {
        let mut killed = consumer();
        killed.begin_to_connect(&description, "served");
        std::thread::sleep(Duration::from_micros(u64::from(round) * 150));
        killed.child.kill();
    }
    let mut consumer = consumer();
    assert_eq!(consumer.connect(&description, "served").error, "");
    let pairs = [(0, 1), (1, 0)];
    consumer.read(&pairs, Duration::from_secs(10));
    assert_eq!(consumer.wait().error, "");
    assert_eq!(consumer.wrong(&pairs), 0);
    consumer.child.finish_well();
    producer.child.finish_well();
}

pub(crate) fn cases() -> Vec<Case> {
    vec![Case::new(
        "c52_a_consumer_that_is_killed_while_it_connects_takes_nobody_with_it",
        c52_a_consumer_that_is_killed_while_it_connects_takes_nobody_with_it,
    )]
}

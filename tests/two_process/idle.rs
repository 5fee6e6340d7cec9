//! Sleep: it costs nothing, it ends in time, and it loses nothing.

use std::time::Duration;

use kvferry_tests::harness::{Case, Child};
use kvferry_tests::roles::{Answered, Counted, Echoed, Layout, Many, Packed, ReadByAll, Started};
use serde_json::{Value, json};

const LAYOUT: Layout = Layout {
    layers: 2,
    blocks: 64,
    block_bytes: 4096,
};

/// C60: an engine with 16 connected peers uses under 1 % of a core while nobody asks for anything,
/// and answers all the same: it is read from out of its sleep.
fn c60_an_idle_engine_with_sixteen_peers(lane: &'static str, transports: Option<&'static str>) {
    let environment = [("UCX_TLS", transports)];
    let engines = 16;
    let mut producer = Child::start("producer", &LAYOUT, &environment);
    let started: Started = producer.hear();
    let many = Many {
        from: started.description,
        lane: lane.into(),
        layout: LAYOUT,
        engines,
    };
    let mut consumer = Child::start("many", &many, &environment);
    assert_eq!(consumer.hear::<Value>(), json!({ "connected": engines }));
    let all = u64::from(engines) * 2 * 64 * 4096;
    let everything = ReadByAll {
        bytes: all,
        wrong_bytes: 0,
    };
    assert_eq!(consumer.ask::<ReadByAll>("read"), everything);

    let idle = Duration::from_secs(10);
    let before: Counted = producer.ask("count");
    assert!(producer.is_quiet_for(idle));
    let after: Counted = producer.ask("count");
    let used = after.cpu_ms - before.cpu_ms;
    println!("{used} ms, {} sleeps", after.sleeps - before.sleeps);
    assert!(
        u128::from(used) * 100 < idle.as_millis(),
        "{used} ms of {idle:?}"
    );
    assert!(after.sleeps > before.sleeps, "it does not sleep");

    assert_eq!(consumer.ask::<ReadByAll>("read"), everything);
    let read: Counted = producer.ask("count");
    assert!(
        read.sleeps > after.sleeps,
        "it was not asleep when it was read from"
    );
    let served = if lane == "served" { all } else { 0 };
    assert_eq!(read.bytes_served - after.bytes_served, served);
    consumer.finish_well();
    producer.finish_well();
}

/// C60: 100,000 messages, each to a thread that sleeps, each answered to one that sleeps.
fn c60_a_hundred_thousand_messages_each_to_a_sleeper(transports: Option<&'static str>) {
    let (stages, per_stage) = (10, 10_000);
    let environment = [("UCX_TLS", transports)];
    let mut echo = Child::start("echo", &(), &environment);
    let to: Packed = echo.hear();
    let mut asker = Child::start("round_trips", &(to, per_stage), &environment);
    for stage in 1..=stages {
        let answered: Answered = asker.ask("go");
        assert_eq!(answered.answered, stage * per_stage);
        let echoed: Echoed = echo.ask("count");
        assert_eq!(echoed.echoed, stage * per_stage);
        println!("{answered:?} {echoed:?}");
        // Not one a message: a thread may find the next one while it looks again.
        for sleeps in [answered.sleeps, echoed.sleeps] {
            assert!(
                sleeps * 10 > stage * per_stage,
                "it hardly sleeps: {sleeps}"
            );
        }
    }
    asker.finish_well();
    echo.finish_well();
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, transports) in super::reads::TRANSPORTS {
        cases.push(Case::new(
            format!("c60_a_hundred_thousand_messages_each_to_a_sleeper::{name}"),
            move || c60_a_hundred_thousand_messages_each_to_a_sleeper(transports),
        ));
    }
    for lane in ["served", "native"] {
        cases.push(Case::new(
            format!("c60_an_idle_engine_with_sixteen_peers::{lane}"),
            move || c60_an_idle_engine_with_sixteen_peers(lane, None),
        ));
    }
    cases
}

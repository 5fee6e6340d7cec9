//! Ends: of an engine, of its last handle, of its process, while peers live, are dead, or stand still.

use std::time::{Duration, Instant};

use kvferry_engine::LaneChoice;
use kvferry_tests::harness::{Case, Child, until};
use kvferry_tests::roles::{Done, Order, Published, PublisherCounters, Settings};

use super::support::{
    LANES, SLACK, begin, connect, consumer, copies, finish, losing_case, obey, order, publish,
    publisher_for, reader,
};

const BYTES: u64 = 64 << 10;

/// More than sockets hold. Copies are made whatever stands still, and every byte of them is compared:
/// two batches, which are not made before the next order comes.
fn blocks(lane: &str) -> u32 {
    if copies(lane) { 128 } else { 512 }
}

/// How the consumer ends.
#[derive(Clone, Copy)]
enum End {
    Shutdown,
    Drop,
    Exit,
    Return,
}

const ENDS: [(&str, End); 4] = [
    ("shutdown", End::Shutdown),
    ("drop", End::Drop),
    ("exit", End::Exit),
    ("return", End::Return),
];

/// Begins a read of a producer that stands still, so that it is in flight for as long as that does.
fn begin_of_a_stopped(
    consumer: &mut Child,
    name: &str,
    (producer, published): &(Child, Published),
    lane: &str,
) {
    assert_eq!(connect(consumer, name, published, lane).error, "");
    producer.stop();
    begin(consumer, name, 0);
    // More than sockets hold: the goodbye does not leave either.
    let done = obey(consumer, &Order::Clog { name: name.into() });
    assert_eq!(done.error, "");
}

/// C57: a consumer ends within its limit although of its three peers one is dead and one stands
/// still, with a read in flight from each. The others live.
fn c57_a_consumer_with_live_dead_and_stopped_peers_ends_in_time(lane: &'static str, end: End) {
    let mut live = publish(&publisher_for(lane, "live", blocks(lane), BYTES), &[]);
    let mut killed = publish(&publisher_for(lane, "killed", blocks(lane), BYTES), &[]);
    let mut stopped = publish(&publisher_for(lane, "stopped", blocks(lane), BYTES), &[]);
    let mut ending = reader("ending", blocks(lane), BYTES, Settings::default(), &[]);
    begin_of_a_stopped(&mut ending, "killed", &killed, lane);
    killed.0.kill();
    begin_of_a_stopped(&mut ending, "stopped", &stopped, lane);
    begin_of_a_stopped(&mut ending, "live", &live, lane);
    live.0.go_on();
    let (started, limit) = (Instant::now(), Duration::from_secs(2));
    // Copies have been made meanwhile: some more, and the end right behind their start.
    let copied = if copies(lane) {
        &["live", "stopped"][..]
    } else {
        &[]
    };
    for name in copied {
        let start = Order::Start {
            name: (*name).into(),
            table: 1,
            timeout_ms: 60_000,
        };
        order(&mut ending, &start);
    }
    let begun = |ending: &Child| {
        for _ in copied {
            let started: Done = ending.hear();
            assert_eq!(started.error, "");
        }
    };
    match end {
        End::Shutdown => {
            let limit_ms = limit.as_millis() as u64;
            order(&mut ending, &Order::Shutdown { limit_ms });
            begun(&ending);
            let done: Done = ending.hear();
            assert_eq!(done.error, "");
            assert!(u128::from(done.elapsed_ms) < (limit + SLACK).as_millis());
            assert_eq!((done.quarantined, done.open), ((0, 0), 0));
            // Each read has one outcome, and nothing is written after it.
            for name in ["killed", "stopped", "live"] {
                assert_eq!(finish(&mut ending, name).wrong_bytes, 0, "{name}");
            }
        }
        End::Drop => {
            order(&mut ending, &Order::Drop);
            begun(&ending);
            let done: Done = ending.hear();
            assert!(u128::from(done.elapsed_ms) < (limit + SLACK).as_millis());
            for name in ["killed", "stopped", "live"] {
                assert_eq!(finish(&mut ending, name).wrong_bytes, 0, "{name}");
            }
        }
        End::Exit => order(&mut ending, &Order::Exit),
        End::Return => {}
    }
    ending.finish_well();
    assert!(started.elapsed() < limit + SLACK, "{:?}", started.elapsed());
    stopped.0.go_on();
    // The one that lived and the one that stood still know, and serve others.
    let other = consumer(Settings::default(), blocks(lane), BYTES);
    for (producer, published) in [&mut live, &mut stopped] {
        let peer = other.connect(published.description.unpack(), lane);
        other.reads(&peer, 1);
        until("the loss", || {
            producer.ask::<PublisherCounters>("counters").peers_lost == 1
        });
        producer.finish_well();
    }
}

/// C57: a consumer ends within its limit while it greets a peer that stands still. The greeting cannot
/// leave, and has an hour for it.
fn c57_a_consumer_that_greets_a_stopped_peer_ends_in_time() {
    let (mut child, published) = publish(&publisher_for("served", "producer", 4, BYTES), &[]);
    child.stop();
    let patient = Settings {
        connect: Some(3_600_000),
        ..Settings::default()
    };
    let ending = consumer(patient, 4, BYTES);
    let connecting = {
        let (engine, to) = (ending.engine.clone(), published.description.unpack());
        std::thread::spawn(move || engine.connect(to, LaneChoice::Auto))
    };
    until("the greeting", || {
        ending.engine.counters().messages_sent == 1
    });
    let (started, limit) = (Instant::now(), Duration::from_millis(500));
    ending.engine.shutdown(limit).unwrap();
    assert!(started.elapsed() < limit + SLACK, "{:?}", started.elapsed());
    assert!(connecting.join().unwrap().is_err());
    child.go_on();
    let other = consumer(Settings::default(), 4, BYTES);
    let peer = other.connect(published.description.unpack(), "served");
    other.reads(&peer, 1);
    child.finish_well();
}

/// C57, from the other side: a producer whose consumers stand still or are dead while it serves them.
fn c57_a_producer_with_stopped_and_dead_consumers_ends_in_time(lane: &'static str) {
    let (mut producer, published) =
        publish(&publisher_for(lane, "producer", blocks(lane), BYTES), &[]);
    let mut consumers = ["live", "killed", "stopped"].map(|name| {
        let mut consumer = reader(name, blocks(lane), BYTES, Settings::default(), &[]);
        assert_eq!(connect(&mut consumer, "p", &published, lane).error, "");
        consumer
    });
    producer.stop();
    for consumer in &mut consumers {
        begin(consumer, "p", 0);
    }
    let [live, killed, stopped] = &mut consumers;
    killed.kill();
    stopped.stop();
    producer.go_on();
    let started = Instant::now();
    // Its limit is 10 s.
    producer.finish_well();
    assert!(started.elapsed() < Duration::from_secs(10) + SLACK);
    let done = finish(live, "p");
    assert_eq!(
        (done.wrong_bytes, done.open, done.quarantined),
        (0, 0, (0, 0))
    );
    stopped.go_on();
    for consumer in [live, stopped] {
        consumer.finish_well();
    }
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for lane in LANES {
        for (name, end) in ENDS {
            cases.push(losing_case(
                format!(
                    "c57_a_consumer_with_live_dead_and_stopped_peers_ends_in_time::{lane}::{name}"
                ),
                lane,
                move || c57_a_consumer_with_live_dead_and_stopped_peers_ends_in_time(lane, end),
            ));
        }
    }
    cases.push(Case::new(
        "c57_a_consumer_that_greets_a_stopped_peer_ends_in_time",
        c57_a_consumer_that_greets_a_stopped_peer_ends_in_time,
    ));
    // Not over emulated reads: UCX aborts if the reader is killed in the middle of one.
    for lane in ["served", "mapped", "attached"] {
        cases.push(Case::new(
            format!("c57_a_producer_with_stopped_and_dead_consumers_ends_in_time::{lane}"),
            move || c57_a_producer_with_stopped_and_dead_consumers_ends_in_time(lane),
        ));
    }
    cases
}

//! Peers that stand still, or end, while something is expected of them: of a read (C56), or of a greeting (C89).

use std::time::{Duration, Instant};

use kvferry_engine::wire::Description;
use kvferry_engine::{ConnectError, LaneChoice, Peer, TransferError};
use kvferry_tests::harness::{Case, Child, PATIENCE, until};
use kvferry_tests::roles::{Published, Settings};

use super::support::{
    Consumer, LANES, SLACK, consumer, copies, losing_case, publish, publisher_for,
};

const BLOCKS: u32 = 64;
const BYTES: u64 = 16 << 10;

fn producer(lane: &str, name: &str) -> (Child, Published) {
    publish(&publisher_for(lane, name, BLOCKS, BYTES), &[])
}

/// Connects until it works: after a failure the first attempts may come too early.
fn again(consumer: &Consumer, to: &Description, lane: &str) -> Peer {
    let lane: LaneChoice = lane.parse().unwrap();
    let mut peer = None;
    until("a connection", || {
        let connected = consumer.engine.connect(to.clone(), lane);
        peer = connected.ok().filter(|peer| !peer.is_suspect());
        peer.is_some()
    });
    peer.unwrap()
}

/// C56: the producer is stopped in the middle of a read. The deadline ends it, nothing of it is
/// written after it is over, and when the producer goes on it is read again.
fn c56_a_stopped_peer_stalls_a_read_by_its_deadline(lane: &'static str) {
    let (mut child, published) = producer(lane, "producer");
    let consumer = consumer(Settings::default(), BLOCKS, BYTES);
    let peer = consumer.connect(published.description.unpack(), lane);
    consumer.reads(&peer, 0);
    consumer.poison(0);
    child.stop();
    let (limit, started) = (Duration::from_millis(700), Instant::now());
    let transfer = consumer.start(&peer, 0, limit).unwrap();
    until("the outcome", || transfer.poll_outcome().is_some());
    let waited = started.elapsed();
    assert!(waited >= limit && waited < limit + SLACK, "{waited:?}");
    let error = transfer.wait(PATIENCE).unwrap().unwrap_err();
    assert!(matches!(error, TransferError::Stalled { .. }), "{error}");
    consumer.is_quiet();
    // The memory is somebody else's now.
    consumer.poison(0);
    child.go_on();
    let peer = again(&consumer, &published.description.unpack(), lane);
    for _ in 0..5 {
        consumer.reads(&peer, 1);
    }
    assert_eq!(consumer.wrong(0, false), 0, "written after the end");
    consumer.is_quiet();
    child.finish_well();
}

/// C56: with a long deadline the producer's silence ends the read. What is in flight stays in
/// quarantine; when the producer goes on the quarantine empties, and the connection is as before.
fn c56_a_stopped_peer_leaves_a_quarantine_that_empties(lane: &'static str) {
    let (mut child, published) = producer(lane, "producer");
    let patient = Settings {
        ping: Some(100),
        suspect: Some(800),
        dead: Some(3_600_000),
        // The reads in flight are not to be ended by us.
        escalation: Some(3_600_000),
        ..Settings::default()
    };
    let consumer = consumer(patient, BLOCKS, BYTES);
    let peer = consumer.connect(published.description.unpack(), lane);
    consumer.reads(&peer, 0);
    child.stop();
    let transfer = consumer.start(&peer, 0, PATIENCE * 2).unwrap();
    until("the outcome", || transfer.poll_outcome().is_some());
    let error = transfer.poll_outcome().unwrap().unwrap_err();
    assert!(matches!(error, TransferError::Stalled { .. }), "{error}");
    assert!(peer.is_suspect() && peer.gone().is_none());
    let counters = consumer.engine.counters();
    let held = u64::from(BLOCKS) * BYTES;
    if lane == "served" {
        // The transfer's id is gone: what comes later finds nothing.
        assert!(transfer.is_quiesced());
        assert_eq!(counters.quarantined_bytes, 0);
    } else {
        assert!(!transfer.is_quiesced());
        assert_eq!(counters.quarantined_bytes, held);
        assert_eq!(consumer.regions[0].operations(), 1);
    }
    child.go_on();
    assert!(transfer.wait(PATIENCE).unwrap().is_err(), "one outcome");
    consumer.is_quiet();
    consumer.poison(0);
    until("the sign of life", || !peer.is_suspect());
    for _ in 0..5 {
        consumer.reads(&peer, 1);
    }
    assert_eq!(consumer.wrong(0, false), 0, "written after the end");
    assert!(peer.gone().is_none());
    assert_eq!(consumer.engine.counters().peers_lost, 0);
    child.finish_well();
}

/// C56, where nothing is needed of the peer: it is stopped, and what is read of it meanwhile comes, every
/// byte, with nothing in quarantine. Only its silence ends that: a suspect peer is not read.
fn c56_a_stopped_peer_stalls_no_copies(lane: &'static str) {
    let (mut child, published) = producer(lane, "producer");
    let patient = Settings {
        ping: Some(100),
        suspect: Some(5000),
        dead: Some(3_600_000),
        ..Settings::default()
    };
    let consumer = consumer(patient, BLOCKS, BYTES);
    let peer = consumer.connect(published.description.unpack(), lane);
    consumer.reads(&peer, 0);
    child.stop();
    let mut read = 0;
    // More often than not 5 s are enough for many.
    while !peer.is_suspect() {
        for table in [0, 1] {
            consumer.poison(table);
            let transfer = consumer.start(&peer, table, SLACK).unwrap();
            match transfer.wait(PATIENCE).unwrap() {
                Ok(_) => {
                    assert_eq!(consumer.wrong(table, true), 0);
                    read += 1;
                }
                Err(error) => {
                    let stalled = matches!(error, TransferError::Stalled { .. });
                    assert!(stalled && peer.is_suspect(), "{error}");
                }
            }
            let counters = consumer.engine.counters();
            assert_eq!(counters.quarantined_bytes, 0);
        }
    }
    assert!(read > 0, "a stopped peer stalled every read");
    consumer.poison(0);
    let transfer = consumer.start(&peer, 0, SLACK).unwrap();
    let error = transfer.wait(PATIENCE).unwrap().unwrap_err();
    assert!(matches!(error, TransferError::Stalled { .. }), "{error}");
    assert_eq!(consumer.wrong(0, false), 0, "nothing is read of a suspect");
    child.go_on();
    until("the sign of life", || !peer.is_suspect());
    for _ in 0..5 {
        consumer.reads(&peer, 1);
    }
    assert_eq!(consumer.wrong(0, false), 0, "written after the end");
    assert!(peer.gone().is_none());
    consumer.is_quiet();
    assert_eq!(consumer.engine.counters().peers_lost, 0);
    child.finish_well();
}

/// C89: the producer takes the connection and dies, or stands still, before it answers the greeting.
/// The attempt ends by its deadline, and what comes next is told at once.
fn c89_a_producer_that_ends_during_the_handshake(lane: &'static str, killed: bool) {
    let (mut child, published) = producer(lane, "producer");
    let settings = Settings {
        connect: Some(if killed { 60_000 } else { 1000 }),
        backoff: Some(5000),
        ..Settings::default()
    };
    let consumer = consumer(settings, BLOCKS, BYTES);
    let to = published.description.unpack();
    let _: serde_json::Value = child.ask("park");
    let choice: LaneChoice = lane.parse().unwrap();
    let started = Instant::now();
    let connecting = {
        let (engine, to) = (consumer.engine.clone(), to.clone());
        std::thread::spawn(move || engine.connect(to, choice))
    };
    until("the greeting", || {
        consumer.engine.counters().messages_sent == 1
    });
    if killed {
        child.kill();
    } else {
        child.stop();
    }
    let error = connecting.join().unwrap().unwrap_err();
    let elapsed = started.elapsed();
    if killed {
        assert!(matches!(error, ConnectError::Lost { .. }), "{error}");
        assert!(elapsed < SLACK, "not by the death, but after {elapsed:?}");
    } else {
        assert!(matches!(error, ConnectError::NoAnswer { .. }), "{error}");
        let limit = Duration::from_secs(1);
        assert!(elapsed >= limit && elapsed < limit + SLACK, "{elapsed:?}");
    }
    let started = Instant::now();
    let error = consumer.engine.connect(to.clone(), choice).unwrap_err();
    // A machine that was busy meanwhile may have waited for the window's end.
    if !matches!(error, ConnectError::BackingOff { .. }) {
        assert!(started.elapsed() < SLACK, "{error}");
    }
    consumer.is_quiet();
    if killed {
        let (mut child, published) = producer(lane, "producer");
        let peer = consumer.connect(published.description.unpack(), lane);
        consumer.reads(&peer, 0);
        child.finish_well();
    } else {
        child.go_on();
        child.tell("go");
        let peer = again(&consumer, &to, lane);
        consumer.reads(&peer, 0);
        child.finish_well();
    }
}

/// C89, the second half of the handshake: the greeting is answered, and whoever has the share socket
/// stands still or is dead. That lane is refused in time, and any other one serves.
fn c89_a_share_socket_that_says_nothing(lane: &'static str, killed: bool) {
    let (mut child, published) = producer(lane, "producer");
    let (mut silent, other) = producer(lane, "silent");
    let consumer = consumer(Settings::default(), BLOCKS, BYTES);
    let mut to = published.description.unpack();
    to.unix_socket = other.description.unpack().unix_socket;
    if killed {
        silent.kill();
    } else {
        silent.stop();
    }
    let started = Instant::now();
    let choice: LaneChoice = lane.parse().unwrap();
    let error = consumer.engine.connect(to.clone(), choice).unwrap_err();
    let refused = matches!(error, ConnectError::LaneUnavailable { .. });
    let why = if killed {
        "connecting to"
    } else {
        "did not answer within"
    };
    assert!(refused && error.to_string().contains(why), "{error}");
    assert!(started.elapsed() < SLACK, "{:?}", started.elapsed());
    let peer = consumer.engine.connect(to, LaneChoice::Auto).unwrap();
    assert_eq!(peer.lane().name(), "served");
    consumer.reads(&peer, 0);
    // With its own socket it is read as it should be: nothing was remembered for it.
    let peer = consumer.connect(published.description.unpack(), lane);
    consumer.reads(&peer, 1);
    consumer.is_quiet();
    child.finish_well();
}

pub(crate) fn cases() -> Vec<Case> {
    type Run = fn(&'static str);
    let mut cases = Vec::new();
    let needing: [(&str, bool, Run); 2] = [
        (
            "c56_a_stopped_peer_stalls_a_read_by_its_deadline",
            true,
            c56_a_stopped_peer_stalls_a_read_by_its_deadline,
        ),
        (
            "c56_a_stopped_peer_leaves_a_quarantine_that_empties",
            false,
            c56_a_stopped_peer_leaves_a_quarantine_that_empties,
        ),
    ];
    let copying: [(&str, bool, Run); 1] = [(
        "c56_a_stopped_peer_stalls_no_copies",
        false,
        c56_a_stopped_peer_stalls_no_copies,
    )];
    for lane in LANES {
        let own = if copies(lane) {
            &copying[..]
        } else {
            &needing[..]
        };
        for &(name, loses, run) in own {
            let name = format!("{name}::{lane}");
            cases.push(if loses {
                losing_case(name, lane, move || run(lane))
            } else {
                Case::new(name, move || run(lane))
            });
        }
    }
    for (name, killed) in [("killed", true), ("stopped", false)] {
        for lane in ["served", "mapped", "attached"] {
            cases.push(Case::new(
                format!("c89_a_producer_that_ends_during_the_handshake::{lane}::{name}"),
                move || c89_a_producer_that_ends_during_the_handshake(lane, killed),
            ));
        }
        for lane in ["mapped", "attached"] {
            cases.push(Case::new(
                format!("c89_a_share_socket_that_says_nothing::{lane}::{name}"),
                move || c89_a_share_socket_that_says_nothing(lane, killed),
            ));
        }
    }
    cases
}

//! When the state of a peer ends: by the next life's greeting, and not before the last operation.

use std::time::{Duration, Instant};

use kvferry_engine::{ConnectError, LaneChoice, Transfer};
use kvferry_tests::harness::{Case, PATIENCE, until};
use kvferry_tests::roles::{PublisherCounters, Settings};

use super::support::{
    LANES, begin, connect, consumer, copies, finish, losing_case, publish, publisher_for, reader,
    reads_all,
};

const BLOCKS: u32 = 64;
const BYTES: u64 = 16 << 10;
/// 16 MiB of them.
const MANY: u32 = 1024;

/// C86: copies out of a producer that is killed go on for a moment, and as long as one does its
/// connection is kept.
fn c86_a_dead_peer_is_kept_while_copies_are_under_way(lane: &'static str) {
    let consumer = consumer(Settings::default(), MANY, BYTES);
    for _ in 0..20 {
        let (mut child, published) = publish(&publisher_for(lane, "producer", MANY, BYTES), &[]);
        let peer = consumer.connect(published.description.unpack(), lane);
        consumer.reads(&peer, 0);
        // Some 640 MiB: the window is full at the death, whenever that comes.
        let reads: Vec<_> = (0..40)
            .map(|n| consumer.start(&peer, n % 2, PATIENCE).unwrap())
            .collect();
        let killing = std::thread::spawn(move || child.kill());
        let mut outlasted = false;
        until("the end of the connection", || {
            // In this order: what is quiet stays so.
            let held = consumer.engine.counters().connections_held;
            let gone = peer.gone().is_some();
            let quiet = reads.iter().all(Transfer::is_quiesced);
            assert!(held > 0 || quiet, "forgotten with copies under way");
            outlasted |= gone && !quiet;
            held == 0
        });
        killing.join().unwrap();
        consumer.is_quiet();
        if outlasted {
            return;
        }
    }
    panic!("no copy was under way at any death");
}

/// C52: a process that a copy finds gone is not tried again at once, as one whose connection broke is not.
/// Without a process there is no connection for long either, and which of the two is noticed first is
/// left to chance.
fn c52_a_process_that_is_gone_is_not_tried_again_at_once() {
    let mut by_a_copy = false;
    for _ in 0..20 {
        let (mut child, published) =
            publish(&publisher_for("attached", "producer", BLOCKS, BYTES), &[]);
        let to = published.description.unpack();
        let consumer = consumer(Settings::default(), BLOCKS, BYTES);
        let peer = consumer.connect(to.clone(), "attached");
        consumer.reads(&peer, 0);
        let killing = std::thread::spawn(move || child.kill());
        let mut alive = Instant::now();
        while let Ok(read) = consumer.start(&peer, 0, PATIENCE) {
            if read.wait(PATIENCE).unwrap().is_ok() {
                alive = Instant::now();
            }
        }
        let again = consumer.engine.connect(to, LaneChoice::Auto);
        let error = again.unwrap_err();
        killing.join().unwrap();
        // The shortest window is 75 ms; a machine that was busy for longer tells nothing.
        if alive.elapsed() > Duration::from_millis(50) {
            continue;
        }
        let ConnectError::BackingOff { last, .. } = error else {
            panic!("{error}");
        };
        by_a_copy |= last.to_string().contains("process");
        if by_a_copy {
            return;
        }
    }
    panic!("no copy has noticed a death");
}

/// C88: producer and consumer are replaced in turns while the life before stands still, in the middle of
/// a read. The new one's greeting is all that ends the old one's state: nobody is dead, and nobody is
/// silent for too long. When the old ones go on they disturb nobody.
fn c88_lives_that_stand_still_are_replaced(lane: &'static str) {
    let patient = Settings {
        suspect: Some(3_600_000),
        dead: Some(3_600_000),
        ..Settings::default()
    };
    let producer = || {
        let mut publisher = publisher_for(lane, "producer", BLOCKS, BYTES);
        publisher.settings = patient;
        publish(&publisher, &[])
    };
    let consumer = || reader("consumer", BLOCKS, BYTES, patient, &[]);
    let (mut child, mut published) = producer();
    let mut reading = consumer();
    let mut before = Vec::new();
    for round in 0..10 {
        reads_all(&mut reading, "p", &published, lane);
        if round % 2 == 0 {
            child.stop();
            begin(&mut reading, "p", 0);
            let next = producer();
            assert_eq!(connect(&mut reading, "p", &next.1, lane).error, "");
            let done = finish(&mut reading, "p");
            let copied = copies(lane) && done.error.is_empty();
            assert!(copied || done.error.contains("replaced by"), "{done:?}");
            assert_eq!(
                (done.wrong_bytes, done.quarantined, done.open),
                (0, (0, 0), 0)
            );
            before.push(std::mem::replace(&mut child, next.0));
            published = next.1;
        } else {
            reading.stop();
            let mut next = consumer();
            assert_eq!(connect(&mut next, "p", &published, lane).error, "");
            until("the end of the life before", || {
                child.ask::<PublisherCounters>("counters").peers_lost == 1
            });
            before.push(std::mem::replace(&mut reading, next));
        }
    }
    for old in &before {
        old.go_on();
    }
    for _ in 0..5 {
        reads_all(&mut reading, "p", &published, lane);
    }
    let counters: PublisherCounters = child.ask("counters");
    assert_eq!((counters.peers_connected, counters.peers_lost), (2, 1));
    for mut old in before {
        old.finish_well();
    }
    reading.finish_well();
    child.finish_well();
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for lane in LANES {
        cases.push(losing_case(
            format!("c88_lives_that_stand_still_are_replaced::{lane}"),
            lane,
            move || c88_lives_that_stand_still_are_replaced(lane),
        ));
        if copies(lane) {
            cases.push(Case::new(
                format!("c86_a_dead_peer_is_kept_while_copies_are_under_way::{lane}"),
                move || c86_a_dead_peer_is_kept_while_copies_are_under_way(lane),
            ));
        }
    }
    cases.push(Case::new(
        "c52_a_process_that_is_gone_is_not_tried_again_at_once",
        c52_a_process_that_is_gone_is_not_tried_again_at_once,
    ));
    cases
}

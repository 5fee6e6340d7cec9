//! Regions that are taken away under the eyes of another process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kvferry_engine::wire::RejectCode;
use kvferry_engine::{ErrorClass, ReadError, TransferError};
use kvferry_tests::harness::{Case, until};
use kvferry_tests::roles::{GivenUp, PublisherCounters, Settings};

use super::support::{
    LANES, SLACK, begin, connect, consumer, finish, has_mapped, publish, publisher_for, reader,
    reads_all, start,
};

const BLOCKS: u32 = 64;
const BYTES: u64 = 16 << 10;

/// A producer gives a region up while it is read in a loop, and its memory is inaccessible from that
/// moment on: an access would kill it, or fail where it is ours. A pool gets another content instead, and
/// is not mapped here any more. With `busy`, the call does not wait, and the region is given up by itself.
fn a_region_is_taken_away_while_it_is_read(lane: &'static str, busy: bool) {
    let (mut producer, published) = publish(&publisher_for(lane, "producer", BLOCKS, BYTES), &[]);
    let consumer = Arc::new(consumer(Settings::default(), BLOCKS, BYTES));
    let peer = consumer.connect(published.description.unpack(), lane);
    let (rounds, others) = (Arc::<AtomicU64>::default(), Arc::<AtomicU64>::default());
    let stop = Arc::<AtomicBool>::default();
    let withdrawn = std::thread::spawn({
        let (consumer, peer, rounds) = (Arc::clone(&consumer), peer.clone(), Arc::clone(&rounds));
        move || {
            loop {
                match consumer.start(&peer, 0, SLACK) {
                    Ok(transfer) => match transfer.wait(SLACK * 2).unwrap() {
                        Ok(_) => assert_eq!(consumer.wrong(0, true), 0),
                        Err(error) => {
                            assert_eq!(error.class(), ErrorClass::Rejected, "{error}");
                            let TransferError::Rejected { code, .. } = error else {
                                panic!("{error}");
                            };
                            assert_eq!(code, RejectCode::Withdrawn);
                        }
                    },
                    Err(error) => return error,
                }
                consumer.poison(0);
                rounds.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    let other = std::thread::spawn({
        let (consumer, peer) = (Arc::clone(&consumer), peer);
        let (others, stop) = (Arc::clone(&others), Arc::clone(&stop));
        move || {
            while !stop.load(Ordering::Relaxed) {
                consumer.reads(&peer, 1);
                others.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    until("some reads", || {
        rounds.load(Ordering::Relaxed) > 10 && others.load(Ordering::Relaxed) > 10
    });
    let mapped = || {
        published
            .pool
            .is_some_and(|pool| has_mapped(std::process::id(), pool))
    };
    assert_eq!(mapped(), lane == "mapped");
    if busy {
        let given_up: GivenUp = producer.ask("deregister 0");
        assert!(
            given_up.error.contains("busy") && given_up.error.contains("peer consumer"),
            "{}",
            given_up.error
        );
        let settled: GivenUp = producer.ask("settle");
        assert_eq!(settled.error, "");
    } else {
        let given_up: GivenUp = producer.ask("deregister 60000");
        assert_eq!(given_up.error, "");
    }
    assert!(!mapped(), "the region was given up, and is mapped here");
    let error = withdrawn.join().unwrap();
    assert!(
        matches!(
            error,
            ReadError::Withdrawn {
                region: 0,
                table: 0
            }
        ),
        "{error}"
    );
    let before = others.load(Ordering::Relaxed);
    until("more reads of what stays", || {
        others.load(Ordering::Relaxed) > before + 10
    });
    stop.store(true, Ordering::Relaxed);
    other.join().unwrap();
    // The description still names what is gone, and the lane does for the rest.
    let peer = consumer.connect(published.description.unpack(), lane);
    consumer.reads(&peer, 1);
    assert_eq!(consumer.wrong(0, false), 0, "nothing is written any more");
    assert!(peer.gone().is_none());
    consumer.is_quiet();
    let counters: PublisherCounters = producer.ask("counters");
    assert_eq!((counters.peers_lost, counters.quarantined_regions), (0, 0));
    producer.finish_well();
}

/// A consumer that is stopped does not answer: `deregister` ends by its timeout, the consumer is
/// disconnected by the limit, and the region is given up then.
fn a_stopped_consumer_holds_a_region_until_the_limit(lane: &'static str, in_flight: bool) {
    let blocks = if in_flight { 2048 } else { BLOCKS };
    let mut publisher = publisher_for(lane, "producer", blocks, BYTES);
    publisher.settings.withdraw = Some(1500);
    let (mut producer, published) = publish(&publisher, &[]);
    let hasty = Settings {
        ping: Some(100),
        suspect: Some(500),
        dead: Some(500),
        ..Settings::default()
    };
    let mut stopped = reader("stopped", blocks, BYTES, hasty, &[]);
    reads_all(&mut stopped, "p", &published, lane);
    let pid = stopped.pid();
    let mapped = || published.pool.is_some_and(|pool| has_mapped(pid, pool));
    assert_eq!(mapped(), lane == "mapped");
    if in_flight {
        begin(&mut stopped, "p", 0);
    }
    stopped.stop();
    let given_up: GivenUp = producer.ask("deregister 200");
    assert!(
        given_up.error.contains("peer stopped"),
        "{}",
        given_up.error
    );
    assert!(given_up.elapsed_ms >= 200, "{given_up:?}");
    assert!(u128::from(given_up.elapsed_ms) < SLACK.as_millis());
    let settled: GivenUp = producer.ask("settle");
    assert!(u128::from(settled.elapsed_ms) < 1500 + SLACK.as_millis());
    let counters: PublisherCounters = producer.ask("counters");
    assert_eq!((counters.peers_lost, counters.quarantined_regions), (1, 0));
    // It goes on, finds itself disconnected, and reads what is left.
    stopped.go_on();
    if in_flight {
        let done = finish(&mut stopped, "p");
        // What was in the socket when it was stopped may have been all.
        if !done.error.is_empty() {
            assert_eq!((done.quarantined, done.open), ((0, 0), 0));
        }
        assert_eq!(done.wrong_bytes, 0);
    }
    // The goodbye tells it, or, where that found no room in the socket, our silence.
    until("a read of what is left", || {
        connect(&mut stopped, "p", &published, lane)
            .error
            .is_empty()
            && {
                let started = start(&mut stopped, "p", 1);
                let done = finish(&mut stopped, "p");
                assert_eq!(done.wrong_bytes, 0);
                started.error.is_empty() && done.error.is_empty()
            }
    });
    let started = start(&mut stopped, "p", 0);
    assert!(
        started.error.contains("withdrawn region 0"),
        "{}",
        started.error
    );
    assert!(!mapped(), "the region was given up, and is mapped there");
    stopped.finish_well();
    producer.finish_well();
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for lane in LANES {
        for (name, busy) in [("waited_for", false), ("busy", true)] {
            cases.push(Case::new(
                format!("a_region_is_taken_away_while_it_is_read::{lane}::{name}"),
                move || a_region_is_taken_away_while_it_is_read(lane, busy),
            ));
        }
        cases.push(Case::new(
            format!("a_stopped_consumer_holds_a_region_until_the_limit::{lane}"),
            move || a_stopped_consumer_holds_a_region_until_the_limit(lane, false),
        ));
    }
    cases.push(Case::new(
        "a_stopped_consumer_holds_a_region_until_the_limit::served::in_flight",
        || a_stopped_consumer_holds_a_region_until_the_limit("served", true),
    ));
    cases
}

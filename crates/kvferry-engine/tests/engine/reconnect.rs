//! Peers that are tried again, and peers that have gone silent.

use std::time::{Duration, Instant};

use kvferry_engine::wire::Incarnation;
use kvferry_engine::{
    BlockPair, ConnectError, Engine, EngineConfig, ErrorClass, Lane, LaneChoice, TransferError,
};

use crate::support::*;

/// Windows that no test reaches the end of by itself.
fn patient(name: &str) -> EngineConfig {
    let mut config = config(name);
    config.reconnect_backoff_min = PATIENCE;
    config.reconnect_backoff_max = PATIENCE;
    config
}

fn backs_off(error: &ConnectError, because: &str) {
    let ConnectError::BackingOff {
        peer,
        retry_in,
        last,
    } = error
    else {
        panic!("{error}");
    };
    assert!(peer.starts_with("producer"), "{peer}");
    assert!(*retry_in <= PATIENCE);
    assert!(last.to_string().contains(because), "{last}");
}

#[test]
fn an_unreachable_peer_is_not_tried_again_at_once_and_a_new_life_is() {
    for kind in kinds() {
        let consumer = start(&kind, Engine::builder(patient("consumer")));
        let producer = engine(&kind, "producer");
        let gone = producer.describe().unwrap();
        producer.shutdown(PATIENCE).unwrap();
        let error = consumer
            .connect(gone.clone(), LaneChoice::Auto)
            .unwrap_err();
        // Over UCX a broken connection may show only later.
        let first = matches!(
            error,
            ConnectError::Unreachable { .. } | ConnectError::Lost { .. }
        );
        assert!(first, "{error}");
        let started = Instant::now();
        for _ in 0..100 {
            let error = consumer
                .connect(gone.clone(), LaneChoice::Auto)
                .unwrap_err();
            backs_off(&error, "peer producer");
        }
        assert!(started.elapsed() < PATIENCE, "told at once");
        // The restarted engine is somebody else.
        let again = engine(&kind, "producer");
        let peer = connect(&consumer, &again, Lane::Served);
        assert!(peer.gone().is_none());
        // A success forgets the failures: the old life is tried, and fails, anew.
        let error = consumer.connect(gone, LaneChoice::Auto).unwrap_err();
        assert!(!matches!(error, ConnectError::BackingOff { .. }), "{error}");
    }
}

#[test]
fn a_peer_that_does_not_answer_backs_off_until_it_comes_by_itself() {
    let kind = loopback();
    let mut hasty = patient("consumer");
    hasty.connect_timeout = Duration::from_millis(50);
    let consumer = start(&kind, Engine::builder(hasty));
    let (service, parked) = park();
    let producer = start(
        &kind,
        Engine::builder(config("producer")).service(7, service),
    );
    let description = producer.describe().unwrap();
    parked.park(&producer);
    let error = consumer
        .connect(description.clone(), LaneChoice::Auto)
        .unwrap_err();
    assert!(matches!(error, ConnectError::NoAnswer { .. }), "{error}");
    let error = consumer
        .connect(description.clone(), LaneChoice::Auto)
        .unwrap_err();
    backs_off(&error, "did not answer");
    // Who asks the peer for the greeting of another life is not kept waiting either.
    let mut other_life = description.clone();
    other_life.incarnation = Incarnation::random().unwrap();
    let error = consumer.connect(other_life, LaneChoice::Auto).unwrap_err();
    assert!(matches!(error, ConnectError::NoAnswer { .. }), "{error}");
    parked.go();
    // It greets us: it is there, whatever our attempts came to.
    connect(&producer, &consumer, Lane::Served);
    let peer = consumer.connect(description, LaneChoice::Auto).unwrap();
    assert!(peer.gone().is_none());
}

/// A refusal is an answer: nothing is kept from asking again.
#[test]
fn a_refusal_does_not_back_off() {
    let kind = loopback();
    let consumer = start(&kind, Engine::builder(patient("consumer")));
    let producer = engine(&kind, "producer");
    let mut stale = producer.describe().unwrap();
    stale.incarnation = Incarnation::random().unwrap();
    for _ in 0..2 {
        let error = consumer
            .connect(stale.clone(), LaneChoice::Auto)
            .unwrap_err();
        assert!(matches!(error, ConnectError::Refused { .. }), "{error}");
    }
}

/// Silence makes a peer suspect: what is in flight fails, new transfers fail at once, both say that it
/// stalled, and the handle and the gauge show it. A sign of life ends it.
#[test]
fn a_suspect_peer_is_visible_and_fails_transfers_at_once() {
    for lane in [Lane::Served, Lane::Native] {
        let kind = loopback();
        let mut nervous = config("consumer");
        nervous.ping_interval = Duration::from_millis(20);
        nervous.suspect_after = Duration::from_millis(200);
        nervous.dead_after = Duration::from_secs(3600);
        let consumer = side(start(&kind, Engine::builder(nervous)), 1, 8, 64, 0);
        let (service, parked) = park();
        let builder = Engine::builder(config("producer")).service(7, service);
        let producer = side(start(&kind, builder), 1, 8, 64, 0);
        producer.fill();
        let peer = connect(&consumer.engine, &producer.engine, lane);
        let tables = with_tables(&consumer, &peer);
        let suspects = || consumer.engine.counters().peers_suspect;
        assert!(!peer.is_suspect());
        assert_eq!(suspects(), 0);
        parked.park(&producer.engine);
        let early =
            (lane == Lane::Served).then(|| peer.read(&tables, &[BlockPair::new(0, 0)]).unwrap());
        until("the suspicion", || peer.is_suspect());
        assert_eq!(suspects(), 1);
        if let Some(early) = early {
            let error = early.wait(PATIENCE).unwrap().unwrap_err();
            assert!(matches!(error, TransferError::Stalled { .. }), "{error}");
        }
        let before = consumer.engine.counters().ucx_operations;
        for _ in 0..100 {
            let late = peer.read(&tables, &[BlockPair::new(1, 1)]).unwrap();
            let error = late.wait(PATIENCE).unwrap().unwrap_err();
            assert_eq!(error.class(), ErrorClass::Peer);
            let TransferError::Stalled {
                done: 0, waited, ..
            } = error
            else {
                panic!("{error}");
            };
            assert!(waited >= Duration::from_millis(200), "{waited:?}");
        }
        // Nothing of them was sent; pings are.
        let sent = consumer.engine.counters().ucx_operations - before;
        assert!(sent < 100, "{sent} operations");
        assert!(peer.gone().is_none(), "suspect, not lost");
        parked.go();
        until("the sign of life", || !peer.is_suspect());
        assert_eq!(suspects(), 0);
        let read = peer.read(&tables, &[BlockPair::new(2, 2)]).unwrap();
        assert_eq!(read.wait(PATIENCE).unwrap().unwrap().bytes, 64);
        assert_eq!(consumer.block(0, 2), producer.block(0, 2));
        // A suspect that is lost is not suspect any more.
        parked.park(&producer.engine);
        until("the suspicion", || peer.is_suspect());
        peer.disconnect();
        until("the end", || peer.gone().is_some());
        assert_eq!(suspects(), 0);
        parked.go();
    }
}

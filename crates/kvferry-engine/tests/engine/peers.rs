//! Greetings, lives, lanes, the end.

use std::time::Duration;

use kvferry_engine::wire::EngineId;
use kvferry_engine::{
    BlockPair, ConnectError, Engine, EngineConfig, HostPool, Lane, LaneChoice, LoopbackFabric,
    LoopbackNetwork, ShareSocket, TableSpec, TransferError,
};

use crate::support::*;

#[test]
fn a_new_life_at_an_old_address_refuses_the_old_description() {
    for kind in kinds() {
        let consumer = engine(&kind, "consumer");
        let producer = engine(&kind, "producer");
        // The address of one engine in the description of another life: what a reused port is.
        let mut stale = producer.describe().unwrap();
        let other = engine(&kind, "stranger");
        stale.addresses = other.describe().unwrap().addresses;
        let error = consumer.connect(stale, LaneChoice::Auto).unwrap_err();
        assert!(matches!(error, ConnectError::Refused { .. }), "{error}");
        let text = error.to_string();
        assert!(
            text.contains("stranger") && text.contains("producer"),
            "{text}"
        );
        // The right one still works, also after the refusal.
        let peer = consumer
            .connect(producer.describe().unwrap(), LaneChoice::Auto)
            .unwrap();
        assert!(peer.gone().is_none());
    }
}

/// C52: a description of a life that has ended, found by somebody who is late, costs the life that is
/// connected nothing.
#[test]
fn c52_an_old_description_does_not_end_the_life_that_is_connected() {
    for kind in kinds() {
        let consumer = side(engine(&kind, "consumer"), 1, 8, 64, 0);
        let before = engine(&kind, "producer");
        let old = before.describe().unwrap();
        before.shutdown(PATIENCE).unwrap();
        let producer = side(engine(&kind, "producer"), 1, 8, 64, 0);
        producer.fill();
        let peer = connect(&consumer.engine, &producer.engine, Lane::Served);
        for block in 0..8 {
            let late = consumer.engine.connect(old.clone(), LaneChoice::Auto);
            assert!(late.is_err());
            assert_eq!(peer.gone(), None);
            let tables = with_tables(&consumer, &peer);
            let transfer = peer.read(&tables, &[BlockPair::new(block, block)]).unwrap();
            transfer.wait(PATIENCE).unwrap().unwrap();
            assert_eq!(consumer.block(0, block), producer.block(0, block));
        }
        let counters = consumer.engine.counters();
        assert_eq!((counters.peers_connected, counters.peers_lost), (1, 0));
        // Whoever answers is there, and the life before is not.
        let next = engine(&kind, "producer");
        let again = connect(&consumer.engine, &next, Lane::Served);
        assert!(peer.gone().is_some() && again.gone().is_none());
        until("the end of what was before", || {
            consumer.engine.counters().connections_held == 1
        });
    }
}

#[test]
fn both_sides_may_connect_at_once() {
    for kind in kinds() {
        let (a, b) = (engine(&kind, "a"), engine(&kind, "b"));
        let (to_a, to_b) = (a.describe().unwrap(), b.describe().unwrap());
        let other = {
            let b = b.clone();
            std::thread::spawn(move || b.connect(to_a, LaneChoice::Auto).unwrap())
        };
        let peer = a.connect(to_b.clone(), LaneChoice::Auto).unwrap();
        let back = other.join().unwrap();
        assert_eq!(peer.incarnation(), b.incarnation());
        assert_eq!(back.incarnation(), a.incarnation());
        let again = a.connect(to_b, LaneChoice::Auto).unwrap();
        assert_eq!(again.id(), peer.id(), "connected already");
        assert!(peer.gone().is_none() && back.gone().is_none());
    }
}

#[test]
fn lanes_that_cannot_be_used_are_refused_by_name() {
    for kind in kinds() {
        let mut unshared = config("b");
        unshared.share_socket = ShareSocket::Off;
        let (a, b) = (engine(&kind, "a"), start(&kind, Engine::builder(unshared)));
        for lane in [Lane::Mapped, Lane::Attached] {
            let error = a
                .connect(b.describe().unwrap(), LaneChoice::Pinned(lane))
                .unwrap_err();
            let text = error.to_string();
            assert!(
                text.contains(lane.name()) && text.contains("share_socket is off"),
                "{text}"
            );
        }
        let mut without = EngineConfig::new(EngineId::new("c").unwrap());
        without.allow_emulation = false;
        if matches!(kind, Kind::Ucx) {
            let c = start(&kind, Engine::builder(without));
            let error = c
                .connect(b.describe().unwrap(), LaneChoice::Pinned(Lane::Native))
                .unwrap_err();
            assert!(error.to_string().contains("native"), "{error}");
            let peer = c.connect(b.describe().unwrap(), LaneChoice::Auto).unwrap();
            assert_eq!(peer.lane(), Lane::Served);
        }
    }
}

#[test]
fn connecting_to_nobody_or_oneself_is_an_error() {
    for kind in kinds() {
        let a = engine(&kind, "a");
        let error = a
            .connect(a.describe().unwrap(), LaneChoice::Auto)
            .unwrap_err();
        assert!(error.to_string().contains("this engine's own"), "{error}");
        let b = engine(&kind, "b");
        let gone = b.describe().unwrap();
        b.shutdown(PATIENCE).unwrap();
        let error = a.connect(gone, LaneChoice::Auto).unwrap_err();
        assert!(error.to_string().contains("peer b"), "{error}");
    }
}

#[test]
fn shutdown_ends_transfers_peers_and_handles() {
    for kind in kinds() {
        let producer = side(engine(&kind, "producer"), 1, 8, 64, 0);
        let consumer = side(engine(&kind, "consumer"), 1, 8, 64, 0);
        let peer = connect(&consumer.engine, &producer.engine, Lane::Served);
        let tables = with_tables(&consumer, &peer);
        producer.engine.shutdown(PATIENCE).unwrap();
        // The goodbye, or the next read, makes the end known.
        let outcome = peer.read(&tables, &[BlockPair::new(0, 0)]);
        if let Ok(transfer) = outcome {
            let error = transfer.wait(PATIENCE).unwrap().unwrap_err();
            assert!(matches!(error, TransferError::PeerLost(_)), "{error}");
        }
        assert!(peer.gone().is_some());
        assert!(producer.engine.describe().is_err());
        let memory = HostPool::new(64).unwrap().region().unwrap();
        assert!(producer.engine.register(&memory).is_err());
        assert!(
            producer.engine.shutdown(PATIENCE).is_err(),
            "it has ended before"
        );
        consumer.engine.shutdown(PATIENCE).unwrap();
        assert!(peer.read(&tables, &[BlockPair::new(0, 0)]).is_err());
        assert_eq!(consumer.engine.counters().quarantined_bytes, 0);
    }
}

/// A silent peer is given up after two seconds: long for a busy machine, short for a test.
fn impatient(name: &str) -> kvferry_engine::EngineConfig {
    let mut config = config(name);
    config.ping_interval = Duration::from_millis(50);
    config.suspect_after = Duration::from_secs(1);
    config.dead_after = Duration::from_secs(1);
    config
}

/// Longer than [`impatient`] engines wait for a silent peer.
const LONGER_THAN_PATIENCE: Duration = Duration::from_millis(2500);

/// A consumer that only receives says nothing by itself; it answers pings, and is not given up
/// while a long read streams to it.
#[test]
fn a_read_longer_than_every_patience_with_silence_succeeds() {
    let network = LoopbackNetwork::new();
    let start = |name: &str| {
        let config = impatient(name);
        let network = network.clone();
        // Small segments, so that the read takes its time.
        let builder = Engine::builder(config);
        builder
            .start_on(move || LoopbackFabric::new(&network, 512))
            .unwrap()
    };
    let producer = side(start("producer"), 1, 64, 1 << 20, 0);
    let consumer = side(start("consumer"), 1, 64, 1 << 20, 0);
    let peer = connect(&consumer.engine, &producer.engine, Lane::Served);
    let tables = with_tables(&consumer, &peer);
    let pairs: Vec<BlockPair> = (0..64).map(|n| BlockPair::new(n, 63 - n)).collect();
    let mut longest = Duration::ZERO;
    let mut together = 8;
    // As many at once as it takes to be long enough on this machine.
    while longest < LONGER_THAN_PATIENCE {
        let transfers: Vec<_> = (0..together)
            .map(|_| peer.read(&tables, &pairs).unwrap())
            .collect();
        for transfer in transfers {
            longest = longest.max(transfer.wait(PATIENCE).unwrap().unwrap().elapsed);
        }
        together *= 2;
    }
    assert_eq!(producer.engine.counters().peers_lost, 0);
    assert_eq!(consumer.engine.counters().peers_lost, 0);
    assert!(
        consumer.engine.counters().messages_sent > 9,
        "no ping was answered"
    );
}

/// C40, as far as engines know: what must be equal is compared, and the difference is named.
#[test]
fn c40_engines_that_differ_in_what_must_be_equal_refuse_each_other() {
    for kind in kinds() {
        let with = |name: &str, dtype: &str| {
            let mut config = config(name);
            let entry = ("dtype".to_owned(), dtype.to_owned());
            config
                .compatibility
                .extend([entry, (name.to_owned(), "only here".to_owned())]);
            start(&kind, Engine::builder(config))
        };
        let (a, b, c) = (with("a", "bf16"), with("b", "bf16"), with("c", "fp8"));
        a.connect(b.describe().unwrap(), LaneChoice::Auto).unwrap();
        let text = a
            .connect(c.describe().unwrap(), LaneChoice::Auto)
            .unwrap_err()
            .to_string();
        assert!(
            text.contains("dtype: \"bf16\" here, \"fp8\" at the peer"),
            "{text}"
        );
        // One that does not look is refused by the other side.
        let mut lie = c.describe().unwrap();
        lie.compatibility.clear();
        let error = a.connect(lie, LaneChoice::Auto).unwrap_err();
        assert!(matches!(error, ConnectError::Refused { .. }), "{error}");
        assert!(error.to_string().contains("dtype"), "{error}");
        // The end of the refusals' connections, too, is no loss of a peer.
        c.shutdown(PATIENCE).unwrap();
        assert_eq!(c.counters().peers_lost, 0, "a refused engine was no peer");
    }
}

#[test]
fn a_peer_that_only_listens_is_not_given_up() {
    let kind = loopback();
    let listener = start(
        &kind,
        Engine::builder(impatient("b")).service(7, Box::new(Ignore)),
    );
    let speaker = start(&kind, Engine::builder(impatient("a")));
    let peer = connect(&speaker, &listener, Lane::Served);
    // Longer than it takes to be given up, and never quiet.
    let begin = std::time::Instant::now();
    until("messages for a while", || {
        peer.send(7, vec![1]).unwrap();
        begin.elapsed() > LONGER_THAN_PATIENCE
    });
    assert!(peer.gone().is_none());
}

#[test]
fn a_connection_made_anew_during_a_stream_is_not_taken_for_the_old_one() {
    for kind in kinds() {
        for _ in 0..10 {
            let producer = side(engine(&kind, "producer"), 1, 64, 65_536, 0);
            producer.fill();
            let consumer = side(engine(&kind, "consumer"), 1, 64, 65_536, 0);
            let peer = connect(&consumer.engine, &producer.engine, Lane::Served);
            let tables = with_tables(&consumer, &peer);
            let pairs: Vec<BlockPair> = (0..64).map(|n| BlockPair::new(n, n)).collect();
            let transfer = peer.read(&tables, &pairs).unwrap();
            until("the first bytes", || {
                consumer.engine.counters().served_bytes > 0
            });
            peer.disconnect();
            let again = connect(&consumer.engine, &producer.engine, Lane::Served);
            // Ended one way or the other before the new connection is used.
            let _ = transfer.wait(PATIENCE).unwrap();
            let tables = with_tables(&consumer, &again);
            let read = again.read(&tables, &[BlockPair::new(5, 60)]).unwrap();
            assert_eq!(read.wait(PATIENCE).unwrap().unwrap().bytes, 65_536);
            assert_eq!(consumer.block(0, 5), producer.block(0, 60));
        }
    }
}

/// The peer is ready as soon as it has answered, and may ask before its answer was acted on.
#[test]
fn a_read_right_behind_the_answer_to_a_greeting_is_served() {
    let kind = loopback();
    let (service, a_parked) = park();
    let a = start(&kind, Engine::builder(config("a")).service(7, service));
    let (service, b_parked) = park();
    let b = start(&kind, Engine::builder(config("b")).service(7, service));
    let (a, b) = (side(a, 1, 4, 64, 0), side(b, 1, 4, 64, 0));
    let (to_a, to_b) = (a.engine.describe().unwrap(), b.engine.describe().unwrap());
    b_parked.park(&b.engine);
    let greeting = {
        let a = a.engine.clone();
        std::thread::spawn(move || a.connect(to_b, LaneChoice::Pinned(Lane::Served)))
    };
    until("the greeting", || a.engine.counters().messages_sent == 1);
    a_parked.park(&a.engine);
    b_parked.go();
    until("the answer", || b.engine.counters().peers_connected == 1);
    let peer = b
        .engine
        .connect(to_a, LaneChoice::Pinned(Lane::Served))
        .unwrap();
    let tables = with_tables(&b, &peer);
    let transfer = peer.read(&tables, &[BlockPair::new(0, 0)]).unwrap();
    until("the request", || b.engine.counters().messages_sent == 2);
    a_parked.go();
    greeting.join().unwrap().unwrap();
    assert_eq!(transfer.wait(PATIENCE).unwrap().unwrap().bytes, 64);
}

#[test]
fn tables_added_later_are_read_after_connecting_again() {
    for kind in kinds() {
        let producer = side(engine(&kind, "producer"), 1, 8, 64, 0);
        producer.fill();
        let consumer = side(engine(&kind, "consumer"), 1, 8, 64, 0);
        let first = connect(&consumer.engine, &producer.engine, Lane::Served);
        assert_eq!(first.tables().len(), 1);
        // The second half of the same blocks, as a table of its own.
        let later = TableSpec::dense(64, 4).at(256);
        producer.engine.add_table(&producer._region, later).unwrap();
        let peer = connect(&consumer.engine, &producer.engine, Lane::Served);
        assert_eq!((peer.id(), peer.tables().len()), (first.id(), 2));
        let theirs = peer.tables().nth(1).unwrap();
        let tables = [(consumer.tables[0].clone(), theirs)];
        let read = peer.read(&tables, &[BlockPair::new(0, 3)]).unwrap();
        assert_eq!(read.wait(PATIENCE).unwrap().unwrap().bytes, 64);
        assert_eq!(consumer.block(0, 0), producer.block(0, 7));
    }
}

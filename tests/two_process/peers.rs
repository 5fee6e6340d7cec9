//! Peers that are stopped, killed and replaced.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};

use kvferry_engine::wire::Description;
use kvferry_engine::{ConnectError, LaneChoice, Peer, TransferError};
use kvferry_tests::harness::{Case, Child, PATIENCE, until};
use kvferry_tests::roles::{Published, PublisherCounters, Settings, descriptors};

use super::support::{
    Consumer, LANES, SLACK, begin, consumer, copies, finish, has_mapped, losing_case, publish,
    publisher, publisher_for, reader, reads_all,
};

const BLOCKS: u32 = 64;
const BYTES: u64 = 16 << 10;

fn producer(lane: &str, name: &str) -> (Child, Published) {
    publish(&publisher_for(lane, name, BLOCKS, BYTES), &[])
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

/// Ports that a process listens on.
fn listens_on(child: &Child) -> Vec<u16> {
    let pid = child.pid();
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let inodes: Vec<String> = fds
        .filter_map(|fd| {
            let link = std::fs::read_link(fd.ok()?.path()).ok()?;
            let name = link.to_str()?.strip_prefix("socket:[")?;
            Some(name.trim_end_matches(']').to_owned())
        })
        .collect();
    let table = std::fs::read_to_string(format!("/proc/{pid}/net/tcp")).unwrap();
    let listening = table.lines().filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let is_ours = fields.get(3) == Some(&"0A") && inodes.iter().any(|i| i == fields[9]);
        let port = fields.get(1)?.rsplit_once(':')?.1;
        is_ours.then(|| u16::from_str_radix(port, 16).unwrap())
    });
    listening.collect()
}

/// C83: a producer is killed and another engine comes to listen on its very port: `stranger`, or its
/// own next life. Whoever has the old description is refused before anything moves.
fn c83_another_engine_at_the_same_port(stranger: bool) {
    // UCX takes ports of the range at random: one stays, one is for the probe of the start. Nobody
    // connects to the first engine, as the kernel keeps the ports of ended connections for a minute.
    let first = 20_000 + (std::process::id() % 20_000) as u16 / 16 * 16 + u16::from(stranger) * 8;
    let range = format!("{first}-{}", first + 3);
    let environment = [("UCX_TCP_PORT_RANGE", Some(range.as_str()))];
    // Messages only: one listener.
    let at_port = |name: &str| {
        let mut publisher = publisher(name, BLOCKS, BYTES);
        publisher.settings.no_emulation = true;
        publish(&publisher, &environment)
    };
    let (mut old, published) = at_port("producer");
    let ports = listens_on(&old);
    assert_eq!(ports.len(), 1, "{ports:?}");
    let consumer = consumer(Settings::default(), BLOCKS, BYTES);
    let to_old = published.description.unpack();
    old.kill();
    let name = if stranger { "stranger" } else { "producer" };
    let deadline = Instant::now() + PATIENCE;
    let (mut new, published) = loop {
        assert!(Instant::now() < deadline, "nobody takes port {ports:?}");
        let mut replacement = at_port(name);
        // Among others: a child inherits the listeners of our own UCX.
        if listens_on(&replacement.0).contains(&ports[0]) {
            break replacement;
        }
        replacement.0.kill();
    };
    let lane = LaneChoice::Auto;
    let error = consumer.engine.connect(to_old, lane).unwrap_err();
    assert!(matches!(error, ConnectError::Refused { .. }), "{error}");
    assert!(error.to_string().contains(name), "{error}");
    assert_eq!(consumer.wrong(0, false), 0, "foreign bytes");
    let counters: PublisherCounters = new.ask("counters");
    assert_eq!((counters.bytes_served, counters.peers_connected), (0, 0));
    // Whoever is meant to be there is read.
    let peer = consumer.connect(published.description.unpack(), "served");
    consumer.reads(&peer, 0);
    consumer.is_quiet();
    new.finish_well();
}

/// C83: a producer that was read stands still, or is dead, and its next life is read with the next
/// request: the old state is retired by that, also where nothing has shown that it is of no use.
fn c83_the_next_life_is_read_with_the_next_request(lane: &'static str) {
    let consumer = consumer(Settings::default(), BLOCKS, BYTES);
    let mut before = None::<(Child, Peer)>;
    for life in 1..=6 {
        let (mut child, published) = producer(lane, "producer");
        let peer = consumer.connect(published.description.unpack(), lane);
        if let Some((_stopped, old)) = &before {
            assert!(old.gone().is_some(), "there are two lives");
            assert!(consumer.start(old, 1, SLACK).is_err());
        }
        consumer.reads(&peer, 0);
        let counters = consumer.engine.counters();
        assert_eq!(
            (counters.peers_connected, counters.peers_lost),
            (life, life - 1)
        );
        if life % 3 == 0 {
            child.kill();
        } else {
            child.stop();
        }
        before = Some((child, peer));
    }
    consumer.is_quiet();
}

/// C83: the address of one engine in the description of another.
fn c83_a_description_with_a_strangers_address(lane: &'static str) {
    let (mut wanted, published) = producer(lane, "producer");
    let (mut stranger, other) = producer(lane, "stranger");
    let consumer = consumer(Settings::default(), BLOCKS, BYTES);
    let mut mixed = published.description.unpack();
    mixed.addresses = other.description.unpack().addresses;
    let lane_choice: LaneChoice = lane.parse().unwrap();
    let error = consumer.engine.connect(mixed, lane_choice).unwrap_err();
    assert!(matches!(error, ConnectError::Refused { .. }), "{error}");
    assert!(error.to_string().contains("stranger"), "{error}");
    if copies(lane) {
        // The right engine answers the greeting, and the stranger what it shares.
        let mut mixed = published.description.unpack();
        mixed.unix_socket = other.description.unpack().unix_socket;
        let error = consumer.engine.connect(mixed, lane_choice).unwrap_err();
        let refused = matches!(error, ConnectError::LaneUnavailable { .. });
        assert!(
            refused && error.to_string().contains("incarnation"),
            "{error}"
        );
    }
    for table in [0, 1] {
        assert_eq!(consumer.wrong(table, false), 0);
    }
    let counters: PublisherCounters = stranger.ask("counters");
    assert_eq!((counters.bytes_served, counters.peers_connected), (0, 0));
    let peer = consumer.connect(published.description.unpack(), lane);
    consumer.reads(&peer, 0);
    stranger.finish_well();
    wanted.finish_well();
}

/// C86: producers that die with reads in flight leave nothing behind: no connection, no operation, no
/// byte in quarantine, no descriptor.
fn c86_nothing_is_left_of_dead_peers(lane: &'static str) {
    let consumer = consumer(Settings::default(), BLOCKS, BYTES);
    let mut before = None;
    for round in 0..6 {
        let mut children: Vec<_> = (0..3).map(|n| producer(lane, &format!("p-{n}"))).collect();
        let peers: Vec<_> = children
            .iter()
            .map(|(_, published)| consumer.connect(published.description.unpack(), lane))
            .collect();
        let mut reads = Vec::new();
        for (child, peer) in children.iter().zip(&peers) {
            child.0.stop();
            reads.push(consumer.start(peer, 0, PATIENCE).unwrap());
        }
        for (child, _) in &mut children {
            child.kill();
        }
        for (read, peer) in reads.iter().zip(&peers) {
            match read.wait(PATIENCE).unwrap() {
                Ok(_) => assert!(copies(lane), "read from a process that stood still"),
                Err(error) => assert!(
                    matches!(
                        error,
                        TransferError::PeerLost(_) | TransferError::Operation(_)
                    ),
                    "{error}"
                ),
            }
            until("the loss", || peer.gone().is_some());
            assert!(consumer.start(peer, 1, SLACK).is_err(), "it is gone");
        }
        consumer.is_quiet();
        drop((reads, peers));
        for (_, published) in &children {
            // Asked for what is mapped: of the dead nothing.
            let mapped = || {
                published
                    .pool
                    .is_some_and(|pool| has_mapped(std::process::id(), pool))
            };
            until("the end of the mapping", || !mapped());
        }
        until("the end of the connections", || {
            consumer.engine.counters().connections_held == 0
        });
        let counters = consumer.engine.counters();
        assert_eq!(counters.peers_connected, 3 * (round + 1));
        assert_eq!(counters.peers_lost, 3 * (round + 1));
        drop(children);
        // The first rounds fill caches.
        match before {
            None if round >= 1 => before = Some(descriptors()),
            None => {}
            Some(before) => until("the end of the descriptors", || descriptors() <= before),
        }
    }
}

/// C88: producer and consumer are replaced in turns, each by being killed, in the middle of a read.
fn c88_both_sides_are_replaced_alternately(lane: &'static str) {
    let (mut child, mut published) = producer(lane, "producer");
    let mut consumer = reader("consumer", BLOCKS, BYTES, Settings::default(), &[]);
    for round in 0..10 {
        reads_all(&mut consumer, "p", &published, lane);
        if round % 2 == 0 {
            child.stop();
            begin(&mut consumer, "p", 0);
            child.kill();
            let done = finish(&mut consumer, "p");
            // A copy may have been made before the death.
            assert!(!done.error.is_empty() || copies(lane));
            assert_eq!(
                (done.wrong_bytes, done.quarantined, done.open),
                (0, (0, 0), 0)
            );
            (child, published) = producer(lane, "producer");
        } else {
            // UCX, of either generation, aborts if a peer is killed in the middle of a GET that is
            // emulated for it.
            if lane != "native" {
                child.stop();
                begin(&mut consumer, "p", 0);
            }
            consumer.kill();
            child.go_on();
            consumer = reader("consumer", BLOCKS, BYTES, Settings::default(), &[]);
        }
    }
    reads_all(&mut consumer, "p", &published, lane);
    consumer.finish_well();
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

/// C52: a producer is killed and restarted 50 times while two threads read from whatever life there
/// is. Each time the consumer finds the next one, and every byte of every success is right. Somebody who
/// still has the description of a dead life does the next one no harm.
fn c52_a_producer_restarted_fifty_times_under_load(lane: &'static str) {
    const LIVES: usize = 50;
    let choice: LaneChoice = lane.parse().unwrap();
    // Nobody waits for silence: the connection tells of the death.
    let patient = Settings {
        suspect: Some(3_600_000),
        dead: Some(3_600_000),
        ..Settings::default()
    };
    let consumer = Arc::new(consumer(patient, BLOCKS, BYTES));
    let current = Arc::new(Mutex::new(None::<Description>));
    let stop = Arc::<AtomicBool>::default();
    // Successes of each thread in the life that is current.
    let successes = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
    let threads = [0, 1].map(|table: usize| {
        let (consumer, current) = (Arc::clone(&consumer), Arc::clone(&current));
        let (stop, successes) = (Arc::clone(&stop), Arc::clone(&successes));
        std::thread::spawn(move || {
            let mut failures = 0_u64;
            while !stop.load(Ordering::Relaxed) {
                let Some(to) = current.lock().unwrap().clone() else {
                    std::thread::yield_now();
                    continue;
                };
                let Ok(peer) = consumer.engine.connect(to.clone(), choice) else {
                    std::thread::sleep(Duration::from_millis(1));
                    continue;
                };
                while let Ok(transfer) = consumer.start(&peer, table, PATIENCE) {
                    if transfer.wait(PATIENCE * 2).unwrap().is_err() {
                        failures += 1;
                        consumer.poison(table);
                        break;
                    }
                    assert_eq!(consumer.wrong(table, true), 0);
                    let now = current.lock().unwrap();
                    if now
                        .as_ref()
                        .is_some_and(|now| now.incarnation == to.incarnation)
                    {
                        successes[table].fetch_add(1, Ordering::Relaxed);
                    }
                }
            }
            failures
        })
    });
    let mut before = None;
    for _ in 0..LIVES {
        let (mut child, published) = producer(lane, "producer");
        for count in &*successes {
            count.store(0, Ordering::Relaxed);
        }
        *current.lock().unwrap() = Some(published.description.unpack());
        until("reads from this life", || {
            successes
                .iter()
                .all(|count| count.load(Ordering::Relaxed) > 2)
        });
        let to = published.description.unpack();
        if let Some(late) = before.replace(to.clone()) {
            let peer = consumer.engine.connect(to, choice).unwrap();
            assert!(consumer.engine.connect(late, choice).is_err());
            assert_eq!(peer.gone(), None);
        }
        child.kill();
    }
    stop.store(true, Ordering::Relaxed);
    let failures: u64 = threads
        .into_iter()
        .map(|thread| thread.join().unwrap())
        .sum();
    // A copy takes so little of a round that none may have been under way.
    assert!(
        failures > 0 || copies(lane),
        "no read was in flight at any death"
    );
    consumer.is_quiet();
    let counters = consumer.engine.counters();
    assert_eq!(counters.peers_connected, LIVES as u64);
    until("the last loss", || {
        let counters = consumer.engine.counters();
        (counters.peers_lost, counters.connections_held) == (LIVES as u64, 0)
    });
}

/// C51: operations on an endpoint whose peer was killed, before and after that is known: each is an
/// error, and the process goes on.
fn c51_operations_on_a_failed_endpoint_are_errors(lane: &'static str) {
    let consumer = Arc::new(consumer(Settings::default(), BLOCKS, BYTES));
    let (mut child, published) = producer(lane, "producer");
    let peer = consumer.connect(published.description.unpack(), lane);
    consumer.reads(&peer, 0);
    let (told, go) = mpsc::channel();
    let reading = std::thread::spawn({
        let (consumer, peer) = (Arc::clone(&consumer), peer.clone());
        move || {
            let mut transfers = Vec::new();
            told.send(()).unwrap();
            // Without a pause, over the death and beyond.
            loop {
                let _ = peer.send(9, vec![1; 4096]);
                match consumer.start(&peer, 0, PATIENCE) {
                    Ok(transfer) => transfers.push(transfer),
                    Err(error) => return (transfers, error),
                }
                std::thread::yield_now();
            }
        }
    });
    go.recv().unwrap();
    child.kill();
    let (transfers, refused) = reading.join().unwrap();
    assert!(refused.to_string().contains("gone"), "{refused}");
    for transfer in transfers {
        if let Err(error) = transfer.wait(PATIENCE).unwrap() {
            assert!(
                matches!(
                    error,
                    TransferError::PeerLost(_) | TransferError::Operation(_)
                ),
                "{error}"
            );
        }
    }
    for _ in 0..100 {
        assert!(peer.send(9, vec![1]).is_err());
        assert!(consumer.start(&peer, 0, PATIENCE).is_err());
    }
    peer.disconnect();
    consumer.is_quiet();
    let (mut child, published) = producer(lane, "producer");
    let peer = consumer.connect(published.description.unpack(), lane);
    consumer.reads(&peer, 1);
    child.finish_well();
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    type Run = fn(&'static str);
    let by_lane: [(&str, bool, Run); 6] = [
        (
            "c83_the_next_life_is_read_with_the_next_request",
            false,
            c83_the_next_life_is_read_with_the_next_request,
        ),
        (
            "c83_a_description_with_a_strangers_address",
            false,
            c83_a_description_with_a_strangers_address,
        ),
        (
            "c86_nothing_is_left_of_dead_peers",
            false,
            c86_nothing_is_left_of_dead_peers,
        ),
        (
            "c88_both_sides_are_replaced_alternately",
            true,
            c88_both_sides_are_replaced_alternately,
        ),
        (
            "c52_a_producer_restarted_fifty_times_under_load",
            false,
            c52_a_producer_restarted_fifty_times_under_load,
        ),
        (
            "c51_operations_on_a_failed_endpoint_are_errors",
            false,
            c51_operations_on_a_failed_endpoint_are_errors,
        ),
    ];
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
        for &(name, loses, run) in by_lane.iter().chain(own) {
            let name = format!("{name}::{lane}");
            cases.push(if loses {
                losing_case(name, lane, move || run(lane))
            } else {
                Case::new(name, move || run(lane))
            });
        }
    }
    for (name, stranger) in [("stranger", true), ("next_life", false)] {
        cases.push(Case::new(
            format!("c83_another_engine_at_the_same_port::{name}"),
            move || c83_another_engine_at_the_same_port(stranger),
        ));
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

//! Peers that are killed and replaced.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};

use kvferry_engine::wire::Description;
use kvferry_engine::{
    BlockPair, ConnectError, ErrorClass, LaneChoice, Peer, ReadError, TransferError,
};
use kvferry_tests::harness::{Case, Child, PATIENCE, until};
use kvferry_tests::roles::{Published, PublisherCounters, Settings, descriptors};

use super::support::{
    LANES, SLACK, begin, consumer, copies, finish, has_mapped, losing_case, publish, publisher,
    publisher_for, reader, reads_all,
};

const BLOCKS: u32 = 64;
const BYTES: u64 = 16 << 10;

fn producer(lane: &str, name: &str) -> (Child, Published) {
    publish(&publisher_for(lane, name, BLOCKS, BYTES), &[])
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

/// C73: what one peer described, its keys with it, is of no use with another, or with its own next life:
/// a typed error, and nothing moves. Both peers go on.
fn c73_a_peers_tables_belong_to_it_alone(lane: &'static str) {
    let (mut one, first) = producer(lane, "one");
    let (mut other, second) = producer(lane, "other");
    let consumer = consumer(Settings::default(), BLOCKS, BYTES);
    let first = consumer.connect(first.description.unpack(), lane);
    let second = consumer.connect(second.description.unpack(), lane);
    consumer.reads(&first, 0);
    consumer.poison(0);
    let mixed = |peer: &Peer, of: &Peer| {
        let theirs = of.tables().next().unwrap();
        let pairs = [BlockPair::new(0, 0)];
        peer.read(&[(consumer.tables[0].clone(), theirs)], &pairs)
    };
    for (peer, of) in [(&second, &first), (&first, &second)] {
        let error = mixed(peer, of).unwrap_err();
        let ReadError::StaleTable { table, peer: named } = error else {
            panic!("another error: {error}");
        };
        assert_eq!((table, named), (of.incarnation(), peer.incarnation()));
        assert_eq!(error.class(), ErrorClass::Rejected);
    }
    one.kill();
    let (mut again, next) = producer(lane, "one");
    let next = consumer.connect(next.description.unpack(), lane);
    assert!(matches!(
        mixed(&next, &first),
        Err(ReadError::StaleTable { .. })
    ));
    assert_eq!(consumer.wrong(0, false), 0, "something was moved");
    consumer.reads(&second, 0);
    consumer.reads(&next, 1);
    consumer.is_quiet();
    other.finish_well();
    again.finish_well();
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    type Run = fn(&'static str);
    let by_lane: [(&str, bool, Run); 7] = [
        (
            "c73_a_peers_tables_belong_to_it_alone",
            false,
            c73_a_peers_tables_belong_to_it_alone,
        ),
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
    for lane in LANES {
        for &(name, loses, run) in &by_lane {
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
    cases
}

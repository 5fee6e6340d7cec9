//! `verify`: bytes that are not the producer's are never accepted.

use std::time::Duration;

use kvferry_connector::contract::{Finish, LoadFailure, Received, SchedulerConnector};
use kvferry_connector::remote::Role;
use kvferry_engine::LoopbackNetwork;
use kvferry_engine::fabric::{Fault, FaultControl, FaultRates};

use crate::bench::{Fabric, PATIENCE, Request, Setup, Side, config, connected, until};

/// A producer, and a consumer whose reads may lie.
fn sides(verify: bool, control: &FaultControl) -> (Side, Side) {
    let network = LoopbackNetwork::new();
    let side = |name, role, fabric: Fabric| {
        let mut config = config(name, role);
        config.verify = verify && role == Role::Consumer;
        config.block_tokens = vec![16, 32];
        let setup = Setup {
            fabric: &|_| fabric.clone(),
            block_bytes: 512,
            tune: |_| {},
        };
        Side::with(&config, &setup)
    };
    let producer = side("prefill", Role::Producer, Fabric::Loopback(network.clone()));
    let consumer = side(
        "decode",
        Role::Consumer,
        Fabric::Faulty(network, control.clone()),
    );
    (producer, consumer)
}

fn faithful() -> FaultControl {
    FaultControl::new(1, FaultRates::none()).unwrap()
}

/// Reads and copies that say that they have moved something and have not.
fn lies() -> FaultRates {
    FaultRates::none()
        .with(Fault::ReadEmpty, 1000)
        .with(Fault::CopyEmpty, 1000)
        .with(Fault::SegmentCorrupted, 1000)
}

/// Two groups' blocks, prefilled and loaded, with these faults while they are read.
fn load(
    producer: &mut Side,
    consumer: &mut Side,
    rates: Option<(&FaultControl, FaultRates)>,
) -> Received {
    let prefilled = Request::export("p", 64);
    producer.scheduler.on_new_request(&prefilled.view());
    producer.step(&[&prefilled]);
    producer.write_in(0, &[2, 3, 4, 9], 1);
    producer.write_in(1, &[5, 6], 50);
    let params = producer.export(&prefilled, &[vec![2, 3, 4, 9], vec![5, 6]]);
    producer.step(&[]);
    let request = Request::new("d", 64, Some(params));
    connected(producer, consumer, &request);
    if let Some((control, rates)) = rates {
        control.set_rates(rates);
    }
    consumer.alloc_groups(&request, &[vec![11, 12, 13, 14], vec![21, 20]], 0, 64);
    let received = consumer.received(&request);
    producer.sent(&prefilled);
    received
}

fn sent_checksums(producer: &Side) -> u64 {
    producer.workers[0].loader_stats().checksums_sent
}

#[test]
fn right_bytes_are_compared_and_accepted() {
    let control = faithful();
    let (mut producer, mut consumer) = sides(true, &control);
    let received = load(&mut producer, &mut consumer, None);
    assert_eq!(received.failure, None);
    assert_eq!(consumer.wrong_in(0, &[11, 12, 13, 14], 1), 0);
    assert_eq!(consumer.wrong_in(1, &[21, 20], 50), 0);
    let stats = consumer.workers[0].loader_stats();
    assert_eq!((stats.verified, stats.corrupt, stats.loaded), (6, 0, 1));
    assert_eq!(stats.verifying.count(), 1);
    assert_eq!(sent_checksums(&producer), 6);
}

#[test]
fn wrong_bytes_are_a_failed_load_and_the_lease_is_released() {
    let control = faithful();
    let (mut producer, mut consumer) = sides(true, &control);
    let received = load(&mut producer, &mut consumer, Some((&control, lies())));
    assert_eq!(received.failure, Some(LoadFailure::Corrupt));
    assert_eq!(received.failed.len(), 6);
    let stats = consumer.workers[0].loader_stats();
    assert_eq!((stats.verified, stats.loaded, stats.failed), (6, 0, 1));
    // Some of them are right where only parts of the stream were damaged.
    assert!(stats.corrupt >= 1, "{stats:?}");
    assert_eq!(consumer.scheduler.stats().failed.corrupt, 1);
    // By the consumer, not by the clock.
    let stats = producer.scheduler.stats();
    assert_eq!((stats.parts_released, stats.parts_expired), (1, 0));
}

/// The control: the same lies count as loaded without the comparison, and nobody asks.
#[test]
fn without_verify_nothing_is_compared() {
    let control = faithful();
    let (mut producer, mut consumer) = sides(false, &control);
    let received = load(&mut producer, &mut consumer, Some((&control, lies())));
    assert_eq!(received.failure, None);
    let wrong = consumer.wrong_in(0, &[11, 12, 13, 14], 1) + consumer.wrong_in(1, &[21, 20], 50);
    assert!(wrong > 0, "the reads did not lie");
    assert_eq!(consumer.workers[0].loader_stats().verified, 0);
    assert_eq!(sent_checksums(&producer), 0);
}

/// A producer with faults and a consumer that verifies.
fn faulty_producer(control: &FaultControl, read_timeout: Duration) -> (Side, Side) {
    let network = LoopbackNetwork::new();
    let mut settings = config("decode", Role::Consumer);
    settings.verify = true;
    settings.read_timeout = read_timeout;
    let consumer = Side::new(&settings, &Fabric::Loopback(network.clone()));
    let producer = Side::new(
        &config("prefill", Role::Producer),
        &Fabric::Faulty(network, control.clone()),
    );
    (producer, consumer)
}

/// A request whose blocks 2 and 3 are held for another one, which is connected and has asked for nothing yet.
fn offered(producer: &mut Side, consumer: &mut Side) -> (Request, Request) {
    let prefilled = Request::export("p", 32);
    let params = producer.prefill(&prefilled, &[2, 3], 1);
    producer.step(&[]);
    let request = Request::new("d", 32, Some(params));
    connected(producer, consumer, &request);
    (prefilled, request)
}

/// A producer that falls silent when it is asked costs the load, by its deadline, and not its other requests.
#[test]
fn a_producer_that_does_not_answer_costs_the_load() {
    let control = faithful();
    let (mut producer, mut consumer) = faulty_producer(&control, Duration::from_millis(600));
    let (prefilled, request) = offered(&mut producer, &mut consumer);
    // What the producer sends is lost: pings, answers, checksums.
    control.set_rates(FaultRates::none().with(Fault::SendLost, 1000));
    consumer.alloc(&request, &[8, 9], 0, 32);
    let received = consumer.received(&request);
    assert!(
        matches!(
            received.failure,
            Some(LoadFailure::Unconfirmed | LoadFailure::Peer | LoadFailure::Stalled)
        ),
        "{received:?}"
    );
    control.set_rates(FaultRates::none());
    // The release is asked for again until it is answered.
    producer.sent(&prefilled);
    // What was lost is missed by the connection, which ends of it.
    let engine = consumer.workers[0].engine().clone();
    until("the connection's end", || engine.counters().peers_lost > 0);
    let (late, blocks) = (Request::export("q", 32), [4, 5]);
    let params = producer.prefill(&late, &blocks, 9);
    producer.step(&[]);
    let request = Request::new("e", 32, Some(params));
    assert_eq!(consumer.admit(&request, &[10, 11], 0), 32);
    assert_eq!(consumer.received(&request).failure, None);
    assert_eq!(consumer.wrong(&[10, 11], 9), 0);
}

/// An abort while checksums are waited for ends the load at once, and its lease.
#[test]
fn c25_an_abort_does_not_wait_for_checksums() {
    let control = faithful();
    let (mut producer, mut consumer) = faulty_producer(&control, Duration::from_secs(10));
    let (prefilled, request) = offered(&mut producer, &mut consumer);
    // Nothing leaves the producer any more; the read itself needs nothing of it.
    control.stall();
    consumer.alloc(&request, &[8, 9], 0, 32);
    consumer.step(&[]);
    until("the blocks", || {
        consumer.workers[0].loader_stats().blocks == 2
    });
    consumer.finish(&request, &[8, 9], Finish::Aborted);
    let received = consumer.received(&request);
    assert_eq!(received.failure, Some(LoadFailure::Aborted));
    control.release();
    producer.sent(&prefilled);
    let leases = producer.workers[0].lease_snapshot(PATIENCE).unwrap();
    assert_eq!((leases.counters.released, leases.counters.expired), (1, 0));
}

/// Both ranks compare with the rank that they have read from, over UCX.
#[test]
fn each_rank_compares_its_own_blocks_over_ucx() {
    let side = |name, role| {
        let mut config = config(name, role);
        config.ranks = 2;
        config.verify = true;
        Side::new(&config, &Fabric::Ucx)
    };
    let mut producer = side("prefill", Role::Producer);
    let mut consumer = side("decode", Role::Consumer);
    let prefilled = Request::export("p", 64);
    let params = producer.prefill(&prefilled, &[2, 3, 4, 5], 1);
    producer.step(&[]);
    let request = Request::new("d", 64, Some(params));
    assert_eq!(consumer.admit(&request, &[8, 9, 10, 12], 0), 64);
    assert_eq!(consumer.received(&request).failure, None);
    assert_eq!(consumer.wrong(&[8, 9, 10, 12], 1), 0);
    for rank in 0..2 {
        let stats = consumer.workers[rank].loader_stats();
        assert_eq!((stats.verified, stats.corrupt), (4, 0), "rank {rank}");
        let sent = producer.workers[rank].loader_stats().checksums_sent;
        assert_eq!(sent, 4, "rank {rank}");
    }
}

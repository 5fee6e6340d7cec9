//! Faults between the two sides: whatever goes wrong, a load is reported once, what counts as loaded has
//! the right bytes, and nothing is left.

use std::collections::HashMap;
use std::time::Duration;

use kvferry_connector::contract::{LoadFailure, SchedulerConnector};
use kvferry_connector::lease::{BorrowConfig, LeaseConfig};
use kvferry_connector::remote::{RemoteConfig, Role};
use kvferry_engine::LoopbackNetwork;
use kvferry_engine::fabric::{Fault, FaultControl, FaultRates};

use crate::bench::{Fabric, PATIENCE, Request, Side, config, connected};

fn control(seed: u64, rates: FaultRates) -> FaultControl {
    FaultControl::new(seed, rates).unwrap()
}

/// A producer without faults and a consumer with them.
fn faulty_consumer(control: &FaultControl, lease: Duration) -> (Side, Side) {
    let network = LoopbackNetwork::new();
    let settings = |name, role| RemoteConfig {
        lease: LeaseConfig {
            duration: lease,
            ..LeaseConfig::default()
        },
        ..config(name, role)
    };
    let producer = Side::new(
        &settings("prefill", Role::Producer),
        &Fabric::Loopback(network.clone()),
    );
    let consumer = Side::new(
        &settings("decode", Role::Consumer),
        &Fabric::Faulty(network, control.clone()),
    );
    (producer, consumer)
}

/// C28: the read begins under the lease and ends after it: the bytes that it brought are never accepted.
#[test]
fn c28_a_read_that_outlives_its_lease_is_a_failed_load() {
    let control = control(1, FaultRates::none());
    let (mut producer, mut consumer) = faulty_consumer(&control, Duration::from_millis(400));
    let prefilled = Request::export("p", 32);
    let params = producer.prefill(&prefilled, &[2, 3], 1);
    producer.step(&[]);
    let request = Request::new("d", 32, Some(params));
    connected(&producer, &mut consumer, &request);
    control.stall();
    consumer.alloc(&request, &[8, 9], 0, 32);
    consumer.step(&[]);
    // Nothing leaves the consumer any more: no renewal either.
    producer.sent(&prefilled);
    producer.write(&[2, 3], 200);
    control.release();
    let received = consumer.received(&request);
    assert_eq!(received.failure, Some(LoadFailure::Lease), "{received:?}");
    assert_eq!(received.failed.len(), 2);
    let stats = producer.scheduler.stats();
    assert_eq!((stats.parts_expired, stats.parts_released), (1, 0));
}

/// The answer to a release is lost: asked for again over the next connection, and remembered.
#[test]
fn a_lost_answer_is_asked_for_again() {
    let control = control(2, FaultRates::none());
    let (mut producer, mut consumer) = faulty_consumer(&control, Duration::from_secs(30));
    let prefilled = Request::export("p", 32);
    let params = producer.prefill(&prefilled, &[2, 3], 1);
    producer.step(&[]);
    let request = Request::new("d", 32, Some(params));
    connected(&producer, &mut consumer, &request);
    control.set_rates(FaultRates::none().with(Fault::SegmentLost, 1000));
    consumer.alloc(&request, &[8, 9], 0, 32);
    consumer.step(&[]);
    // The release has arrived; whatever is answered is lost.
    producer.sent(&prefilled);
    producer.step_until("an answer lost", |_| {
        (control.injected(Fault::SegmentLost) > 0).then_some(())
    });
    control.set_rates(FaultRates::none());
    let received = consumer.received(&request);
    assert_eq!(received.failure, None);
    assert_eq!(consumer.wrong(&[8, 9], 1), 0);
    let leases = producer.workers[0].lease_snapshot(PATIENCE).unwrap();
    assert_eq!((leases.counters.released, leases.counters.readers), (1, 1));
    assert!(leases.counters.resent >= 1, "{leases:?}");
}

fn rates(seed: u64) -> FaultRates {
    let level = |bits: u64| ((seed >> bits) % 4 * 8) as u16;
    FaultRates::none()
        .with(Fault::ConnectRefused, level(0))
        .with(Fault::SendRefused, level(2))
        .with(Fault::SendLost, level(3))
        .with(Fault::SendFailed, level(1))
        .with(Fault::SendDelayed, 100)
        .with(Fault::ReadRefused, level(4))
        .with(Fault::ReadStuck, level(2))
        .with(Fault::ReadFailed, level(3))
        .with(Fault::ReadDelayed, 200)
        .with(Fault::CopyFailed, level(1))
        .with(Fault::SegmentLost, level(5))
        .with(Fault::SegmentDuplicated, level(1))
        .with(Fault::SegmentReordered, 50)
        .with(Fault::EndpointFailed, level(4))
}

/// C19, C25, C92, C102: random faults on both sides, twelve requests. Each load is reported once, each
/// lease ends once, right bytes or a failure, and everything returns to nothing.
fn whatever_goes_wrong(seed: u64) {
    let network = LoopbackNetwork::new();
    let settings = |name, role| RemoteConfig {
        lease: LeaseConfig {
            duration: Duration::from_millis(1500),
            ..LeaseConfig::default()
        },
        borrow: BorrowConfig {
            confirm_timeout: Duration::from_millis(1200),
            resend_after: Duration::from_millis(100),
            ..BorrowConfig::default()
        },
        read_timeout: Duration::from_millis(800),
        connect_timeout: Duration::from_millis(1000),
        ..config(name, role)
    };
    let controls =
        [seed, seed.rotate_left(7) ^ 0x5a5a].map(|seed| control(seed, FaultRates::none()));
    let [there, here] = controls.clone();
    let producer = settings("prefill", Role::Producer);
    let consumer = settings("decode", Role::Consumer);
    let mut producer = Side::new(&producer, &Fabric::Faulty(network.clone(), there));
    let mut consumer = Side::new(&consumer, &Fabric::Faulty(network, here));
    for (control, seed) in controls.iter().zip([seed, seed >> 3]) {
        control.set_rates(rates(seed));
    }
    let mut waiting = HashMap::new();
    let mut held = Vec::new();
    for number in 0..12_u32 {
        let name = format!("r{number}");
        let prefilled = Request::export(&name, 32);
        let blocks = [1 + 2 * number, 2 + 2 * number];
        let byte = 10 + 10 * number as u8;
        let params = producer.prefill(&prefilled, &blocks, byte);
        producer.step(&[]);
        held.push(prefilled.id.clone());
        let request = Request::new(&name, 32, Some(params));
        let own = [30 + 2 * number, 31 + 2 * number];
        if consumer.admit(&request, &own, 0) == 0 {
            panic!("nothing was offered");
        }
        consumer.step(&[]);
        waiting.insert(request.id.clone(), (own, byte));
    }
    let (mut loaded, mut failed) = (0, 0);
    let (mut reported, mut sent) = (Vec::new(), Vec::new());
    consumer.step_until("every report", |report| {
        for received in &report.received {
            let (own, byte) = waiting.remove(&received.request).unwrap_or_else(|| {
                panic!("seed {seed}: reported twice or never asked for: {received:?}")
            });
            reported.push((received.failure, own, byte));
        }
        waiting.is_empty().then_some(())
    });
    for (failure, own, byte) in reported {
        match failure {
            None => {
                loaded += 1;
                assert_eq!(
                    consumer.wrong(&own, byte),
                    0,
                    "seed {seed}: accepted wrong bytes"
                );
            }
            Some(_) => failed += 1,
        }
    }
    assert_eq!(loaded + failed, 12);
    producer.step_until("every lease's end", |report| {
        for request in &report.sent {
            assert!(!sent.contains(request), "seed {seed}: {request} sent twice");
            sent.push(request.clone());
        }
        (sent.len() == held.len()).then_some(())
    });
    let stats = producer.scheduler.stats();
    assert_eq!(
        (stats.leases_held, stats.leases_reserved),
        (0, 0),
        "seed {seed}"
    );
    assert_eq!(
        stats.parts_released + stats.parts_expired,
        12,
        "seed {seed}"
    );
    // A load counts only if its lease was released by it.
    assert!(stats.parts_released >= loaded, "seed {seed}");
    assert!(!producer.scheduler.has_pending_work() && !consumer.scheduler.has_pending_work());
    assert_eq!(consumer.workers[0].loader_stats().reading, 0, "seed {seed}");
}

#[test]
fn whatever_goes_wrong_each_load_and_each_lease_ends_once() {
    let seed = std::env::var("KVFERRY_SEED").ok();
    if let Some(seed) = seed {
        return whatever_goes_wrong(seed.parse().unwrap());
    }
    for round in 0..8_u64 {
        let seed = round.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
        println!("KVFERRY_SEED={seed} replays this round");
        whatever_goes_wrong(seed);
    }
}

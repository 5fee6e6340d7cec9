//! The lease protocol between two engines over the loopback fabric, in segments of 1 KiB.
//!
//! The producer's rank takes no steps of its own: whatever is answered is answered by its progress
//! thread.

// Clippy knows test functions, but not their helpers.
#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender, unbounded};
use kvferry_connector::lease::{
    End, LeaseConfig, LeaseControl, LeaseControlError, LeaseEvent, LeaseService, StepLeases,
};
use kvferry_engine::{
    Engine, EngineBuilder, EngineConfig, LaneChoice, LoopbackFabric, LoopbackNetwork, Peer,
    Replies, Sender as Origin, Service,
};
use kvferry_wire::lease::{
    Gone, LEASE_CHANNEL, Verdict, encode_release, encode_released, encode_renew, encode_renewed,
};
use kvferry_wire::{EngineId, Epoch, Instance, LeaseId, ReaderId, RequestId};

const PATIENCE: Duration = Duration::from_secs(30);

/// The consumer's end: hands on what it is told.
struct Listener(Sender<Vec<u8>>);

impl Service for Listener {
    fn on_message(&mut self, _: Origin, payload: &[u8], _: &mut Replies) {
        let _ = self.0.send(payload.to_vec());
    }

    fn on_tick(&mut self, _: Instant, _: &mut Replies) -> Option<Instant> {
        None
    }
}

struct Pair {
    instance: Instance,
    control: LeaseControl,
    producer: Engine,
    consumer: Engine,
    to_producer: Peer,
    told: Receiver<Vec<u8>>,
}

impl Pair {
    fn new(config: LeaseConfig) -> Self {
        let network = LoopbackNetwork::new();
        let start = |builder: EngineBuilder| {
            let network = network.clone();
            builder
                .start_on(move || LoopbackFabric::new(&network, 1_024))
                .unwrap()
        };
        let engine = |name| Engine::builder(EngineConfig::new(EngineId::new(name).unwrap()));
        let instance = Instance::random().unwrap();
        let (service, control) = LeaseService::new(instance, config).unwrap();
        let producer = start(engine("prefill").service(LEASE_CHANNEL, Box::new(service)));
        let waker = producer.clone();
        control.wake_with(move || drop(waker.wake_services()));
        let (sender, told) = unbounded();
        let consumer = start(engine("decode").service(LEASE_CHANNEL, Box::new(Listener(sender))));
        let to_producer = consumer
            .connect(producer.describe().unwrap(), LaneChoice::Auto)
            .unwrap();
        Self {
            instance,
            control,
            producer,
            consumer,
            to_producer,
            told,
        }
    }

    fn lease(&self, value: u64) -> LeaseId {
        let request = RequestId::new(format!("cmpl-{value}")).unwrap();
        LeaseId {
            instance: self.instance,
            epoch: epoch(value),
            request,
        }
    }

    /// Reserves and activates `epochs`, of which the last is the mark.
    fn issue(&self, epochs: impl Iterator<Item = u64>) {
        let leases: Vec<LeaseId> = epochs.map(|value| self.lease(value)).collect();
        let plan = StepLeases {
            issued_up_to: leases.last().unwrap().epoch.get(),
            activate: leases.iter().map(|lease| lease.epoch).collect(),
            reserve: leases
                .into_iter()
                .map(|lease| (lease.epoch, lease.request))
                .collect(),
            revoke: vec![],
        };
        self.control.apply(plan).unwrap();
    }

    fn reader(&self, load: u64) -> ReaderId {
        ReaderId {
            incarnation: self.consumer.incarnation(),
            load,
        }
    }

    fn release(&self, value: u64, load: u64) {
        let bytes = encode_release(&self.lease(value), self.reader(load), 1).unwrap();
        self.to_producer.send(LEASE_CHANNEL, bytes).unwrap();
    }

    #[track_caller]
    fn assert_told(&self, value: u64, load: u64, verdict: Verdict) {
        let expected = encode_released(self.instance, epoch(value), self.reader(load), verdict);
        assert_eq!(self.told.recv_timeout(PATIENCE).unwrap(), expected);
    }

    #[track_caller]
    fn assert_ends(&self, value: u64, how: End) {
        match self.control.events().recv_timeout(PATIENCE).unwrap() {
            LeaseEvent::Ended(ended, _) => {
                assert_eq!((ended.lease, ended.how), (self.lease(value), how));
            }
            other => panic!("{other:?} instead of the end of {value}"),
        }
    }
}

fn epoch(value: u64) -> Epoch {
    Epoch::new(value).unwrap()
}

#[test]
fn c111_a_release_ends_the_lease_while_the_producer_takes_no_steps() {
    let pair = Pair::new(LeaseConfig::default());
    pair.issue(1..=2);
    pair.release(1, 1);
    pair.assert_told(1, 1, Verdict::Valid);
    pair.assert_ends(1, End::Released);
    // The release is sent again, as if the answer had been lost; then another load tries.
    pair.release(1, 1);
    pair.assert_told(1, 1, Verdict::Valid);
    pair.release(1, 2);
    pair.assert_told(1, 2, Verdict::RepeatedReader);
    let snapshot = pair.control.snapshot(PATIENCE).unwrap();
    assert_eq!((snapshot.gauges.held(), snapshot.gauges.tombstones), (1, 1));
    assert_eq!(
        (snapshot.counters.released, snapshot.counters.resent),
        (1, 1)
    );
    assert!(pair.control.events().is_empty());
}

#[test]
fn c20_a_release_that_overtakes_the_plan_is_answered_when_that_arrives() {
    let pair = Pair::new(LeaseConfig::default());
    pair.release(1, 1);
    // Messages keep their order: when this one is answered, the other is known.
    let foreign = Instance::random().unwrap();
    let renewal = encode_renew(foreign, 5, [epoch(1)]).unwrap();
    pair.to_producer.send(LEASE_CHANNEL, renewal).unwrap();
    let gone = [(epoch(1), Gone::UnknownInstance)];
    let expected = encode_renewed(foreign, 5, gone, [] as [Epoch; 0]).unwrap();
    assert_eq!(pair.told.recv_timeout(PATIENCE).unwrap(), expected);
    assert_eq!(pair.control.snapshot(PATIENCE).unwrap().gauges.early, 1);
    pair.issue(1..=1);
    pair.assert_told(1, 1, Verdict::Valid);
    pair.assert_ends(1, End::Released);
}

#[test]
fn c32_a_thousand_renewals_cross_in_pieces_and_arrive_whole() {
    let pair = Pair::new(LeaseConfig::default());
    pair.issue(1..=1_000);
    pair.release(300, 1);
    pair.assert_told(300, 1, Verdict::Valid);
    let renewal = encode_renew(pair.instance, 9, (1..=1_001).map(epoch)).unwrap();
    assert!(renewal.len() > 8_000);
    pair.to_producer.send(LEASE_CHANNEL, renewal).unwrap();
    let gone = [(epoch(300), Gone::Released)];
    let expected = encode_renewed(pair.instance, 9, gone, [epoch(1_001)]).unwrap();
    assert_eq!(pair.told.recv_timeout(PATIENCE).unwrap(), expected);
    assert_eq!(
        pair.control.snapshot(PATIENCE).unwrap().counters.renewed,
        999
    );
}

#[test]
fn c28_a_release_after_expiry_is_refused() {
    let duration = Duration::from_millis(20);
    let pair = Pair::new(LeaseConfig {
        duration,
        ..LeaseConfig::default()
    });
    let issued = Instant::now();
    pair.issue(1..=1);
    pair.assert_ends(1, End::Expired);
    assert!(issued.elapsed() >= duration);
    pair.release(1, 1);
    let told = pair.told.recv_timeout(PATIENCE).unwrap();
    let refused = [Verdict::Ended, Verdict::UnknownEpoch]
        .map(|verdict| encode_released(pair.instance, epoch(1), pair.reader(1), verdict));
    // Which one depends on whether the tombstone is gone as well.
    assert!(refused.contains(&told));
}

#[test]
fn c99_a_shutdown_drains_within_its_limit_and_reports_every_end() {
    let pair = Pair::new(LeaseConfig::default());
    pair.issue(1..=2);
    pair.release(1, 1);
    pair.assert_told(1, 1, Verdict::Valid);
    pair.assert_ends(1, End::Released);
    pair.control.drain(Duration::from_millis(20)).unwrap();
    pair.assert_ends(2, End::Revoked);
    let drained = pair.control.events().recv_timeout(PATIENCE).unwrap();
    assert_eq!(drained, LeaseEvent::Drained { revoked: 1 });
    pair.producer.shutdown(PATIENCE).unwrap();
    assert!(pair.control.events().recv_timeout(PATIENCE).is_err());
    assert_eq!(pair.control.drain(PATIENCE), Err(LeaseControlError::Gone));
}

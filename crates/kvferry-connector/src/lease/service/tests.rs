//! The service by the bytes it gets and sends, without an engine.

use std::sync::LazyLock;

use kvferry_wire::lease::{Gone, Verdict, encode_release, encode_renew};
use kvferry_wire::{Epoch, ReaderId, RequestId};

use super::super::tests::{epoch, instance, reader, request};
use super::*;

const SECOND: Duration = Duration::from_secs(1);

struct Rank {
    service: LeaseService,
    control: LeaseControl,
    replies: Replies,
    /// What the service is told the time is, at least its own clock's.
    now: Instant,
}

impl Rank {
    fn new() -> Self {
        let (service, control) = LeaseService::new(instance(1), LeaseConfig::default()).unwrap();
        let now = service.now;
        Self {
            service,
            control,
            replies: Replies::new(),
            now,
        }
    }

    fn plan(&self, issued_up_to: u64, reserve: &[u64], activate: &[u64], revoke: &[u64]) {
        let plan = StepLeases {
            issued_up_to,
            reserve: reserve.iter().map(|&e| (epoch(e), request(e))).collect(),
            activate: activate.iter().copied().map(epoch).collect(),
            revoke: revoke.iter().copied().map(epoch).collect(),
        };
        self.control.apply(plan).unwrap();
    }

    fn hear(&mut self, peer: u64, payload: &[u8]) -> Vec<(PeerId, u16, Vec<u8>)> {
        let incarnation = reader(1, 1).incarnation;
        let from = Sender {
            peer: PeerId::for_tests(peer),
            incarnation,
        };
        self.service.on_message(from, payload, &mut self.replies);
        self.replies.take()
    }

    fn tick(&mut self, passed: Duration) -> Option<Instant> {
        self.now = self.service.now + passed;
        self.service.on_tick(self.now, &mut self.replies)
    }

    fn events(&self) -> Vec<LeaseEvent> {
        self.control.events().try_iter().map(at_once).collect()
    }
}

/// The same, told at the same time as all others.
fn at_once(event: LeaseEvent) -> LeaseEvent {
    match event {
        LeaseEvent::Ended(ended, _) => LeaseEvent::Ended(ended, *START),
        other => other,
    }
}

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

fn lease(value: u64) -> LeaseId {
    LeaseId {
        instance: instance(1),
        epoch: epoch(value),
        request: request(value),
    }
}

fn release(of: u64, by: ReaderId) -> Vec<u8> {
    encode_release(&lease(of), by, 1).unwrap()
}

fn released(to: u64, of: u64, by: ReaderId, verdict: Verdict) -> Vec<(PeerId, u16, Vec<u8>)> {
    let bytes = encode_released(instance(1), epoch(of), by, verdict);
    vec![(PeerId::for_tests(to), LEASE_CHANNEL, bytes)]
}

fn ended(of: u64, how: End, readers: usize) -> LeaseEvent {
    let ended = Ended {
        lease: lease(of),
        how,
        readers,
    };
    LeaseEvent::Ended(ended, *START)
}

#[test]
fn a_release_is_answered_and_reported_without_a_tick() {
    let mut rank = Rank::new();
    rank.plan(1, &[1], &[], &[]);
    let by = reader(1, 7);
    assert_eq!(
        rank.hear(4, &release(1, by)),
        released(4, 1, by, Verdict::Valid)
    );
    assert_eq!(rank.events(), [ended(1, End::Released, 1)]);
    // A duplicate, over another connection.
    assert_eq!(
        rank.hear(5, &release(1, by)),
        released(5, 1, by, Verdict::Valid)
    );
    assert_eq!(rank.events(), []);
}

#[test]
fn the_answer_to_a_foreign_lease_names_it_as_the_consumer_did() {
    let mut rank = Rank::new();
    let foreign = LeaseId {
        instance: instance(9),
        ..lease(3)
    };
    let by = reader(1, 1);
    let sent = rank.hear(4, &encode_release(&foreign, by, 1).unwrap());
    let expected = encode_released(instance(9), epoch(3), by, Verdict::UnknownInstance);
    assert_eq!(sent, [(PeerId::for_tests(4), LEASE_CHANNEL, expected)]);
}

#[test]
fn c20_an_early_release_is_answered_when_the_plan_arrives() {
    let mut rank = Rank::new();
    let by = reader(1, 7);
    assert_eq!(rank.hear(4, &release(2, by)), []);
    rank.plan(2, &[2], &[], &[]);
    rank.tick(Duration::ZERO);
    assert_eq!(rank.replies.take(), released(4, 2, by, Verdict::Valid));
    assert_eq!(rank.events(), [ended(2, End::Released, 1)]);
}

#[test]
fn an_early_release_that_waits_in_vain_is_answered_within_a_heartbeat() {
    let mut rank = Rank::new();
    assert_eq!(rank.tick(Duration::ZERO), Some(rank.now + HEARTBEAT));
    let by = reader(1, 7);
    assert_eq!(rank.hear(4, &release(2, by)), []);
    assert_eq!(rank.hear(5, &release(3, by)), []);
    rank.service.on_peer_gone(PeerId::for_tests(5));
    rank.tick(10 * SECOND);
    assert_eq!(
        rank.replies.take(),
        released(4, 2, by, Verdict::UnknownEpoch)
    );
}

#[test]
fn c32_a_thousand_renewals_arrive_whole_and_are_answered_with_those_gone() {
    let mut rank = Rank::new();
    let all: Vec<u64> = (1..=1_000).collect();
    rank.plan(1_000, &all, &all, &[]);
    rank.tick(20 * SECOND);
    rank.plan(1_000, &[], &[], &[17, 500]);
    let epochs: Vec<Epoch> = (1..=1_001).map(epoch).collect();
    let sent = rank.hear(4, &encode_renew(instance(1), 77, &epochs).unwrap());
    let gone = [(epoch(17), Gone::Revoked), (epoch(500), Gone::Revoked)];
    let expected = encode_renewed(instance(1), 77, gone, [epoch(1_001)]).unwrap();
    assert_eq!(sent, [(PeerId::for_tests(4), LEASE_CHANNEL, expected)]);
    assert_eq!(rank.events().len(), 2);
    rank.tick(20 * SECOND);
    assert_eq!(rank.events(), []);
    rank.tick(10 * SECOND);
    assert_eq!(rank.events().len(), 998);
}

#[test]
fn garbage_and_answers_are_dropped_and_counted() {
    let mut rank = Rank::new();
    let answer = encode_released(instance(1), epoch(1), reader(1, 1), Verdict::Valid);
    let cut = release(1, reader(1, 1));
    for payload in [&b""[..], b"GET / HTTP/1.1", &answer, &cut[..cut.len() - 1]] {
        assert_eq!(rank.hear(4, payload), []);
    }
    assert_eq!(rank.service.malformed, 4);
    assert_eq!(rank.events(), []);
}

#[test]
fn a_wrong_plan_is_reported_and_the_next_one_counts() {
    let mut rank = Rank::new();
    rank.plan(5, &[3, 3], &[], &[]);
    rank.plan(5, &[3], &[3], &[]);
    rank.tick(Duration::ZERO);
    let error = PlanError::OutOfOrder {
        list: "reserve",
        previous: epoch(3),
        epoch: epoch(3),
    };
    assert_eq!(rank.events(), [LeaseEvent::PlanRefused(error)]);
    assert_eq!(rank.service.table.held(), 1);
}

#[test]
fn c99_a_shutdown_ends_with_the_last_lease_or_at_its_limit() {
    for released_in_time in [true, false] {
        let mut rank = Rank::new();
        rank.plan(2, &[1, 2], &[1, 2], &[]);
        rank.tick(Duration::ZERO);
        rank.control.drain(5 * SECOND).unwrap();
        // Reserved by a scheduler half that has not heard of it: ended, and the rest counts.
        rank.plan(3, &[3], &[3], &[1]);
        let next = rank.tick(Duration::ZERO);
        assert!(next <= Some(rank.now + 5 * SECOND));
        assert_eq!(
            rank.events(),
            [ended(3, End::Revoked, 0), ended(1, End::Revoked, 0)]
        );
        if released_in_time {
            rank.hear(4, &release(2, reader(1, 1)));
            let drained = LeaseEvent::Drained { revoked: 0 };
            assert_eq!(rank.events(), [ended(2, End::Released, 1), drained]);
        } else {
            rank.tick(4 * SECOND);
            assert_eq!(rank.events(), []);
            rank.tick(SECOND);
            let drained = LeaseEvent::Drained { revoked: 1 };
            assert_eq!(rank.events(), [ended(2, End::Revoked, 0), drained]);
        }
        rank.tick(5 * SECOND);
        assert_eq!(rank.events(), []);
    }
}

#[test]
fn leases_that_outlive_the_engine_are_reported() {
    let mut rank = Rank::new();
    rank.plan(1, &[1], &[], &[]);
    rank.tick(Duration::ZERO);
    // This one is still in the queue.
    rank.plan(2, &[2], &[], &[]);
    let Rank {
        service, control, ..
    } = rank;
    drop(service);
    let events: Vec<_> = control.events().iter().map(at_once).collect();
    assert_eq!(
        events,
        [ended(1, End::Revoked, 0), ended(2, End::Revoked, 0)]
    );
    assert_eq!(control.drain(SECOND), Err(LeaseControlError::Gone));
    assert_eq!(control.snapshot(SECOND), Err(LeaseControlError::Gone));
}

#[test]
fn a_snapshot_wakes_the_service_and_has_its_counts() {
    let mut rank = Rank::new();
    let (woken, wake) = channel::unbounded();
    rank.control.wake_with(move || woken.send(()).unwrap());
    rank.plan(2, &[1, 2], &[2], &[]);
    wake.recv().unwrap();
    let control = rank.control.clone();
    let asker = std::thread::spawn(move || control.snapshot(60 * SECOND));
    wake.recv().unwrap();
    rank.tick(Duration::ZERO);
    let snapshot = asker.join().unwrap().unwrap();
    let gauges = LeaseGauges {
        reserved: 1,
        activated: 1,
        tombstones: 0,
        early: 0,
    };
    assert_eq!(snapshot.gauges, gauges);
    assert_eq!(
        (snapshot.counters.reserved, snapshot.counters.activated),
        (2, 1)
    );
    let unanswered = rank.control.snapshot(Duration::ZERO);
    assert_eq!(unanswered, Err(LeaseControlError::TimedOut(Duration::ZERO)));
}

#[test]
fn c21_a_release_by_the_consumers_own_name_is_refused() {
    let mut rank = Rank::new();
    rank.plan(1, &[1], &[1], &[]);
    let by = reader(1, 1);
    let misnamed = LeaseId {
        request: RequestId::new("cmpl-1-0").unwrap(),
        ..lease(1)
    };
    let sent = rank.hear(4, &encode_release(&misnamed, by, 1).unwrap());
    assert_eq!(sent, released(4, 1, by, Verdict::RequestMismatch));
    assert_eq!(rank.events(), []);
}

/// Nobody ends a lease for somebody else: it is dropped, counted, and the lease is held.
#[test]
fn a_release_in_another_engines_name_is_dropped() {
    let mut rank = Rank::new();
    rank.plan(1, &[1], &[1], &[]);
    rank.tick(Duration::ZERO);
    let lease = LeaseId {
        instance: instance(1),
        epoch: epoch(1),
        request: request(1),
    };
    // `hear` says that reader 1 sends.
    let forged = encode_release(&lease, reader(2, 1), 1).unwrap();
    assert_eq!(rank.hear(1, &forged), []);
    assert_eq!(rank.service.malformed, 1);
    assert_eq!(rank.events(), []);
    let own = encode_release(&lease, reader(1, 1), 1).unwrap();
    assert_eq!(rank.hear(1, &own).len(), 1);
    assert_eq!(rank.events().len(), 1);
}

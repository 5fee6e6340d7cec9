use kvferry_wire::{Incarnation, RequestId};
use proptest::prelude::*;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn instance() -> Instance {
    Instance::from_bytes([9; 16]).unwrap()
}

fn lease(epoch: u64) -> LeaseId {
    LeaseId {
        instance: instance(),
        epoch: Epoch::new(epoch).unwrap(),
        request: RequestId::new(format!("r{epoch}")).unwrap(),
    }
}

fn reader(load: u64) -> ReaderId {
    ReaderId {
        incarnation: Incarnation::from_bytes([3; 16]).unwrap(),
        load,
    }
}

fn sent(borrower: &mut Borrower<u32>, now: Instant) -> Vec<(u32, BorrowMessage)> {
    let mut all = Vec::new();
    borrower.tick(now, |peer, message| all.push((peer, message)));
    all
}

#[test]
fn a_release_is_sent_again_until_it_is_answered_and_answered_once() {
    let now = Instant::now();
    let mut borrower = Borrower::new(BorrowConfig::default());
    borrower.release(1, Some(7), lease(4), reader(1), 2, now);
    let release = BorrowMessage::Release {
        lease: lease(4),
        reader: reader(1),
        consumers: 2,
    };
    assert_eq!(sent(&mut borrower, now), [(7, release.clone())]);
    assert_eq!(sent(&mut borrower, now + SECOND / 4), []);
    assert_eq!(sent(&mut borrower, now + SECOND / 2), [(7, release)]);
    // Of another reader, another peer, another epoch: not the answer.
    let epoch = lease(4).epoch;
    borrower.on_released(7, instance(), epoch, reader(2), Verdict::Valid);
    borrower.on_released(8, instance(), epoch, reader(1), Verdict::Valid);
    borrower.on_released(7, instance(), lease(5).epoch, reader(1), Verdict::Valid);
    borrower.on_released(7, instance(), epoch, reader(1), Verdict::Overloaded);
    assert_eq!(borrower.take_events(), []);
    for _ in 0..2 {
        borrower.on_released(7, instance(), epoch, reader(1), Verdict::Valid);
    }
    let answered = BorrowEvent::Answered {
        ticket: 1,
        verdict: Verdict::Valid,
    };
    assert_eq!(borrower.take_events(), [answered]);
    assert_eq!(sent(&mut borrower, now + 9 * SECOND), []);
    assert_eq!((borrower.unanswered(), borrower.next_deadline()), (0, None));
}

/// Several leases are released, and their answers come in another order, some twice: each release has its own.
#[test]
fn answers_in_another_order_find_their_releases() {
    let now = Instant::now();
    let mut borrower = Borrower::new(BorrowConfig::default());
    // Two readers of lease 3, and lease 3 at two ranks.
    for (ticket, peer, epoch, load) in [(1, 7, 3, 1), (2, 7, 3, 2), (3, 8, 3, 1), (4, 7, 9, 1)] {
        borrower.release(ticket, Some(peer), lease(epoch), reader(load), 2, now);
    }
    assert_eq!(sent(&mut borrower, now).len(), 4);
    let told = [
        (7, 9, 1, Verdict::Ended),
        (8, 3, 1, Verdict::RepeatedReader),
        (7, 3, 2, Verdict::Valid),
        (7, 9, 1, Verdict::Ended),
        (7, 3, 1, Verdict::UnknownEpoch),
    ];
    for (peer, epoch, load, verdict) in told {
        let epoch = lease(epoch).epoch;
        borrower.on_released(peer, instance(), epoch, reader(load), verdict);
    }
    let answered = |ticket, verdict| BorrowEvent::Answered { ticket, verdict };
    assert_eq!(
        borrower.take_events(),
        [
            answered(4, Verdict::Ended),
            answered(3, Verdict::RepeatedReader),
            answered(2, Verdict::Valid),
            answered(1, Verdict::UnknownEpoch),
        ]
    );
    assert_eq!((borrower.unanswered(), borrower.next_deadline()), (0, None));
}

#[test]
fn an_unanswered_release_is_given_up_once() {
    let now = Instant::now();
    let mut borrower = Borrower::new(BorrowConfig::default());
    borrower.release(1, Some(7), lease(4), reader(1), 1, now);
    sent(&mut borrower, now);
    assert_eq!(sent(&mut borrower, now + 5 * SECOND), []);
    assert_eq!(
        borrower.take_events(),
        [BorrowEvent::Unanswered { ticket: 1 }]
    );
    borrower.on_released(7, instance(), lease(4).epoch, reader(1), Verdict::Valid);
    assert_eq!(borrower.take_events(), []);
}

/// A connection that breaks between a release and its answer: sent again over the next one.
#[test]
fn a_release_survives_its_connection() {
    let now = Instant::now();
    let mut borrower = Borrower::new(BorrowConfig::default());
    borrower.release(1, Some(7), lease(4), reader(1), 1, now);
    assert_eq!(sent(&mut borrower, now).len(), 1);
    borrower.peer_gone(7);
    assert_eq!(borrower.take_events(), [BorrowEvent::PeerGone { peer: 7 }]);
    assert_eq!(sent(&mut borrower, now + SECOND), []);
    borrower.rebind(1, 8, now + SECOND);
    let again = sent(&mut borrower, now + SECOND);
    assert!(
        matches!(again[..], [(8, BorrowMessage::Release { .. })]),
        "{again:?}"
    );
    // The answer to the first one, had it come late over the dead connection, would be no answer now.
    borrower.on_released(7, instance(), lease(4).epoch, reader(1), Verdict::Ended);
    borrower.on_released(8, instance(), lease(4).epoch, reader(1), Verdict::Valid);
    let answered = BorrowEvent::Answered {
        ticket: 1,
        verdict: Verdict::Valid,
    };
    assert_eq!(borrower.take_events(), [answered]);
}

#[test]
fn held_leases_are_renewed_in_one_message_every_sixth_of_their_duration() {
    let start = Instant::now();
    let mut borrower = Borrower::new(BorrowConfig::default());
    for epoch in 1..=1000 {
        borrower.hold(epoch, 7, &lease(epoch), 30 * SECOND, start);
    }
    let mut count = 0;
    for second in 0..60 {
        for (peer, message) in sent(&mut borrower, start + second * SECOND) {
            let BorrowMessage::Renew { epochs, .. } = message else {
                panic!("not a renewal");
            };
            assert_eq!((peer, epochs.len()), (7, 1000));
            assert_eq!(second % 5, 0);
            count += 1;
        }
    }
    assert_eq!(count, 12);
    borrower.let_go(500);
    let gone = [
        (lease(3).epoch, Gone::Expired),
        (lease(500).epoch, Gone::Expired),
    ];
    borrower.on_renewed(7, instance(), gone);
    let why = Gone::Expired;
    assert_eq!(
        borrower.take_events(),
        [BorrowEvent::Lost { ticket: 3, why }]
    );
    assert_eq!(borrower.held(), 998);
    borrower.peer_gone(7);
    assert_eq!((borrower.held(), borrower.next_deadline()), (0, None));
}

#[test]
fn a_lease_is_not_renewed_beyond_its_longest_life() {
    let start = Instant::now();
    let mut borrower = Borrower::new(BorrowConfig::default());
    borrower.hold(1, 7, &lease(1), 30 * SECOND, start);
    let renewals = (0..700).map(|second| sent(&mut borrower, start + second * SECOND).len());
    assert_eq!(renewals.sum::<usize>(), 120);
    let why = Gone::LeaseMax;
    assert_eq!(
        borrower.take_events(),
        [BorrowEvent::Lost { ticket: 1, why }]
    );
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Hold(u64),
    LetGo(u64),
    Release(u64),
    Answer(u64, bool),
    Gone(u32),
    Rebind(u64),
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let number = 1_u64..6;
    prop_oneof![
        number.clone().prop_map(Step::Hold),
        number.clone().prop_map(Step::LetGo),
        number.clone().prop_map(Step::Release),
        (number.clone(), any::<bool>()).prop_map(|(n, valid)| Step::Answer(n, valid)),
        (0_u32..3).prop_map(Step::Gone),
        number.prop_map(Step::Rebind),
        (0_u64..2000).prop_map(Step::Pass),
    ]
}

proptest! {
    /// Whatever happens in whatever order: each release has one end, and nothing is left.
    #[test]
    fn every_release_ends_once(steps in prop::collection::vec(step(), 0..200)) {
        let mut now = Instant::now();
        let mut borrower = Borrower::new(BorrowConfig::default());
        let (mut started, mut ended) = (0_u64, HashMap::<Ticket, u32>::new());
        for step in steps {
            match step {
                Step::Hold(n) => borrower.hold(n, (n % 3) as u32, &lease(n), 6 * SECOND, now),
                Step::LetGo(n) => borrower.let_go(n),
                Step::Release(n) => {
                    started += 1;
                    borrower.release(started, Some((n % 3) as u32), lease(n), reader(n), 1, now);
                }
                Step::Answer(n, valid) => {
                    let verdict = if valid { Verdict::Valid } else { Verdict::Ended };
                    let epoch = lease(n).epoch;
                    borrower.on_released((n % 3) as u32, instance(), epoch, reader(n), verdict);
                }
                Step::Gone(peer) => borrower.peer_gone(peer),
                Step::Rebind(n) => borrower.rebind(n, 1, now),
                Step::Pass(ms) => {
                    now += Duration::from_millis(ms);
                    borrower.tick(now, |_, _| ());
                    prop_assert!(borrower.next_deadline().is_none_or(|next| next > now));
                }
            }
            for event in borrower.take_events() {
                if let BorrowEvent::Answered { ticket, .. } | BorrowEvent::Unanswered { ticket } = event {
                    *ended.entry(ticket).or_default() += 1;
                }
            }
        }
        now += 700 * SECOND;
        borrower.tick(now, |_, _| ());
        for event in borrower.take_events() {
            if let BorrowEvent::Answered { ticket, .. } | BorrowEvent::Unanswered { ticket } = event {
                *ended.entry(ticket).or_default() += 1;
            }
        }
        prop_assert_eq!(ended.len() as u64, started);
        prop_assert!(ended.values().all(|count| *count == 1), "{:?}", ended);
        prop_assert_eq!((borrower.held(), borrower.unanswered()), (0, 0));
        prop_assert!(borrower.next_deadline().is_none() && borrower.by_lease.is_empty());
    }
}

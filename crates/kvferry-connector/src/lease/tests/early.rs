//! Releases that arrive before their lease.

use super::*;

#[test]
fn c20_a_release_before_its_lease_is_kept_and_matched() {
    let mut rank = Rank::new();
    // Sent twice before the plan arrives: kept once, answered once.
    assert_eq!(rank.release(2, reader(1, 1), 2), None);
    assert_eq!(rank.release(2, reader(1, 1), 2), None);
    assert_eq!(rank.release(2, reader(2, 1), 2), None);
    assert_eq!((rank.table.gauges().early, rank.answers()), (2, vec![]));
    // A plan that does not get there yet.
    rank.reserve([1]);
    assert_eq!(rank.answers(), []);
    rank.reserve([2]);
    assert_eq!(
        rank.answers(),
        [
            (PEER, 2, reader(1, 1), Verdict::Valid),
            (PEER, 2, reader(2, 1), Verdict::Valid)
        ]
    );
    assert_eq!(rank.ends(), [(2, End::Released, 2)]);
    // And once more afterwards.
    assert_eq!(rank.release(2, reader(1, 1), 2), VALID);
    let counters = rank.table.counters();
    assert_eq!(
        (
            counters.early_kept,
            counters.early_matched,
            counters.early_dropped
        ),
        (2, 2, 0)
    );
    assert_eq!(rank.ends(), []);
}

#[test]
fn c20_early_releases_are_judged_in_their_order_of_arrival() {
    let mut rank = Rank::new();
    let misnamed = LeaseId {
        request: request(9),
        ..lease(1)
    };
    // Reader 8 comes first and fixes the number, although reader 2 sorts before it.
    assert_eq!(
        rank.table.release(1, &lease(1), reader(8, 1), 2, rank.now),
        None
    );
    assert_eq!(
        rank.table.release(2, &lease(1), reader(2, 1), 3, rank.now),
        None
    );
    assert_eq!(
        rank.table.release(3, &misnamed, reader(3, 1), 2, rank.now),
        None
    );
    assert_eq!(
        rank.table.release(1, &lease(1), reader(8, 2), 2, rank.now),
        None
    );
    assert_eq!(
        rank.table.release(4, &lease(1), reader(4, 1), 2, rank.now),
        None
    );
    assert_eq!(
        rank.table.release(4, &lease(1), reader(5, 1), 2, rank.now),
        None
    );
    rank.reserve([1]);
    assert_eq!(
        rank.answers(),
        [
            (1, 1, reader(8, 1), Verdict::Valid),
            (2, 1, reader(2, 1), Verdict::ConsumersMismatch),
            (3, 1, reader(3, 1), Verdict::RequestMismatch),
            (1, 1, reader(8, 2), Verdict::RepeatedReader),
            (4, 1, reader(4, 1), Verdict::Valid),
            (4, 1, reader(5, 1), Verdict::Ended),
        ]
    );
    assert_eq!(rank.ends(), [(1, End::Released, 2)]);
}

#[test]
fn an_early_release_counts_before_the_same_plans_revocation() {
    let mut rank = Rank::new();
    assert_eq!(rank.release(1, reader(1, 1), 1), None);
    let plan = StepLeases {
        issued_up_to: 1,
        reserve: vec![(epoch(1), request(1))],
        activate: vec![epoch(1)],
        revoke: vec![epoch(1)],
    };
    rank.table.apply(plan, rank.now).unwrap();
    assert_eq!(rank.answers(), [(PEER, 1, reader(1, 1), Verdict::Valid)]);
    assert_eq!(rank.ends(), [(1, End::Released, 1)]);
    assert_eq!(rank.table.counters().plan_too_late, 1);
}

#[test]
fn an_early_release_of_a_skipped_epoch_is_answered() {
    let mut rank = Rank::new();
    assert_eq!(rank.release(2, reader(1, 1), 1), None);
    assert_eq!(rank.release(4, reader(1, 1), 1), None);
    rank.skip_to(3);
    assert_eq!(
        rank.answers(),
        [(PEER, 2, reader(1, 1), Verdict::UnknownEpoch)]
    );
    assert_eq!(rank.table.gauges().early, 1);
    assert_eq!(rank.table.counters().early_dropped, 1);
    assert_eq!(
        rank.release(2, reader(1, 1), 1),
        Some(Verdict::UnknownEpoch)
    );
}

#[test]
fn early_releases_are_bounded_in_number_per_peer() {
    let mut rank = Rank::new();
    for incarnation in 1..=3 {
        assert_eq!(rank.release(1, reader(incarnation, 1), 9), None);
    }
    let over = Some(Verdict::Overloaded);
    assert_eq!(rank.release(2, reader(4, 1), 1), over);
    // One that is kept already needs no room, and another peer has its own.
    assert_eq!(rank.release(1, reader(2, 1), 9), None);
    assert_eq!(
        rank.table.release(8, &lease(2), reader(4, 1), 1, rank.now),
        None
    );
    assert_eq!(rank.table.gauges().early, 4);
    // There is room again once the plan has been there.
    rank.reserve([1]);
    assert_eq!(rank.answers().len(), 3);
    assert_eq!(rank.release(2, reader(5, 1), 1), None);
    assert_eq!(rank.table.counters().refused.overloaded, 1);
}

#[test]
fn early_releases_are_bounded_in_distance() {
    let mut rank = Rank::new();
    rank.skip_to(5);
    assert_eq!(rank.release(15, reader(1, 1), 1), None);
    assert_eq!(rank.release(16, reader(1, 1), 1), Some(Verdict::Overloaded));
    assert_eq!(
        rank.release(u64::MAX, reader(1, 1), 1),
        Some(Verdict::Overloaded)
    );
    assert_eq!(rank.table.gauges().early, 1);
}

#[test]
fn early_releases_are_bounded_in_time() {
    let mut rank = Rank::new();
    assert_eq!(rank.release(1, reader(1, 1), 1), None);
    rank.tick(6 * SECOND);
    // Resent: it keeps its age.
    assert_eq!(rank.release(1, reader(1, 1), 1), None);
    assert_eq!(rank.release(1, reader(2, 1), 1), None);
    assert_eq!(rank.table.next_deadline(), Some(rank.now + 4 * SECOND));
    rank.tick(4 * SECOND);
    assert_eq!(
        rank.answers(),
        [(PEER, 1, reader(1, 1), Verdict::UnknownEpoch)]
    );
    rank.tick(6 * SECOND);
    assert_eq!(
        rank.answers(),
        [(PEER, 1, reader(2, 1), Verdict::UnknownEpoch)]
    );
    rank.assert_empty();
}

#[test]
fn a_dead_peer_takes_its_early_releases_along_and_nothing_else() {
    let mut rank = Rank::with_active(1);
    assert_eq!(
        rank.table.release(1, &lease(1), reader(1, 1), 2, rank.now),
        VALID
    );
    assert_eq!(
        rank.table.release(1, &lease(2), reader(1, 1), 2, rank.now),
        None
    );
    assert_eq!(
        rank.table.release(2, &lease(2), reader(2, 1), 2, rank.now),
        None
    );
    rank.table.peer_gone(1);
    rank.table.peer_gone(99);
    assert_eq!((rank.table.held(), rank.table.gauges().early), (1, 1));
    assert_eq!(rank.table.counters().early_dropped, 1);
    rank.reserve([2]);
    assert_eq!(rank.answers(), [(2, 2, reader(2, 1), Verdict::Valid)]);
    assert_eq!(
        rank.table.release(3, &lease(1), reader(1, 1), 2, rank.now),
        VALID
    );
    assert_eq!(rank.ends(), []);
}

#[test]
fn an_early_release_resent_over_a_new_connection_is_answered_there() {
    let mut rank = Rank::new();
    assert_eq!(
        rank.table.release(1, &lease(1), reader(1, 1), 1, rank.now),
        None
    );
    assert_eq!(
        rank.table.release(2, &lease(1), reader(1, 1), 1, rank.now),
        None
    );
    assert_eq!(rank.table.gauges().early, 1);
    // The old connection is noticed to be dead afterwards.
    rank.table.peer_gone(1);
    rank.reserve([1]);
    assert_eq!(rank.answers(), [(2, 1, reader(1, 1), Verdict::Valid)]);
    assert_eq!(rank.table.counters().early_kept, 1);
    rank.tick(30 * SECOND);
    assert_eq!(rank.ends(), [(1, End::Released, 1)]);
    rank.assert_empty();
}

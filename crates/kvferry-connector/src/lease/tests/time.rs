//! Expiry, renewals and what is remembered.

use super::*;

#[test]
fn c26_a_renewed_lease_is_held_for_five_durations_and_ends_one_after_the_last_renewal() {
    let mut rank = Rank::with_active(1);
    for _ in 0..30 {
        assert_eq!(rank.tick(5 * SECOND), 0);
        assert_eq!(rank.renew([1]), RenewAnswer::default());
    }
    assert_eq!(rank.table.held(), 1);
    // Killed: no renewal arrives any more.
    assert_eq!(rank.table.next_deadline(), Some(rank.now + 30 * SECOND));
    assert_eq!(rank.tick(30 * SECOND - Duration::from_nanos(1)), 0);
    assert_eq!(rank.tick(Duration::from_nanos(1)), 1);
    assert_eq!(rank.ends(), [(1, End::Expired, 0)]);
    assert_eq!(rank.renew([1]).gone, [(epoch(1), Gone::Expired)]);
    assert_eq!(rank.table.counters().renewed, 30);
}

#[test]
fn c27_leases_that_expire_out_of_order_expire_in_the_same_tick() {
    let mut rank = Rank::new();
    rank.reserve(1..=6);
    for of in [4, 2, 6, 1] {
        rank.activate([of]);
        rank.now += SECOND;
    }
    // 4 and 2 would expire first, but are renewed; 3 and 5 are not activated.
    rank.renew([4, 2]);
    rank.now += 28 * SECOND;
    assert_eq!(rank.table.expire(rank.now), 1);
    assert_eq!(rank.ends(), [(6, End::Expired, 0)]);
    assert_eq!(rank.tick(10 * SECOND), 3);
    let mut ends = rank.ends();
    ends.sort_unstable_by_key(|end| end.0);
    let expired = |of| (of, End::Expired, 0);
    assert_eq!(ends, [expired(1), expired(2), expired(4)]);
    assert_eq!(rank.table.gauges().reserved, 2);
}

#[test]
fn c32_a_thousand_renewals_in_one_batch() {
    let mut rank = Rank::with_active(1_000);
    rank.tick(29 * SECOND);
    rank.revoke([17, 500]);
    let answer = rank.renew((1..=1_000).chain([1_001, 5_000]));
    assert_eq!(
        answer.gone,
        [(epoch(17), Gone::Revoked), (epoch(500), Gone::Revoked)]
    );
    assert_eq!(answer.unknown, [epoch(1_001), epoch(5_000)]);
    assert_eq!(rank.tick(29 * SECOND), 0);
    assert_eq!(rank.table.held(), 998);
    assert_eq!(rank.tick(SECOND), 998);
    let counters = rank.table.counters();
    assert_eq!(
        (
            counters.renewed,
            counters.renewals_gone,
            counters.renewals_unknown
        ),
        (998, 2, 2)
    );
}

#[test]
fn a_renewal_for_another_instance_finds_nothing() {
    let mut rank = Rank::with_active(1);
    rank.tick(20 * SECOND);
    let answer = rank
        .table
        .renew(instance(2), [epoch(1), epoch(9)], rank.now);
    let gone = [
        (epoch(1), Gone::UnknownInstance),
        (epoch(9), Gone::UnknownInstance),
    ];
    assert_eq!(
        (answer.gone.as_slice(), answer.unknown.as_slice()),
        (&gone[..], &[][..])
    );
    assert_eq!(rank.tick(10 * SECOND), 1);
}

#[test]
fn what_arrived_is_passed_in_before_expiry_is_judged() {
    let mut rank = Rank::with_active(3);
    rank.now += 31 * SECOND;
    assert_eq!(rank.release(1, reader(1, 1), 1), VALID);
    assert_eq!(rank.renew([2]), RenewAnswer::default());
    assert_eq!(rank.table.expire(rank.now), 1);
    assert_eq!(rank.ends(), [(1, End::Released, 1), (3, End::Expired, 0)]);
}

#[test]
fn renewals_stop_at_lease_max() {
    let mut rank = Rank::new();
    rank.reserve([1]);
    rank.tick(100 * SECOND);
    rank.activate([1]);
    for _ in 0..59 {
        assert_eq!(rank.tick(10 * SECOND), 0);
        assert_eq!(rank.renew([1]), RenewAnswer::default());
    }
    assert_eq!(rank.table.next_deadline(), Some(rank.now + 10 * SECOND));
    assert_eq!(rank.tick(10 * SECOND), 1);
    assert_eq!(rank.ends(), [(1, End::Expired, 0)]);
    assert_eq!(rank.renew([1]).gone, [(epoch(1), Gone::LeaseMax)]);
}

#[test]
fn a_lease_that_is_never_activated_ends_at_lease_max() {
    let mut rank = Rank::new();
    rank.reserve([1]);
    rank.tick(599 * SECOND);
    assert_eq!(rank.renew([1]), RenewAnswer::default());
    assert_eq!(rank.table.held(), 1);
    assert_eq!(rank.tick(SECOND), 1);
    assert_eq!(rank.ends(), [(1, End::Expired, 0)]);
    assert_eq!(rank.renew([1]).gone, [(epoch(1), Gone::LeaseMax)]);
    rank.tick(30 * SECOND);
    rank.assert_empty();
}

#[test]
fn answers_are_remembered_for_one_duration_after_the_end() {
    let mut rank = Rank::with_active(2);
    assert_eq!(rank.release(1, reader(1, 1), 1), VALID);
    assert_eq!(rank.release(2, reader(1, 1), 2), VALID);
    rank.tick(20 * SECOND);
    assert_eq!(rank.release(1, reader(1, 1), 1), VALID);
    assert_eq!(rank.release(2, reader(1, 1), 2), VALID);
    // Lease 1 is forgotten, lease 2 expires.
    assert_eq!(rank.tick(10 * SECOND), 1);
    assert_eq!(
        rank.release(1, reader(1, 1), 1),
        Some(Verdict::UnknownEpoch)
    );
    assert_eq!(rank.release(2, reader(1, 1), 2), VALID);
    assert_eq!(rank.release(2, reader(2, 1), 2), Some(Verdict::Ended));
    rank.tick(30 * SECOND);
    assert_eq!(
        rank.release(2, reader(1, 1), 2),
        Some(Verdict::UnknownEpoch)
    );
    assert_eq!(rank.ends(), [(1, End::Released, 1), (2, End::Expired, 1)]);
    rank.assert_empty();
}

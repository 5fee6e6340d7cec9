//! Releases: answers, ends, refusals.

use super::*;

#[test]
fn the_last_expected_reader_ends_the_lease() {
    let mut rank = Rank::with_active(2);
    assert_eq!(rank.release(1, reader(1, 1), 3), VALID);
    assert_eq!(rank.release(1, reader(2, 1), 3), VALID);
    assert_eq!((rank.table.held(), rank.ends()), (2, vec![]));
    assert_eq!(rank.release(1, reader(3, 1), 3), VALID);
    assert_eq!(
        (rank.table.held(), rank.ends()),
        (1, vec![(1, End::Released, 3)])
    );
    let gauges = LeaseGauges {
        reserved: 0,
        activated: 1,
        tombstones: 1,
        early: 0,
    };
    assert_eq!(rank.table.gauges(), gauges);
}

#[test]
fn a_reserved_lease_is_released_at_once_and_its_activation_comes_too_late() {
    let mut rank = Rank::new();
    rank.reserve([1]);
    assert_eq!(rank.release(1, reader(1, 1), 1), VALID);
    assert_eq!(rank.ends(), [(1, End::Released, 1)]);
    rank.activate([1]);
    rank.revoke([1]);
    assert_eq!(rank.ends(), []);
    assert_eq!(rank.table.counters().plan_too_late, 2);
    assert_eq!(rank.table.counters().activated, 0);
}

/// Every refusal, while the lease is held and after each kind of end.
#[test]
fn refusals_name_their_cause_and_stay_the_same() {
    let foreign = LeaseId {
        instance: instance(2),
        ..lease(1)
    };
    let misnamed = LeaseId {
        request: request(99),
        ..lease(1)
    };
    let cases = [
        (foreign, reader(1, 1), 2, Verdict::UnknownInstance),
        (misnamed.clone(), reader(1, 1), 2, Verdict::RequestMismatch),
        (misnamed, reader(9, 1), 2, Verdict::RequestMismatch),
        (lease(1), reader(1, 1), 2, Verdict::Valid),
        (lease(1), reader(1, 2), 2, Verdict::RepeatedReader),
        (lease(1), reader(2, 1), 3, Verdict::ConsumersMismatch),
        (lease(1), reader(2, 1), 0, Verdict::ConsumersMismatch),
        // Under the mark, but it was never this rank's.
        (lease(2), reader(1, 1), 1, Verdict::UnknownEpoch),
        // No lease may expect as many.
        (lease(3), reader(1, 1), 1_025, Verdict::Overloaded),
        (lease(4), reader(1, 1), 0, Verdict::ConsumersMismatch),
    ];
    for how in [End::Released, End::Expired, End::Revoked] {
        let mut rank = Rank::new();
        rank.reserve([1, 3, 4]);
        rank.activate([1, 3, 4]);
        assert_eq!(rank.release(1, reader(1, 1), 2), VALID);
        for end_it in [false, true] {
            if end_it {
                match how {
                    End::Released => assert_eq!(rank.release(1, reader(3, 1), 2), VALID),
                    End::Expired => assert_eq!(rank.tick(30 * SECOND), 3),
                    End::Revoked => rank.revoke([1]),
                }
                assert_eq!(
                    rank.ends().first().map(|end| (end.0, end.1)),
                    Some((1, how))
                );
            }
            for (id, by, consumers, verdict) in &cases {
                let answer = rank.table.release(PEER, id, *by, *consumers, rank.now);
                assert_eq!(
                    answer,
                    Some(*verdict),
                    "{id} by {by}, {how}, ended: {end_it}"
                );
            }
        }
        assert_eq!(rank.release(1, reader(4, 1), 2), Some(Verdict::Ended));
    }
}

#[test]
fn every_refusal_is_counted_under_its_cause() {
    let mut rank = Rank::with_active(3);
    rank.skip_to(4);
    assert_eq!(rank.release(1, reader(1, 1), 2), VALID);
    for verdict in [
        rank.table.release(
            PEER,
            &LeaseId {
                instance: instance(2),
                ..lease(1)
            },
            reader(2, 1),
            2,
            rank.now,
        ),
        rank.table.release(
            PEER,
            &LeaseId {
                request: request(2),
                ..lease(1)
            },
            reader(2, 1),
            2,
            rank.now,
        ),
        rank.release(1, reader(2, 1), 3),
        rank.release(1, reader(1, 2), 2),
        rank.release(4, reader(1, 1), 1),
        rank.release(100, reader(1, 1), 1),
    ] {
        assert_ne!(verdict, VALID);
    }
    rank.revoke([1]);
    assert_eq!(rank.release(1, reader(2, 1), 2), Some(Verdict::Ended));
    assert_eq!(rank.release(1, reader(1, 1), 2), VALID);
    let counters = rank.table.counters();
    let each_once = Refusals {
        ended: 1,
        unknown_instance: 1,
        unknown_epoch: 1,
        request_mismatch: 1,
        consumers_mismatch: 1,
        repeated_reader: 1,
        overloaded: 1,
    };
    assert_eq!(counters.refused, each_once);
    assert_eq!(counters.refused.total(), 7);
    assert_eq!(
        (counters.late, counters.resent, counters.readers),
        (1, 1, 1)
    );
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Two readers (the second sends twice), a renewal, a revocation and the ticks before and
    /// after the deadline, in every order.
    #[test]
    fn c19_release_and_expiry_in_any_order_make_one_end(
        order in Just((0..8).collect::<Vec<u8>>()).prop_shuffle(),
        revoke in any::<bool>(),
    ) {
        let mut rank = Rank::with_active(1);
        rank.tick(5 * SECOND);
        let mut ends = Vec::new();
        let mut answers = [Vec::new(), Vec::new()];
        for event in order {
            let ended_before = !ends.is_empty();
            let mut told = |rank: &mut Rank, who: u8| {
                let verdict = rank.release(1, reader(who + 1, 1), 2).unwrap();
                let mine = &mut answers[usize::from(who)];
                prop_assert!(!(verdict.is_valid() && ended_before && mine.is_empty()));
                mine.push(verdict);
                Ok(())
            };
            match event {
                0 => told(&mut rank, 0)?,
                1 | 2 => told(&mut rank, 1)?,
                3 => drop(rank.renew([1])),
                4 if revoke => rank.revoke([1]),
                5..=7 => drop(rank.tick(9 * SECOND)),
                _ => {}
            }
            ends.append(&mut rank.ends());
        }
        for answers in &answers {
            prop_assert!(answers.iter().all(|answer| answer == &answers[0]), "{:?}", answers);
        }
        let valid = answers.iter().filter(|answers| answers[0].is_valid()).count();
        rank.tick(30 * SECOND);
        ends.append(&mut rank.ends());
        prop_assert_eq!(ends.len(), 1);
        prop_assert_eq!(ends[0].2, valid);
        prop_assert_eq!(ends[0].1 == End::Released, valid == 2);
        rank.tick(30 * SECOND);
        rank.assert_empty();
    }
}

#[test]
fn c21_a_release_must_name_the_producers_own_request() {
    let mut rank = Rank::with_active(1);
    let consumers_name = LeaseId {
        request: RequestId::new("cmpl-1-0").unwrap(),
        ..lease(1)
    };
    let refused = rank
        .table
        .release(PEER, &consumers_name, reader(1, 1), 1, rank.now);
    assert_eq!(refused, Some(Verdict::RequestMismatch));
    assert_eq!((rank.table.held(), rank.ends()), (1, vec![]));
    assert_eq!(rank.release(1, reader(1, 1), 1), VALID);
    assert_eq!(rank.ends(), [(1, End::Released, 1)]);
}

#[test]
fn c28_a_read_that_ends_after_its_lease_is_refused_and_one_that_starts_then_is_warned() {
    for how in [End::Released, End::Expired, End::Revoked] {
        let mut rank = Rank::with_active(1);
        let gone = match how {
            End::Released => {
                assert_eq!(rank.release(1, reader(1, 1), 1), VALID);
                Gone::Released
            }
            End::Expired => {
                rank.tick(30 * SECOND);
                Gone::Expired
            }
            End::Revoked => {
                rank.revoke([1]);
                Gone::Revoked
            }
        };
        assert_eq!(
            rank.release(1, reader(2, 1), 1),
            Some(Verdict::Ended),
            "{how}"
        );
        assert_eq!(rank.renew([1]).gone, [(epoch(1), gone)], "{how}");
        // When the tombstone is gone as well, nobody can tell any more, but it stays refused.
        rank.tick(30 * SECOND);
        assert_eq!(
            rank.release(1, reader(2, 1), 1),
            Some(Verdict::UnknownEpoch),
            "{how}"
        );
        assert_eq!(
            rank.renew([1]).gone,
            [(epoch(1), Gone::NeverIssued)],
            "{how}"
        );
        assert_eq!(rank.ends().len(), 1, "{how}");
        assert_eq!(rank.table.counters().late, 1, "{how}");
    }
}

#[test]
fn c29_consumed_stale_foreign_out_of_range_and_repeated_references_are_refused() {
    let mut rank = Rank::with_active(3);
    assert_eq!(rank.release(1, reader(1, 1), 1), VALID);
    rank.revoke([2]);
    rank.tick(SECOND);
    let foreign = LeaseId {
        instance: instance(2),
        ..lease(3)
    };
    assert_eq!(rank.release(1, reader(2, 1), 1), Some(Verdict::Ended));
    assert_eq!(rank.release(2, reader(2, 1), 1), Some(Verdict::Ended));
    let answer = rank
        .table
        .release(PEER, &foreign, reader(2, 1), 1, rank.now);
    assert_eq!(answer, Some(Verdict::UnknownInstance));
    assert_eq!(
        rank.release(1_000, reader(2, 1), 1),
        Some(Verdict::Overloaded)
    );
    assert_eq!(rank.release(3, reader(2, 1), 2), VALID);
    assert_eq!(
        rank.release(3, reader(2, 2), 2),
        Some(Verdict::RepeatedReader)
    );
    assert_eq!(rank.table.held(), 1);
    assert_eq!(rank.table.counters().readers, 2);
}

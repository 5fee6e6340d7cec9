//! Plans, shutdown, settings, size.

use super::*;

#[test]
fn one_plan_reserves_activates_and_revokes() {
    let mut rank = Rank::new();
    let plan = StepLeases {
        issued_up_to: 9,
        reserve: vec![(epoch(4), request(4)), (epoch(7), request(7))],
        activate: vec![epoch(4), epoch(7)],
        revoke: vec![epoch(7)],
    };
    rank.table.apply(plan, rank.now).unwrap();
    assert_eq!(rank.ends(), [(7, End::Revoked, 0)]);
    assert_eq!(rank.table.mark(), 9);
    let gauges = LeaseGauges {
        reserved: 0,
        activated: 1,
        tombstones: 1,
        early: 0,
    };
    assert_eq!(rank.table.gauges(), gauges);
}

#[test]
fn a_wrong_plan_is_refused_and_changes_nothing() {
    let plan = |issued_up_to, reserve: &[u64], activate: &[u64], revoke: &[u64]| StepLeases {
        issued_up_to,
        reserve: reserve.iter().map(|&e| (epoch(e), request(e))).collect(),
        activate: activate.iter().copied().map(epoch).collect(),
        revoke: revoke.iter().copied().map(epoch).collect(),
    };
    let out_of_order = |list, previous, at| PlanError::OutOfOrder {
        list,
        previous: epoch(previous),
        epoch: epoch(at),
    };
    let above = |list, at, issued_up_to| PlanError::AboveMark {
        list,
        epoch: epoch(at),
        issued_up_to,
    };
    let issued = |at| PlanError::AlreadyIssued {
        epoch: epoch(at),
        mark: 5,
    };
    for (wrong, error) in [
        (
            plan(4, &[], &[], &[]),
            PlanError::MarkWentBack {
                mark: 5,
                issued_up_to: 4,
            },
        ),
        (plan(6, &[5], &[], &[]), issued(5)),
        (plan(6, &[3], &[], &[]), issued(3)),
        (plan(8, &[7, 6], &[], &[]), out_of_order("reserve", 7, 6)),
        (plan(8, &[7, 7], &[], &[]), out_of_order("reserve", 7, 7)),
        (plan(8, &[8, 9], &[], &[]), above("reserve", 9, 8)),
        (plan(5, &[], &[3, 2], &[]), out_of_order("activate", 3, 2)),
        (plan(5, &[], &[3, 3], &[]), out_of_order("activate", 3, 3)),
        (plan(5, &[], &[6], &[]), above("activate", 6, 5)),
        (plan(5, &[], &[], &[3, 2]), out_of_order("revoke", 3, 2)),
        (plan(5, &[], &[], &[2, 2]), out_of_order("revoke", 2, 2)),
        (plan(5, &[], &[], &[7]), above("revoke", 7, 5)),
        (
            plan(6, &[6], &[1, 6], &[2]),
            PlanError::AlreadyActivated { epoch: epoch(1) },
        ),
    ] {
        let mut rank = Rank::with_active(2);
        rank.reserve([3, 5]);
        // It waits for epoch 6, which the last plan would have issued.
        assert_eq!(rank.release(6, reader(1, 1), 1), None);
        let before = (
            rank.table.gauges(),
            rank.table.counters(),
            rank.table.mark(),
        );
        assert_eq!(
            rank.table.apply(wrong.clone(), rank.now),
            Err(error),
            "{wrong:?}"
        );
        let after = (
            rank.table.gauges(),
            rank.table.counters(),
            rank.table.mark(),
        );
        assert_eq!(after, before, "{wrong:?}");
        assert_eq!((rank.ends(), rank.answers()), (vec![], vec![]), "{wrong:?}");
    }
}

#[test]
fn draining_takes_no_new_leases_and_lets_the_old_ones_end() {
    let mut rank = Rank::with_active(3);
    assert_eq!(rank.release(5, reader(1, 1), 1), None);
    assert!(!rank.table.is_draining());
    rank.table.begin_drain();
    assert!(rank.table.is_draining());
    assert_eq!(
        rank.answers(),
        [(PEER, 5, reader(1, 1), Verdict::UnknownEpoch)]
    );
    assert_eq!(
        rank.release(5, reader(2, 1), 1),
        Some(Verdict::UnknownEpoch)
    );
    assert_eq!(rank.renew([5]).gone, [(epoch(5), Gone::NeverIssued)]);
    let plan = StepLeases {
        issued_up_to: 6,
        reserve: vec![(epoch(5), request(5)), (epoch(6), request(6))],
        activate: vec![],
        revoke: vec![epoch(1)],
    };
    let refused = rank.table.apply(plan, rank.now);
    assert_eq!(
        refused,
        Err(PlanError::Draining {
            first: epoch(5),
            count: 2
        })
    );
    assert_eq!((rank.table.mark(), rank.table.held()), (3, 3));
    // Everything else goes on.
    assert_eq!(rank.release(1, reader(1, 1), 1), VALID);
    rank.revoke([2]);
    rank.skip_to(6);
    assert_eq!(rank.table.held(), 1);
    assert_eq!(rank.table.revoke_all(rank.now), 1);
    assert_eq!(rank.table.revoke_all(rank.now), 0);
    let expected = [
        (1, End::Released, 1),
        (2, End::Revoked, 0),
        (3, End::Revoked, 0),
    ];
    assert_eq!(rank.ends(), expected);
    rank.tick(30 * SECOND);
    rank.assert_empty();
}

#[test]
fn the_table_stays_as_small_as_what_it_holds() {
    let mut rank = Rank::with_active(10);
    for of in 11..20_000 {
        rank.reserve([of]);
        rank.activate([of]);
        assert_eq!(rank.release(of, reader(1, of), 1), VALID);
        assert!(
            rank.table.expiry_entries() <= 4 * 11 + 66,
            "{}",
            rank.table.expiry_entries()
        );
        rank.renew(1..=10);
        rank.tick(SECOND / 100);
        assert!(rank.table.gauges().tombstones <= 3_000);
    }
    assert_eq!(rank.ends().len(), 19_989);
    assert_eq!(rank.table.held(), 10);
}

#[test]
fn settings_out_of_range_are_refused_by_name() {
    let good = LeaseConfig::default();
    let nanosecond = Duration::from_nanos(1);
    let short = |setting, value, min| LeaseConfigError::TooShort {
        setting,
        value,
        min,
    };
    let long = |setting, value| LeaseConfigError::TooLong {
        setting,
        value,
        max: MAX_LEASE,
    };
    let least = Duration::from_millis(1);
    for (config, error) in [
        (
            LeaseConfig {
                duration: Duration::ZERO,
                ..good
            },
            short("duration", Duration::ZERO, least),
        ),
        (
            LeaseConfig {
                early_hold: nanosecond,
                ..good
            },
            short("early_hold", nanosecond, least),
        ),
        (
            LeaseConfig {
                lease_max: good.duration - nanosecond,
                ..good
            },
            short("lease_max", good.duration - nanosecond, good.duration),
        ),
        (
            LeaseConfig {
                lease_max: Duration::MAX,
                ..good
            },
            long("lease_max", Duration::MAX),
        ),
        (
            LeaseConfig {
                max_consumers: 0,
                ..good
            },
            LeaseConfigError::NoConsumers,
        ),
    ] {
        assert_eq!(config.validate(), Err(error.clone()));
        assert_eq!(
            LeaseTable::<u32>::new(instance(1), config).err(),
            Some(error)
        );
    }
    let tight = LeaseConfig {
        duration: least,
        lease_max: least,
        early_hold: least,
        max_consumers: 1,
        early_per_peer: 0,
        early_distance: 0,
    };
    assert_eq!(tight.validate(), Ok(()));
}

/// A rank is made before its scheduler half: it takes the half's name until it knows a lease.
#[test]
fn a_table_takes_its_name_before_its_first_lease() {
    let mut table = LeaseTable::<u32>::new(instance(1), config()).unwrap();
    assert!(table.adopt(instance(2)));
    assert_eq!(table.instance(), instance(2));
    table
        .apply(
            StepLeases {
                issued_up_to: 1,
                reserve: vec![(epoch(1), request(1))],
                ..StepLeases::default()
            },
            Instant::now(),
        )
        .unwrap();
    assert!(!table.adopt(instance(3)));
    assert!(table.adopt(instance(2)));
    assert_eq!(table.instance(), instance(2));
}

//! Two engines over fabrics that lose, delay, reorder, repeat, garble, fail and stall: whatever the
//! schedule, every transfer has one outcome in time and quiesces, memory is quiet when it is handed
//! back, and a success means the right bytes.
//!
//! A case is a seed. `PROPTEST_CASES` sets how many are run; one that failed prints its seed, and
//! `KVFERRY_FAULT_SEED` runs it again, alone.
mod case;
mod parts;
mod scenario;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvferry_engine::{Fault, FaultRates, Lane, TransferError};

use self::case::Case;
use self::scenario::Scenario;
use crate::support::*;

fn run(kind: Kind, lane: Lane, seed: u64) {
    let scenario = Scenario::of(seed);
    let mut case = Case::new(&kind, lane, seed);
    case.set_rates(scenario.consumer, scenario.producer);
    for step in &scenario.steps {
        case.step(step, &scenario);
    }
    case.end(scenario.by_shutdown);
}

/// Cases of a test where `PROPTEST_CASES` is not set, over the two lanes together.
const CASES: u64 = 48;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{name}={text:?}: a number is expected")),
    )
}

/// Runs the cases of a lane, a few at a time: most of their time is spent waiting.
fn run_all(kind: impl Fn() -> Kind + Sync, lane: Lane, share: u64, test: &str) {
    let cases = number("PROPTEST_CASES").unwrap_or(CASES).div_ceil(share);
    let only = number("KVFERRY_FAULT_SEED");
    let next = AtomicU64::new(0);
    let work = || {
        loop {
            let n = next.fetch_add(1, Ordering::Relaxed);
            let seed = match only {
                Some(seed) if n == 0 => seed,
                None if n < cases => n,
                _ => return,
            };
            let result = catch_unwind(AssertUnwindSafe(|| run(kind(), lane, seed)));
            if let Err(panic) = result {
                eprintln!(
                    "seed {seed} failed over the {lane} lane: {:#?}\nrun it again with: \
                     KVFERRY_FAULT_SEED={seed} cargo test -p kvferry-engine --test engine {test}",
                    Scenario::of(seed)
                );
                resume_unwind(panic);
            }
        }
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..4).map(|_| scope.spawn(work)).collect();
        for worker in workers {
            if let Err(panic) = worker.join() {
                resume_unwind(panic);
            }
        }
    });
}

/// A success that lies is found out by comparing bytes, each time.
#[test]
fn what_is_silently_wrong_is_noticed_by_the_verifier() {
    for (lane, fault) in [
        (Lane::Native, Fault::ReadEmpty),
        (Lane::Served, Fault::SegmentCorrupted),
        (Lane::Mapped, Fault::CopyEmpty),
        (Lane::Attached, Fault::CopyEmpty),
    ] {
        let mut case = Case::new(&loopback(), lane, 1);
        case.set_rates(FaultRates::none().with(fault, 1000), FaultRates::none());
        for blocks in 1..9 {
            case.read(0, blocks, PATIENCE);
        }
        case.finish_all();
        let counters = case.consumer.counters();
        assert_eq!(counters.transfers_succeeded, 8);
        assert_eq!(case.wrong, 8, "{fault:?}");
        case.recover();
        assert_eq!(case.wrong, 8);
    }
}

/// Operations that never complete: the outcome comes by the deadline, quiet with the endpoint's end,
/// and the peer can be connected anew.
#[test]
fn reads_that_never_complete_end_with_the_endpoint() {
    for kind in kinds() {
        let mut case = Case::new(&kind, Lane::Native, 2);
        match kind {
            Kind::Loopback(_) => {
                let stuck = FaultRates::none().with(Fault::ReadStuck, 1000);
                case.set_rates(stuck, FaultRates::none());
            }
            // Reads that UCX does not know of: see `any_schedule_over_ucx`.
            Kind::Ucx => case.control.stall(),
        }
        for blocks in 1..9 {
            case.read(0, blocks, Duration::from_millis(20));
        }
        for flight in &case.flights {
            let error = flight.transfer.wait(PATIENCE).unwrap().unwrap_err();
            assert!(
                matches!(
                    error,
                    TransferError::Stalled { .. } | TransferError::PeerLost(_)
                ),
                "{error}"
            );
        }
        assert!(case.peer.as_ref().unwrap().gone().is_some());
        case.end(false);
    }
}

/// What outlasts the close of its endpoint ends with the worker.
#[test]
fn reads_that_outlast_the_close_end_with_the_worker() {
    let mut case = Case::new(&loopback(), Lane::Native, 4);
    let stuck = FaultRates::none()
        .with(Fault::ReadStuck, 1000)
        .with(Fault::CloseStuck, 1000);
    case.set_rates(stuck, FaultRates::none());
    case.read(0, 8, Duration::from_millis(20));
    case.finish_all();
    let counters = case.consumer.counters();
    assert_eq!((counters.forced_closes, counters.worker_resets), (1, 1));
    assert_eq!((counters.quarantined_bytes, counters.kept_bytes), (0, 0));
    case.end(false);
}

/// What even that does not end keeps its memory, counted, and is let go of when it ends after all.
#[test]
fn memory_is_kept_while_its_operations_do_not_end() {
    let mut case = Case::new(&loopback(), Lane::Native, 5);
    let stuck = FaultRates::none()
        .with(Fault::ReadStuck, 1000)
        .with(Fault::CloseStuck, 1000)
        .with(Fault::ResetStuck, 1000);
    case.set_rates(stuck, FaultRates::none());
    case.read(0, 8, Duration::from_millis(20));
    until("everything was tried", || {
        case.consumer.counters().kept_bytes > 0
    });
    let counters = case.consumer.counters();
    assert_eq!(counters.kept_bytes, counters.quarantined_bytes);
    assert_eq!((counters.forced_closes, counters.worker_resets), (1, 1));
    let transfer = &case.flights[0].transfer;
    assert!(transfer.poll_outcome().is_some() && !transfer.is_quiesced());
    case.consumer.shutdown(PATIENCE).unwrap();
    assert!(case.flights[0].transfer.is_quiesced());
    let counters = case.consumer.counters();
    assert_eq!((counters.kept_bytes, counters.quarantined_bytes), (0, 0));
}

/// A copy cannot be broken off: its peer stays, and its memory is kept until it ends.
#[test]
fn a_copy_that_does_not_end_costs_its_memory_and_not_its_peer() {
    for lane in [Lane::Mapped, Lane::Attached] {
        let mut case = Case::new(&loopback(), lane, 6);
        let stuck = FaultRates::none().with(Fault::CopyStuck, 1000);
        case.set_rates(stuck, FaultRates::none());
        case.read(0, 8, Duration::from_millis(20));
        until("it is kept", || case.consumer.counters().kept_bytes > 0);
        let counters = case.consumer.counters();
        assert_eq!((counters.forced_closes, counters.worker_resets), (0, 0));
        assert!(case.peer.as_ref().unwrap().gone().is_none());
        case.set_rates(FaultRates::none(), FaultRates::none());
        case.read(0, 8, PATIENCE);
        let outcome = case.flights[1].transfer.wait(PATIENCE).unwrap();
        assert!(outcome.is_ok(), "others go on");
        // The stuck ones end with the endpoint.
        case.peer.as_ref().unwrap().disconnect();
        case.finish_all();
        assert_eq!(case.consumer.counters().kept_bytes, 0);
        case.end(false);
    }
}

/// A fabric that stands still: deadlines are kept, memory is quiet, and its release heals.
#[test]
fn a_stall_of_either_side_costs_its_transfers_and_nothing_else() {
    for lane in Lane::ALL {
        for ours in [true, false] {
            let mut case = Case::new(&loopback(), lane, 3);
            let side = if ours {
                &case.control
            } else {
                &case.producer_control
            };
            side.stall();
            case.read(0, 8, Duration::from_millis(20));
            case.read(1, 8, Duration::from_millis(300));
            case.finish_all();
            // One-sided reads and copies need no thread of the producer's.
            let expected = if ours || lane == Lane::Served { 2 } else { 0 };
            assert_eq!(case.consumer.counters().transfers_failed, expected);
            case.end(false);
        }
    }
}

#[test]
fn any_schedule_over_the_served_lane() {
    run_all(
        loopback,
        Lane::Served,
        2,
        "any_schedule_over_the_served_lane",
    );
}

#[test]
fn any_schedule_over_the_mapped_lane() {
    run_all(
        loopback,
        Lane::Mapped,
        2,
        "any_schedule_over_the_mapped_lane",
    );
}

#[test]
fn any_schedule_over_the_attached_lane() {
    run_all(
        loopback,
        Lane::Attached,
        2,
        "any_schedule_over_the_attached_lane",
    );
}

#[test]
fn any_schedule_over_the_native_lane() {
    run_all(
        loopback,
        Lane::Native,
        2,
        "any_schedule_over_the_native_lane",
    );
}

/// The served lane only: UCX 1.13 ends the process of a producer whose consumer closes an endpoint
/// in the middle of an emulated read.
#[test]
fn any_schedule_over_ucx() {
    run_all(|| Kind::Ucx, Lane::Served, 6, "any_schedule_over_ucx");
}

//! Loads that succeed, and what is told then.

use std::time::{Duration, Instant};

use kvferry_connector::contract::{
    Finish, Finished, Matched, NULL_BLOCK, SchedulerConnector, WorkerConnector,
};
use kvferry_connector::remote::Role;
use kvferry_engine::LoopbackNetwork;
use kvferry_engine::fabric::{Fault, FaultControl, FaultRates};

use crate::bench::{Fabric, PATIENCE, Request, Side, config, pair, pair_of, until};

fn every_byte_arrives(fabric: &Fabric, ranks: u32) {
    let (mut producer, mut consumer) = pair_of(fabric, |config| config.ranks = ranks);
    for round in 0..3 {
        let name = format!("round-{round}");
        let prefilled = Request::export(&name, 70);
        let blocks = [9, 3, 4, 30, 12].map(|block| block + round);
        let byte = 1 + 20 * round as u8;
        let params = producer.prefill(&prefilled, &blocks, byte);
        producer.step(&[]);
        let request = Request::new("decode", 70, Some(params));
        let own = [20, 21, 5, 40, 7];
        // One block is in the consumer's own cache.
        assert_eq!(consumer.admit(&request, &own, 16), 54);
        let received = consumer.received(&request);
        assert_eq!((received.failure, received.failed), (None, vec![]));
        assert_eq!(consumer.touched(&own[..1]), 0);
        assert_eq!(consumer.wrong(&own[1..], byte + 1), 0);
        // The producer has taken no step since: at its next one the blocks are free.
        producer.sent(&prefilled);
        assert!(!producer.scheduler.has_pending_work());
        // Looked up and given blocks once more: nothing.
        assert_eq!(
            consumer.scheduler.matched_tokens(&request.view(), 70),
            Matched::None
        );
        consumer.alloc(&request, &own, 70, 0);
        assert_eq!(
            consumer.finish(&request, &own, Finish::Stopped),
            Finished::Free
        );
        consumer.step(&[]);
        assert!(!consumer.scheduler.has_pending_work());
        for memory in &consumer.memory {
            memory
                .fill(0, memory.bytes(), crate::bench::POISON)
                .unwrap();
        }
    }
    let (here, there) = (consumer.scheduler.stats(), producer.scheduler.stats());
    assert_eq!((here.loads, here.loaded, here.failed.total()), (3, 3, 0));
    assert_eq!((here.loads_waiting, here.loads_running), (0, 0));
    assert_eq!(there.exported, 3);
    assert_eq!(there.parts_released, 3 * u64::from(ranks));
    assert_eq!(
        (there.parts_expired, there.parts_revoked, there.leases_held),
        (0, 0, 0)
    );
    for worker in &consumer.workers {
        let stats = worker.loader_stats();
        assert_eq!(
            (stats.loaded, stats.blocks, stats.bytes),
            (3, 3 * 4, 3 * 4 * 2 * 512)
        );
        assert!((1..=3 * 4 * 2).contains(&stats.operations), "{stats:?}");
        assert!(stats.reading_us > 0, "{stats:?}");
        assert_eq!(stats.confirmation.count(), 3);
    }
    for worker in &producer.workers {
        assert_eq!(worker.loader_stats().freeing.count(), 3);
    }
}

#[test]
fn every_byte_arrives_and_the_blocks_are_free_loopback() {
    every_byte_arrives(&Fabric::loopback(), 1);
}

#[test]
fn every_byte_arrives_and_the_blocks_are_free_ucx() {
    every_byte_arrives(&Fabric::Ucx, 1);
}

/// Every rank reads from the producer's rank of its number, and every rank's part is released.
#[test]
fn every_byte_arrives_on_two_ranks() {
    every_byte_arrives(&Fabric::loopback(), 2);
}

/// The seed (c): a full local hit still notifies.
#[test]
fn c1_a_full_hit_frees_the_producers_blocks_without_a_read() {
    let (mut producer, mut consumer) = pair(&Fabric::loopback());
    let prefilled = Request::export("p", 32);
    let params = producer.prefill(&prefilled, &[2, 3], 1);
    producer.step(&[]);
    let request = Request::new("d", 32, Some(params));
    assert_eq!(consumer.admit(&request, &[8, 9], 32), 0);
    consumer.step(&[&request]);
    producer.sent(&prefilled);
    assert_eq!(consumer.touched(&[8, 9]), 0);
    let stats = consumer.scheduler.stats();
    assert_eq!((stats.released_unread, stats.loads), (1, 0));
    assert!(!consumer.scheduler.has_pending_work());
}

/// The seed (e): a prompt shorter than a block moves, since exports round up.
#[test]
fn a_prompt_shorter_than_a_block_moves() {
    let (mut producer, mut consumer) = pair(&Fabric::loopback());
    let prefilled = Request::export("p", 5);
    let params = producer.prefill(&prefilled, &[2], 77);
    producer.step(&[]);
    let request = Request::new("d", 5, Some(params));
    assert_eq!(consumer.admit(&request, &[8], 0), 5);
    assert_eq!(consumer.received(&request).failure, None);
    assert_eq!(consumer.wrong(&[8], 77), 0);
    producer.sent(&prefilled);
}

/// One engine may be both: it prefills for another and reads from it at the same time.
#[test]
fn both_roles_in_one_engine() {
    let fabric = Fabric::loopback();
    let mut sides = ["a", "b"].map(|name| Side::new(&config(name, Role::Both), &fabric));
    let prefilled = Request::export("p", 40);
    let params = sides
        .each_mut()
        .map(|side| side.prefill(&prefilled, &[1, 2, 3], 9));
    for (from, to) in [(0, 1), (1, 0)] {
        sides[from].step(&[]);
        let request = Request::new("d", 40, Some(params[from].clone()));
        assert_eq!(sides[to].admit(&request, &[11, 12, 13], 0), 40);
        assert_eq!(sides[to].received(&request).failure, None);
        assert_eq!(sides[to].wrong(&[11, 12, 13], 9), 0);
        sides[from].sent(&prefilled);
    }
}

/// C16: no more loads run at a time than configured; all are served.
#[test]
fn c16_concurrent_loads_are_bounded() {
    let (mut producer, mut consumer) = pair_of(&Fabric::loopback(), |config| {
        config.max_concurrent_loads = 2
    });
    let mut all = Vec::new();
    for number in 0..12 {
        let prefilled = Request::export(&format!("p{number}"), 16);
        let params = producer.prefill(&prefilled, &[1 + number], number as u8);
        let request = Request::new(&format!("d{number}"), 16, Some(params));
        assert_eq!(consumer.admit(&request, &[20 + number], 0), 16);
        all.push((prefilled, request));
    }
    producer.step(&[]);
    let mut left: Vec<_> = all.iter().map(|(_, request)| request.id.clone()).collect();
    consumer.step_until("all loads", |report| {
        left.retain(|id| !report.received.iter().any(|it| it.request == *id));
        left.is_empty().then_some(())
    });
    for number in 0..12 {
        assert_eq!(consumer.wrong(&[20 + number], number as u8), 0);
    }
    let stats = consumer.workers[0].loader_stats();
    assert_eq!((stats.started, stats.reading, stats.loaded), (12, 0, 12));
    assert!(stats.reading_max <= 2, "{stats:?}");
}

/// How a producer may be when its consumer has nothing to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hears {
    Everything,
    Nothing,
    IsGone,
}

/// C2: nothing to read, for lack of tokens or of blocks: the request is over once, whether the release can be sent or
/// not, and nothing of it is left.
#[test]
fn c2_nothing_to_read_is_over_once_also_if_the_release_is_not_heard() {
    for hears in [Hears::Everything, Hears::Nothing, Hears::IsGone] {
        for null_blocks in [false, true] {
            let network = LoopbackNetwork::new();
            let control = FaultControl::new(2, FaultRates::none()).unwrap();
            let settings = |name, role| {
                let mut config = config(name, role);
                config.borrow.confirm_timeout = Duration::from_millis(400);
                config.borrow.resend_after = Duration::from_millis(50);
                config
            };
            let loopback = Fabric::Loopback(network.clone());
            let mut producer = Side::new(&settings("prefill", Role::Producer), &loopback);
            let fabric = Fabric::Faulty(network, control.clone());
            let mut consumer = Side::new(&settings("decode", Role::Consumer), &fabric);
            let prefilled = Request::export("p", 32);
            let params = producer.prefill(&prefilled, &[2, 3], 1);
            producer.step(&[]);
            let mut producer = (hears != Hears::IsGone).then_some(producer);
            let request = Request::new("d", 32, Some(params));
            let (blocks, computed) = if null_blocks {
                ([NULL_BLOCK; 2], 0)
            } else {
                ([8, 9], 32)
            };
            consumer.scheduler.on_new_request(&request.view());
            consumer.step(&[]);
            if let Some(producer) = &producer {
                until("a renewal", || producer.renewed(0) > 0);
            }
            if hears == Hears::Nothing {
                control.set_rates(FaultRates::none().with(Fault::SendLost, 1000));
            }
            let tokens = consumer.admit(&request, &blocks, computed);
            assert_eq!(tokens, 32 - computed);
            let mut reports = consumer.step(&[&request]).received;
            // An async load is reported in any case, nothing else ever is.
            if null_blocks && reports.is_empty() {
                reports.push(consumer.received(&request));
            }
            assert_eq!(reports.len(), usize::from(null_blocks), "{hears:?}");
            for report in &reports {
                assert!(
                    report.failure.is_some() && report.failed.is_empty(),
                    "{report:?}"
                );
            }
            assert_eq!(
                consumer.finish(&request, &blocks, Finish::Stopped),
                Finished::Free
            );
            if let (Hears::Everything, Some(producer)) = (hears, &mut producer) {
                producer.sent(&prefilled);
                let leases = producer.workers[0].lease_snapshot(PATIENCE).unwrap();
                assert_eq!((leases.counters.readers, leases.counters.released), (1, 1));
            }
            // Past the time for an answer: the release has been given up, and that changes nothing.
            std::thread::sleep(Duration::from_millis(500));
            for _ in 0..5 {
                assert_eq!(consumer.step(&[]).received, [], "{hears:?}: told twice");
            }
            assert!(!consumer.scheduler.has_pending_work());
            let stats = consumer.scheduler.stats();
            assert_eq!((stats.loads_waiting, stats.loads_running), (0, 0));
            assert_eq!(stats.late_reports, 0);
            assert_eq!(stats.released_unread, u64::from(!null_blocks));
            assert_eq!(stats.failed.total(), u64::from(null_blocks));
            assert_eq!(consumer.workers[0].loader_stats().started, 0);
            assert_eq!(consumer.workers[0].engine().counters().transfers_started, 0);
            // Nothing is waited for either.
            let ending = Instant::now();
            consumer.workers[0].shutdown(PATIENCE);
            assert!(ending.elapsed() < PATIENCE / 2, "something was left");
        }
    }
}

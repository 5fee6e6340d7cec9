//! Requests that end before, while and after they are loaded.

use kvferry_connector::contract::{Finish, Finished, LoadFailure, SchedulerConnector};

use crate::bench::{Fabric, Request, pair};

/// C22: refused before admission: the producer's blocks are free at once, unread.
#[test]
fn c22_a_request_that_is_never_admitted_frees_the_producers_blocks() {
    let (mut producer, mut consumer) = pair(&Fabric::loopback());
    let prefilled = Request::export("p", 32);
    let params = producer.prefill(&prefilled, &[2, 3], 1);
    producer.step(&[]);
    let request = Request::new("d", 32, Some(params));
    consumer.scheduler.on_new_request(&request.view());
    assert_eq!(
        consumer.finish(&request, &[], Finish::Failed),
        Finished::Free
    );
    consumer.step(&[]);
    producer.sent(&prefilled);
    let released = producer.scheduler.stats();
    assert_eq!((released.parts_released, released.parts_expired), (1, 0));
}

/// C23: while the load runs, or waits: one report, and the producer's blocks are free.
#[test]
fn c23_an_abort_while_loading_is_reported_once_and_released() {
    for steps in [0, 1, 3] {
        let (mut producer, mut consumer) = pair(&Fabric::loopback());
        let prefilled = Request::export("p", 256);
        let blocks: Vec<u32> = (1..17).collect();
        let params = producer.prefill(&prefilled, &blocks, 1);
        producer.step(&[]);
        let request = Request::new("d", 256, Some(params));
        let own: Vec<u32> = (20..36).collect();
        assert_eq!(consumer.admit(&request, &own, 0), 256);
        let mut reports = 0;
        for _ in 0..steps {
            reports += consumer.step(&[]).received.len();
        }
        assert_eq!(
            consumer.finish(&request, &own, Finish::Aborted),
            Finished::Free
        );
        if reports == 0 {
            let received = consumer.received(&request);
            assert!(
                matches!(received.failure, None | Some(LoadFailure::Aborted)),
                "{received:?}"
            );
        }
        producer.sent(&prefilled);
        for _ in 0..5 {
            assert_eq!(consumer.step(&[]).received, []);
        }
        assert!(!consumer.scheduler.has_pending_work());
        assert_eq!(consumer.workers[0].loader_stats().reading, 0);
    }
}

/// C6: preempted on the producer before it had finished: nobody ever hears of its blocks.
#[test]
fn c6_a_preempted_prefill_exports_what_was_computed_anew() {
    let (mut producer, mut consumer) = pair(&Fabric::loopback());
    let prefilled = Request::export("p", 32);
    producer.scheduler.on_new_request(&prefilled.view());
    producer.step(&[&prefilled]);
    producer.write(&[2, 3], 50);
    producer
        .scheduler
        .preempted(std::slice::from_ref(&prefilled.id));
    producer.step(&[]);
    let params = producer.prefill(&prefilled, &[7, 8], 90);
    producer.step(&[]);
    let request = Request::new("d", 32, Some(params));
    assert_eq!(consumer.admit(&request, &[11, 12], 0), 32);
    assert_eq!(consumer.received(&request).failure, None);
    assert_eq!(consumer.wrong(&[11, 12], 90), 0);
    producer.sent(&prefilled);
    let stats = producer.scheduler.stats();
    assert_eq!(
        (stats.exported, stats.revoked, stats.parts_released),
        (1, 1, 1)
    );
}

//! A progress thread that has ended by a panic: what it held is never reported, and the rank says so.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use kvferry_connector::contract::{WorkerConnector, WorkerLost};
use kvferry_connector::remote::{RemoteWorker, Role};
use kvferry_engine::LoopbackNetwork;
use kvferry_engine::fabric::{FaultControl, FaultRates};

use crate::bench::{Fabric, PATIENCE, Request, Side, config, connected, until};

/// A service on this rank's progress thread panics; what the rank says then. Before that it reports nothing.
fn lost(worker: &mut RemoteWorker, panics: &AtomicBool) -> WorkerLost {
    panics.store(true, Ordering::Relaxed);
    worker.engine().wake_services().unwrap();
    let deadline = Instant::now() + PATIENCE;
    loop {
        match worker.take_report() {
            Ok(report) => assert!(report.is_empty(), "{report:?}"),
            Err(lost) => return lost,
        }
        assert!(
            Instant::now() < deadline,
            "nobody says that the thread is gone"
        );
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

fn expected() -> WorkerLost {
    WorkerLost {
        rank: 0,
        thread: "progress thread",
        reason: "it panicked: a bug".to_owned(),
    }
}

/// C54, C92: while a read is under way. When the engine is taken down the loader is told that its transfer is over; not
/// even that is reported.
#[test]
fn c92_a_rank_whose_progress_thread_panicked_reports_no_load_any_more() {
    let (network, panics) = (LoopbackNetwork::new(), Arc::new(AtomicBool::new(false)));
    let control = FaultControl::new(1, FaultRates::none()).unwrap();
    let plain = Fabric::Loopback(network.clone());
    let mut producer = Side::new(&config("prefill", Role::Producer), &plain);
    let buggy = Fabric::Buggy(network, control.clone(), Arc::clone(&panics));
    let mut consumer = Side::new(&config("decode", Role::Consumer), &buggy);
    let params = producer.prefill(&Request::export("p", 32), &[2, 3], 1);
    producer.step(&[]);
    let request = Request::new("d", 32, Some(params));
    connected(&producer, &mut consumer, &request);
    control.stall();
    consumer.alloc(&request, &[8, 9], 0, 32);
    consumer.step(&[]);
    until("a read", || consumer.workers[0].loader_stats().reading == 1);
    let worker = &mut consumer.workers[0];
    let lost = lost(worker, &panics);
    assert_eq!(lost, expected());
    // The loader lives, and would have something to say.
    until("the load's end", || {
        let stats = worker.loader_stats();
        stats.loaded + stats.failed > 0
    });
    for _ in 0..3 {
        assert_eq!(worker.take_report(), Err(expected()));
    }
}

/// What is held for others is never reported as sent: nobody knows who still reads it.
#[test]
fn c92_a_rank_whose_progress_thread_panicked_reports_no_lease_any_more() {
    let (network, panics) = (LoopbackNetwork::new(), Arc::new(AtomicBool::new(false)));
    let control = FaultControl::new(1, FaultRates::none()).unwrap();
    let buggy = Fabric::Buggy(network, control, Arc::clone(&panics));
    let mut producer = Side::new(&config("prefill", Role::Producer), &buggy);
    producer.prefill(&Request::export("p", 32), &[2, 3], 1);
    producer.step(&[]);
    let worker = &mut producer.workers[0];
    assert_eq!(lost(worker, &panics), expected());
    assert_eq!(worker.take_report(), Err(expected()));
    // A shutdown ends as ever.
    worker.shutdown(std::time::Duration::ZERO);
    assert!(worker.take_report().unwrap().is_empty());
}

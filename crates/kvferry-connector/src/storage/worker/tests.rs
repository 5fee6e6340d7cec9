//! Deadlines and aborts, with a disk that never answers.

use kvferry_engine::HostPool;

use super::super::{BlockKey, KeyedBlock, StorageSettings};
use super::*;
use crate::contract::{CacheGroup, CacheLayer, Role};

/// A worker whose disk never answers: its jobs stay where they are.
fn stuck(
    path: &std::path::Path,
) -> (
    StorageWorker,
    Receiver<Arc<LoadJob>>,
    Receiver<Arc<SaveJob>>,
) {
    let mut settings = StorageSettings::at(path);
    settings.io_timeout_ms = 50;
    let config = StorageConfig {
        settings,
        model: "tiny".to_owned(),
        layout: "LBHNC float32".to_owned(),
        block_tokens: vec![4],
        reach: Vec::new(),
        role: Role::Both,
        world: 1,
        one_pool: true,
    };
    let mut worker = StorageWorker::open(config, 0).unwrap();
    let layers = vec![CacheLayer {
        layer: 0,
        group: 0,
        memory: HostPool::new(4096).unwrap().region().unwrap(),
        offset: 0,
        block_bytes: 64,
        block_stride: 64,
        blocks: 16,
    }];
    let groups = vec![CacheGroup { block_tokens: 4 }];
    worker.register(&CacheLayout { groups, layers }).unwrap();
    let (loads, load_queue) = unbounded();
    let (saves, save_queue) = unbounded();
    worker.jobs = Some(Queues { loads, saves });
    (worker, load_queue, save_queue)
}

fn block(block: u32) -> KeyedBlock {
    KeyedBlock {
        key: BlockKey::from([block as u8; 32]),
        group: 0,
        block,
    }
}

fn reports(worker: &mut StorageWorker, done: impl Fn(&WorkerReport) -> bool) -> WorkerReport {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let report = worker.take_report();
        if done(&report) {
            return report;
        }
        assert!(Instant::now() < deadline, "{report:?}");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn c56_a_disk_that_never_answers_costs_loads_and_saves_by_their_deadline() {
    let directory = tempfile::tempdir().unwrap();
    let (mut worker, loads, saves) = stuck(directory.path());
    let request = RequestId::new("a").unwrap();
    worker.begin_step(StepPlan::Storage(Plan {
        load: vec![Load {
            request: request.clone(),
            blocks: vec![block(1), block(2)],
            unknown: Vec::new(),
        }],
        ..Plan::default()
    }));
    // The second block is being written at that moment: it is not the scheduler's to give away.
    let jobs: Vec<_> = loads.try_iter().collect();
    assert!(jobs[1].claim.begin());
    until_late(&mut worker);
    assert!(worker.take_report().received.is_empty());
    assert!(
        !jobs[0].claim.begin(),
        "a block that was given up may still be written"
    );
    assert!(jobs[1].claim.end());
    worker.loaded(0, 1, Ok(()));
    let received = worker.take_report().received;
    let failed = vec![FailedBlock { group: 0, block: 1 }];
    assert_eq!(
        received,
        [Received {
            request: request.clone(),
            failure: Some(LoadFailure::Stalled),
            failed
        }]
    );
    // What the thread says of it when it comes back after all is not news.
    worker.loaded(0, 0, Ok(()));
    assert!(worker.take_report().is_empty());
    // Saves: one that waits, one whose block was read already. Both let go, and the request with them.
    let save = |number| Save {
        number,
        request: request.clone(),
        block: block(number as u32 + 1),
    };
    worker.begin_step(StepPlan::Storage(Plan {
        save: vec![save(0), save(1)],
        ..Plan::default()
    }));
    worker.end_step();
    let jobs: Vec<_> = saves.try_iter().collect();
    assert!(jobs[1].claim.begin() && jobs[1].claim.end());
    worker.begin_step(StepPlan::Storage(Plan {
        finished: vec![request.clone()],
        ..Plan::default()
    }));
    let report = reports(&mut worker, |report| !report.sent.is_empty());
    assert_eq!(report.sent, [request]);
    assert!(
        !jobs[0].claim.begin(),
        "a block that was given up may still be read"
    );
    assert!(worker.saves.is_empty() && worker.saving.is_empty() && worker.loads.is_empty());
}

#[test]
fn c23_an_aborted_load_is_reported_at_once_whatever_the_disk_does() {
    let directory = tempfile::tempdir().unwrap();
    let (mut worker, loads, _saves) = stuck(directory.path());
    worker.config.settings.io_timeout_ms = 3_600_000;
    let request = RequestId::new("a").unwrap();
    let load = Load {
        request: request.clone(),
        blocks: vec![block(1), block(2)],
        unknown: Vec::new(),
    };
    worker.begin_step(StepPlan::Storage(Plan {
        load: vec![load],
        ..Plan::default()
    }));
    let jobs: Vec<_> = loads.try_iter().collect();
    worker.begin_step(StepPlan::Storage(Plan {
        abort: vec![request.clone()],
        ..Plan::default()
    }));
    let failed = vec![
        FailedBlock { group: 0, block: 1 },
        FailedBlock { group: 0, block: 2 },
    ];
    let expected = Received {
        request,
        failure: Some(LoadFailure::Aborted),
        failed,
    };
    assert_eq!(worker.take_report().received, [expected]);
    assert!(jobs.iter().all(|job| !job.claim.begin()));
    assert_eq!(worker.stats().loads_cancelled, 2);
}

fn until_late(worker: &mut StorageWorker) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while worker.stats().loads_cancelled == 0 {
        assert!(worker.take_report().is_empty() && Instant::now() < deadline);
        thread::sleep(Duration::from_millis(1));
    }
}

//! Deadlines and aborts, with a disk that never answers.

use kvferry_engine::{HostPool, MemoryRegion};

use super::super::file::HEADER_BYTES;
use super::super::{BlockKey, KeyedBlock, StorageScheduler, StorageSettings};
use super::*;
use crate::contract::{
    Aggregator, CacheGroup, CacheLayer, Finish, Finished, FinishedRequest, GroupBlocks,
    RequestView, Role, Scheduled, SchedulerConnector, StepView,
};

fn config(settings: StorageSettings, role: Role) -> StorageConfig {
    StorageConfig {
        settings,
        model: "tiny".to_owned(),
        layout: "LBHNC float32".to_owned(),
        block_tokens: vec![4],
        reach: Vec::new(),
        role,
        world: 1,
        one_pool: true,
    }
}

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
    let config = config(settings, Role::Both);
    let mut worker = StorageWorker::open(config, 0).unwrap();
    register(&mut worker);
    let (loads, load_queue) = unbounded();
    let (saves, save_queue) = unbounded();
    // The threads see the end of their queues.
    worker.jobs = Some(Queues { loads, saves });
    worker.threads.clear();
    (worker, load_queue, save_queue)
}

/// Sixteen blocks of 64 bytes.
fn register(worker: &mut StorageWorker) -> MemoryRegion {
    let memory = HostPool::new(4096).unwrap().region().unwrap();
    let layers = vec![CacheLayer {
        layer: 0,
        group: 0,
        memory: memory.clone(),
        offset: 0,
        block_bytes: 64,
        block_stride: 64,
        blocks: 16,
    }];
    let groups = vec![CacheGroup { block_tokens: 4 }];
    worker.register(&CacheLayout { groups, layers }).unwrap();
    memory
}

#[test]
fn c92_a_thread_that_ended_by_itself_ends_the_engine() {
    let files = tempfile::tempdir().unwrap();
    let (mut worker, _loads, _saves) = stuck(files.path());
    assert!(worker.take_report().unwrap().is_empty());
    worker.threads.push(std::thread::spawn(|| panic!("a bug")));
    let deadline = Instant::now() + Duration::from_secs(60);
    let lost = loop {
        match worker.take_report() {
            Ok(_) => assert!(Instant::now() < deadline, "nobody says that it is gone"),
            Err(lost) => break lost,
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    assert_eq!(
        (lost.rank, lost.thread, &*lost.reason),
        (0, "storage thread", "it panicked: a bug")
    );
    assert_eq!(worker.take_report(), Err(lost));
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
        let report = worker.take_report().unwrap();
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
    assert!(worker.take_report().unwrap().received.is_empty());
    assert!(
        !jobs[0].claim.begin(),
        "a block that was given up may still be written"
    );
    assert!(jobs[1].claim.end());
    worker.loaded(0, 1, Ok(()));
    let received = worker.take_report().unwrap().received;
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
    assert!(worker.take_report().unwrap().is_empty());
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
    assert_eq!(worker.take_report().unwrap().received, [expected]);
    assert!(jobs.iter().all(|job| !job.claim.begin()));
    assert_eq!(worker.stats().loads_cancelled, 2);
}

fn until_late(worker: &mut StorageWorker) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while worker.stats().loads_cancelled == 0 {
        assert!(worker.take_report().unwrap().is_empty() && Instant::now() < deadline);
        thread::sleep(Duration::from_millis(1));
    }
}

/// Both halves, and a directory whose lock somebody keeps: the only thread hangs in it, for as long as it is kept.
struct Hung {
    scheduler: StorageScheduler,
    worker: StorageWorker,
    ranks: Aggregator,
    memory: MemoryRegion,
    lock: Option<std::fs::File>,
    files: tempfile::TempDir,
}

impl Hung {
    fn new() -> Self {
        let files = tempfile::tempdir().unwrap();
        let mut settings = StorageSettings::at(files.path());
        settings.io_threads = 1;
        // How long the thread would wait.
        settings.io_timeout_ms = 3_600_000;
        let config = config(settings, Role::Producer);
        let scheduler = StorageScheduler::new(config.clone()).unwrap();
        let mut worker = StorageWorker::open(config, 0).unwrap();
        let memory = register(&mut worker);
        let lock = std::fs::File::open(files.path().join(".kvferry-usage")).unwrap();
        lock.lock().unwrap();
        Self {
            scheduler,
            worker,
            ranks: Aggregator::new(1),
            memory,
            lock: Some(lock),
            files,
        }
    }

    fn step(&mut self, scheduled: &[Scheduled<'_>]) {
        let plan = self.scheduler.build_step(&StepView {
            number: 0,
            scheduled,
        });
        self.worker.release_blocks(&plan);
        self.worker.begin_step(plan);
        self.worker.end_step();
        let report = self.worker.take_report().unwrap();
        let all = self.ranks.take([(0, report)]);
        self.scheduler.on_report(&all);
    }

    /// A request of these tokens in these blocks, from beginning to end; whether its blocks were held.
    fn run(&mut self, name: &str, tokens: &[u32], blocks: &[u32]) -> bool {
        let id = RequestId::new(name).unwrap();
        let request = RequestView {
            id: &id,
            tokens,
            prompt: tokens.len() as u32,
            params: None,
            extra_key: "",
        };
        let blocks = [blocks.to_vec()];
        let (blocks, computed) = (GroupBlocks(&blocks), tokens.len() as u32);
        self.scheduler.on_new_request(&request);
        self.step(&[Scheduled {
            request,
            new_blocks: blocks,
            renewed: true,
            computed: 0,
            tokens: computed,
        }]);
        let finished = self.scheduler.request_finished(&FinishedRequest {
            request,
            blocks,
            computed,
            in_flight: 0,
            how: Finish::Length,
        });
        matches!(finished, Finished::Hold { .. })
    }

    fn until(&mut self, what: &str, done: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !done(self) {
            self.step(&[]);
            assert!(
                Instant::now() < deadline,
                "{what}: {:?}",
                self.worker.stats()
            );
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// The payloads of all files, sorted.
    fn saved(&self) -> Vec<Vec<u8>> {
        let mut found = Vec::new();
        let mut left = vec![self.files.path().to_owned()];
        while let Some(path) = left.pop() {
            for entry in std::fs::read_dir(path).unwrap() {
                let path = entry.unwrap().path();
                match path.extension() {
                    _ if path.is_dir() => left.push(path),
                    Some(extension) if extension == "kv" => {
                        found.push(std::fs::read(path).unwrap()[HEADER_BYTES..].to_vec());
                    }
                    _ => {}
                }
            }
        }
        found.sort();
        found
    }
}

#[test]
fn c56_saves_that_hang_have_failed_by_their_deadline_and_the_engine_rests() {
    let mut hung = Hung::new();
    hung.memory.fill(0, 16 * 64, 7).unwrap();
    let tokens: Vec<u32> = (0..12).collect();
    assert!(
        hung.run("a", &tokens, &[1, 2, 3]),
        "its saves read its blocks"
    );
    hung.worker.config.settings.io_timeout_ms = 50;
    hung.until("rest", |it| !it.scheduler.has_pending_work());
    let stats = hung.worker.stats();
    assert_eq!((stats.saves_stalled, stats.pending_saves), (3, 0));
    assert_eq!((stats.blocks_saved, stats.saves_cancelled), (0, 0));
    let stats = hung.scheduler.stats();
    assert_eq!((stats.held, stats.pending_saves, stats.unknown), (0, 0, 0));
    // The blocks are somebody else's now.
    hung.memory.fill(0, 16 * 64, 9).unwrap();
    // While the only thread hangs, nothing is begun, held, or put behind it.
    hung.until("a thread that is late", |it| {
        it.worker
            .shared
            .busy
            .all_longer_than(it.worker.config.io_timeout())
    });
    let waiting = |it: &Hung| it.worker.jobs.as_ref().map(|jobs| jobs.saves.len());
    assert_eq!(waiting(&hung), Some(2));
    let others: Vec<u32> = (100..108).collect();
    assert!(!hung.run("b", &others, &[4, 5]));
    hung.step(&[]);
    assert!(!hung.scheduler.has_pending_work());
    assert_eq!(
        (waiting(&hung), hung.worker.stats().saves_stalled),
        (Some(2), 5)
    );
    // The disk is back: what had been read before is written, and nothing that was given up.
    drop(hung.lock.take());
    hung.until("the thread", |it| {
        let timeout = it.worker.config.io_timeout();
        waiting(it) == Some(0) && !it.worker.shared.busy.all_longer_than(timeout)
    });
    hung.until("its file", |it| it.saved().len() == 1);
    assert_eq!(hung.saved(), [vec![7; 64]]);
    // It was counted as stalled and is not counted again.
    let others: Vec<u32> = (200..204).collect();
    hung.worker.config.settings.io_timeout_ms = 3_600_000;
    hung.run("c", &others, &[6]);
    hung.until("rest", |it| !it.scheduler.has_pending_work());
    assert_eq!(hung.saved(), [vec![7; 64], vec![9; 64]]);
    let stats = hung.worker.stats();
    assert_eq!((stats.blocks_saved, stats.saves_stalled), (1, 5));
    assert_eq!((stats.save_failures, stats.pending_saves), (0, 0));
}

#[test]
fn what_waits_for_a_thread_is_bounded() {
    let directory = tempfile::tempdir().unwrap();
    let (mut worker, _loads, saves) = stuck(directory.path());
    worker.config.settings.max_pending_saves = 2;
    worker.config.settings.io_timeout_ms = 3_600_000;
    let save = |number| Save {
        number,
        request: RequestId::new("a").unwrap(),
        block: block(number as u32 + 1),
    };
    worker.begin_step(StepPlan::Storage(Plan {
        save: (0..5).map(save).collect(),
        ..Plan::default()
    }));
    worker.end_step();
    let report = worker.take_report().unwrap();
    let Some(ReportPart::Storage(report)) = report.part else {
        panic!("{report:?}");
    };
    assert_eq!((report.ended, saves.len()), (vec![2, 3, 4], 2));
    assert_eq!(
        (worker.stats().saves_stalled, worker.stats().pending_saves),
        (3, 2)
    );
}

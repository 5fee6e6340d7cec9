//! The worker half: starts loads and saves of one rank, and reports their ends.
//!
//! Responsible for jobs, deadlines and reports; the I/O is the threads' ([`super::io`]). Every load of a plan
//! is reported once, every save ends once, and by then no thread touches their blocks.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::mem::take;
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender, unbounded};
use kvferry_wire::{Incarnation, RequestId, WireError};
use thiserror::Error;

use super::budget::{Budget, RoomError};
use super::claim::Claim;
use super::file::Files;
use super::io::{self, Busy, Event, LoadJob, SaveJob, Shared, count_evicted};
use super::layout::Layout;
use super::log::Log;
use super::plan::{Load, Plan, Report, Save};
use super::stats::{WorkerCounters, add, subtract};
use super::{StorageConfig, StorageConfigError, StorageWorkerStats};
use crate::contract::{
    CacheLayout, FailedBlock, LoadFailure, Received, RegisterCacheError, ReportPart, StepPlan,
    WorkerConnector, WorkerLost, WorkerReport,
};
use crate::metrics::{Figures, STORAGE_WORKER};

mod saving;

use self::saving::Saving;

/// Why a rank's half of a shared storage could not be opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenStorageError {
    /// The configuration.
    #[error(transparent)]
    Config(#[from] StorageConfigError),
    /// The directory.
    #[error("shared storage: {0}")]
    Directory(#[from] RoomError),
    /// The operating system gave no thread.
    #[error("shared storage: start a thread: {0}")]
    Thread(std::io::Error),
    /// The operating system gave no random number.
    #[error("shared storage: {0}")]
    Random(#[from] WireError),
}

#[derive(Debug)]
struct Loading {
    request: RequestId,
    jobs: Vec<Arc<LoadJob>>,
    over: Vec<bool>,
    left: usize,
    failure: Option<LoadFailure>,
    failed: Vec<FailedBlock>,
    since: Instant,
}

#[derive(Debug)]
struct Queues {
    loads: Sender<Arc<LoadJob>>,
    saves: Sender<Arc<SaveJob>>,
}

/// The worker half of [`SharedStorage`](super), of one rank.
///
/// Dropping it gives up what is under way without waiting; [`WorkerConnector::shutdown`] lets saves
/// end first.
#[derive(Debug)]
pub struct StorageWorker {
    config: StorageConfig,
    shared: Arc<Shared>,
    /// The way to the threads, until the end.
    jobs: Option<Queues>,
    events: Receiver<Event>,
    threads: Vec<JoinHandle<()>>,
    /// Once one of them has ended by itself: its job will not end.
    lost: Option<WorkerLost>,
    next_ticket: u64,
    loads: BTreeMap<u64, Loading>,
    saves: BTreeMap<u64, Saving>,
    /// How many of `saves` each request has.
    saving: HashMap<RequestId, usize>,
    /// Of the step that is under way: its saves start when it is over.
    step: Vec<Save>,
    finished: HashSet<RequestId>,
    report: WorkerReport,
    ended: Vec<u64>,
}

impl StorageWorker {
    /// Opens the directory, makes it if need be, counts what is in it (and removes what is too
    /// much), and starts the threads. Waits for the disk.
    ///
    /// # Errors
    /// A configuration out of range, a directory that cannot be made, listed or locked, no threads.
    pub fn open(config: StorageConfig, rank: u32) -> Result<Self, OpenStorageError> {
        config.validate()?;
        if rank >= config.world {
            return Err(OpenStorageError::Config(StorageConfigError::Rank {
                rank,
                world: config.world,
            }));
        }
        let (root, max_bytes) = (&config.settings.path, config.settings.max_bytes);
        let (budget, evicted) =
            Budget::open(root, max_bytes, config.io_timeout(), Incarnation::random()?)?;
        let shared = Arc::new(Shared {
            rank,
            files: Files::new(&config),
            budget,
            layout: OnceLock::new(),
            counters: WorkerCounters::default(),
            log: Log::default(),
            busy: Busy::new(config.settings.io_threads),
        });
        count_evicted(&shared.counters, evicted);
        let (loads, load_queue) = unbounded();
        let (saves, save_queue) = unbounded();
        let (events_in, events) = unbounded();
        let threads = (0..config.settings.io_threads)
            .map(|number| {
                let (shared, events) = (Arc::clone(&shared), events_in.clone());
                let (loads, saves) = (load_queue.clone(), save_queue.clone());
                thread::Builder::new()
                    .name(format!("kvferry-io-{number}"))
                    .spawn(move || io::run(&shared, number, &loads, &saves, &events))
            })
            .collect::<Result<_, _>>()
            .map_err(OpenStorageError::Thread)?;
        tracing::info!(
            path = %root.display(), rank, world = config.world, max_bytes, evicted = evicted.files,
            "shared storage is open"
        );
        Ok(Self {
            config,
            shared,
            jobs: Some(Queues { loads, saves }),
            events,
            threads,
            lost: None,
            next_ticket: 0,
            loads: BTreeMap::new(),
            saves: BTreeMap::new(),
            saving: HashMap::new(),
            step: Vec::new(),
            finished: HashSet::new(),
            report: WorkerReport::default(),
            ended: Vec::new(),
        })
    }

    /// What it has done so far. Counters of files include those that no report waited for.
    #[must_use]
    pub fn stats(&self) -> StorageWorkerStats {
        self.shared.counters.snapshot()
    }

    fn start_load(&mut self, load: Load) {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let jobs: Vec<Arc<LoadJob>> = (0..)
            .zip(load.blocks)
            .map(|(index, block)| {
                let claim = Claim::default();
                Arc::new(LoadJob {
                    claim,
                    ticket,
                    index,
                    block,
                })
            })
            .collect();
        let loading = Loading {
            request: load.request,
            over: vec![false; jobs.len()],
            left: jobs.len(),
            jobs,
            failure: (!load.unknown.is_empty()).then_some(LoadFailure::Storage),
            failed: load.unknown,
            since: Instant::now(),
        };
        add(&self.shared.counters.pending_loads, 1);
        if let Some(Queues { loads, .. }) = &self.jobs {
            for job in &loading.jobs {
                let _ = loads.send(Arc::clone(job));
            }
        } else {
            // Shut down already: nothing runs that could answer.
            for job in &loading.jobs {
                job.claim.take_back();
            }
        }
        self.loads.insert(ticket, loading);
        if self.jobs.is_none() {
            self.break_off(ticket, LoadFailure::Local);
        }
        self.report_if_over(ticket);
    }

    fn loaded(&mut self, ticket: u64, index: usize, result: Result<(), LoadFailure>) {
        let Some(loading) = self.loads.get_mut(&ticket) else {
            return;
        };
        loading.end(index, result.err());
        self.report_if_over(ticket);
    }

    /// Takes back what is not being written right now; that ends by itself at once.
    fn break_off(&mut self, ticket: u64, failure: LoadFailure) {
        let Some(loading) = self.loads.get_mut(&ticket) else {
            return;
        };
        for index in 0..loading.jobs.len() {
            if !loading.over[index] && loading.jobs[index].claim.cancel() {
                add(&self.shared.counters.loads_cancelled, 1);
                loading.end(index, Some(failure));
            }
        }
    }

    fn report_if_over(&mut self, ticket: u64) {
        if self
            .loads
            .get(&ticket)
            .is_none_or(|loading| loading.left > 0)
        {
            return;
        }
        if let Some(mut loading) = self.loads.remove(&ticket) {
            subtract(&self.shared.counters.pending_loads, 1);
            loading.failed.sort_unstable();
            loading.failed.dedup();
            self.report.received.push(Received {
                request: loading.request,
                failure: loading.failure,
                failed: loading.failed,
            });
        }
    }

    fn drain(&mut self) {
        while let Ok(event) = self.events.try_recv() {
            self.take_event(event);
        }
    }

    fn take_event(&mut self, event: Event) {
        match event {
            Event::Loaded {
                ticket,
                index,
                result,
            } => self.loaded(ticket, index, result),
            Event::SaveEnded { number } => self.save_over(number),
        }
    }

    /// Loads are in the order of their starts, so those that are late come first.
    fn give_up_the_late(&mut self) {
        let timeout = self.config.io_timeout();
        let late = |since: Instant| since.elapsed() >= timeout;
        while let Some((&ticket, _)) = self
            .loads
            .first_key_value()
            .filter(|(_, load)| late(load.since))
        {
            self.break_off(ticket, LoadFailure::Stalled);
            if self.loads[&ticket].left > 0 {
                break;
            }
            self.report_if_over(ticket);
        }
        self.give_up_late_saves();
    }
}

impl Loading {
    fn end(&mut self, index: usize, failure: Option<LoadFailure>) {
        // What was broken off has been counted, whatever the thread says of it later.
        if std::mem::replace(&mut self.over[index], true) {
            return;
        }
        self.left -= 1;
        if let Some(failure) = failure {
            self.failure.get_or_insert(failure);
            let block = self.jobs[index].block;
            self.failed.push(FailedBlock {
                group: block.group,
                block: block.block,
            });
        }
    }
}

impl StorageWorker {
    fn check_threads(&mut self) -> Result<(), WorkerLost> {
        // After the end they are told to.
        if self.lost.is_none()
            && self.jobs.is_some()
            && let Some(place) = self.threads.iter().position(JoinHandle::is_finished)
        {
            let ended = self.threads.swap_remove(place);
            self.lost = Some(WorkerLost::of(self.shared.rank, "storage thread", ended));
        }
        self.lost.clone().map_or(Ok(()), Err)
    }
}

impl WorkerConnector for StorageWorker {
    fn register(&mut self, layout: &CacheLayout) -> Result<(), RegisterCacheError> {
        let layout = Layout::new(
            layout,
            &self.config.block_tokens,
            self.config.settings.max_bytes,
        )?;
        self.shared
            .layout
            .set(layout)
            .map_err(|_| RegisterCacheError {
                layer: 0,
                reason: "the blocks of this rank are registered already".to_owned(),
            })
    }

    fn release_blocks(&mut self, plan: &StepPlan) {
        if let StepPlan::Storage(plan) = plan {
            self.revoke(&plan.revoke);
        }
    }

    fn begin_step(&mut self, plan: StepPlan) {
        let StepPlan::Storage(plan) = plan else {
            return self.shared.log.foreign_plan();
        };
        let Plan {
            revoke,
            abort,
            load,
            save,
            finished,
        } = plan;
        self.revoke(&revoke);
        // Of a step whose end was not announced: it is over now.
        self.start_saves();
        for request in abort {
            let of_it = |(&ticket, loading): (&u64, &Loading)| {
                (loading.request == request).then_some(ticket)
            };
            if let Some(ticket) = self.loads.iter().find_map(of_it) {
                self.break_off(ticket, LoadFailure::Aborted);
                self.report_if_over(ticket);
            }
        }
        for load in load {
            self.start_load(load);
        }
        self.step = save;
        for request in finished {
            self.finish(request);
        }
    }

    fn end_step(&mut self) {
        self.start_saves();
    }

    fn take_report(&mut self) -> Result<WorkerReport, WorkerLost> {
        self.check_threads()?;
        self.drain();
        self.give_up_the_late();
        let mut report = take(&mut self.report);
        if !self.ended.is_empty() {
            report.part = Some(ReportPart::Storage(Report {
                ended: take(&mut self.ended),
            }));
        }
        Ok(report)
    }

    fn figures(&mut self, figures: &mut Figures) {
        figures.add(STORAGE_WORKER, &self.stats());
    }

    fn shutdown(&mut self, within: Duration) {
        self.start_saves();
        let deadline = Instant::now() + within;
        for ticket in self.loads.keys().copied().collect::<Vec<_>>() {
            self.break_off(ticket, LoadFailure::Aborted);
            self.report_if_over(ticket);
        }
        while !self.saves.is_empty() || !self.loads.is_empty() {
            let Ok(event) = self.events.recv_deadline(deadline) else {
                break;
            };
            self.take_event(event);
        }
        self.give_up();
        while self.threads.iter().any(|thread| !thread.is_finished()) && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
        let (ended, stuck): (Vec<_>, Vec<_>) = take(&mut self.threads)
            .into_iter()
            .partition(JoinHandle::is_finished);
        for thread in ended {
            let _ = thread.join();
        }
        if !stuck.is_empty() {
            tracing::warn!(
                threads = stuck.len(),
                ?within,
                "shared storage: threads wait for the disk and are left behind"
            );
        }
    }
}

impl StorageWorker {
    /// From here on no thread begins to touch a block.
    fn give_up(&mut self) {
        self.jobs = None;
        for number in self.saves.keys().copied().collect::<Vec<_>>() {
            self.take_back(number);
        }
        for ticket in self.loads.keys().copied().collect::<Vec<_>>() {
            self.break_off(ticket, LoadFailure::Aborted);
            self.report_if_over(ticket);
        }
    }
}

impl Drop for StorageWorker {
    fn drop(&mut self) {
        self.give_up();
    }
}

#[cfg(test)]
mod tests;

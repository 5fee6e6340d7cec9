//! The threads that read and write files.
//!
//! Responsible for one block at a time: its file, its memory under a [`Claim`], and the counters.
//! Not responsible for what the requests make of it; every job ends with exactly one [`Event`].

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender, select_biased};

use super::budget::{self, Budget, Evicted, RoomError};
use super::claim::Claim;
use super::file::{Files, HEADER_BYTES, ReadError, header, read};
use super::layout::Layout;
use super::log::Log;
use super::plan::KeyedBlock;
use super::stats::{WorkerCounters, add, subtract};
use crate::contract::LoadFailure;

/// What the threads of a rank share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) rank: u32,
    pub(super) files: Files,
    pub(super) budget: Budget,
    /// Set once, before the first job.
    pub(super) layout: OnceLock<Layout>,
    pub(super) counters: WorkerCounters,
    pub(super) log: Log,
    pub(super) busy: Busy,
}

/// Since when each thread is at its job.
#[derive(Debug)]
pub(super) struct Busy {
    start: Instant,
    /// Milliseconds after `start`; [`IDLE`] without a job.
    since: Box<[AtomicU64]>,
}

const IDLE: u64 = u64::MAX;

impl Busy {
    pub(super) fn new(threads: usize) -> Self {
        Self {
            start: Instant::now(),
            since: (0..threads).map(|_| AtomicU64::new(IDLE)).collect(),
        }
    }

    fn set(&self, thread: usize, busy: bool) {
        let now = self.start.elapsed().as_millis() as u64;
        if let Some(since) = self.since.get(thread) {
            since.store(if busy { now } else { IDLE }, Ordering::Relaxed);
        }
    }

    /// Whether no thread has ended a job for so long, and all have one: the disk does not answer.
    pub(super) fn all_longer_than(&self, time: Duration) -> bool {
        let now = self.start.elapsed().as_millis() as u64;
        let time = time.as_millis() as u64;
        let is_late = |since: &AtomicU64| {
            let since = since.load(Ordering::Relaxed);
            since != IDLE && now.saturating_sub(since) >= time
        };
        self.since.iter().all(is_late)
    }
}

#[derive(Debug)]
pub(super) struct LoadJob {
    pub(super) claim: Claim,
    pub(super) ticket: u64,
    pub(super) index: usize,
    pub(super) block: KeyedBlock,
}

#[derive(Debug)]
pub(super) struct SaveJob {
    pub(super) claim: Claim,
    pub(super) number: u64,
    pub(super) block: KeyedBlock,
    counted: AtomicBool,
}

impl SaveJob {
    pub(super) fn new(number: u64, block: KeyedBlock) -> Self {
        Self {
            claim: Claim::default(),
            number,
            block,
            counted: AtomicBool::new(false),
        }
    }

    /// Counts how it ended, and that it is pending no more. The first call counts, and says true: a thread that waits for the disk may
    /// come back long after somebody else has.
    pub(super) fn count(&self, counters: &WorkerCounters, end: &SaveEnd) -> bool {
        if self.counted.swap(true, Ordering::Relaxed) {
            return false;
        }
        subtract(&counters.pending_saves, 1);
        match *end {
            SaveEnd::Saved { bytes } => {
                add(&counters.blocks_saved, 1);
                add(&counters.bytes_saved, bytes);
            }
            SaveEnd::Stored => add(&counters.already_stored, 1),
            SaveEnd::Failed => add(&counters.save_failures, 1),
            SaveEnd::Cancelled => add(&counters.saves_cancelled, 1),
            SaveEnd::Stalled => add(&counters.saves_stalled, 1),
        }
        true
    }
}

/// How a save ended.
#[derive(Debug)]
pub(super) enum SaveEnd {
    Saved { bytes: u64 },
    Stored,
    Failed,
    Cancelled,
    Stalled,
}

#[derive(Debug)]
pub(super) enum Event {
    Loaded {
        ticket: u64,
        index: usize,
        result: Result<(), LoadFailure>,
    },
    SaveEnded {
        number: u64,
    },
}

/// Runs until both channels are closed; loads go first.
pub(super) fn run(
    shared: &Shared,
    thread: usize,
    loads: &Receiver<Arc<LoadJob>>,
    saves: &Receiver<Arc<SaveJob>>,
    events: &Sender<Event>,
) {
    let mut scratch = Vec::new();
    let run_save = |job: &SaveJob, scratch: &mut Vec<u8>| {
        shared.busy.set(thread, true);
        let end = save(shared, job, scratch);
        shared.busy.set(thread, false);
        job.count(&shared.counters, &end);
    };
    loop {
        let event = select_biased! {
            recv(loads) -> job => match job {
                Ok(job) => {
                    shared.busy.set(thread, true);
                    let result = load(shared, &job, &mut scratch);
                    shared.busy.set(thread, false);
                    Event::Loaded { ticket: job.ticket, index: job.index, result }
                }
                // The end: what still waits has been taken back, and is counted so.
                Err(_) => {
                    for job in saves.try_iter() {
                        run_save(&job, &mut scratch);
                    }
                    return;
                }
            },
            recv(saves) -> job => match job {
                Ok(job) => {
                    run_save(&job, &mut scratch);
                    Event::SaveEnded { number: job.number }
                }
                Err(_) => return,
            },
        };
        // Nobody listens after the end.
        let _ = events.send(event);
    }
}

fn load(shared: &Shared, job: &LoadJob, scratch: &mut Vec<u8>) -> Result<(), LoadFailure> {
    let KeyedBlock { key, group, block } = job.block;
    let counters = &shared.counters;
    if job.claim.is_taken_back() {
        // Whoever took it back has reported it.
        return Err(LoadFailure::Aborted);
    }
    let spans = shared.layout.get().and_then(|layout| layout.group(group));
    let Some(spans) = spans.filter(|spans| spans.has(block)) else {
        add(&counters.load_errors, 1);
        shared.log.no_such_block(group, block);
        return Err(LoadFailure::Local);
    };
    let path = shared.files.path(shared.rank, group, key);
    let payload = match read(&path, key, spans.payload_bytes(), scratch) {
        Ok(payload) => payload,
        Err(error) => {
            unreadable(shared, &path, error);
            return Err(LoadFailure::Storage);
        }
    };
    if !job.claim.begin() {
        return Err(LoadFailure::Aborted);
    }
    let written = spans.write(block, payload);
    // Nobody takes a block back that is being written.
    let _ = job.claim.end();
    match written {
        Ok(()) => {
            add(&counters.hits, 1);
            add(&counters.bytes_loaded, payload.len() as u64);
            Ok(())
        }
        Err(error) => {
            add(&counters.load_errors, 1);
            shared.log.memory(group, block, &error);
            Err(LoadFailure::Local)
        }
    }
}

fn unreadable(shared: &Shared, path: &Path, error: ReadError) {
    match error {
        ReadError::Missing => add(&shared.counters.misses, 1),
        ReadError::Damaged(damage, file) => {
            add(&shared.counters.corrupt, 1);
            let removed = shared.budget.remove(path, &file);
            shared.log.corrupt(path, damage, removed);
        }
        ReadError::Io(error) => {
            add(&shared.counters.load_errors, 1);
            shared.log.unreadable(path, &error);
        }
    }
}

fn save(shared: &Shared, job: &SaveJob, scratch: &mut Vec<u8>) -> SaveEnd {
    let KeyedBlock { key, group, block } = job.block;
    if job.claim.is_taken_back() {
        return SaveEnd::Cancelled;
    }
    let spans = shared.layout.get().and_then(|layout| layout.group(group));
    let Some(spans) = spans.filter(|spans| spans.has(block)) else {
        shared.log.no_such_block(group, block);
        return SaveEnd::Failed;
    };
    let path = shared.files.path(shared.rank, group, key);
    let bytes = HEADER_BYTES + spans.payload_bytes();
    if path
        .symlink_metadata()
        .is_ok_and(|found| found.is_file() && found.len() == bytes as u64)
    {
        return SaveEnd::Stored;
    }
    scratch.resize(bytes, 0);
    if !job.claim.begin() {
        return SaveEnd::Cancelled;
    }
    let copied = spans.read(block, &mut scratch[HEADER_BYTES..]);
    if !job.claim.end() {
        return SaveEnd::Cancelled;
    }
    if let Err(error) = copied {
        shared.log.memory(group, block, &error);
        return SaveEnd::Failed;
    }
    let head = header(key, &scratch[HEADER_BYTES..]);
    scratch[..HEADER_BYTES].copy_from_slice(&head);
    match store(shared, &path, scratch) {
        Ok(()) => SaveEnd::Saved {
            bytes: spans.payload_bytes() as u64,
        },
        Err(error) => {
            shared.log.save_failed(&path, &error);
            SaveEnd::Failed
        }
    }
}

/// Not synchronised to the disk: what a crash of the machine leaves behind fails its checksum.
fn store(shared: &Shared, path: &Path, bytes: &[u8]) -> Result<(), RoomError> {
    let directory = path.parent().unwrap_or(path);
    let (reserved, evicted) = shared.budget.reserve(directory, bytes.len() as u64)?;
    count_evicted(&shared.counters, evicted);
    if let Err(source) = reserved.file.write_all_at(bytes, 0) {
        shared.budget.give_back(reserved);
        return Err(RoomError::Io {
            step: "write",
            path: path.to_owned(),
            source,
        });
    }
    budget::touch(&reserved.file);
    shared.budget.publish(reserved, path)
}

pub(super) fn count_evicted(counters: &WorkerCounters, evicted: Evicted) {
    add(&counters.evicted, evicted.files);
    add(&counters.evicted_bytes, evicted.bytes);
}

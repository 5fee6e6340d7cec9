//! Which blocks of a prompt are on disk.
//!
//! Asked of the file system by a thread of its own, so that a slow disk never holds up the
//! scheduler; whoever asks meanwhile is told when the answer is due.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender, unbounded};

use super::BlockKey;
use super::file::Files;
use super::key::Chain;
use super::log::Log;

/// What is known of one prompt's blocks.
#[derive(Debug)]
pub(super) struct Lookup {
    /// Per group, the keys of each unit's blocks.
    keys: Vec<GroupKeys>,
    units: usize,
    deadline: Instant,
    found: OnceLock<Box<[bool]>>,
}

#[derive(Debug)]
struct GroupKeys {
    per_unit: usize,
    keys: Box<[BlockKey]>,
}

/// What is known at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Known<'a> {
    /// Of each unit, whether all of its blocks are there, in all groups.
    Units(&'a [bool]),
    /// An answer is due within this time.
    Pending(Duration),
    /// It did not come in time.
    Late,
}

impl Lookup {
    /// For the whole units of `unit` tokens among the first `prompt` tokens.
    fn new(chains: &[Chain], unit: u32, prompt: u32, deadline: Instant) -> Self {
        let units = (prompt / unit) as usize;
        let keys: Vec<GroupKeys> = chains
            .iter()
            .map(|chain| {
                let per_unit = unit as usize / chain.block_tokens();
                let end = (units * per_unit).min(chain.keys().len());
                GroupKeys {
                    per_unit,
                    keys: chain.keys()[..end].into(),
                }
            })
            .collect();
        Self {
            keys,
            units,
            deadline,
            found: OnceLock::new(),
        }
    }

    pub(super) fn known(&self) -> Known<'_> {
        match self.found.get() {
            Some(units) => Known::Units(units),
            None => match self.deadline.checked_duration_since(Instant::now()) {
                Some(left) if !left.is_zero() => Known::Pending(left),
                _ => Known::Late,
            },
        }
    }

    /// How many units were asked for.
    pub(super) const fn units(&self) -> usize {
        self.units
    }

    /// Whether a unit was found to be there.
    pub(super) fn has(&self, unit: usize) -> bool {
        self.found
            .get()
            .is_some_and(|units| units.get(unit).copied().unwrap_or(false))
    }

    fn look(&self, files: &Files, counters: &Counters, log: &Log) -> Box<[bool]> {
        (0..self.units)
            .map(|unit| {
                self.keys.iter().zip(0..).all(|(group, number)| {
                    let from = unit * group.per_unit;
                    let blocks = group.keys.get(from..from + group.per_unit);
                    blocks.is_some_and(|keys| {
                        keys.iter().all(|&key| {
                            files.present(number, key).unwrap_or_else(|error| {
                                counters.errors.fetch_add(1, Ordering::Relaxed);
                                log.lookup(&error);
                                false
                            })
                        })
                    })
                })
            })
            .collect()
    }
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) lookups: AtomicU64,
    pub(super) misses: AtomicU64,
    pub(super) late: AtomicU64,
    pub(super) errors: AtomicU64,
}

/// The thread, and the way to it. It ends when this is dropped, after the lookup that it is at.
#[derive(Debug)]
pub(super) struct Lookups {
    jobs: Sender<Weak<Lookup>>,
    timeout: Duration,
    unit: u32,
    pub(super) counters: Arc<Counters>,
}

impl Lookups {
    pub(super) fn start(files: Files, unit: u32, timeout: Duration) -> std::io::Result<Self> {
        let (jobs, queue) = unbounded();
        let counters = Arc::new(Counters::default());
        let shared = Arc::clone(&counters);
        thread::Builder::new()
            .name("kvferry-lookup".to_owned())
            .spawn(move || run(&files, &queue, &shared))?;
        Ok(Self {
            jobs,
            timeout,
            unit,
            counters,
        })
    }

    /// Without a thread.
    #[cfg(test)]
    pub(super) fn to(jobs: Sender<Weak<Lookup>>, unit: u32, timeout: Duration) -> Self {
        Self {
            jobs,
            timeout,
            unit,
            counters: Arc::default(),
        }
    }

    /// Asks for the blocks of a prompt.
    pub(super) fn ask(&self, chains: &[Chain], prompt: u32) -> Arc<Lookup> {
        let deadline = Instant::now() + self.timeout;
        let lookup = Arc::new(Lookup::new(chains, self.unit, prompt, deadline));
        if lookup.units == 0 {
            let _ = lookup.found.set(Box::default());
        } else {
            self.counters.lookups.fetch_add(1, Ordering::Relaxed);
            let _ = self.jobs.send(Arc::downgrade(&lookup));
        }
        lookup
    }
}

fn run(files: &Files, queue: &Receiver<Weak<Lookup>>, counters: &Counters) {
    let log = Log::default();
    for job in queue {
        // Of a request that is gone already.
        let Some(lookup) = job.upgrade() else {
            continue;
        };
        if lookup.deadline > Instant::now() {
            let found = lookup.look(files, counters, &log);
            if !found.contains(&true) {
                counters.misses.fetch_add(1, Ordering::Relaxed);
            }
            if lookup.deadline > Instant::now() {
                let _ = lookup.found.set(found);
                continue;
            }
        }
        counters.late.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{StorageConfig, StorageSettings};
    use super::*;

    fn known(timeout: Duration, done: impl Fn(&Counters) -> bool) -> String {
        let directory = tempfile::tempdir().unwrap();
        let config = StorageConfig {
            settings: StorageSettings::at(directory.path()),
            model: "tiny".to_owned(),
            layout: "LBHNC float32".to_owned(),
            block_tokens: vec![4],
            world: 1,
            one_pool: true,
        };
        let lookups = Lookups::start(Files::new(&config), 4, timeout).unwrap();
        let mut chain = Chain::new([1; 32].into(), 0, 4);
        chain.extend(&[0; 8], "");
        let lookup = lookups.ask(&[chain], 8);
        let deadline = Instant::now() + Duration::from_secs(60);
        while !done(&lookups.counters) {
            assert!(Instant::now() < deadline);
            thread::sleep(Duration::from_millis(1));
        }
        while matches!(lookup.known(), Known::Pending(_)) {
            assert!(Instant::now() < deadline);
            thread::sleep(Duration::from_millis(1));
        }
        format!("{:?}", lookup.known())
    }

    #[test]
    fn an_answer_that_is_late_is_none_for_good() {
        let late = |counters: &Counters| counters.late.load(Ordering::Relaxed) == 1;
        assert_eq!(known(Duration::ZERO, late), "Late");
        let answered = |counters: &Counters| counters.misses.load(Ordering::Relaxed) == 1;
        assert_eq!(
            known(Duration::from_secs(600), answered),
            "Units([false, false])"
        );
    }
}

//! Which blocks of a prompt are on disk.
//!
//! Asked of the file system by a thread of its own, so that a slow disk never holds up the
//! scheduler; whoever asks meanwhile is told when the answer is due.

use std::iter::repeat;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender, unbounded};

use super::BlockKey;
use super::StorageConfig;
use super::file::Files;
use super::key::Chain;
use super::log::Log;
use crate::contract::Reach;

/// What is known of one prompt's blocks.
#[derive(Debug)]
pub(super) struct Lookup {
    groups: Vec<Group>,
    /// Tokens that are whole blocks in every group.
    unit: u32,
    /// How many of these were asked for.
    units: usize,
    deadline: Instant,
    found: OnceLock<Found>,
}

#[derive(Debug)]
struct Group {
    block_tokens: u32,
    reach: Reach,
    /// Of the whole units' blocks.
    keys: Box<[BlockKey]>,
}

/// Per group and block, how many blocks in a row were there up to and with this one; 0 if this one was not.
type Found = Vec<Box<[u32]>>;

/// What is known at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Known {
    /// Which blocks are there: [`Lookup::reaches`], [`Lookup::has`].
    Answered,
    /// An answer is due within this time.
    Pending(Duration),
    /// It did not come in time.
    Late,
}

impl Lookup {
    /// For the whole units of `unit` tokens among the first `prompt` tokens.
    fn new(chains: &[Chain], reach: &[Reach], unit: u32, prompt: u32, deadline: Instant) -> Self {
        let units = (prompt / unit) as usize;
        let reach = reach.iter().copied().chain(repeat(Reach::All));
        let groups = chains.iter().zip(reach).map(|(chain, reach)| {
            let blocks = units * (unit as usize / chain.block_tokens());
            let end = blocks.min(chain.keys().len());
            Group {
                block_tokens: chain.block_tokens() as u32,
                reach,
                keys: chain.keys()[..end].into(),
            }
        });
        Self {
            groups: groups.collect(),
            unit,
            units,
            deadline,
            found: OnceLock::new(),
        }
    }

    pub(super) fn known(&self) -> Known {
        if self.found.get().is_some() {
            return Known::Answered;
        }
        match self.deadline.checked_duration_since(Instant::now()) {
            Some(left) if !left.is_zero() => Known::Pending(left),
            _ => Known::Late,
        }
    }

    /// How many units were asked for.
    pub(super) const fn units(&self) -> usize {
        self.units
    }

    /// Whether a block was found to be there.
    pub(super) fn has(&self, group: usize, position: usize) -> bool {
        let runs = self.found.get().and_then(|found| found.get(group));
        runs.and_then(|runs| runs.get(position))
            .is_some_and(|&run| run > 0)
    }

    /// The most tokens that can count as computed with what is on disk behind the first `computed` ones, of a prompt of
    /// `prompt` tokens: all blocks are there that a scheduler has a place for then. `computed` if there is nothing.
    pub(super) fn reaches(&self, computed: u32, prompt: u32) -> u32 {
        let Some(found) = self.found.get() else {
            return computed;
        };
        let groups = || self.groups.iter().zip(found);
        // Groups that keep everything have all up to the first hole.
        let most = groups().filter(|(group, _)| group.reach == Reach::All);
        let most = most.map(|(group, runs)| {
            let from = (computed / group.block_tokens) as usize;
            let runs = runs.get(from..).unwrap_or_default();
            let there = runs.iter().take_while(|&&run| run > 0).count();
            (from + there) as u32 * group.block_tokens / self.unit
        });
        let most = most.min().unwrap_or(u32::MAX).min(self.units as u32);
        let ends = (computed / self.unit + 1..=most).rev();
        ends.map(|end| end * self.unit)
            .find(|&end| {
                groups().all(|(group, runs)| {
                    group.has_what_is_kept(runs, computed, end)
                        && !(end >= prompt && group.reach.misses_the_last(end, group.block_tokens))
                })
            })
            .unwrap_or(computed)
    }

    fn look(&self, files: &Files, counters: &Counters, log: &Log) -> Found {
        let there = |group: usize, key: BlockKey| {
            files.present(group as u32, key).unwrap_or_else(|error| {
                counters.errors.fetch_add(1, Ordering::Relaxed);
                log.lookup(&error);
                false
            })
        };
        let mut found: Found = self
            .groups
            .iter()
            .map(|group| vec![0; group.keys.len()].into())
            .collect();
        // Where a group that keeps everything lacks a block, nothing of the others is of use.
        let mut order: Vec<usize> = (0..self.groups.len()).collect();
        order.sort_by_key(|&group| self.groups[group].reach != Reach::All);
        for unit in 0..self.units {
            for &number in &order {
                let (group, runs) = (&self.groups[number], &mut found[number]);
                let per_unit = (self.unit / group.block_tokens) as usize;
                let mut blocks = unit * per_unit..(unit + 1) * per_unit;
                let whole = blocks.all(|position| {
                    let is_there = group
                        .keys
                        .get(position)
                        .is_some_and(|&key| there(number, key));
                    if is_there {
                        let before = position.checked_sub(1).map_or(0, |before| runs[before]);
                        runs[position] = before + 1;
                    }
                    is_there || group.reach != Reach::All
                });
                if !whole {
                    break;
                }
            }
        }
        found
    }
}

impl Group {
    /// Whether the blocks are there that this group keeps when `end` tokens count as computed, without those of the first
    /// `computed`.
    fn has_what_is_kept(&self, runs: &[u32], computed: u32, end: u32) -> bool {
        let kept = self.reach.first_kept(end).max(computed) / self.block_tokens;
        let needed = (end / self.block_tokens).saturating_sub(kept);
        let last = (end / self.block_tokens).checked_sub(1);
        let run = last.and_then(|last| runs.get(last as usize));
        needed == 0 || run.is_some_and(|&run| run >= needed)
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
    /// `None` where nothing is loaded: no thread, and no lookup.
    jobs: Option<Sender<Weak<Lookup>>>,
    timeout: Duration,
    unit: u32,
    reach: Vec<Reach>,
    pub(super) counters: Arc<Counters>,
}

impl Lookups {
    pub(super) fn start(config: &StorageConfig) -> std::io::Result<Self> {
        let counters = Arc::new(Counters::default());
        let jobs = if config.role.loads() {
            let (jobs, queue) = unbounded();
            let (files, shared) = (Files::new(config), Arc::clone(&counters));
            thread::Builder::new()
                .name("kvferry-lookup".to_owned())
                .spawn(move || run(&files, &queue, &shared))?;
            Some(jobs)
        } else {
            None
        };
        Ok(Self {
            jobs,
            timeout: config.lookup_timeout(),
            unit: config.unit(),
            reach: config.reach.clone(),
            counters,
        })
    }

    /// Without a thread.
    #[cfg(test)]
    pub(super) fn to(jobs: Sender<Weak<Lookup>>, unit: u32, timeout: Duration) -> Self {
        Self {
            jobs: Some(jobs),
            timeout,
            unit,
            reach: Vec::new(),
            counters: Arc::default(),
        }
    }

    /// Asks for the blocks of a prompt.
    pub(super) fn ask(&self, chains: &[Chain], prompt: u32) -> Arc<Lookup> {
        let deadline = Instant::now() + self.timeout;
        let prompt = self.jobs.as_ref().map_or(0, |_| prompt);
        let lookup = Arc::new(Lookup::new(
            chains,
            &self.reach,
            self.unit,
            prompt,
            deadline,
        ));
        match &self.jobs {
            Some(jobs) if lookup.units > 0 => {
                self.counters.lookups.fetch_add(1, Ordering::Relaxed);
                let _ = jobs.send(Arc::downgrade(&lookup));
            }
            _ => drop(lookup.found.set(Found::new())),
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
            // No offer is possible without a block in every group.
            if found.iter().any(|runs| runs.iter().all(|&run| run == 0)) {
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
    use super::super::StorageSettings;
    use super::*;
    use crate::contract::Role;

    fn known(timeout: Duration, done: impl Fn(&Counters) -> bool) -> String {
        let directory = tempfile::tempdir().unwrap();
        let config = StorageConfig {
            settings: StorageSettings::at(directory.path()),
            model: "tiny".to_owned(),
            layout: "LBHNC float32".to_owned(),
            block_tokens: vec![4],
            reach: Vec::new(),
            role: Role::Both,
            world: 1,
            one_pool: true,
        };
        let mut lookups = Lookups::start(&config).unwrap();
        lookups.timeout = timeout;
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
        assert_eq!((lookup.has(0, 0), lookup.reaches(0, 8)), (false, 0));
        format!("{:?}", lookup.known())
    }

    #[test]
    fn an_answer_that_is_late_is_none_for_good() {
        let late = |counters: &Counters| counters.late.load(Ordering::Relaxed) == 1;
        assert_eq!(known(Duration::ZERO, late), "Late");
        let answered = |counters: &Counters| counters.misses.load(Ordering::Relaxed) == 1;
        assert_eq!(known(Duration::from_secs(600), answered), "Answered");
    }

    /// A lookup of blocks of `tokens` per group, of which those are there that are not named as missing.
    fn answered(
        groups: &[(u32, Reach)],
        unit: u32,
        prompt: u32,
        missing: &[(usize, usize)],
    ) -> Lookup {
        let reach: Vec<Reach> = groups.iter().map(|&(_, reach)| reach).collect();
        let prompt_tokens = vec![0; prompt as usize];
        let chains: Vec<Chain> = (0..)
            .zip(groups)
            .map(|(group, &(tokens, _))| {
                let mut chain = Chain::new([1; 32].into(), group, tokens);
                chain.extend(&prompt_tokens, "");
                chain
            })
            .collect();
        let lookup = Lookup::new(&chains, &reach, unit, prompt, Instant::now());
        let runs = (0..).zip(&lookup.groups).map(|(number, group)| {
            let mut run = 0;
            let blocks = 0..group.keys.len();
            blocks
                .map(|position| {
                    run = if missing.contains(&(number, position)) {
                        0
                    } else {
                        run + 1
                    };
                    run
                })
                .collect()
        });
        lookup.found.set(runs.collect()).unwrap();
        lookup
    }

    #[test]
    fn c43_what_a_window_has_left_behind_is_not_needed() {
        let groups = [(4, Reach::All), (4, Reach::Window(5))];
        // With 16 tokens computed, the window begins at token 12.
        let behind = answered(&groups, 4, 18, &[(1, 0), (1, 1), (1, 2)]);
        assert_eq!(behind.reaches(0, 18), 16);
        // What is inside is needed: with 12 tokens, it begins at token 8.
        let inside = answered(&groups, 4, 18, &[(1, 3)]);
        assert_eq!(inside.reaches(0, 18), 12);
        // What is computed here already is not.
        assert_eq!(
            answered(&groups, 4, 18, &[(1, 2), (0, 1)]).reaches(12, 18),
            16
        );
        // A hole of a group that keeps everything ends the offer whatever is behind it.
        let hole = answered(&groups, 4, 18, &[(0, 2)]);
        assert_eq!((hole.reaches(0, 18), hole.reaches(12, 18)), (8, 16));
        assert_eq!(hole.reaches(8, 18), 8);
        // Of several blocks in a unit those that are kept.
        let mixed = [(8, Reach::All), (4, Reach::Window(5))];
        assert_eq!(answered(&mixed, 8, 17, &[(1, 2)]).reaches(0, 17), 16);
        assert_eq!(answered(&mixed, 8, 17, &[(1, 3)]).reaches(0, 17), 8);
    }

    /// vLLM computes the last token of a whole prompt again: one that looks back into a dropped block would be computed from
    /// nothing. One unit less is offered there.
    #[test]
    fn a_whole_prompt_is_not_offered_where_its_last_token_looks_at_a_dropped_block() {
        for window in 1..20 {
            let reach = Reach::Window(window);
            for prompt in 4..40 {
                let lookup = answered(&[(4, Reach::All), (4, reach)], 4, prompt, &[]);
                let whole = prompt / 4 * 4;
                // The first block that is kept with all tokens computed, and the one that the last token needs.
                let kept = (prompt + 1).saturating_sub(window) / 4;
                let needed = prompt.saturating_sub(window) / 4;
                let misses = whole == prompt && needed < kept;
                let expected = if misses { whole - 4 } else { whole };
                assert_eq!(lookup.reaches(0, prompt), expected, "{prompt} {window}");
            }
        }
        assert_eq!(
            answered(&[(4, Reach::Chunk(8))], 4, 16, &[]).reaches(0, 16),
            12
        );
        assert_eq!(
            answered(&[(4, Reach::Chunk(8))], 4, 17, &[]).reaches(0, 17),
            16
        );
    }
}

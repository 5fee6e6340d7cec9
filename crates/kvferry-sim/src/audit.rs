//! Bytes that should be somewhere, and bytes that should not.
//!
//! Responsible for following every [`Event`] of the scheduler with a look at the memory: what counts
//! as loaded is there, what the prefix cache finds is what it says, what is held for others does not
//! change, and nobody writes to a block that is free. Fills blocks that were handed out, before their
//! new owner writes to them, so that whoever still reads them gets nothing of use; and blocks that
//! are freed, unless the connector may read those until then.

use std::collections::{BTreeMap, HashMap};

use kvferry_wire::RequestId;

use crate::kv::Event;
use crate::memory::RankMemory;
use crate::request::Tables;
use crate::violation::Violation;

/// Follows the blocks of an engine.
#[derive(Debug, Default)]
pub(crate) struct Audit {
    /// Free blocks that a step under way may still write to, with the last one that may.
    waiting: Vec<(u32, u32, u64)>,
    /// Free blocks to which nobody writes, with what they hold on each rank.
    marked: HashMap<(u32, u32), Vec<Vec<u64>>>,
    /// Blocks that were handed out, with the step from which on their new owner may write to them.
    given: Vec<(u64, u32, u32)>,
    /// Whether the connector may read free blocks.
    reads_freed: bool,
    held: BTreeMap<RequestId, (Tables, Vec<u64>)>,
    /// Sync loads, to be looked at when their step's forward begins.
    sync: Vec<(u64, Tables, Vec<u64>, std::ops::Range<u32>)>,
    /// The last step whose forward is over.
    finished: u64,
}

impl Audit {
    /// For so many cache groups of so many blocks, all of them free, and a connector that may read free
    /// blocks until they are handed out, or not.
    pub(crate) fn new(reads_freed: bool, groups: u32, blocks: u32) -> Self {
        // The null block too, which stays free.
        let all = (0..groups).flat_map(|group| (0..blocks).map(move |block| (group, block, 0)));
        Self {
            reads_freed,
            waiting: all.collect(),
            ..Self::default()
        }
    }

    /// Follows what the scheduler did, up to the step that it scheduled last.
    pub(crate) fn follow(
        &mut self,
        events: Vec<Event>,
        step: u64,
        ranks: &[RankMemory],
        is_cached: impl Fn(u32, u32) -> bool,
    ) -> Result<(), Violation> {
        for event in events {
            self.one(event, step, ranks)?;
        }
        self.mark(ranks, is_cached)
    }

    fn one(&mut self, event: Event, step: u64, ranks: &[RankMemory]) -> Result<(), Violation> {
        match event {
            Event::Freed {
                group,
                block,
                last_step,
            } => self.waiting.push((group, block, last_step)),
            Event::Taken {
                group,
                block,
                evicted,
            } => {
                self.waiting.retain(|&(g, b, _)| (g, b) != (group, block));
                self.given.push((step, group, block));
                let marked = self.marked.remove(&(group, block)).unwrap_or_default();
                for (rank, digests) in ranks.iter().zip(&marked) {
                    rank.check_free(group, block, digests)?;
                }
                for rank in ranks {
                    if let Some(chain) = &evicted {
                        rank.verify_block("a cached block", group, block, chain)?;
                    }
                }
            }
            Event::Hit {
                group,
                block,
                content,
            } => {
                self.waiting.retain(|&(g, b, _)| (g, b) != (group, block));
                for rank in ranks {
                    rank.verify_block("a block from the prefix cache", group, block, &content)?;
                }
            }
            Event::Loaded {
                tables,
                chain,
                positions,
                before_step: None,
                ..
            } => {
                verify("a loaded block", ranks, &tables, &chain, positions)?;
            }
            Event::Loaded {
                tables,
                chain,
                positions,
                before_step: Some(step),
                ..
            } => {
                self.sync.push((step, tables, chain, positions));
            }
            Event::Held {
                request,
                tables,
                chain,
            } => {
                self.held.insert(request, (tables, chain));
            }
            Event::Released { request } => {
                if let Some((tables, chain)) = self.held.remove(&request) {
                    let positions = 0..chain.len() as u32;
                    verify("a held block", ranks, &tables, &chain, positions)?;
                }
            }
        }
        Ok(())
    }

    /// The workers have let go of the blocks that have a new owner from this step on.
    pub(crate) fn released(&mut self, step: u64, ranks: &[RankMemory]) -> Result<(), Violation> {
        let (due, later) = std::mem::take(&mut self.given)
            .into_iter()
            .partition(|given| given.0 <= step);
        self.given = later;
        let due: Vec<_> = due;
        due.into_iter().try_for_each(|(_, group, block)| {
            ranks
                .iter()
                .try_for_each(|rank| rank.scribble(group, block))
        })
    }

    /// A forward begins: its sync loads are to be in place.
    pub(crate) fn before_forward(
        &mut self,
        step: u64,
        ranks: &[RankMemory],
    ) -> Result<(), Violation> {
        let (due, later) = std::mem::take(&mut self.sync)
            .into_iter()
            .partition(|load| load.0 <= step);
        self.sync = later;
        let due: Vec<_> = due;
        due.into_iter()
            .try_for_each(|(_, tables, chain, positions)| {
                verify("a block of a sync load", ranks, &tables, &chain, positions)
            })
    }

    /// A forward is over: what it was to write is written.
    pub(crate) fn after_forward(
        &mut self,
        step: u64,
        ranks: &[RankMemory],
        is_cached: impl Fn(u32, u32) -> bool,
    ) -> Result<(), Violation> {
        self.finished = step;
        self.mark(ranks, is_cached)
    }

    fn mark(
        &mut self,
        ranks: &[RankMemory],
        is_cached: impl Fn(u32, u32) -> bool,
    ) -> Result<(), Violation> {
        let finished = self.finished;
        let (quiet, waiting) = std::mem::take(&mut self.waiting)
            .into_iter()
            .partition(|free| free.2 <= finished);
        self.waiting = waiting;
        let quiet: Vec<_> = quiet;
        for (group, block, _) in quiet {
            // A cached block keeps what it is found by.
            if is_cached(group, block) {
                continue;
            }
            let mut digests = Vec::with_capacity(ranks.len());
            for rank in ranks {
                if !self.reads_freed {
                    rank.scribble(group, block)?;
                }
                digests.push(rank.digests(group, block)?);
            }
            self.marked.insert((group, block), digests);
        }
        Ok(())
    }

    /// Looks at every free block.
    pub(crate) fn check_end(&self, ranks: &[RankMemory]) -> Result<(), Violation> {
        let mut marked = self.marked.iter();
        marked.try_for_each(|(&(group, block), digests)| {
            let mut ranks = ranks.iter().zip(digests);
            ranks.try_for_each(|(rank, digests)| rank.check_free(group, block, digests))
        })
    }
}

/// Compares positions with what they should be, on every rank and in every group that has them.
fn verify(
    what: &'static str,
    ranks: &[RankMemory],
    tables: &Tables,
    chain: &[u64],
    positions: std::ops::Range<u32>,
) -> Result<(), Violation> {
    for rank in ranks {
        for (group, table) in (0..).zip(tables) {
            for position in positions.clone() {
                if let Some(place) = rank.place(group, table, position) {
                    rank.verify(what, place, chain[position as usize])?;
                }
            }
        }
    }
    Ok(())
}

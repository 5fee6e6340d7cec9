//! Which blocks a request has.
//!
//! Responsible for tables of blocks over the pools of all cache groups: prefix hits, growth, windows
//! that move on, and what becomes findable. Not for bytes: what happens to blocks is told to the
//! audit as [`Event`]s. Only full blocks whose positions are computed or loaded are cached.

use std::collections::HashMap;
use std::sync::Arc;

use kvferry_connector::contract::NULL_BLOCK;
use kvferry_wire::RequestId;

use crate::config::SchedulerConfig;
use crate::model::GroupKind;
use crate::pool::BlockPool;
use crate::request::Tables;
use crate::rng::Rng;
use crate::violation::Violation;

/// What happened to blocks, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A block was freed; steps up to this one may still write to it.
    Freed {
        /// The cache group.
        group: u32,
        /// The block.
        block: u32,
        /// The last step that may know it.
        last_step: u64,
    },
    /// A block was handed out.
    Taken {
        /// The cache group.
        group: u32,
        /// The block.
        block: u32,
        /// What it was cached as until then.
        evicted: Option<Arc<[u64]>>,
    },
    /// A cached block was found.
    Hit {
        /// The cache group.
        group: u32,
        /// The block.
        block: u32,
        /// What it is cached as.
        content: Arc<[u64]>,
    },
    /// Positions count as loaded.
    Loaded {
        /// The request.
        request: RequestId,
        /// Its blocks.
        tables: Tables,
        /// The chain of its positions.
        chain: Vec<u64>,
        /// The positions.
        positions: std::ops::Range<u32>,
        /// A sync load is to be there when the forward of this step begins.
        before_step: Option<u64>,
    },
    /// Blocks are held for whoever reads them.
    Held {
        /// The request.
        request: RequestId,
        /// Its blocks.
        tables: Tables,
        /// The chain of the positions that may be read.
        chain: Vec<u64>,
    },
    /// They are not held any more.
    Released {
        /// The request.
        request: RequestId,
    },
}

/// Pools, one per cache group, with ids of their own: a block id says nothing without its group.
#[derive(Debug)]
pub struct KvBlocks {
    kinds: Vec<GroupKind>,
    pools: Vec<BlockPool>,
    block_tokens: u32,
    token_budget: u32,
    events: Vec<Event>,
}

/// What must be free beside the blocks that a request is given.
#[derive(Clone, Debug, Default)]
pub(crate) struct Room {
    /// With its blocks it must have room for so many positions, those that it has included.
    pub(crate) whole: u32,
    /// Blocks per group that others will need; none if it is empty.
    pub(crate) reserved: Vec<u32>,
}

/// What the prefix cache has of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Hits {
    pub(crate) tokens: u32,
    pub(crate) tables: Tables,
}

fn pool(group: u64, config: &SchedulerConfig) -> BlockPool {
    match config.scatter {
        None => BlockPool::new(config.blocks, config.reuse),
        Some(seed) => {
            let mut rng = Rng::part(seed.wrapping_add(group), "pool");
            BlockPool::scattered(config.blocks, config.reuse, &mut rng)
        }
    }
}

impl KvBlocks {
    pub(crate) fn new(kinds: &[GroupKind], config: &SchedulerConfig) -> Self {
        Self {
            kinds: kinds.to_vec(),
            pools: (0..)
                .zip(kinds)
                .map(|(group, _)| pool(group, config))
                .collect(),
            block_tokens: config.block_tokens,
            token_budget: config.token_budget,
            events: Vec::new(),
        }
    }

    /// The pools, in the order of the groups.
    #[must_use]
    pub fn pools(&self) -> &[BlockPool] {
        &self.pools
    }

    pub(crate) fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    pub(crate) fn tell(&mut self, event: Event) {
        self.events.push(event);
    }

    /// Blocks at the front of a group's table that nobody looks at any more once `computed` positions
    /// are there and the next query is at most at `last`.
    fn outside(&self, kind: GroupKind, computed: u32, last: u32) -> u32 {
        kind.first_visible(computed.min(last)) / self.block_tokens
    }

    /// What the prefix cache has, of at most `cap` tokens: all blocks of groups that look at
    /// everything, those in the window of the others.
    pub(crate) fn hits(&self, chain: &[u64], cap: u32) -> Hits {
        let mut blocks = cap.min(chain.len() as u32) / self.block_tokens;
        while blocks > 0 {
            let tables: Option<Tables> = self
                .kinds
                .iter()
                .zip(&self.pools)
                .map(|(&kind, pool)| {
                    let tokens = blocks * self.block_tokens;
                    let first = self.outside(kind, tokens, tokens);
                    let found = |block| {
                        let end = (block + 1) * self.block_tokens - 1;
                        if block < first {
                            Some(NULL_BLOCK)
                        } else {
                            pool.find(chain[end as usize])
                        }
                    };
                    (0..blocks).map(found).collect()
                })
                .collect();
            if let Some(tables) = tables {
                return Hits {
                    tokens: blocks * self.block_tokens,
                    tables,
                };
            }
            blocks -= 1;
        }
        Hits {
            tokens: 0,
            tables: vec![Vec::new(); self.kinds.len()],
        }
    }

    /// Gives a request what it needs for `slots` positions, of which `computed` are or will be there
    /// without its computing them; in front come `hits`, if it has nothing yet. `last` is the last position that
    /// may be computed next. Changes nothing and says false if there are too few blocks, or less `room`
    /// than there is to be.
    pub(crate) fn allocate(
        &mut self,
        tables: &mut Tables,
        hits: &Hits,
        (computed, last): (u32, u32),
        slots: u32,
        room: &Room,
    ) -> bool {
        let need = slots.div_ceil(self.block_tokens);
        let fits = (0..self.kinds.len()).all(|group| {
            let first = self.outside(self.kinds[group], computed, last);
            let hits = hits.tables.get(group).map_or(&[][..], Vec::as_slice);
            let have = tables[group].len().max(hits.len()) as u32;
            let pool = &self.pools[group];
            // A hit that is in the free queue leaves it.
            let woken = (first..)
                .zip(hits.iter().skip(first as usize))
                .filter(|&(_, &block)| block != NULL_BLOCK && pool.references(block) == 0)
                .count() as u32;
            let missing = |need: u32| need.saturating_sub(have.max(first)) + woken;
            let reserved = room.reserved.get(group).copied().unwrap_or(0);
            pool.free_blocks() >= missing(need) + reserved
                && pool.free_blocks() >= missing(self.at_once(group, room.whole))
        });
        if !fits {
            return false;
        }
        for (group, table) in tables.iter_mut().enumerate() {
            let first = self.outside(self.kinds[group], computed, last);
            let hits = hits.tables.get(group).map_or(&[][..], Vec::as_slice);
            self.grow(group as u32, table, hits, first, need);
        }
        true
    }

    /// Blocks that a request of so many positions has at once: of a window no more than it and a step
    /// need.
    fn at_once(&self, group: usize, positions: u32) -> u32 {
        let all = positions.div_ceil(self.block_tokens);
        match self.kinds[group] {
            GroupKind::Full => all,
            GroupKind::Window { tokens } => {
                let most = (tokens - 1 + self.token_budget).div_ceil(self.block_tokens) + 1;
                all.min(most)
            }
        }
    }

    /// Blocks per group that a request of so many positions needs beside those that it has.
    pub(crate) fn missing(&self, tables: &Tables, computed: u32, positions: u32) -> Vec<u32> {
        let groups = tables.iter().enumerate();
        groups
            .map(|(group, table)| {
                let first = self.outside(self.kinds[group], computed, computed);
                let have = (table.len() as u32).max(first);
                self.at_once(group, positions).saturating_sub(have)
            })
            .collect()
    }

    fn grow(&mut self, group: u32, table: &mut Vec<u32>, hits: &[u32], first: u32, need: u32) {
        let pool = &mut self.pools[group as usize];
        // Cached blocks are taken out of the free queue before new ones are handed out of it.
        if table.is_empty() {
            for (place, &block) in (0..).zip(hits) {
                if place < first || block == NULL_BLOCK {
                    table.push(NULL_BLOCK);
                    continue;
                }
                pool.share(block);
                if let Some(content) = pool.content(block).cloned() {
                    self.events.push(Event::Hit {
                        group,
                        block,
                        content,
                    });
                }
                table.push(block);
            }
        }
        while (table.len() as u32) < first.min(need) {
            table.push(NULL_BLOCK);
        }
        let missing = need.saturating_sub(table.len() as u32);
        for taken in pool.take(missing).unwrap_or_default() {
            self.events.push(Event::Taken {
                group,
                block: taken.block,
                evicted: taken.evicted,
            });
            table.push(taken.block);
        }
    }

    /// Gives up blocks that no window reaches any more.
    pub(crate) fn slide(
        &mut self,
        tables: &mut Tables,
        computed: u32,
        last_step: u64,
    ) -> Result<(), Violation> {
        for (group, table) in tables.iter_mut().enumerate() {
            let first = self.outside(self.kinds[group], computed, computed);
            let outside = table.iter_mut().take(first as usize).rev();
            let blocks: Vec<u32> = outside
                .map(|place| std::mem::replace(place, NULL_BLOCK))
                .collect();
            self.release(group as u32, blocks, last_step)?;
        }
        Ok(())
    }

    fn release(
        &mut self,
        group: u32,
        blocks: impl IntoIterator<Item = u32>,
        last_step: u64,
    ) -> Result<(), Violation> {
        for block in self.pools[group as usize].release(blocks)? {
            self.events.push(Event::Freed {
                group,
                block,
                last_step,
            });
        }
        Ok(())
    }

    /// Gives all blocks back, the last first: it is the first to be handed out again.
    pub(crate) fn free(&mut self, tables: &mut Tables, last_step: u64) -> Result<(), Violation> {
        for (group, table) in (0..).zip(tables.iter_mut()) {
            let blocks = std::mem::take(table);
            self.release(group, blocks.into_iter().rev(), last_step)?;
        }
        Ok(())
    }

    /// Makes the full blocks among the first `computed` positions findable.
    pub(crate) fn cache(&mut self, tables: &Tables, chain: &[u64], computed: u32) {
        for (pool, table) in self.pools.iter_mut().zip(tables) {
            let full = (computed / self.block_tokens) as usize;
            for (&block, content) in table
                .iter()
                .zip(chain.chunks_exact(self.block_tokens as usize))
                .take(full)
            {
                if pool.content(block).is_none() {
                    pool.cache(block, content);
                }
            }
        }
    }

    /// Compares the pools with the tables of everybody who has blocks.
    pub(crate) fn check<'a>(
        &self,
        tables: impl Iterator<Item = &'a Tables>,
    ) -> Result<(), Violation> {
        let mut counted = vec![HashMap::new(); self.pools.len()];
        for table in tables {
            for (counted, blocks) in counted.iter_mut().zip(table) {
                for &block in blocks.iter().filter(|&&block| block != NULL_BLOCK) {
                    *counted.entry(block).or_insert(0) += 1;
                }
            }
        }
        for ((group, pool), counted) in (0..).zip(&self.pools).zip(&counted) {
            pool.check(group, counted)?;
            for (&block, &owners) in counted {
                if owners > 1 && pool.content(block).is_none() {
                    return Err(Violation::OwnedTwice {
                        group,
                        block,
                        owners,
                    });
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Model;

    fn blocks(kinds: &[GroupKind], blocks: u32) -> KvBlocks {
        KvBlocks::new(
            kinds,
            &SchedulerConfig {
                blocks,
                ..SchedulerConfig::default()
            },
        )
    }

    fn chain(length: u32) -> Vec<u64> {
        Model::chain("", &(0..length).collect::<Vec<_>>())
    }

    #[test]
    fn hits_are_whole_blocks_below_the_cap_and_shared() {
        let mut kv = blocks(&[GroupKind::Full], 6);
        let mut first = vec![vec![]];
        let chain = chain(13);
        assert!(kv.allocate(&mut first, &Hits::default(), (0, 12), 13, &Room::default()));
        assert_eq!(kv.hits(&chain, 12).tokens, 0);
        kv.cache(&first, &chain, 10);
        assert_eq!(kv.hits(&chain, 12).tokens, 8);
        // A prompt that is wholly cached is hit for less than its length.
        assert_eq!(kv.hits(&chain[..8], 7).tokens, 4);
        let hits = kv.hits(&chain, 12);
        let mut second = vec![vec![]];
        assert!(
            !kv.allocate(&mut second, &hits, (8, 20), 21, &Room::default()),
            "3 more than the 1 left"
        );
        assert!(second[0].is_empty());
        // As little room would be left for the whole of it, or for others.
        for room in [
            Room {
                whole: 21,
                ..Room::default()
            },
            Room {
                reserved: vec![1],
                ..Room::default()
            },
        ] {
            assert!(!kv.allocate(&mut second, &hits, (8, 12), 12, &room));
        }
        assert!(kv.allocate(&mut second, &hits, (8, 12), 12, &Room::default()));
        assert_eq!(second[0][..2], first[0][..2]);
        kv.check([&first, &second].into_iter()).unwrap();
        kv.free(&mut first, 0).unwrap();
        kv.check([&second].into_iter()).unwrap();
        kv.free(&mut second, 0).unwrap();
        assert_eq!(kv.pools()[0].free_blocks(), 5);
    }

    #[test]
    fn c43_groups_have_ids_of_their_own_and_windows_leave_null_blocks() {
        let mut kv = blocks(&[GroupKind::Full, GroupKind::Window { tokens: 5 }], 10);
        let mut tables = vec![vec![]; 2];
        // 16 positions are loaded: the next query, at 16, looks back to 12.
        let room = Room::default();
        assert!(kv.allocate(&mut tables, &Hits::default(), (16, 19), 17, &room));
        assert_eq!(tables, [vec![1, 2, 3, 4, 5], vec![0, 0, 0, 1, 2]]);
        // Computed to 20, the window begins at 16.
        assert!(kv.allocate(&mut tables, &Hits::default(), (20, 20), 21, &room));
        kv.slide(&mut tables, 20, 7).unwrap();
        assert_eq!(tables[1], [0, 0, 0, 0, 2, 3]);
        assert!(kv.take_events().contains(&Event::Freed {
            group: 1,
            block: 1,
            last_step: 7
        }));
        let chain = chain(24);
        kv.cache(&tables, &chain, 20);
        // Blocks 0 to 3 of the window group were never cached, but nobody looks at them.
        let hits = kv.hits(&chain, 23);
        assert_eq!((hits.tokens, &hits.tables[1]), (20, &vec![0, 0, 0, 0, 2]));
        assert_eq!(kv.hits(&chain[..16], 15).tokens, 0);
    }
}

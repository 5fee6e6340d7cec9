//! The blocks of one cache group.
//!
//! Responsible for reference counts, the queue of free blocks and the prefix cache. Not for what is
//! in the blocks, nor for who owns them. A block is in the free queue exactly if nobody refers to
//! it; a cached one stays findable there until it is handed out anew. Block 0 is the null block and
//! never handed out.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use kvferry_connector::contract::NULL_BLOCK;
use serde::{Deserialize, Serialize};

use crate::rng::Rng;
use crate::violation::Violation;

/// Which free block is handed out next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reuse {
    /// As vLLM does: first those that are not cached, what was freed last in front; then cached ones,
    /// the one that is free for longest in front.
    #[default]
    Vllm,
    /// The one that was freed last: whoever still writes to a block that it gave back is found at once.
    Newest,
}

#[derive(Clone, Debug, Default)]
struct Block {
    references: u32,
    /// Its place in the free queue.
    place: Option<i64>,
    /// What it is known to hold: the chain of its positions.
    content: Option<Arc<[u64]>>,
}

/// A block that was handed out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Taken {
    /// Its id.
    pub block: u32,
    /// What it held as a cached block until now.
    pub evicted: Option<Arc<[u64]>>,
}

/// Blocks with reference counts.
#[derive(Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    free: BTreeMap<i64, u32>,
    /// Places at the front, and at the back, that were given out.
    places: (i64, i64),
    reuse: Reuse,
    /// Full blocks by the hash of everything up to their last token; the first of them is found.
    cached: HashMap<u64, Vec<u32>>,
}

impl BlockPool {
    /// A pool of this many blocks, the null block among them, free in the order of their ids.
    #[must_use]
    pub fn new(blocks: u32, reuse: Reuse) -> Self {
        Self::in_order((1..blocks).collect(), reuse)
    }

    /// The same, free in an order that is drawn, as after a long time of service.
    #[must_use]
    pub fn scattered(blocks: u32, reuse: Reuse, rng: &mut Rng) -> Self {
        let mut order: Vec<u32> = (1..blocks).collect();
        for left in (1..order.len()).rev() {
            order.swap(left, rng.below(left as u32 + 1) as usize);
        }
        Self::in_order(order, reuse)
    }

    fn in_order(order: Vec<u32>, reuse: Reuse) -> Self {
        let mut pool = Self {
            blocks: vec![Block::default(); order.len() + 1],
            free: BTreeMap::new(),
            places: (0, 0),
            reuse,
            cached: HashMap::new(),
        };
        for block in order {
            pool.enqueue(block, false);
        }
        pool
    }

    fn enqueue(&mut self, block: u32, front: bool) {
        let place = if front {
            self.places.0 -= 1;
            self.places.0
        } else {
            self.places.1 += 1;
            self.places.1
        };
        self.blocks[block as usize].place = Some(place);
        self.free.insert(place, block);
    }

    /// Blocks, without the null block.
    #[must_use]
    pub fn usable(&self) -> u32 {
        (self.blocks.len() as u32).saturating_sub(1)
    }

    /// Blocks that nobody refers to, cached ones among them.
    #[must_use]
    pub fn free_blocks(&self) -> u32 {
        self.free.len() as u32
    }

    /// How many refer to a block.
    #[must_use]
    pub fn references(&self, block: u32) -> u32 {
        self.blocks
            .get(block as usize)
            .map_or(0, |block| block.references)
    }

    /// What a block is cached as: the chain of its positions.
    #[must_use]
    pub fn content(&self, block: u32) -> Option<&Arc<[u64]>> {
        self.blocks.get(block as usize)?.content.as_ref()
    }

    /// Hands out `count` blocks, or none at all if there are too few.
    pub fn take(&mut self, count: u32) -> Option<Vec<Taken>> {
        if self.free_blocks() < count {
            return None;
        }
        let mut taken = Vec::with_capacity(count as usize);
        for _ in 0..count {
            let (_, block) = match self.reuse {
                Reuse::Vllm => self.free.pop_first()?,
                Reuse::Newest => self.free.pop_last()?,
            };
            let state = &mut self.blocks[block as usize];
            state.place = None;
            state.references = 1;
            let evicted = state.content.take();
            if let Some(&key) = evicted.as_ref().and_then(|chain| chain.last())
                && let Some(equal) = self.cached.get_mut(&key)
            {
                equal.retain(|&other| other != block);
                if equal.is_empty() {
                    self.cached.remove(&key);
                }
            }
            taken.push(Taken { block, evicted });
        }
        Some(taken)
    }

    /// One more refers to a cached block.
    pub fn share(&mut self, block: u32) {
        let state = &mut self.blocks[block as usize];
        state.references += 1;
        if let Some(place) = state.place.take() {
            self.free.remove(&place);
        }
    }

    /// One less refers to each of these blocks; returns those that are free now, which are handed out
    /// again in this order. The null block is ignored.
    ///
    /// # Errors
    /// [`Violation::FreedTwice`] if nobody does.
    pub fn release(
        &mut self,
        blocks: impl IntoIterator<Item = u32>,
    ) -> Result<Vec<u32>, Violation> {
        let mut freed = Vec::new();
        for block in blocks {
            if block != NULL_BLOCK && self.release_one(block)? {
                freed.push(block);
            }
        }
        let is_front =
            |block: u32| self.reuse == Reuse::Vllm && self.blocks[block as usize].content.is_none();
        let (front, back): (Vec<u32>, Vec<u32>) = freed.iter().partition(|&&block| is_front(block));
        for block in front.into_iter().rev() {
            self.enqueue(block, true);
        }
        for block in back {
            self.enqueue(block, false);
        }
        Ok(freed)
    }

    fn release_one(&mut self, block: u32) -> Result<bool, Violation> {
        let state = self
            .blocks
            .get_mut(block as usize)
            .filter(|state| state.references > 0);
        let Some(state) = state else {
            return Err(Violation::FreedTwice { block });
        };
        state.references -= 1;
        Ok(state.references == 0)
    }

    /// Makes a full block findable under what it holds. Where another block has the same content, that
    /// one is found as long as it is cached.
    pub fn cache(&mut self, block: u32, chain: &[u64]) {
        let Some(&key) = chain.last() else { return };
        if block == NULL_BLOCK {
            return;
        }
        self.cached.entry(key).or_default().push(block);
        self.blocks[block as usize].content = Some(chain.into());
    }

    /// The block that is cached under the hash of everything up to its last token.
    #[must_use]
    pub fn find(&self, key: u64) -> Option<u32> {
        self.cached.get(&key)?.first().copied()
    }

    /// Every cached block with what it holds.
    pub fn cached(&self) -> impl Iterator<Item = (u32, &Arc<[u64]>)> {
        (0..)
            .zip(&self.blocks)
            .filter_map(|(id, block)| Some((id, block.content.as_ref()?)))
    }

    /// Compares with references that were counted elsewhere.
    ///
    /// # Errors
    /// [`Violation::References`], [`Violation::FreeQueue`].
    pub fn check(&self, group: u32, counted: &HashMap<u32, u32>) -> Result<(), Violation> {
        for (block, state) in (0..).zip(&self.blocks).skip(1) {
            let expected = counted.get(&block).copied().unwrap_or(0);
            if state.references != expected {
                return Err(Violation::References {
                    group,
                    block,
                    counted: expected,
                    pool: state.references,
                });
            }
            let queued = state
                .place
                .is_some_and(|place| self.free.get(&place) == Some(&block));
            if queued != (expected == 0) {
                return Err(Violation::FreeQueue {
                    group,
                    block,
                    queued,
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(taken: Option<Vec<Taken>>) -> Vec<u32> {
        taken.unwrap().iter().map(|taken| taken.block).collect()
    }

    #[test]
    fn cached_blocks_come_back_last_and_never_the_null_block() {
        let mut pool = BlockPool::new(8, Reuse::Vllm);
        assert_eq!((pool.usable(), ids(pool.take(6))), (7, (1..7).collect()));
        assert_eq!(pool.take(2), None);
        for block in [2, 5] {
            pool.cache(block, &[10 + u64::from(block)]);
        }
        assert_eq!(pool.release([6, 0, 5, 4]).unwrap(), [6, 5, 4]);
        assert_eq!(pool.release([3, 2, 1]).unwrap(), [3, 2, 1]);
        // What was freed last and is not cached, then what was never used, then what is cached.
        assert_eq!(ids(pool.take(7)), [3, 1, 6, 4, 7, 5, 2]);
    }

    #[test]
    fn scattered_blocks_come_once_each_and_hardly_ever_side_by_side() {
        let scattered = |seed| {
            let mut pool = BlockPool::scattered(1001, Reuse::Vllm, &mut Rng::new(seed));
            ids(pool.take(1000))
        };
        let mut found = scattered(1);
        assert_ne!(found, scattered(2));
        let neighbours = found.windows(2).filter(|pair| pair[0] + 1 == pair[1]);
        let neighbours = neighbours.count();
        assert!(neighbours < 20, "{neighbours} of 999 pairs are neighbours");
        found.sort_unstable();
        assert_eq!(found, (1..=1000).collect::<Vec<_>>());
    }

    #[test]
    fn c7_a_freed_block_can_be_handed_out_again_at_once() {
        let mut pool = BlockPool::new(9, Reuse::Newest);
        let taken = ids(pool.take(3));
        assert_eq!(pool.release([taken[1]]).unwrap(), [taken[1]]);
        assert_eq!(ids(pool.take(1)), [taken[1]]);
    }

    #[test]
    fn a_cached_block_is_found_while_free_and_until_it_is_handed_out() {
        let mut pool = BlockPool::new(3, Reuse::Vllm);
        let taken = ids(pool.take(2));
        pool.cache(taken[0], &[10, 11]);
        // The second block with that content is found when the first is given up.
        pool.cache(taken[1], &[10, 11]);
        pool.release([taken[0]]).unwrap();
        assert_eq!((pool.find(11), pool.free_blocks()), (Some(taken[0]), 1));
        pool.share(taken[0]);
        assert_eq!((pool.references(taken[0]), pool.free_blocks()), (1, 0));
        pool.release([taken[0]]).unwrap();
        let again = pool.take(1).unwrap().remove(0);
        assert_eq!(
            (again.block, again.evicted.as_deref()),
            (taken[0], Some(&[10, 11][..]))
        );
        assert_eq!(pool.find(11), Some(taken[1]));
        pool.release([taken[1]]).unwrap();
        pool.take(1).unwrap();
        assert_eq!(pool.find(11), None);
    }

    #[test]
    fn a_second_free_and_wrong_counts_are_found() {
        let mut pool = BlockPool::new(3, Reuse::Vllm);
        pool.take(1).unwrap();
        let counted = |count| HashMap::from([(1, count)]);
        pool.check(0, &counted(1)).unwrap();
        assert!(matches!(
            pool.check(0, &counted(2)),
            Err(Violation::References {
                block: 1,
                counted: 2,
                pool: 1,
                ..
            })
        ));
        assert_eq!(pool.release([1]).unwrap(), [1]);
        assert!(matches!(
            pool.release([1]),
            Err(Violation::FreedTwice { block: 1 })
        ));
        pool.check(0, &HashMap::new()).unwrap();
    }
}

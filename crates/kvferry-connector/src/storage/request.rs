//! What the scheduler half knows of a request, and which of its blocks are saved.
//!
//! Responsible for one request: its keys, its blocks, and what fills up in a step. Not responsible for who
//! else has its blocks ([`super::saves`]), nor for loads.

use std::collections::HashSet;
use std::sync::Arc;

use super::key::Chain;
use super::lookup::Lookup;
use super::plan::{KeyedBlock, Save};
use super::saves::{Listed, Saves};
use crate::contract::{NULL_BLOCK, RequestView};
use crate::load_state::LoadState;

#[derive(Debug)]
pub(super) struct Request {
    pub(super) chains: Vec<Chain>,
    pub(super) lookup: Arc<Lookup>,
    pub(super) load: LoadState,
    /// Per group, its blocks in the order of positions, also those that a window has left.
    pub(super) blocks: Vec<Vec<Listed>>,
    /// Per group, the position up to which blocks were saved or passed over.
    pub(super) next: Vec<usize>,
    /// Blocks (group, position) that do not hold what they should until they are computed.
    pub(super) tainted: HashSet<(u32, usize)>,
}

impl Request {
    /// Tokens of the prompt that were looked up: enough to look them up again.
    pub(super) fn prompt(&self, unit: u32) -> u32 {
        self.lookup.units() as u32 * unit
    }

    /// Blocks whose computation begins in a step from `computed` to `end` are as good as new.
    pub(super) fn clean(&mut self, block_tokens: &[u32], computed: u32, end: u32) {
        self.tainted.retain(|&(group, position)| {
            let tokens = block_tokens
                .get(group as usize)
                .map_or(1, |&tokens| tokens as usize);
            let start = position * tokens;
            start < computed as usize || start >= end as usize
        });
    }

    /// Plans the saves of blocks that the first `full` tokens fill.
    pub(super) fn save(
        &mut self,
        view: &RequestView<'_>,
        full: usize,
        saves: &mut Saves,
        planned: &mut Vec<Save>,
    ) {
        for ((chain, blocks), (next, group)) in self
            .chains
            .iter_mut()
            .zip(&self.blocks)
            .zip(self.next.iter_mut().zip(0..))
        {
            let tokens = chain.block_tokens();
            if full / tokens <= *next {
                continue;
            }
            chain.extend(&view.tokens[..full], view.extra_key);
            let upto = (full / tokens).min(blocks.len()).min(chain.keys().len());
            while *next < upto {
                let (position, listed, key) = (*next, blocks[*next], chain.keys()[*next]);
                let block = listed.block;
                *next += 1;
                // After a failed load, what the lookup found says nothing any more.
                let stored =
                    self.load != LoadState::Failed && self.lookup.has(group as usize, position);
                if block == NULL_BLOCK
                    || stored
                    || self.tainted.contains(&(group, position))
                    || !saves.is_still(group, listed)
                {
                    continue;
                }
                let block = KeyedBlock { key, group, block };
                planned.extend(saves.plan(view.id, block));
            }
        }
    }
}

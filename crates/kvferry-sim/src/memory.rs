//! A rank's blocks, in real memory.
//!
//! Responsible for where the bytes of a position are, and for writing and comparing them. A block of
//! a layer has one plane per head, each with all of its tokens, as vLLM's `HND` layouts. Not for which
//! block holds which position.

use kvferry_connector::contract::{CacheGroup, CacheLayer, CacheLayout, NULL_BLOCK};
use kvferry_engine::{HostPool, MemoryError, MemoryRegion};
use xxhash_rust::xxh3::xxh3_64;

use crate::config::EngineConfig;
use crate::model::{MAX_HEAD_BYTES, Model};
use crate::violation::Violation;

/// What a block is filled with in which nobody has anything.
const NOTHING: u8 = 0xa5;

/// The blocks of one rank.
#[derive(Debug)]
pub struct RankMemory {
    rank: u32,
    layout: CacheLayout,
    block_tokens: u32,
    head_bytes: u32,
    first_head: u32,
    heads: u32,
    all_heads: u32,
}

/// A token's place: cache group, block, and token in the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) group: u32,
    pub(crate) block: u32,
    pub(crate) token: u32,
}

impl RankMemory {
    /// Memory for a rank's share of the heads, zeroed.
    ///
    /// # Errors
    /// [`MemoryError`] if there is too little.
    pub fn new(config: &EngineConfig, model: &Model, rank: u32) -> Result<Self, MemoryError> {
        let heads = (model.heads / config.ranks).max(1);
        let first_head =
            (u64::from(rank) * u64::from(model.heads) / u64::from(config.ranks)) as u32;
        let block_tokens = config.scheduler.block_tokens;
        let block_bytes = u64::from(heads) * u64::from(block_tokens) * u64::from(model.head_bytes);
        let blocks = config.scheduler.blocks;
        let layers = model.layers.len() as u64;
        let bytes = layers * block_bytes * u64::from(blocks);
        let memory = HostPool::new(bytes as usize)?.region()?;
        let layer = |(layer, &group): (u64, &u32)| {
            let (offset, block_stride) = match config.interleaved {
                true => (layer * block_bytes, layers * block_bytes),
                false => (layer * block_bytes * u64::from(blocks), block_bytes),
            };
            CacheLayer {
                layer: layer as u32,
                group,
                memory: memory.clone(),
                offset,
                block_bytes,
                block_stride,
                blocks,
            }
        };
        let layout = CacheLayout {
            groups: vec![CacheGroup { block_tokens }; model.groups.len()],
            layers: (0..).zip(&model.layers).map(layer).collect(),
        };
        Ok(Self {
            rank,
            layout,
            block_tokens,
            head_bytes: model.head_bytes,
            first_head,
            heads,
            all_heads: model.heads,
        })
    }

    /// What a worker half is given.
    #[must_use]
    pub fn layout(&self) -> &CacheLayout {
        &self.layout
    }

    /// The place of a position.
    pub(crate) fn place(&self, group: u32, table: &[u32], position: u32) -> Option<Place> {
        let block = *table.get((position / self.block_tokens) as usize)?;
        let token = position % self.block_tokens;
        (block != NULL_BLOCK).then_some(Place {
            group,
            block,
            token,
        })
    }

    /// Where a head's bytes of a token are: the memory, and the offset in it.
    fn cell(&self, layer: &CacheLayer, place: Place, head: u32) -> u64 {
        let in_block = (u64::from(head - self.first_head) * u64::from(self.block_tokens)
            + u64::from(place.token))
            * u64::from(self.head_bytes);
        layer.offset + u64::from(place.block) * layer.block_stride + in_block
    }

    /// Whether this rank keeps a head.
    pub(crate) fn has_head(&self, head: u32) -> bool {
        head < self.all_heads && (self.first_head..self.first_head + self.heads).contains(&head)
    }

    /// Reads a head's bytes of a token.
    pub(crate) fn read(
        &self,
        layer: u32,
        place: Place,
        head: u32,
        out: &mut [u8],
    ) -> Result<(), Violation> {
        let layer = &self.layout.layers[layer as usize];
        Ok(layer.memory.read_at(self.cell(layer, place, head), out)?)
    }

    /// Writes what a position's layers compute.
    pub(crate) fn write(&self, place: Place, chain: u64) -> Result<(), Violation> {
        self.each_cell(place.group, |layer, head, cell| {
            Model::cell(chain, layer.layer, head, cell);
            Ok(layer.memory.write_at(self.cell(layer, place, head), cell)?)
        })
    }

    /// Compares a position's bytes with what they should be.
    pub(crate) fn verify(
        &self,
        what: &'static str,
        place: Place,
        chain: u64,
    ) -> Result<(), Violation> {
        let mut found = [0_u8; MAX_HEAD_BYTES as usize];
        self.each_cell(place.group, |layer, head, cell| {
            let found = &mut found[..cell.len()];
            Model::cell(chain, layer.layer, head, cell);
            layer.memory.read_at(self.cell(layer, place, head), found)?;
            if found == cell {
                return Ok(());
            }
            let Place {
                group,
                block,
                token,
            } = place;
            Err(Violation::WrongBytes {
                what,
                group,
                block,
                token,
                layer: layer.layer,
                rank: self.rank,
            })
        })
    }

    fn each_cell(
        &self,
        group: u32,
        mut each: impl FnMut(&CacheLayer, u32, &mut [u8]) -> Result<(), Violation>,
    ) -> Result<(), Violation> {
        let mut cell = [0_u8; MAX_HEAD_BYTES as usize];
        let cell = &mut cell[..self.head_bytes as usize];
        for layer in self
            .layout
            .layers
            .iter()
            .filter(|layer| layer.group == group)
        {
            for head in self.first_head..self.first_head + self.heads {
                each(layer, head, cell)?;
            }
        }
        Ok(())
    }

    /// Compares a whole block with the chain of its positions.
    pub(crate) fn verify_block(
        &self,
        what: &'static str,
        group: u32,
        block: u32,
        chain: &[u64],
    ) -> Result<(), Violation> {
        (0..).zip(chain).try_for_each(|(token, &chain)| {
            self.verify(
                what,
                Place {
                    group,
                    block,
                    token,
                },
                chain,
            )
        })
    }

    fn blocks(
        &self,
        group: u32,
        block: u32,
    ) -> impl Iterator<Item = (&CacheLayer, &MemoryRegion, u64)> {
        let layers = self
            .layout
            .layers
            .iter()
            .filter(move |layer| layer.group == group);
        layers.map(move |layer| {
            (
                layer,
                &layer.memory,
                layer.offset + u64::from(block) * layer.block_stride,
            )
        })
    }

    /// Fills a block with what means nothing.
    pub(crate) fn scribble(&self, group: u32, block: u32) -> Result<(), Violation> {
        for (layer, memory, offset) in self.blocks(group, block) {
            memory.fill(offset, layer.block_bytes, NOTHING)?;
        }
        Ok(())
    }

    /// What a block holds, layer by layer, as hashes.
    pub(crate) fn digests(&self, group: u32, block: u32) -> Result<Vec<u64>, Violation> {
        let mut bytes = Vec::new();
        self.blocks(group, block)
            .map(|(layer, memory, offset)| {
                bytes.resize(layer.block_bytes as usize, 0);
                memory.read_at(offset, &mut bytes)?;
                Ok(xxh3_64(&bytes))
            })
            .collect()
    }

    /// Whether nobody has written to a free block since it held this.
    pub(crate) fn check_free(
        &self,
        group: u32,
        block: u32,
        digests: &[u64],
    ) -> Result<(), Violation> {
        let found = self.digests(group, block)?;
        let layers = self.blocks(group, block).map(|(layer, ..)| layer.layer);
        for (layer, (found, digest)) in layers.zip(found.iter().zip(digests)) {
            if found != digest {
                let rank = self.rank;
                return Err(Violation::LateWrite {
                    group,
                    block,
                    layer,
                    rank,
                });
            }
        }
        Ok(())
    }
}

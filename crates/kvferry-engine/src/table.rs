//! Strided block tables: where block *n* of a layer lives.
//!
//! A table is described once, at the handshake; reads then name blocks and never addresses. A
//! [`Table`] is one of ours, inside a registered region; a [`RemoteTable`] is a peer's, as it
//! described it. Both have been checked against their region's length.

use std::fmt;
use std::sync::Arc;

use kvferry_wire::{Incarnation, Interior, TableDescription};

use crate::region::RegionInner;

/// What a caller says of a table of blocks in one of its regions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableSpec {
    /// First byte of block 0, from the start of the region.
    pub offset: u64,
    /// Bytes of a block that are moved.
    pub block_bytes: u64,
    /// Distance between the starts of neighbouring blocks; at least `block_bytes`.
    pub block_stride: u64,
    /// Number of blocks, at least 1.
    pub block_count: u32,
    /// Cache group the table belongs to (vLLM's KV cache groups), from 0.
    pub group: u32,
    /// Global layer index, from 0.
    pub layer: u32,
    /// What a block looks like inside.
    pub interior: Interior,
}

impl TableSpec {
    /// A table of opaque blocks that lie next to one another from the start of the region.
    #[must_use]
    pub fn dense(block_bytes: u64, block_count: u32) -> Self {
        Self {
            offset: 0,
            block_bytes,
            block_stride: block_bytes,
            block_count,
            group: 0,
            layer: 0,
            interior: Interior::opaque(),
        }
    }

    /// The same table starting at `offset`.
    #[must_use]
    pub fn at(mut self, offset: u64) -> Self {
        self.offset = offset;
        self
    }

    /// The same table for another layer.
    #[must_use]
    pub fn layer(mut self, layer: u32) -> Self {
        self.layer = layer;
        self
    }

    pub(crate) fn describe(self, id: u32, region: u32) -> TableDescription {
        TableDescription {
            id,
            region,
            offset: self.offset,
            block_bytes: self.block_bytes,
            block_stride: self.block_stride,
            block_count: self.block_count,
            group: self.group,
            layer: self.layer,
            interior: self.interior,
        }
    }
}

/// One of this engine's tables. Cheap to clone.
#[derive(Clone)]
pub struct Table(pub(crate) Arc<LocalTable>);

pub(crate) struct LocalTable {
    pub(crate) description: TableDescription,
    pub(crate) region: Arc<RegionInner>,
}

impl Table {
    /// The table's number, by which peers name it.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.0.description.id
    }

    /// What peers are told of the table.
    #[must_use]
    pub fn description(&self) -> &TableDescription {
        &self.0.description
    }

    pub(crate) fn region(&self) -> &Arc<RegionInner> {
        &self.0.region
    }
}

impl fmt::Debug for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0.description, f)
    }
}

/// A peer's table, as the peer described it. Cheap to clone.
#[derive(Clone, Debug)]
pub struct RemoteTable {
    pub(crate) owner: Incarnation,
    pub(crate) description: Arc<TableDescription>,
}

impl RemoteTable {
    /// The peer's number for the table.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.description.id
    }

    /// What the peer said of the table.
    #[must_use]
    pub fn description(&self) -> &TableDescription {
        &self.description
    }

    /// The life of the peer that described it; the table is worth nothing with another.
    #[must_use]
    pub fn owner(&self) -> Incarnation {
        self.owner
    }
}

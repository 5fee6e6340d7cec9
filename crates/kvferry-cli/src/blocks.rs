//! A side's memory: one pool, one table of blocks per layer, and which block ids are free.
//!
//! Invariant: an id is either free or given out, never both; ids are given out in an order that the
//! seed scatters.

use kvferry_engine::{Engine, HostPool, MemoryError, MemoryRegion, Region, Table, TableSpec};

use crate::error::CliError;
use crate::pattern::{POISON, mix};

/// The shape of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) layers: u32,
    /// Blocks in each layer.
    pub(crate) count: u32,
    /// Bytes of a block in one layer.
    pub(crate) block_bytes: u64,
}

impl Shape {
    /// Bytes in all, unless that overflows.
    pub(crate) fn bytes(self) -> Option<u64> {
        (u64::from(self.layers) * u64::from(self.count)).checked_mul(self.block_bytes)
    }
}

/// Registered memory with its tables.
pub(crate) struct Blocks {
    shape: Shape,
    memory: MemoryRegion,
    region: Region,
    tables: Vec<Table>,
}

impl Blocks {
    /// Allocates and registers memory, and describes a table for each layer.
    pub(crate) fn new(engine: &Engine, shape: Shape) -> Result<Self, CliError> {
        // More than the address space is more than the pool can have.
        let bytes = shape.bytes().and_then(|bytes| usize::try_from(bytes).ok());
        let pool = HostPool::new(bytes.unwrap_or(usize::MAX))?;
        let memory = pool.region()?;
        let region = engine.register(&memory)?;
        let layer_bytes = u64::from(shape.count) * shape.block_bytes;
        let tables = (0..shape.layers)
            .map(|layer| {
                let spec = TableSpec::dense(shape.block_bytes, shape.count)
                    .at(u64::from(layer) * layer_bytes)
                    .layer(layer);
                engine.add_table(&region, spec)
            })
            .collect::<Result<_, _>>()?;
        Ok(Self {
            shape,
            memory,
            region,
            tables,
        })
    }

    pub(crate) const fn shape(&self) -> Shape {
        self.shape
    }

    /// The tables, in the order of the layers.
    pub(crate) fn tables(&self) -> &[Table] {
        &self.tables
    }

    pub(crate) fn write(&self, layer: u32, id: u32, bytes: &[u8]) -> Result<(), MemoryError> {
        self.memory.write_at(self.offset(layer, id), bytes)
    }

    pub(crate) fn read(&self, layer: u32, id: u32, out: &mut [u8]) -> Result<(), MemoryError> {
        self.memory.read_at(self.offset(layer, id), out)
    }

    /// Fills a block with poison in every layer.
    pub(crate) fn poison(&self, id: u32) -> Result<(), MemoryError> {
        (0..self.shape.layers).try_for_each(|layer| {
            self.memory
                .fill(self.offset(layer, id), self.shape.block_bytes, POISON)
        })
    }

    /// Gives the memory up.
    pub(crate) fn close(self, timeout: std::time::Duration) -> Result<(), CliError> {
        Ok(self.region.deregister(timeout)?)
    }

    fn offset(&self, layer: u32, id: u32) -> u64 {
        // An id that is out of range reaches past its layer, and from the last layer out of the
        // region, which the copy refuses; ids that a peer names never come here.
        (u64::from(layer) * u64::from(self.shape.count) + u64::from(id)) * self.shape.block_bytes
    }
}

/// Block ids that nobody uses.
#[derive(Debug)]
pub(crate) struct FreeIds(Vec<u32>);

impl FreeIds {
    /// All ids below `count`, scattered.
    pub(crate) fn scattered(count: u32, seed: u64) -> Self {
        let mut ids: Vec<u32> = (0..count).collect();
        let mut state = seed;
        for last in (1..ids.len()).rev() {
            state = mix(state.wrapping_add(last as u64));
            ids.swap(last, (state % (last as u64 + 1)) as usize);
        }
        Self(ids)
    }

    /// Takes `count` ids, or none if there are fewer.
    pub(crate) fn take(&mut self, count: u32) -> Option<Vec<u32>> {
        let rest = self.0.len().checked_sub(count as usize)?;
        Some(self.0.split_off(rest))
    }

    /// Takes ids back.
    pub(crate) fn give(&mut self, ids: Vec<u32>) {
        self.0.extend(ids);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_scattered_by_the_seed_and_each_comes_once() {
        let mut free = FreeIds::scattered(1000, 1);
        let mut ids = free.take(1000).unwrap();
        assert_ne!(ids, FreeIds::scattered(1000, 2).take(1000).unwrap());
        let neighbours = ids.windows(2).filter(|pair| pair[0] + 1 == pair[1]).count();
        assert!(
            neighbours < 20,
            "{neighbours} of 999 pairs follow one another"
        );
        ids.sort_unstable();
        assert_eq!(ids, (0..1000).collect::<Vec<_>>());
    }

    #[test]
    fn too_few_ids_are_none() {
        let mut free = FreeIds::scattered(4, 0);
        let ids = free.take(3).unwrap();
        assert_eq!(free.take(2), None);
        assert_eq!(free.take(1).unwrap().len(), 1);
        free.give(ids);
        assert_eq!(free.take(3).unwrap().len(), 3);
        assert_eq!(free.take(0), Some(Vec::new()));
    }

    #[test]
    fn a_shape_that_overflows_has_no_size() {
        let shape = |block_bytes| Shape {
            layers: 4,
            count: 8,
            block_bytes,
        };
        assert_eq!(shape(16).bytes(), Some(512));
        assert_eq!(shape(u64::MAX / 16).bytes(), None);
    }
}

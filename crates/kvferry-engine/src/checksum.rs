//! Checksums of blocks, for those who compare what a read has brought.

use std::fmt;

use kvferry_wire::MemoryKind;
use xxhash_rust::xxh3::Xxh3;

use crate::engine::Engine;
use crate::error::ChecksumError;
use crate::region::RegionHold;
use crate::table::Table;

/// Bytes that are copied out at a time; at most one block's.
const PIECE: u64 = 64 << 10;

/// Computes checksums of blocks over several of an engine's tables, on the caller's thread.
///
/// The tables' regions stay registered as long as it lives. Nothing keeps peers or the caller from writing to
/// blocks meanwhile; then a checksum is that of neither content.
pub struct Checksums {
    tables: Vec<Table>,
    hash: Xxh3,
    piece: Vec<u8>,
    /// Why the tables' memory can be read.
    _holds: Vec<RegionHold>,
}

impl Checksums {
    /// XXH3 (64 bits, seed 0) over the block's bytes in every table, in the tables' order.
    ///
    /// # Errors
    /// [`ChecksumError::Block`] if a table has no such block.
    pub fn of(&mut self, block: u32) -> Result<u64, ChecksumError> {
        self.hash.reset();
        for table in &self.tables {
            let description = table.description();
            if block >= description.block_count {
                return Err(ChecksumError::Block {
                    block,
                    count: description.block_count,
                });
            }
            let from = description.offset + u64::from(block) * description.block_stride;
            let mut done = 0;
            while done < description.block_bytes {
                let bytes = (description.block_bytes - done).min(PIECE) as usize;
                if self.piece.len() < bytes {
                    self.piece.resize(bytes, 0);
                }
                let piece = self.piece.get_mut(..bytes).unwrap_or_default();
                table.region().memory.read_at(from + done, piece)?;
                self.hash.update(piece);
                done += bytes as u64;
            }
        }
        Ok(self.hash.digest())
    }
}

impl fmt::Debug for Checksums {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checksums")
            .field("tables", &self.tables)
            .finish_non_exhaustive()
    }
}

impl Engine {
    /// Checksums of blocks over these tables, in this order.
    ///
    /// # Errors
    /// [`ChecksumError::NotHost`] for memory that the processor cannot read, [`ChecksumError::LocalTable`] for a table
    /// of another engine or one whose region was given up, [`ChecksumError::Engine`] if the engine was shut down.
    pub fn checksums(&self, tables: &[Table]) -> Result<Checksums, ChecksumError> {
        self.shared().check()?;
        for table in tables {
            let kind = table.region().memory.kind();
            if kind != MemoryKind::Host {
                let table = table.id();
                return Err(ChecksumError::NotHost { table, kind });
            }
        }
        let holds = self.shared().hold(tables);
        Ok(Checksums {
            tables: tables.to_vec(),
            hash: Xxh3::new(),
            piece: Vec::new(),
            _holds: holds.map_err(|table| ChecksumError::LocalTable { table })?,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kvferry_wire::EngineId;
    use xxhash_rust::xxh3::xxh3_64;

    use super::*;
    use crate::{
        DeregisterError, EngineConfig, HostPool, LoopbackFabric, LoopbackNetwork, TableSpec,
    };

    fn engine() -> Engine {
        let network = LoopbackNetwork::new();
        let config = EngineConfig::new(EngineId::new("sums").unwrap());
        let builder = Engine::builder(config);
        let started = builder.start_on(move || LoopbackFabric::new(&network, 4096));
        started.unwrap()
    }

    #[test]
    fn a_checksum_is_over_the_blocks_of_all_tables_in_their_order() {
        let engine = engine();
        // Longer than a piece, with a gap between blocks.
        let (bytes, stride) = (PIECE + 100, PIECE + 4096);
        let memory = HostPool::new(6 * stride as usize).unwrap();
        let memory = memory.region().unwrap();
        let region = engine.register(&memory).unwrap();
        let table = |place: u64| {
            let spec = TableSpec {
                block_stride: stride,
                ..TableSpec::dense(bytes, 3)
            };
            engine
                .add_table(&region, spec.at(place * 3 * stride))
                .unwrap()
        };
        let tables = [table(0), table(1)];
        let content: Vec<u8> = (0..6 * stride).map(|at| (at % 251) as u8).collect();
        memory.write_at(0, &content).unwrap();
        let block = |table: u64, block: u64| {
            let from = ((table * 3 + block) * stride) as usize;
            &content[from..from + bytes as usize]
        };
        let mut sums = engine.checksums(&tables).unwrap();
        for number in [2_u64, 0] {
            let whole = [block(0, number), block(1, number)].concat();
            assert_eq!(sums.of(number as u32), Ok(xxh3_64(&whole)));
        }
        let reversed = [tables[1].clone(), tables[0].clone()];
        let mut reversed = engine.checksums(&reversed).unwrap();
        let whole = [block(1, 1), block(0, 1)].concat();
        assert_eq!(reversed.of(1), Ok(xxh3_64(&whole)));
        let error = sums.of(3).unwrap_err();
        assert_eq!(error, ChecksumError::Block { block: 3, count: 3 });
    }

    #[test]
    fn a_region_stays_as_long_as_its_checksums_are_computed() {
        let engine = engine();
        let memory = HostPool::new(4096).unwrap().region().unwrap();
        let region = engine.register(&memory).unwrap();
        let table = engine.add_table(&region, TableSpec::dense(512, 8)).unwrap();
        let sums = engine.checksums(std::slice::from_ref(&table)).unwrap();
        let busy = region.deregister(Duration::from_millis(50)).unwrap_err();
        assert!(
            matches!(busy, DeregisterError::Busy { operations: 1, .. }),
            "{busy:?}"
        );
        drop(sums);
        let error = engine.checksums(&[table]).unwrap_err();
        assert!(matches!(error, ChecksumError::LocalTable { .. }), "{error}");
        engine.shutdown(Duration::from_secs(5)).unwrap();
        let error = engine.checksums(&[]).unwrap_err();
        assert!(matches!(error, ChecksumError::Engine(_)), "{error}");
    }
}

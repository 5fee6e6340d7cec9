//! The served lane: gathering on the producer, scattering on the consumer.
//!
//! A transfer's bytes are one stream: table by table, block by block in the order of the request. A
//! data segment says where in the stream its bytes begin, so segments may arrive in any order.

use kvferry_wire::{ReadRejected, ReadRequest, RejectCode, TransferId, WireError};

use crate::memory::MemoryError;
use crate::plan::{BlockPair, is_dense};
use crate::region::RegionHold;
use crate::table::Table;
use crate::transfer::TablePair;

/// A peer's read request being answered.
pub(crate) struct ServeJob {
    pub(crate) transfer: TransferId,
    /// The request as it arrived; read in place.
    request: Box<[u8]>,
    tables: Vec<Table>,
    /// One per region; keeps the memory registered.
    _holds: Vec<RegionHold>,
    table: usize,
    run: usize,
    block: u32,
    byte: u64,
    pub(crate) stream: u64,
    pub(crate) total: u64,
}

impl ServeJob {
    /// Checks a request against the tables that exist.
    ///
    /// # Errors
    /// The answer for the peer, naming the offending id.
    pub(crate) fn new(
        request: &ReadRequest<'_>,
        bytes: &[u8],
        table_of: impl Fn(u32) -> Option<Table>,
    ) -> Result<Self, ReadRejected> {
        let transfer = request.transfer();
        let reject = |code, detail: u64| ReadRejected {
            transfer,
            code,
            detail,
        };
        let mut tables = Vec::with_capacity(request.table_count());
        let mut holds: Vec<RegionHold> = Vec::new();
        let mut total = 0_u64;
        // Once for all tables: a request may name many of both.
        let blocks = request.block_count();
        let end = request
            .runs()
            .map(|run| u64::from(run.first) + u64::from(run.count))
            .max()
            .unwrap_or(0);
        for id in request.tables() {
            let table =
                table_of(id).ok_or_else(|| reject(RejectCode::UnknownTable, u64::from(id)))?;
            let count = table.description().block_count;
            if end > u64::from(count) {
                return Err(reject(RejectCode::BlockOutOfRange, end - 1));
            }
            total = blocks
                .checked_mul(table.description().block_bytes)
                .and_then(|bytes| total.checked_add(bytes))
                .ok_or_else(|| reject(RejectCode::BlockOutOfRange, u64::MAX))?;
            if !holds.iter().any(|hold| hold.id == table.region().id) {
                holds.push(RegionHold::new(table.region()));
            }
            tables.push(table);
        }
        Ok(Self {
            transfer,
            request: bytes.into(),
            tables,
            _holds: holds,
            table: 0,
            run: 0,
            block: 0,
            byte: 0,
            stream: 0,
            total,
        })
    }

    /// Bytes that the request keeps.
    pub(crate) fn request_bytes(&self) -> usize {
        self.request.len()
    }

    /// The table that the next byte comes from, for errors.
    pub(crate) fn current_table(&self) -> u32 {
        self.tables.get(self.table).map_or(u32::MAX, Table::id)
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.stream == self.total
    }

    /// Copies the next bytes of the stream into `out`; returns how many, less than asked for only
    /// at the end.
    pub(crate) fn gather(&mut self, out: &mut [u8]) -> Result<usize, GatherError> {
        let request = ReadRequest::view(&self.request).map_err(GatherError::Request)?;
        let mut filled = 0;
        while filled < out.len() {
            let Some(table) = self.tables.get(self.table) else {
                break;
            };
            let Some(run) = request.run(self.run) else {
                self.table += 1;
                self.run = 0;
                continue;
            };
            let d = table.description();
            // Bytes from here to the end of what lies in one piece.
            let blocks = if is_dense(d) {
                u64::from(run.count - self.block)
            } else {
                1
            };
            let extent = blocks * d.block_bytes - self.byte;
            let take = extent.min((out.len() - filled) as u64);
            let block = u64::from(run.first) + u64::from(self.block);
            let at = d.offset + block * d.block_stride + self.byte;
            let piece = &mut out[filled..filled + take as usize];
            table
                .region()
                .memory
                .read_at(at, piece)
                .map_err(GatherError::Memory)?;
            filled += take as usize;
            let byte = self.byte + take;
            self.block += (byte / d.block_bytes) as u32;
            self.byte = byte % d.block_bytes;
            if self.block == run.count {
                self.run += 1;
                self.block = 0;
            }
        }
        self.stream += filled as u64;
        Ok(filled)
    }
}

/// Why a stream cannot go on; the peer is told.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GatherError {
    #[error("the request can no longer be read: {0}")]
    Request(WireError),
    #[error(transparent)]
    Memory(MemoryError),
}

/// Why a data segment is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ScatterError {
    #[error("{bytes} bytes at offset {offset} of a stream of {total}")]
    Outside {
        offset: u64,
        bytes: usize,
        total: u64,
    },
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// Where a stream's bytes go on the consumer.
pub(crate) struct Scatter<'a> {
    pub(crate) tables: &'a [TablePair],
    /// Stream offset at which each table begins.
    pub(crate) starts: &'a [u64],
    pub(crate) pairs: &'a [BlockPair],
    pub(crate) total: u64,
}

impl Scatter<'_> {
    /// Copies `bytes`, which begin at `offset` of the stream, to where they belong.
    pub(crate) fn write(&self, offset: u64, mut bytes: &[u8]) -> Result<(), ScatterError> {
        let end = offset.checked_add(bytes.len() as u64);
        if end.is_none_or(|end| end > self.total) {
            return Err(ScatterError::Outside {
                offset,
                bytes: bytes.len(),
                total: self.total,
            });
        }
        let mut offset = offset;
        let mut table = self
            .starts
            .partition_point(|&start| start <= offset)
            .saturating_sub(1);
        while let (false, Some(pair)) = (bytes.is_empty(), self.tables.get(table)) {
            let d = pair.local.description();
            let within = offset - self.starts[table];
            let index = (within / d.block_bytes) as usize;
            if index >= self.pairs.len() {
                table += 1;
                continue;
            }
            let byte = within % d.block_bytes;
            let want = byte + bytes.len() as u64;
            let blocks = if is_dense(d) {
                neighbours(&self.pairs[index..], want, d.block_bytes)
            } else {
                1
            };
            let take = (blocks * d.block_bytes - byte).min(bytes.len() as u64);
            let at = d.offset + u64::from(self.pairs[index].local) * d.block_stride + byte;
            let (now, rest) = bytes.split_at(take as usize);
            pair.local.region().memory.write_at(at, now)?;
            bytes = rest;
            offset += take;
        }
        Ok(())
    }
}

/// How many of the first pairs have neighbouring local blocks, as far as `want` bytes reach.
fn neighbours(pairs: &[BlockPair], want: u64, block_bytes: u64) -> u64 {
    let mut count = 1;
    while count * block_bytes < want {
        let Some(next) = pairs.get(count as usize) else {
            break;
        };
        if u64::from(next.local) != u64::from(pairs[0].local) + count {
            break;
        }
        count += 1;
    }
    count
}

/// Which parts of a stream have arrived: disjoint ranges in order, merged where they touch.
///
/// A peer that sends a part twice, under fresh sequence numbers, would otherwise be taken to have
/// sent everything.
#[derive(Debug, Default)]
pub(crate) struct Extents {
    ranges: Vec<(u64, u64)>,
}

impl Extents {
    /// Adds a range; false if any of it was there already.
    pub(crate) fn insert(&mut self, start: u64, end: u64) -> bool {
        let place = self.ranges.partition_point(|&(s, _)| s < start);
        let before_end = place.checked_sub(1).map(|before| self.ranges[before].1);
        let after_start = self.ranges.get(place).map(|range| range.0);
        if before_end.is_some_and(|e| e > start) || after_start.is_some_and(|s| s < end) {
            return false;
        }
        match (before_end == Some(start), after_start == Some(end)) {
            (true, true) => {
                self.ranges[place - 1].1 = self.ranges[place].1;
                self.ranges.remove(place);
            }
            (true, false) => self.ranges[place - 1].1 = end,
            (false, true) => self.ranges[place].0 = start,
            (false, false) => self.ranges.insert(place, (start, end)),
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn extents_merge_and_refuse_overlaps() {
        let mut extents = Extents::default();
        assert!(extents.insert(0, 10));
        assert!(extents.insert(20, 30));
        assert!(!extents.insert(9, 11));
        assert!(!extents.insert(19, 21));
        assert!(!extents.insert(5, 6));
        assert!(!extents.insert(0, 40));
        assert!(extents.insert(10, 20));
        assert_eq!(extents.ranges, [(0, 30)]);
    }

    proptest! {
        #[test]
        fn extents_agree_with_a_bitmap(ops in prop::collection::vec((0_u64..60, 1_u64..8), 1..60)) {
            let (mut extents, mut seen) = (Extents::default(), [false; 80]);
            for (start, bytes) in ops {
                let range = start as usize..(start + bytes) as usize;
                let free = seen[range.clone()].iter().all(|&bit| !bit);
                prop_assert_eq!(extents.insert(start, start + bytes), free);
                if free {
                    seen[range].fill(true);
                }
            }
            let total: u64 = extents.ranges.iter().map(|(s, e)| e - s).sum();
            prop_assert_eq!(total, seen.iter().filter(|&&bit| bit).count() as u64);
        }
    }
}

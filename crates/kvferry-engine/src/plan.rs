//! From pairs of block ids to runs of bytes.
//!
//! Pure: tables and pairs in, runs out, one at a time. Neighbouring pairs that are adjacent on both
//! sides become one run, so the number of operations never exceeds the number of runs. Nothing is
//! allocated.

use kvferry_wire::TableDescription;

use crate::error::ReadError;

/// One block to read: the peer's block `remote` into our block `local`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockPair {
    /// Block id in the local table.
    pub local: u32,
    /// Block id in the peer's table.
    pub remote: u32,
}

impl BlockPair {
    /// Pairs two block ids.
    #[must_use]
    pub const fn new(local: u32, remote: u32) -> Self {
        Self { local, remote }
    }
}

/// Bytes that are contiguous on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Where they go, from the start of the local region.
    pub local_offset: u64,
    /// Where they are, from the start of the peer's region.
    pub remote_offset: u64,
    /// How many.
    pub bytes: u64,
}

/// Pairs whose ids follow one another on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PairRun {
    pub(crate) first: BlockPair,
    pub(crate) count: u32,
}

/// Groups pairs into runs of ids that are consecutive on both sides.
#[derive(Clone, Debug)]
pub(crate) struct PairRuns<'a> {
    pairs: &'a [BlockPair],
}

impl<'a> PairRuns<'a> {
    pub(crate) const fn new(pairs: &'a [BlockPair]) -> Self {
        Self { pairs }
    }

    /// The next pair alone, however its neighbours lie.
    #[inline]
    fn next_pair(&mut self) -> Option<PairRun> {
        let (&first, rest) = self.pairs.split_first()?;
        self.pairs = rest;
        Some(PairRun { first, count: 1 })
    }
}

impl Iterator for PairRuns<'_> {
    type Item = PairRun;

    #[inline]
    fn next(&mut self) -> Option<PairRun> {
        let (&first, rest) = self.pairs.split_first()?;
        let mut count = 1_u32;
        for pair in rest {
            let follows = u64::from(pair.local) == u64::from(first.local) + u64::from(count)
                && u64::from(pair.remote) == u64::from(first.remote) + u64::from(count);
            if !follows {
                break;
            }
            count += 1;
        }
        self.pairs = &self.pairs[count as usize..];
        Some(PairRun { first, count })
    }
}

/// True if neighbouring blocks of the table touch.
pub(crate) fn is_dense(table: &TableDescription) -> bool {
    table.block_stride == table.block_bytes
}

/// The runs of one (local table, remote table) pair; see [`plan`].
#[derive(Clone, Debug)]
pub struct Plan<'a> {
    pairs: PairRuns<'a>,
    merge: bool,
    local: Geometry,
    remote: Geometry,
}

#[derive(Clone, Copy, Debug)]
struct Geometry {
    offset: u64,
    stride: u64,
    bytes: u64,
}

impl Geometry {
    fn of(table: &TableDescription) -> Self {
        Self {
            offset: table.offset,
            stride: table.block_stride,
            bytes: table.block_bytes,
        }
    }

    #[inline]
    fn block(self, id: u32) -> u64 {
        self.offset + u64::from(id) * self.stride
    }
}

/// Plans the read of `pairs` from `remote` into `local`.
///
/// The pairs must have passed [`check_pairs`] for the two tables, which also rules out overflow.
///
/// ```
/// use kvferry_engine::{BlockPair, Run, TableSpec, plan};
/// # use kvferry_wire::{Interior, TableDescription};
/// # let table = |bytes, count| TableDescription { id: 0, region: 0, offset: 0, block_bytes: bytes,
/// #     block_stride: bytes, block_count: count, group: 0, layer: 0, interior: Interior::opaque() };
/// let (local, remote) = (table(4096, 8), table(4096, 100));
/// // Blocks 40 and 41 lie next to one another and so do their destinations: one run.
/// let pairs = [BlockPair::new(2, 40), BlockPair::new(3, 41), BlockPair::new(0, 7)];
/// let runs: Vec<Run> = plan(&local, &remote, &pairs).collect();
/// assert_eq!(runs.len(), 2);
/// assert_eq!(runs[0], Run { local_offset: 8192, remote_offset: 163_840, bytes: 8192 });
/// ```
#[must_use]
pub fn plan<'a>(
    local: &TableDescription,
    remote: &TableDescription,
    pairs: &'a [BlockPair],
) -> Plan<'a> {
    Plan {
        pairs: PairRuns::new(pairs),
        merge: is_dense(local) && is_dense(remote),
        local: Geometry::of(local),
        remote: Geometry::of(remote),
    }
}

impl Iterator for Plan<'_> {
    type Item = Run;

    #[inline]
    fn next(&mut self) -> Option<Run> {
        let PairRun { first, count } = if self.merge {
            self.pairs.next()?
        } else {
            self.pairs.next_pair()?
        };
        Some(Run {
            local_offset: self.local.block(first.local),
            remote_offset: self.remote.block(first.remote),
            bytes: self.local.bytes * u64::from(count),
        })
    }
}

/// Checks that two tables can be read into one another and that all ids exist.
///
/// # Errors
/// [`ReadError::Mismatch`] naming the field in which the tables differ, [`ReadError::LocalBlock`]
/// and [`ReadError::RemoteBlock`] naming the first id out of range.
pub fn check_pairs(
    local: &TableDescription,
    remote: &TableDescription,
    pairs: &[BlockPair],
) -> Result<(), ReadError> {
    let mismatch =
        |field, ours: &dyn std::fmt::Display, theirs: &dyn std::fmt::Display| ReadError::Mismatch {
            field,
            ours: ours.to_string(),
            theirs: theirs.to_string(),
        };
    if local.block_bytes != remote.block_bytes {
        return Err(mismatch(
            "block_bytes",
            &local.block_bytes,
            &remote.block_bytes,
        ));
    }
    if local.interior != remote.interior {
        return Err(ReadError::Mismatch {
            field: "interior",
            ours: format!("{:?}", local.interior),
            theirs: format!("{:?}", remote.interior),
        });
    }
    for pair in pairs {
        if pair.local >= local.block_count {
            return Err(ReadError::LocalBlock {
                block: pair.local,
                count: local.block_count,
            });
        }
        if pair.remote >= remote.block_count {
            return Err(ReadError::RemoteBlock {
                block: pair.remote,
                count: remote.block_count,
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;

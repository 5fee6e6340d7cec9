//! Where a transfer stands in its plan, for the lanes that read by themselves.
//!
//! A cursor is a table, a place in the pairs and a byte of the block there; the next run is planned
//! when it can be posted, so nothing is stored per block. A run ends where a chunk of either region
//! ends, since an operation has one registration and one key, and where a batch of copies is full.

use kvferry_wire::TableDescription;

use crate::chunks::Chunks;
use crate::plan::{BlockPair, Run, plan};
use crate::transfer::TablePair;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cursor {
    table: usize,
    pair: usize,
    /// Bytes of the pair's block that were posted with the piece before.
    within: u64,
}

/// A run of the cursor's table, or a piece of one, ready to be posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) run: Run,
    /// The cursor behind the run.
    pub(crate) after: Cursor,
}

impl Cursor {
    /// The tables that it stands in, or `None` at the end.
    pub(crate) fn current(self, tables: &[TablePair]) -> Option<&TablePair> {
        tables.get(self.table)
    }

    /// The next run, or its first `most` bytes (at least 1); `None` at the end. `local` and `remote` are
    /// the chunks of the regions of the current tables.
    pub(crate) fn step(
        self,
        tables: &[TablePair],
        pairs: &[BlockPair],
        (local, remote): (Chunks, Chunks),
        most: u64,
    ) -> Option<Step> {
        let current = tables.get(self.table)?;
        self.step_in(
            current.local.description(),
            &current.remote,
            pairs,
            (local, remote),
            most,
        )
    }

    fn step_in(
        self,
        local_table: &TableDescription,
        remote_table: &TableDescription,
        pairs: &[BlockPair],
        (local, remote): (Chunks, Chunks),
        most: u64,
    ) -> Option<Step> {
        let block_bytes = local_table.block_bytes;
        let left = pairs.get(self.pair..)?;
        let first = plan(local_table, remote_table, left.get(..1)?).next()?;
        let local_offset = first.local_offset + self.within;
        let remote_offset = first.remote_offset + self.within;
        let most = most
            .min(local.left(local_offset))
            .min(remote.left(remote_offset));
        // Looks no further than the chunks reach, so that a run of many pieces is not gone through
        // for each of them.
        let reach = (self.within.saturating_add(most)).div_ceil(block_bytes);
        let reach = usize::try_from(reach).map_or(left.len(), |reach| reach.min(left.len()));
        let run = plan(local_table, remote_table, left.get(..reach)?).next()?;
        let bytes = (run.bytes - self.within).min(most);
        let behind = self.within + bytes;
        let pair = self.pair + (behind / block_bytes) as usize;
        let after = if pair == pairs.len() {
            Self {
                table: self.table + 1,
                pair: 0,
                within: 0,
            }
        } else {
            Self {
                table: self.table,
                pair,
                within: behind % block_bytes,
            }
        };
        let run = Run {
            local_offset,
            remote_offset,
            bytes,
        };
        Some(Step { run, after })
    }

    /// True if nothing is left to post.
    pub(crate) fn is_behind(self, tables: &[TablePair]) -> bool {
        self.table >= tables.len()
    }
}

#[cfg(test)]
mod tests;

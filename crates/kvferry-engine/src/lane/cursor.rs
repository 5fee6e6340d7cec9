//! Where a transfer stands in its plan, for the lanes that read by themselves.
//!
//! A cursor is a table, a place in the pairs and a byte within a block; what comes next is planned when
//! it can be posted, so nothing is stored per block.

use crate::plan::{BlockPair, Run, plan};
use crate::transfer::TablePair;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cursor {
    table: usize,
    pair: usize,
    byte: u64,
}

/// A run of one table, or a part of one, ready to be posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) table: usize,
    pub(crate) run: Run,
    /// The cursor behind it.
    pub(crate) after: Cursor,
}

impl Cursor {
    /// The next run, or its first `most` bytes (at least 1); `None` at the end.
    pub(crate) fn step(self, tables: &[TablePair], pairs: &[BlockPair], most: u64) -> Option<Step> {
        let tables_left = tables.get(self.table)?;
        let local = tables_left.local.description();
        let left = pairs.get(self.pair..)?;
        // Blocks beyond `most` need no planning.
        let want = self.byte.saturating_add(most).div_ceil(local.block_bytes);
        let planned = usize::try_from(want).map_or(left.len(), |want| want.min(left.len()));
        let whole = plan(local, &tables_left.remote, &left[..planned]).next()?;
        let run = Run {
            local_offset: whole.local_offset + self.byte,
            remote_offset: whole.remote_offset + self.byte,
            bytes: (whole.bytes - self.byte).min(most),
        };
        let behind = self.byte + run.bytes;
        let pair = self.pair + (behind / local.block_bytes) as usize;
        let after = if pair == pairs.len() {
            Self {
                table: self.table + 1,
                ..Self::default()
            }
        } else {
            Self {
                table: self.table,
                pair,
                byte: behind % local.block_bytes,
            }
        };
        Some(Step {
            table: self.table,
            run,
            after,
        })
    }

    /// True if nothing is left to post.
    pub(crate) fn is_behind(self, tables: &[TablePair]) -> bool {
        self.table >= tables.len()
    }
}

//! The native lane: where a transfer stands in its plan.
//!
//! A cursor is a table and a place in the pairs; the next run is planned when it can be posted, so
//! nothing is stored per block.

use crate::plan::{BlockPair, Run, plan};
use crate::transfer::TablePair;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cursor {
    table: usize,
    pair: usize,
}

/// A run of one table, ready to be posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) table: usize,
    pub(crate) run: Run,
    /// The cursor behind the run.
    pub(crate) after: Cursor,
}

impl Cursor {
    /// The next run, or `None` at the end.
    pub(crate) fn step(self, tables: &[TablePair], pairs: &[BlockPair]) -> Option<Step> {
        let tables_left = tables.get(self.table)?;
        let local = tables_left.local.description();
        let run = plan(local, &tables_left.remote, pairs.get(self.pair..)?).next()?;
        let blocks = (run.bytes / local.block_bytes) as usize;
        let pair = self.pair + blocks;
        let after = if pair == pairs.len() {
            Self {
                table: self.table + 1,
                pair: 0,
            }
        } else {
            Self {
                table: self.table,
                pair,
            }
        };
        Some(Step {
            table: self.table,
            run,
            after,
        })
    }
}

impl Cursor {
    /// True if nothing is left to post.
    pub(crate) fn is_behind(self, tables: &[TablePair]) -> bool {
        self.table >= tables.len()
    }
}

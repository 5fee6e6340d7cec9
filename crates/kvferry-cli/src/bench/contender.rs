//! Whoever moves a case's blocks.

use std::time::Duration;

use crate::error::CliError;

/// What one turn came to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Turn {
    /// From the first call to the last byte's arrival.
    pub(crate) time: Duration,
    /// Operations that it took: runs of kvferry, descriptors of others; 0 where that is not known.
    pub(crate) operations: u64,
    /// Blocks that did not hold what they should afterwards.
    pub(crate) wrong: u64,
}

/// Somebody who moves the blocks of one case, again and again.
pub(crate) trait Contender {
    /// What it is called in rows.
    fn name(&self) -> &str;

    /// How its bytes move, in its own words.
    fn lane(&self) -> String;

    /// Bytes of a turn; less than the case's for one that takes long.
    fn bytes(&self) -> u64;

    /// Moves everything once, measured, and checks it afterwards, not measured.
    fn turn(&mut self) -> Result<Turn, CliError>;

    /// Ends what it has started.
    fn end(self: Box<Self>) -> Result<(), CliError>;
}

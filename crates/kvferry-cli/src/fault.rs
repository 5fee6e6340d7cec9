//! Faults that a consumer commits on request, so that tests can see them being noticed.
//!
//! The options are hidden. Each fault must make a run fail; none may be noticed by anything but the
//! checks that an honest run goes through as well.

use clap::ValueEnum;

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Fault {
    /// No block is read, and every read is said to have succeeded.
    SkipRead,
    /// One bit of one block is flipped between its arrival and its check.
    Damage,
    /// One request never reaches the consumer's scheduler.
    LoseRequest,
}

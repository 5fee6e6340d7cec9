//! Faults that a consumer commits on request, so that tests can see them being noticed.
//!
//! The options are hidden. Each fault must make a run fail; none may be noticed by anything but the
//! checks that an honest run goes through as well.

use std::sync::atomic::{AtomicBool, Ordering};

use clap::ValueEnum;

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Fault {
    /// No block is read, and every read is said to have succeeded.
    SkipRead,
    /// One bit of one block is flipped between its arrival and its check.
    Damage,
    /// One release is never sent.
    DropRelease,
}

/// Decides where the fault of a run strikes.
#[derive(Debug)]
pub(crate) struct Faults {
    fault: Option<Fault>,
    struck: AtomicBool,
}

impl Faults {
    pub(crate) const fn new(fault: Option<Fault>) -> Self {
        Self {
            fault,
            struck: AtomicBool::new(false),
        }
    }

    /// Whether this read is to be skipped.
    pub(crate) fn skips_read(&self) -> bool {
        self.fault == Some(Fault::SkipRead)
    }

    /// Whether this request's blocks are to be damaged: true once.
    pub(crate) fn damages(&self) -> bool {
        self.strikes_once(Fault::Damage)
    }

    /// Whether this request's release is to be dropped: true once.
    pub(crate) fn drops_release(&self) -> bool {
        self.strikes_once(Fault::DropRelease)
    }

    fn strikes_once(&self, fault: Fault) -> bool {
        self.fault == Some(fault) && !self.struck.swap(true, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_strikes_where_it_should_and_no_other_does() {
        let none = Faults::new(None);
        assert!(!none.skips_read() && !none.damages() && !none.drops_release());
        let skip = Faults::new(Some(Fault::SkipRead));
        assert!(skip.skips_read() && skip.skips_read() && !skip.damages());
        let damage = Faults::new(Some(Fault::Damage));
        assert!(damage.damages());
        assert!(!damage.damages() && !damage.drops_release());
    }
}

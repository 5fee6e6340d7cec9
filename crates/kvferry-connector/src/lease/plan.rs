//! What one step of the scheduler half says about leases, and why it can be refused.

use std::collections::BTreeMap;

use kvferry_wire::{Epoch, RequestId};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::state::Lease;

/// The lease part of a step's plan.
///
/// Each of the three lists is in ascending order of epochs and names none twice. They are
/// applied in the order of the fields, so a lease can be reserved, activated and revoked by the
/// same plan. The default plan does nothing but must be given the current mark:
///
/// ```
/// use kvferry_connector::lease::StepLeases;
///
/// let nothing_new = StepLeases { issued_up_to: 17, ..StepLeases::default() };
/// assert!(nothing_new.is_empty());
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepLeases {
    /// The scheduler half's high-water mark: it has issued no epoch above this one, and those at
    /// or under it that were not reserved here by now never will be. 0 before the first.
    pub issued_up_to: u64,
    /// Leases issued in this step.
    pub reserve: Vec<(Epoch, RequestId)>,
    /// Leases whose request has finished and whose parameters are exported.
    pub activate: Vec<Epoch>,
    /// Leases taken back after a preemption or an abort.
    pub revoke: Vec<Epoch>,
}

impl StepLeases {
    /// Whether the plan names no lease.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.reserve.is_empty() && self.activate.is_empty() && self.revoke.is_empty()
    }

    /// Checks the plan against the table's mark and leases, without changing either.
    pub(super) fn check(
        &self,
        mark: u64,
        leases: &BTreeMap<Epoch, Lease>,
    ) -> Result<(), PlanError> {
        if self.issued_up_to < mark {
            return Err(PlanError::MarkWentBack {
                mark,
                issued_up_to: self.issued_up_to,
            });
        }
        if let Some(&(epoch, _)) = self.reserve.first()
            && epoch.get() <= mark
        {
            return Err(PlanError::AlreadyIssued { epoch, mark });
        }
        self.check_list("reserve", self.reserve.iter().map(|&(epoch, _)| epoch))?;
        self.check_list("activate", self.activate.iter().copied())?;
        self.check_list("revoke", self.revoke.iter().copied())?;
        let active = |epoch: &&Epoch| leases.get(epoch).is_some_and(Lease::is_activated);
        match self.activate.iter().find(active) {
            Some(&epoch) => Err(PlanError::AlreadyActivated { epoch }),
            None => Ok(()),
        }
    }

    fn check_list(
        &self,
        list: &'static str,
        epochs: impl Iterator<Item = Epoch>,
    ) -> Result<(), PlanError> {
        let mut previous = None;
        for epoch in epochs {
            if let Some(previous) = previous
                && previous >= epoch
            {
                return Err(PlanError::OutOfOrder {
                    list,
                    previous,
                    epoch,
                });
            }
            if epoch.get() > self.issued_up_to {
                let issued_up_to = self.issued_up_to;
                return Err(PlanError::AboveMark {
                    list,
                    epoch,
                    issued_up_to,
                });
            }
            previous = Some(epoch);
        }
        Ok(())
    }
}

/// Why a plan was refused. A refused plan has changed nothing.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PlanError {
    /// Plans were applied out of order, or come from another scheduler half.
    #[error(
        "the plan's mark is {issued_up_to}, but {mark} was reached before; apply plans in order"
    )]
    MarkWentBack {
        /// The table's mark.
        mark: u64,
        /// The plan's mark.
        issued_up_to: u64,
    },
    /// A reserved epoch is not new.
    #[error("the plan reserves epoch {epoch}, which is not above the mark {mark}")]
    AlreadyIssued {
        /// The epoch.
        epoch: Epoch,
        /// The table's mark before the plan.
        mark: u64,
    },
    /// A list repeats an epoch or is not in ascending order.
    #[error("the plan's list `{list}` has epoch {epoch} after {previous}; it must ascend")]
    OutOfOrder {
        /// Which list.
        list: &'static str,
        /// The epoch before.
        previous: Epoch,
        /// The epoch that is not above it.
        epoch: Epoch,
    },
    /// A list names an epoch that the plan itself says was not issued.
    #[error("the plan's list `{list}` has epoch {epoch}, above its own mark {issued_up_to}")]
    AboveMark {
        /// Which list.
        list: &'static str,
        /// The epoch.
        epoch: Epoch,
        /// The plan's mark.
        issued_up_to: u64,
    },
    /// A lease was activated by an earlier plan.
    #[error("the plan activates epoch {epoch}, which is active already")]
    AlreadyActivated {
        /// The epoch.
        epoch: Epoch,
    },
    /// The table is being drained and takes no new leases.
    #[error("the plan reserves {count} leases from epoch {first} on, but this rank shuts down")]
    Draining {
        /// The first epoch it reserves.
        first: Epoch,
        /// How many it reserves.
        count: usize,
    },
}

//! The producer's part of the lease protocol: which leases this rank holds, how each one ends,
//! and what readers are told.
//!
//! [`LeaseTable`] is a state machine. It does no I/O, starts no thread and reads no clock: the
//! caller passes the time in, and takes out what happened ([`LeaseTable::pop_ended`],
//! [`LeaseTable::pop_answer`]). It decides nothing about blocks. The scheduler half frees a
//! request's blocks when every rank has reported the end of its part of the lease.
//!
//! A lease goes `reserved -> activated -> ended`. It is reserved when a request that will be read
//! remotely is first scheduled, and activated when the request has finished and its transfer
//! parameters are exported. Either state can end, in one of three ways ([`End`]): every expected
//! reader released it, its time ran out, or the scheduler half revoked it.
//!
//! [`LeaseService`] runs a table on an engine's progress thread and [`LeaseControl`] is its
//! other end, for the rest of the rank.
//!
//! What the table keeps true:
//!
//! * Every lease that was reserved ends exactly once, and its end comes out exactly once.
//! * [`Verdict::Valid`] is only answered for a lease that is held at that moment. A reader that
//!   got it gets it again when it resends, for one lease duration after the end.
//! * A refusal by a lease that is held or remembered is the same when it is asked for again.
//! * Once every lease has ended and a lease duration (or [`LeaseConfig::early_hold`], if that is
//!   longer) has passed, the table is as empty as a new one.
//!
//! [`Verdict::Valid`]: kvferry_wire::lease::Verdict::Valid
//!
//! # Order of calls
//! Within one turn of its loop the caller first passes in everything that has arrived (plans,
//! releases, renewals) and then calls [`LeaseTable::expire`]. A release or a renewal that was
//! waiting in a queue is therefore never late because of the caller. The time passed in must not
//! go backwards.
//!
//! # Example
//! ```
//! use std::time::{Duration, Instant};
//!
//! use kvferry_connector::lease::{End, LeaseConfig, LeaseTable, StepLeases};
//! use kvferry_wire::lease::Verdict;
//! use kvferry_wire::{Epoch, Incarnation, Instance, LeaseId, ReaderId, RequestId};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let instance = Instance::random()?;
//! let mut table = LeaseTable::<u32>::new(instance, LeaseConfig::default())?;
//! let now = Instant::now();
//!
//! // The scheduler half issues a lease and, once the request has finished, activates it.
//! let lease = LeaseId { instance, epoch: Epoch::new(1)?, request: RequestId::new("cmpl-1")? };
//! table.apply(
//!     StepLeases {
//!         issued_up_to: 1,
//!         reserve: vec![(lease.epoch, lease.request.clone())],
//!         ..StepLeases::default()
//!     },
//!     now,
//! )?;
//! table.apply(
//!     StepLeases { issued_up_to: 1, activate: vec![lease.epoch], ..StepLeases::default() },
//!     now,
//! )?;
//!
//! // Peer 7 has read the blocks. It is the only reader, so its release ends the lease.
//! let reader = ReaderId { incarnation: Incarnation::random()?, load: 1 };
//! let later = now + Duration::from_secs(1);
//! assert_eq!(table.release(7, &lease, reader, 1, later), Some(Verdict::Valid));
//! let ended = table.pop_ended().ok_or("the lease did not end")?;
//! assert_eq!((ended.lease, ended.how, ended.readers), (lease.clone(), End::Released, 1));
//!
//! // The answer was lost and the reader asks again: the same answer, and no second end.
//! assert_eq!(table.release(7, &lease, reader, 1, later), Some(Verdict::Valid));
//! assert!(table.pop_ended().is_none());
//! # Ok(())
//! # }
//! ```

mod borrower;
mod config;
mod counters;
mod early;
mod expiry;
mod plan;
mod service;
mod state;
mod table;
mod tombstone;

#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;

pub use borrower::{BorrowConfig, BorrowEvent, BorrowMessage, Borrower, Ticket};
pub use config::{LeaseConfig, LeaseConfigError, MAX_LEASE};
pub use counters::{LeaseCounters, LeaseGauges, Refusals};
pub use plan::{PlanError, StepLeases};
pub use service::{
    BorrowControl, LeaseControl, LeaseControlError, LeaseEvent, LeaseService, LeaseSnapshot,
};
pub use state::End;
pub use table::{Answer, Ended, LeaseTable, RenewAnswer};

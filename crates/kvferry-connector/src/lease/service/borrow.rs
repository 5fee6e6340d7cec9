//! The consumer's part of the [`LeaseService`](super::LeaseService): a [`Borrower`] on the progress thread, and
//! its other end.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crossbeam::channel;
use kvferry_engine::{PeerId, Replies};
use kvferry_wire::lease::{GoneEpochs, LEASE_CHANNEL, Verdict, encode_release, encode_renew};
use kvferry_wire::{Epoch, Instance, LeaseId, ReaderId, WireError};

use super::{Command, LeaseControlError, Wake};
use crate::lease::{BorrowConfig, BorrowEvent, BorrowMessage, Borrower, Ticket};

/// Longest that a release can be waited for; stands for "when the engine ends".
const FOREVER: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// What is asked of the borrower.
#[derive(Debug)]
pub(super) enum Borrow {
    Hold {
        ticket: Ticket,
        peer: PeerId,
        lease: LeaseId,
        duration: Duration,
    },
    LetGo(Ticket),
    Release {
        ticket: Ticket,
        peer: Option<PeerId>,
        lease: LeaseId,
        reader: ReaderId,
        consumers: u32,
    },
    Rebind {
        ticket: Ticket,
        peer: PeerId,
    },
}

/// A consumer rank's access to the leases of others, through its [`LeaseService`](super::LeaseService).
///
/// Nothing here waits; what comes of it is told to the function given to
/// [`LeaseService::borrow`](super::LeaseService::borrow).
#[derive(Clone)]
pub struct BorrowControl {
    pub(super) commands: channel::Sender<Command>,
    pub(super) wake: Arc<OnceLock<Wake>>,
}

impl fmt::Debug for BorrowControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BorrowControl").finish_non_exhaustive()
    }
}

impl BorrowControl {
    /// Keeps a lease of `duration` at this peer alive. `ticket` is the caller's number for it.
    ///
    /// # Errors
    /// [`LeaseControlError::Gone`].
    pub fn hold(
        &self,
        ticket: Ticket,
        peer: PeerId,
        lease: LeaseId,
        duration: Duration,
    ) -> Result<(), LeaseControlError> {
        self.send(Borrow::Hold {
            ticket,
            peer,
            lease,
            duration,
        })
    }

    /// Stops keeping it alive.
    ///
    /// # Errors
    /// [`LeaseControlError::Gone`].
    pub fn let_go(&self, ticket: Ticket) -> Result<(), LeaseControlError> {
        self.send(Borrow::LetGo(ticket))
    }

    /// Says that this reader, one of `consumers`, is done with a lease, until that is answered or the
    /// time for it is over; without a peer, from [`rebind`](Self::rebind) on. `ticket` is the caller's
    /// number for it.
    ///
    /// # Errors
    /// [`LeaseControlError::Gone`].
    pub fn release(
        &self,
        ticket: Ticket,
        peer: Option<PeerId>,
        lease: LeaseId,
        reader: ReaderId,
        consumers: u32,
    ) -> Result<(), LeaseControlError> {
        self.send(Borrow::Release {
            ticket,
            peer,
            lease,
            reader,
            consumers,
        })
    }

    /// Goes on with an unanswered release over another connection to the same life.
    ///
    /// # Errors
    /// [`LeaseControlError::Gone`].
    pub fn rebind(&self, ticket: Ticket, peer: PeerId) -> Result<(), LeaseControlError> {
        self.send(Borrow::Rebind { ticket, peer })
    }

    fn send(&self, borrow: Borrow) -> Result<(), LeaseControlError> {
        self.commands
            .send(Command::Borrow(borrow))
            .map_err(|_| LeaseControlError::Gone)?;
        if let Some(wake) = self.wake.get() {
            wake();
        }
        Ok(())
    }
}

type Tell = Box<dyn Fn(BorrowEvent<PeerId>) + Send>;

/// A borrower that tells somebody.
pub(super) struct Borrowing {
    borrower: Borrower<PeerId>,
    tell: Tell,
}

impl fmt::Debug for Borrowing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.borrower.fmt(f)
    }
}

impl Borrowing {
    pub(super) fn new(config: BorrowConfig, tell: Tell) -> Self {
        let borrower = Borrower::new(config);
        Self { borrower, tell }
    }

    pub(super) fn command(&mut self, borrow: Borrow, now: Instant) {
        match borrow {
            Borrow::Hold {
                ticket,
                peer,
                lease,
                duration,
            } => self.borrower.hold(ticket, peer, &lease, duration, now),
            Borrow::LetGo(ticket) => self.borrower.let_go(ticket),
            Borrow::Release {
                ticket,
                peer,
                lease,
                reader,
                consumers,
            } => self
                .borrower
                .release(ticket, peer, lease, reader, consumers, now),
            Borrow::Rebind { ticket, peer } => self.borrower.rebind(ticket, peer, now),
        }
    }

    pub(super) fn released(
        &mut self,
        peer: PeerId,
        (instance, epoch): (Instance, Epoch),
        reader: ReaderId,
        verdict: Verdict,
    ) {
        self.borrower
            .on_released(peer, instance, epoch, reader, verdict);
    }

    pub(super) fn renewed(&mut self, peer: PeerId, instance: Instance, gone: GoneEpochs<'_>) {
        self.borrower.on_renewed(peer, instance, gone.iter());
    }

    pub(super) fn peer_gone(&mut self, peer: PeerId) {
        self.borrower.peer_gone(peer);
        self.tell_all();
    }

    /// Sends what is due and tells what was found out.
    pub(super) fn flush(&mut self, now: Instant, replies: &mut Replies) {
        self.borrower.tick(now, |peer, message| {
            match encode(&message) {
                Ok(payload) => replies.send(peer, LEASE_CHANNEL, payload),
                // Ids and counts were checked where they came in.
                Err(error) => {
                    tracing::error!(%error, ?message, "a lease message could not be written")
                }
            }
        });
        self.tell_all();
    }

    fn tell_all(&mut self) {
        for event in self.borrower.take_events() {
            (self.tell)(event);
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.borrower.next_deadline()
    }

    /// The engine ends: nothing will be answered any more.
    pub(super) fn end(&mut self, now: Instant) {
        self.borrower.tick(now + FOREVER, |_, _| ());
        self.tell_all();
    }
}

fn encode(message: &BorrowMessage) -> Result<Vec<u8>, WireError> {
    match message {
        BorrowMessage::Release {
            lease,
            reader,
            consumers,
        } => encode_release(lease, *reader, *consumers),
        BorrowMessage::Renew {
            instance,
            token,
            epochs,
        } => encode_renew(*instance, *token, epochs),
    }
}

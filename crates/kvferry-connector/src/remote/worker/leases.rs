//! The loader's dealings with leases: kept alive while their requests wait, released when nothing of a
//! read can touch memory any more, confirmed before a load counts.

use std::time::{Duration, Instant};

use kvferry_engine::PeerId;
use kvferry_wire::{ReaderId, RequestId, Verdict};

use super::links::Known;
use super::loader::{Done, Loader};
use super::request::{Answer, Borrowed, Phase};
use crate::contract::LoadFailure;
use crate::lease::{BorrowEvent, Ticket};
use crate::remote::RemoteLease;

impl Loader {
    pub(super) fn take_in(&mut self, lease: RemoteLease, now: Instant) {
        let request = lease.request.clone();
        if self.requests.contains_key(&request) {
            // The id is used again before its last release was answered: that one is given up here and
            // goes on by itself.
            self.forget(&request);
        }
        let load = self.number();
        self.by_load.insert(load, request.clone());
        self.requests
            .insert(request.clone(), Borrowed::new(load, lease));
        self.hold(&request, now);
    }

    /// Keeps a request's lease alive on every rank that is connected, and has the others connected.
    pub(super) fn hold(&mut self, request: &RequestId, now: Instant) {
        let Some(borrowed) = self.requests.get_mut(request) else {
            return;
        };
        let lease = borrowed.lease.clone();
        let is_releasing = matches!(borrowed.phase, Phase::Releasing { .. });
        let mut is_gone = false;
        for (rank, part) in (0..).zip(&mut borrowed.parts) {
            let missing = if is_releasing {
                part.answer.is_none() && part.peer.is_none()
            } else {
                part.hold.is_none() && !borrowed.lost
            };
            if !missing {
                continue;
            }
            let link = match self.links.get(&(lease.source.clone(), rank), now) {
                Known::Ready(link) => link,
                Known::Failed(error) => {
                    is_gone |= is_releasing && rank == self.rank && error.is_gone();
                    continue;
                }
                Known::Connecting => continue,
            };
            let peer = link.peer.id();
            part.peer = Some(peer);
            let duration = Duration::from_millis(lease.duration_ms);
            let sent = match part.release {
                Some(ticket) if is_releasing => self.borrow.rebind(ticket, peer),
                _ => {
                    self.next_number += 1;
                    let ticket = self.next_number;
                    part.hold = Some(ticket);
                    self.tickets
                        .insert(ticket, (request.clone(), rank as usize));
                    self.borrow
                        .hold(ticket, peer, lease.lease.clone(), duration)
                }
            };
            // A stopped engine: every load fails by itself.
            let _ = sent;
        }
        if is_gone {
            self.unanswerable(request);
        }
    }

    /// The rank that was read from will not confirm it any more: the load has failed. Its release goes on,
    /// for the time that it has.
    fn unanswerable(&mut self, request: &RequestId) {
        if let Some(borrowed) = self.requests.get_mut(request)
            && let Phase::Releasing { reading } = &mut borrowed.phase
            && std::mem::take(reading)
        {
            let failed = borrowed.failed_blocks();
            self.report(request.clone(), Some(LoadFailure::Peer), failed);
            let reason = "its producer ended before it confirmed the lease";
            self.warn(request, LoadFailure::Peer, reason);
        }
    }

    pub(super) fn hold_all(&mut self, now: Instant) {
        let requests: Vec<RequestId> = self
            .requests
            .iter()
            .filter(|(_, borrowed)| borrowed.lacks_links())
            .map(|(request, _)| request.clone())
            .collect();
        for request in requests {
            self.hold(&request, now);
        }
    }

    pub(super) fn release_held(&mut self, request: &RequestId) {
        let held = self.requests.get(request);
        if held.is_some_and(|held| matches!(held.phase, Phase::Held)) {
            self.release(request, false);
        }
    }

    /// Releases a lease on every rank. With `reading`, the load is reported when that is confirmed.
    pub(super) fn release(&mut self, request: &RequestId, reading: bool) {
        let incarnation = self.engine.incarnation();
        let Some(borrowed) = self.requests.get_mut(request) else {
            return;
        };
        borrowed.phase = Phase::Releasing { reading };
        let reader = ReaderId {
            incarnation,
            load: borrowed.load,
        };
        let lease = borrowed.lease.clone();
        let mut stopped = false;
        for (rank, part) in (0..).zip(&mut borrowed.parts) {
            if let Some(ticket) = part.hold.take() {
                self.tickets.remove(&ticket);
                let _ = self.borrow.let_go(ticket);
            }
            let peer = match self
                .links
                .get(&(lease.source.clone(), rank), Instant::now())
            {
                Known::Ready(link) => Some(link.peer.id()),
                Known::Connecting | Known::Failed(_) => None,
            };
            self.next_number += 1;
            let ticket = self.next_number;
            part.peer = peer;
            part.release = Some(ticket);
            self.tickets
                .insert(ticket, (request.clone(), rank as usize));
            let sent =
                self.borrow
                    .release(ticket, peer, lease.lease.clone(), reader, lease.consumers);
            stopped |= sent.is_err();
        }
        if stopped {
            // The engine has ended: there is nobody to answer.
            for part in &mut borrowed.parts {
                part.answer = Some(Answer::Nothing);
            }
            self.confirmed(request);
        }
    }

    /// A request's releases have come further.
    pub(super) fn confirmed(&mut self, request: &RequestId) {
        let Some(borrowed) = self.requests.get_mut(request) else {
            return;
        };
        let Phase::Releasing { reading } = &mut borrowed.phase else {
            return;
        };
        let own = borrowed
            .parts
            .get(self.rank as usize)
            .and_then(|part| part.answer);
        if *reading && let Some(answer) = own {
            *reading = false;
            let failure = match answer {
                Answer::Verdict(Verdict::Valid) => None,
                Answer::Verdict(_) => Some(LoadFailure::Lease),
                Answer::Nothing => Some(LoadFailure::Unconfirmed),
            };
            let timeout = self.config.borrow.confirm_timeout;
            let failed = match failure {
                None => Vec::new(),
                Some(_) => borrowed.failed_blocks(),
            };
            if let Some(quiet_at) = borrowed.quiet_at {
                self.counters.confirmed(quiet_at.elapsed());
            }
            self.report(request.clone(), failure, failed);
            if let Some(failure) = failure {
                let why = match answer {
                    Answer::Verdict(verdict) => verdict.to_string(),
                    Answer::Nothing => format!("no answer from the producer within {timeout:?}"),
                };
                self.warn(
                    request,
                    failure,
                    &format!("its lease is not confirmed: {why}"),
                );
            }
        }
        if self.requests.get(request).is_some_and(Borrowed::is_over) {
            self.forget(request);
        }
    }

    pub(super) fn forget(&mut self, request: &RequestId) {
        if let Some(borrowed) = self.requests.remove(request) {
            self.by_load.remove(&borrowed.load);
            for part in borrowed.parts {
                for ticket in [part.hold, part.release].into_iter().flatten() {
                    self.tickets.remove(&ticket);
                }
                if let Some(ticket) = part.hold {
                    let _ = self.borrow.let_go(ticket);
                }
            }
        }
    }

    pub(super) fn borrow_event(&mut self, event: BorrowEvent<PeerId>, now: Instant) {
        match event {
            BorrowEvent::Answered { ticket, verdict } => {
                self.answered(ticket, Answer::Verdict(verdict));
            }
            BorrowEvent::Unanswered { ticket } => self.answered(ticket, Answer::Nothing),
            BorrowEvent::Lost { ticket, why } => {
                if let Some((request, rank)) = self.tickets.remove(&ticket)
                    && let Some(borrowed) = self.requests.get_mut(&request)
                {
                    tracing::debug!(%request, %why, "a held lease is gone");
                    if let Some(part) = borrowed.parts.get_mut(rank) {
                        part.hold = None;
                    }
                    if !borrowed.lost && !borrowed.is_reading() {
                        let _ = self.reports.send(Done::Lost(request.clone()));
                    }
                    borrowed.lost = true;
                }
            }
            BorrowEvent::PeerGone { peer } => {
                self.links.peer_gone(peer);
                let parts = self.requests.values_mut().flat_map(|it| &mut it.parts);
                for part in parts.filter(|part| part.peer == Some(peer)) {
                    part.peer = None;
                    // The borrower has let go of it.
                    if let Some(ticket) = part.hold.take() {
                        self.tickets.remove(&ticket);
                    }
                }
                self.hold_all(now);
            }
        }
    }

    pub(super) fn answered(&mut self, ticket: Ticket, answer: Answer) {
        let Some((request, rank)) = self.tickets.remove(&ticket) else {
            return;
        };
        if let Some(borrowed) = self.requests.get_mut(&request)
            && let Some(part) = borrowed.parts.get_mut(rank)
            && part.release == Some(ticket)
        {
            part.answer = Some(answer);
            self.confirmed(&request);
        }
    }
}

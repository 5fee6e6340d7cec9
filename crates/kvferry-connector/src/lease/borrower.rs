//! The consumer's part of the lease protocol: leases of others that are kept alive, and releases that
//! are resent until they are answered.
//!
//! [`Borrower`] is a state machine like the [`LeaseTable`](super::LeaseTable): no I/O, no clock. It
//! decides nothing about reads; whoever reads holds a lease before, and releases it when nothing of
//! the read can touch memory any more.
//!
//! Invariants: every release that was started is answered exactly once ([`BorrowEvent::Answered`] or
//! [`BorrowEvent::Unanswered`]); a held lease is renewed until it is let go, lost, or older than
//! [`BorrowConfig::lease_max`]; once nothing is held and nothing unanswered, nothing is kept.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use kvferry_wire::lease::{Gone, MAX_RENEWALS, Verdict};
use kvferry_wire::{Epoch, Instance, LeaseId, ReaderId};

/// A number that the caller gives to a lease that it holds, or to a release; its own business.
pub type Ticket = u64;

/// Times of a [`Borrower`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BorrowConfig {
    /// How long a release may go unanswered; should be less than the producer's lease duration, for
    /// which answers are remembered.
    pub confirm_timeout: Duration,
    /// How long an answer is waited for before the release is sent again.
    pub resend_after: Duration,
    /// How long a lease is renewed at most.
    pub lease_max: Duration,
}

impl Default for BorrowConfig {
    fn default() -> Self {
        Self {
            confirm_timeout: Duration::from_secs(5),
            resend_after: Duration::from_millis(500),
            lease_max: Duration::from_secs(600),
        }
    }
}

/// What a borrower finds out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BorrowEvent<P> {
    /// A release was answered.
    Answered {
        /// The release.
        ticket: Ticket,
        /// The answer.
        verdict: Verdict,
    },
    /// A release was not answered within [`BorrowConfig::confirm_timeout`].
    Unanswered {
        /// The release.
        ticket: Ticket,
    },
    /// A lease that is held is gone, as its producer says or because it is too old.
    Lost {
        /// The lease.
        ticket: Ticket,
        /// Why.
        why: Gone,
    },
    /// A peer is gone. Its unanswered releases wait for [`Borrower::rebind`]; its held leases are let go
    /// of and may be held again.
    PeerGone {
        /// The peer.
        peer: P,
    },
}

/// A message to be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BorrowMessage {
    /// A release.
    Release {
        /// The lease.
        lease: LeaseId,
        /// Who is done with it.
        reader: ReaderId,
        /// Readers that are expected in all.
        consumers: u32,
    },
    /// A batch of renewals, at most [`MAX_RENEWALS`].
    Renew {
        /// The instance that issued all of them.
        instance: Instance,
        /// Comes back with the answer.
        token: u64,
        /// The leases, in ascending order.
        epochs: Vec<Epoch>,
    },
}

#[derive(Debug)]
struct Held {
    ticket: Ticket,
    since: Instant,
}

/// The held leases of one instance at one peer.
#[derive(Debug)]
struct Batch {
    leases: BTreeMap<Epoch, Held>,
    /// A sixth of the shortest duration among them.
    every: Duration,
    next: Instant,
}

#[derive(Debug)]
struct Release<P> {
    /// `None` while the peer is gone.
    peer: Option<P>,
    lease: LeaseId,
    reader: ReaderId,
    consumers: u32,
    send_at: Instant,
    give_up: Instant,
}

/// Leases that this rank has from others.
#[derive(Debug)]
pub struct Borrower<P> {
    config: BorrowConfig,
    batches: BTreeMap<(P, Instance), Batch>,
    holds: HashMap<Ticket, (P, Instance, Epoch)>,
    releases: BTreeMap<Ticket, Release<P>>,
    /// A lease's releases: one per rank that holds a part of it.
    by_lease: HashMap<(Instance, Epoch, ReaderId), Vec<Ticket>>,
    next_token: u64,
    events: Vec<BorrowEvent<P>>,
}

impl<P: Copy + Ord> Borrower<P> {
    /// One that has nothing.
    #[must_use]
    pub fn new(config: BorrowConfig) -> Self {
        Self {
            config,
            batches: BTreeMap::new(),
            holds: HashMap::new(),
            releases: BTreeMap::new(),
            by_lease: HashMap::new(),
            next_token: 0,
            events: Vec::new(),
        }
    }

    /// Keeps a lease alive from now on, with a renewal every sixth of its `duration`, the first at once. A
    /// ticket that is in use, or a lease that is held, is left as it is.
    pub fn hold(
        &mut self,
        ticket: Ticket,
        peer: P,
        lease: &LeaseId,
        duration: Duration,
        now: Instant,
    ) {
        if self.holds.contains_key(&ticket) {
            return;
        }
        let key = (peer, lease.instance);
        let every = (duration / 6).max(Duration::from_millis(1));
        let batch = self.batches.entry(key).or_insert_with(|| Batch {
            leases: BTreeMap::new(),
            every,
            next: now,
        });
        if batch.leases.contains_key(&lease.epoch) {
            return;
        }
        batch.every = batch.every.min(every);
        batch.next = now;
        batch
            .leases
            .insert(lease.epoch, Held { ticket, since: now });
        self.holds
            .insert(ticket, (peer, lease.instance, lease.epoch));
    }

    /// Stops renewing a lease.
    pub fn let_go(&mut self, ticket: Ticket) {
        if let Some((peer, instance, epoch)) = self.holds.remove(&ticket) {
            let key = (peer, instance);
            if let Some(batch) = self.batches.get_mut(&key) {
                batch.leases.remove(&epoch);
                if batch.leases.is_empty() {
                    self.batches.remove(&key);
                }
            }
        }
    }

    /// Says that this reader, one of `consumers`, is done with a lease, to one of the ranks that hold it.
    /// Without a peer it waits for [`rebind`](Self::rebind). A ticket that is in use is left as it is.
    pub fn release(
        &mut self,
        ticket: Ticket,
        peer: Option<P>,
        lease: LeaseId,
        reader: ReaderId,
        consumers: u32,
        now: Instant,
    ) {
        let key = (lease.instance, lease.epoch, reader);
        if self.releases.contains_key(&ticket) {
            return;
        }
        self.by_lease.entry(key).or_default().push(ticket);
        let release = Release {
            peer,
            lease,
            reader,
            consumers,
            send_at: now,
            give_up: now + self.config.confirm_timeout,
        };
        self.releases.insert(ticket, release);
    }

    /// Sends an unanswered release to this peer from now on: another connection to the same life.
    pub fn rebind(&mut self, ticket: Ticket, peer: P, now: Instant) {
        if let Some(release) = self.releases.get_mut(&ticket) {
            release.peer = Some(peer);
            release.send_at = now;
        }
    }

    /// A peer has answered a release.
    pub fn on_released(
        &mut self,
        peer: P,
        instance: Instance,
        epoch: Epoch,
        reader: ReaderId,
        verdict: Verdict,
    ) {
        // `Overloaded` may become something else when it is sent again.
        if verdict == Verdict::Overloaded {
            return;
        }
        let releases = &self.releases;
        let asked = |ticket: &&Ticket| {
            let release = releases.get(ticket);
            release.is_some_and(|release| release.peer == Some(peer))
        };
        let tickets = self.by_lease.get(&(instance, epoch, reader));
        let Some(&ticket) = tickets.and_then(|tickets| tickets.iter().find(asked)) else {
            return;
        };
        self.forget(ticket);
        self.events.push(BorrowEvent::Answered { ticket, verdict });
    }

    fn forget(&mut self, ticket: Ticket) {
        if let Some(release) = self.releases.remove(&ticket) {
            let LeaseId {
                instance, epoch, ..
            } = release.lease;
            let key = (instance, epoch, release.reader);
            if let Some(tickets) = self.by_lease.get_mut(&key) {
                tickets.retain(|other| *other != ticket);
                if tickets.is_empty() {
                    self.by_lease.remove(&key);
                }
            }
        }
    }

    /// A peer has answered a renewal.
    pub fn on_renewed(
        &mut self,
        peer: P,
        instance: Instance,
        gone: impl IntoIterator<Item = (Epoch, Gone)>,
    ) {
        for (epoch, why) in gone {
            let batch = self.batches.get(&(peer, instance));
            let held = batch.and_then(|batch| batch.leases.get(&epoch));
            if let Some(ticket) = held.map(|held| held.ticket) {
                self.let_go(ticket);
                self.events.push(BorrowEvent::Lost { ticket, why });
            }
        }
    }

    /// A peer is gone for good.
    pub fn peer_gone(&mut self, peer: P) {
        let held = self.holds.iter().filter(|(_, held)| held.0 == peer);
        let tickets: Vec<Ticket> = held.map(|(&ticket, _)| ticket).collect();
        let mut concerns = !tickets.is_empty();
        for ticket in tickets {
            self.let_go(ticket);
        }
        for release in self.releases.values_mut() {
            if release.peer == Some(peer) {
                release.peer = None;
                concerns = true;
            }
        }
        if concerns {
            self.events.push(BorrowEvent::PeerGone { peer });
        }
    }

    /// Judges deadlines; `send` takes what is to be sent.
    pub fn tick(&mut self, now: Instant, mut send: impl FnMut(P, BorrowMessage)) {
        let given_up: Vec<Ticket> = self
            .releases
            .iter()
            .filter(|(_, release)| release.give_up <= now)
            .map(|(&ticket, _)| ticket)
            .collect();
        for ticket in given_up {
            self.forget(ticket);
            self.events.push(BorrowEvent::Unanswered { ticket });
        }
        for release in self.releases.values_mut() {
            if let Some(peer) = release.peer
                && release.send_at <= now
            {
                release.send_at = now + self.config.resend_after;
                send(
                    peer,
                    BorrowMessage::Release {
                        lease: release.lease.clone(),
                        reader: release.reader,
                        consumers: release.consumers,
                    },
                );
            }
        }
        self.renew(now, send);
    }

    fn renew(&mut self, now: Instant, mut send: impl FnMut(P, BorrowMessage)) {
        let mut old = Vec::new();
        for (&(peer, instance), batch) in &mut self.batches {
            if batch.next > now {
                continue;
            }
            batch.next = now + batch.every;
            let mut epochs = Vec::with_capacity(batch.leases.len());
            for (&epoch, held) in &batch.leases {
                if now.saturating_duration_since(held.since) >= self.config.lease_max {
                    old.push(held.ticket);
                } else {
                    epochs.push(epoch);
                }
            }
            for part in epochs.chunks(MAX_RENEWALS) {
                self.next_token += 1;
                let (token, epochs) = (self.next_token, part.to_vec());
                let message = BorrowMessage::Renew {
                    instance,
                    token,
                    epochs,
                };
                send(peer, message);
            }
        }
        for ticket in old {
            self.let_go(ticket);
            let why = Gone::LeaseMax;
            self.events.push(BorrowEvent::Lost { ticket, why });
        }
    }

    /// When [`tick`](Self::tick) next has something to do.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        let releases = self.releases.values().map(|release| match release.peer {
            Some(_) => release.send_at.min(release.give_up),
            None => release.give_up,
        });
        let batches = self.batches.values().map(|batch| batch.next);
        releases.chain(batches).min()
    }

    /// Takes what was found out since the last call.
    pub fn take_events(&mut self) -> Vec<BorrowEvent<P>> {
        std::mem::take(&mut self.events)
    }

    /// Leases that are kept alive.
    #[must_use]
    pub fn held(&self) -> usize {
        self.holds.len()
    }

    /// Releases that have no answer yet.
    #[must_use]
    pub fn unanswered(&self) -> usize {
        self.releases.len()
    }
}

#[cfg(test)]
mod tests;

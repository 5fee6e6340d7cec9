//! Releases that arrived before their lease was issued.
//!
//! A consumer's release can overtake the producer's own plan. It is kept until the plan gets
//! there, within three bounds per peer, because anybody can name any epoch: how many, how far
//! above the mark, and for how long. A release is known by (epoch, reader): a resent one changes
//! neither its content, nor its place in the order, nor its age, only the peer to answer.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use kvferry_wire::{Epoch, LeaseId, ReaderId, RequestId};

/// Position in the order of arrival over all epochs.
type Arrival = u64;

/// A release that waits.
#[derive(Debug)]
pub(super) struct EarlyRelease<P> {
    pub(super) peer: P,
    pub(super) epoch: Epoch,
    pub(super) request: RequestId,
    pub(super) reader: ReaderId,
    pub(super) consumers: u32,
    until: Instant,
}

/// What became of a release above the mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kept {
    New,
    Resent,
    NoRoom,
}

/// All of them, with an index for each question asked.
#[derive(Debug)]
pub(super) struct EarlyReleases<P> {
    /// Also by age: all wait equally long.
    by_arrival: BTreeMap<Arrival, EarlyRelease<P>>,
    by_epoch: BTreeSet<(Epoch, Arrival)>,
    by_reader: BTreeMap<(Epoch, ReaderId), Arrival>,
    by_peer: BTreeMap<P, BTreeSet<Arrival>>,
    arrivals: Arrival,
}

impl<P: Copy + Ord> EarlyReleases<P> {
    pub(super) const fn new() -> Self {
        Self {
            by_arrival: BTreeMap::new(),
            by_epoch: BTreeSet::new(),
            by_reader: BTreeMap::new(),
            by_peer: BTreeMap::new(),
            arrivals: 0,
        }
    }

    /// Keeps a release until `until` if its peer has fewer than `per_peer` waiting.
    pub(super) fn keep(
        &mut self,
        peer: P,
        lease: &LeaseId,
        reader: ReaderId,
        consumers: u32,
        until: Instant,
        per_peer: usize,
    ) -> Kept {
        let epoch = lease.epoch;
        let known = self.by_reader.get(&(epoch, reader)).copied();
        let waiting = self.by_peer.get(&peer);
        if let Some(arrival) = known
            && waiting.is_some_and(|arrivals| arrivals.contains(&arrival))
        {
            return Kept::Resent;
        }
        if waiting.map_or(0, BTreeSet::len) >= per_peer {
            return Kept::NoRoom;
        }
        if let Some(arrival) = known {
            self.readdress(arrival, peer);
            return Kept::Resent;
        }
        let arrival = self.arrivals;
        self.arrivals += 1;
        self.by_epoch.insert((epoch, arrival));
        self.by_reader.insert((epoch, reader), arrival);
        self.by_peer.entry(peer).or_default().insert(arrival);
        let request = lease.request.clone();
        let release = EarlyRelease {
            peer,
            epoch,
            request,
            reader,
            consumers,
            until,
        };
        self.by_arrival.insert(arrival, release);
        Kept::New
    }

    /// Sends the answer to another peer: the reader has connected again.
    fn readdress(&mut self, arrival: Arrival, peer: P) {
        if let Some(release) = self.by_arrival.get_mut(&arrival) {
            let before = std::mem::replace(&mut release.peer, peer);
            self.forget_peer_entry(before, arrival);
            self.by_peer.entry(peer).or_default().insert(arrival);
        }
    }

    /// Takes the oldest release of the lowest epoch, if that is at or under `mark`.
    pub(super) fn pop_issued(&mut self, mark: u64) -> Option<EarlyRelease<P>> {
        let &(epoch, arrival) = self.by_epoch.first()?;
        if epoch.get() <= mark {
            self.remove(arrival)
        } else {
            None
        }
    }

    /// Takes one that has waited until `now` for nothing.
    pub(super) fn pop_due(&mut self, now: Instant) -> Option<EarlyRelease<P>> {
        let (&arrival, oldest) = self.by_arrival.first_key_value()?;
        if oldest.until <= now {
            self.remove(arrival)
        } else {
            None
        }
    }

    /// Takes any.
    pub(super) fn pop(&mut self) -> Option<EarlyRelease<P>> {
        let (&arrival, _) = self.by_arrival.first_key_value()?;
        self.remove(arrival)
    }

    /// Drops what `peer` left and returns how many that were.
    pub(super) fn drop_peer(&mut self, peer: P) -> usize {
        let arrivals = self.by_peer.remove(&peer).unwrap_or_default();
        for &arrival in &arrivals {
            self.remove(arrival);
        }
        arrivals.len()
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.by_arrival
            .first_key_value()
            .map(|(_, release)| release.until)
    }

    pub(super) fn len(&self) -> usize {
        self.by_arrival.len()
    }

    fn remove(&mut self, arrival: Arrival) -> Option<EarlyRelease<P>> {
        let release = self.by_arrival.remove(&arrival)?;
        self.by_epoch.remove(&(release.epoch, arrival));
        self.by_reader.remove(&(release.epoch, release.reader));
        self.forget_peer_entry(release.peer, arrival);
        Some(release)
    }

    fn forget_peer_entry(&mut self, peer: P, arrival: Arrival) {
        if let Some(arrivals) = self.by_peer.get_mut(&peer) {
            arrivals.remove(&arrival);
            if arrivals.is_empty() {
                self.by_peer.remove(&peer);
            }
        }
    }
}

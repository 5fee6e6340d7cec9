//! What the table should do, by searching lists from the start.

use kvferry_wire::lease::{Gone, Verdict};

use super::super::{End, LeaseGauges};
use super::{
    DURATION, EARLY_DISTANCE, EARLY_HOLD, EARLY_PER_PEER, LEASE_MAX, MAX_CONSUMERS, Reader, Release,
};

#[derive(Debug)]
pub(super) struct ModelLease {
    pub(super) epoch: u64,
    pub(super) expires: u64,
    /// Set at activation.
    pub(super) cap: Option<u64>,
    pub(super) ended: Option<(u64, Gone)>,
    pub(super) consumers: Option<u32>,
    pub(super) readers: Vec<Reader>,
}

#[derive(Debug, Default)]
pub(super) struct Model {
    pub(super) now: u64,
    pub(super) mark: u64,
    pub(super) draining: bool,
    pub(super) leases: Vec<ModelLease>,
    pub(super) early: Vec<(u64, Release)>,
    pub(super) ended: Vec<(u64, End, usize)>,
    pub(super) answers: Vec<(u8, u64, Reader, Verdict)>,
}

impl Model {
    pub(super) fn lease(&mut self, epoch: u64) -> Option<&mut ModelLease> {
        self.leases.iter_mut().find(|lease| lease.epoch == epoch)
    }

    pub(super) fn is_held(&self, epoch: u64) -> bool {
        self.leases
            .iter()
            .any(|lease| lease.epoch == epoch && lease.ended.is_none())
    }

    pub(super) fn end(&mut self, epoch: u64, how: End) {
        let now = self.now;
        let Some(lease) = self.lease(epoch).filter(|lease| lease.ended.is_none()) else {
            return;
        };
        let gone = match how {
            End::Released => Gone::Released,
            End::Revoked => Gone::Revoked,
            End::Expired if lease.cap.is_none_or(|cap| cap == lease.expires) => Gone::LeaseMax,
            End::Expired => Gone::Expired,
        };
        lease.ended = Some((now, gone));
        let readers = lease.readers.len();
        self.ended.push((epoch, how, readers));
    }

    pub(super) fn apply(&mut self, mark: u64, reserve: &[u64], activate: &[u64], revoke: &[u64]) {
        self.mark = mark;
        let now = self.now;
        for &epoch in reserve {
            let expires = now + LEASE_MAX;
            self.leases.push(ModelLease {
                epoch,
                expires,
                cap: None,
                ended: None,
                consumers: None,
                readers: vec![],
            });
        }
        for &epoch in activate {
            if let Some(lease) = self.lease(epoch).filter(|lease| lease.ended.is_none()) {
                (lease.expires, lease.cap) = (now + DURATION, Some(now + LEASE_MAX));
            }
        }
        let mut issued: Vec<_> = self.early.iter().map(|(_, release)| *release).collect();
        issued.retain(|release| release.epoch <= mark);
        issued.sort_by_key(|release| release.epoch);
        self.early.retain(|(_, release)| release.epoch > mark);
        for release in issued {
            let verdict = self.judge(release);
            self.answer(release, verdict);
        }
        for &epoch in revoke {
            self.end(epoch, End::Revoked);
        }
    }

    pub(super) fn answer(&mut self, release: Release, verdict: Verdict) {
        self.answers
            .push((release.peer, release.epoch, release.reader, verdict));
    }

    pub(super) fn release(&mut self, release: Release) -> Option<Verdict> {
        if !release.right_instance {
            return Some(Verdict::UnknownInstance);
        }
        if release.epoch <= self.mark {
            return Some(self.judge(release));
        }
        if self.draining {
            return Some(Verdict::UnknownEpoch);
        }
        if release.epoch > self.mark + EARLY_DISTANCE {
            return Some(Verdict::Overloaded);
        }
        let of_peer = self
            .early
            .iter()
            .filter(|(_, other)| other.peer == release.peer)
            .count();
        let now = self.now;
        let same = |(_, other): &&mut (u64, Release)| {
            (other.epoch, other.reader) == (release.epoch, release.reader)
        };
        match self.early.iter_mut().find(same) {
            Some((_, known)) if known.peer == release.peer => {}
            _ if of_peer >= EARLY_PER_PEER => return Some(Verdict::Overloaded),
            Some((_, known)) => known.peer = release.peer,
            None => self.early.push((now, release)),
        }
        None
    }

    pub(super) fn judge(&mut self, release: Release) -> Verdict {
        let Release {
            epoch,
            request,
            reader,
            consumers,
            ..
        } = release;
        let Some(lease) = self.lease(epoch) else {
            return Verdict::UnknownEpoch;
        };
        if request != epoch {
            Verdict::RequestMismatch
        } else if consumers > MAX_CONSUMERS {
            Verdict::Overloaded
        } else if consumers == 0 || lease.consumers.unwrap_or(consumers) != consumers {
            Verdict::ConsumersMismatch
        } else if lease.readers.contains(&reader) {
            Verdict::Valid
        } else if lease.readers.iter().any(|other| other.0 == reader.0) {
            Verdict::RepeatedReader
        } else if lease.ended.is_some() {
            Verdict::Ended
        } else {
            lease.consumers = Some(consumers);
            lease.readers.push(reader);
            if lease.readers.len() == consumers as usize {
                self.end(epoch, End::Released);
            }
            Verdict::Valid
        }
    }

    pub(super) fn renew(
        &mut self,
        epochs: &[u64],
        right_instance: bool,
    ) -> (Vec<(u64, Gone)>, Vec<u64>) {
        let (mut gone, mut unknown) = (vec![], vec![]);
        let (now, mark, draining) = (self.now, self.mark, self.draining);
        for &epoch in epochs {
            match self.lease(epoch) {
                _ if !right_instance => gone.push((epoch, Gone::UnknownInstance)),
                Some(ModelLease {
                    ended: Some((_, how)),
                    ..
                }) => gone.push((epoch, *how)),
                Some(lease) => {
                    if let Some(cap) = lease.cap {
                        lease.expires = lease.expires.max((now + DURATION).min(cap));
                    }
                }
                None if epoch > mark && !draining => unknown.push(epoch),
                None => gone.push((epoch, Gone::NeverIssued)),
            }
        }
        (gone, unknown)
    }

    pub(super) fn expire(&mut self) {
        let now = self.now;
        self.leases
            .retain(|lease| lease.ended.is_none_or(|(at, _)| at + DURATION > now));
        let (old, waiting) = std::mem::take(&mut self.early)
            .into_iter()
            .partition::<Vec<_>, _>(|(since, _)| since + EARLY_HOLD <= now);
        self.early = waiting;
        for (_, release) in old {
            self.answer(release, Verdict::UnknownEpoch);
        }
        let mut due: Vec<_> = self
            .leases
            .iter()
            .filter(|lease| lease.ended.is_none())
            .collect();
        due.retain(|lease| lease.expires <= now);
        due.sort_by_key(|lease| (lease.expires, lease.epoch));
        let due: Vec<u64> = due.into_iter().map(|lease| lease.epoch).collect();
        for epoch in due {
            self.end(epoch, End::Expired);
        }
    }

    pub(super) fn next_deadline(&self) -> Option<u64> {
        let leases = self.leases.iter().map(|lease| match lease.ended {
            None => lease.expires,
            Some((at, _)) => at + DURATION,
        });
        leases
            .chain(self.early.iter().map(|(since, _)| since + EARLY_HOLD))
            .min()
    }

    pub(super) fn begin_drain(&mut self) {
        self.draining = true;
        for (_, release) in std::mem::take(&mut self.early) {
            self.answer(release, Verdict::UnknownEpoch);
        }
    }

    pub(super) fn gauges(&self) -> LeaseGauges {
        let count = |pick: fn(&&ModelLease) -> bool| self.leases.iter().filter(pick).count();
        LeaseGauges {
            reserved: count(|lease| lease.ended.is_none() && lease.cap.is_none()),
            activated: count(|lease| lease.ended.is_none() && lease.cap.is_some()),
            tombstones: count(|lease| lease.ended.is_some()),
            early: self.early.len(),
        }
    }
}

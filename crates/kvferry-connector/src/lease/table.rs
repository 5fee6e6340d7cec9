//! The table: what arrives goes through its leases, what results waits in two queues.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use kvferry_wire::lease::{Gone, Verdict};
use kvferry_wire::{Epoch, Instance, LeaseId, ReaderId, RequestId};

use super::early::{EarlyRelease, EarlyReleases, Kept};
use super::expiry::ExpiryHeap;
use super::state::{Judgement, Lease};
use super::tombstone::Tombstones;
use super::{
    End, LeaseConfig, LeaseConfigError, LeaseCounters, LeaseGauges, PlanError, StepLeases,
};

/// The end of this rank's part of a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Which lease.
    pub lease: LeaseId,
    /// How it ended.
    pub how: End,
    /// Readers that had released it by then.
    pub readers: usize,
}

/// The answer to a release that had to wait for its lease to be issued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer<P> {
    /// Who is to be told: the peer that sent the release last.
    pub peer: P,
    /// The lease's instance.
    pub instance: Instance,
    /// The lease's epoch.
    pub epoch: Epoch,
    /// The reader that released it.
    pub reader: ReaderId,
    /// What it is told.
    pub verdict: Verdict,
}

/// The answer to a batch of renewals. Leases that are in neither list are held.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RenewAnswer {
    /// Leases that are gone and why, in the order of the batch.
    pub gone: Vec<(Epoch, Gone)>,
    /// Leases that were not issued yet, as far as this rank knows.
    pub unknown: Vec<Epoch>,
}

/// The leases of one producer rank.
///
/// `P` names a peer to answer; the table compares it and hands it back. See the
/// [module](super) for the protocol, the order of calls and an example.
///
/// Each operation on one lease takes time logarithmic in the number of leases. Looking one up, to
/// release it again, to refuse it or to renew it, allocates nothing.
#[derive(Debug)]
pub struct LeaseTable<P> {
    instance: Instance,
    config: LeaseConfig,
    /// The highest epoch that the scheduler half is known to have issued.
    mark: u64,
    /// Held leases and tombstones.
    leases: BTreeMap<Epoch, Lease>,
    activated: usize,
    expiry: ExpiryHeap,
    tombstones: Tombstones,
    early: EarlyReleases<P>,
    ended: VecDeque<Ended>,
    answers: VecDeque<Answer<P>>,
    draining: bool,
    counters: LeaseCounters,
}

impl<P: Copy + Ord> LeaseTable<P> {
    /// An empty table for the leases of one scheduler half.
    ///
    /// # Errors
    /// The first setting of `config` that is out of range.
    pub fn new(instance: Instance, config: LeaseConfig) -> Result<Self, LeaseConfigError> {
        config.validate()?;
        Ok(Self {
            instance,
            config,
            mark: 0,
            leases: BTreeMap::new(),
            activated: 0,
            expiry: ExpiryHeap::default(),
            tombstones: Tombstones::default(),
            early: EarlyReleases::new(),
            ended: VecDeque::new(),
            answers: VecDeque::new(),
            draining: false,
            counters: LeaseCounters::default(),
        })
    }

    /// The scheduler half whose leases these are.
    #[must_use]
    pub const fn instance(&self) -> Instance {
        self.instance
    }

    /// Takes the name of the scheduler half, for a table that was made before it was known. Only before
    /// the first lease: says whether the table is of that instance now.
    pub fn adopt(&mut self, instance: Instance) -> bool {
        if self.mark == 0 && self.leases.is_empty() && self.early.len() == 0 {
            self.instance = instance;
        }
        self.instance == instance
    }

    /// The limits it was made with.
    #[must_use]
    pub const fn config(&self) -> &LeaseConfig {
        &self.config
    }

    /// The highest epoch that the scheduler half is known to have issued; 0 before the first.
    #[must_use]
    pub const fn mark(&self) -> u64 {
        self.mark
    }

    /// Applies the lease part of a step's plan: reserves, then activates, then answers releases
    /// that were waiting for it, then revokes.
    ///
    /// A waiting release is judged before the same plan's revocations because it arrived before
    /// them. Activating or revoking a lease that has ended already does nothing and is counted:
    /// its end is on the way to the scheduler half.
    ///
    /// # Errors
    /// [`PlanError`] if the plan contradicts an earlier one or itself, or if it reserves leases
    /// while the table is draining. The table is then as it was before.
    pub fn apply(&mut self, plan: StepLeases, now: Instant) -> Result<(), PlanError> {
        plan.check(self.mark, &self.leases)?;
        if self.draining
            && let Some(&(first, _)) = plan.reserve.first()
        {
            return Err(PlanError::Draining {
                first,
                count: plan.reserve.len(),
            });
        }
        self.mark = plan.issued_up_to;
        for (epoch, request) in plan.reserve {
            self.reserve(epoch, request, now);
        }
        for epoch in plan.activate {
            self.activate(epoch, now);
        }
        while let Some(release) = self.early.pop_issued(self.mark) {
            self.match_early(release, now);
        }
        for epoch in plan.revoke {
            if !self.end(epoch, End::Revoked, now) {
                self.counters.plan_too_late += 1;
            }
        }
        Ok(())
    }

    fn reserve(&mut self, epoch: Epoch, request: RequestId, now: Instant) {
        let lease = Lease::reserve(request, now, &self.config);
        if let Some(deadline) = lease.deadline() {
            self.expiry.push(deadline, epoch);
        }
        self.leases.insert(epoch, lease);
        self.counters.reserved += 1;
    }

    fn activate(&mut self, epoch: Epoch, now: Instant) {
        let lease = self.leases.get_mut(&epoch);
        match lease.and_then(|lease| lease.activate(now, &self.config)) {
            Some(deadline) => {
                self.expiry.push(deadline, epoch);
                self.activated += 1;
                self.counters.activated += 1;
            }
            None => self.counters.plan_too_late += 1,
        }
    }

    fn match_early(&mut self, release: EarlyRelease<P>, now: Instant) {
        if self.leases.contains_key(&release.epoch) {
            self.counters.early_matched += 1;
        } else {
            self.counters.early_dropped += 1;
        }
        let EarlyRelease {
            epoch,
            reader,
            consumers,
            ..
        } = release;
        let verdict = self.judge(epoch, &release.request, reader, consumers, now);
        self.answer(&release, verdict);
    }

    /// Queues and counts the answer to a release that waited.
    fn answer(&mut self, release: &EarlyRelease<P>, verdict: Verdict) {
        self.counters.refused.count(verdict);
        self.answers.push_back(Answer {
            peer: release.peer,
            instance: self.instance,
            epoch: release.epoch,
            reader: release.reader,
            verdict,
        });
    }

    /// Takes in that `reader`, one of `consumers` expected ones, will not read under `lease` any
    /// more, and says what to answer to `peer`.
    ///
    /// `None` means that the lease was not issued yet: the answer comes out of
    /// [`pop_answer`](Self::pop_answer) when it has been, or when it will not be.
    ///
    /// Refusals record nothing. Two of them can be followed by `Valid` when the release is sent
    /// again: `Overloaded`, and `UnknownEpoch` for a release that waited in vain. Neither lets
    /// anything stale count as loaded, because `Valid` still means that the lease was held when
    /// the release, and so the end of the read, had come in.
    pub fn release(
        &mut self,
        peer: P,
        lease: &LeaseId,
        reader: ReaderId,
        consumers: u32,
        now: Instant,
    ) -> Option<Verdict> {
        let verdict = if lease.instance != self.instance {
            Verdict::UnknownInstance
        } else if lease.epoch.get() <= self.mark {
            self.judge(lease.epoch, &lease.request, reader, consumers, now)
        } else if self.draining {
            Verdict::UnknownEpoch
        } else {
            if self.keep_early(peer, lease, reader, consumers, now) {
                return None;
            }
            Verdict::Overloaded
        };
        self.counters.refused.count(verdict);
        Some(verdict)
    }

    fn keep_early(
        &mut self,
        peer: P,
        lease: &LeaseId,
        reader: ReaderId,
        consumers: u32,
        now: Instant,
    ) -> bool {
        let LeaseConfig {
            early_distance,
            early_hold,
            early_per_peer,
            ..
        } = self.config;
        if lease.epoch.get() - self.mark > early_distance {
            return false;
        }
        match self.early.keep(
            peer,
            lease,
            reader,
            consumers,
            now + early_hold,
            early_per_peer,
        ) {
            Kept::New => self.counters.early_kept += 1,
            Kept::Resent => {}
            Kept::NoRoom => return false,
        }
        true
    }

    /// Judges a release of an epoch at or under the mark, and ends the lease after the last one.
    fn judge(
        &mut self,
        epoch: Epoch,
        request: &RequestId,
        reader: ReaderId,
        consumers: u32,
        now: Instant,
    ) -> Verdict {
        let Some(lease) = self.leases.get_mut(&epoch) else {
            return Verdict::UnknownEpoch;
        };
        let judgement = lease.release(request, reader, consumers, &self.config);
        match judgement {
            Judgement::Refused(_) if !lease.is_held() => self.counters.late += 1,
            Judgement::Refused(_) => {}
            Judgement::Remembered => self.counters.resent += 1,
            Judgement::Recorded { last } => {
                self.counters.readers += 1;
                if last {
                    self.end(epoch, End::Released, now);
                }
            }
        }
        judgement.verdict()
    }

    /// Renews a batch of leases: each that is activated now lives for another
    /// [`duration`](LeaseConfig::duration), up to [`lease_max`](LeaseConfig::lease_max) after its
    /// activation. Reserved ones need no renewal and are not reported.
    pub fn renew(
        &mut self,
        instance: Instance,
        epochs: impl IntoIterator<Item = Epoch>,
        now: Instant,
    ) -> RenewAnswer {
        let mut answer = RenewAnswer::default();
        for epoch in epochs {
            let gone = if instance != self.instance {
                Gone::UnknownInstance
            } else if let Some(lease) = self.leases.get_mut(&epoch) {
                match lease.renew(now, &self.config) {
                    Ok(()) => {
                        self.counters.renewed += 1;
                        continue;
                    }
                    Err(gone) => gone,
                }
            } else if epoch.get() > self.mark && !self.draining {
                self.counters.renewals_unknown += 1;
                answer.unknown.push(epoch);
                continue;
            } else {
                Gone::NeverIssued
            };
            self.counters.renewals_gone += 1;
            answer.gone.push((epoch, gone));
        }
        answer
    }

    /// Ends every lease whose deadline is at or before `now`, gives up waiting releases and
    /// forgets tombstones that are old enough. Returns how many leases expired.
    ///
    /// Call it after what has arrived was passed in, so that nothing counts as late that was
    /// only waiting to be looked at.
    pub fn expire(&mut self, now: Instant) -> usize {
        while let Some(epoch) = self.tombstones.pop_due(now) {
            self.leases.remove(&epoch);
        }
        while let Some(release) = self.early.pop_due(now) {
            self.counters.early_dropped += 1;
            self.answer(&release, Verdict::UnknownEpoch);
        }
        let mut expired = 0;
        while let Some((deadline, epoch)) = self.next_expiry()
            && deadline <= now
            && self.end(epoch, End::Expired, now)
        {
            expired += 1;
        }
        expired
    }

    /// When [`expire`](Self::expire) next has something to do; `None` if nothing waits for time
    /// to pass.
    #[must_use]
    pub fn next_deadline(&mut self) -> Option<Instant> {
        let lease = self.next_expiry().map(|(deadline, _)| deadline);
        let others = [self.tombstones.next_deadline(), self.early.next_deadline()];
        lease.into_iter().chain(others.into_iter().flatten()).min()
    }

    fn next_expiry(&mut self) -> Option<(Instant, Epoch)> {
        let leases = &self.leases;
        self.expiry
            .next(|epoch| leases.get(&epoch).and_then(Lease::deadline))
    }

    /// Takes in that a peer is dead: its waiting releases are dropped, for there is nobody to
    /// answer. Leases are not affected; those that only it would have released expire.
    pub fn peer_gone(&mut self, peer: P) {
        self.counters.early_dropped += self.early.drop_peer(peer) as u64;
    }

    /// Starts the shutdown: no lease can be reserved from now on. Releases that wait for one to
    /// be issued are answered `UnknownEpoch`.
    pub fn begin_drain(&mut self) {
        self.draining = true;
        while let Some(release) = self.early.pop() {
            self.counters.early_dropped += 1;
            self.answer(&release, Verdict::UnknownEpoch);
        }
    }

    /// Whether [`begin_drain`](Self::begin_drain) was called.
    #[must_use]
    pub const fn is_draining(&self) -> bool {
        self.draining
    }

    /// Revokes every lease that is held, in the order of epochs, and returns how many that were.
    /// To be called when a shutdown has waited long enough for [`held`](Self::held) to be 0.
    pub fn revoke_all(&mut self, now: Instant) -> usize {
        let held = self.leases.iter().filter(|(_, lease)| lease.is_held());
        let epochs: Vec<Epoch> = held.map(|(&epoch, _)| epoch).collect();
        for &epoch in &epochs {
            self.end(epoch, End::Revoked, now);
        }
        epochs.len()
    }

    /// Ends a lease that is held and leaves its tombstone; `false` if it was not held.
    fn end(&mut self, epoch: Epoch, how: End, now: Instant) -> bool {
        let Some(lease) = self.leases.get_mut(&epoch) else {
            return false;
        };
        let was_activated = lease.is_activated();
        if !lease.end(how) {
            return false;
        }
        let request = lease.request().clone();
        let lease_id = LeaseId {
            instance: self.instance,
            epoch,
            request,
        };
        self.ended.push_back(Ended {
            lease: lease_id,
            how,
            readers: lease.readers().len(),
        });
        self.activated -= usize::from(was_activated);
        match how {
            End::Released => self.counters.released += 1,
            End::Expired => self.counters.expired += 1,
            End::Revoked => self.counters.revoked += 1,
        }
        self.tombstones.push(now + self.config.duration, epoch);
        let leases = &self.leases;
        self.expiry.tidy(self.held(), |epoch| {
            leases.get(&epoch).is_some_and(Lease::is_held)
        });
        true
    }

    /// Takes the next end that has not been taken yet, in the order in which leases ended.
    pub fn pop_ended(&mut self) -> Option<Ended> {
        self.ended.pop_front()
    }

    /// Takes the next answer to a release that had to wait.
    pub fn pop_answer(&mut self) -> Option<Answer<P>> {
        self.answers.pop_front()
    }

    /// Leases that have not ended.
    #[must_use]
    pub fn held(&self) -> usize {
        self.leases.len() - self.tombstones.len()
    }

    /// What the table holds at the moment.
    #[must_use]
    pub fn gauges(&self) -> LeaseGauges {
        LeaseGauges {
            reserved: self.held() - self.activated,
            activated: self.activated,
            tombstones: self.tombstones.len(),
            early: self.early.len(),
        }
    }

    /// What has happened so far.
    #[must_use]
    pub const fn counters(&self) -> LeaseCounters {
        self.counters
    }

    /// Entries of the expiry heap, current or not.
    #[cfg(test)]
    pub(super) fn expiry_entries(&self) -> usize {
        self.expiry.len()
    }
}

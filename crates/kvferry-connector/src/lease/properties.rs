//! The table against a model that is too simple to be wrong: lists that are searched from the
//! start, times in milliseconds, nothing indexed and nothing forgotten early.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use kvferry_wire::LeaseId;
use kvferry_wire::lease::Verdict;
use proptest::prelude::*;

use super::tests::{epoch, instance, reader, request};
use super::*;

mod model;

use model::Model;

const DURATION: u64 = 10;
const LEASE_MAX: u64 = 35;
const EARLY_PER_PEER: usize = 3;
const EARLY_DISTANCE: u64 = 6;
const EARLY_HOLD: u64 = 7;
const MAX_CONSUMERS: u32 = 4;

/// Incarnation and load.
type Reader = (u8, u64);

/// What a release carries: peer, whether the instance is the right one, epoch, the request's
/// number, reader, consumers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Release {
    peer: u8,
    right_instance: bool,
    epoch: u64,
    request: u64,
    reader: Reader,
    consumers: u32,
}

#[derive(Clone, Debug)]
enum Op {
    /// Each gap is the distance to the next reserved epoch; `skip` moves the mark beyond the
    /// last. `activate` and `revoke` have a bit for each of the last 16 epochs.
    Plan {
        gaps: Vec<u64>,
        skip: u64,
        activate: u16,
        revoke: u16,
    },
    /// A plan that must be refused.
    WrongPlan(u8),
    /// `back` counts from a little above the mark down.
    Release {
        back: u64,
        wrong: u8,
        peer: u8,
        reader: Reader,
        consumers: Option<u32>,
    },
    /// An earlier release, byte for byte, perhaps over another connection.
    Resend {
        which: prop::sample::Index,
        peer: Option<u8>,
    },
    Renew {
        back: Vec<u64>,
        right_instance: bool,
    },
    /// Time passes and is judged.
    Tick(u64),
    /// Time passes while the caller is busy.
    Wait(u64),
    PeerGone(u8),
    Drain,
    RevokeAll,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let reader = (1_u8..5, 1_u64..3);
    let op = prop_oneof![
        20 => (prop::collection::vec(1_u64..3, 0..4), 0_u64..2, any::<u16>(), any::<(u16, u16, u16)>())
            .prop_map(|(gaps, skip, activate, bits)| {
                // Few revocations, or nothing lives long enough to be interesting.
                let revoke = bits.0 & bits.1 & bits.2;
                Op::Plan { gaps, skip, activate, revoke }
            }),
        3 => (0_u8..5).prop_map(Op::WrongPlan),
        40 => (0_u64..20, 0_u8..20, 0_u8..3, reader, prop::option::weighted(0.1, 0_u32..7))
            .prop_map(|(back, wrong, peer, reader, consumers)| {
                Op::Release { back, wrong, peer, reader, consumers }
            }),
        12 => (any::<prop::sample::Index>(), prop::option::of(0_u8..3))
            .prop_map(|(which, peer)| Op::Resend { which, peer }),
        12 => (prop::collection::vec(0_u64..20, 1..8), prop::bool::weighted(0.95))
            .prop_map(|(back, right_instance)| Op::Renew { back, right_instance }),
        // A consumer that keeps everything alive.
        8 => Just(Op::Renew { back: (0..20).collect(), right_instance: true }),
        20 => (0_u64..6).prop_map(Op::Tick),
        5 => (0_u64..4).prop_map(Op::Wait),
        3 => (0_u8..3).prop_map(Op::PeerGone),
        1 => Just(Op::RevokeAll),
    ];
    (
        prop::collection::vec(op, 1..150),
        prop::option::weighted(0.3, any::<prop::sample::Index>()),
    )
        .prop_map(|(mut ops, drain)| {
            if let Some(drain) = drain {
                ops.insert(drain.index(ops.len()), Op::Drain);
            }
            ops
        })
}

/// Table and model side by side, and a ledger of what was promised.
struct Pair {
    table: LeaseTable<u8>,
    model: Model,
    start: Instant,
    sent: Vec<Release>,
    /// Epochs that were reserved, and those whose end came out.
    reserved: BTreeSet<u64>,
    ended: BTreeSet<u64>,
    /// Answers by leases that are held or remembered, by what was asked.
    told: BTreeMap<(u64, u64, Reader, u32), Verdict>,
    /// Readers that were told `Valid`, at once or later.
    valid: BTreeSet<(u64, Reader)>,
}

impl Pair {
    fn new() -> Self {
        let config = LeaseConfig {
            duration: Duration::from_millis(DURATION),
            lease_max: Duration::from_millis(LEASE_MAX),
            max_consumers: MAX_CONSUMERS,
            early_per_peer: EARLY_PER_PEER,
            early_distance: EARLY_DISTANCE,
            early_hold: Duration::from_millis(EARLY_HOLD),
        };
        Self {
            table: LeaseTable::new(instance(1), config).unwrap(),
            model: Model::default(),
            start: Instant::now(),
            sent: vec![],
            reserved: BTreeSet::new(),
            ended: BTreeSet::new(),
            told: BTreeMap::new(),
            valid: BTreeSet::new(),
        }
    }

    fn now(&self) -> Instant {
        self.start + Duration::from_millis(self.model.now)
    }

    fn run(&mut self, op: Op) -> Result<(), TestCaseError> {
        match op {
            Op::Plan {
                gaps,
                skip,
                activate,
                revoke,
            } => self.plan(&gaps, skip, activate, revoke)?,
            Op::WrongPlan(kind) => self.wrong_plan(kind)?,
            Op::Release {
                back,
                wrong,
                peer,
                reader,
                consumers,
            } => {
                let epoch = (self.model.mark + EARLY_DISTANCE + 2)
                    .saturating_sub(back)
                    .max(1);
                let usual = u32::try_from(epoch % 3).unwrap() + 1;
                self.release(Release {
                    peer,
                    right_instance: wrong != 1,
                    epoch,
                    request: if wrong == 2 { epoch + 1 } else { epoch },
                    reader,
                    consumers: consumers.unwrap_or(usual),
                })?;
            }
            Op::Resend { which, peer } => {
                if !self.sent.is_empty() {
                    let earlier = self.sent[which.index(self.sent.len())];
                    self.release(Release {
                        peer: peer.unwrap_or(earlier.peer),
                        ..earlier
                    })?;
                }
            }
            Op::Renew {
                back,
                right_instance,
            } => {
                let top = self.model.mark + 2;
                let epochs: Vec<_> = back.iter().map(|b| top.saturating_sub(*b).max(1)).collect();
                let id = if right_instance {
                    instance(1)
                } else {
                    instance(2)
                };
                let answer = self
                    .table
                    .renew(id, epochs.iter().copied().map(epoch), self.now());
                let gone: Vec<_> = answer.gone.iter().map(|&(e, why)| (e.get(), why)).collect();
                let unknown: Vec<_> = answer.unknown.iter().map(|e| e.get()).collect();
                prop_assert_eq!((gone, unknown), self.model.renew(&epochs, right_instance));
            }
            Op::Tick(ms) => self.tick(ms)?,
            Op::Wait(ms) => self.model.now += ms,
            Op::PeerGone(peer) => {
                self.table.peer_gone(peer);
                self.model.early.retain(|(_, release)| release.peer != peer);
            }
            Op::Drain => {
                self.table.begin_drain();
                self.model.begin_drain();
            }
            Op::RevokeAll => self.revoke_all()?,
        }
        self.compare()
    }

    fn plan(
        &mut self,
        gaps: &[u64],
        skip: u64,
        activate: u16,
        revoke: u16,
    ) -> Result<(), TestCaseError> {
        let mut mark = self.model.mark;
        let mut reserve = vec![];
        for gap in gaps {
            mark += gap;
            reserve.push(mark);
        }
        mark += skip;
        let pick = |bits: u16| {
            (1..=mark)
                .rev()
                .take(16)
                .filter(move |e| bits & (1 << (mark - e)) != 0)
        };
        let mut activate: Vec<u64> = pick(activate).collect();
        activate.retain(|&e| {
            !self
                .model
                .lease(e)
                .is_some_and(|l| l.ended.is_none() && l.cap.is_some())
        });
        activate.reverse();
        let mut revoke: Vec<u64> = pick(revoke).collect();
        revoke.reverse();
        let plan = StepLeases {
            issued_up_to: mark,
            reserve: reserve.iter().map(|&e| (epoch(e), request(e))).collect(),
            activate: activate.iter().copied().map(epoch).collect(),
            revoke: revoke.iter().copied().map(epoch).collect(),
        };
        let result = self.table.apply(plan, self.now());
        if self.model.draining && !reserve.is_empty() {
            let draining = matches!(result, Err(PlanError::Draining { .. }));
            prop_assert!(draining, "{:?}", result);
            return Ok(());
        }
        prop_assert_eq!(result, Ok(()));
        self.reserved.extend(&reserve);
        self.model.apply(mark, &reserve, &activate, &revoke);
        Ok(())
    }

    fn wrong_plan(&mut self, kind: u8) -> Result<(), TestCaseError> {
        let mark = self.model.mark;
        let new = || (epoch(mark + 1), request(mark + 1));
        let plan = match kind {
            0 if mark > 0 => StepLeases {
                issued_up_to: mark - 1,
                ..StepLeases::default()
            },
            1 if mark > 0 => StepLeases {
                issued_up_to: mark + 1,
                reserve: vec![(epoch(mark), request(mark))],
                ..StepLeases::default()
            },
            2 => StepLeases {
                issued_up_to: mark + 1,
                reserve: vec![new(), new()],
                ..StepLeases::default()
            },
            3 => StepLeases {
                issued_up_to: mark,
                reserve: vec![new()],
                ..StepLeases::default()
            },
            _ => StepLeases {
                issued_up_to: mark + 1,
                reserve: vec![new()],
                activate: vec![epoch(mark + 2)],
                revoke: (1..=mark).map(epoch).collect(),
            },
        };
        prop_assert!(
            self.table.apply(plan.clone(), self.now()).is_err(),
            "{:?}",
            plan
        );
        Ok(())
    }

    fn release(&mut self, release: Release) -> Result<(), TestCaseError> {
        let held = self.model.is_held(release.epoch);
        let known = self.model.lease(release.epoch).is_some();
        let lease = LeaseId {
            instance: if release.right_instance {
                instance(1)
            } else {
                instance(2)
            },
            epoch: epoch(release.epoch),
            request: request(release.request),
        };
        let by = reader(release.reader.0, release.reader.1);
        let (peer, consumers) = (release.peer, release.consumers);
        let verdict = self.table.release(peer, &lease, by, consumers, self.now());
        prop_assert_eq!(verdict, self.model.release(release), "{:?}", release);
        self.sent.push(release);
        // What is promised, whatever the model thinks.
        if let Some(verdict) = verdict
            && release.right_instance
            && known
        {
            let asked = (release.epoch, release.request, release.reader, consumers);
            let before = self.told.insert(asked, verdict);
            prop_assert!(
                before.is_none_or(|v| v == verdict),
                "{:?}: {:?}",
                release,
                before
            );
            if verdict.is_valid() {
                let first = self.valid.insert((release.epoch, release.reader));
                prop_assert!(held || !first, "{:?} valid after the end", release);
            }
        }
        Ok(())
    }

    fn tick(&mut self, ms: u64) -> Result<(), TestCaseError> {
        self.model.now += ms;
        let before = self.model.ended.len();
        self.model.expire();
        let expired = self.table.expire(self.now());
        prop_assert_eq!(expired, self.model.ended.len() - before);
        Ok(())
    }

    fn revoke_all(&mut self) -> Result<(), TestCaseError> {
        let held: Vec<_> = self
            .model
            .leases
            .iter()
            .filter(|l| l.ended.is_none())
            .map(|l| l.epoch)
            .collect();
        for &epoch in &held {
            self.model.end(epoch, End::Revoked);
        }
        prop_assert_eq!(self.table.revoke_all(self.now()), held.len());
        Ok(())
    }

    /// Everything that can be seen from outside.
    fn compare(&mut self) -> Result<(), TestCaseError> {
        let mut ended = vec![];
        while let Some(end) = self.table.pop_ended() {
            let epoch = end.lease.epoch.get();
            prop_assert_eq!(end.lease.instance, instance(1));
            prop_assert_eq!(end.lease.request, request(epoch));
            prop_assert!(
                self.reserved.contains(&epoch),
                "{} was never reserved",
                epoch
            );
            prop_assert!(self.ended.insert(epoch), "{} ended twice", epoch);
            ended.push((epoch, end.how, end.readers));
        }
        prop_assert_eq!(ended, std::mem::take(&mut self.model.ended));
        for (peer, at, by, verdict) in std::mem::take(&mut self.model.answers) {
            let expected = Answer {
                peer,
                instance: instance(1),
                epoch: epoch(at),
                reader: reader(by.0, by.1),
                verdict,
            };
            prop_assert_eq!(self.table.pop_answer(), Some(expected));
            if verdict.is_valid() {
                self.valid.insert((at, by));
            }
        }
        prop_assert_eq!(self.table.pop_answer(), None);
        let gauges = self.table.gauges();
        prop_assert_eq!(gauges, self.model.gauges());
        prop_assert_eq!(self.table.held(), gauges.held());
        prop_assert_eq!(self.table.mark(), self.model.mark);
        let deadline = self.model.next_deadline();
        let deadline = deadline.map(|at| self.start + Duration::from_millis(at));
        prop_assert_eq!(self.table.next_deadline(), deadline);
        prop_assert!(self.table.expiry_entries() <= 4 * gauges.held() + 66);
        let counters = self.table.counters();
        let ends = counters.released + counters.expired + counters.revoked;
        prop_assert_eq!(counters.reserved, ends + gauges.held() as u64);
        let early = counters.early_matched + counters.early_dropped + gauges.early as u64;
        prop_assert_eq!(counters.early_kept, early);
        // Promises last as long as the lease is known.
        let known: BTreeSet<u64> = self.model.leases.iter().map(|lease| lease.epoch).collect();
        self.told.retain(|asked, _| known.contains(&asked.0));
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 1_000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn the_table_does_what_the_model_does_and_keeps_its_promises(ops in ops()) {
        let mut pair = Pair::new();
        for op in ops {
            pair.run(op)?;
        }
        // Nobody renews any more: everything ends, and then everything is forgotten.
        pair.run(Op::Tick(LEASE_MAX))?;
        prop_assert_eq!(pair.table.held(), 0);
        prop_assert_eq!(&pair.ended, &pair.reserved);
        pair.run(Op::Tick(DURATION))?;
        prop_assert_eq!(pair.table.gauges(), LeaseGauges::default());
        prop_assert_eq!(pair.table.expiry_entries(), 0);
        prop_assert_eq!(pair.table.next_deadline(), None);
    }
}

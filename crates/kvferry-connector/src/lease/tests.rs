//! The table, case by case. Numbers such as C19 are those of the list of field cases.

use std::time::{Duration, Instant};

use kvferry_wire::lease::{Gone, Verdict};
use kvferry_wire::{Epoch, Incarnation, Instance, LeaseId, ReaderId, RequestId};
use proptest::prelude::*;

use super::*;

mod early;
mod plans;
mod releases;
mod time;

const SECOND: Duration = Duration::from_secs(1);

/// The peer that speaks where it does not matter which.
const PEER: u32 = 7;

pub(super) fn epoch(value: u64) -> Epoch {
    Epoch::new(value).unwrap()
}

pub(super) fn instance(value: u8) -> Instance {
    Instance::from_bytes([value; 16]).unwrap()
}

pub(super) fn reader(incarnation: u8, load: u64) -> ReaderId {
    ReaderId {
        incarnation: Incarnation::from_bytes([incarnation; 16]).unwrap(),
        load,
    }
}

/// The request that every test reserves under this epoch.
pub(super) fn request(value: u64) -> RequestId {
    RequestId::new(format!("cmpl-{value}")).unwrap()
}

fn lease(value: u64) -> LeaseId {
    LeaseId {
        instance: instance(1),
        epoch: epoch(value),
        request: request(value),
    }
}

/// Duration 30 s, cap 600 s, early releases: 3 per peer, up to 10 above the mark, for 10 s.
fn config() -> LeaseConfig {
    LeaseConfig {
        early_per_peer: 3,
        early_distance: 10,
        ..LeaseConfig::default()
    }
}

/// A table and its clock.
struct Rank {
    table: LeaseTable<u32>,
    now: Instant,
}

impl Rank {
    fn new() -> Self {
        Self {
            table: LeaseTable::new(instance(1), config()).unwrap(),
            now: Instant::now(),
        }
    }

    /// With leases `1..=count`, all activated.
    fn with_active(count: u64) -> Self {
        let mut rank = Self::new();
        rank.reserve(1..=count);
        rank.activate(1..=count);
        rank
    }

    fn reserve(&mut self, epochs: impl IntoIterator<Item = u64>) {
        let reserve: Vec<_> = epochs.into_iter().map(|e| (epoch(e), request(e))).collect();
        let issued_up_to = reserve
            .last()
            .map_or(self.table.mark(), |(last, _)| last.get());
        let plan = StepLeases {
            issued_up_to,
            reserve,
            ..StepLeases::default()
        };
        self.table.apply(plan, self.now).unwrap();
    }

    fn activate(&mut self, epochs: impl IntoIterator<Item = u64>) {
        let activate = epochs.into_iter().map(epoch).collect();
        let issued_up_to = self.table.mark();
        let plan = StepLeases {
            issued_up_to,
            activate,
            ..StepLeases::default()
        };
        self.table.apply(plan, self.now).unwrap();
    }

    fn revoke(&mut self, epochs: impl IntoIterator<Item = u64>) {
        let revoke = epochs.into_iter().map(epoch).collect();
        let issued_up_to = self.table.mark();
        let plan = StepLeases {
            issued_up_to,
            revoke,
            ..StepLeases::default()
        };
        self.table.apply(plan, self.now).unwrap();
    }

    /// The mark moves to `issued_up_to` without any lease for this rank.
    fn skip_to(&mut self, issued_up_to: u64) {
        let plan = StepLeases {
            issued_up_to,
            ..StepLeases::default()
        };
        self.table.apply(plan, self.now).unwrap();
    }

    fn release(&mut self, of: u64, by: ReaderId, consumers: u32) -> Option<Verdict> {
        self.table
            .release(PEER, &lease(of), by, consumers, self.now)
    }

    fn renew(&mut self, epochs: impl IntoIterator<Item = u64>) -> RenewAnswer {
        self.table
            .renew(instance(1), epochs.into_iter().map(epoch), self.now)
    }

    /// Time passes and is judged.
    fn tick(&mut self, passed: Duration) -> usize {
        self.now += passed;
        self.table.expire(self.now)
    }

    fn ends(&mut self) -> Vec<(u64, End, usize)> {
        std::iter::from_fn(|| self.table.pop_ended())
            .map(|ended| {
                assert_eq!(ended.lease, lease(ended.lease.epoch.get()));
                (ended.lease.epoch.get(), ended.how, ended.readers)
            })
            .collect()
    }

    fn answers(&mut self) -> Vec<(u32, u64, ReaderId, Verdict)> {
        std::iter::from_fn(|| self.table.pop_answer())
            .map(|answer| {
                assert_eq!(answer.instance, instance(1));
                (
                    answer.peer,
                    answer.epoch.get(),
                    answer.reader,
                    answer.verdict,
                )
            })
            .collect()
    }

    #[track_caller]
    fn assert_empty(&mut self) {
        assert_eq!(self.table.gauges(), LeaseGauges::default());
        assert_eq!(self.table.held(), 0);
        assert_eq!(self.table.expiry_entries(), 0);
        assert_eq!(self.table.next_deadline(), None);
        assert_eq!(self.table.pop_ended(), None);
        assert_eq!(self.table.pop_answer(), None);
    }
}

const VALID: Option<Verdict> = Some(Verdict::Valid);

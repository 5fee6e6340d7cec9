//! Looking a lease up costs no memory: to refuse a release, to answer one again, to renew.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::{Duration, Instant};

use kvferry_connector::lease::{LeaseConfig, LeaseTable, RenewAnswer, StepLeases};
use kvferry_wire::lease::Verdict;
use kvferry_wire::{Epoch, Incarnation, Instance, LeaseId, ReaderId, RequestId};

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

/// The system's allocator, counting for each thread.
struct Counting;

// SAFETY: every call is passed on as it came; the counter is a thread-local without a destructor,
// so counting neither allocates nor fails.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promises about `layout` are the ones `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: `pointer` came from `alloc` above, which is `System`'s, with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations(work: impl FnOnce()) -> usize {
    let before = ALLOCATIONS.get();
    work();
    ALLOCATIONS.get() - before
}

#[test]
fn lookups_do_not_allocate() {
    const LEASES: u64 = 1_000;
    let instance = Instance::from_bytes([1; 16]).unwrap();
    let lease = |value| LeaseId {
        instance,
        epoch: Epoch::new(value).unwrap(),
        request: RequestId::new(format!("cmpl-{value}")).unwrap(),
    };
    let reader = |number| ReaderId {
        incarnation: Incarnation::from_bytes([number; 16]).unwrap(),
        load: 1,
    };
    let mut table = LeaseTable::<u32>::new(instance, LeaseConfig::default()).unwrap();
    let mut now = Instant::now();
    let ids: Vec<LeaseId> = (1..=LEASES).map(lease).collect();
    let plan = StepLeases {
        issued_up_to: LEASES,
        reserve: ids
            .iter()
            .map(|id| (id.epoch, id.request.clone()))
            .collect(),
        activate: ids.iter().map(|id| id.epoch).collect(),
        revoke: vec![ids[1].epoch],
    };
    table.apply(plan, now).unwrap();
    assert_eq!(
        table.release(1, &ids[0], reader(1), 2, now),
        Some(Verdict::Valid)
    );

    let misnamed = LeaseId {
        request: ids[1].request.clone(),
        ..ids[0].clone()
    };
    let far = lease(u64::MAX);
    let other_load = ReaderId {
        load: 2,
        ..reader(1)
    };
    for (id, by, consumers, verdict) in [
        (&ids[0], reader(1), 2, Verdict::Valid),
        (&ids[0], other_load, 2, Verdict::RepeatedReader),
        (&ids[0], reader(2), 3, Verdict::ConsumersMismatch),
        (&ids[1], reader(2), 1, Verdict::Ended),
        (&misnamed, reader(2), 2, Verdict::RequestMismatch),
        (&far, reader(2), 1, Verdict::Overloaded),
    ] {
        let mut answer = None;
        assert_eq!(
            allocations(|| answer = table.release(1, id, by, consumers, now)),
            0,
            "{id}"
        );
        assert_eq!(answer, Some(verdict), "{id}");
    }

    let held = (3..=LEASES).map(|value| Epoch::new(value).unwrap());
    for _ in 0..10 {
        now += Duration::from_secs(5);
        let held = held.clone();
        let mut answer = RenewAnswer::default();
        assert_eq!(allocations(|| answer = table.renew(instance, held, now)), 0);
        assert_eq!(answer, RenewAnswer::default());
    }

    assert_eq!(table.expire(now), 1, "nobody renewed the first one");
    let nothing_new = StepLeases {
        issued_up_to: LEASES,
        ..StepLeases::default()
    };
    let step = || {
        table.apply(nothing_new, now).unwrap();
        assert_eq!(table.expire(now), 0);
        assert!(table.next_deadline() > Some(now));
    };
    assert_eq!(allocations(step), 0);
}

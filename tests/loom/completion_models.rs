//! The progress thread and a handle at one completion cell.

use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use crate::engine::*;
use crate::sync::Event;
use crate::{check, mutants};

/// The cell, and its mutants.
trait Cell: Send + Sync + 'static {
    fn make() -> Self;
    fn complete(&self, outcome: u32) -> bool;
    fn quiesce(&self);
    fn outcome(&self) -> Option<u32>;
    fn wait(&self, timeout: Duration) -> Option<u32>;
    fn poll(&self, context: &Context<'_>) -> Poll<u32>;
}

macro_rules! cells {
    ($($module:ident)*) => {$(
        impl Cell for $module::CompletionCell<u32> {
            fn make() -> Self {
                Self::new()
            }
            fn complete(&self, outcome: u32) -> bool {
                self.complete(outcome)
            }
            fn quiesce(&self) {
                self.quiesce();
            }
            fn outcome(&self) -> Option<u32> {
                self.outcome()
            }
            fn wait(&self, timeout: Duration) -> Option<u32> {
                self.wait(timeout)
            }
            fn poll(&self, context: &Context<'_>) -> Poll<u32> {
                self.poll(context)
            }
        }
    )*};
}

cells!(completion notify_before_the_change threads_are_not_notified one_thread_is_notified);
cells!(the_first_waker_stays the_waker_comes_too_late the_last_outcome_stays);
cells!(an_outcome_is_enough_to_wait_for);

type Real = completion::CompletionCell<u32>;

/// Loom's clock stands still: this never passes.
const FOR_EVER: Duration = Duration::from_secs(86_400);

/// A task's waker, as an executor makes it: it remembers a wake-up that comes early.
struct Task(Event);

impl Wake for Task {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.add_one();
    }
}

impl Task {
    fn new() -> std::sync::Arc<Self> {
        std::sync::Arc::new(Self(Event::new().unwrap()))
    }

    fn poll<C: Cell>(self: &std::sync::Arc<Self>, cell: &C) -> Poll<u32> {
        cell.poll(&Context::from_waker(&Waker::from(self.clone())))
    }

    /// What an executor does with a future: polls it at the start and after each wake-up.
    fn run<C: Cell>(self: &std::sync::Arc<Self>, cell: &C) -> u32 {
        loop {
            if let Poll::Ready(outcome) = self.poll(cell) {
                return outcome;
            }
            self.0.poll();
            self.0.take();
        }
    }
}

/// Two ends race; the progress thread marks quiet behind its own. Then `handle` sees the outcome
/// that was first, and nobody sees another.
fn one_outcome<C: Cell>(handle: fn(&C) -> u32) {
    check(3, move || {
        let cell = Arc::new(C::make());
        let other = {
            let cell = Arc::clone(&cell);
            thread::spawn(move || cell.complete(2))
        };
        let progress = {
            let cell = Arc::clone(&cell);
            thread::spawn(move || {
                let first = cell.complete(1);
                cell.quiesce();
                first
            })
        };
        let seen = handle(&cell);
        let (first, second) = (progress.join().unwrap(), other.join().unwrap());
        assert!(first != second, "one of them was first");
        assert_eq!(seen, if first { 1 } else { 2 }, "the first outcome stays");
        assert_eq!(cell.outcome(), Some(seen), "the first outcome stays");
    });
}

/// Threads that wait are woken, all of them, whatever comes first of quiet and outcome.
fn threads_are_woken<C: Cell>(quiet_first: bool) {
    check(3, move || {
        let cell = Arc::new(C::make());
        let waiter = {
            let cell = Arc::clone(&cell);
            thread::spawn(move || cell.wait(FOR_EVER))
        };
        let progress = {
            let cell = Arc::clone(&cell);
            thread::spawn(move || {
                if quiet_first {
                    cell.quiesce();
                    cell.complete(1);
                } else {
                    cell.complete(1);
                    cell.quiesce();
                }
            })
        };
        // A wait that is over at once takes nothing from the one behind it.
        let _ = cell.wait(Duration::ZERO);
        assert_eq!(cell.wait(FOR_EVER), Some(1));
        assert_eq!(waiter.join().unwrap(), Some(1));
        progress.join().unwrap();
    });
}

/// A future that was polled by one task and then moved to another wakes the other.
fn the_last_waker_is_woken<C: Cell>() {
    check(4, || {
        let cell = Arc::new(C::make());
        let progress = {
            let cell = Arc::clone(&cell);
            thread::spawn(move || {
                cell.complete(1);
                cell.quiesce();
            })
        };
        if Task::new().poll(&*cell).is_pending() {
            assert_eq!(Task::new().run(&*cell), 1);
        }
        progress.join().unwrap();
    });
}

/// Whoever sees the end may use the memory: what the progress thread did to it before is over, for
/// loom's race detection too.
fn the_memory_is_quiet<C: Cell>(handle: fn(&C) -> u32) {
    struct Shared<C> {
        cell: C,
        memory: UnsafeCell<()>,
    }
    #[allow(unsafe_code)]
    // SAFETY: loom watches every access and fails the test at the first race; there is no memory.
    unsafe impl<C: Sync> Sync for Shared<C> {}
    check(4, move || {
        let shared = Arc::new(Shared {
            cell: C::make(),
            memory: UnsafeCell::new(()),
        });
        let progress = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                shared.cell.complete(1);
                shared.memory.with_mut(|_| ());
                shared.cell.quiesce();
            })
        };
        handle(&shared.cell);
        shared.memory.with_mut(|_| ());
        progress.join().unwrap();
    });
}

fn by_wait<C: Cell>(cell: &C) -> u32 {
    cell.wait(FOR_EVER).unwrap()
}

fn by_poll<C: Cell>(cell: &C) -> u32 {
    Task::new().run(cell)
}

#[test]
fn one_outcome_for_a_thread() {
    one_outcome::<Real>(by_wait);
}

#[test]
fn one_outcome_for_a_task() {
    one_outcome::<Real>(by_poll);
}

#[test]
fn every_thread_is_woken() {
    for quiet_first in [false, true] {
        threads_are_woken::<Real>(quiet_first);
    }
}

#[test]
fn the_latest_waker_is_woken() {
    the_last_waker_is_woken::<Real>();
}

#[test]
fn who_sees_the_end_owns_the_memory() {
    the_memory_is_quiet::<Real>(by_wait);
    the_memory_is_quiet::<Real>(by_poll);
}

mutants! {
    finds_a_notification_before_the_change: "deadlock",
        threads_are_woken::<notify_before_the_change::CompletionCell<u32>>(false);
    finds_a_waker_that_is_woken_before_the_change: "deadlock",
        the_last_waker_is_woken::<notify_before_the_change::CompletionCell<u32>>();
    finds_threads_that_nobody_notifies: "deadlock",
        threads_are_woken::<threads_are_not_notified::CompletionCell<u32>>(false);
    finds_one_notified_thread_of_two: "deadlock",
        threads_are_woken::<one_thread_is_notified::CompletionCell<u32>>(false);
    finds_a_waker_that_stays_too_long: "deadlock",
        the_last_waker_is_woken::<the_first_waker_stays::CompletionCell<u32>>();
    finds_a_waker_that_comes_too_late: "deadlock",
        the_last_waker_is_woken::<the_waker_comes_too_late::CompletionCell<u32>>();
    finds_a_second_outcome: "one of them was first",
        one_outcome::<the_last_outcome_stays::CompletionCell<u32>>(by_wait);
    finds_an_end_that_is_seen_before_quiet: "Causality violation",
        the_memory_is_quiet::<an_outcome_is_enough_to_wait_for::CompletionCell<u32>>(by_wait);
}

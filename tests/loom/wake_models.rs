//! Submitters and one sleeper, in the steps of the progress thread's loop.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

use crate::engine::*;
use crate::sync::Event;
use crate::{check, mutants};

/// The waker, and its mutants.
trait Wakes: Send + Sync + 'static {
    fn make() -> Self;
    fn wake(&self);
    fn about_to_sleep(&self);
    fn awake(&self);
    fn event(&self) -> &Event;
}

macro_rules! wakes {
    ($($module:ident)*) => {$(
        impl Wakes for $module::Waker {
            fn make() -> Self {
                Self::new().unwrap()
            }
            fn wake(&self) {
                self.wake();
            }
            fn about_to_sleep(&self) {
                self.about_to_sleep();
            }
            fn awake(&self) {
                self.awake();
            }
            fn event(&self) -> &Event {
                self.fd()
            }
        }
    )*};
}

wakes!(wake wake_that_orders_nothing sleep_that_orders_nothing sleep_announced_by_a_store);
wakes!(wake_without_a_signal awake_forgets_what_is_owed);

/// A queue as weak as can be: it orders nothing, so that all order comes from the waker.
#[derive(Default)]
struct Queue {
    submitted: AtomicU64,
}

struct Sleeper<W> {
    queue: Queue,
    waker: W,
}

impl<W: Wakes> Sleeper<W> {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            queue: Queue::default(),
            waker: W::make(),
        })
    }

    fn submit(&self) {
        self.queue.submitted.fetch_add(1, Ordering::Relaxed);
        self.waker.wake();
    }

    fn is_empty(&self) -> bool {
        self.queue.submitted.load(Ordering::Relaxed) == 0
    }

    fn drain(&self) -> u64 {
        if self.is_empty() {
            return 0;
        }
        self.queue.submitted.swap(0, Ordering::Relaxed)
    }

    fn sleep(&self, look_again: bool) {
        self.waker.about_to_sleep();
        if !look_again || self.is_empty() {
            self.waker.event().poll();
        }
        self.waker.awake();
    }

    /// Turns until everything has been taken: for ever, if the sleeper sleeps with something in the
    /// queue.
    fn turns(&self, all: u64, look_again: bool) {
        let mut taken = 0;
        loop {
            taken += self.drain();
            if taken == all {
                return;
            }
            self.sleep(look_again);
        }
    }
}

/// Starts `submitters` threads with one submission each, and takes them all.
fn submit_and_take<W: Wakes>(submitters: u64, look_again: bool) -> Arc<Sleeper<W>> {
    let sleeper = Sleeper::<W>::new();
    let threads: Vec<_> = (0..submitters)
        .map(|_| {
            let sleeper = Arc::clone(&sleeper);
            thread::spawn(move || sleeper.submit())
        })
        .collect();
    sleeper.turns(submitters, look_again);
    for thread in threads {
        thread.join().unwrap();
    }
    sleeper
}

/// No submission is lost: the sleeper never sleeps for ever with something in the queue.
fn nothing_is_lost<W: Wakes>() {
    check(3, || drop(submit_and_take::<W>(2, true)));
}

/// Once everybody is done, the sleeper sleeps: no event is left that ends each sleep at once.
fn no_event_stays<W: Wakes>() {
    check(3, || {
        let sleeper = submit_and_take::<W>(2, true);
        // What came late ends one sleep.
        if sleeper.waker.event().is_readable() {
            sleeper.sleep(true);
        }
        assert!(
            !sleeper.waker.event().is_readable(),
            "it never sleeps again"
        );
    });
}

#[test]
fn c60_a_submission_is_never_lost() {
    nothing_is_lost::<wake::Waker>();
}

#[test]
fn c60_a_signal_ends_one_sleep() {
    no_event_stays::<wake::Waker>();
}

mutants! {
    finds_a_sleeper_that_does_not_look_again: "deadlock",
        check(3, || drop(submit_and_take::<wake::Waker>(2, false)));
    finds_a_wake_up_that_orders_nothing: "deadlock",
        nothing_is_lost::<wake_that_orders_nothing::Waker>();
    finds_a_sleep_that_orders_nothing: "deadlock",
        nothing_is_lost::<sleep_that_orders_nothing::Waker>();
    finds_a_sleep_that_is_announced_by_a_store: "deadlock",
        nothing_is_lost::<sleep_announced_by_a_store::Waker>();
    finds_a_wake_up_without_a_signal: "deadlock",
        nothing_is_lost::<wake_without_a_signal::Waker>();
    finds_a_sleeper_that_forgets_a_signal_on_its_way: "never sleeps again",
        no_event_stays::<awake_forgets_what_is_owed::Waker>();
}

//! The progress thread: the one place where the fabric, peers, transfers and services meet.
//!
//! A turn: drain submissions, progress the fabric, do what its reports asked for, send, judge
//! deadlines. When a turn finds nothing, the thread polls for a short time, then arms the fabric,
//! looks at the submissions *again*, and sleeps until an event or the next deadline.
//!
//! [`Core`] holds the state and is the fabric's [`Sink`](crate::fabric::Sink): a report changes
//! state and queues work, and never calls the fabric.

mod asked;
mod backoff;
mod commands;
mod core;
mod escalation;
mod greeting;
mod incoming;
mod peers;
mod posting;
mod pump;
mod registering;
mod timers;
mod transfers;
mod withdraw;

use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use self::core::Core;
use crate::counters::add;
use crate::error::{EngineError, panic_message};
use crate::fabric::{Armed, Fabric};
use crate::service::Service;
use crate::shared::Shared;

/// Deadlines are judged at least this often, also while the fabric never runs dry.
const TIMERS_AT_LEAST_EVERY: Duration = Duration::from_millis(100);

/// Submissions that one turn takes.
const COMMANDS_PER_TURN: usize = 256;

pub(crate) struct Progress<F> {
    fabric: F,
    core: Core,
    shared: Arc<Shared>,
}

impl<F: Fabric> Progress<F> {
    pub(crate) fn new(
        mut fabric: F,
        shared: Arc<Shared>,
        services: Vec<(u16, Box<dyn Service>)>,
    ) -> Result<Self, EngineError> {
        if let Some(threads) = NonZeroUsize::new(shared.config.copy_threads) {
            fabric.set_copy_threads(threads);
        }
        let core = Core::new(Arc::clone(&shared), fabric.capabilities(), services)?;
        Ok(Self {
            fabric,
            core,
            shared,
        })
    }

    /// Runs until the engine is shut down.
    pub(crate) fn run(mut self) {
        let span = tracing::info_span!("engine", id = %self.shared.config.engine_id);
        let _entered = span.enter();
        tracing::debug!(incarnation = %self.shared.incarnation, "progress thread started");
        // A service is somebody else's code: its panic must not leave transfers without an end.
        let turns = catch_unwind(AssertUnwindSafe(|| self.turns()));
        if let Err(panic) = turns {
            let reason = panic_message(&*panic);
            // Before any transfer ends by it.
            self.shared.mark_panicked(reason);
            tracing::error!(
                reason,
                "the progress thread panicked; the engine is shut down"
            );
            // Whatever panicked is not called again.
            self.core.drop_services();
        }
        self.end();
    }

    fn turns(&mut self) {
        let mut last_busy = Instant::now();
        let mut last_timers = Instant::now();
        loop {
            let now = self.core.begin_turn();
            let mut busy = self.drain_commands();
            busy |= self.fabric.progress(&mut self.core);
            busy |= self.core.act(&mut self.fabric);
            busy |= self.core.pump(&mut self.fabric);
            // Deadlines are judged when everything that came in time has been looked at.
            if !busy {
                self.core.drained = now;
            }
            if !busy || now.duration_since(last_timers) >= TIMERS_AT_LEAST_EVERY {
                last_timers = now;
                busy |= self.core.timers(&mut self.fabric);
            }
            if self.core.is_finished() {
                break;
            }
            if busy {
                last_busy = now;
            } else if now.duration_since(last_busy) < self.shared.config.spin {
                std::hint::spin_loop();
            } else {
                self.sleep();
            }
        }
    }

    fn drain_commands(&mut self) -> bool {
        // Bounded, so that callers who submit without a pause do not keep the fabric waiting.
        for taken in 0..COMMANDS_PER_TURN {
            let Some(command) = self.shared.commands.pop() else {
                return taken > 0;
            };
            self.core.command(command, &mut self.fabric);
        }
        true
    }

    fn sleep(&mut self) {
        self.shared.waker.about_to_sleep();
        if self.shared.commands.is_empty() && self.fabric.arm() == Armed::Idle {
            add(&self.shared.counters.sleeps, 1);
            let timeout = self.core.next_deadline().map(|deadline| {
                let left = deadline.saturating_duration_since(Instant::now());
                // At most what a Timespec holds; the thread simply wakes early.
                let left = left.min(Duration::from_secs(3600));
                Timespec {
                    tv_sec: left.as_secs() as i64,
                    tv_nsec: i64::from(left.subsec_nanos()),
                }
            });
            // A descriptor that is not there is stood in for by the waker.
            let waker = self.shared.waker.fd();
            let [first, second, third] = self.fabric.event_fds();
            let mut fds = [Some(waker), first, second, third]
                .map(|fd| PollFd::from_borrowed_fd(fd.unwrap_or(waker), PollFlags::IN));
            // An interrupted wait is one more turn of the loop.
            let _ = poll(&mut fds, timeout.as_ref());
        }
        self.shared.waker.awake();
    }

    /// Takes the fabric down and answers whoever waits.
    fn end(mut self) {
        let deadline = self.core.end_deadline();
        let quiet = self.fabric.shutdown(&mut self.core, deadline);
        self.core.abandon(quiet);
        drop(self.fabric);
        // Only now does nothing touch memory any more, which is what a stopped engine says.
        self.shared.mark_stopped();
        self.shared.refuse_commands();
        tracing::debug!("progress thread ended");
        self.core.answer_shutdown();
    }
}

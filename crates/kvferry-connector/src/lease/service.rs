//! The lease table at work on an engine's progress thread.
//!
//! [`LeaseService`] reads the consumers' messages, asks the table and sends what it answers.
//! [`LeaseControl`] is the other end, for the rest of the producer rank: plans and the shutdown go
//! in, ends come out. Neither judges anything; that is the table's. Neither ever waits for the
//! other, so a release is answered however long the rank's own engine step takes.

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crossbeam::channel::{self, Receiver, RecvTimeoutError};
use kvferry_engine::{LogLimit, PeerId, Replies, Sender, Service};
use kvferry_wire::lease::{LEASE_CHANNEL, LeaseMessage, encode_released, encode_renewed};
use kvferry_wire::{Instance, LeaseId};
use thiserror::Error;

pub use self::borrow::BorrowControl;
use self::borrow::{Borrow, Borrowing};
use super::{
    BorrowConfig, BorrowEvent, End, Ended, LeaseConfig, LeaseConfigError, LeaseCounters,
    LeaseGauges, LeaseTable, MAX_LEASE, PlanError, StepLeases,
};

mod borrow;

const NOT_ASKED: &str = "an answer, but this rank reads nothing";

/// Longest time between two looks at commands and deadlines.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// What the service tells the rest of the rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseEvent {
    /// This rank's part of a lease has ended. Comes exactly once for every reserved lease, also if
    /// a shutdown refused or revoked it. With when that was known.
    Ended(Ended, Instant),
    /// A plan was refused as a whole and has changed nothing; the scheduler half is at fault.
    PlanRefused(PlanError),
    /// The shutdown's wait is over and no lease is held any more.
    Drained {
        /// Leases that had to be revoked because the limit was reached.
        revoked: usize,
    },
}

/// The service's state at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeaseSnapshot {
    /// What the table holds.
    pub gauges: LeaseGauges,
    /// What the table has counted.
    pub counters: LeaseCounters,
    /// Messages that were refused: not of the lease protocol, or not for a producer.
    pub malformed: u64,
}

/// Why [`LeaseControl`] could not do what it was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum LeaseControlError {
    /// The engine that ran the service has shut down.
    #[error("the lease service has ended: its engine has shut down")]
    Gone,
    /// The progress thread has not answered.
    #[error("the lease service has not answered within {0:?}")]
    TimedOut(Duration),
}

#[derive(Debug)]
enum Command {
    Adopt(Instance),
    Apply(StepLeases),
    Drain { within: Duration },
    Snapshot(channel::Sender<LeaseSnapshot>),
    Borrow(Borrow),
}

type Wake = Box<dyn Fn() + Send + Sync>;

/// The rest of the rank's access to its [`LeaseService`]. Clones share one queue of events.
#[derive(Clone)]
pub struct LeaseControl {
    commands: channel::Sender<Command>,
    events: Receiver<LeaseEvent>,
    wake: Arc<OnceLock<Wake>>,
    latest: Arc<Mutex<LeaseSnapshot>>,
}

impl fmt::Debug for LeaseControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseControl").finish_non_exhaustive()
    }
}

impl LeaseControl {
    /// Says how to have the service's `on_tick` called soon, which is
    /// [`Engine::wake_services`](kvferry_engine::Engine::wake_services). To be called once, when
    /// the engine has started; until then commands wait for up to a second. An engine that `wake`
    /// owns lives as long as this control and its clones, unless it is shut down.
    pub fn wake_with(&self, wake: impl Fn() + Send + Sync + 'static) {
        // A second one would say the same.
        let _ = self.wake.set(Box::new(wake));
    }

    /// Names the scheduler half, for a service that was made before it was known
    /// ([`LeaseTable::adopt`](super::LeaseTable::adopt)). Before the first plan.
    ///
    /// # Errors
    /// [`LeaseControlError::Gone`].
    pub fn adopt(&self, instance: Instance) -> Result<(), LeaseControlError> {
        self.send(Command::Adopt(instance))
    }

    /// Hands over the lease part of a step's plan. Plans are applied in the order of these calls
    /// and before any message that arrives later; one that is wrong comes back as
    /// [`LeaseEvent::PlanRefused`].
    ///
    /// # Errors
    /// [`LeaseControlError::Gone`].
    pub fn apply(&self, plan: StepLeases) -> Result<(), LeaseControlError> {
        self.send(Command::Apply(plan))
    }

    /// Begins the shutdown: no new leases; those that are held may end by themselves `within` this
    /// time and are revoked then. [`LeaseEvent::Drained`] follows the last end.
    ///
    /// # Errors
    /// [`LeaseControlError::Gone`].
    pub fn drain(&self, within: Duration) -> Result<(), LeaseControlError> {
        self.send(Command::Drain { within })
    }

    /// Counters and gauges as they were after the last command or message; does not wait.
    #[must_use]
    pub fn latest(&self) -> LeaseSnapshot {
        *self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks for counters and gauges, after what was asked for before, and waits for up to `timeout`.
    ///
    /// # Errors
    /// [`LeaseControlError`], both kinds.
    pub fn snapshot(&self, timeout: Duration) -> Result<LeaseSnapshot, LeaseControlError> {
        let (sender, receiver) = channel::bounded(1);
        self.send(Command::Snapshot(sender))?;
        receiver.recv_timeout(timeout).map_err(|error| match error {
            RecvTimeoutError::Timeout => LeaseControlError::TimedOut(timeout),
            RecvTimeoutError::Disconnected => LeaseControlError::Gone,
        })
    }

    /// What happened, in order. The queue ends when the engine has shut down.
    #[must_use]
    pub const fn events(&self) -> &Receiver<LeaseEvent> {
        &self.events
    }

    fn send(&self, command: Command) -> Result<(), LeaseControlError> {
        self.commands
            .send(command)
            .map_err(|_| LeaseControlError::Gone)?;
        if let Some(wake) = self.wake.get() {
            wake();
        }
        Ok(())
    }
}

/// A rank's end of the lease protocol, to be registered for
/// [`LEASE_CHANNEL`](kvferry_wire::lease::LEASE_CHANNEL): the producer's, and with
/// [`borrow`](Self::borrow) the consumer's too.
///
/// When it is dropped, with its engine, leases that are still held are revoked and reported, and
/// releases that have no answer are unanswered.
pub struct LeaseService {
    table: LeaseTable<PeerId>,
    /// Of a rank that consumes too.
    borrowing: Option<Borrowing>,
    command_sender: channel::Sender<Command>,
    wake: Arc<OnceLock<Wake>>,
    commands: Receiver<Command>,
    events: channel::Sender<LeaseEvent>,
    /// The latest time seen: ticks are dated by the engine's loop, messages here.
    now: Instant,
    /// When a shutdown stops waiting.
    drain_until: Option<Instant>,
    latest: Arc<Mutex<LeaseSnapshot>>,
    malformed: u64,
    log: LogLimit,
}

impl fmt::Debug for LeaseService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseService")
            .field("table", &self.table)
            .field("borrowing", &self.borrowing)
            .finish_non_exhaustive()
    }
}

impl LeaseService {
    /// A service for the leases of one scheduler half, and its control.
    ///
    /// ```
    /// use kvferry_connector::lease::{LeaseConfig, LeaseService};
    /// use kvferry_engine::{Engine, EngineConfig};
    /// use kvferry_wire::lease::LEASE_CHANNEL;
    /// use kvferry_wire::{EngineId, Instance};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let instance = Instance::random()?;
    /// let (service, control) = LeaseService::new(instance, LeaseConfig::default())?;
    /// let builder = Engine::builder(EngineConfig::new(EngineId::new("prefill-0")?))
    ///     .service(LEASE_CHANNEL, Box::new(service));
    /// # let start = || -> Result<(), Box<dyn std::error::Error>> {
    /// let engine = builder.start()?;
    /// control.wake_with(move || drop(engine.wake_services()));
    /// # Ok(()) };
    /// # let _ = start;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The first setting of `config` that is out of range.
    pub fn new(
        instance: Instance,
        config: LeaseConfig,
    ) -> Result<(Self, LeaseControl), LeaseConfigError> {
        let (command_sender, commands) = channel::unbounded();
        let (events, event_receiver) = channel::unbounded();
        let wake = Arc::new(OnceLock::new());
        let latest = Arc::<Mutex<LeaseSnapshot>>::default();
        let service = Self {
            table: LeaseTable::new(instance, config)?,
            borrowing: None,
            command_sender: command_sender.clone(),
            wake: Arc::clone(&wake),
            commands,
            events,
            now: Instant::now(),
            drain_until: None,
            latest: Arc::clone(&latest),
            malformed: 0,
            log: LogLimit::new(Duration::from_secs(10)),
        };
        Ok((
            service,
            LeaseControl {
                commands: command_sender,
                events: event_receiver,
                wake,
                latest,
            },
        ))
    }

    /// Lets this rank hold and release leases of others too. `tell` is called on the progress thread
    /// and must return at once. Commands reach it as those of [`LeaseControl`] do.
    pub fn borrow(
        &mut self,
        config: BorrowConfig,
        tell: impl Fn(BorrowEvent<PeerId>) + Send + 'static,
    ) -> BorrowControl {
        self.borrowing = Some(Borrowing::new(config, Box::new(tell)));
        BorrowControl {
            commands: self.command_sender.clone(),
            wake: Arc::clone(&self.wake),
        }
    }

    /// Commands come first: a plan that was handed over before a message arrived precedes it.
    fn take_commands(&mut self) {
        while let Ok(command) = self.commands.try_recv() {
            match command {
                Command::Adopt(instance) => {
                    if !self.table.adopt(instance) {
                        let ours = self.table.instance();
                        tracing::error!(%ours, %instance, "plans of another scheduler half");
                    }
                }
                Command::Apply(plan) => self.apply(plan),
                Command::Drain { within } => {
                    self.table.begin_drain();
                    // No lease lives longer than that.
                    self.drain_until = Some(self.now + within.min(MAX_LEASE));
                }
                Command::Borrow(borrow) => {
                    if let Some(borrowing) = &mut self.borrowing {
                        borrowing.command(borrow, self.now);
                    }
                }
                Command::Snapshot(answer) => {
                    // Whoever asked may have given up.
                    let _ = answer.send(self.snapshot());
                }
            }
        }
    }

    /// Applies a plan. What a draining table would refuse to reserve ends at once, so that the
    /// rest of the plan counts and the scheduler half hears the end it waits for.
    fn apply(&mut self, mut plan: StepLeases) {
        let refused = if self.table.is_draining() {
            std::mem::take(&mut plan.reserve)
        } else {
            Vec::new()
        };
        match self.table.apply(plan, self.now) {
            Ok(()) => {
                let instance = self.table.instance();
                for (epoch, request) in refused {
                    let lease = LeaseId {
                        instance,
                        epoch,
                        request,
                    };
                    let ended = Ended {
                        lease,
                        how: End::Revoked,
                        readers: 0,
                    };
                    self.tell(LeaseEvent::Ended(ended, self.now));
                }
            }
            Err(error) => {
                tracing::error!(%error, "a plan's leases were refused");
                self.tell(LeaseEvent::PlanRefused(error));
            }
        }
    }

    fn handle(&mut self, from: Sender, payload: &[u8], replies: &mut Replies) {
        let now = self.now;
        match LeaseMessage::parse(payload) {
            Ok(LeaseMessage::Release { reader, .. }) if reader.incarnation != from.incarnation => {
                self.refuse(from, &"a release in another engine's name");
            }
            Ok(LeaseMessage::Release {
                lease,
                reader,
                consumers,
            }) => {
                if let Some(verdict) = self
                    .table
                    .release(from.peer, &lease, reader, consumers, now)
                {
                    let answer = encode_released(lease.instance, lease.epoch, reader, verdict);
                    replies.send(from.peer, LEASE_CHANNEL, answer);
                }
            }
            Ok(LeaseMessage::Renew {
                instance,
                token,
                epochs,
            }) => {
                let answer = self.table.renew(instance, epochs.iter(), now);
                match encode_renewed(instance, token, &answer.gone, &answer.unknown) {
                    Ok(answer) => replies.send(from.peer, LEASE_CHANNEL, answer),
                    Err(error) => self.refuse(from, &error),
                }
            }
            Ok(LeaseMessage::Released {
                instance,
                epoch,
                reader,
                verdict,
            }) => match &mut self.borrowing {
                Some(borrowing) => {
                    borrowing.released(from.peer, (instance, epoch), reader, verdict);
                }
                None => self.refuse(from, &NOT_ASKED),
            },
            Ok(LeaseMessage::Renewed { instance, gone, .. }) => match &mut self.borrowing {
                Some(borrowing) => borrowing.renewed(from.peer, instance, gone),
                None => self.refuse(from, &NOT_ASKED),
            },
            Err(error) => self.refuse(from, &error),
        }
    }

    fn snapshot(&self) -> LeaseSnapshot {
        LeaseSnapshot {
            gauges: self.table.gauges(),
            counters: self.table.counters(),
            malformed: self.malformed,
        }
    }

    fn refuse(&mut self, from: Sender, reason: &dyn fmt::Display) {
        self.malformed += 1;
        if let Some(held_back) = self.log.admit(self.now) {
            tracing::warn!(
                peer = %from.peer,
                incarnation = %from.incarnation,
                %reason,
                held_back,
                "dropped a message on the lease channel"
            );
        }
    }

    /// Ends a shutdown's wait if it is over, and lets out everything that has resulted.
    fn flush(&mut self, replies: &mut Replies) {
        let mut drained = None;
        if let Some(until) = self.drain_until
            && (self.table.held() == 0 || self.now >= until)
        {
            self.drain_until = None;
            drained = Some(LeaseEvent::Drained {
                revoked: self.table.revoke_all(self.now),
            });
        }
        while let Some(answer) = self.table.pop_answer() {
            let bytes =
                encode_released(answer.instance, answer.epoch, answer.reader, answer.verdict);
            replies.send(answer.peer, LEASE_CHANNEL, bytes);
        }
        // Before the ends are told: who looks after one finds it counted.
        *self.latest.lock().unwrap_or_else(PoisonError::into_inner) = self.snapshot();
        self.report_ends();
        if let Some(drained) = drained {
            self.tell(drained);
        }
        if let Some(borrowing) = &mut self.borrowing {
            borrowing.flush(self.now, replies);
        }
    }

    fn report_ends(&mut self) {
        while let Some(ended) = self.table.pop_ended() {
            tracing::debug!(lease = %ended.lease, how = %ended.how, readers = ended.readers, "ended");
            self.tell(LeaseEvent::Ended(ended, self.now));
        }
    }

    fn tell(&self, event: LeaseEvent) {
        // Without a listener there is nobody left who holds blocks for this rank.
        let _ = self.events.send(event);
    }
}

impl Service for LeaseService {
    fn on_message(&mut self, from: Sender, payload: &[u8], replies: &mut Replies) {
        self.now = self.now.max(Instant::now());
        self.take_commands();
        self.handle(from, payload, replies);
        self.flush(replies);
    }

    fn on_tick(&mut self, now: Instant, replies: &mut Replies) -> Option<Instant> {
        self.now = self.now.max(now);
        self.take_commands();
        // By the engine's time and not by ours: at that time everything had been delivered, so a
        // release that came before a lease's deadline is never found to be late.
        self.table.expire(now);
        self.flush(replies);
        // The engine asks again after every message; this bounds the wait for anything else.
        let config = self.table.config();
        let heartbeat = self.now + HEARTBEAT.min(config.early_hold).min(config.duration);
        let borrowing = self.borrowing.as_ref().and_then(Borrowing::next_deadline);
        let deadlines = [self.table.next_deadline(), self.drain_until, borrowing];
        Some(
            deadlines
                .into_iter()
                .flatten()
                .fold(heartbeat, Instant::min),
        )
    }

    fn on_peer_gone(&mut self, peer: PeerId) {
        self.table.peer_gone(peer);
        if let Some(borrowing) = &mut self.borrowing {
            borrowing.peer_gone(peer);
        }
    }
}

impl Drop for LeaseService {
    fn drop(&mut self) {
        self.take_commands();
        self.table.revoke_all(self.now);
        self.report_ends();
        if let Some(borrowing) = &mut self.borrowing {
            borrowing.end(self.now);
        }
    }
}

#[cfg(test)]
mod tests;

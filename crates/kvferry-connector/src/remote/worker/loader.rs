//! The loader: one thread per worker that takes loads from their plan to their report.
//!
//! A load is read, released and confirmed; it has brought its blocks only if the rank that it was read
//! from says that the lease was live when the read had ended. The thread waits for events only: plans,
//! connections, ends of transfers, answers to releases, and its own deadlines.
//!
//! Invariants: each planned load is reported once, and only when no operation touches its blocks any
//! more; each lease that was taken in is released to every rank, or was lost.

use std::collections::{HashMap, VecDeque};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError, Sender};
use kvferry_engine::{BlockPair, Engine, LogLimits, PeerId, ReadError, Transfer};
use kvferry_wire::RequestId;

use super::checksums::{Hashing, Sums};
use super::links::{Known, Link, LinkError, Links, RankOf};
use super::request::{Borrowed, Phase, Reading, failure_of};
use super::stats::LoaderCounters;
use crate::contract::{LoadFailure, Received};
use crate::lease::{BorrowControl, BorrowEvent, Ticket};
use crate::remote::{Load, Plan, RemoteConfig};

/// How often links that held leases lack are asked for again.
const RETRY: Duration = Duration::from_millis(500);

const ABORTED: &str = "the request was given up";

/// What the loader waits for.
#[derive(Debug)]
pub(crate) enum Event {
    /// A step's orders.
    Plan(Plan),
    /// An attempt to connect has ended.
    Connected {
        rank: RankOf,
        result: Result<Box<Link>, LinkError>,
    },
    /// Something has happened to a transfer of this load.
    Transfer { load: u64 },
    /// Checksums of a load's blocks as they are here.
    Ours { load: u64, sums: Sums },
    /// And as a producer has them.
    Theirs { peer: PeerId, load: u64, sums: Sums },
    /// From the lease service.
    Borrow(BorrowEvent<PeerId>),
    /// No more: break off what is read, release what is held, and end by then.
    Stop { by: Instant },
    /// A bug.
    #[cfg(test)]
    Panic(&'static str),
}

/// What the loader reports.
#[derive(Debug)]
pub(super) enum Done {
    /// A load is over.
    Received(Received),
    /// A held lease is lost.
    Lost(RequestId),
}

pub(super) struct Loader {
    pub(super) config: RemoteConfig,
    /// Our rank, which reads from the producer's rank of the same number.
    pub(super) rank: u32,
    pub(super) engine: Engine,
    pub(super) links: Links,
    pub(super) borrow: BorrowControl,
    /// Of a loader that verifies.
    pub(super) hashing: Option<Hashing>,
    pub(super) events: Sender<Event>,
    pub(super) reports: Sender<Done>,
    pub(super) requests: HashMap<RequestId, Borrowed>,
    pub(super) by_load: HashMap<u64, RequestId>,
    /// Whose a ticket is: the request and the producer's rank.
    pub(super) tickets: HashMap<Ticket, (RequestId, usize)>,
    /// Loads that wait, in order.
    pub(super) waiting: VecDeque<RequestId>,
    pub(super) reading: usize,
    /// Since when something is being read.
    reading_since: Option<Instant>,
    pub(super) next_number: u64,
    /// When to end at the latest.
    pub(super) stopping: Option<Instant>,
    pub(super) counters: Arc<LoaderCounters>,
    log: LogLimits,
}

/// Wakes the loader for a transfer.
struct TransferWaker {
    load: u64,
    events: Sender<Event>,
}

impl Wake for TransferWaker {
    fn wake(self: Arc<Self>) {
        // The loader may have ended, and nobody waits for the transfer any more.
        let _ = self.events.send(Event::Transfer { load: self.load });
    }
}

impl Loader {
    #[allow(clippy::too_many_arguments, reason = "called once")]
    pub(super) fn new(
        config: RemoteConfig,
        rank: u32,
        engine: Engine,
        links: Links,
        borrow: BorrowControl,
        hashing: Option<Hashing>,
        events: Sender<Event>,
        reports: Sender<Done>,
        counters: Arc<LoaderCounters>,
    ) -> Self {
        Self {
            config,
            rank,
            engine,
            links,
            borrow,
            hashing,
            events,
            reports,
            requests: HashMap::new(),
            by_load: HashMap::new(),
            tickets: HashMap::new(),
            waiting: VecDeque::new(),
            reading: 0,
            reading_since: None,
            next_number: 0,
            stopping: None,
            counters,
            log: LogLimits::default(),
        }
    }

    /// Says why a load fails, not too often (C119); an abort is nobody's failure.
    pub(super) fn warn(&mut self, request: &RequestId, failure: LoadFailure, reason: &str) {
        let cause = failure.name();
        if failure == LoadFailure::Aborted {
            tracing::debug!(%request, cause, reason, "a load fails");
        } else if let Some(held_back) = self.log.admit(cause, "", Instant::now()) {
            tracing::warn!(%request, cause, reason, held_back, "a load fails");
        }
    }

    /// Runs until it was told to stop, and everything is released or the time for that is over.
    pub(super) fn run(mut self, inbox: &Receiver<Event>) {
        let mut next_retry = Instant::now() + RETRY;
        let is_over = |loader: &Self| match loader.stopping {
            Some(by) => loader.requests.is_empty() || Instant::now() >= by,
            None => false,
        };
        while !is_over(&self) {
            let deadline = if self.requests.is_empty() {
                None
            } else {
                Some(self.next_deadline(next_retry))
            };
            let event = match deadline {
                None => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(deadline) => inbox.recv_deadline(deadline),
            };
            let now = Instant::now();
            match event {
                Ok(event) => self.handle(event, now),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if now >= next_retry {
                next_retry = now + RETRY;
                self.links.tidy(now);
                self.hold_all(now);
            }
            self.end_verifying(now);
            self.start_waiting(now);
        }
    }

    fn next_deadline(&self, next_retry: Instant) -> Instant {
        let waiting = self
            .requests
            .values()
            .filter_map(|request| match request.phase {
                Phase::Waiting { until } => Some(until),
                Phase::Verifying(ref verifying) => Some(verifying.until()),
                _ => None,
            });
        waiting.chain(self.stopping).fold(next_retry, Instant::min)
    }

    pub(super) fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    fn handle(&mut self, event: Event, now: Instant) {
        match event {
            Event::Plan(plan) => self.plan(plan, now),
            Event::Connected { rank, result } => {
                self.links.connected(rank, result, now);
                self.hold_all(now);
            }
            Event::Transfer { load } => {
                if let Some(request) = self.by_load.get(&load).cloned() {
                    self.advance(&request);
                }
            }
            Event::Ours { load, sums } => self.ours(load, sums),
            Event::Theirs { peer, load, sums } => self.theirs(peer, load, sums),
            Event::Borrow(event) => self.borrow_event(event, now),
            #[cfg(test)]
            Event::Panic(why) => panic!("{why}"),
            Event::Stop { by } => {
                self.stopping = Some(by);
                let all: Vec<RequestId> = self.requests.keys().cloned().collect();
                for request in all {
                    self.release_held(&request);
                    self.abort(&request);
                }
            }
        }
    }

    fn plan(&mut self, plan: Plan, now: Instant) {
        for lease in plan.hold {
            self.take_in(lease, now);
        }
        for load in plan.load {
            self.load(load, now);
        }
        for request in plan.release {
            self.release_held(&request);
        }
        for request in plan.abort {
            self.abort(&request);
        }
    }

    fn load(&mut self, load: Load, now: Instant) {
        let Some(borrowed) = self.requests.get_mut(&load.request) else {
            // Not ours: still one report, as was promised.
            tracing::error!(request = %load.request, "a load without a lease");
            self.report(load.request, Some(LoadFailure::Local), Vec::new());
            return;
        };
        borrowed.blocks = load.blocks;
        borrowed.phase = Phase::Waiting {
            until: now + self.config.connect_timeout,
        };
        self.waiting.push_back(load.request);
    }

    /// Starts what can be started.
    fn start_waiting(&mut self, now: Instant) {
        for _ in 0..self.waiting.len() {
            let Some(request) = self.waiting.pop_front() else {
                return;
            };
            if self.try_start(&request, now) {
                continue;
            }
            self.waiting.push_back(request);
        }
    }

    /// Starts a load or fails it; false if it has to wait.
    fn try_start(&mut self, request: &RequestId, now: Instant) -> bool {
        let Some(borrowed) = self.requests.get(request) else {
            return true;
        };
        let Phase::Waiting { until } = borrowed.phase else {
            return true;
        };
        let (theirs, ours) = (borrowed.lease.source.ranks, self.config.ranks);
        let early = if borrowed.aborted {
            Some((LoadFailure::Aborted, ABORTED.to_owned()))
        } else if borrowed.lost {
            let reason = "its lease had ended before it could be read";
            Some((LoadFailure::Lease, reason.to_owned()))
        } else if borrowed.blocks.is_empty() {
            Some((LoadFailure::Local, "there are no blocks to read".to_owned()))
        } else if theirs != ours {
            let reason =
                format!("the producer has {theirs} ranks and we have {ours}: not supported");
            Some((LoadFailure::Rejected, reason))
        } else {
            None
        };
        if let Some((failure, reason)) = early {
            self.fail(request, failure, &reason);
            return true;
        }
        let rank = (borrowed.lease.source.clone(), self.rank);
        let instance = borrowed.lease.lease.instance;
        let link = match self.links.get(&rank, now) {
            Known::Ready(link) => link.clone(),
            Known::Failed(error) => {
                let (failure, reason) = (error.failure(), error.to_string());
                self.fail(request, failure, &reason);
                return true;
            }
            Known::Connecting if now >= until => {
                let timeout = self.config.connect_timeout;
                let reason = format!("its producer is not connected after {timeout:?}");
                self.fail(request, LoadFailure::Peer, &reason);
                return true;
            }
            Known::Connecting => return false,
        };
        if link.instance.is_some_and(|of| of != instance) {
            // Another life of the producer: it knows nothing of the lease.
            let reason = "its producer was started anew, and holds nothing for it";
            self.fail(request, LoadFailure::Lease, reason);
            return true;
        }
        if self.reading >= self.config.max_concurrent_loads {
            return false;
        }
        self.read(request, &link);
        true
    }

    fn read(&mut self, request: &RequestId, link: &Link) {
        let Some(borrowed) = self.requests.get_mut(request) else {
            return;
        };
        let mut reading = Reading::of(link.peer.clone());
        for group in &borrowed.blocks {
            let pairs: Vec<BlockPair> = group
                .local
                .iter()
                .zip(&group.remote)
                .map(|(&local, &remote)| BlockPair::new(local, remote))
                .collect();
            let tables = link.tables.get(group.group as usize);
            let started = match tables {
                Some(tables) => link
                    .peer
                    .read_within(tables, &pairs, self.config.read_timeout)
                    .map_err(|error| (refusal_of(&error), error.to_string())),
                None => Err((
                    LoadFailure::Rejected,
                    format!("there is no cache group {}", group.group),
                )),
            };
            match started {
                Ok(transfer) => reading.transfers.push(Some(transfer)),
                Err((failure, error)) => {
                    reading.failure = Some((failure, format!("its read was refused: {error}")));
                    break;
                }
            }
        }
        if reading.failure.is_some() {
            reading
                .transfers
                .iter()
                .flatten()
                .for_each(Transfer::cancel);
        }
        borrowed.phase = Phase::Reading(reading);
        self.reading += 1;
        self.reading_since.get_or_insert_with(Instant::now);
        self.counters.started();
        self.advance(request);
    }

    /// Looks at a load's transfers; goes on when the last one is quiet.
    fn advance(&mut self, request: &RequestId) {
        let Some(borrowed) = self.requests.get_mut(request) else {
            return;
        };
        let load = borrowed.load;
        let Phase::Reading(reading) = &mut borrowed.phase else {
            return;
        };
        let waker = Waker::from(Arc::new(TransferWaker {
            load,
            events: self.events.clone(),
        }));
        let mut context = Context::from_waker(&waker);
        let mut failure = None;
        for place in &mut reading.transfers {
            let Some(transfer) = place else {
                continue;
            };
            if let Poll::Ready(outcome) = Pin::new(transfer).poll(&mut context) {
                *place = None;
                match outcome {
                    Ok(report) => {
                        reading.bytes += report.bytes;
                        reading.operations += report.operations;
                    }
                    Err(error) => {
                        tracing::debug!(%request, %error, "a transfer of a load failed");
                        failure = failure.or_else(|| Some((failure_of(&error), error.to_string())));
                    }
                }
            }
        }
        if let Some(failure) = failure
            && reading.failure.is_none()
        {
            reading.failure = Some(failure);
            // Its siblings are of no use any more; what they write is waited for all the same.
            reading
                .transfers
                .iter()
                .flatten()
                .for_each(Transfer::cancel);
        }
        if reading.transfers.iter().any(Option::is_some) {
            return;
        }
        let (failure, peer) = (reading.failure.take(), reading.peer.clone());
        let blocks = match failure {
            None => borrowed.blocks.iter().map(|group| group.local.len()).sum(),
            Some(_) => 0,
        };
        let now = Instant::now();
        self.reading -= 1;
        self.counters
            .quiet(blocks, reading.bytes, reading.operations);
        if self.reading == 0
            && let Some(since) = self.reading_since.take()
        {
            self.counters
                .was_reading(now.saturating_duration_since(since));
        }
        borrowed.quiet_at = Some(now);
        match failure {
            None if !borrowed.aborted && self.config.verify => self.verify(request, peer, now),
            None if !borrowed.aborted => self.release(request, true),
            Some((failure, reason)) if !borrowed.aborted => self.fail(request, failure, &reason),
            _ => self.fail(request, LoadFailure::Aborted, ABORTED),
        }
    }

    /// A load has failed, and nothing of it is under way: reported now, and released.
    pub(super) fn fail(&mut self, request: &RequestId, failure: LoadFailure, reason: &str) {
        if let Some(borrowed) = self.requests.get(request) {
            let blocks = borrowed.failed_blocks();
            self.warn(request, failure, reason);
            self.report(request.clone(), Some(failure), blocks);
            self.release(request, false);
        }
    }

    pub(super) fn report(
        &self,
        request: RequestId,
        failure: Option<LoadFailure>,
        failed: Vec<crate::contract::FailedBlock>,
    ) {
        self.counters.reported(failure);
        let received = Received {
            request,
            failure,
            failed,
        };
        // The worker is gone, and its scheduler with it.
        let _ = self.reports.send(Done::Received(received));
    }

    fn abort(&mut self, request: &RequestId) {
        let Some(borrowed) = self.requests.get_mut(request) else {
            return;
        };
        match &borrowed.phase {
            // Reported when it is looked at next, which is at once.
            Phase::Waiting { .. } => borrowed.aborted = true,
            Phase::Reading(reading) => {
                borrowed.aborted = true;
                reading
                    .transfers
                    .iter()
                    .flatten()
                    .for_each(Transfer::cancel);
            }
            // What the comparison still looks at may be overwritten: nobody hears of it.
            Phase::Verifying(_) => self.fail(request, LoadFailure::Aborted, ABORTED),
            Phase::Held | Phase::Releasing { .. } => {}
        }
    }
}

fn refusal_of(error: &ReadError) -> LoadFailure {
    match error {
        ReadError::PeerGone(_) => LoadFailure::Peer,
        ReadError::Engine(_) | ReadError::LocalTable { .. } => LoadFailure::Local,
        _ => LoadFailure::Rejected,
    }
}

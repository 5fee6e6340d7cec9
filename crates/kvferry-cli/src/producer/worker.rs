//! The producer's thread: fills requests, issues their leases, offers them, and frees blocks when
//! leases end.
//!
//! It plays the part of a scheduler: a lease is reserved before the blocks are written and activated
//! when they hold what the offer says. Each consumer has a run of its own; the blocks are shared.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use crossbeam::channel::{Receiver, Sender, never};
use crossbeam::select;
use kvferry_connector::lease::{End, Ended, LeaseControl, LeaseEvent, StepLeases};
use kvferry_engine::{Engine, PeerId};
use kvferry_wire::{
    DemoOffer, DemoPlan, DemoReply, DemoRequest, DemoSummary, Epoch, Instance, LeaseId, RequestId,
};

use super::PATIENCE;
use super::service::Outgoing;
use crate::blocks::{Blocks, FreeIds};
use crate::error::CliError;
use crate::pattern::{BlockDigest, Pattern, Place, request_digest};

/// What the producer's thread is asked to do.
#[derive(Debug)]
pub(super) enum Ask {
    /// A consumer's question.
    Request { from: PeerId, request: DemoRequest },
    /// A consumer is gone for good.
    Gone(PeerId),
    /// Take no new requests, wait for held leases up to this time, and end.
    Stop { within: Duration },
}

/// How the thread ended.
#[derive(Debug)]
pub(crate) struct WorkerEnd {
    /// Leases that had to be revoked at the end.
    pub(crate) revoked: usize,
    /// What went wrong, if anything did.
    pub(crate) failure: Option<CliError>,
}

/// One consumer's requests.
#[derive(Debug, Default)]
struct Run {
    /// The next request to offer.
    next: u64,
    in_flight: u32,
    /// Questions that wait for blocks.
    waiting: u32,
    summary: DemoSummary,
}

/// A lease that has not ended.
#[derive(Debug)]
struct Held {
    peer: PeerId,
    blocks: Vec<u32>,
}

pub(super) struct Worker {
    plan: DemoPlan,
    pattern: Pattern,
    instance: Instance,
    blocks: Blocks,
    free: FreeIds,
    engine: Engine,
    control: LeaseControl,
    asks: Receiver<Ask>,
    answers: Sender<Outgoing>,
    runs: HashMap<PeerId, Run>,
    leases: HashMap<Epoch, Held>,
    /// Questions for which no blocks were free, in order.
    waiting: VecDeque<(PeerId, u64)>,
    issued_up_to: u64,
    stopping: bool,
    /// Set when the last lease has ended after a stop: how many had to be revoked.
    drained: Option<usize>,
}

impl Worker {
    pub(super) fn new(
        plan: DemoPlan,
        instance: Instance,
        blocks: Blocks,
        engine: Engine,
        control: LeaseControl,
        asks: Receiver<Ask>,
        answers: Sender<Outgoing>,
    ) -> Self {
        Self {
            pattern: Pattern::new(plan.seed),
            free: FreeIds::scattered(blocks.shape().count, plan.seed),
            plan,
            instance,
            blocks,
            engine,
            control,
            asks,
            answers,
            runs: HashMap::new(),
            leases: HashMap::new(),
            waiting: VecDeque::new(),
            issued_up_to: 0,
            stopping: false,
            drained: None,
        }
    }

    /// Works until it is told to stop or the engine ends.
    pub(super) fn run(mut self) -> WorkerEnd {
        let events = self.control.events().clone();
        let mut asks = self.asks.clone();
        let revoked = loop {
            // Both queues end with the engine, at the latest.
            let step = select! {
                recv(asks) -> ask => match ask {
                    Ok(ask) => self.ask(ask),
                    Err(_) => {
                        asks = never();
                        Ok(())
                    }
                },
                recv(events) -> event => match event {
                    Ok(event) => self.event(event),
                    Err(_) => Err(CliError::Producer("lost its engine".to_owned())),
                },
            };
            match (step, self.drained) {
                (Ok(()), None) => {}
                (Ok(()), Some(revoked)) => break Ok(revoked),
                (Err(error), _) => break Err(error),
            }
        };
        let closed = self.blocks.close(PATIENCE);
        match revoked {
            Ok(revoked) => WorkerEnd {
                revoked,
                failure: closed.err(),
            },
            Err(error) => WorkerEnd {
                revoked: 0,
                failure: Some(error),
            },
        }
    }

    fn ask(&mut self, ask: Ask) -> Result<(), CliError> {
        match ask {
            Ask::Request { from, request } => self.request(from, request),
            Ask::Gone(peer) => {
                // Its leases stay: it may come back and release them. Otherwise they expire.
                self.runs.remove(&peer);
                self.waiting.retain(|(waiting, _)| *waiting != peer);
                Ok(())
            }
            Ask::Stop { within } => {
                self.stopping = true;
                for (peer, _) in std::mem::take(&mut self.waiting) {
                    self.refuse(peer, "the producer is shutting down")?;
                }
                Ok(self.control.drain(within)?)
            }
        }
    }

    fn request(&mut self, from: PeerId, request: DemoRequest) -> Result<(), CliError> {
        match request {
            DemoRequest::Begin { .. } if self.runs.contains_key(&from) => {
                self.refuse(from, "the run has begun already; connect anew for another")
            }
            DemoRequest::Begin { in_flight } => {
                let run = Run {
                    in_flight,
                    ..Run::default()
                };
                self.runs.insert(from, run);
                self.answer(from, &DemoReply::Welcome(self.plan.clone()))
            }
            DemoRequest::Next { ticket } => self.next(from, ticket),
            DemoRequest::Finish => self.finish(from),
        }
    }

    fn next(&mut self, from: PeerId, ticket: u64) -> Result<(), CliError> {
        if self.stopping {
            return self.refuse(from, "the producer is shutting down");
        }
        let Some(run) = self.runs.get_mut(&from) else {
            return self.refuse(from, "a run must begin before it asks for requests");
        };
        if run.waiting >= run.in_flight {
            let reason = format!(
                "more than the {} questions that were announced",
                run.in_flight
            );
            return self.refuse(from, &reason);
        }
        run.waiting += 1;
        self.waiting.push_back((from, ticket));
        self.serve_waiting()
    }

    /// Answers questions in their order while there are blocks.
    fn serve_waiting(&mut self) -> Result<(), CliError> {
        while let Some(&(peer, ticket)) = self.waiting.front() {
            let more = self
                .runs
                .get(&peer)
                .is_some_and(|run| run.next < self.plan.requests);
            let blocks = if more {
                let Some(blocks) = self.free.take(self.plan.blocks) else {
                    return Ok(());
                };
                Some(blocks)
            } else {
                None
            };
            self.waiting.pop_front();
            if let Some(run) = self.runs.get_mut(&peer) {
                run.waiting -= 1;
            }
            let reply = match blocks {
                Some(blocks) => DemoReply::Offer {
                    ticket,
                    offer: self.prepare(peer, blocks)?,
                },
                None => DemoReply::NoMore { ticket },
            };
            self.answer(peer, &reply)?;
        }
        Ok(())
    }

    /// Reserves a lease, writes a request's blocks, and activates the lease.
    fn prepare(&mut self, peer: PeerId, blocks: Vec<u32>) -> Result<DemoOffer, CliError> {
        let request = match self.runs.get_mut(&peer) {
            Some(run) => {
                run.next += 1;
                run.summary.leases_held += 1;
                run.summary.blocks_in_use += blocks.len() as u64;
                run.next - 1
            }
            None => 0,
        };
        self.issued_up_to += 1;
        let epoch = Epoch::new(self.issued_up_to)?;
        let name = RequestId::new(format!("request-{request}"))?;
        self.plan_leases(StepLeases {
            reserve: vec![(epoch, name.clone())],
            ..StepLeases::default()
        })?;
        let held = Held {
            peer,
            blocks: blocks.clone(),
        };
        self.leases.insert(epoch, held);

        let digests = self.fill(request, &blocks)?;
        self.plan_leases(StepLeases {
            activate: vec![epoch],
            ..StepLeases::default()
        })?;
        Ok(DemoOffer {
            request,
            lease: LeaseId {
                instance: self.instance,
                epoch,
                request: name,
            },
            block_ids: blocks,
            digest: request_digest(&digests),
            digests,
        })
    }

    fn plan_leases(&self, step: StepLeases) -> Result<(), CliError> {
        let issued_up_to = self.issued_up_to;
        Ok(self.control.apply(StepLeases {
            issued_up_to,
            ..step
        })?)
    }

    /// Writes the pattern into a request's blocks and returns a digest of each.
    fn fill(&self, request: u64, ids: &[u32]) -> Result<Vec<u64>, CliError> {
        let mut bytes = vec![0; self.plan.block_bytes as usize];
        let mut digests = Vec::with_capacity(ids.len());
        for (block, &id) in (0..).zip(ids) {
            let mut digest = BlockDigest::new();
            for layer in 0..self.plan.layers {
                let place = Place {
                    request,
                    layer,
                    block,
                };
                self.pattern.fill(place, &mut bytes);
                digest.layer(&bytes);
                self.blocks.write(layer, id, &bytes)?;
            }
            digests.push(digest.finish());
        }
        Ok(digests)
    }

    fn event(&mut self, event: LeaseEvent) -> Result<(), CliError> {
        match event {
            LeaseEvent::Ended(ended) => {
                self.ended(&ended);
                self.serve_waiting()
            }
            LeaseEvent::PlanRefused(error) => Err(CliError::Producer(format!(
                "issued a lease wrongly: {error}"
            ))),
            LeaseEvent::Drained { revoked } => {
                self.drained = Some(revoked);
                Ok(())
            }
        }
    }

    /// Frees the blocks of a lease that has ended.
    fn ended(&mut self, ended: &Ended) {
        let Some(Held { peer, blocks }) = self.leases.remove(&ended.lease.epoch) else {
            tracing::error!(lease = %ended.lease, "a lease ended that is not held");
            return;
        };
        if let Some(Run { summary, .. }) = self.runs.get_mut(&peer) {
            summary.leases_held -= 1;
            summary.blocks_in_use -= blocks.len() as u64;
            *match ended.how {
                End::Released => &mut summary.leases_released,
                End::Expired => &mut summary.leases_expired,
                End::Revoked => &mut summary.leases_revoked,
            } += 1;
        }
        self.free.give(blocks);
    }

    fn finish(&mut self, from: PeerId) -> Result<(), CliError> {
        // A consumer asks after its last release was answered. That lease's end is in the queue by
        // then, but it is another queue than the one this question came through.
        for event in self.control.events().clone().try_iter() {
            self.event(event)?;
        }
        let Some(run) = self.runs.get(&from) else {
            return self.refuse(from, "no run has begun");
        };
        let summary = DemoSummary {
            quarantined_bytes: self.engine.counters().quarantined_bytes,
            ..run.summary
        };
        tracing::info!(peer = %from, ?summary, "a run is over");
        self.answer(from, &DemoReply::Summary(summary))
    }

    fn refuse(&self, peer: PeerId, reason: &str) -> Result<(), CliError> {
        tracing::warn!(%peer, reason, "refused a question");
        let reason = reason.to_owned();
        self.answer(peer, &DemoReply::Refused { reason })
    }

    fn answer(&self, peer: PeerId, reply: &DemoReply) -> Result<(), CliError> {
        // If the service is gone, so is the engine, which the next event says.
        let _ = self.answers.send((peer, reply.encode()?));
        Ok(self.engine.wake_services()?)
    }
}

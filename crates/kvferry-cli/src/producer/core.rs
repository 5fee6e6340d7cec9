//! The producer's thread, in the part of an engine core: puts requests in, takes steps, and says what
//! came of them.
//!
//! It steps while anything is computed or held, and waits for questions otherwise. Each consumer has a
//! run of its own, and its requests have ids of their own.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use crossbeam::select;
use kvferry_connector::contract::Finish;
use kvferry_connector::lease::End;
use kvferry_engine::{Engine, PeerId};
use kvferry_sim::{NewRequest, Output, SimEngine};
use kvferry_wire::{DemoPlan, DemoReply, DemoRequest, DemoSummary, RequestId};
use serde_json::json;

use super::service::Outgoing;
use crate::error::CliError;
use crate::prompts::prompt;

/// Time between the steps of an engine that only holds blocks, as vLLM's engine core has it.
const IDLE_STEP: Duration = Duration::from_millis(1);

/// Steps after which everything that had happened before a question is in the counts.
const STEPS_TO_SUM_UP: u32 = 2;

/// A consumer's question, or its end.
#[derive(Debug)]
pub(super) enum Ask {
    Request { from: PeerId, request: DemoRequest },
    Gone(PeerId),
}

/// How the thread ended.
#[derive(Debug)]
pub(crate) struct CoreEnd {
    /// Leases that had to be revoked at the end.
    pub(crate) revoked: usize,
    /// What went wrong, if anything did.
    pub(crate) failure: Option<CliError>,
}

/// One consumer's requests.
#[derive(Debug, Default)]
struct Run {
    /// Requests that it may have computed at the same time.
    in_flight: u32,
    /// Requests that are being computed, by their number.
    open: HashMap<RequestId, u64>,
    /// Requests under a lease.
    held: HashSet<RequestId>,
    /// Requests whose lease has ended and whose blocks are not free yet.
    ending: Vec<RequestId>,
    released: u64,
    expired: u64,
    revoked: u64,
}

pub(super) struct Core {
    plan: DemoPlan,
    sim: SimEngine,
    engine: Engine,
    asks: Receiver<Ask>,
    answers: Sender<Outgoing>,
    ends: Receiver<(RequestId, End)>,
    runs: HashMap<PeerId, Run>,
    /// Consumers that wait for a summary, and the steps until then.
    finishing: Vec<(PeerId, u32)>,
    /// Set by a stop: when what is still held is revoked.
    stop_at: Option<Instant>,
}

impl Core {
    pub(super) fn new(
        plan: DemoPlan,
        sim: SimEngine,
        engine: Engine,
        asks: Receiver<Ask>,
        answers: Sender<Outgoing>,
        ends: Receiver<(RequestId, End)>,
    ) -> Self {
        Self {
            plan,
            sim,
            engine,
            asks,
            answers,
            ends,
            runs: HashMap::new(),
            finishing: Vec::new(),
            stop_at: None,
        }
    }

    /// Works until it is told to stop, the engine ends, or a rule is broken.
    pub(super) fn run(mut self, stop: &Receiver<Duration>) -> CoreEnd {
        let failure = self.work(stop).err();
        let revoked = self.sim.scheduler().held();
        // What is held now is revoked.
        let ended = self.sim.shutdown(Duration::ZERO).map_err(CliError::from);
        CoreEnd {
            revoked: if failure.is_none() { revoked } else { 0 },
            failure: failure.or(ended.err()),
        }
    }

    fn work(&mut self, stop: &Receiver<Duration>) -> Result<(), CliError> {
        loop {
            if self.stop_at.is_none() {
                match stop.try_recv() {
                    Ok(within) => self.stop(within)?,
                    Err(TryRecvError::Disconnected) => self.stop(Duration::ZERO)?,
                    Err(TryRecvError::Empty) => {}
                }
            }
            let mut progress = false;
            while let Ok(ask) = self.asks.try_recv() {
                progress = true;
                self.ask(ask)?;
            }
            if !self.sim.is_idle() || !self.finishing.is_empty() {
                progress |= self.step()?;
            }
            if let Some(at) = self.stop_at
                && (self.is_quiet() || Instant::now() >= at)
            {
                return Ok(());
            }
            if !progress {
                self.wait(stop)?;
            }
        }
    }

    fn is_quiet(&self) -> bool {
        self.sim.is_idle() && self.finishing.is_empty()
    }

    /// Waits for a question, an order to stop, or the time of the next step.
    fn wait(&mut self, stop: &Receiver<Duration>) -> Result<(), CliError> {
        let lost = || Err(CliError::Producer("lost its engine".to_owned()));
        if self.is_quiet() && self.stop_at.is_none() {
            select! {
                recv(self.asks) -> ask => match ask {
                    Ok(ask) => self.ask(ask),
                    Err(_) => lost(),
                },
                recv(stop) -> within => self.stop(within.unwrap_or_default()),
            }
        } else {
            match self.asks.recv_timeout(IDLE_STEP) {
                Ok(ask) => self.ask(ask),
                Err(RecvTimeoutError::Timeout) => Ok(()),
                Err(RecvTimeoutError::Disconnected) => lost(),
            }
        }
    }

    /// No new requests, and those that are computed are given up; what is held may end within this time.
    fn stop(&mut self, within: Duration) -> Result<(), CliError> {
        self.stop_at = Some(Instant::now() + within);
        self.sim.connector().begin_shutdown();
        let open = self.runs.iter_mut().flat_map(|(peer, run)| {
            let peer = *peer;
            run.open
                .drain()
                .map(move |(id, request)| (peer, id, request))
        });
        for (peer, id, request) in open.collect::<Vec<_>>() {
            self.sim.abort(&id)?;
            self.fail(peer, request, STOPPING)?;
        }
        Ok(())
    }

    fn ask(&mut self, ask: Ask) -> Result<(), CliError> {
        match ask {
            Ask::Request { from, request } => self.request(from, request),
            Ask::Gone(peer) => {
                // Its leases stay: it may come back and release them. Otherwise they expire.
                self.finishing.retain(|(waiting, _)| *waiting != peer);
                let open = self.runs.remove(&peer).unwrap_or_default().open;
                Ok(open.keys().try_for_each(|id| self.sim.abort(id))?)
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
            DemoRequest::Prefill { request } => self.prefill(from, request),
            DemoRequest::Finish if !self.runs.contains_key(&from) => {
                self.refuse(from, "no run has begun")
            }
            DemoRequest::Finish => {
                self.finishing.push((from, STEPS_TO_SUM_UP));
                Ok(())
            }
        }
    }

    fn prefill(&mut self, from: PeerId, request: u64) -> Result<(), CliError> {
        let Some(run) = self.runs.get_mut(&from) else {
            return self.refuse(from, "a run must begin before it asks for requests");
        };
        if self.stop_at.is_some() {
            return self.fail(from, request, STOPPING);
        }
        if request >= self.plan.requests {
            let most = self.plan.requests - 1;
            return self.fail(from, request, &format!("the plan's last request is {most}"));
        }
        if run.open.len() >= run.in_flight as usize {
            let most = run.in_flight;
            return self.fail(from, request, &format!("{most} were announced at a time"));
        }
        let id = RequestId::new(format!("{from}-request-{request}"))?;
        run.open.insert(id.clone(), request);
        let params = json!({"do_remote_decode": true, "do_remote_prefill": false});
        let new = NewRequest {
            id,
            prompt: prompt(&self.plan, request),
            max_tokens: 1,
            params: params.as_object().cloned(),
            extra_key: String::new(),
        };
        Ok(self.sim.add(new)?)
    }

    fn step(&mut self) -> Result<bool, CliError> {
        let progress = self.sim.step()?;
        for output in self.sim.take_outputs() {
            self.output(output)?;
        }
        while let Ok((id, how)) = self.ends.try_recv() {
            self.ended(id, how);
        }
        let scheduler = self.sim.scheduler();
        for run in self.runs.values_mut() {
            run.ending.retain(|id| scheduler.blocks(id).is_some());
        }
        let mut due = Vec::new();
        self.finishing.retain_mut(|(peer, steps)| {
            *steps -= 1;
            if *steps == 0 {
                due.push(*peer);
            }
            *steps > 0
        });
        due.into_iter().try_for_each(|peer| self.sum_up(peer))?;
        Ok(progress)
    }

    fn output(&mut self, output: Output) -> Result<(), CliError> {
        let of = |(peer, run): (&PeerId, &mut Run)| Some((*peer, run.open.remove(&output.id)?));
        // Its consumer may be gone.
        let Some((peer, request)) = self.runs.iter_mut().find_map(of) else {
            return Ok(());
        };
        match (output.how, output.params) {
            (Finish::Stopped | Finish::Length, Some(params)) => {
                if let Some(run) = self.runs.get_mut(&peer) {
                    run.held.insert(output.id);
                }
                self.answer(peer, &DemoReply::Prefilled { request, params })
            }
            (how, _) => self.fail(
                peer,
                request,
                &format!("it ended as {how:?}, and is not held"),
            ),
        }
    }

    fn ended(&mut self, id: RequestId, how: End) {
        let of = |run: &&mut Run| run.held.contains(&id);
        if let Some(run) = self.runs.values_mut().find(of) {
            run.held.remove(&id);
            *match how {
                End::Released => &mut run.released,
                End::Expired => &mut run.expired,
                End::Revoked => &mut run.revoked,
            } += 1;
            run.ending.push(id);
        }
    }

    fn sum_up(&self, from: PeerId) -> Result<(), CliError> {
        let Some(run) = self.runs.get(&from) else {
            return Ok(());
        };
        let with_blocks = (run.held.len() + run.ending.len()) as u64;
        let summary = DemoSummary {
            leases_held: run.held.len() as u64,
            leases_released: run.released,
            leases_expired: run.expired,
            leases_revoked: run.revoked,
            blocks_in_use: with_blocks * u64::from(self.plan.blocks),
            quarantined_bytes: self.engine.counters().quarantined_bytes,
        };
        tracing::info!(peer = %from, ?summary, "a run is over");
        self.answer(from, &DemoReply::Summary(summary))
    }

    /// Answers that a request is not held.
    fn fail(&self, peer: PeerId, request: u64, reason: &str) -> Result<(), CliError> {
        tracing::warn!(%peer, request, reason, "a request is not held");
        let reason = reason.to_owned();
        self.answer(peer, &DemoReply::Failed { request, reason })
    }

    fn refuse(&self, peer: PeerId, reason: &str) -> Result<(), CliError> {
        tracing::warn!(%peer, reason, "refused a question");
        let reason = reason.to_owned();
        self.answer(peer, &DemoReply::Refused { reason })
    }

    fn answer(&self, peer: PeerId, reply: &DemoReply) -> Result<(), CliError> {
        // If the service is gone, so is the engine, which the next question says.
        let _ = self.answers.send((peer, reply.encode()?));
        Ok(self.engine.wake_services()?)
    }
}

const STOPPING: &str = "the producer is shutting down";

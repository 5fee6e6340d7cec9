//! A run: the router that sends each request to the producer and then to the engine here, the steps of
//! that engine, and the judgement of what it generates.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError};
use kvferry_connector::contract::{Finish, Params};
use kvferry_engine::fabric::NativeReads;
use kvferry_engine::{CounterSnapshot, Engine, Peer, SendError};
use kvferry_sim::{Counts, Model, NewRequest, Output, SimEngine};
use kvferry_wire::{DEMO_CHANNEL, DemoPlan, DemoReply, DemoRequest, DemoSummary, RequestId};

use super::answers::Answer;
use super::worker::Seen;
use super::{GENERATED, IN_FLIGHT, answer, unexpected, unreadable};
use crate::error::CliError;
use crate::fault::Fault;
use crate::half::model;
use crate::progress::Progress;
use crate::prompts::{Share, bytes_to_read, prompt, whole_block};
use crate::report::{Facts, Report, Totals};

/// Time in which some request has to get further. It covers the end of leases that a lost consumer left
/// behind.
const PATIENCE: Duration = Duration::from_secs(90);

/// Time between the steps of an engine that only waits for loads, as vLLM's engine core has it.
const IDLE_STEP: Duration = Duration::from_millis(1);

/// Time between looks at the clock where there is nothing to step for.
const LOOK: Duration = Duration::from_millis(100);

/// Time for the last leases to be confirmed, and for the memory to be given up.
const ENDING: Duration = Duration::from_secs(15);

/// Where a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leg {
    /// At the producer.
    Prefill,
    /// Here.
    Decode,
}

pub(super) struct Run {
    plan: DemoPlan,
    model: Model,
    sim: SimEngine,
    engine: Engine,
    peer: Peer,
    answers: Receiver<Answer>,
    seen: Seen,
    /// One request is still to be lost.
    loses: bool,
    /// The next request to send.
    next: u64,
    open: BTreeMap<u64, Leg>,
    totals: Totals,
    progress: Progress,
    /// The engine's counters before the first request.
    before: CounterSnapshot,
}

impl Run {
    pub(super) fn new(
        plan: DemoPlan,
        sim: SimEngine,
        engine: Engine,
        peer: Peer,
        answers: Receiver<Answer>,
        seen: Seen,
        fault: Option<Fault>,
    ) -> Self {
        Self {
            model: model(&plan),
            progress: Progress::new(bytes_to_read(&plan)),
            before: engine.counters(),
            plan,
            sim,
            engine,
            peer,
            answers,
            seen,
            loses: fault == Some(Fault::LoseRequest),
            next: 0,
            open: BTreeMap::new(),
            totals: Totals::default(),
        }
    }

    /// Sends every request through both engines, and judges the run.
    pub(super) fn execute(mut self) -> Result<Report, CliError> {
        let played = self.play();
        self.progress.finish();
        // After a broken rule the engine is not to be trusted with another step.
        let intact = match played {
            Ok(()) => true,
            Err(error) => {
                self.totals.fail(error.to_string());
                !matches!(error, CliError::Rule(_))
            }
        };
        if intact && let Err(error) = self.settle() {
            self.totals.fail(error.to_string());
        }
        let summary = self.summary();
        let after = self.engine.counters();
        let emulated = self.engine.native_reads() == Some(NativeReads::Emulated);
        let tokens: Counts = self.sim.scheduler().counts();
        // The memory goes back before the counts are judged, so that whatever still uses it shows.
        if let Err(error) = self.sim.shutdown(Duration::ZERO) {
            self.totals.fail(error.to_string());
        }
        Ok(Report::new(Facts {
            plan: &self.plan,
            lane: self.peer.lane(),
            transports: self.peer.transports().to_owned(),
            emulated,
            ucx: self.engine.ucx_version(),
            producer_ucx: self.peer.description().ucx,
            loads: self.seen.stats(),
            tokens,
            totals: self.totals,
            before: self.before,
            after,
            quarantined_bytes: self.engine.counters().quarantined_bytes,
            summary,
        }))
    }

    fn play(&mut self) -> Result<(), CliError> {
        let mut moved = Instant::now();
        while self.next < self.plan.requests || !self.open.is_empty() {
            let open = self.open.clone();
            self.send()?;
            let stepped = !self.sim.is_idle() && self.sim.step()?;
            for output in self.sim.take_outputs() {
                self.output(&output);
            }
            self.hear(match stepped {
                true => Duration::ZERO,
                false if self.sim.is_idle() => LOOK,
                false => IDLE_STEP,
            })?;
            if self.open != open {
                moved = Instant::now();
            } else if moved.elapsed() > PATIENCE {
                return Err(CliError::Late {
                    what: "no request got any further".to_owned(),
                    waited: PATIENCE,
                });
            }
        }
        Ok(())
    }

    /// Sends requests to the producer while there may be more. One that begins like the one before it
    /// waits for that one's end, as the next turn of a conversation does.
    fn send(&mut self) -> Result<(), CliError> {
        while self.next < self.plan.requests && self.open.len() < IN_FLIGHT as usize {
            let request = self.next;
            let follows = Share::of(self.plan.seed, request) != Share::All;
            if follows && self.open.contains_key(&(request - 1)) {
                return Ok(());
            }
            self.next += 1;
            self.open.insert(request, Leg::Prefill);
            self.ask(&DemoRequest::Prefill { request })?;
        }
        Ok(())
    }

    fn ask(&self, question: &DemoRequest) -> Result<(), CliError> {
        let sent = self.peer.send(DEMO_CHANNEL, question.encode()?);
        sent.map_err(|error| match error {
            SendError::PeerGone(reason) => CliError::Producer(format!("is gone: {reason}")),
            other => other.into(),
        })
    }

    /// Takes the producer's answers, and waits for the first of them for up to this time.
    fn hear(&mut self, wait: Duration) -> Result<(), CliError> {
        let mut next = match self.answers.recv_timeout(wait) {
            Ok(answer) => Some(answer),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(Answer::Gone),
        };
        while let Some(answer) = next {
            match answer {
                Answer::Reply(DemoReply::Prefilled { request, params }) => {
                    self.prefilled(request, params)?;
                }
                Answer::Reply(DemoReply::Failed { request, reason }) => {
                    self.open.remove(&request);
                    let failure = format!("request {request}: the producer says: {reason}");
                    self.totals.fail(failure);
                }
                Answer::Reply(other) => return Err(unexpected(&other)),
                Answer::Unreadable(reason) => return Err(unreadable(&reason)),
                Answer::Gone => return Err(self.gone()),
            }
            next = self.answers.try_recv().ok();
        }
        Ok(())
    }

    fn gone(&self) -> CliError {
        let reason = self.peer.gone();
        let reason = reason.map_or(String::new(), |reason| format!(": {reason}"));
        CliError::Producer(format!("is gone{reason}"))
    }

    fn prefilled(&mut self, request: u64, params: Params) -> Result<(), CliError> {
        if self.open.get(&request) != Some(&Leg::Prefill) {
            return Err(CliError::Producer(format!(
                "answered for request {request}, which nobody had asked for"
            )));
        }
        if std::mem::take(&mut self.loses) {
            self.open.remove(&request);
            return Ok(());
        }
        self.open.insert(request, Leg::Decode);
        let new = NewRequest {
            id: RequestId::new(format!("request-{request}"))?,
            prompt: prompt(&self.plan, request),
            max_tokens: GENERATED,
            params: Some(params),
            extra_key: String::new(),
        };
        Ok(self.sim.add(new)?)
    }

    /// A request has ended: compares what it generated with what the model gives.
    fn output(&mut self, output: &Output) {
        let number = output.id.as_str().strip_prefix("request-");
        let Some(request) = number.and_then(|number| number.parse().ok()) else {
            return;
        };
        self.open.remove(&request);
        if !matches!(output.how, Finish::Stopped | Finish::Length) {
            let how = output.how;
            self.totals
                .fail(format!("request {request} ended as {how:?}"));
            return;
        }
        let prompt = prompt(&self.plan, request);
        let expected = self.model.reference(&prompt, "", GENERATED);
        if output.generated != expected {
            self.totals.fail(format!(
                "request {request} generated {:?} and should have generated {expected:?}",
                output.generated
            ));
            return;
        }
        let blocks = Share::of(self.plan.seed, request).count(self.plan.blocks);
        let bytes = u64::from(blocks) * whole_block(&self.plan);
        self.totals.requests += 1;
        self.totals.verified_bytes += bytes;
        self.progress.add(bytes);
    }

    /// Steps until nothing is left to be done, and compares the end with the start.
    fn settle(&mut self) -> Result<(), CliError> {
        let until = Instant::now() + ENDING;
        while !self.sim.is_idle() && Instant::now() < until {
            if !self.sim.step()? {
                std::thread::sleep(IDLE_STEP);
            }
        }
        Ok(self.sim.check_end()?)
    }

    /// The producer's view of the run, or why there is none.
    fn summary(&self) -> Result<DemoSummary, CliError> {
        if self.peer.gone().is_some() {
            return Err(self.gone());
        }
        // What a run that ended early has not heard.
        while self.answers.try_recv().is_ok() {}
        self.ask(&DemoRequest::Finish)?;
        loop {
            match answer(&self.answers, "the producer did not sum up the run")? {
                DemoReply::Summary(summary) => return Ok(summary),
                // Of a run that ended early.
                DemoReply::Prefilled { .. } | DemoReply::Failed { .. } => {}
                other => return Err(unexpected(&other)),
            }
        }
    }
}

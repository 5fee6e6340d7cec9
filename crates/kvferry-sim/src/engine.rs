//! One engine: a scheduler, its ranks with their memory, and a connector's halves.
//!
//! Responsible for the order of a step: schedule, plan to every rank, forward, reports, output. Time
//! is a tick: one turn of vLLM's engine core. A forward may last several, during which a worker hears
//! nothing; a report may be processed some steps after it was made. After every tick everything that
//! the invariants say is checked.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use kvferry_connector::contract::{
    Aggregator, Finish, SchedulerConnector, StepPlan, WorkerConnector, WorkerReport,
};
use kvferry_wire::RequestId;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::audit::Audit;
use crate::config::EngineConfig;
use crate::memory::RankMemory;
use crate::model::Model;
use crate::request::{NewRequest, Output};
use crate::rng::Rng;
use crate::runner::Runner;
use crate::scheduler::{Scheduler, Work};
use crate::trace::{Trace, TracedScheduler, TracedWorker};
use crate::violation::{Breach, Kind, SimError, Violation};

/// A connector: the scheduler half, and one worker half per rank.
pub struct Halves {
    /// The scheduler half.
    pub scheduler: Box<dyn SchedulerConnector>,
    /// The worker halves, in the order of the ranks.
    pub workers: Vec<Box<dyn WorkerConnector>>,
}

impl Halves {
    /// The same, with every call recorded.
    #[must_use]
    pub fn traced(self, engine: &str, trace: &Trace) -> Self {
        let worker = |(rank, inner)| -> Box<dyn WorkerConnector> {
            Box::new(TracedWorker {
                inner,
                trace: trace.clone(),
                engine: engine.into(),
                rank,
            })
        };
        Self {
            scheduler: Box::new(TracedScheduler {
                inner: self.scheduler,
                trace: trace.clone(),
                engine: engine.into(),
            }),
            workers: (0..).zip(self.workers).map(worker).collect(),
        }
    }
}

/// Halves may be in processes of their own: what passes between them is the same after its way as bytes.
fn check_sent<T>(what: &'static str, value: &T) -> Result<(), Violation>
where
    T: Serialize + DeserializeOwned + PartialEq,
{
    let unsent = |reason| Violation::Unsent { what, reason };
    let bytes = rmp_serde::to_vec_named(value).map_err(|error| unsent(error.to_string()))?;
    match rmp_serde::from_slice::<T>(&bytes) {
        Ok(same) if same == *value => Ok(()),
        Ok(_) => Err(unsent("it arrives as another one".to_owned())),
        Err(error) => Err(unsent(error.to_string())),
    }
}

enum Stage {
    Queued(StepPlan),
    /// Ticks until its forward is over.
    Forward(u32),
    Done(Vec<Option<u32>>),
}

struct InFlight {
    number: u64,
    work: Vec<Work>,
    stage: Stage,
}

/// An engine.
pub struct SimEngine {
    config: EngineConfig,
    model: Model,
    scheduler: Scheduler,
    connector: Box<dyn SchedulerConnector>,
    workers: Vec<Box<dyn WorkerConnector>>,
    memory: Vec<RankMemory>,
    runner: Runner,
    audit: Audit,
    in_flight: VecDeque<InFlight>,
    /// Per rank: reports with the first step whose output they come with.
    reports: Vec<VecDeque<(u64, WorkerReport)>>,
    /// Ranks that have reported what others have not: received and sent.
    reported: [BTreeMap<RequestId, BTreeSet<u32>>; 2],
    aggregator: Aggregator,
    rng: Rng,
    tick: u64,
    progress: bool,
}

impl SimEngine {
    /// Makes an engine and gives the workers their ranks' blocks.
    ///
    /// # Errors
    /// [`SimError::Config`], [`SimError::Memory`], [`SimError::Register`].
    pub fn new(config: EngineConfig, model: &Model, halves: Halves) -> Result<Self, SimError> {
        config.check(model)?;
        let Halves {
            scheduler: connector,
            mut workers,
        } = halves;
        if workers.len() != config.ranks as usize {
            let reason = format!("{} worker halves for {} ranks", workers.len(), config.ranks);
            return Err(SimError::Config {
                field: "ranks",
                reason,
            });
        }
        let mut memory = Vec::new();
        for (rank, worker) in (0..).zip(&mut workers) {
            let blocks = RankMemory::new(&config, model, rank)?;
            let registered = worker.register(blocks.layout());
            registered.map_err(|source| SimError::Register { rank, source })?;
            memory.push(blocks);
        }
        let groups = model.groups.len() as u32;
        let reads_freed = connector.capabilities().reads_freed;
        let audit = Audit::new(reads_freed, groups, config.scheduler.blocks);
        Ok(Self {
            scheduler: Scheduler::new(&config, model),
            model: model.clone(),
            connector,
            workers,
            memory,
            runner: Runner::default(),
            audit,
            in_flight: VecDeque::new(),
            reports: vec![VecDeque::new(); config.ranks as usize],
            reported: [BTreeMap::new(), BTreeMap::new()],
            aggregator: Aggregator::new(config.ranks),
            rng: Rng::part(config.seed, "engine"),
            tick: 0,
            progress: false,
            config,
        })
    }

    fn breach(&self, violation: Violation) -> Breach {
        Breach {
            engine: self.config.name.clone(),
            tick: self.tick,
            violation,
        }
    }

    /// A request comes in.
    ///
    /// # Errors
    /// A rule that was broken.
    pub fn add(&mut self, request: NewRequest) -> Result<(), Breach> {
        let added = self.scheduler.add(self.connector.as_mut(), request);
        added.map_err(|violation| self.breach(violation))
    }

    /// A request is refused before it is admitted, as by a client that went away in front of the door.
    ///
    /// # Errors
    /// A rule that was broken.
    pub fn reject(&mut self, request: NewRequest) -> Result<(), Breach> {
        let done = self
            .scheduler
            .reject(self.connector.as_mut(), request, Finish::Aborted);
        done.map_err(|violation| self.breach(violation))
    }

    /// A client goes away; nothing if the request has ended.
    ///
    /// # Errors
    /// A rule that was broken.
    pub fn abort(&mut self, id: &RequestId) -> Result<(), Breach> {
        let done = self.scheduler.abort(self.connector.as_mut(), id);
        done.map_err(|violation| self.breach(violation))
    }

    /// One tick. True if anything happened: a token was computed or is being computed, a load or a
    /// send was reported, a request ended.
    ///
    /// # Errors
    /// The first rule that was broken.
    pub fn step(&mut self) -> Result<bool, Breach> {
        self.tick += 1;
        self.progress = false;
        let done = self.tick_once();
        done.map_err(|violation| self.breach(violation))?;
        Ok(self.progress)
    }

    fn tick_once(&mut self) -> Result<(), Violation> {
        self.run_forward(true)?;
        let lag = usize::from(self.config.scheduler.asynchronous);
        if self.in_flight.len() <= lag {
            let step = self.scheduler.schedule(self.connector.as_mut())?;
            check_sent("a plan", &step.plan)?;
            self.progress |= !step.work.is_empty();
            self.in_flight.push_back(InFlight {
                number: step.number,
                work: step.work,
                stage: Stage::Queued(step.plan),
            });
            self.follow()?;
        }
        self.run_forward(false)?;
        if self.in_flight.len() > lag
            && matches!(
                self.in_flight.front(),
                Some(InFlight {
                    stage: Stage::Done(_),
                    ..
                })
            )
        {
            self.process_oldest()?;
            self.follow()?;
        }
        self.scheduler.check()
    }

    /// Follows with the audit what the scheduler did to blocks.
    fn follow(&mut self) -> Result<(), Violation> {
        let events = self.scheduler.take_events();
        let step = self.scheduler.counts().steps;
        let pools = self.scheduler.kv().pools();
        let is_cached = |group: u32, block| pools[group as usize].content(block).is_some();
        self.audit.follow(events, step, &self.memory, is_cached)
    }

    /// Starts the next forward if none is under way; goes on with one that is, once a tick.
    fn run_forward(&mut self, go_on: bool) -> Result<(), Violation> {
        let is_open = |step: &InFlight| !matches!(step.stage, Stage::Done(_));
        let Some(place) = self.in_flight.iter().position(is_open) else {
            return Ok(());
        };
        let step = &mut self.in_flight[place];
        let ticks = match &mut step.stage {
            Stage::Queued(plan) => {
                for worker in &mut self.workers {
                    worker.release_blocks(plan);
                }
                self.audit.released(step.number, &self.memory)?;
                for worker in &mut self.workers {
                    worker.begin_step(plan.clone());
                }
                self.audit.before_forward(step.number, &self.memory)?;
                let (least, most) = self.config.forward_ticks;
                if step.work.is_empty() {
                    0
                } else {
                    self.rng.between(least, most)
                }
            }
            Stage::Forward(ticks) if go_on => ticks.saturating_sub(1),
            Stage::Forward(_) | Stage::Done(_) => return Ok(()),
        };
        self.progress |= !step.work.is_empty();
        if ticks > 0 {
            step.stage = Stage::Forward(ticks);
            return Ok(());
        }
        let tokens = self.runner.compute(&self.model, &self.memory, &step.work)?;
        step.stage = Stage::Done(tokens);
        let number = step.number;
        for worker in &mut self.workers {
            worker.end_step();
        }
        let pools = self.scheduler.kv().pools();
        let is_cached = |group: u32, block| pools[group as usize].content(block).is_some();
        self.audit.after_forward(number, &self.memory, is_cached)?;
        self.take_reports(number)
    }

    fn take_reports(&mut self, step: u64) -> Result<(), Violation> {
        for (rank, worker) in (0..).zip(&mut self.workers) {
            let report = worker.take_report()?;
            let received = report.received.iter().map(|received| &received.request);
            for (kind, ids) in [
                (Kind::Received, received.collect::<Vec<_>>()),
                (Kind::Sent, report.sent.iter().collect()),
            ] {
                for id in ids {
                    let ranks = self.reported[kind as usize].entry(id.clone()).or_default();
                    if !ranks.insert(rank) {
                        return Err(Violation::ReportedTwice {
                            rank,
                            request: id.clone(),
                            kind,
                        });
                    }
                    if ranks.len() == self.config.ranks as usize {
                        self.reported[kind as usize].remove(id);
                    }
                }
            }
            if report.is_empty() {
                continue;
            }
            self.progress = true;
            check_sent("a report", &report)?;
            let delay = u64::from(self.rng.between(0, self.config.report_delay));
            let queue = &mut self.reports[rank as usize];
            // A rank's reports arrive in their order.
            let last = queue.back().map_or(0, |&(due, _)| due);
            queue.push_back((last.max(step + delay), report));
        }
        Ok(())
    }

    fn process_oldest(&mut self) -> Result<(), Violation> {
        let Some(InFlight {
            number,
            work,
            stage: Stage::Done(tokens),
        }) = self.in_flight.pop_front()
        else {
            return Ok(());
        };
        let mut due = Vec::new();
        for (rank, queue) in (0..).zip(&mut self.reports) {
            while let Some((_, report)) = queue.pop_front_if(|&mut (due, _)| due <= number) {
                due.push((rank, report));
            }
        }
        self.progress |= !due.is_empty();
        let report = self.aggregator.take(due);
        let output: Vec<_> = work.into_iter().zip(tokens).collect();
        self.scheduler
            .process(self.connector.as_mut(), &output, &report)?;
        let (scheduler, in_flight) = (&self.scheduler, &self.in_flight);
        self.runner.keep(|id| {
            let under_way = || {
                in_flight
                    .iter()
                    .any(|step| step.work.iter().any(|w| w.id == *id))
            };
            scheduler.state(id).is_some() || under_way()
        });
        Ok(())
    }

    /// Requests that ended since the last call.
    pub fn take_outputs(&mut self) -> Vec<Output> {
        self.scheduler.take_outputs()
    }

    /// Whether nothing is left to be done: no request, no block held, no report under way, and
    /// nothing that the connector waits for.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.scheduler.live() == 0
            && self.scheduler.held() == 0
            && self.in_flight.iter().all(|step| step.work.is_empty())
            && self.reports.iter().all(VecDeque::is_empty)
            && !self.connector.has_pending_work()
    }

    /// Asks the connector to end, steps until it has nothing pending or the time is over, and ends the
    /// workers.
    ///
    /// # Errors
    /// A rule that was broken.
    pub fn shutdown(&mut self, within: Duration) -> Result<(), Breach> {
        let deadline = Instant::now() + within;
        self.connector.begin_shutdown();
        while !self.is_idle() && Instant::now() < deadline {
            if !self.step()? {
                // As an engine core does while it holds blocks: leases end on other threads.
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        for worker in &mut self.workers {
            worker.shutdown(deadline.saturating_duration_since(Instant::now()));
        }
        Ok(())
    }

    /// Whether everything is back where it was at the start, and every cached and free block holds
    /// what it should.
    ///
    /// # Errors
    /// The first rule that was broken.
    pub fn check_end(&self) -> Result<(), Breach> {
        self.check_left()
            .map_err(|violation| self.breach(violation))
    }

    fn check_left(&self) -> Result<(), Violation> {
        self.scheduler.check_end()?;
        let mut left = Vec::new();
        if self.aggregator.incomplete() > 0 {
            left.push(format!(
                "{} reports miss some ranks",
                self.aggregator.incomplete()
            ));
        }
        if self.connector.has_pending_work() {
            left.push("the connector has pending work".into());
        }
        if !left.is_empty() {
            return Err(Violation::Leftover {
                left: left.join(", "),
            });
        }
        self.audit.check_end(&self.memory)?;
        for (group, pool) in (0..).zip(self.scheduler.kv().pools()) {
            for (block, chain) in pool.cached() {
                for rank in &self.memory {
                    rank.verify_block("a cached block", group, block, chain)?;
                }
            }
        }
        Ok(())
    }

    /// What an engine is that makes no progress.
    #[must_use]
    pub fn stuck(&self) -> Breach {
        let parked = self.scheduler.parked().count();
        self.breach(Violation::Stuck {
            waiting: self.scheduler.live(),
            parked,
            held: self.scheduler.held(),
            pending: self.connector.has_pending_work(),
        })
    }

    /// The scheduler, to look at.
    #[must_use]
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// The scheduler half, for calls that a scheduler would not make.
    pub fn connector(&mut self) -> &mut dyn SchedulerConnector {
        self.connector.as_mut()
    }

    /// The ranks' blocks.
    #[must_use]
    pub fn memory(&self) -> &[RankMemory] {
        &self.memory
    }

    /// What it is like.
    #[must_use]
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Ticks since the start.
    #[must_use]
    pub fn ticks(&self) -> u64 {
        self.tick
    }
}

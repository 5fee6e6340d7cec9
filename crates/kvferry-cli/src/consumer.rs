//! The consumer: finds a producer, reads and verifies its requests, and judges the run.
//!
//! Invariant: a request counts only if every byte of it was verified and the producer has confirmed
//! that its lease was live when the read had ended.

mod answers;
mod clock;
mod slot;
mod tally;
mod verify;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crossbeam::channel::Receiver;
use kvferry_connector::directory::fetch;
use kvferry_engine::fabric::NativeReads;
use kvferry_engine::{
    CounterSnapshot, Engine, EngineConfig, Lane, LaneChoice, Peer, RemoteTable, Table,
};
use kvferry_wire::{
    DEMO_CHANNEL, DemoPlan, DemoReply, DemoRequest, DemoSummary, Description, EngineId,
    LEASE_CHANNEL, Rank,
};

use self::answers::{Answer, DemoAnswers, LeaseAnswers, Router};
use self::clock::ReadClock;
use self::slot::Slot;
use self::tally::Tally;
pub(crate) use self::tally::Totals;
use crate::blocks::{Blocks, FreeIds, Shape};
use crate::error::CliError;
use crate::fault::{Fault, Faults};
use crate::memory;
use crate::progress::Progress;
use crate::report::{Facts, Report};
use crate::running::RunningEngine;
use crate::say;
use crate::share::bytes_to_read;

/// Requests that are read at the same time.
const IN_FLIGHT: u32 = 4;

/// Blocks that are never read into. They must be poison at the end as they were at the beginning.
const GUARDS: u32 = 4;

/// Time for the directory, and for each answer of the producer that takes it no work.
const PATIENCE: Duration = Duration::from_secs(10);

/// Time that the region gets to end.
const ENDING: Duration = Duration::from_secs(5);

/// What to read, and how.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    /// The producer's directory.
    pub(crate) address: String,
    pub(crate) lane: LaneChoice,
    pub(crate) fault: Option<Fault>,
}

/// What a consumer holds.
pub(crate) const fn shape(plan: &DemoPlan) -> Shape {
    Shape {
        layers: plan.layers,
        // At most 65,536 times 4, and 4.
        count: plan.blocks.saturating_mul(IN_FLIGHT).saturating_add(GUARDS),
        block_bytes: plan.block_bytes,
    }
}

/// Reads and verifies everything that the producer at the address has.
pub(crate) fn run(options: &Options) -> Result<Report, CliError> {
    let (router, control) = Router::new(IN_FLIGHT);
    let producer = find(&options.address)?;
    let engine = start(options.lane, &router)?;
    let peer = engine.connect(producer, options.lane)?;
    if peer.lane() == Lane::Native && engine.native_reads() == Some(NativeReads::Emulated) {
        say(format_args!(
            "lane native: no transport here has a real GET, so UCX emulates it (emulation was allowed)"
        ));
    }
    peer.send(
        DEMO_CHANNEL,
        DemoRequest::Begin {
            in_flight: IN_FLIGHT,
        }
        .encode()?,
    )?;
    let plan = match answer(&control, "the producer did not welcome this consumer")? {
        DemoReply::Welcome(plan) => plan,
        other => return Err(unexpected(&other)),
    };
    memory::check("reading the producer's requests", shape(&plan).bytes())
        .map_err(|error| CliError::Producer(format!("has more than fits here: {error}")))?;
    let run = Run::prepare(engine, peer, router, control, plan)?;
    run.execute(options)
}

fn start(lane: LaneChoice, router: &Arc<Router>) -> Result<RunningEngine, CliError> {
    let mut suffix = [0; 4];
    getrandom::fill(&mut suffix).map_err(CliError::Random)?;
    let id = EngineId::new(format!("pull-{:08x}", u32::from_le_bytes(suffix)))?;
    let mut config = EngineConfig::new(id);
    // Only where it was asked for by name: the automatic choice never emulates.
    config.allow_emulation = lane == LaneChoice::Pinned(Lane::Native);
    let engine = Engine::builder(config)
        .service(DEMO_CHANNEL, Box::new(DemoAnswers::new(Arc::clone(router))))
        .service(
            LEASE_CHANNEL,
            Box::new(LeaseAnswers::new(Arc::clone(router))),
        )
        .start()?;
    Ok(RunningEngine::new(engine))
}

fn find(address: &str) -> Result<Description, CliError> {
    let rank = Rank::default();
    let mut listing = fetch(address, Some(&[rank]), PATIENCE)?;
    listing
        .entries
        .remove(&rank)
        .ok_or_else(|| CliError::Producer(format!("at {address} has not published rank {rank}")))
}

/// Waits for an answer that concerns the whole run.
fn answer(control: &Receiver<Answer>, late: &'static str) -> Result<DemoReply, CliError> {
    match control.recv_timeout(PATIENCE) {
        Ok(Answer::Demo(reply)) => Ok(reply),
        Ok(Answer::Gone) => Err(CliError::Producer("is gone".to_owned())),
        Ok(Answer::Unreadable(reason)) => Err(CliError::Producer(format!(
            "sent what cannot be read: {reason}"
        ))),
        Ok(Answer::Released { .. }) | Err(_) => Err(CliError::Late {
            what: late,
            waited: PATIENCE,
        }),
    }
}

fn unexpected(reply: &DemoReply) -> CliError {
    CliError::Producer(match reply {
        DemoReply::Refused { reason } => format!("refused: {reason}"),
        other => format!("answered something else than was asked: {other:?}"),
    })
}

/// A run that has a producer, a plan and memory.
struct Run {
    engine: RunningEngine,
    peer: Peer,
    router: Arc<Router>,
    control: Receiver<Answer>,
    plan: DemoPlan,
    blocks: Blocks,
    tables: Vec<(Table, RemoteTable)>,
    free: FreeIds,
    guards: Vec<u32>,
    /// The engine's counters before the first request.
    before: CounterSnapshot,
}

impl Run {
    fn prepare(
        engine: RunningEngine,
        peer: Peer,
        router: Arc<Router>,
        control: Receiver<Answer>,
        plan: DemoPlan,
    ) -> Result<Self, CliError> {
        let blocks = Blocks::new(&engine, shape(&plan))?;
        let tables = pair_tables(&blocks, &peer)?;
        // Another order than the producer's.
        let mut free = FreeIds::scattered(blocks.shape().count, !plan.seed);
        let guards = free.take(GUARDS).unwrap_or_default();
        for &id in &guards {
            blocks.poison(id)?;
        }
        Ok(Self {
            before: engine.counters(),
            engine,
            peer,
            router,
            control,
            plan,
            blocks,
            tables,
            free,
            guards,
        })
    }

    fn execute(self, options: &Options) -> Result<Report, CliError> {
        let tally = Tally::default();
        let clock = ReadClock::default();
        let progress = Progress::new(bytes_to_read(&self.plan));
        let shared = slot::Shared {
            peer: &self.peer,
            incarnation: self.engine.incarnation(),
            plan: &self.plan,
            blocks: &self.blocks,
            tables: &self.tables,
            free: Mutex::new(self.free),
            faults: Faults::new(options.fault),
            tally: &tally,
            clock: &clock,
            progress: &progress,
        };
        std::thread::scope(|scope| {
            for (number, answers) in self.router.slots().iter().enumerate() {
                let slot = Slot::new(&shared, number as u64, answers);
                scope.spawn(move || slot.run());
            }
        });
        progress.finish();
        verify::check_guards(&self.blocks, &self.guards, &tally);

        let summary = summary(&self.peer, &self.control);
        let (lane, transports) = (self.peer.lane(), self.peer.transports().to_owned());
        let producer_ucx = self.peer.description().ucx;
        let after = self.engine.counters();
        // The memory goes back before the engine ends, so that whatever still uses it shows.
        if let Err(error) = self.blocks.close(ENDING) {
            tally.fail(error.to_string());
        }
        let quarantined = self.engine.counters().quarantined_bytes;
        let mut report = Report::new(Facts {
            plan: &self.plan,
            lane,
            transports,
            emulated: self.engine.native_reads() == Some(NativeReads::Emulated),
            ucx: self.engine.ucx_version(),
            producer_ucx,
            reading: clock.elapsed(),
            totals: tally.take(),
            before: self.before,
            after,
            quarantined_bytes: quarantined,
            summary,
        });
        if let Err(error) = self.engine.shutdown() {
            report.fail(error.to_string());
        }
        Ok(report)
    }
}

/// The producer's view of the run, or why there is none.
fn summary(peer: &Peer, control: &Receiver<Answer>) -> Result<DemoSummary, CliError> {
    if let Some(reason) = peer.gone() {
        return Err(CliError::Producer(format!("is gone: {reason}")));
    }
    // Refusals of single questions were told to everybody, and to this queue too.
    while control.try_recv().is_ok() {}
    peer.send(DEMO_CHANNEL, DemoRequest::Finish.encode()?)?;
    match answer(control, "the producer did not sum up the run")? {
        DemoReply::Summary(summary) => Ok(summary),
        other => Err(unexpected(&other)),
    }
}

/// Pairs our tables with the producer's, by layer.
fn pair_tables(blocks: &Blocks, peer: &Peer) -> Result<Vec<(Table, RemoteTable)>, CliError> {
    let mut theirs: Vec<RemoteTable> = peer.tables().collect();
    theirs.sort_unstable_by_key(|table| table.description().layer);
    let (ours, layers) = (blocks.tables(), theirs.len());
    if layers != ours.len() {
        return Err(CliError::Producer(format!(
            "describes {layers} tables, but its requests have {} layers",
            ours.len()
        )));
    }
    Ok(ours.iter().cloned().zip(theirs).collect())
}

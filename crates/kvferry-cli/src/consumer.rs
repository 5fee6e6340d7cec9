//! The consumer: an engine that has its prompts computed by a producer, and the router between the two.
//!
//! Invariant: a request counts only if its tokens are those that the model gives without any transfer,
//! after the scheduler has compared every byte that was loaded for it.

mod answers;
mod run;
mod worker;

use std::time::Duration;

use crossbeam::channel::{Receiver, unbounded};
use kvferry_connector::directory::fetch;
use kvferry_engine::fabric::NativeReads;
use kvferry_engine::{Lane, LaneChoice};
use kvferry_sim::Role;
use kvferry_wire::{DEMO_CHANNEL, DemoPlan, DemoReply, DemoRequest, Description, EngineId, Rank};

use self::answers::{Answer, Answers};
use self::run::Run;
use self::worker::{Seen, Watched};
use crate::error::CliError;
use crate::fault::Fault;
use crate::half::{Half, Setup, bytes_of};
use crate::memory;
use crate::report::Report;
use crate::say;

/// Requests that are under way at the same time.
const IN_FLIGHT: u32 = 4;

/// Tokens that the consumer generates for each.
const GENERATED: u32 = 2;

/// Time for the directory, and for each answer of the producer that takes it no work.
const PATIENCE: Duration = Duration::from_secs(10);

/// What to read, and how.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    /// The producer's directory.
    pub(crate) address: String,
    pub(crate) lane: LaneChoice,
    pub(crate) fault: Option<Fault>,
}

/// Blocks of a consumer's pool: those of its requests with what they generate, of two more whose
/// content is kept for the requests that follow them, and the null block.
pub(crate) const fn blocks(plan: &DemoPlan) -> u32 {
    // At most 65,537 times 6, and 1.
    plan.blocks.saturating_add(1).saturating_mul(IN_FLIGHT + 2) + 1
}

/// Has everything computed that the producer at the address offers, loads it and reports.
pub(crate) fn run(options: &Options) -> Result<Report, CliError> {
    let producer = find(&options.address)?;
    let (told, answers) = unbounded();
    let half = Half::start(Setup {
        id: id()?,
        role: Role::Decode,
        lane: options.lane,
        // Only where it was asked for by name: the automatic choice never emulates.
        allow_emulation: options.lane == LaneChoice::Pinned(Lane::Native),
        listen: (String::new(), 0),
        service: Box::new(Answers(told)),
    })?;
    let engine = half.engine().clone();
    let peer = engine.connect(producer, options.lane)?;
    if peer.lane() == Lane::Native && engine.native_reads() == Some(NativeReads::Emulated) {
        say(format_args!(
            "lane native: no transport here has a real GET, so UCX emulates it (emulation was allowed)"
        ));
    }
    let begin = DemoRequest::Begin {
        in_flight: IN_FLIGHT,
    };
    peer.send(DEMO_CHANNEL, begin.encode()?)?;
    let plan = match answer(&answers, "the producer did not welcome this consumer")? {
        DemoReply::Welcome(plan) => plan,
        other => return Err(unexpected(&other)),
    };
    memory::check(
        "reading the producer's requests",
        bytes_of(&plan, blocks(&plan)),
    )
    .map_err(|error| CliError::Producer(format!("has more than fits here: {error}")))?;
    let seen = Seen::default();
    let (to_worker, fault) = (seen.clone(), options.fault);
    let scheduler = Box::new(half.scheduler()?);
    let sim = half.with_blocks(&plan, blocks(&plan), scheduler, |worker| {
        Box::new(Watched::new(worker, to_worker, fault))
    })?;
    Run::new(plan, sim, engine, peer, answers, seen, options.fault).execute()
}

fn id() -> Result<EngineId, CliError> {
    let mut suffix = [0; 4];
    getrandom::fill(&mut suffix).map_err(CliError::Random)?;
    Ok(EngineId::new(format!(
        "pull-{:08x}",
        u32::from_le_bytes(suffix)
    ))?)
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
fn answer(answers: &Receiver<Answer>, late: &'static str) -> Result<DemoReply, CliError> {
    match answers.recv_timeout(PATIENCE) {
        Ok(Answer::Reply(reply)) => Ok(reply),
        Ok(Answer::Gone) => Err(CliError::Producer("is gone".to_owned())),
        Ok(Answer::Unreadable(reason)) => Err(unreadable(&reason)),
        Err(_) => Err(CliError::Late {
            what: late.to_owned(),
            waited: PATIENCE,
        }),
    }
}

fn unreadable(reason: &str) -> CliError {
    CliError::Producer(format!("sent what cannot be read: {reason}"))
}

fn unexpected(reply: &DemoReply) -> CliError {
    CliError::Producer(match reply {
        DemoReply::Refused { reason } => format!("refused: {reason}"),
        other => format!("answered something else than was asked: {other:?}"),
    })
}

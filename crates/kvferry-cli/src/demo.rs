//! `kvferry demo`: a producer in a process of its own and a consumer in this one.

use std::process::ExitCode;
use std::time::Duration;

use kvferry_engine::{Lane, LaneChoice};

use crate::args::DemoArgs;
use crate::child::ProducerProcess;
use crate::consumer::{self, Options};
use crate::error::CliError;
use crate::half::bytes_of;
use crate::{memory, producer};

/// Time for the producer to start, and to end.
const PATIENCE: Duration = Duration::from_secs(30);

/// Runs both sides once and reports.
pub(crate) fn run(args: &DemoArgs) -> Result<ExitCode, CliError> {
    let plan = args.plan.plan()?;
    let blocks = producer::blocks(&plan).checked_add(consumer::blocks(&plan));
    let bytes = blocks.and_then(|blocks| bytes_of(&plan, blocks));
    memory::check("the demo's two pools", bytes)?;

    let mut options = args.plan.as_options();
    if args.read.lane == LaneChoice::Pinned(Lane::Native) {
        options.push("--allow-emulation".to_owned());
    }
    let producer = ProducerProcess::start(&options, PATIENCE)?;
    let outcome = consumer::run(&Options {
        address: producer.address().to_owned(),
        lane: args.read.lane,
        fault: args.read.fault,
    });
    let ended = producer.finish(PATIENCE);
    let mut report = outcome?;
    if let Err(error) = ended {
        report.fail(error.to_string());
    }
    let good = report.print(args.read.json)?;
    Ok(ExitCode::from(u8::from(!good)))
}

//! `kvferry bench`: how fast blocks move, beside what else moves bytes on this machine.
//!
//! Responsible for measuring: two processes, warm-up, repetitions of all contenders by turns, every byte checked, and
//! ratios within one run. Not for moving: what is measured are the engine's own calls.

mod args;
mod case;
mod contender;
mod copies;
mod driver;
mod engine;
mod holder;
mod plot;
mod read;
mod row;
mod socket;

use std::process::ExitCode;

pub(crate) use args::BenchArgs;
use args::BenchCommand;

use crate::error::CliError;

/// Runs one benchmark and prints its rows.
pub(crate) fn run(args: &BenchArgs) -> Result<ExitCode, CliError> {
    match &args.command {
        BenchCommand::Read(args) => read::run(args),
        BenchCommand::Hold(args) => holder::run(args),
    }
}

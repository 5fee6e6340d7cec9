//! `kvferry pull`: a consumer of a producer that somebody else runs.

use std::process::ExitCode;

use crate::args::PullArgs;
use crate::consumer::{self, Options};
use crate::error::CliError;

/// Reads everything once and reports.
pub(crate) fn run(args: &PullArgs) -> Result<ExitCode, CliError> {
    let report = consumer::run(&Options {
        address: args.address.clone(),
        lane: args.read.lane,
        fault: args.read.fault,
    })?;
    let good = report.print(args.read.json)?;
    Ok(ExitCode::from(u8::from(!good)))
}

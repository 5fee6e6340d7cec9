//! `kvferry sim`: a seeded run of the reference scheduler over the real connectors.

use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use kvferry_sim::{Carrier, Connectors, Faults, Options, RealFactory, Report};

use crate::args::{SimArgs, SimConnector};
use crate::error::CliError;
use crate::say;

/// Time to look for a smaller run that breaks a rule.
const SHRINKING: Duration = Duration::from_secs(120);

/// Runs of each size: threads are behind the connectors, so not every run breaks what one has broken.
const TRIES: u32 = 3;

/// Runs what the command line asks for; status 1 if a rule was broken, with the command that shows it
/// again, and one that shows it with fewer requests.
pub(crate) fn run(args: &SimArgs) -> Result<ExitCode, CliError> {
    let options = Options {
        requests: args.requests,
        seed: args.seed,
        faults: args.faults.into(),
        keeps_last: false,
        ..Options::default()
    };
    let report = play(args, &options)?;
    print(&report, args)?;
    let Some(violation) = &report.violation else {
        return Ok(ExitCode::SUCCESS);
    };
    say(format_args!("violated: {violation}"));
    say(format_args!("again with: {}", replay(args, args.requests)));
    let until = Instant::now() + SHRINKING;
    let fewest = kvferry_sim::fewest_requests(args.requests, TRIES, |requests| {
        let fewer = Options {
            requests,
            ..options.clone()
        };
        let broken = |report: Report| report.violation.is_some();
        Instant::now() < until && play(args, &fewer).is_ok_and(broken)
    });
    say(format_args!("smaller: {}", replay(args, fewest)));
    Ok(ExitCode::FAILURE)
}

/// One run, with connectors of its own.
fn play(args: &SimArgs, options: &Options) -> Result<Report, CliError> {
    let files = tempfile::tempdir().map_err(CliError::system("making a directory for files"))?;
    let path = files.path().to_owned();
    let connectors = match args.connector {
        SimConnector::Remote => Connectors::Remote,
        SimConnector::Storage => Connectors::Storage(path),
        SimConnector::Multi => Connectors::Multi(path),
    };
    let carrier: Carrier = args.carrier.into();
    let mut factory = RealFactory::new(connectors, carrier, options.faults, options.seed);
    Ok(kvferry_sim::run(options, &mut factory)?)
}

/// The command that shows it again.
fn replay(args: &SimArgs, requests: u32) -> String {
    let carrier: Carrier = args.carrier.into();
    let faults: Faults = args.faults.into();
    format!(
        "kvferry sim --requests {requests} --seed {} --faults {} --connector {} --carrier {}",
        args.seed,
        faults.name(),
        args.connector.name(),
        carrier.name()
    )
}

/// Writes the report to standard output.
fn print(report: &Report, args: &SimArgs) -> Result<(), CliError> {
    let text = if args.json {
        serde_json::to_string(report)
            .map(|object| object + "\n")
            .map_err(|error| CliError::system("writing JSON")(error.into()))?
    } else {
        table(report)
    };
    let mut out = std::io::stdout();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .map_err(CliError::system("writing to standard output"))
}

fn table(report: &Report) -> String {
    let total = report.total();
    let rows = [
        ("seed", report.seed.to_string()),
        ("requests", report.requests.to_string()),
        ("right tokens", report.finished.to_string()),
        ("failed", report.failed.to_string()),
        ("given up", report.aborted.to_string()),
        ("restarts", report.restarts.to_string()),
        (
            "loads",
            format!("{}, {} failed", total.loads, total.failed_loads),
        ),
        (
            "tokens",
            format!(
                "{} computed, {} cached, {} loaded",
                total.computed_tokens, total.local_tokens, total.loaded_tokens
            ),
        ),
        ("preemptions", total.preemptions.to_string()),
    ];
    let rows: String = rows
        .iter()
        .map(|(name, value)| format!("{name:<16}  {value}\n"))
        .collect();
    let verdict = report.violation.as_deref().unwrap_or("every rule held");
    format!("{rows}{verdict}\n")
}

//! `kvferry sim`: a seeded run of the reference scheduler over the real connectors.

use std::process::ExitCode;

use kvferry_sim::{Carrier, Connectors, Options, RealFactory, Report};

use crate::args::{SimArgs, SimConnector};
use crate::error::CliError;
use crate::say;

/// Runs what the command line asks for; status 1 if a rule was broken, with the command that shows it
/// again.
pub(crate) fn run(args: &SimArgs) -> Result<ExitCode, CliError> {
    let options = Options {
        requests: args.requests,
        seed: args.seed,
        faults: args.faults.into(),
        ..Options::default()
    };
    let directory = match args.connector {
        SimConnector::Remote => None,
        SimConnector::Storage | SimConnector::Multi => {
            let made = tempfile::tempdir();
            Some(made.map_err(|error| CliError::Sim(format!("no directory for files: {error}")))?)
        }
    };
    let path = || {
        let path = directory.as_ref().map(|directory| directory.path());
        path.unwrap_or_else(|| std::path::Path::new("")).to_owned()
    };
    let connectors = match args.connector {
        SimConnector::Remote => Connectors::Remote,
        SimConnector::Storage => Connectors::Storage(path()),
        SimConnector::Multi => Connectors::Multi(path()),
    };
    let carrier: Carrier = args.carrier.into();
    let mut factory = RealFactory::new(connectors, carrier, options.faults, options.seed);
    let report = kvferry_sim::run(&options, &mut factory)
        .map_err(|error| CliError::Sim(error.to_string()))?;
    print(&report, args)?;
    match &report.violation {
        None => Ok(ExitCode::SUCCESS),
        Some(violation) => {
            say(format_args!("violated: {violation}"));
            say(format_args!(
                "again with: {}",
                replay(args, &options, carrier)
            ));
            Ok(ExitCode::FAILURE)
        }
    }
}

fn replay(args: &SimArgs, options: &Options, carrier: Carrier) -> String {
    format!(
        "kvferry sim --requests {} --seed {} --faults {} --connector {} --carrier {}",
        args.requests,
        args.seed,
        options.faults.name(),
        args.connector.name(),
        carrier.name()
    )
}

fn print(report: &Report, args: &SimArgs) -> Result<(), CliError> {
    if args.json {
        let json = serde_json::to_string(report)
            .map_err(|error| CliError::Sim(format!("the report cannot be written: {error}")))?;
        println!("{json}");
        return Ok(());
    }
    let total = report.total();
    println!("seed              {}", report.seed);
    println!("requests          {}", report.requests);
    println!("right tokens      {}", report.finished);
    println!("failed            {}", report.failed);
    println!("given up          {}", report.aborted);
    println!("restarts          {}", report.restarts);
    println!(
        "loads             {}, {} failed",
        total.loads, total.failed_loads
    );
    println!(
        "tokens            {} computed, {} cached, {} loaded",
        total.computed_tokens, total.local_tokens, total.loaded_tokens
    );
    println!("preemptions       {}", total.preemptions);
    let verdict = report.violation.as_deref().unwrap_or("every rule held");
    println!("{verdict}");
    Ok(())
}

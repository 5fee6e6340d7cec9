//! The `kvferry` program: `demo`, `serve`, `pull`, `sim` and `bench`.
//!
//! Responsible for the command line, for a producer and a consumer with the reference scheduler and
//! `RemotePrefill` in them, for the router between the two, and for judging and reporting what
//! happened. Not responsible for moving anything: that is the connector's.
//!
//! Invariant: the exit status is 0 only if every byte that was to be read was read and verified,
//! nothing is held at the end, and the lane carried all of it. It is 2 for a bad command line, which
//! includes sizes for which there is no memory, and 1 for everything else.

mod args;
mod bench;
mod child;
mod consumer;
mod demo;
mod error;
mod fault;
mod half;
mod memory;
mod producer;
mod progress;
mod prompts;
mod pull;
mod report;
mod serve;
mod sim;

use std::ffi::OsString;
use std::fmt;
use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use tracing_subscriber::EnvFilter;

use crate::args::{Cli, Command};
use crate::error::CliError;

/// Which lines of the log are wanted, in the syntax of `tracing`'s filters; `warn` if unset.
const LOG_VARIABLE: &str = "KVFERRY_LOG";

/// Runs the program with its arguments, the first of which is its name, and returns its exit
/// status. The demo starts this very program a second time, so a test harness that calls this must
/// do so before anything else when its first argument is a subcommand.
pub fn run(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are such errors too, and go to standard output.
            let _ = error.print();
            return ExitCode::from(u8::from(error.use_stderr()) * 2);
        }
    };
    let outcome = start_log().and_then(|()| match cli.command {
        Command::Demo(args) => demo::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Pull(args) => pull::run(&args),
        Command::Sim(args) => sim::run(&args),
        Command::Bench(args) => bench::run(&args),
    });
    match outcome {
        Ok(code) => code,
        Err(error) => {
            say(format_args!("error: {error}"));
            ExitCode::from(error.exit_status())
        }
    }
}

/// Prints a line for people to standard error. If nobody reads that any more, the run goes on.
fn say(line: fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

fn start_log() -> Result<(), CliError> {
    let filter = match std::env::var(LOG_VARIABLE) {
        Ok(text) => EnvFilter::try_new(&text).map_err(|error| {
            CliError::Usage(format!(
                "{LOG_VARIABLE} is {text:?}: {error}; give a level such as info, or target=level"
            ))
        })?,
        Err(_) => EnvFilter::new("warn"),
    };
    // Whoever calls this as a library may have a subscriber already, which then stays.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .try_init();
    Ok(())
}

//! `kvferry serve`: a producer until somebody interrupts it.

use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use crossbeam::channel::{Receiver, Sender, unbounded};
use crossbeam::select;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::iterator::Signals;

use crate::args::ServeArgs;
use crate::child::{Ready, say_line, wait_for_end_of_input};
use crate::error::CliError;
use crate::half::bytes_of;
use crate::memory;
use crate::producer::{self, Producer};
use crate::say;

/// How long an interrupted producer waits for leases that consumers hold.
const DRAIN: Duration = Duration::from_secs(10);

/// Why to stop.
#[derive(Clone, Copy, Debug)]
enum Stop {
    /// Somebody interrupted: those who read may finish.
    Signal,
    /// The demo that started this process has ended, and nobody reads.
    InputEnded,
}

/// Serves until it is told to stop, and shuts down in order.
pub(crate) fn run(args: &ServeArgs) -> Result<ExitCode, CliError> {
    let plan = args.plan.plan()?;
    let pool = bytes_of(&plan, producer::blocks(&plan));
    memory::check("the producer's pool", pool)?;
    let stops = watch(args.machine)?;
    let producer = Producer::start(&plan, &args.listen, args.allow_emulation)?;
    announce(args, &producer)?;
    let within = select! {
        recv(stops) -> stop => match stop {
            Ok(Stop::Signal) if !args.machine => {
                say(format_args!("shutting down; once more ends at once"));
                DRAIN
            }
            // A terminal interrupts the demo together with its producer.
            Ok(Stop::Signal | Stop::InputEnded) | Err(_) => Duration::ZERO,
        },
        recv(producer.end()) -> end => {
            return Err(end.ok().and_then(|end| end.failure).unwrap_or_else(|| {
                CliError::Producer("has ended by itself".to_owned())
            }));
        }
    };
    let end = producer.stop(within)?;
    if let Some(failure) = end.failure {
        return Err(failure);
    }
    if end.revoked > 0 {
        say(format_args!(
            "leases that were still held and have been revoked: {}",
            end.revoked
        ));
    }
    Ok(ExitCode::SUCCESS)
}

/// Says where the producer is.
fn announce(args: &ServeArgs, producer: &Producer) -> Result<(), CliError> {
    let address = producer.address();
    if args.machine {
        let address = address.to_string();
        return say_line(&Ready { address });
    }
    if producer.emulates() {
        say(format_args!("emulated one-sided reads are allowed"));
    }
    if let Some(version) = producer.ucx_version() {
        say(format_args!(
            "UCX {version}; read with: kvferry pull {address}"
        ));
    }
    let mut out = std::io::stdout();
    writeln!(out, "serving at {address}")
        .and_then(|()| out.flush())
        .map_err(CliError::system("writing to standard output"))
}

/// Watches for signals and, for the demo, for the end of standard input.
fn watch(input: bool) -> Result<Receiver<Stop>, CliError> {
    let (sender, receiver) = unbounded();
    let failed = CliError::system;
    let again = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // In this order: the first signal arms the second.
        flag::register_conditional_shutdown(signal, 1, Arc::clone(&again))
            .and_then(|_| flag::register(signal, Arc::clone(&again)))
            .map_err(failed("watching for signals"))?;
    }
    let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(failed("watching for signals"))?;
    let on_signal = sender.clone();
    spawn("kvf-signals", move || {
        for _ in signals.forever() {
            tell(&on_signal, Stop::Signal);
        }
    })?;
    if input {
        spawn("kvf-input", move || {
            wait_for_end_of_input();
            tell(&sender, Stop::InputEnded);
        })?;
    }
    Ok(receiver)
}

fn tell(to: &Sender<Stop>, stop: Stop) {
    // Once it shuts down, nobody listens.
    let _ = to.send(stop);
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), CliError> {
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(work)
        .map(drop)
        .map_err(CliError::system("starting a thread"))
}

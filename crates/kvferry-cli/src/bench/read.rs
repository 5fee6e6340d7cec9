//! `kvferry bench read`.

use std::io::Write;
use std::process::ExitCode;

use kvferry_engine::{Lane, LaneChoice};

use super::args::{Peer, ReadArgs};
use super::case::Case;
use super::contender::{Contender, Turn};
use super::copies::Copies;
use super::driver::Driver;
use super::engine::Reads;
use super::holder::Holder;
use super::plot;
use super::row::{Means, Row, compare, shown_bytes, table};
use super::socket::Socket;
use crate::error::CliError;
use crate::say;

/// A contender of a case, and what it has done.
struct Measured {
    contender: Box<dyn Contender>,
    turns: Vec<Turn>,
}

pub(crate) fn run(args: &ReadArgs) -> Result<ExitCode, CliError> {
    let cases = args.cases()?;
    let mut rows = Vec::new();
    for case in &cases {
        say(format_args!(
            "{} blocks of {}, {}",
            case.moved_blocks(),
            shown_bytes(case.block_bytes),
            case.pattern
        ));
        rows.extend(measure(args, case)?);
    }
    print(args, &rows)?;
    if let Some(path) = &args.plot {
        plot::draw(path, &rows)?;
    }
    let wrong: u64 = rows.iter().map(|row| row.wrong_blocks).sum();
    if wrong > 0 {
        say(format_args!("blocks with wrong bytes: {wrong}"));
    }
    Ok(ExitCode::from(u8::from(wrong > 0)))
}

fn measure(args: &ReadArgs, case: &Case) -> Result<Vec<Row>, CliError> {
    let emulates = args.lane.contains(&LaneChoice::Pinned(Lane::Native));
    let holder = Holder::start(case, emulates)?;
    let mut all = start(args, case, &holder)?;
    // By turns: what slows this machine down slows all of them down. The first turn is not counted.
    for repetition in 0..=args.repetitions {
        for measured in &mut all {
            let turn = measured.contender.turn()?;
            if repetition > 0 {
                measured.turns.push(turn);
            }
        }
    }
    let means = Means {
        workers: args.workers,
        queue_depth: args.queue_depth,
    };
    let mut rows = Vec::with_capacity(all.len());
    for Measured { contender, turns } in all {
        let who = (contender.name(), contender.lane());
        rows.push(Row::of(who, case, means, contender.bytes(), &turns));
        contender.end()?;
    }
    holder.finish()?;
    compare(&mut rows);
    Ok(rows)
}

fn start(args: &ReadArgs, case: &Case, holder: &Holder) -> Result<Vec<Measured>, CliError> {
    let (workers, depth) = (args.workers.into(), args.queue_depth.into());
    let mut all: Vec<Box<dyn Contender>> = Vec::new();
    for &lane in &args.lane {
        all.push(Box::new(Reads::start(*case, holder, lane, workers, depth)?));
    }
    for &peer in &args.compare {
        let driver = |program, variables| Driver::start(*case, peer, program, variables, args);
        all.push(match peer {
            Peer::Memcpy => Box::new(Copies::start(*case, workers)?),
            Peer::Socket => Box::new(Socket::start(*case, holder)?),
            Peer::Ucx => Box::new(driver("ucx_driver.py", &[])?),
            Peer::Nixl => Box::new(driver("nixl_driver.py", &[])?),
            Peer::NixlTcp => Box::new(driver("nixl_driver.py", &[("UCX_TLS", "tcp")])?),
            Peer::Mooncake => Box::new(driver("mooncake_driver.py", &[])?),
        });
    }
    let fresh = |contender| Measured {
        contender,
        turns: Vec::new(),
    };
    Ok(all.into_iter().map(fresh).collect())
}

fn print(args: &ReadArgs, rows: &[Row]) -> Result<(), CliError> {
    let text = if args.json {
        let json = serde_json::to_string_pretty(rows)
            .map_err(|error| CliError::system("writing JSON")(error.into()))?;
        json + "\n"
    } else {
        table(rows)
    };
    std::io::stdout()
        .write_all(text.as_bytes())
        .map_err(CliError::system("writing to standard output"))
}

//! Other engines: a program per engine (`benches/peers/`) that moves the same blocks between two processes of its own.
//!
//! All processes of a driver stand still while others have their turn: NIXL's threads spin also when nothing moves.
//!
//! It reads one line of JSON per question and prints one per answer. The first question is the case; each later one asks
//! for a turn. Its standard error is ours.

use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use tempfile::NamedTempFile;

use super::args::{Peer, ReadArgs};
use super::case::Case;
use super::contender::{Contender, Turn};
use crate::child::LineProcess;
use crate::error::CliError;

/// No answer takes longer.
const PATIENCE: Duration = Duration::from_secs(300);

/// The first question.
#[derive(Serialize)]
struct Wanted<'a> {
    block_bytes: u64,
    blocks: u32,
    layers: u32,
    pattern: String,
    workers: u16,
    queue_depth: u16,
    /// A file with pairs of block ids, little-endian `u32`: ours, the other process's.
    pairs: &'a Path,
}

/// Its answer.
#[derive(Deserialize)]
struct Started {
    /// How bytes move, in its own words.
    lane: String,
    /// Bytes of a turn.
    bytes: u64,
}

#[derive(Serialize)]
struct Again {
    turn: u64,
}

/// What a turn came to.
#[derive(Deserialize)]
struct Moved {
    seconds: f64,
    operations: u64,
    wrong: u64,
}

pub(crate) struct Driver {
    peer: Peer,
    process: LineProcess,
    started: Started,
    turns: u64,
    /// Read once, when the process starts.
    _pairs: NamedTempFile,
}

impl Driver {
    /// Starts the program of this name with these variables.
    pub(crate) fn start(
        case: Case,
        peer: Peer,
        program: &str,
        variables: &[(&str, &str)],
        args: &ReadArgs,
    ) -> Result<Self, CliError> {
        let failed = || CliError::system("writing a file of block ids");
        let mut pairs = NamedTempFile::new().map_err(failed())?;
        let ids: Vec<u8> = case
            .pairs()
            .iter()
            .flat_map(|pair| [pair.local, pair.remote])
            .flat_map(u32::to_le_bytes)
            .collect();
        pairs.write_all(&ids).map_err(failed())?;
        let mut command = Command::new(&args.python);
        command
            .arg(args.peers.join(program))
            .envs(variables.iter().copied());
        let mut process = LineProcess::start_group(command, peer.name())?;
        let started = process.ask(
            &Wanted {
                block_bytes: case.block_bytes,
                blocks: case.blocks,
                layers: case.layers,
                pattern: case.pattern.to_string(),
                workers: args.workers,
                queue_depth: args.queue_depth,
                pairs: pairs.path(),
            },
            PATIENCE,
        )?;
        process.signal(Signal::STOP);
        Ok(Self {
            peer,
            process,
            started,
            turns: 0,
            _pairs: pairs,
        })
    }
}

impl Contender for Driver {
    fn name(&self) -> &str {
        self.peer.name()
    }

    fn lane(&self) -> String {
        self.started.lane.clone()
    }

    fn bytes(&self) -> u64 {
        self.started.bytes
    }

    fn turn(&mut self) -> Result<Turn, CliError> {
        self.turns += 1;
        self.process.signal(Signal::CONT);
        let moved: Moved = self.process.ask(&Again { turn: self.turns }, PATIENCE)?;
        self.process.signal(Signal::STOP);
        let time = Duration::try_from_secs_f64(moved.seconds)
            .map_err(|_| CliError::Usage(format!("a turn of {} seconds", moved.seconds)))?;
        Ok(Turn {
            time,
            operations: moved.operations,
            wrong: moved.wrong,
        })
    }

    fn end(mut self: Box<Self>) -> Result<(), CliError> {
        self.process.signal(Signal::CONT);
        self.process.finish(PATIENCE)
    }
}

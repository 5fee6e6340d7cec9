//! The process that is read: blocks behind an engine, and behind a plain socket.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::ExitCode;
use std::time::Duration;

use kvferry_engine::{Engine, EngineConfig, HostPool};
use kvferry_wire::EngineId;
use serde::{Deserialize, Serialize};

use super::args::HoldArgs;
use super::case::{Case, Pattern};
use super::socket::PIECE;
use crate::child::{LineProcess, say_line, this_program, wait_for_end_of_input};
use crate::error::CliError;

/// Time for the process to start and to fill its blocks, and to end.
const PATIENCE: Duration = Duration::from_secs(120);

/// The line that it prints when it can be read.
#[derive(Debug, Serialize, Deserialize)]
struct Held {
    /// What its engine says of itself, as hexadecimal digits.
    description: String,
    /// Where the socket listens.
    socket: String,
}

/// The process, as whoever reads it sees it.
pub(crate) struct Holder {
    process: LineProcess,
    /// What its engine says of itself.
    pub(crate) description: Vec<u8>,
    /// Where the socket listens.
    pub(crate) socket: String,
}

impl Holder {
    /// Starts it with the blocks of a case.
    pub(crate) fn start(case: &Case, allow_emulation: bool) -> Result<Self, CliError> {
        let mut command = this_program()?;
        command.args(["bench", "hold"]).args(case.as_options());
        if allow_emulation {
            command.arg("--allow-emulation");
        }
        let process = LineProcess::start(command, "holding")?;
        let held: Held = process.answer(PATIENCE)?;
        let description = unhex(&held.description).ok_or_else(|| {
            CliError::Producer("described itself in no hexadecimal digits".to_owned())
        })?;
        Ok(Self {
            process,
            description,
            socket: held.socket,
        })
    }

    pub(crate) fn finish(mut self) -> Result<(), CliError> {
        self.process.finish(PATIENCE)
    }
}

/// `kvferry bench hold`: until standard input ends.
pub(crate) fn run(args: &HoldArgs) -> Result<ExitCode, CliError> {
    let case = Case {
        block_bytes: args.block_bytes,
        blocks: args.blocks,
        layers: args.layers,
        pattern: Pattern::Sequential,
        seed: 0,
    };
    let mut config = EngineConfig::new(EngineId::new("bench-holder")?);
    config.allow_emulation = args.allow_emulation;
    let engine = Engine::builder(config).start()?;
    let memory = HostPool::new(case.bytes() as usize)?.region()?;
    case.fill(&memory)?;
    let region = engine.register(&memory)?;
    let _tables = case.tables(&engine, &region)?;
    let listener = TcpListener::bind("127.0.0.1:0").map_err(CliError::system("listening"))?;
    let socket = listener
        .local_addr()
        .map_err(CliError::system("listening"))?
        .to_string();
    std::thread::Builder::new()
        .name("kvf-socket".to_owned())
        .spawn(move || send_all(&listener, case))
        .map_err(CliError::system("starting a thread"))?;
    say_line(&Held {
        description: hex(&engine.describe()?.encode()?),
        socket,
    })?;
    wait_for_end_of_input();
    drop(region);
    engine.shutdown(Duration::from_secs(5))?;
    Ok(ExitCode::SUCCESS)
}

/// Sends the blocks in order to whoever connects, once for each byte that comes.
fn send_all(listener: &TcpListener, case: Case) {
    for stream in listener.incoming().flatten() {
        // Whoever reads has gone away.
        let _ = send(stream, case);
    }
}

fn send(mut stream: TcpStream, case: Case) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    // Of its own, so that nothing but the socket is measured.
    let mut bytes = vec![0; case.bytes() as usize];
    let places =
        (0..case.layers).flat_map(|layer| (0..case.blocks).map(move |block| (layer, block)));
    for ((layer, block), place) in places.zip(bytes.chunks_exact_mut(case.block_bytes as usize)) {
        case.content(layer, block, place);
    }
    let mut asked = [0];
    while stream.read(&mut asked)? == 1 {
        for piece in bytes.chunks(PIECE) {
            stream.write_all(piece)?;
        }
    }
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u32>> = text.chars().map(|digit| digit.to_digit(16)).collect();
    let digits = digits?;
    let pairs = digits.chunks_exact(2);
    pairs
        .remainder()
        .is_empty()
        .then(|| pairs.map(|pair| (pair[0] << 4 | pair[1]) as u8).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hexadecimal_digits_are_read_back() {
        let bytes: Vec<u8> = (0..=255).collect();
        assert_eq!(unhex(&hex(&bytes)), Some(bytes));
        assert_eq!((unhex("0g"), unhex("012")), (None, None));
    }
}

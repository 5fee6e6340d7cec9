//! A plain TCP connection: what the system's own way to another process gives, without any layout.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::case::Case;
use super::contender::{Contender, Turn};
use super::holder::Holder;
use crate::error::CliError;

/// Bytes of a write and of a read.
pub(crate) const PIECE: usize = 256 << 10;

/// No turn takes longer.
const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) struct Socket {
    case: Case,
    stream: TcpStream,
    bytes: Vec<u8>,
    expected: Vec<u8>,
}

impl Socket {
    pub(crate) fn start(case: Case, holder: &Holder) -> Result<Self, CliError> {
        let failed = || CliError::system("connecting the socket");
        let stream = TcpStream::connect(&holder.socket).map_err(failed())?;
        stream.set_nodelay(true).map_err(failed())?;
        stream.set_read_timeout(Some(PATIENCE)).map_err(failed())?;
        Ok(Self {
            case,
            stream,
            bytes: vec![0; case.bytes() as usize],
            expected: vec![0; case.block_bytes as usize],
        })
    }
}

impl Contender for Socket {
    fn name(&self) -> &str {
        "socket"
    }

    fn lane(&self) -> String {
        "tcp, in order".to_owned()
    }

    fn bytes(&self) -> u64 {
        self.case.bytes()
    }

    fn turn(&mut self) -> Result<Turn, CliError> {
        self.bytes.fill(0);
        let failed = || CliError::system("reading the socket");
        let begun = Instant::now();
        self.stream.write_all(&[1]).map_err(failed())?;
        let mut operations = 0;
        for piece in self.bytes.chunks_mut(PIECE) {
            self.stream.read_exact(piece).map_err(failed())?;
            operations += 1;
        }
        let time = begun.elapsed();
        let case = self.case;
        let places =
            (0..case.layers).flat_map(|layer| (0..case.blocks).map(move |block| (layer, block)));
        let mut wrong = 0;
        for ((layer, block), found) in
            places.zip(self.bytes.chunks_exact(case.block_bytes as usize))
        {
            case.content(layer, block, &mut self.expected);
            wrong += u64::from(found != self.expected);
        }
        Ok(Turn {
            time,
            operations,
            wrong,
        })
    }

    fn end(self: Box<Self>) -> Result<(), CliError> {
        Ok(())
    }
}

//! memcpy: the same blocks within this process, which no transfer can beat for long.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use kvferry_engine::{BlockPair, HostPool, MemoryRegion};

use super::case::Case;
use super::contender::{Contender, Turn};
use crate::error::CliError;

pub(crate) struct Copies {
    case: Case,
    pairs: Vec<BlockPair>,
    from: MemoryRegion,
    to: MemoryRegion,
    threads: usize,
}

impl Copies {
    pub(crate) fn start(case: Case, threads: usize) -> Result<Self, CliError> {
        let bytes = case.bytes() as usize;
        let (from, to) = (
            HostPool::new(bytes)?.region()?,
            HostPool::new(bytes)?.region()?,
        );
        case.fill(&from)?;
        Ok(Self {
            case,
            pairs: case.pairs(),
            from,
            to,
            threads,
        })
    }

    /// Copies blocks, each in every layer, and says when it began and ended.
    fn copy(&self, pairs: &[BlockPair], start: &Barrier) -> Result<(Instant, Instant), CliError> {
        start.wait();
        let begun = Instant::now();
        for layer in 0..self.case.layers {
            for pair in pairs {
                let (there, here) = (
                    self.case.offset(layer, pair.remote),
                    self.case.offset(layer, pair.local),
                );
                MemoryRegion::copy(&self.from, there, &self.to, here, self.case.block_bytes)?;
            }
        }
        Ok((begun, Instant::now()))
    }
}

impl Contender for Copies {
    fn name(&self) -> &str {
        "memcpy"
    }

    fn lane(&self) -> String {
        match self.threads {
            1 => "1 thread".to_owned(),
            threads => format!("{threads} threads"),
        }
    }

    fn bytes(&self) -> u64 {
        self.case.bytes()
    }

    fn turn(&mut self) -> Result<Turn, CliError> {
        self.case.poison(&self.to)?;
        let start = Barrier::new(self.threads);
        let share = self.pairs.len().div_ceil(self.threads).max(1);
        let mut parts: Vec<&[BlockPair]> = self.pairs.chunks(share).collect();
        parts.resize(self.threads, &[]);
        let this = &*self;
        let times = std::thread::scope(|scope| {
            let threads: Vec<_> = parts
                .iter()
                .map(|part| scope.spawn(|| this.copy(part, &start)))
                .collect();
            let joined = threads.into_iter().map(|thread| {
                let failed = || CliError::system("copying")(std::io::Error::other("a panic"));
                thread.join().map_err(|_| failed())?
            });
            joined.collect::<Result<Vec<_>, CliError>>()
        })?;
        let begun = times.iter().map(|(begun, _)| *begun).min();
        let ended = times.iter().map(|(_, ended)| *ended).max();
        let time = ended.zip(begun).map(|(ended, begun)| ended - begun);
        Ok(Turn {
            time: time.unwrap_or(Duration::ZERO),
            operations: self.case.moved_blocks(),
            wrong: self.case.wrong(&self.to, &self.pairs)?,
        })
    }

    fn end(self: Box<Self>) -> Result<(), CliError> {
        Ok(())
    }
}

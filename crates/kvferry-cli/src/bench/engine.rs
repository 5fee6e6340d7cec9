//! kvferry: the engine's own reads, on one lane.

use std::time::{Duration, Instant};

use kvferry_engine::{
    BlockPair, Engine, EngineConfig, HostPool, Lane, LaneChoice, MemoryRegion, Peer, Region,
    RemoteTable, Table, Transfer,
};
use kvferry_wire::{Description, EngineId};

use super::case::Case;
use super::contender::{Contender, Turn};
use super::holder::Holder;
use crate::error::CliError;

/// No turn takes longer.
const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) struct Reads {
    case: Case,
    pairs: Vec<BlockPair>,
    queue_depth: usize,
    engine: Engine,
    memory: MemoryRegion,
    region: Region,
    peer: Peer,
    tables: Vec<(Table, RemoteTable)>,
}

impl Reads {
    pub(crate) fn start(
        case: Case,
        holder: &Holder,
        lane: LaneChoice,
        workers: usize,
        queue_depth: usize,
    ) -> Result<Self, CliError> {
        // One engine per lane: for their peer, an id that comes again is the old one's next life.
        let mut config = EngineConfig::new(EngineId::new(format!("bench-reader-{lane:?}"))?);
        config.copy_threads = workers;
        config.allow_emulation = lane == LaneChoice::Pinned(Lane::Native);
        config.transfer_timeout = PATIENCE;
        let engine = Engine::builder(config).start()?;
        let memory = HostPool::new(case.bytes() as usize)?.region()?;
        case.poison(&memory)?;
        let region = engine.register(&memory)?;
        let ours = case.tables(&engine, &region)?;
        let peer = engine.connect(Description::decode(&holder.description)?, lane)?;
        let theirs = peer.tables();
        if theirs.len() != ours.len() {
            let (there, here) = (theirs.len(), ours.len());
            let what = format!("has {there} tables, and {here} are to be read");
            return Err(CliError::Producer(what));
        }
        let tables = ours.into_iter().zip(theirs).collect();
        Ok(Self {
            case,
            pairs: case.pairs(),
            queue_depth,
            engine,
            memory,
            region,
            peer,
            tables,
        })
    }
}

impl Contender for Reads {
    fn name(&self) -> &str {
        "kvferry"
    }

    fn lane(&self) -> String {
        self.peer.lane().to_string()
    }

    fn bytes(&self) -> u64 {
        self.case.bytes()
    }

    fn turn(&mut self) -> Result<Turn, CliError> {
        self.case.poison(&self.memory)?;
        let share = self.pairs.len().div_ceil(self.queue_depth).max(1);
        let begun = Instant::now();
        let transfers = self
            .pairs
            .chunks(share)
            .map(|pairs| self.peer.read(&self.tables, pairs))
            .collect::<Result<Vec<Transfer>, _>>()?;
        let mut operations = 0;
        for transfer in transfers {
            let late = || CliError::Late {
                what: "a read was not over".to_owned(),
                waited: PATIENCE,
            };
            operations += transfer.wait(PATIENCE).ok_or_else(late)??.operations;
        }
        let time = begun.elapsed();
        Ok(Turn {
            time,
            operations,
            wrong: self.case.wrong(&self.memory, &self.pairs)?,
        })
    }

    fn end(self: Box<Self>) -> Result<(), CliError> {
        self.peer.disconnect();
        drop(self.region);
        Ok(self.engine.shutdown(Duration::from_secs(5))?)
    }
}

//! A consumer that does one thing very often, in stages, and says in between what it holds.

use std::collections::VecDeque;
use std::time::Duration;

use kvferry_engine::{
    BlockPair, Engine, HostPool, MemoryRegion, Peer, Region, RemoteTable, Table, TableSpec,
    Transfer, TransferError,
};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::resources::Resources;
use super::{Layout, Packed, SHUTDOWN, assert_generation, config, connect};
use crate::harness::{PATIENCE, requests, say};
use crate::pattern::wrong_bytes;
use crate::random::Random;

/// What is done over and over.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Work {
    /// Small reads, many at once; each 61st is cancelled.
    Transfers,
    /// A new pool is registered, described by a table and deregistered; each 8th is read into first.
    Registrations,
    /// Connect, read, disconnect.
    Connections,
    /// An engine starts, connects, reads and is shut down.
    Lives,
}

/// What to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Churn {
    /// With whom.
    pub from: Packed,
    /// Over which lane.
    pub lane: String,
    /// The producer's blocks.
    pub layout: Layout,
    /// What.
    pub work: Work,
    /// How often in each stage.
    pub per_stage: u64,
}

/// What a stage did.
#[derive(Debug, Deserialize)]
pub struct Stage {
    /// Reads that succeeded, every byte checked.
    pub read: u64,
    /// Reads that were cancelled in time.
    pub cancelled: u64,
    /// Things done: transfers, registrations, connections or lives.
    pub done: u64,
    /// The lane that was used.
    pub lane: String,
}

/// Blocks of one read, per layer.
const BLOCKS: u32 = 4;
/// Reads in flight at once.
const WINDOW: u32 = 64;
/// One read of so many is cancelled.
const CANCEL_EACH: u64 = 61;
/// One registration of so many is read into.
const READ_EACH: u64 = 8;

/// Room for `reads` reads, in one region.
struct Room {
    memory: MemoryRegion,
    region: Region,
    tables: Vec<Table>,
}

impl Room {
    fn new(engine: &Engine, from: Layout, reads: u32) -> Self {
        let blocks = reads * BLOCKS;
        let (memory, region, tables) = Layout { blocks, ..from }.make(engine);
        Self {
            memory,
            region,
            tables,
        }
    }
}

struct Reading {
    place: u32,
    pairs: Vec<BlockPair>,
    transfer: Transfer,
    cancelled: bool,
}

struct Consumer<'a> {
    churn: &'a Churn,
    read: u64,
    cancelled: u64,
    lane: String,
    random: Random,
}

pub(super) fn run(churn: &Churn) {
    let mut consumer = Consumer {
        churn,
        read: 0,
        cancelled: 0,
        lane: String::new(),
        random: Random::new(1),
    };
    match churn.work {
        Work::Transfers => consumer.transfers(),
        Work::Registrations => consumer.registrations(),
        Work::Connections => consumer.connections(),
        Work::Lives => consumer.lives(),
    }
}

fn start() -> Engine {
    let engine = Engine::builder(config("consumer")).start().unwrap();
    assert_generation(&engine);
    engine
}

impl Consumer<'_> {
    fn transfers(&mut self) {
        let engine = start();
        let room = Room::new(&engine, self.churn.layout, WINDOW);
        let peer = self.connect(&engine);
        let tables = both(&room, &peer);
        self.stages(|consumer, count| {
            let mut readings = VecDeque::new();
            for number in 0..count {
                if readings.len() == WINDOW as usize {
                    consumer.finish(&room, readings.pop_front().unwrap());
                }
                let place = (number % u64::from(WINDOW)) as u32;
                let cancel = number % CANCEL_EACH == 0;
                readings.push_back(consumer.begin(&peer, &tables, place, cancel));
            }
            for reading in readings {
                consumer.finish(&room, reading);
            }
        });
        assert_eq!(engine.counters().quarantined_bytes, 0);
        engine.shutdown(SHUTDOWN).unwrap();
    }

    fn registrations(&mut self) {
        let engine = start();
        let peer = self.connect(&engine);
        self.stages(|consumer, count| {
            for number in 0..count {
                let room = Room::new(&engine, consumer.churn.layout, 1);
                if number % READ_EACH == 0 {
                    consumer.read_once(&room, &peer);
                }
                drop(room.tables);
                room.region.deregister(PATIENCE).unwrap();
            }
        });
        assert_eq!(engine.counters().quarantined_regions, 0);
        engine.shutdown(SHUTDOWN).unwrap();
    }

    fn connections(&mut self) {
        let engine = start();
        let room = Room::new(&engine, self.churn.layout, 1);
        self.stages(|consumer, count| {
            for _ in 0..count {
                let peer = consumer.connect(&engine);
                consumer.read_once(&room, &peer);
                peer.disconnect();
            }
        });
        engine.shutdown(SHUTDOWN).unwrap();
    }

    fn lives(&mut self) {
        self.stages(|consumer, count| {
            for _ in 0..count {
                let engine = start();
                let room = Room::new(&engine, consumer.churn.layout, 1);
                let peer = consumer.connect(&engine);
                consumer.read_once(&room, &peer);
                engine.shutdown(SHUTDOWN).unwrap();
            }
        });
    }

    /// A stage for each request for one, and what came of it.
    fn stages(&mut self, mut stage: impl FnMut(&mut Self, u64)) {
        for request in requests() {
            if request == "resources" {
                say(&json!(Resources::now()));
                continue;
            }
            (self.read, self.cancelled) = (0, 0);
            stage(self, self.churn.per_stage);
            say(&json!({
                "read": self.read,
                "cancelled": self.cancelled,
                "done": self.churn.per_stage,
                "lane": self.lane,
            }));
        }
    }

    fn connect(&mut self, engine: &Engine) -> Peer {
        let peer = connect(engine, &self.churn.from, &self.churn.lane);
        self.lane = peer.lane().name().to_owned();
        peer
    }

    /// Reads random blocks of the producer into place number `place`.
    fn begin(
        &mut self,
        peer: &Peer,
        tables: &[(Table, RemoteTable)],
        place: u32,
        cancelled: bool,
    ) -> Reading {
        let pairs: Vec<BlockPair> = (0..BLOCKS)
            .map(|block| {
                let remote = self.random.below(self.churn.layout.blocks as usize);
                BlockPair::new(place * BLOCKS + block, remote as u32)
            })
            .collect();
        let transfer = peer.read(tables, &pairs).unwrap();
        if cancelled {
            transfer.cancel();
        }
        Reading {
            place,
            pairs,
            transfer,
            cancelled,
        }
    }

    /// Waits for a read and compares all that it read.
    fn finish(&mut self, room: &Room, reading: Reading) {
        match reading.transfer.wait(PATIENCE).unwrap() {
            Err(TransferError::Cancelled) if reading.cancelled => {
                self.cancelled += 1;
                return;
            }
            outcome => drop(outcome.unwrap()),
        }
        for table in &room.tables {
            for pair in &reading.pairs {
                let wrong = wrong_bytes(table, &room.memory, pair.local, Some(pair.remote));
                assert_eq!(wrong, 0, "place {}, {pair:?}", reading.place);
            }
        }
        self.read += 1;
    }

    fn read_once(&mut self, room: &Room, peer: &Peer) {
        let reading = self.begin(peer, &both(room, peer), 0, false);
        self.finish(room, reading);
    }
}

fn both(room: &Room, peer: &Peer) -> Vec<(Table, RemoteTable)> {
    room.tables.iter().cloned().zip(peer.tables()).collect()
}

/// Registers and deregisters a new pool, with a table, `count` times.
pub(super) fn register_often(engine: &Engine, count: u64) {
    for _ in 0..count {
        let pool = HostPool::new(64 << 10).unwrap();
        let region = engine.register(&pool.region().unwrap()).unwrap();
        let table = engine.add_table(&region, TableSpec::dense(4096, 16));
        drop(table.unwrap());
        region.deregister(Duration::from_secs(10)).unwrap();
    }
}

//! What a case is made of: engines with short limits, destinations, reads in flight, messages heard.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvferry_engine::{
    BlockPair, Engine, EngineConfig, FaultControl, FaultFabric, HostPool, LoopbackFabric,
    MemoryRegion, PeerId, Region, Replies, Sender, Service, Table, TableSpec, Transfer, UcxFabric,
    UcxOptions,
};

use crate::support::*;

pub(super) const BLOCK: u64 = 1500;
/// Blocks of a destination region; no two reads of a case share one.
pub(super) const BLOCKS: u32 = 512;
pub(super) const SOURCES: u32 = 16;
/// Before a read, and afterwards when somebody else has the memory.
pub(super) const UNTOUCHED: u8 = 0xEE;
pub(super) const SENTINEL: u8 = 0x5A;

fn hasty(name: &str) -> EngineConfig {
    let mut config = config(name);
    config.ping_interval = Duration::from_millis(20);
    config.suspect_after = Duration::from_millis(200);
    config.dead_after = Duration::from_millis(200);
    config.connect_timeout = Duration::from_millis(200);
    config.withdraw_timeout = Duration::from_millis(200);
    config.reconnect_backoff_min = Duration::from_millis(1);
    config.reconnect_backoff_max = Duration::from_millis(20);
    config.transfer_timeout = Duration::from_millis(300);
    config.escalation_step = Duration::from_millis(50);
    config
}

pub(super) type Heard = HashMap<PeerId, Vec<(u64, u64)>>;

/// What an engine was told, by connection: whose message it is, and its number. The producer's
/// tells it back.
#[derive(Clone, Default)]
pub(super) struct Diary {
    pub(super) heard: Arc<Mutex<Heard>>,
    pub(super) echoes: bool,
}

pub(super) const CHANNEL: u16 = 7;

impl Service for Diary {
    fn on_message(&mut self, from: Sender, bytes: &[u8], replies: &mut Replies) {
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        let entry = (number(0), number(8));
        let mut heard = self.heard.lock().unwrap();
        heard.entry(from.peer).or_default().push(entry);
        if self.echoes {
            replies.send(from.peer, CHANNEL, bytes.to_vec());
        }
    }

    fn on_tick(&mut self, _: Instant, _: &mut Replies) -> Option<Instant> {
        None
    }
}

pub(super) fn faulty(kind: &Kind, name: &str, control: &FaultControl, diary: &Diary) -> Engine {
    let builder = Engine::builder(hasty(name)).service(CHANNEL, Box::new(diary.clone()));
    let control = control.clone();
    let emulating = UcxOptions {
        allow_emulation: true,
        ..UcxOptions::default()
    };
    match kind {
        Kind::Loopback(network) => {
            let network = network.clone();
            builder
                .start_on(move || FaultFabric::new(LoopbackFabric::new(&network, 512)?, &control))
        }
        Kind::Ucx => {
            builder.start_on(move || FaultFabric::new(UcxFabric::new(&emulating)?, &control))
        }
    }
    .unwrap()
}

/// A registered destination and how much of it has been given to reads.
pub(super) struct Destination {
    pub(super) memory: MemoryRegion,
    pub(super) region: Option<Region>,
    pub(super) table: Table,
    pub(super) used: u32,
}

impl Destination {
    pub(super) fn new(engine: &Engine) -> Self {
        let pool = HostPool::new((BLOCK * u64::from(BLOCKS)) as usize).unwrap();
        let memory = pool.region().unwrap();
        memory.fill(0, memory.bytes(), UNTOUCHED).unwrap();
        let region = engine.register(&memory).unwrap();
        let table = engine
            .add_table(&region, TableSpec::dense(BLOCK, BLOCKS))
            .unwrap();
        Self {
            memory,
            region: Some(region),
            table,
            used: 0,
        }
    }
}

pub(super) struct Flight {
    pub(super) transfer: Transfer,
    pub(super) started: Instant,
    pub(super) timeout: Duration,
    pub(super) memory: MemoryRegion,
    pub(super) pairs: Vec<BlockPair>,
    /// It has quiesced, was looked at, and its memory has a new owner.
    pub(super) over: bool,
}

impl Flight {
    pub(super) fn blocks(&self) -> impl Iterator<Item = (BlockPair, Vec<u8>)> + '_ {
        self.pairs.iter().map(|&pair| {
            let mut bytes = vec![0; BLOCK as usize];
            let at = u64::from(pair.local) * BLOCK;
            self.memory.read_at(at, &mut bytes).unwrap();
            (pair, bytes)
        })
    }

    pub(super) fn is_right(&self) -> bool {
        self.blocks().all(|(pair, bytes)| {
            let expected = (0..BLOCK).map(|byte| pattern(0, pair.remote, byte));
            bytes.into_iter().eq(expected)
        })
    }
}

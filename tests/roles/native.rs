//! A consumer that is told step by step what to do, so that the parent can do things to the producer or
//! the network in between.

use std::time::Duration;

use kvferry_engine::{BlockPair, Engine, HostPool, Peer, Transfer};
use rustix::process::{Resource, Rlimit, setrlimit};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{Layout, Packed, SHUTDOWN, assert_generation, config};
use crate::harness::{PATIENCE, requests, say};
use crate::pattern::{POISON, wrong_bytes};

/// Whom to read from.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reader {
    /// The producer.
    pub from: Packed,
    /// Which lane.
    pub lane: String,
    /// The blocks; the producer has the same.
    pub layout: Layout,
}

/// How connecting went.
#[derive(Debug, Deserialize)]
pub struct Connected {
    /// Why it failed; empty for success.
    pub error: String,
    /// The lane that was taken.
    pub lane: String,
    /// What carries messages and data.
    pub transports: String,
}

/// How a read ended.
#[derive(Debug, Deserialize)]
pub struct Ended {
    /// Why it failed; empty for success.
    pub error: String,
    /// Bytes read.
    pub bytes: u64,
    /// Block operations.
    pub operations: u64,
    /// Bytes that are not the producer's, of all destinations.
    pub wrong_bytes: u64,
    /// Bytes over the native lane since the start.
    pub native_bytes: u64,
    /// Bytes over the served lane since the start.
    pub served_bytes: u64,
    /// Bytes in quarantine now.
    pub quarantined_bytes: u64,
}

/// What a new owner of the memory writes into it.
const SENTINEL: u8 = 0x5e;

struct State<'a> {
    engine: &'a Engine,
    layout: Layout,
    memory: kvferry_engine::MemoryRegion,
    tables: Vec<kvferry_engine::Table>,
    peer: Option<Peer>,
    transfer: Option<Transfer>,
}

pub(super) fn run(reader: &Reader) {
    let engine = Engine::builder(config("consumer")).start().unwrap();
    assert_generation(&engine);
    let (memory, region, tables) = reader.layout.make(&engine);
    let mut state = State {
        engine: &engine,
        layout: reader.layout,
        memory,
        tables,
        peer: None,
        transfer: None,
    };
    state.connect(&reader.from, &reader.lane);
    for request in requests() {
        match request.split_once(' ').unwrap_or((&request, "")) {
            ("connect", "") => state.connect(&reader.from, &reader.lane),
            ("connect", other) => {
                let other: Packed = serde_json::from_str(other).unwrap();
                state.connect(&other, &reader.lane);
            }
            ("reconnect", _) => {
                state.peer.take().unwrap().disconnect();
                state.connect(&reader.from, &reader.lane);
            }
            ("start", milliseconds) => {
                state.start(Duration::from_millis(milliseconds.parse().unwrap()));
                say(&json!({}));
            }
            ("operations", _) => {
                let posted = engine.counters().ucx_operations;
                let sent = engine.counters().messages_sent;
                say(&json!(posted - sent.min(posted)));
            }
            ("cancel", _) => {
                state.transfer.as_ref().unwrap().cancel();
                say(&json!({}));
            }
            ("finish", _) => state.finish(),
            ("own", _) => {
                let bytes = state.memory.bytes();
                state.memory.fill(0, bytes, SENTINEL).unwrap();
                say(&json!({}));
            }
            ("foreign", _) => {
                let mut bytes = vec![0; state.memory.bytes() as usize];
                state.memory.read_at(0, &mut bytes).unwrap();
                say(&json!(
                    bytes.iter().filter(|byte| **byte != SENTINEL).count()
                ));
            }
            (other, _) => panic!("no request {other:?}"),
        }
    }
    drop(state);
    region.deregister(SHUTDOWN).unwrap();
    engine.shutdown(SHUTDOWN).unwrap();
}

impl State<'_> {
    fn connect(&mut self, to: &Packed, lane: &str) {
        match self.engine.connect(to.unpack(), lane.parse().unwrap()) {
            Ok(peer) => {
                say(&json!({
                    "error": "",
                    "lane": peer.lane().name(),
                    "transports": peer.transports(),
                }));
                self.peer = Some(peer);
            }
            Err(error) => {
                say(&json!({ "error": error.to_string(), "lane": "", "transports": "" }));
            }
        }
    }

    /// Block `n` of the producer into block `n` here, backwards, so that no two become one run.
    fn start(&mut self, timeout: Duration) {
        self.memory.fill(0, self.memory.bytes(), POISON).unwrap();
        let pairs: Vec<BlockPair> = (0..self.layout.blocks)
            .rev()
            .map(|id| BlockPair::new(id, id))
            .collect();
        let peer = self.peer.as_ref().unwrap();
        let both: Vec<_> = self.tables.iter().cloned().zip(peer.tables()).collect();
        self.transfer = Some(peer.read_within(&both, &pairs, timeout).unwrap());
    }

    fn finish(&mut self) {
        let transfer = self.transfer.take().unwrap();
        let outcome = transfer.wait(PATIENCE).expect("the transfer does not end");
        assert!(transfer.is_quiesced());
        let (error, bytes, operations) = match outcome {
            Ok(report) => (String::new(), report.bytes, report.operations),
            Err(error) => (error.to_string(), 0, 0),
        };
        let wrong: u64 = self
            .tables
            .iter()
            .flat_map(|table| (0..self.layout.blocks).map(move |block| (table, block)))
            .map(|(table, block)| wrong_bytes(table, &self.memory, block, Some(block)))
            .sum();
        let counters = self.engine.counters();
        say(&json!({
            "error": error,
            "bytes": bytes,
            "operations": operations,
            "wrong_bytes": wrong,
            "native_bytes": counters.native_bytes,
            "served_bytes": counters.served_bytes,
            "quarantined_bytes": counters.quarantined_bytes,
        }));
    }
}

/// A registration under a limit for locked memory.
#[derive(Debug, Serialize, Deserialize)]
pub struct Limited {
    /// The limit from the start on, in bytes. `None`: as much as UCX has pinned for itself once the engine
    /// runs, and one mebibyte.
    pub limit: Option<u64>,
    /// How much to register, in bytes.
    pub bytes: u64,
}

/// Registers, and says the limit and the error.
pub(super) fn register(limited: &Limited) {
    // Who has the capability is not held to the limit.
    drop_capability_to_lock();
    if let Some(limit) = limited.limit {
        limit_locked(limit);
    }
    let engine = match Engine::builder(config("limited")).start() {
        Ok(engine) => engine,
        Err(error) => {
            say(&json!((limited.limit, error.to_string())));
            return;
        }
    };
    assert_generation(&engine);
    let limit = limited.limit.unwrap_or_else(|| pinned() + (1 << 20));
    limit_locked(limit);
    let memory = HostPool::new(limited.bytes as usize).unwrap();
    let error = match engine.register(&memory.region().unwrap()) {
        Ok(_) => String::new(),
        Err(error) => error.to_string(),
    };
    say(&json!((limit, error)));
    for _ in requests() {}
    engine.shutdown(SHUTDOWN).unwrap();
}

fn limit_locked(bytes: u64) {
    let limit = Rlimit {
        current: Some(bytes),
        maximum: Some(bytes),
    };
    setrlimit(Resource::Memlock, limit).unwrap();
}

/// Bytes that are pinned for devices, in all of this process.
fn pinned() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPin:"));
    let kilobytes: u64 = line
        .unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .unwrap();
    kilobytes * 1024
}

fn drop_capability_to_lock() {
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
    let mut sets = capabilities(None).unwrap();
    sets.effective.remove(CapabilitySet::IPC_LOCK);
    sets.permitted.remove(CapabilitySet::IPC_LOCK);
    sets.inheritable.remove(CapabilitySet::IPC_LOCK);
    set_capabilities(None, sets).unwrap();
}

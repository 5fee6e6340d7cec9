//! A consumer that is told step by step what to do, with several producers at once.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use kvferry_engine::{BlockPair, Engine, HostPool, MemoryRegion, Peer, Table, TableSpec, Transfer};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{Packed, Settings, assert_generation, config};
use crate::harness::{PATIENCE, requests, say};
use crate::pattern::{POISON, wrong_bytes};

/// What the reader's own blocks are like: those of the producers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Reader {
    /// Its engine id.
    pub name: String,
    /// Blocks.
    pub blocks: u32,
    /// Bytes per block.
    pub block_bytes: u64,
    /// What is not as usual.
    pub settings: Settings,
}

/// What a reader is told.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Order {
    /// Connect to a producer.
    Connect {
        /// What it is called from now on.
        name: String,
        /// Who.
        to: Packed,
        /// Which lane.
        lane: String,
    },
    /// Begin to read all blocks of a table into a region of its own.
    Start {
        /// From whom.
        name: String,
        /// Which of the tables.
        table: usize,
        /// The deadline.
        timeout_ms: u64,
    },
    /// Send 32 MiB that nobody there waits for.
    Clog {
        /// To whom.
        name: String,
    },
    /// Wait for the end of what was started last.
    Finish {
        /// From whom.
        name: String,
    },
    /// Shut the engine down.
    Shutdown {
        /// The limit.
        limit_ms: u64,
    },
    /// Drop the engine and every handle, and wait until its threads are gone.
    Drop,
    /// Leave the process as it is.
    Exit,
}

/// What became of an order.
#[derive(Debug, PartialEq, Eq, Deserialize)]
pub struct Done {
    /// Why it failed; empty for success.
    pub error: String,
    /// How long it took.
    pub elapsed_ms: u64,
    /// Of a read: bytes that are not what they should be, after success those of the producer, after
    /// a failure those that were written after it was over.
    pub wrong_bytes: u64,
    /// Bytes and regions in quarantine.
    pub quarantined: (u64, u64),
    /// Reads that have not quiesced.
    pub open: usize,
}

struct Started {
    transfer: Transfer,
    table: Table,
    memory: MemoryRegion,
    layer: u32,
}

struct State {
    reader: Reader,
    engine: Option<Engine>,
    peers: HashMap<String, Peer>,
    reads: HashMap<String, Started>,
    regions: Vec<kvferry_engine::Region>,
}

pub(super) fn run(reader: &Reader) {
    let mut config = config(&reader.name);
    reader.settings.apply(&mut config);
    let engine = Engine::builder(config).start().unwrap();
    assert_generation(&engine);
    let ucx = engine.ucx_version().unwrap();
    say(&json!({ "ucx": (ucx.major, ucx.minor) }));
    let mut state = State {
        reader: reader.clone(),
        engine: Some(engine),
        peers: HashMap::new(),
        reads: HashMap::new(),
        regions: Vec::new(),
    };
    for request in requests() {
        let order = serde_json::from_str(&request).unwrap();
        if matches!(order, Order::Exit) {
            // As `main` returns: with everything as it is.
            std::process::exit(0);
        }
        let started = Instant::now();
        let result = state.obey(order);
        let elapsed = started.elapsed().as_millis() as u64;
        let (error, wrong_bytes) = match result {
            Ok(wrong) => (String::new(), wrong),
            Err((error, wrong)) => (error, wrong),
        };
        let counters = state.engine.as_ref().map(Engine::counters);
        let quarantined = counters.map_or((0, 0), |counters| {
            (counters.quarantined_bytes, counters.quarantined_regions)
        });
        let open = state
            .reads
            .values()
            .filter(|read| !read.transfer.is_quiesced());
        say(&json!({
            "error": error,
            "elapsed_ms": elapsed,
            "wrong_bytes": wrong_bytes,
            "quarantined": quarantined,
            "open": open.count(),
        }));
    }
}

impl State {
    fn obey(&mut self, order: Order) -> Result<u64, (String, u64)> {
        let text = |error: &dyn std::fmt::Display| (error.to_string(), 0);
        let engine = || self.engine.as_ref().unwrap();
        match order {
            Order::Connect { name, to, lane } => {
                let peer = engine().connect(to.unpack(), lane.parse().unwrap());
                self.peers.insert(name, peer.map_err(|error| text(&error))?);
                Ok(0)
            }
            Order::Start {
                name,
                table,
                timeout_ms,
            } => {
                let Reader {
                    blocks,
                    block_bytes,
                    ..
                } = self.reader;
                let pool = HostPool::new((u64::from(blocks) * block_bytes) as usize).unwrap();
                let memory = pool.region().unwrap();
                memory.fill(0, memory.bytes(), POISON).unwrap();
                let region = engine().register(&memory).unwrap();
                let spec = TableSpec::dense(block_bytes, blocks).layer(table as u32);
                let ours = engine().add_table(&region, spec).unwrap();
                let peer = &self.peers[&name];
                let theirs = peer.tables().nth(table).unwrap();
                let pairs: Vec<_> = (0..blocks)
                    .map(|n| BlockPair::new(n, blocks - 1 - n))
                    .collect();
                let limit = Duration::from_millis(timeout_ms);
                let tables = [(ours.clone(), theirs)];
                let transfer = peer.read_within(&tables, &pairs, limit);
                let started = Started {
                    transfer: transfer.map_err(|error| text(&error))?,
                    table: ours,
                    memory,
                    layer: table as u32,
                };
                self.regions.push(region);
                self.reads.insert(name, started);
                Ok(0)
            }
            Order::Clog { name } => {
                for _ in 0..32 {
                    let sent = self.peers[&name].send(9, vec![1; 1 << 20]);
                    sent.map_err(|error| text(&error))?;
                }
                Ok(0)
            }
            Order::Finish { name } => match self.reads.remove(&name) {
                Some(read) => finish(&read, self.reader.blocks),
                None => Err(("nothing was started".into(), 0)),
            },
            Order::Shutdown { limit_ms } => engine()
                .shutdown(Duration::from_millis(limit_ms))
                .map(|()| 0)
                .map_err(|error| text(&error)),
            Order::Drop => {
                self.peers.clear();
                self.regions.clear();
                self.engine = None;
                // Nobody waits for an engine that is dropped, so its thread is watched.
                let deadline = Instant::now() + PATIENCE;
                while threads()
                    .iter()
                    .any(|name| name.starts_with("kvferry-progr"))
                {
                    assert!(Instant::now() < deadline, "the progress thread goes on");
                    std::thread::sleep(Duration::from_millis(1));
                }
                Ok(0)
            }
            Order::Exit => Ok(0),
        }
    }
}

fn threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).ok();
    tasks.filter_map(|task| name(task.ok()?)).collect()
}

fn finish(read: &Started, blocks: u32) -> Result<u64, (String, u64)> {
    let outcome = read.transfer.wait(PATIENCE).unwrap();
    assert!(read.transfer.is_quiesced());
    let wrong = |source: &dyn Fn(u32) -> Option<u32>| {
        let all = (0..blocks).map(|n| wrong_bytes(&read.table, &read.memory, n, source(n)));
        all.sum::<u64>()
    };
    assert_eq!(read.table.description().layer, read.layer);
    match outcome {
        Ok(_) => Ok(wrong(&|n| Some(blocks - 1 - n))),
        Err(error) => {
            // It is over: from now on the memory is ours.
            read.memory.fill(0, read.memory.bytes(), POISON).unwrap();
            std::thread::sleep(Duration::from_millis(50));
            Err((error.to_string(), wrong(&|_| None)))
        }
    }
}

//! An engine that does what it is told, one order at a time: describe, connect, read, cancel, wait,
//! fill, check, count. For tests in which the parent decides what happens when.

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use kvferry_engine::{
    BlockPair, Engine, HostPool, LaneChoice, MemoryRegion, Peer, Region, ShareSocket, Table,
    TableSpec, Transfer, TransferError,
};
use memmap2::MmapMut;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{Layout, Packed, SHUTDOWN, assert_generation, config};
use crate::harness::{Child, Environment, PATIENCE, requests, say};
use crate::pattern::{self, POISON, wrong_bytes};

/// Where an engine's blocks lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Memory {
    /// A pool of kvferry's.
    Pool,
    /// Memory that somebody else made, as an inference engine would.
    Foreign,
}

/// An engine to start.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EngineSpec {
    /// Its id.
    pub name: String,
    /// Its blocks.
    pub layout: Layout,
    /// Where they lie.
    pub memory: Memory,
    /// Filled with the pattern, or with poison.
    pub filled: bool,
    /// Whether native reads may be emulated.
    pub emulation: bool,
    /// Whether it shares pools on this host.
    pub shares: bool,
    /// The user to run as, if it is not the parent's.
    pub user: Option<u32>,
}

impl EngineSpec {
    /// A producer with a filled pool.
    #[must_use]
    pub fn producer(layout: Layout) -> Self {
        Self {
            name: "producer".into(),
            layout,
            memory: Memory::Pool,
            filled: true,
            emulation: true,
            shares: true,
            user: None,
        }
    }

    /// A consumer with a poisoned pool.
    #[must_use]
    pub fn consumer(layout: Layout) -> Self {
        Self {
            name: "consumer".into(),
            filled: false,
            ..Self::producer(layout)
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
enum Order {
    Describe,
    Connect {
        to: Packed,
        lane: String,
        host: Option<String>,
    },
    Read {
        pairs: Vec<(u32, u32)>,
        timeout_ms: u64,
    },
    /// Cancels the last read: as soon as it has moved something, or at once.
    CancelMidway {
        patient: bool,
    },
    Wait,
    Fill(u8),
    Check(u8),
    Wrong {
        pairs: Vec<(u32, u32)>,
    },
    Count,
    Deregister {
        timeout_ms: u64,
    },
    Warnings,
}

/// How connecting went.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Connected {
    /// Why it failed; empty for success.
    pub error: String,
    /// The lane.
    pub lane: String,
    /// What carries it.
    pub transports: String,
}

/// How a read went.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Ended {
    /// Why it failed; empty for success.
    pub error: String,
    /// The kind of failure: `cancelled`, `stalled`, `lost`, `rejected`, `operation` or `other`.
    pub kind: String,
    /// Bytes read.
    pub bytes: u64,
    /// Block operations.
    pub operations: u64,
    /// Milliseconds from the order to the outcome.
    pub outcome_ms: u64,
    /// Bytes that had arrived when it was cancelled.
    pub moved: u64,
}

/// An engine in a child process, seen from the test.
pub struct EngineChild {
    /// The process.
    pub child: Child,
}

impl EngineChild {
    /// Starts one; it is ready when this returns.
    #[must_use]
    pub fn start(spec: &EngineSpec, environment: Environment<'_>) -> Self {
        Self::start_under(&[], spec, environment)
    }

    /// Starts one by another program, such as `unshare`.
    #[must_use]
    pub fn start_under(wrapper: &[&str], spec: &EngineSpec, environment: Environment<'_>) -> Self {
        let child = Child::start_under(wrapper, "engine", spec, environment);
        let ready: Value = child.hear();
        assert_eq!(ready, json!({ "ready": true }));
        Self { child }
    }

    fn order<T: serde::de::DeserializeOwned>(&mut self, order: &Order) -> T {
        self.child.ask(&serde_json::to_string(order).unwrap())
    }

    /// What the engine says of itself.
    #[must_use]
    pub fn describe(&mut self) -> Packed {
        self.order(&Order::Describe)
    }

    /// Connects; reads are from this peer from now on.
    pub fn connect(&mut self, to: &Packed, lane: &str) -> Connected {
        self.connect_as_if(to, lane, None)
    }

    /// Is told to connect; what comes of it is not heard.
    pub fn begin_to_connect(&mut self, to: &Packed, lane: &str) {
        let (to, lane, host) = (to.clone(), lane.into(), None);
        let order = Order::Connect { to, lane, host };
        self.child.tell(&serde_json::to_string(&order).unwrap());
    }

    /// Connects to a description whose host is another one.
    pub fn connect_as_if(&mut self, to: &Packed, lane: &str, host: Option<&str>) -> Connected {
        let (to, lane, host) = (to.clone(), lane.into(), host.map(Into::into));
        self.order(&Order::Connect { to, lane, host })
    }

    /// Starts a read.
    pub fn read(&mut self, pairs: &[(u32, u32)], timeout: Duration) {
        let order = Order::Read {
            pairs: pairs.to_vec(),
            timeout_ms: timeout.as_millis() as u64,
        };
        let error: String = self.order(&order);
        assert_eq!(error, "");
    }

    /// Starts a read, or says why it was refused.
    pub fn read_or_refused(&mut self, pairs: &[(u32, u32)], timeout: Duration) -> Option<String> {
        let error: String = self.order(&Order::Read {
            pairs: pairs.to_vec(),
            timeout_ms: timeout.as_millis() as u64,
        });
        (!error.is_empty()).then_some(error)
    }

    /// Cancels the last read when it has moved something; how much, or nothing if it had ended.
    pub fn cancel_midway(&mut self) -> Option<u64> {
        self.order(&Order::CancelMidway { patient: true })
    }

    /// Cancels the last read, whatever it has moved.
    pub fn cancel_now(&mut self) -> Option<u64> {
        self.order(&Order::CancelMidway { patient: false })
    }

    /// Waits for the end of the last read, and quiet.
    pub fn wait(&mut self) -> Ended {
        self.order(&Order::Wait)
    }

    /// Fills all blocks.
    pub fn fill(&mut self, byte: u8) {
        let (): () = self.order(&Order::Fill(byte));
    }

    /// How many bytes are not this one.
    pub fn check(&mut self, byte: u8) -> u64 {
        self.order(&Order::Check(byte))
    }

    /// How many bytes are not what a read of these pairs into poison leaves.
    pub fn wrong(&mut self, pairs: &[(u32, u32)]) -> u64 {
        self.order(&Order::Wrong {
            pairs: pairs.to_vec(),
        })
    }

    /// The engine's counters, by name.
    #[must_use]
    pub fn counters(&mut self) -> HashMap<String, u64> {
        self.order(&Order::Count)
    }

    /// What its process has said at warning level or above.
    #[must_use]
    pub fn warnings(&mut self) -> Vec<String> {
        self.order(&Order::Warnings)
    }

    /// Gives its region up; why that failed, or nothing.
    pub fn deregister(&mut self, timeout: Duration) -> String {
        self.order(&Order::Deregister {
            timeout_ms: timeout.as_millis() as u64,
        })
    }
}

static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Keeps what is said, line by line, and says it on standard error too.
struct Log;

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let line = String::from_utf8_lossy(bytes);
        SAID.lock().unwrap().push(line.into_owned());
        std::io::stderr().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Logs warnings, and keeps them.
pub(super) fn keep_log() {
    let _ = tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
        .with_ansi(false)
        .with_writer(|| Log)
        .try_init();
}

struct Host {
    engine: Engine,
    memory: MemoryRegion,
    region: Option<Region>,
    tables: Vec<Table>,
    peer: Option<Peer>,
    transfer: Option<(Transfer, Instant)>,
    moved: u64,
}

pub(super) fn run(spec: &EngineSpec) {
    if let Some(user) = spec.user {
        let user = rustix::process::Uid::from_raw(user);
        // Before there are other threads.
        rustix::thread::set_thread_res_uid(user, user, user).unwrap();
    }
    let mut config = config(&spec.name);
    config.allow_emulation = spec.emulation;
    if !spec.shares {
        config.share_socket = ShareSocket::Off;
    }
    let engine = Engine::builder(config).start().unwrap();
    assert_generation(&engine);
    let span = u64::from(spec.layout.blocks) * spec.layout.block_bytes;
    let bytes = (span * u64::from(spec.layout.layers)) as usize;
    let memory = match spec.memory {
        Memory::Pool => HostPool::new(bytes).unwrap().region().unwrap(),
        Memory::Foreign => foreign(bytes),
    };
    let region = engine.register(&memory).unwrap();
    let tables: Vec<Table> = (0..spec.layout.layers)
        .map(|layer| {
            let table = TableSpec::dense(spec.layout.block_bytes, spec.layout.blocks)
                .at(span * u64::from(layer))
                .layer(layer);
            engine.add_table(&region, table).unwrap()
        })
        .collect();
    if spec.filled {
        for table in &tables {
            pattern::fill(table, &memory);
        }
    } else {
        memory.fill(0, memory.bytes(), POISON).unwrap();
    }
    let mut host = Host {
        engine,
        memory,
        region: Some(region),
        tables,
        peer: None,
        transfer: None,
        moved: 0,
    };
    say(&json!({ "ready": true }));
    for order in requests() {
        let answer = host.obey(serde_json::from_str(&order).unwrap());
        say(&answer);
    }
    host.engine.shutdown(SHUTDOWN).unwrap();
}

/// Anonymous memory that lives as long as the process.
fn foreign(bytes: usize) -> MemoryRegion {
    let map = Box::leak(Box::new(MmapMut::map_anon(bytes).unwrap()));
    let base = NonNull::new(map.as_mut_ptr()).unwrap();
    #[allow(unsafe_code, reason = "foreign memory is borrowed")]
    // SAFETY: mapped for ever, and used through the region only.
    unsafe { MemoryRegion::borrowed(base, bytes) }.unwrap()
}

impl Host {
    fn obey(&mut self, order: Order) -> Value {
        match order {
            Order::Describe => json!(Packed::of(&self.engine)),
            Order::Connect { to, lane, host } => self.connect(&to, &lane, host),
            Order::Read { pairs, timeout_ms } => json!(self.read(&pairs, timeout_ms)),
            Order::CancelMidway { patient } => json!(self.cancel_midway(patient)),
            Order::Wait => self.wait(),
            Order::Fill(byte) => {
                self.memory.fill(0, self.memory.bytes(), byte).unwrap();
                json!(null)
            }
            Order::Check(byte) => json!(self.check(byte)),
            Order::Wrong { pairs } => json!(self.wrong(&pairs)),
            Order::Count => {
                let c = self.engine.counters();
                json!({
                    "served": c.served_bytes,
                    "native": c.native_bytes,
                    "mapped": c.mapped_bytes,
                    "attached": c.attached_bytes,
                    "attached_calls": c.attached_calls,
                    "batches": c.copy_batches,
                    "block_operations": c.block_operations,
                    "ucx_operations": c.ucx_operations,
                    "messages": c.messages_sent,
                    "served_to_peers": c.bytes_served_to_peers,
                    "dropped": c.segments_dropped,
                    "lost": c.peers_lost,
                    "quarantined": c.quarantined_bytes,
                    "quarantined_regions": c.quarantined_regions,
                    "kept": c.kept_bytes,
                })
            }
            Order::Warnings => {
                let said = SAID.lock().unwrap();
                json!(said.iter().map(|line| line.trim()).collect::<Vec<_>>())
            }
            Order::Deregister { timeout_ms } => {
                let region = self.region.take().unwrap();
                let result = region.deregister(Duration::from_millis(timeout_ms));
                json!(
                    result
                        .err()
                        .map_or(String::new(), |error| error.to_string())
                )
            }
        }
    }

    fn connect(&mut self, to: &Packed, lane: &str, host: Option<String>) -> Value {
        let lane: LaneChoice = lane.parse().unwrap();
        let mut description = to.unpack();
        if let Some(host) = host {
            description.host = host;
        }
        match self.engine.connect(description, lane) {
            Ok(peer) => {
                let (lane, transports) = (peer.lane().name(), peer.transports().to_owned());
                self.peer = Some(peer);
                json!({ "error": "", "lane": lane, "transports": transports })
            }
            Err(error) => json!({ "error": error.to_string(), "lane": "", "transports": "" }),
        }
    }

    fn read(&mut self, pairs: &[(u32, u32)], timeout_ms: u64) -> String {
        let peer = self.peer.as_ref().unwrap();
        let pairs: Vec<BlockPair> = pairs.iter().map(|&(l, r)| BlockPair::new(l, r)).collect();
        let both: Vec<_> = self.tables.iter().cloned().zip(peer.tables()).collect();
        match peer.read_within(&both, &pairs, Duration::from_millis(timeout_ms)) {
            Ok(transfer) => {
                self.transfer = Some((transfer, Instant::now()));
                self.moved = self.arrived();
                String::new()
            }
            Err(error) => error.to_string(),
        }
    }

    fn arrived(&self) -> u64 {
        let c = self.engine.counters();
        c.served_bytes + c.native_bytes + c.mapped_bytes + c.attached_bytes
    }

    fn cancel_midway(&mut self, patient: bool) -> Option<u64> {
        let (transfer, started) = self.transfer.as_ref().unwrap();
        while patient && self.arrived() == self.moved {
            assert!(started.elapsed() < PATIENCE, "nothing arrives");
            if transfer.poll_outcome().is_some() {
                return None;
            }
            std::thread::yield_now();
        }
        transfer.cancel();
        Some(self.arrived() - self.moved)
    }

    fn wait(&mut self) -> Value {
        let (transfer, started) = self.transfer.take().unwrap();
        while transfer.poll_outcome().is_none() {
            assert!(started.elapsed() < PATIENCE, "no outcome");
            let _ = transfer.wait(Duration::from_millis(1));
        }
        let outcome_ms = started.elapsed().as_millis() as u64;
        let outcome = transfer.wait(PATIENCE).expect("quiet");
        let (bytes, operations, error, kind) = match outcome {
            Ok(report) => (report.bytes, report.operations, String::new(), ""),
            Err(error) => {
                let kind = match &error {
                    TransferError::Cancelled => "cancelled",
                    TransferError::Stalled { .. } => "stalled",
                    TransferError::PeerLost(_) => "lost",
                    TransferError::Rejected { .. } => "rejected",
                    TransferError::Operation(_) => "operation",
                    _ => "other",
                };
                (0, 0, error.to_string(), kind)
            }
        };
        json!({
            "error": error,
            "kind": kind,
            "bytes": bytes,
            "operations": operations,
            "outcome_ms": outcome_ms,
            "moved": self.arrived() - self.moved,
        })
    }

    fn check(&self, byte: u8) -> u64 {
        let mut piece = vec![0; 1 << 20];
        let (mut at, mut other) = (0, 0);
        while at < self.memory.bytes() {
            let length = (self.memory.bytes() - at).min(piece.len() as u64) as usize;
            self.memory.read_at(at, &mut piece[..length]).unwrap();
            other += piece[..length].iter().filter(|&&got| got != byte).count();
            at += length as u64;
        }
        other as u64
    }

    fn wrong(&self, pairs: &[(u32, u32)]) -> u64 {
        let sources: HashMap<u32, u32> = pairs.iter().copied().collect();
        let blocks = |table: &Table| 0..table.description().block_count;
        let wrong = |table: &Table, block| {
            wrong_bytes(table, &self.memory, block, sources.get(&block).copied())
        };
        let of_table = |table| blocks(table).map(|block| wrong(table, block)).sum::<u64>();
        self.tables.iter().map(of_table).sum()
    }
}

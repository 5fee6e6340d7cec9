//! A producer of two regions: one can be taken away, and is borrowed or a pool; the other stays.
//!
//! Its requests: `deregister MS` and `settle` give the first region up and take the memory away
//! at once, `park` and `go` hold its progress thread up, `counters` tells numbers. On `restart` the
//! memory gets another content, and the engine another life in the same process.
#![allow(unsafe_code)]

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use kvferry_engine::{
    Engine, HostPool, MemoryRegion, Region, Replies, Sender, Service, ShareSocket, Table, TableSpec,
};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{Packed, SHUTDOWN, Settings, assert_generation, config};
use crate::harness::{PATIENCE, requests, say};
use crate::pattern;

/// Each message on this channel is a number: the borrowed blocks hold its pattern when it is echoed.
pub const OVERWRITE_CHANNEL: u16 = 101;
const PARK_CHANNEL: u16 = 102;

/// What to publish.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Publisher {
    /// Its engine id.
    pub name: String,
    /// Blocks of each of the two tables.
    pub blocks: u32,
    /// Bytes per block.
    pub block_bytes: u64,
    /// Whether the first region is a pool too, so that all of it can be mapped.
    pub pools: bool,
    /// Where its share socket is a file, if it is one.
    pub share: Option<PathBuf>,
    /// What is not as usual.
    pub settings: Settings,
}

/// What a publisher says first.
#[derive(Debug, Deserialize)]
pub struct Published {
    /// Its description: table 0 is the borrowed one.
    pub description: Packed,
    /// The UCX that it loaded.
    pub ucx: (u32, u32),
    /// The file of the first region, by its number, if it is a pool.
    pub pool: Option<u64>,
}

/// What the memory of a publisher holds when it is somebody else's.
pub const NEW_OWNERS: u8 = 0x3C;

/// How a region was given up.
#[derive(Debug, Deserialize)]
pub struct GivenUp {
    /// Why not; empty for success.
    pub error: String,
    /// How long that took.
    pub elapsed_ms: u64,
}

/// What a publisher has counted.
#[derive(Debug, Deserialize)]
pub struct PublisherCounters {
    /// Peers that were greeted.
    pub peers_connected: u64,
    /// Peers that ended.
    pub peers_lost: u64,
    /// Regions that wait to be given up.
    pub quarantined_regions: u64,
    /// Bytes it gathered for peers.
    pub bytes_served: u64,
    /// Descriptors that the process has open.
    pub descriptors: usize,
}

/// Memory that can be taken away.
enum First {
    /// Of its own mapping, and no pool of anybody's.
    Borrowed {
        base: NonNull<u8>,
        bytes: usize,
    },
    Pool(Arc<HostPool>),
}

impl First {
    fn new(bytes: usize, pool: bool) -> Self {
        if pool {
            return Self::Pool(HostPool::new(bytes).unwrap());
        }
        let bytes = bytes.next_multiple_of(rustix::param::page_size());
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let base =
            unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, protection, MapFlags::PRIVATE) };
        Self::Borrowed {
            base: NonNull::new(base.unwrap().cast()).unwrap(),
            bytes,
        }
    }

    fn region(&self) -> MemoryRegion {
        match self {
            // SAFETY: mapped until it is taken away, which happens when it has been given up; nobody
            // refers to its bytes; it is host memory.
            Self::Borrowed { base, bytes } => unsafe { MemoryRegion::borrowed(*base, *bytes) },
            Self::Pool(pool) => pool.region(),
        }
        .unwrap()
    }

    /// The number of a pool's file.
    fn file(&self) -> Option<u64> {
        let Self::Pool(pool) = self else { return None };
        let file = std::fs::File::from(pool.fd().try_clone_to_owned().unwrap());
        Some(file.metadata().unwrap().ino())
    }

    /// It is somebody else's: an access to borrowed memory kills the process, and whoever has the
    /// pool mapped finds other bytes.
    fn take_away(&self) {
        match self {
            // SAFETY: the mapping is ours, and no operation uses it any more: that is what is tested.
            Self::Borrowed { base, bytes } => unsafe {
                mprotect(base.as_ptr().cast(), *bytes, MprotectFlags::empty()).unwrap();
            },
            Self::Pool(_) => self.overwrite(),
        }
    }

    fn overwrite(&self) {
        let region = self.region();
        region.fill(0, region.bytes(), NEW_OWNERS).unwrap();
    }
}

struct Overwrite {
    memory: MemoryRegion,
    table: Table,
}

impl Service for Overwrite {
    fn on_message(&mut self, from: Sender, payload: &[u8], replies: &mut Replies) {
        let round = u64::from_le_bytes(payload.try_into().unwrap());
        pattern::fill_as(&self.table, &self.memory, round as u32);
        replies.send(from.peer, OVERWRITE_CHANNEL, payload.to_vec());
    }

    fn on_tick(&mut self, _: Instant, _: &mut Replies) -> Option<Instant> {
        None
    }
}

/// Holds the progress thread up from a wake to a word.
struct Park {
    parked: mpsc::Sender<()>,
    go: mpsc::Receiver<()>,
    wanted: mpsc::Receiver<()>,
}

impl Service for Park {
    fn on_message(&mut self, _: Sender, _: &[u8], _: &mut Replies) {}

    fn on_tick(&mut self, _: Instant, _: &mut Replies) -> Option<Instant> {
        if self.wanted.try_recv().is_ok() {
            self.parked.send(()).unwrap();
            let _ = self.go.recv();
        }
        None
    }
}

/// A life of the engine.
struct Life {
    engine: Engine,
    region: Option<Region>,
    _kept: Region,
    go: mpsc::Sender<()>,
    want: mpsc::Sender<()>,
    is_parked: mpsc::Receiver<()>,
}

impl Life {
    /// Starts one over memory that is filled with the pattern, or left as it is.
    fn start(publisher: &Publisher, first: &First, second: &Arc<HostPool>, filled: bool) -> Self {
        let (parked, is_parked) = mpsc::channel();
        let (go, told) = mpsc::channel();
        let (want, wanted) = mpsc::channel();
        let park = Park {
            parked,
            go: told,
            wanted,
        };
        let mut config = config(&publisher.name);
        publisher.settings.apply(&mut config);
        if let Some(directory) = &publisher.share {
            config.share_socket = ShareSocket::Directory(directory.clone());
        }
        // The overwriting service needs a table, which needs an engine: it is lent one later.
        let (lend, lent) = mpsc::channel::<Overwrite>();
        let engine = Engine::builder(config)
            .service(PARK_CHANNEL, Box::new(park))
            .service(OVERWRITE_CHANNEL, Box::new(Lent { lent, inner: None }))
            .start()
            .unwrap();
        assert_generation(&engine);
        let spec = TableSpec::dense(publisher.block_bytes, publisher.blocks);
        let memory = first.region();
        let region = engine.register(&memory).unwrap();
        let table = engine.add_table(&region, spec.clone()).unwrap();
        let others = second.region().unwrap();
        let kept = engine.register(&others).unwrap();
        let other = engine.add_table(&kept, spec.layer(1)).unwrap();
        if filled {
            pattern::fill(&table, &memory);
            pattern::fill(&other, &others);
        }
        lend.send(Overwrite { memory, table }).unwrap();
        Self {
            engine,
            region: Some(region),
            _kept: kept,
            go,
            want,
            is_parked,
        }
    }

    fn end(self) {
        drop(self.go);
        self.engine.shutdown(SHUTDOWN).unwrap();
    }

    fn introduce(&self, first: &First) {
        let ucx = self.engine.ucx_version().unwrap();
        say(&json!({
            "description": Packed::of(&self.engine),
            "ucx": (ucx.major, ucx.minor),
            "pool": first.file(),
        }));
    }
}

pub(super) fn run(publisher: &Publisher) {
    let bytes = (u64::from(publisher.blocks) * publisher.block_bytes) as usize;
    let first = First::new(bytes, publisher.pools);
    let second = HostPool::new(bytes).unwrap();
    let mut life = Life::start(publisher, &first, &second, true);
    life.introduce(&first);
    for request in requests() {
        match request.split_once(' ').unwrap_or((&request, "")) {
            ("deregister", ms) => {
                let limit = Duration::from_millis(ms.parse().unwrap());
                give_up(life.region.take().unwrap(), limit, &first);
            }
            ("settle", _) => {
                let started = Instant::now();
                while life.engine.counters().quarantined_regions > 0 {
                    assert!(started.elapsed() < PATIENCE, "still in quarantine");
                    std::thread::yield_now();
                }
                first.take_away();
                let elapsed = started.elapsed().as_millis() as u64;
                say(&json!({ "error": "", "elapsed_ms": elapsed }));
            }
            ("park", _) => {
                life.want.send(()).unwrap();
                life.engine.wake_services().unwrap();
                life.is_parked.recv_timeout(PATIENCE).unwrap();
                say(&json!({ "parked": true }));
            }
            ("go", _) => life.go.send(()).unwrap(),
            ("counters", _) => {
                let counters = life.engine.counters();
                say(&json!({
                    "peers_connected": counters.peers_connected,
                    "peers_lost": counters.peers_lost,
                    "quarantined_regions": counters.quarantined_regions,
                    "bytes_served": counters.bytes_served_to_peers,
                    "descriptors": descriptors(),
                }));
            }
            ("restart", _) => {
                life.end();
                first.overwrite();
                let others = second.region().unwrap();
                others.fill(0, others.bytes(), NEW_OWNERS).unwrap();
                life = Life::start(publisher, &first, &second, false);
                life.introduce(&first);
            }
            (other, _) => panic!("no request {other:?}"),
        }
    }
    life.end();
}

fn give_up(region: Region, limit: Duration, first: &First) {
    let started = Instant::now();
    let result = region.deregister(limit);
    if result.is_ok() {
        first.take_away();
    }
    let elapsed = started.elapsed().as_millis() as u64;
    let error = result.err().map(|error| error.to_string());
    say(&json!({ "error": error.unwrap_or_default(), "elapsed_ms": elapsed }));
}

/// Descriptors that this process has open.
#[must_use]
pub fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

struct Lent {
    lent: mpsc::Receiver<Overwrite>,
    inner: Option<Overwrite>,
}

impl Service for Lent {
    fn on_message(&mut self, from: Sender, payload: &[u8], replies: &mut Replies) {
        if self.inner.is_none() {
            self.inner = self.lent.try_recv().ok();
        }
        if let Some(inner) = &mut self.inner {
            inner.on_message(from, payload, replies);
        }
    }

    fn on_tick(&mut self, _: Instant, _: &mut Replies) -> Option<Instant> {
        None
    }
}

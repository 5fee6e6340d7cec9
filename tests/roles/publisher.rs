//! A producer of two regions: one is borrowed and can be taken away, the other stays.
//!
//! Its requests: `deregister MS` and `settle` give the borrowed region up and take the memory away
//! at once, `park` and `go` hold its progress thread up, `counters` tells numbers.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use kvferry_engine::{
    Engine, HostPool, MemoryRegion, Region, Replies, Sender, Service, Table, TableSpec,
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
}

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

/// Memory of its own mapping, so that all of it can be taken away.
struct Borrowed {
    base: NonNull<u8>,
    bytes: usize,
}

impl Borrowed {
    fn new(bytes: usize) -> Self {
        let bytes = bytes.next_multiple_of(rustix::param::page_size());
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let base =
            unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, protection, MapFlags::PRIVATE) };
        Self {
            base: NonNull::new(base.unwrap().cast()).unwrap(),
            bytes,
        }
    }

    fn region(&self) -> MemoryRegion {
        // SAFETY: mapped until it is taken away, which happens when it has been given up; nobody
        // refers to its bytes; it is host memory.
        unsafe { MemoryRegion::borrowed(self.base, self.bytes) }.unwrap()
    }

    /// From now on an access kills the process.
    fn take_away(&self) {
        // SAFETY: the mapping is ours, and no operation uses it any more: that is what is tested.
        unsafe {
            mprotect(
                self.base.as_ptr().cast(),
                self.bytes,
                MprotectFlags::empty(),
            )
        }
        .unwrap();
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

pub(super) fn run(publisher: &Publisher) {
    let borrowed = Borrowed::new((u64::from(publisher.blocks) * publisher.block_bytes) as usize);
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
    // The overwriting service needs a table, which needs an engine: it is lent one later.
    let (lend, lent) = mpsc::channel::<Overwrite>();
    let engine = Engine::builder(config)
        .service(PARK_CHANNEL, Box::new(park))
        .service(OVERWRITE_CHANNEL, Box::new(Lent { lent, inner: None }))
        .start()
        .unwrap();
    assert_generation(&engine);
    let spec = TableSpec::dense(publisher.block_bytes, publisher.blocks);
    let memory = borrowed.region();
    let region = engine.register(&memory).unwrap();
    let table = engine.add_table(&region, spec.clone()).unwrap();
    pattern::fill(&table, &memory);
    lend.send(Overwrite { memory, table }).unwrap();
    let pool = HostPool::new((u64::from(publisher.blocks) * publisher.block_bytes) as usize);
    let kept = pool.unwrap().region().unwrap();
    let _kept = engine.register(&kept).unwrap();
    pattern::fill(&engine.add_table(&_kept, spec.layer(1)).unwrap(), &kept);
    let ucx = engine.ucx_version().unwrap();
    say(&json!({ "description": Packed::of(&engine), "ucx": (ucx.major, ucx.minor) }));
    let mut region = Some(region);
    for request in requests() {
        match request.split_once(' ').unwrap_or((&request, "")) {
            ("deregister", ms) => {
                let limit = Duration::from_millis(ms.parse().unwrap());
                give_up(region.take().unwrap(), limit, &borrowed);
            }
            ("settle", _) => {
                let started = Instant::now();
                while engine.counters().quarantined_regions > 0 {
                    assert!(started.elapsed() < PATIENCE, "still in quarantine");
                    std::thread::yield_now();
                }
                borrowed.take_away();
                let elapsed = started.elapsed().as_millis() as u64;
                say(&json!({ "error": "", "elapsed_ms": elapsed }));
            }
            ("park", _) => {
                want.send(()).unwrap();
                engine.wake_services().unwrap();
                is_parked.recv_timeout(PATIENCE).unwrap();
                say(&json!({ "parked": true }));
            }
            ("go", _) => go.send(()).unwrap(),
            ("counters", _) => {
                let counters = engine.counters();
                say(&json!({
                    "peers_connected": counters.peers_connected,
                    "peers_lost": counters.peers_lost,
                    "quarantined_regions": counters.quarantined_regions,
                    "bytes_served": counters.bytes_served_to_peers,
                    "descriptors": descriptors(),
                }));
            }
            (other, _) => panic!("no request {other:?}"),
        }
    }
    drop(go);
    engine.shutdown(SHUTDOWN).unwrap();
}

fn give_up(region: Region, limit: Duration, borrowed: &Borrowed) {
    let started = Instant::now();
    let result = region.deregister(limit);
    if result.is_ok() {
        borrowed.take_away();
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

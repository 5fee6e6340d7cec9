//! A producer: blocks filled with the pattern, a lease table, a counter of messages, and a directory if
//! one is asked for.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvferry_connector::directory::{DirectoryConfig, DirectoryServer};
use kvferry_connector::lease::{LeaseConfig, LeaseService, StepLeases};
use kvferry_engine::wire::lease::LEASE_CHANNEL;
use kvferry_engine::wire::{EngineId, Epoch, Instance, Rank, RequestId};
use kvferry_engine::{
    Engine, HostPool, HostPoolOptions, HugePages, MemoryRegion, Replies, Sender, Service, Table,
    TableSpec,
};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::churn::register_often;
use super::resources::{Resources, cpu_ms};
use super::{HUGE_PAGES, Packed, SHUTDOWN, assert_generation, config, number, warnings};
use crate::harness::{requests, say};
use crate::pattern;

/// The channel of the counting service.
pub(super) const COUNT_CHANNEL: u16 = 100;

/// How blocks lie: `layers` tables one after the other.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Layout {
    /// Tables.
    pub layers: u32,
    /// Blocks per table.
    pub blocks: u32,
    /// Bytes per block.
    pub block_bytes: u64,
}

impl Layout {
    pub(super) fn make(
        self,
        engine: &Engine,
    ) -> (MemoryRegion, kvferry_engine::Region, Vec<Table>) {
        let span = u64::from(self.blocks) * self.block_bytes;
        let options = HostPoolOptions {
            huge_pages: match number(HUGE_PAGES) {
                Some(_) => HugePages::Require,
                None => HugePages::Never,
            },
            huge_page_bytes: number(HUGE_PAGES),
        };
        let bytes = (span * u64::from(self.layers)) as usize;
        let pool = HostPool::with_options(bytes, options).unwrap();
        let memory = pool.region().unwrap();
        let region = engine.register(&memory).unwrap();
        let tables = (0..self.layers)
            .map(|layer| {
                let spec = TableSpec::dense(self.block_bytes, self.blocks)
                    .at(span * u64::from(layer))
                    .layer(layer);
                engine.add_table(&region, spec).unwrap()
            })
            .collect();
        (memory, region, tables)
    }
}

/// What a producer says first.
#[derive(Debug, Deserialize)]
pub struct Started {
    /// Its description.
    pub description: Packed,
    /// The instance of its leases.
    pub instance: [u8; 16],
    /// What its engine warns of.
    pub warnings: Vec<String>,
}

/// What a producer has counted.
#[derive(Debug, Deserialize)]
pub struct Counted {
    /// Messages on the counting channel that came in order.
    pub in_order: u64,
    /// Messages on the counting channel that did not.
    pub out_of_order: u64,
    /// Times its progress thread went to sleep.
    pub sleeps: u64,
    /// UCX operations it posted.
    pub ucx_operations: u64,
    /// Bytes it gathered for peers.
    pub bytes_served: u64,
    /// Processor time of the whole process, in milliseconds.
    pub cpu_ms: u64,
}

/// What a producer has put up with.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Endured {
    /// Segments it dropped.
    pub segments_dropped: u64,
    /// Peers that were greeted and answered.
    pub peers_connected: u64,
    /// Peers that ended.
    pub peers_lost: u64,
    /// Connections that its directory accepted.
    pub connections: u64,
    /// Requests that its directory answered, with entries or a refusal.
    pub answered: u64,
    /// Connections that its directory closed because of what they sent.
    pub garbage: u64,
    /// Connections that its directory closed because they took too long, or to make room.
    pub too_slow: u64,
}

fn endured(engine: &Engine, directory: Option<&DirectoryServer>) -> Endured {
    let counters = engine.counters();
    let stats = directory.map(DirectoryServer::stats).unwrap_or_default();
    Endured {
        segments_dropped: counters.segments_dropped,
        peers_connected: counters.peers_connected,
        peers_lost: counters.peers_lost,
        connections: stats.connections,
        answered: stats.served + stats.refused,
        garbage: stats.garbage,
        too_slow: stats.timed_out + stats.evicted,
    }
}

/// A directory with this engine in it.
fn directory(engine: &Engine) -> DirectoryServer {
    let config = DirectoryConfig::new(EngineId::new("producer").unwrap());
    let directory = DirectoryServer::bind("127.0.0.1:0", config).unwrap();
    let description = engine.describe().unwrap().encode().unwrap();
    directory.publish(Rank::default(), description).unwrap();
    directory
}

/// Counts numbered messages and answers each thousandth, so that a sender can bound what is queued.
struct CountService {
    in_order: Arc<AtomicU64>,
    out_of_order: Arc<AtomicU64>,
}

impl Service for CountService {
    fn on_message(&mut self, from: Sender, payload: &[u8], replies: &mut Replies) {
        let next = self.in_order.load(Ordering::Relaxed);
        if payload == next.to_le_bytes() {
            self.in_order.store(next + 1, Ordering::Relaxed);
        } else {
            self.out_of_order.fetch_add(1, Ordering::Relaxed);
        }
        if (next + 1).is_multiple_of(1000) {
            replies.send(from.peer, COUNT_CHANNEL, (next + 1).to_le_bytes().to_vec());
        }
    }

    fn on_tick(&mut self, _now: Instant, _replies: &mut Replies) -> Option<Instant> {
        None
    }
}

pub(super) fn run(layout: &Layout) {
    let instance = Instance::random().unwrap();
    let lease_config = LeaseConfig {
        duration: Duration::from_secs(30),
        ..LeaseConfig::default()
    };
    let (leases, control) = LeaseService::new(instance, lease_config).unwrap();
    let (in_order, out_of_order) = (Arc::<AtomicU64>::default(), Arc::<AtomicU64>::default());
    let counting = CountService {
        in_order: Arc::clone(&in_order),
        out_of_order: Arc::clone(&out_of_order),
    };
    let engine = Engine::builder(config("producer"))
        .service(LEASE_CHANNEL, Box::new(leases))
        .service(COUNT_CHANNEL, Box::new(counting))
        .start()
        .unwrap();
    assert_generation(&engine);
    control.wake_with({
        let engine = engine.clone();
        move || drop(engine.wake_services())
    });
    let (memory, _region, tables) = layout.make(&engine);
    for table in &tables {
        pattern::fill(table, &memory);
    }
    say(&json!({
        "description": Packed::of(&engine),
        "instance": instance.to_bytes(),
        "warnings": warnings(&engine),
    }));
    let mut issued = 0;
    let mut served = None;
    for request in requests() {
        match request.split_once(' ').unwrap_or((&request, "")) {
            ("count", _) => {
                let counters = engine.counters();
                say(&json!({
                    "in_order": in_order.load(Ordering::Relaxed),
                    "out_of_order": out_of_order.load(Ordering::Relaxed),
                    "sleeps": counters.sleeps,
                    "ucx_operations": counters.ucx_operations,
                    "bytes_served": counters.bytes_served_to_peers,
                    "cpu_ms": cpu_ms(),
                }));
            }
            ("directory", _) => {
                let directory = served.insert(directory(&engine));
                say(&json!(directory.local_addr()));
            }
            ("endured", _) => say(&json!(endured(&engine, served.as_ref()))),
            ("resources", _) => say(&json!(Resources::now())),
            ("register", count) => {
                register_often(&engine, count.parse().unwrap());
                say(&json!(Resources::now()));
            }
            ("lease", count) => {
                let count: u64 = count.parse().unwrap();
                let epochs = || (1..=count).map(|epoch| Epoch::new(epoch).unwrap());
                let request = |epoch: Epoch| RequestId::new(format!("request-{epoch}")).unwrap();
                issued = count;
                control
                    .apply(StepLeases {
                        issued_up_to: count,
                        reserve: epochs().map(|epoch| (epoch, request(epoch))).collect(),
                        activate: epochs().collect(),
                        revoke: vec![],
                    })
                    .unwrap();
                let held = control.snapshot(SHUTDOWN).unwrap().gauges.held();
                say(&json!({ "held": held }));
            }
            ("revoke", epoch) => {
                let epoch = Epoch::new(epoch.parse().unwrap()).unwrap();
                let issued_up_to = issued;
                let revoke = vec![epoch];
                let plan = StepLeases {
                    issued_up_to,
                    revoke,
                    ..StepLeases::default()
                };
                control.apply(plan).unwrap();
                say(&json!({ "held": control.snapshot(SHUTDOWN).unwrap().gauges.held() }));
            }
            (other, _) => panic!("no request {other:?}"),
        }
    }
    engine.shutdown(SHUTDOWN).unwrap();
}

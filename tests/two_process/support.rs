//! A consumer in the test's own process, and what its tests share.

use std::time::Duration;

use kvferry_engine::wire::Description;
use kvferry_engine::{
    BlockPair, Engine, HostPool, LaneChoice, MemoryRegion, Peer, ReadError, Region, Table,
    TableSpec, Transfer,
};
use kvferry_tests::harness::{Case, Child, Environment, until};
use kvferry_tests::pattern::{POISON, wrong_bytes};
use kvferry_tests::roles::{
    Done, Order, Published, Publisher, Reader, Settings, assert_generation, config,
};
use serde_json::Value;

pub(crate) const LANES: [&str; 4] = ["served", "native", "mapped", "attached"];

/// Whether the bytes of a lane are copied out of the peer's memory by this process itself: a peer
/// that stands still is read all the same.
pub(crate) fn copies(lane: &str) -> bool {
    matches!(lane, "mapped" | "attached")
}

/// What a deadline may be late by on a busy machine.
pub(crate) const SLACK: Duration = Duration::from_secs(15);

/// UCX 1.13 ends a process that emulates a GET for a peer which disappears meanwhile: no fault of
/// kvferry's, and no real native lane does that.
pub(crate) fn cannot_lose_peers(lane: &str) -> Option<String> {
    let version = ucx_sys::load(None).unwrap().version;
    let old = (version.major, version.minor) <= (1, 13);
    (lane == "native" && old)
        .then(|| format!("UCX {version} aborts when a peer ends in the middle of an emulated GET"))
}

/// A case that is skipped where [`cannot_lose_peers`] says so.
pub(crate) fn losing_case(
    name: String,
    lane: &'static str,
    run: impl FnOnce() + Send + 'static,
) -> Case {
    let mut case = Case::new(name, run);
    case.skip = cannot_lose_peers(lane);
    case
}

pub(crate) fn publisher(name: &str, blocks: u32, block_bytes: u64) -> Publisher {
    Publisher {
        name: name.into(),
        blocks,
        block_bytes,
        pools: false,
        share: None,
        settings: Settings::default(),
    }
}

/// A publisher whose memory can be read over a lane.
pub(crate) fn publisher_for(lane: &str, name: &str, blocks: u32, block_bytes: u64) -> Publisher {
    let mut publisher = publisher(name, blocks, block_bytes);
    publisher.pools = lane == "mapped";
    publisher
}

/// Whether a process has a file mapped, by the file's number.
pub(crate) fn has_mapped(pid: u32, file: u64) -> bool {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let file = file.to_string();
    maps.lines().any(|line| {
        line.contains("/memfd:kvferry-pool") && line.split_whitespace().nth(4) == Some(&file)
    })
}

pub(crate) fn publish(publisher: &Publisher, environment: Environment<'_>) -> (Child, Published) {
    let child = Child::start("publisher", publisher, environment);
    let published = child.hear();
    (child, published)
}

/// A consumer with a table for each of a publisher's, in a region of its own.
pub(crate) struct Consumer {
    pub(crate) engine: Engine,
    pub(crate) memory: [MemoryRegion; 2],
    pub(crate) regions: [Region; 2],
    pub(crate) tables: [Table; 2],
}

pub(crate) fn consumer(settings: Settings, blocks: u32, block_bytes: u64) -> Consumer {
    let mut config = config("consumer");
    settings.apply(&mut config);
    with_blocks(
        Engine::builder(config).start().unwrap(),
        blocks,
        block_bytes,
    )
}

pub(crate) fn with_blocks(engine: Engine, blocks: u32, block_bytes: u64) -> Consumer {
    assert_generation(&engine);
    let memory = [0, 1].map(|_| {
        let pool = HostPool::new((u64::from(blocks) * block_bytes) as usize).unwrap();
        let memory = pool.region().unwrap();
        memory.fill(0, memory.bytes(), POISON).unwrap();
        memory
    });
    let regions = [0, 1].map(|n: usize| engine.register(&memory[n]).unwrap());
    let tables = [0, 1].map(|n: usize| {
        let spec = TableSpec::dense(block_bytes, blocks).layer(n as u32);
        engine.add_table(&regions[n], spec).unwrap()
    });
    Consumer {
        engine,
        memory,
        regions,
        tables,
    }
}

impl Consumer {
    pub(crate) fn connect(&self, to: Description, lane: &str) -> Peer {
        self.engine
            .connect(to, lane.parse::<LaneChoice>().unwrap())
            .unwrap()
    }

    /// Reads all blocks of a table, in reverse.
    pub(crate) fn start(
        &self,
        peer: &Peer,
        table: usize,
        timeout: Duration,
    ) -> Result<Transfer, ReadError> {
        let blocks = self.tables[table].description().block_count;
        let pairs: Vec<_> = (0..blocks)
            .map(|n| BlockPair::new(n, blocks - 1 - n))
            .collect();
        let theirs = peer.tables().nth(table).unwrap();
        peer.read_within(&[(self.tables[table].clone(), theirs)], &pairs, timeout)
    }

    /// Bytes that differ from what such a read brings, or from the poison.
    pub(crate) fn wrong(&self, table: usize, was_read: bool) -> u64 {
        let blocks = self.tables[table].description().block_count;
        let all = (0..blocks).map(|n| {
            let source = was_read.then(|| blocks - 1 - n);
            wrong_bytes(&self.tables[table], &self.memory[table], n, source)
        });
        all.sum()
    }

    pub(crate) fn poison(&self, table: usize) {
        let memory = &self.memory[table];
        memory.fill(0, memory.bytes(), POISON).unwrap();
    }

    /// Reads a table once more; the bytes are right.
    pub(crate) fn reads(&self, peer: &Peer, table: usize) {
        self.poison(table);
        let transfer = self.start(peer, table, SLACK).unwrap();
        transfer.wait(SLACK * 2).unwrap().unwrap();
        assert_eq!(self.wrong(table, true), 0);
    }

    /// Nothing is left of any transfer.
    pub(crate) fn is_quiet(&self) {
        until("the end of the quarantine", || {
            let counters = self.engine.counters();
            (counters.quarantined_bytes, counters.quarantined_regions) == (0, 0)
        });
        for region in &self.regions {
            assert_eq!(region.operations(), 0);
        }
    }
}

/// A consumer in a process of its own.
pub(crate) fn reader(
    name: &str,
    blocks: u32,
    block_bytes: u64,
    settings: Settings,
    environment: Environment<'_>,
) -> Child {
    let reader = Reader {
        name: name.into(),
        blocks,
        block_bytes,
        settings,
    };
    let child = Child::start("reader", &reader, environment);
    let _: Value = child.hear();
    child
}

/// Tells a reader something, without waiting for what comes of it.
pub(crate) fn order(reader: &mut Child, order: &Order) {
    reader.tell(&serde_json::to_string(order).unwrap());
}

/// Tells a reader something and waits.
pub(crate) fn obey(reader: &mut Child, what: &Order) -> Done {
    order(reader, what);
    reader.hear()
}

pub(crate) fn connect(reader: &mut Child, name: &str, to: &Published, lane: &str) -> Done {
    obey(
        reader,
        &Order::Connect {
            name: name.into(),
            to: to.description.clone(),
            lane: lane.into(),
        },
    )
}

pub(crate) fn start(reader: &mut Child, name: &str, table: usize) -> Done {
    let (name, timeout_ms) = (name.into(), 60_000);
    obey(
        reader,
        &Order::Start {
            name,
            table,
            timeout_ms,
        },
    )
}

pub(crate) fn begin(reader: &mut Child, name: &str, table: usize) {
    assert_eq!(start(reader, name, table).error, "");
}

pub(crate) fn finish(reader: &mut Child, name: &str) -> Done {
    obey(reader, &Order::Finish { name: name.into() })
}

/// Connects, reads both tables and checks the bytes.
pub(crate) fn reads_all(reader: &mut Child, name: &str, to: &Published, lane: &str) {
    assert_eq!(connect(reader, name, to, lane).error, "");
    for table in [0, 1] {
        begin(reader, name, table);
        let done = finish(reader, name);
        assert_eq!((done.error.as_str(), done.wrong_bytes), ("", 0));
        assert_eq!((done.quarantined, done.open), ((0, 0), 0));
    }
}

//! Engines and tables to test with.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use kvferry_engine::wire::EngineId;
use kvferry_engine::{
    Engine, EngineBuilder, EngineConfig, FaultControl, FaultFabric, HostPool, Lane, LaneChoice,
    LoopbackFabric, LoopbackNetwork, MemoryRegion, Peer, RemoteTable, Replies, Sender, Service,
    Table, TableSpec, UcxFabric, UcxOptions,
};

pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Clone)]
pub(crate) enum Kind {
    Loopback(LoopbackNetwork),
    Ucx,
}

pub(crate) fn kinds() -> [Kind; 2] {
    [Kind::Loopback(LoopbackNetwork::new()), Kind::Ucx]
}

pub(crate) fn config(name: &str) -> EngineConfig {
    let mut config = EngineConfig::new(EngineId::new(name).unwrap());
    config.allow_emulation = true;
    config
}

pub(crate) fn start(kind: &Kind, builder: EngineBuilder) -> Engine {
    match kind {
        Kind::Loopback(network) => {
            let network = network.clone();
            builder
                .start_on(move || LoopbackFabric::new(&network, 4096))
                .unwrap()
        }
        Kind::Ucx => {
            let engine = builder.start().unwrap();
            let version = engine.ucx_version().unwrap();
            if let Ok(expected) = std::env::var("KVFERRY_EXPECT_UCX") {
                assert_eq!(format!("{}.{}", version.major, version.minor), expected);
            }
            engine
        }
    }
}

pub(crate) fn engine(kind: &Kind, name: &str) -> Engine {
    start(kind, Engine::builder(config(name)))
}

/// An engine over a fabric that `control` drives.
pub(crate) fn faulty(kind: &Kind, config: EngineConfig, control: &FaultControl) -> Engine {
    let options = UcxOptions::from(&config);
    let (builder, control) = (Engine::builder(config), control.clone());
    match kind {
        Kind::Loopback(network) => {
            let network = network.clone();
            builder
                .start_on(move || FaultFabric::new(LoopbackFabric::new(&network, 4096)?, &control))
        }
        Kind::Ucx => {
            builder.start_on(move || FaultFabric::new(UcxFabric::new(&options)?, &control))
        }
    }
    .unwrap()
}

/// A byte that names its place: table, block, position.
pub(crate) fn pattern(table: u32, block: u32, byte: u64) -> u8 {
    (table.wrapping_mul(31) ^ block.wrapping_mul(7) ^ byte as u32 ^ (byte >> 8) as u32) as u8
}

pub(crate) struct Side {
    pub(crate) engine: Engine,
    pub(crate) memory: MemoryRegion,
    pub(crate) tables: Vec<Table>,
    pub(crate) _region: kvferry_engine::Region,
}

/// An engine with `layers` tables of `count` blocks, `gap` bytes apart.
pub(crate) fn side(engine: Engine, layers: u32, count: u32, bytes: u64, gap: u64) -> Side {
    let span = u64::from(count) * (bytes + gap);
    let pool = HostPool::new((span * u64::from(layers)) as usize).unwrap();
    let memory = pool.region().unwrap();
    let region = engine.register(&memory).unwrap();
    let tables = (0..layers)
        .map(|layer| {
            let mut spec = TableSpec::dense(bytes, count)
                .at(span * u64::from(layer))
                .layer(layer);
            spec.block_stride = bytes + gap;
            engine.add_table(&region, spec).unwrap()
        })
        .collect();
    Side {
        engine,
        memory,
        tables,
        _region: region,
    }
}

impl Side {
    pub(crate) fn at(&self, table: u32, block: u32) -> u64 {
        let d = self.tables[table as usize].description();
        d.offset + u64::from(block) * d.block_stride
    }

    pub(crate) fn fill(&self) {
        for table in &self.tables {
            let d = table.description();
            for block in 0..d.block_count {
                let bytes: Vec<u8> = (0..d.block_bytes)
                    .map(|byte| pattern(d.layer, block, byte))
                    .collect();
                self.memory
                    .write_at(self.at(d.layer, block), &bytes)
                    .unwrap();
            }
        }
    }

    pub(crate) fn block(&self, table: u32, block: u32) -> Vec<u8> {
        let bytes = self.tables[table as usize].description().block_bytes;
        let mut out = vec![0; bytes as usize];
        self.memory
            .read_at(self.at(table, block), &mut out)
            .unwrap();
        out
    }
}

pub(crate) fn with_tables(consumer: &Side, peer: &Peer) -> Vec<(Table, RemoteTable)> {
    consumer.tables.iter().cloned().zip(peer.tables()).collect()
}

pub(crate) fn connect(consumer: &Engine, producer: &Engine, lane: Lane) -> Peer {
    consumer
        .connect(producer.describe().unwrap(), LaneChoice::Pinned(lane))
        .unwrap()
}

/// A service that ignores what it hears.
pub(crate) struct Ignore;

impl Service for Ignore {
    fn on_message(&mut self, _: Sender, _: &[u8], _: &mut Replies) {}

    fn on_tick(&mut self, _: Instant, _: &mut Replies) -> Option<Instant> {
        None
    }
}

/// A service that holds the progress thread up when it is woken, until it is told to go on.
pub(crate) struct Park {
    parked: mpsc::Sender<()>,
    go: mpsc::Receiver<()>,
    first: bool,
}

impl Service for Park {
    fn on_message(&mut self, _: Sender, _: &[u8], _: &mut Replies) {}

    fn on_tick(&mut self, _: Instant, _: &mut Replies) -> Option<Instant> {
        // The first call comes by itself when the engine starts.
        if !std::mem::take(&mut self.first) {
            let _ = self.parked.send(());
            let _ = self.go.recv_timeout(PATIENCE);
        }
        None
    }
}

/// The other end of a [`Park`].
pub(crate) struct Parked {
    is_parked: mpsc::Receiver<()>,
    go: mpsc::Sender<()>,
}

impl Parked {
    /// Holds the engine's thread up.
    pub(crate) fn park(&self, engine: &Engine) {
        engine.wake_services().unwrap();
        self.is_parked.recv_timeout(PATIENCE).unwrap();
    }

    /// Lets it go on.
    pub(crate) fn go(&self) {
        self.go.send(()).unwrap();
    }
}

pub(crate) fn park() -> (Box<Park>, Parked) {
    let (parked, is_parked) = mpsc::channel();
    let (go, told) = mpsc::channel();
    let service = Park {
        parked,
        go: told,
        first: true,
    };
    (Box::new(service), Parked { is_parked, go })
}

/// Waits, by turns of the scheduler, until something has been counted.
pub(crate) fn until(what: &str, mut happened: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !happened() {
        assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}");
        std::thread::yield_now();
    }
}

pub(crate) fn loopback() -> Kind {
    Kind::Loopback(LoopbackNetwork::new())
}

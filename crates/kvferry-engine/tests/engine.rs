//! Two engines in one process, over the loopback fabric and over UCX: bytes, counts, errors.
//!
//! What needs two processes lives in the workspace's `tests/`.

#![allow(missing_docs, clippy::unwrap_used)]

use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use kvferry_engine::wire::{EngineId, MemoryKind};
use kvferry_engine::{
    BlockPair, ConnectError, DeregisterError, Engine, EngineBuilder, EngineConfig, HostPool, Lane,
    LaneChoice, LoopbackFabric, LoopbackNetwork, MemoryRegion, Peer, ReadError, RegisterError,
    RemoteTable, Replies, SendError, Sender, Service, Table, TableSpec, TransferError,
};

const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Clone)]
enum Kind {
    Loopback(LoopbackNetwork),
    Ucx,
}

fn kinds() -> [Kind; 2] {
    [Kind::Loopback(LoopbackNetwork::new()), Kind::Ucx]
}

fn config(name: &str) -> EngineConfig {
    let mut config = EngineConfig::new(EngineId::new(name).unwrap());
    config.allow_emulation = true;
    config
}

fn start(kind: &Kind, builder: EngineBuilder) -> Engine {
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

fn engine(kind: &Kind, name: &str) -> Engine {
    start(kind, Engine::builder(config(name)))
}

/// A byte that names its place: table, block, position.
fn pattern(table: u32, block: u32, byte: u64) -> u8 {
    (table.wrapping_mul(31) ^ block.wrapping_mul(7) ^ byte as u32 ^ (byte >> 8) as u32) as u8
}

struct Side {
    engine: Engine,
    memory: MemoryRegion,
    tables: Vec<Table>,
    _region: kvferry_engine::Region,
}

/// An engine with `layers` tables of `count` blocks, `gap` bytes apart.
fn side(engine: Engine, layers: u32, count: u32, bytes: u64, gap: u64) -> Side {
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
    fn at(&self, table: u32, block: u32) -> u64 {
        let d = self.tables[table as usize].description();
        d.offset + u64::from(block) * d.block_stride
    }

    fn fill(&self) {
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

    fn block(&self, table: u32, block: u32) -> Vec<u8> {
        let bytes = self.tables[table as usize].description().block_bytes;
        let mut out = vec![0; bytes as usize];
        self.memory
            .read_at(self.at(table, block), &mut out)
            .unwrap();
        out
    }
}

fn with_tables(consumer: &Side, peer: &Peer) -> Vec<(Table, RemoteTable)> {
    consumer.tables.iter().cloned().zip(peer.tables()).collect()
}

fn connect(consumer: &Engine, producer: &Engine, lane: Lane) -> Peer {
    consumer
        .connect(producer.describe().unwrap(), LaneChoice::Pinned(lane))
        .unwrap()
}

#[test]
fn scattered_blocks_arrive_over_both_lanes_and_nothing_else_is_touched() {
    for kind in kinds() {
        for (lane, gaps) in [
            (Lane::Served, (0, 0)),
            (Lane::Served, (64, 0)),
            (Lane::Native, (0, 0)),
            (Lane::Native, (0, 32)),
        ] {
            let producer = side(engine(&kind, "producer"), 3, 64, 1000, gaps.0);
            producer.fill();
            let consumer = side(engine(&kind, "consumer"), 3, 32, 1000, gaps.1);
            consumer
                .memory
                .fill(0, consumer.memory.bytes(), 0xEE)
                .unwrap();
            let peer = connect(&consumer.engine, &producer.engine, lane);
            assert_eq!(peer.lane(), lane);
            // Two neighbours, one reversed pair, scattered ones: 7 runs of ids.
            let ids = [
                (0, 10),
                (1, 11),
                (2, 12),
                (5, 40),
                (4, 41),
                (9, 63),
                (20, 0),
                (21, 1),
                (30, 33),
            ];
            let pairs: Vec<BlockPair> = ids.iter().map(|&(l, r)| BlockPair::new(l, r)).collect();
            let tables = with_tables(&consumer, &peer);
            let report = peer
                .read(&tables, &pairs)
                .unwrap()
                .wait(PATIENCE)
                .unwrap()
                .unwrap();
            let merged = gaps == (0, 0);
            assert_eq!(report.bytes, 3 * 9 * 1000);
            assert_eq!(report.operations, if merged { 3 * 6 } else { 3 * 9 });
            for layer in 0..3 {
                for block in 0..32 {
                    let got = consumer.block(layer, block);
                    match ids.iter().find(|&&(local, _)| local == block) {
                        Some(&(_, remote)) => assert_eq!(got, producer.block(layer, remote)),
                        None => assert!(got.iter().all(|&byte| byte == 0xEE)),
                    }
                }
            }
            let counters = consumer.engine.counters();
            assert!(counters.ucx_operations > 0);
            assert_eq!(counters.block_operations, report.operations);
            let (served, native) = (counters.served_bytes, counters.native_bytes);
            assert_eq!(
                (served, native),
                match lane {
                    Lane::Native => (0, report.bytes),
                    _ => (report.bytes, 0),
                }
            );
            if lane == Lane::Native {
                // The greeting is one message; everything else is a read each.
                assert_eq!(
                    counters.ucx_operations - counters.messages_sent,
                    report.operations
                );
            }
            assert_eq!(counters.quarantined_bytes, 0);
            assert_eq!(consumer._region.operations(), 0);
        }
    }
}

#[test]
fn many_transfers_at_once_all_end_with_their_own_bytes() {
    for kind in kinds() {
        for lane in [Lane::Served, Lane::Native] {
            let producer = side(engine(&kind, "producer"), 2, 256, 4096, 0);
            producer.fill();
            let consumer = side(engine(&kind, "consumer"), 2, 256, 4096, 0);
            let peer = connect(&consumer.engine, &producer.engine, lane);
            let tables = with_tables(&consumer, &peer);
            let transfers: Vec<_> = (0..32_u32)
                .map(|n| {
                    let pairs: Vec<BlockPair> = (0..8)
                        .map(|i| BlockPair::new(n * 8 + i, (n * 8 + i).wrapping_mul(37) % 256))
                        .collect();
                    peer.read(&tables, &pairs).unwrap()
                })
                .collect();
            for transfer in transfers {
                assert_eq!(
                    transfer.wait(PATIENCE).unwrap().unwrap().bytes,
                    2 * 8 * 4096
                );
            }
            for block in 0..256_u32 {
                for layer in 0..2 {
                    let remote = block.wrapping_mul(37) % 256;
                    assert_eq!(consumer.block(layer, block), producer.block(layer, remote));
                }
            }
            assert_eq!(consumer.engine.counters().transfers_succeeded, 32);
        }
    }
}

#[test]
fn a_transfer_can_be_awaited() {
    let kind = Kind::Loopback(LoopbackNetwork::new());
    let producer = side(engine(&kind, "producer"), 1, 4, 64, 0);
    producer.fill();
    let consumer = side(engine(&kind, "consumer"), 1, 4, 64, 0);
    let peer = connect(&consumer.engine, &producer.engine, Lane::Served);
    let mut transfer = peer
        .read(&with_tables(&consumer, &peer), &[BlockPair::new(3, 2)])
        .unwrap();
    // The smallest executor: a waker that unparks this thread.
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(std::thread::current())).into();
    let mut context = std::task::Context::from_waker(&waker);
    let report = loop {
        match std::pin::Pin::new(&mut transfer).poll(&mut context) {
            std::task::Poll::Ready(outcome) => break outcome.unwrap(),
            std::task::Poll::Pending => std::thread::park_timeout(PATIENCE),
        }
    };
    assert_eq!((report.bytes, report.lane), (64, Some(Lane::Served)));
    assert_eq!(consumer.block(0, 3), producer.block(0, 2));
    use std::future::Future;
}

#[test]
fn bad_reads_are_refused_by_name_and_disturb_nobody() {
    for kind in kinds() {
        let producer = side(engine(&kind, "producer"), 1, 8, 64, 0);
        producer.fill();
        let consumer = side(engine(&kind, "consumer"), 1, 4, 64, 0);
        let peer = connect(&consumer.engine, &producer.engine, Lane::Served);
        let tables = with_tables(&consumer, &peer);
        let refused = |pairs: &[(u32, u32)]| {
            let pairs: Vec<BlockPair> = pairs.iter().map(|&(l, r)| BlockPair::new(l, r)).collect();
            peer.read(&tables, &pairs).unwrap_err()
        };
        assert_eq!(
            refused(&[(0, 0), (4, 0)]),
            ReadError::LocalBlock { block: 4, count: 4 }
        );
        assert_eq!(
            refused(&[(0, 8)]),
            ReadError::RemoteBlock { block: 8, count: 8 }
        );
        let other = side(engine(&kind, "other"), 1, 8, 32, 0);
        let foreign = vec![(other.tables[0].clone(), tables[0].1.clone())];
        let error = peer.read(&foreign, &[BlockPair::new(0, 0)]).unwrap_err();
        assert!(
            matches!(
                error,
                ReadError::Mismatch {
                    field: "block_bytes",
                    ..
                }
            ),
            "{error}"
        );
        let twin = side(engine(&kind, "twin"), 1, 8, 64, 0);
        let foreign = vec![(twin.tables[0].clone(), tables[0].1.clone())];
        let error = peer.read(&foreign, &[BlockPair::new(0, 0)]).unwrap_err();
        assert!(
            matches!(error, ReadError::LocalTable { table: 0 }),
            "{error}"
        );
        let to_twin = connect(&consumer.engine, &twin.engine, Lane::Served);
        let error = to_twin.read(&tables, &[BlockPair::new(0, 0)]).unwrap_err();
        assert!(matches!(error, ReadError::StaleTable { .. }), "{error}");
        // Nothing to read has succeeded already.
        let report = peer
            .read(&tables, &[])
            .unwrap()
            .wait(Duration::ZERO)
            .unwrap()
            .unwrap();
        assert_eq!((report.bytes, report.operations, report.lane), (0, 0, None));
        let report = peer
            .read(&tables, &[BlockPair::new(0, 7)])
            .unwrap()
            .wait(PATIENCE);
        assert_eq!(report.unwrap().unwrap().bytes, 64);
        assert_eq!(consumer.block(0, 0), producer.block(0, 7));
    }
}

#[test]
fn a_read_of_a_table_that_was_withdrawn_is_rejected() {
    for kind in kinds() {
        let producer = side(engine(&kind, "producer"), 1, 8, 64, 0);
        let consumer = side(engine(&kind, "consumer"), 1, 8, 64, 0);
        let peer = connect(&consumer.engine, &producer.engine, Lane::Served);
        let tables = with_tables(&consumer, &peer);
        let Side {
            engine: producer_engine,
            _region: region,
            ..
        } = producer;
        region.deregister(PATIENCE).unwrap();
        let outcome = peer
            .read(&tables, &[BlockPair::new(0, 0)])
            .unwrap()
            .wait(PATIENCE)
            .unwrap();
        let error = outcome.unwrap_err();
        assert!(matches!(error, TransferError::Rejected { .. }), "{error}");
        assert_eq!(error.class(), kvferry_engine::ErrorClass::Rejected);
        assert_eq!(producer_engine.counters().reads_rejected, 1);
        assert!(peer.gone().is_none(), "a refusal closes nothing");
    }
}

#[test]
fn c78_registration_errors_say_address_length_kind_and_status() {
    for kind in kinds() {
        let engine = engine(&kind, "e");
        let pool = HostPool::new(1 << 16).unwrap();
        let memory = pool.region().unwrap();
        let region = engine.register(&memory).unwrap();
        let again = engine.register(&memory).unwrap();
        assert_eq!(
            region.id(),
            again.id(),
            "the same range is one registration"
        );
        let base = std::ptr::NonNull::new(memory.address() as *mut u8).unwrap();
        // SAFETY: the pool outlives the call, which refuses anyway.
        #[allow(unsafe_code)]
        let part = unsafe { MemoryRegion::borrowed(base, 4096) }.unwrap();
        let error = engine.register(&part).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, RegisterError::Overlap { .. }), "{text}");
        assert!(
            text.contains("4096 bytes of host memory") && text.contains("65536"),
            "{text}"
        );
        assert!(text.contains(&format!("{:#x}", memory.address())), "{text}");
        // An address at which nothing is mapped.
        let nowhere = std::ptr::NonNull::new(0x10_000 as *mut u8).unwrap();
        // SAFETY: nothing is ever accessed: the registration is refused.
        #[allow(unsafe_code)]
        let hole = unsafe { MemoryRegion::borrowed(nowhere, 8192) }.unwrap();
        let text = engine.register(&hole).unwrap_err().to_string();
        assert!(
            text.contains("8192 bytes of host memory at 0x10000")
                && text.contains("not all of it is mapped"),
            "{text}"
        );
        region.deregister(PATIENCE).unwrap();
        assert!(
            engine.add_table(&again, TableSpec::dense(64, 4)).is_ok(),
            "counted, still there"
        );
        again.deregister(PATIENCE).unwrap();
        engine.register(&memory).unwrap();
    }
}

/// C78, in UCX's words: memory of a kind that this UCX cannot register.
#[test]
fn c78_a_kind_that_ucx_cannot_register_is_refused_with_its_status() {
    let engine = engine(&Kind::Ucx, "e");
    let pool = HostPool::new(4096).unwrap();
    let base = std::ptr::NonNull::new(pool.region().unwrap().address() as *mut u8).unwrap();
    let kind = MemoryKind::Rocm { device: 1 };
    // SAFETY: never accessed as device memory; the registration is refused.
    #[allow(unsafe_code)]
    let memory = unsafe { MemoryRegion::borrowed_kind(base, 4096, kind) }.unwrap();
    let error = engine.register(&memory).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, RegisterError::Fabric { .. }), "{text}");
    assert!(text.contains("4096 bytes of rocm:1 memory"), "{text}");
    assert!(
        text.contains(&format!("{:#x}", pool.region().unwrap().address())),
        "{text}"
    );
}

#[test]
fn tables_that_do_not_fit_are_refused_by_field() {
    let kind = Kind::Loopback(LoopbackNetwork::new());
    let engine = engine(&kind, "e");
    let memory = HostPool::new(4096).unwrap().region().unwrap();
    let region = engine.register(&memory).unwrap();
    for (spec, part) in [
        (TableSpec::dense(0, 4), "block_bytes"),
        (TableSpec::dense(64, 0), "block_count"),
        (TableSpec::dense(64, 65), "4096"),
        (TableSpec::dense(64, 64).at(1), "4096"),
        (TableSpec::dense(64, 4).at(u64::MAX), "offset"),
        (TableSpec::dense(u64::MAX, u32::MAX), "table"),
    ] {
        let text = engine
            .add_table(&region, spec.clone())
            .unwrap_err()
            .to_string();
        assert!(text.contains(part), "{spec:?}: {text}");
    }
    let mut narrow = TableSpec::dense(64, 4);
    narrow.block_stride = 63;
    assert!(
        engine
            .add_table(&region, narrow)
            .unwrap_err()
            .to_string()
            .contains("block_stride")
    );
    assert_eq!(engine.describe().unwrap().tables.len(), 0);
}

/// C125: what peers are told depends on regions and tables, not on blocks.
#[test]
fn c125_description_bytes_do_not_depend_on_the_number_of_blocks() {
    let kind = Kind::Loopback(LoopbackNetwork::new());
    let bytes = |count: u32| {
        let side = side(engine(&kind, "e"), 32, count, 16, 0);
        side.engine.describe().unwrap().encode().unwrap().len()
    };
    // Numbers of one size in msgpack, as offsets and strides are too.
    assert_eq!(bytes(70_000), bytes(700_000));
}

/// Records what arrives, and answers each message with its length.
struct Recorder {
    seen: Seen,
    told: mpsc::Sender<usize>,
    answer: bool,
}

impl Service for Recorder {
    fn on_message(&mut self, from: Sender, payload: &[u8], replies: &mut Replies) {
        let mut seen = self.seen.lock().unwrap();
        seen.push(payload.to_vec());
        let _ = self.told.send(seen.len());
        if self.answer {
            replies.send(from.peer, 7, (payload.len() as u64).to_le_bytes().to_vec());
        }
    }

    fn on_tick(&mut self, _now: Instant, _replies: &mut Replies) -> Option<Instant> {
        None
    }
}

type Seen = Arc<Mutex<Vec<Vec<u8>>>>;

fn recorder(answer: bool) -> (Box<Recorder>, Seen, mpsc::Receiver<usize>) {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (told, heard) = mpsc::channel();
    (
        Box::new(Recorder {
            seen: Arc::clone(&seen),
            told,
            answer,
        }),
        seen,
        heard,
    )
}

#[test]
fn messages_of_any_size_arrive_whole_in_order_and_are_answered() {
    for kind in kinds() {
        let (service, seen, _heard) = recorder(true);
        let server = start(&kind, Engine::builder(config("server")).service(7, service));
        let (service, answers, heard) = recorder(false);
        let client = start(&kind, Engine::builder(config("client")).service(7, service));
        let peer = connect(&client, &server, Lane::Served);
        let sizes = [1, 100, 4096, 4097, 70_000, 1 << 20, 5 << 20, 3];
        for (n, &size) in sizes.iter().enumerate() {
            peer.send(7, vec![n as u8; size]).unwrap();
        }
        while heard.recv_timeout(PATIENCE).unwrap() < sizes.len() {}
        let seen = seen.lock().unwrap();
        for (n, &size) in sizes.iter().enumerate() {
            assert_eq!(seen[n], vec![n as u8; size]);
            assert_eq!(answers.lock().unwrap()[n], (size as u64).to_le_bytes());
        }
        let error = peer.send(7, vec![]).unwrap_err();
        assert!(matches!(error, SendError::Size { bytes: 0, .. }), "{error}");
        let error = peer.send(7, vec![0; 17 << 20]).unwrap_err();
        assert!(error.to_string().contains("17825792"), "{error}");
    }
}

#[test]
fn a_new_life_at_an_old_address_refuses_the_old_description() {
    for kind in kinds() {
        let consumer = engine(&kind, "consumer");
        let producer = engine(&kind, "producer");
        // The address of one engine in the description of another life: what a reused port is.
        let mut stale = producer.describe().unwrap();
        let other = engine(&kind, "stranger");
        stale.addresses = other.describe().unwrap().addresses;
        let error = consumer.connect(stale, LaneChoice::Auto).unwrap_err();
        assert!(matches!(error, ConnectError::Refused { .. }), "{error}");
        let text = error.to_string();
        assert!(
            text.contains("stranger") && text.contains("producer"),
            "{text}"
        );
        // The right one still works, also after the refusal.
        let peer = consumer
            .connect(producer.describe().unwrap(), LaneChoice::Auto)
            .unwrap();
        assert!(peer.gone().is_none());
    }
}

#[test]
fn both_sides_may_connect_at_once() {
    for kind in kinds() {
        let (a, b) = (engine(&kind, "a"), engine(&kind, "b"));
        let (to_a, to_b) = (a.describe().unwrap(), b.describe().unwrap());
        let other = {
            let b = b.clone();
            std::thread::spawn(move || b.connect(to_a, LaneChoice::Auto).unwrap())
        };
        let peer = a.connect(to_b.clone(), LaneChoice::Auto).unwrap();
        let back = other.join().unwrap();
        assert_eq!(peer.incarnation(), b.incarnation());
        assert_eq!(back.incarnation(), a.incarnation());
        let again = a.connect(to_b, LaneChoice::Auto).unwrap();
        assert_eq!(again.id(), peer.id(), "connected already");
        assert!(peer.gone().is_none() && back.gone().is_none());
    }
}

#[test]
fn lanes_that_cannot_be_used_are_refused_by_name() {
    for kind in kinds() {
        let (a, b) = (engine(&kind, "a"), engine(&kind, "b"));
        for lane in [Lane::Mapped, Lane::Attached] {
            let error = a
                .connect(b.describe().unwrap(), LaneChoice::Pinned(lane))
                .unwrap_err();
            let text = error.to_string();
            assert!(
                text.contains(lane.name()) && text.contains("does not have it yet"),
                "{text}"
            );
        }
        let mut without = EngineConfig::new(EngineId::new("c").unwrap());
        without.allow_emulation = false;
        if matches!(kind, Kind::Ucx) {
            let c = start(&kind, Engine::builder(without));
            let error = c
                .connect(b.describe().unwrap(), LaneChoice::Pinned(Lane::Native))
                .unwrap_err();
            assert!(error.to_string().contains("native"), "{error}");
            let peer = c.connect(b.describe().unwrap(), LaneChoice::Auto).unwrap();
            assert_eq!(peer.lane(), Lane::Served);
        }
    }
}

#[test]
fn connecting_to_nobody_or_oneself_is_an_error() {
    for kind in kinds() {
        let a = engine(&kind, "a");
        let error = a
            .connect(a.describe().unwrap(), LaneChoice::Auto)
            .unwrap_err();
        assert!(error.to_string().contains("this engine's own"), "{error}");
        let b = engine(&kind, "b");
        let gone = b.describe().unwrap();
        b.shutdown(PATIENCE).unwrap();
        let error = a.connect(gone, LaneChoice::Auto).unwrap_err();
        assert!(error.to_string().contains("peer b"), "{error}");
    }
}

#[test]
fn shutdown_ends_transfers_peers_and_handles() {
    for kind in kinds() {
        let producer = side(engine(&kind, "producer"), 1, 8, 64, 0);
        let consumer = side(engine(&kind, "consumer"), 1, 8, 64, 0);
        let peer = connect(&consumer.engine, &producer.engine, Lane::Served);
        let tables = with_tables(&consumer, &peer);
        producer.engine.shutdown(PATIENCE).unwrap();
        // The goodbye, or the next read, makes the end known.
        let outcome = peer.read(&tables, &[BlockPair::new(0, 0)]);
        if let Ok(transfer) = outcome {
            let error = transfer.wait(PATIENCE).unwrap().unwrap_err();
            assert!(matches!(error, TransferError::PeerLost(_)), "{error}");
        }
        assert!(peer.gone().is_some());
        assert!(producer.engine.describe().is_err());
        let memory = HostPool::new(64).unwrap().region().unwrap();
        assert!(producer.engine.register(&memory).is_err());
        assert!(
            producer.engine.shutdown(PATIENCE).is_err(),
            "it has ended before"
        );
        consumer.engine.shutdown(PATIENCE).unwrap();
        assert!(peer.read(&tables, &[BlockPair::new(0, 0)]).is_err());
        assert_eq!(consumer.engine.counters().quarantined_bytes, 0);
    }
}

#[test]
fn a_cancelled_transfer_ends_once_and_later_ones_work() {
    for kind in kinds() {
        let producer = side(engine(&kind, "producer"), 1, 4096, 4096, 0);
        producer.fill();
        let consumer = side(engine(&kind, "consumer"), 1, 4096, 4096, 0);
        let peer = connect(&consumer.engine, &producer.engine, Lane::Served);
        let tables = with_tables(&consumer, &peer);
        let pairs: Vec<BlockPair> = (0..4096).map(|n| BlockPair::new(n, 4095 - n)).collect();
        for _ in 0..20 {
            let transfer = peer.read(&tables, &pairs).unwrap();
            transfer.cancel();
            match transfer.wait(PATIENCE).unwrap() {
                Ok(report) => assert_eq!(report.bytes, 4096 * 4096),
                Err(error) => assert!(matches!(error, TransferError::Cancelled), "{error}"),
            }
            assert!(transfer.is_quiesced());
        }
        let report = peer
            .read(&tables, &pairs)
            .unwrap()
            .wait(PATIENCE)
            .unwrap()
            .unwrap();
        assert_eq!(report.bytes, 4096 * 4096);
        assert_eq!(consumer.block(0, 4095), producer.block(0, 0));
        assert_eq!(consumer.engine.counters().transfers_started, 21);
    }
}

#[test]
fn a_region_in_use_is_busy_and_given_up_afterwards() {
    // A loopback producer that has gone silent: its thread blocks in a service.
    struct Block(mpsc::Receiver<()>);
    impl Service for Block {
        fn on_message(&mut self, _: Sender, _: &[u8], _: &mut Replies) {
            let _ = self.0.recv_timeout(PATIENCE);
        }
        fn on_tick(&mut self, _: Instant, _: &mut Replies) -> Option<Instant> {
            None
        }
    }
    let kind = Kind::Loopback(LoopbackNetwork::new());
    let (release, blocked) = mpsc::channel();
    let builder = Engine::builder(config("producer")).service(9, Box::new(Block(blocked)));
    let producer = side(start(&kind, builder), 1, 8, 64, 0);
    producer.fill();
    let consumer = side(engine(&kind, "consumer"), 1, 8, 64, 0);
    let peer = connect(&consumer.engine, &producer.engine, Lane::Served);
    let tables = with_tables(&consumer, &peer);
    peer.send(9, vec![1]).unwrap();
    let transfer = peer.read(&tables, &[BlockPair::new(0, 0)]).unwrap();
    let Side {
        engine,
        _region: region,
        ..
    } = consumer;
    let error = region.deregister(Duration::from_millis(10)).unwrap_err();
    assert!(
        matches!(error, DeregisterError::Busy { operations: 1, .. }),
        "{error}"
    );
    assert_eq!(engine.counters().quarantined_regions, 1);
    release.send(()).unwrap();
    assert_eq!(transfer.wait(PATIENCE).unwrap().unwrap().bytes, 64);
    engine.wake_services().unwrap();
    // A registration is answered after the region before it was given up.
    let memory = HostPool::new(64).unwrap().region().unwrap();
    engine.register(&memory).unwrap();
    assert_eq!(engine.counters().quarantined_regions, 0);
}

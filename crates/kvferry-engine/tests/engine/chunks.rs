//! Regions above the limit for one registration: cut, all or nothing, and read across the cuts.

use kvferry_engine::{
    BlockPair, Engine, EngineBuilder, Fault, FaultControl, FaultFabric, FaultRates, HostPool, Lane,
    LoopbackFabric, LoopbackNetwork, MemoryRegion, RegisterError, TransferError,
};

use crate::support::*;

const PAGE: u64 = 4096;

fn limited(network: &LoopbackNetwork, builder: EngineBuilder, limit: u64) -> Engine {
    let network = network.clone();
    builder
        .start_on(move || Ok(LoopbackFabric::new(&network, 4096)?.limit_registrations(limit)))
        .unwrap()
}

fn engine_of(network: &LoopbackNetwork, name: &str, limit: u64) -> Engine {
    limited(network, Engine::builder(config(name)), limit)
}

/// Pieces of the runs of these pairs, block by block and byte by byte.
fn pieces(local: &Side, remote: &Side, pairs: &[BlockPair], limits: (u64, u64)) -> u64 {
    let mut count = 0;
    for table in 0..local.tables.len() as u32 {
        let mut before = None;
        for pair in pairs {
            let (l, r) = (local.at(table, pair.local), remote.at(table, pair.remote));
            let bytes = local.tables[table as usize].description().block_bytes;
            for at in 0..bytes {
                let here = (l + at, r + at);
                let goes_on = before == Some((here.0.wrapping_sub(1), here.1.wrapping_sub(1)));
                let cut = here.0 % limits.0 == 0 || here.1 % limits.1 == 0;
                count += u64::from(!goes_on || cut);
                before = Some(here);
            }
        }
    }
    count
}

/// C79: regions above a device's limit are split, never truncated; a read across the cuts of either
/// side brings every byte.
#[test]
fn c79_regions_above_the_limit_are_split_and_read_across_the_cuts() {
    const BLOCK: u64 = 1500;
    for (ours, theirs) in [(2 * PAGE, 3 * PAGE), (PAGE, 1 << 30), (1 << 30, PAGE)] {
        let network = LoopbackNetwork::new();
        let producer = side(engine_of(&network, "producer", theirs), 2, 40, BLOCK, 0);
        producer.fill();
        let consumer = side(engine_of(&network, "consumer", ours), 2, 30, BLOCK, 0);
        let described = &producer.engine.describe().unwrap().regions[0];
        let chunks = described.bytes.div_ceil(theirs);
        assert_eq!(described.chunk_bytes, theirs.min(described.bytes));
        assert_eq!(described.keys.len() as u64, chunks);
        assert_eq!(producer._region.chunks(), chunks);
        assert_eq!(
            network.registrations() as u64,
            chunks + consumer._region.chunks()
        );

        let peer = connect(&consumer.engine, &producer.engine, Lane::Native);
        let tables = with_tables(&consumer, &peer);
        let mut pairs: Vec<BlockPair> = (0..20).map(|n| BlockPair::new(n, n + 15)).collect();
        pairs.extend([BlockPair::new(25, 3), BlockPair::new(27, 39)]);
        let transfer = peer.read(&tables, &pairs).unwrap();
        let report = transfer.wait(PATIENCE).unwrap().unwrap();
        assert_eq!(report.bytes, 2 * 22 * BLOCK);
        let expected = pieces(&consumer, &producer, &pairs, (ours, theirs));
        assert_eq!(report.operations, expected);
        assert!(expected > 2 * 3, "some runs are cut");
        for table in 0..2 {
            for pair in &pairs {
                assert_eq!(
                    consumer.block(table, pair.local),
                    producer.block(table, pair.remote)
                );
            }
        }
        let Side {
            engine, _region, ..
        } = consumer;
        _region.deregister(PATIENCE).unwrap();
        assert_eq!(network.registrations() as u64, chunks);
        drop(engine);
    }
}

/// The configuration lowers the fabric's limit and does not raise it; without either there is one
/// registration.
#[test]
fn c79_the_lower_of_the_two_limits_holds() {
    let network = LoopbackNetwork::new();
    let memory = HostPool::new((8 * PAGE + 1) as usize)
        .unwrap()
        .region()
        .unwrap();
    let chunks = |of_fabric: Option<u64>, configured: Option<u64>| {
        let mut config = config("e");
        config.max_registration_bytes = configured;
        let builder = Engine::builder(config);
        let engine = match of_fabric {
            Some(limit) => limited(&network, builder, limit),
            None => start(&Kind::Loopback(network.clone()), builder),
        };
        let region = engine.register(&memory).unwrap();
        region.chunks()
    };
    assert_eq!(chunks(None, None), 1);
    assert_eq!(chunks(None, Some(4 * PAGE)), 3);
    assert_eq!(chunks(Some(2 * PAGE), Some(4 * PAGE)), 5);
    assert_eq!(chunks(Some(4 * PAGE), Some(2 * PAGE)), 5);
    // A fabric's limit in whole pages.
    assert_eq!(chunks(Some(2 * PAGE + 1), None), 5);
}

/// A chunk that is refused takes the ones before it along, and the error names it.
#[test]
fn c79_a_refused_chunk_unwinds_the_others() {
    const CHUNKS: u64 = 6;
    let memory = HostPool::new((CHUNKS * PAGE) as usize)
        .unwrap()
        .region()
        .unwrap();
    let mut seen = [false; CHUNKS as usize];
    for seed in 0..200 {
        let network = LoopbackNetwork::new();
        let control = FaultControl::new(seed, FaultRates::none()).unwrap();
        let engine = {
            let (network, control) = (network.clone(), control.clone());
            Engine::builder(config("e"))
                .start_on(move || {
                    let fabric = LoopbackFabric::new(&network, 4096)?.limit_registrations(PAGE);
                    FaultFabric::new(fabric, &control)
                })
                .unwrap()
        };
        control.set_rates(FaultRates::none().with(Fault::RegisterRefused, 300));
        let Err(error) = engine.register(&memory) else {
            continue;
        };
        let text = error.to_string();
        let RegisterError::Fabric {
            chunk: Some(chunk),
            address,
            bytes,
            ..
        } = error
        else {
            panic!("{text}")
        };
        assert_eq!((address, bytes), (memory.address(), CHUNKS * PAGE));
        assert_eq!((chunk.count, chunk.bytes), (CHUNKS, PAGE));
        assert_eq!(chunk.address, memory.address() + chunk.index * PAGE);
        let named = format!(
            "chunk {} of 6 (4096 bytes at {:#x})",
            chunk.index, chunk.address
        );
        assert!(text.contains(&named) && text.contains("injected"), "{text}");
        assert_eq!(network.registrations(), 0, "chunk {} failed", chunk.index);
        seen[chunk.index as usize] = true;
        // The range is free again.
        control.set_rates(FaultRates::none());
        let region = engine.register(&memory).unwrap();
        assert_eq!((region.chunks(), network.registrations()), (CHUNKS, 6));
        if seen == [true; CHUNKS as usize] {
            return;
        }
    }
    panic!("only these chunks were refused: {seen:?}");
}

/// A limit so low that the keys would not fit a description.
#[test]
fn c79_more_chunks_than_can_be_described_are_refused() {
    let network = LoopbackNetwork::new();
    let engine = engine_of(&network, "e", PAGE);
    let bytes = 65_536 * PAGE;
    let large = HostPool::new((bytes + 1) as usize)
        .unwrap()
        .region()
        .unwrap();
    let error = engine.register(&large).unwrap_err();
    assert!(
        matches!(
            error,
            RegisterError::TooManyChunks {
                chunks: 65_537,
                others: 0,
                ..
            }
        ),
        "{error}"
    );
    assert!(
        error.to_string().contains("raise max_registration_bytes"),
        "{error}"
    );
    assert_eq!(network.registrations(), 0);
    let small = HostPool::new(1).unwrap().region().unwrap();
    let _small = engine.register(&small).unwrap();
    let base = std::ptr::NonNull::new(large.address() as *mut u8).unwrap();
    // SAFETY: `large` outlives it.
    #[allow(unsafe_code)]
    let rest = unsafe { MemoryRegion::borrowed(base, bytes as usize) }.unwrap();
    let error = engine.register(&rest).unwrap_err();
    assert!(
        matches!(error, RegisterError::TooManyChunks { others: 1, .. }),
        "{error}"
    );
}

/// A key that cannot be imported, in the middle of a read, fails the read and nothing else.
#[test]
fn c79_a_key_of_one_chunk_that_is_refused_fails_the_read() {
    let network = LoopbackNetwork::new();
    let producer = side(engine_of(&network, "producer", PAGE), 1, 8, PAGE, 0);
    producer.fill();
    let control = FaultControl::new(1, FaultRates::none()).unwrap();
    let engine = faulty(&Kind::Loopback(network), config("consumer"), &control);
    let consumer = side(engine, 1, 8, PAGE, 0);
    let peer = connect(&consumer.engine, &producer.engine, Lane::Native);
    let tables = with_tables(&consumer, &peer);
    let read = |first: u32, count: u32| {
        let pairs: Vec<_> = (first..first + count)
            .map(|n| BlockPair::new(n, n))
            .collect();
        let transfer = peer.read(&tables, &pairs).unwrap();
        transfer.wait(PATIENCE).unwrap()
    };
    assert_eq!(read(0, 2).unwrap().operations, 2);
    control.set_rates(FaultRates::none().with(Fault::KeyRefused, 1000));
    // Two chunks have their keys already, the third needs one.
    let error = read(0, 3).unwrap_err();
    assert!(matches!(error, TransferError::Operation(_)), "{error}");
    assert_eq!(read(0, 2).unwrap().operations, 2, "these need none");
    control.set_rates(FaultRates::none());
    assert_eq!(read(0, 8).unwrap().operations, 8);
    for block in 0..8 {
        assert_eq!(consumer.block(0, block), producer.block(0, block));
    }
    assert_eq!(control.injected(Fault::KeyRefused), 1);
}

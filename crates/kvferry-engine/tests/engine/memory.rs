//! Regions, tables, registration.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use kvferry_engine::wire::MemoryKind;
use kvferry_engine::{
    BlockPair, DeregisterError, Engine, FaultControl, FaultRates, HostPool, Lane, LoopbackNetwork,
    MemoryRegion, RegisterError, Replies, Sender, Service, TableSpec, TransferError,
};

use crate::support::*;

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
    // The thread gives it up before it sleeps again.
    until("the region's end", || {
        engine.counters().quarantined_regions == 0
    });
}

/// C54: whatever its caller does to a transfer in flight, what it writes to stays registered until no
/// operation of it is left, and giving the region up waits for that.
#[test]
fn c54_a_released_transfer_keeps_its_memory_registered_until_it_is_over() {
    #[derive(Clone, Copy, Debug)]
    enum Release {
        Drop,
        Cancel,
        CancelAndDrop,
    }
    for kind in kinds() {
        for release in [Release::Drop, Release::Cancel, Release::CancelAndDrop] {
            let producer = side(engine(&kind, "producer"), 1, 8, 4096, 0);
            producer.fill();
            let control = FaultControl::new(1, FaultRates::none()).unwrap();
            let mut patient = config("consumer");
            // A fabric that stands still hears nothing.
            (patient.suspect_after, patient.dead_after) = (PATIENCE, PATIENCE);
            let consumer = side(faulty(&kind, patient, &control), 1, 8, 4096, 0);
            let registered = |kind: &Kind| match kind {
                Kind::Loopback(network) => network.registrations(),
                // UCX does not say.
                Kind::Ucx => 0,
            };
            let before = registered(&kind);
            let peer = connect(&consumer.engine, &producer.engine, Lane::Native);
            let tables = with_tables(&consumer, &peer);
            control.stall();
            let pairs: Vec<_> = (0..8).map(|n| BlockPair::new(n, 7 - n)).collect();
            let transfer = peer.read(&tables, &pairs).unwrap();
            until("the operations", || {
                consumer.engine.counters().ucx_operations > 8
            });
            let mut kept = None;
            match release {
                Release::Drop => drop(transfer),
                Release::Cancel | Release::CancelAndDrop => {
                    transfer.cancel();
                    until("an outcome", || transfer.poll_outcome().is_some());
                    let error = transfer.poll_outcome().unwrap().unwrap_err();
                    assert!(matches!(error, TransferError::Cancelled), "{error}");
                    assert!(!transfer.is_quiesced());
                    assert_eq!(consumer.engine.counters().quarantined_bytes, 8 * 4096);
                    if matches!(release, Release::Cancel) {
                        kept = Some(transfer);
                    }
                }
            }
            let Side {
                engine,
                memory,
                _region: region,
                ..
            } = consumer;
            let error = region.deregister(Duration::from_millis(10)).unwrap_err();
            assert!(
                matches!(error, DeregisterError::Busy { operations: 1, .. }),
                "{release:?}: {error}"
            );
            assert_eq!(engine.counters().quarantined_regions, 1);
            assert_eq!(registered(&kind), before, "{release:?}");
            let mut bytes = vec![0; memory.bytes() as usize];
            memory.read_at(0, &mut bytes).unwrap();
            assert!(bytes.iter().all(|&byte| byte == 0), "nothing was done yet");

            control.release();
            until("the region's end", || {
                let counters = engine.counters();
                counters.quarantined_regions == 0 && counters.quarantined_bytes == 0
            });
            assert_eq!(registered(&kind), before - before / 2, "{release:?}");
            if let Some(transfer) = kept {
                assert!(transfer.is_quiesced());
            }
            // Nothing is left to write: the memory is somebody else's.
            memory.fill(0, memory.bytes(), 0xEE).unwrap();
            engine.shutdown(PATIENCE).unwrap();
            memory.read_at(0, &mut bytes).unwrap();
            assert!(bytes.iter().all(|&byte| byte == 0xEE), "{release:?}");
        }
    }
}

/// A read that races with the end of its region either holds the region or does not start.
#[test]
fn a_region_is_not_written_after_it_was_given_up() {
    let kind = loopback();
    let producer = side(engine(&kind, "producer"), 1, 64, 64, 0);
    producer.memory.fill(0, 4096, 0x11).unwrap();
    let consumer = engine(&kind, "consumer");
    let peer = connect(&consumer, &producer.engine, Lane::Served);
    // Many runs, so that a submission takes a while.
    let pairs: Vec<BlockPair> = (0..50_000_u32)
        .map(|n| BlockPair::new(n % 64, (n * 7) % 64))
        .collect();
    for round in 0..200_u32 {
        let memory = HostPool::new(4096).unwrap().region().unwrap();
        let region = consumer.register(&memory).unwrap();
        let table = consumer
            .add_table(&region, TableSpec::dense(64, 64))
            .unwrap();
        let tables: Vec<_> = std::iter::once(table).zip(peer.tables()).collect();
        let (ready, go) = mpsc::channel();
        let reader = std::thread::spawn({
            let (peer, pairs) = (peer.clone(), pairs.clone());
            move || {
                ready.send(()).unwrap();
                peer.read(&tables, &pairs)
            }
        });
        go.recv_timeout(PATIENCE).unwrap();
        // Somewhere in the course of the submission, elsewhere each round.
        for _ in 0..round * 500 {
            std::hint::spin_loop();
        }
        region.deregister(PATIENCE).unwrap();
        memory.fill(0, 4096, 0xEE).unwrap();
        if let Ok(transfer) = reader.join().unwrap() {
            let _ = transfer.wait(PATIENCE).unwrap();
        }
        let mut bytes = vec![0; 4096];
        memory.read_at(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|&byte| byte == 0xEE), "round {round}");
    }
}

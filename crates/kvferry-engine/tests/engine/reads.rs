//! Reads: bytes, counts, refusals.

use std::sync::Arc;
use std::time::Duration;

use kvferry_engine::{BlockPair, Engine, Lane, LoopbackNetwork, ReadError, TransferError};

use crate::support::*;

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

/// A transfer that waits to be posted is cancelled and its place goes to one over another lane,
/// which then moves over its own.
#[test]
fn a_place_that_is_used_again_keeps_to_its_lane() {
    let network = LoopbackNetwork::new();
    let start = |name: &str| {
        let mut config = config(name);
        config.read_window = 1;
        start(&Kind::Loopback(network.clone()), Engine::builder(config))
    };
    let producer = side(start("producer"), 1, 4096, 64, 0);
    producer.fill();
    let consumer = side(start("consumer"), 1, 4096, 64, 0);
    let native = connect(&consumer.engine, &producer.engine, Lane::Native);
    let served = connect(&consumer.engine, &producer.engine, Lane::Served);
    assert_eq!(native.id(), served.id(), "one connection, two lanes");
    let tables = with_tables(&consumer, &native);
    let pairs: Vec<BlockPair> = (0..4000).map(|n| BlockPair::new(n, 4095 - n)).collect();
    let long = native.read(&tables, &pairs).unwrap();
    let waiting = native.read(&tables, &[BlockPair::new(4050, 1)]).unwrap();
    waiting.cancel();
    let error = waiting.wait(PATIENCE).unwrap().unwrap_err();
    assert!(matches!(error, TransferError::Cancelled), "{error}");
    let pairs: Vec<BlockPair> = (0..90).map(|n| BlockPair::new(4000 + n, 2 * n)).collect();
    let other = served.read(&tables, &pairs).unwrap();
    let report = other.wait(PATIENCE).unwrap().unwrap();
    assert_eq!((report.bytes, report.lane), (90 * 64, Some(Lane::Served)));
    let report = long.wait(PATIENCE).unwrap().unwrap();
    assert_eq!((report.operations, report.lane), (4000, Some(Lane::Native)));
    let counters = consumer.engine.counters();
    assert_eq!(
        counters.ucx_operations - counters.messages_sent,
        4000,
        "GETs"
    );
    assert_eq!(
        (counters.served_bytes, counters.native_bytes),
        (90 * 64, 4000 * 64)
    );
}

//! Regions that are given up while peers know them.

use std::time::Duration;

use kvferry_engine::fabric::EndpointId;
use kvferry_engine::wire::RejectCode;
use kvferry_engine::{
    BlockPair, DeregisterError, Engine, ErrorClass, Fault, FaultControl, FaultRates, HostPool,
    Lane, LaneChoice, MemoryRegion, Peer, ReadError, Region, Table, TableSpec, TransferError,
};

use crate::support::*;

/// A second region of an engine, of 8 blocks of 64 bytes.
fn more(engine: &Engine) -> (MemoryRegion, Region, Table) {
    let memory = HostPool::new(512).unwrap().region().unwrap();
    let region = engine.register(&memory).unwrap();
    let table = engine.add_table(&region, TableSpec::dense(64, 8)).unwrap();
    (memory, region, table)
}

fn no_faults() -> FaultControl {
    FaultControl::new(1, FaultRates::none()).unwrap()
}

fn quarantine_is_empty(engine: &Engine) {
    until("the end of the quarantine", || {
        let counters = engine.counters();
        (counters.quarantined_regions, counters.quarantined_bytes) == (0, 0)
    });
}

fn is_withdrawn(error: &ReadError, expected: u32) {
    let expected_region =
        matches!(error, ReadError::Withdrawn { region, .. } if *region == expected);
    assert!(expected_region, "{error}");
    assert_eq!(error.class(), ErrorClass::Rejected);
}

#[test]
fn a_withdrawn_region_is_refused_by_name_and_others_go_on() {
    for kind in kinds() {
        for lane in [Lane::Served, Lane::Native] {
            let producer = side(engine(&kind, "producer"), 1, 8, 64, 0);
            let (memory, _kept, _) = more(&producer.engine);
            memory.fill(0, 512, 0x77).unwrap();
            producer.fill();
            let consumer = side(engine(&kind, "consumer"), 1, 8, 64, 0);
            let peer = connect(&consumer.engine, &producer.engine, lane);
            let theirs: Vec<_> = peer.tables().collect();
            let read = |table: usize, pair: BlockPair| {
                let tables = [(consumer.tables[0].clone(), theirs[table].clone())];
                peer.read(&tables, &[pair])
            };
            for table in [0, 1] {
                let transfer = read(table, BlockPair::new(table as u32, 3)).unwrap();
                assert_eq!(transfer.wait(PATIENCE).unwrap().unwrap().bytes, 64);
            }
            assert_eq!(consumer.block(0, 0), producer.block(0, 3));
            let Side {
                engine: producer,
                memory: gone,
                _region: region,
                ..
            } = producer;
            let id = region.id();
            region.deregister(PATIENCE).unwrap();
            gone.fill(0, 512, 0xEE).unwrap();
            is_withdrawn(&read(0, BlockPair::new(2, 3)).unwrap_err(), id);
            let transfer = read(1, BlockPair::new(4, 5)).unwrap();
            assert_eq!(transfer.wait(PATIENCE).unwrap().unwrap().bytes, 64);
            assert_eq!(consumer.block(0, 4), [0x77; 64]);
            assert!(peer.gone().is_none(), "a withdrawal closes nothing");
            assert_eq!(producer.counters().peers_lost, 0);
            assert_eq!(producer.counters().quarantined_regions, 0);
        }
    }
}

/// A consumer whose operations on its first connection stand still, one at a time in flight.
struct Held {
    producer: Side,
    consumer: Side,
    peer: Peer,
    control: FaultControl,
}

/// Its one endpoint.
const FIRST: EndpointId = EndpointId(1);

fn held(withdraw_timeout: Duration) -> Held {
    let kind = loopback();
    let mut ours = config("producer");
    ours.withdraw_timeout = withdraw_timeout;
    let producer = side(start(&kind, Engine::builder(ours)), 1, 8, 64, 0);
    producer.fill();
    let control = no_faults();
    let mut theirs = config("consumer");
    theirs.read_window = 1;
    let consumer = side(faulty(&kind, theirs, &control), 1, 8, 64, 0);
    consumer.memory.fill(0, 512, 0xEE).unwrap();
    let peer = connect(&consumer.engine, &producer.engine, Lane::Native);
    Held {
        producer,
        consumer,
        peer,
        control,
    }
}

/// Every second block: no two of them are merged.
fn apart() -> [BlockPair; 4] {
    [0, 2, 4, 6].map(|n| BlockPair::new(n, n))
}

/// What is posted is waited for, what is not is not posted any more.
#[test]
fn a_read_in_flight_is_waited_for_and_its_rest_is_rejected() {
    let Held {
        producer,
        consumer,
        peer,
        control,
    } = held(PATIENCE);
    control.stall_endpoint(FIRST);
    let before = consumer.engine.counters().ucx_operations;
    let tables = with_tables(&consumer, &peer);
    let transfer = peer.read(&tables, &apart()).unwrap();
    until("the first operation", || {
        consumer.engine.counters().ucx_operations > before
    });
    let Side {
        engine,
        memory,
        _region: region,
        ..
    } = producer;
    let id = region.id();
    let error = region.deregister(Duration::from_millis(300)).unwrap_err();
    let DeregisterError::Busy {
        region,
        operations: 0,
        peers,
        ..
    } = &error
    else {
        panic!("{error}");
    };
    assert_eq!((*region, peers.len()), (id, 1));
    assert!(peers[0].starts_with("consumer"), "{peers:?}");
    assert!(error.to_string().contains("peer consumer"), "{error}");
    assert_eq!(engine.counters().quarantined_regions, 1);
    let outcome = transfer.poll_outcome().unwrap().unwrap_err();
    assert!(
        matches!(
            outcome,
            TransferError::Rejected {
                code: RejectCode::Withdrawn,
                detail: 0,
            }
        ),
        "{outcome}"
    );
    assert!(!transfer.is_quiesced(), "one operation is in flight");
    is_withdrawn(&peer.read(&tables, &apart()).unwrap_err(), id);
    // What was in flight may still arrive; it finds the memory there.
    control.release();
    assert!(transfer.wait(PATIENCE).unwrap().is_err());
    quarantine_is_empty(&engine);
    memory.fill(0, 512, 0x99).unwrap();
    for block in [2, 4, 6] {
        assert_eq!(consumer.block(0, block), [0xEE; 64], "was not posted");
    }
    assert!(peer.gone().is_none());
    assert_eq!(engine.counters().peers_lost, 0);
}

/// While an operation is in flight nothing is answered: when the region is given up, it has ended.
#[test]
fn a_region_is_held_until_the_last_operation_has_ended() {
    let kind = loopback();
    let control = no_faults();
    let producer = engine(&kind, "producer");
    let consumer = side(faulty(&kind, config("consumer"), &control), 1, 8, 64, 0);
    let mut late = FaultRates::none().with(Fault::ReadDelayed, 1000);
    late.max_delay = 20_000;
    for _ in 0..10 {
        let (_, region, _) = more(&producer);
        let peer = connect(&consumer.engine, &producer, Lane::Native);
        control.set_rates(late);
        let before = consumer.engine.counters().ucx_operations;
        let transfer = peer.read(&with_tables(&consumer, &peer), &apart()).unwrap();
        until("all operations", || {
            consumer.engine.counters().ucx_operations >= before + 4
        });
        region.deregister(PATIENCE).unwrap();
        // It was posted in full, so it ends as if nothing had been withdrawn.
        let operations = consumer._region.operations();
        assert_eq!(operations, 0, "given up while it was read");
        assert_eq!(transfer.wait(PATIENCE).unwrap().unwrap().bytes, 256);
        control.set_rates(FaultRates::none());
    }
    assert_eq!(producer.counters().peers_lost, 0);
}

/// A peer that does not let go is given up by the limit, and so is what it held.
#[test]
fn a_peer_that_does_not_answer_is_disconnected_by_the_limit() {
    let Held {
        producer,
        consumer,
        peer,
        control,
    } = held(Duration::from_millis(300));
    control.stall_endpoint(FIRST);
    let transfer = peer.read(&with_tables(&consumer, &peer), &apart()).unwrap();
    let back = connect_back(&producer.engine, &consumer.engine);
    let Side {
        engine, _region, ..
    } = producer;
    // Well before the limit.
    let error = _region.deregister(Duration::from_millis(1)).unwrap_err();
    assert!(matches!(error, DeregisterError::Busy { .. }), "{error}");
    quarantine_is_empty(&engine);
    let reason = back.gone().unwrap();
    assert!(
        reason.contains("did not let go of region 0 within 300ms"),
        "{reason}"
    );
    assert_eq!(engine.counters().peers_lost, 1);
    assert!(transfer.poll_outcome().unwrap().is_err());
}

/// The peer is known already, so this does not wait for anything of it.
fn connect_back(engine: &Engine, other: &Engine) -> Peer {
    connect(engine, other, Lane::Served)
}

/// The answer is lost on the way: as if there were none. The question is lost: the same.
#[test]
fn lost_questions_and_answers_end_with_the_connection() {
    for lost in ["answer", "question"] {
        let kind = loopback();
        let control = no_faults();
        let mut impatient = config("producer");
        impatient.withdraw_timeout = Duration::from_millis(300);
        let producer = side(faulty(&kind, impatient, &control), 1, 8, 64, 0);
        let consumer = side(engine(&kind, "consumer"), 1, 8, 64, 0);
        let peer = connect(&consumer.engine, &producer.engine, Lane::Native);
        let tables = with_tables(&consumer, &peer);
        let read = peer.read(&tables, &apart()).unwrap();
        read.wait(PATIENCE).unwrap().unwrap();
        let fault = match lost {
            "answer" => Fault::SegmentLost,
            _ => Fault::SendLost,
        };
        control.set_rates(FaultRates::none().with(fault, 1000));
        let Side {
            engine, _region, ..
        } = producer;
        _region.deregister(PATIENCE).unwrap();
        assert!(control.injected(fault) > 0);
        assert_eq!(engine.counters().peers_lost, 1, "{lost}");
    }
}

#[test]
fn late_and_reordered_answers_are_answers() {
    let rates = FaultRates::none()
        .with(Fault::SegmentDelayed, 500)
        .with(Fault::SegmentReordered, 500)
        .with(Fault::SendDelayed, 500);
    let kind = loopback();
    let (ours, theirs) = (no_faults(), no_faults());
    let producer = faulty(&kind, config("producer"), &ours);
    let consumer = side(faulty(&kind, config("consumer"), &theirs), 1, 8, 64, 0);
    let regions: Vec<_> = (0..20).map(|_| more(&producer)).collect();
    let peer = connect(&consumer.engine, &producer, Lane::Native);
    ours.set_rates(rates);
    theirs.set_rates(rates);
    for (n, (memory, region, _)) in regions.into_iter().enumerate() {
        let theirs = peer.tables().nth(n).unwrap();
        let tables = [(consumer.tables[0].clone(), theirs)];
        let reads: Vec<_> = (0..5)
            .map(|_| peer.read(&tables, &apart()).unwrap())
            .collect();
        region.deregister(PATIENCE).unwrap();
        memory.fill(0, 512, 0x66).unwrap();
        let given_up: Vec<_> = reads
            .iter()
            .map(|read| read.wait(PATIENCE).unwrap())
            .collect();
        for error in given_up.into_iter().filter_map(Result::err) {
            assert_eq!(error.class(), ErrorClass::Rejected, "{error}");
        }
        let mut bytes = [0; 512];
        consumer.memory.read_at(0, &mut bytes).unwrap();
        assert!(!bytes.contains(&0x66), "region {n} was read after its end");
    }
    assert_eq!(producer.counters().peers_lost, 0);
    assert!(peer.gone().is_none());
}

/// A peer whose answer to a greeting is still to come has our description and may read.
#[test]
fn a_peer_that_is_being_greeted_is_asked_too() {
    let kind = loopback();
    let (service, parked) = park();
    let other = start(&kind, Engine::builder(config("other")).service(7, service));
    let producer = side(engine(&kind, "producer"), 1, 8, 64, 0);
    let description = other.describe().unwrap();
    parked.park(&other);
    let greeting = {
        let engine = producer.engine.clone();
        std::thread::spawn(move || engine.connect(description, LaneChoice::Auto))
    };
    let Side {
        engine, _region, ..
    } = producer;
    until("the greeting", || engine.counters().messages_sent == 1);
    let error = _region.deregister(Duration::from_millis(20)).unwrap_err();
    assert!(error.to_string().contains("peer other"), "{error}");
    parked.go();
    quarantine_is_empty(&engine);
    greeting.join().unwrap().unwrap();
    assert_eq!(engine.counters().peers_lost, 0);
}

/// A description from before the withdrawal, used after it: with the first connection, with one that
/// is there, and with one that the producer made.
#[test]
fn an_old_description_does_not_bring_a_region_back() {
    for kind in kinds() {
        for lane in [Lane::Served, Lane::Native] {
            for first in ["greeting", "connected", "greeted"] {
                let producer = side(engine(&kind, "producer"), 1, 8, 64, 0);
                let old = producer.engine.describe().unwrap();
                let (memory, _kept, _) = more(&producer.engine);
                memory.fill(0, 512, 0x55).unwrap();
                let Side {
                    engine: producer,
                    _region: region,
                    ..
                } = producer;
                let id = region.id();
                region.deregister(PATIENCE).unwrap();
                let consumer = side(engine(&kind, "consumer"), 1, 8, 64, 0);
                let new = producer.describe().unwrap();
                match first {
                    "connected" => {
                        drop(connect(&consumer.engine, &producer, lane));
                    }
                    "greeted" => drop(connect(&producer, &consumer.engine, lane)),
                    _ => {}
                }
                let pinned = LaneChoice::Pinned(lane);
                let peer = consumer.engine.connect(old, pinned).unwrap();
                let tables = with_tables(&consumer, &peer);
                is_withdrawn(&peer.read(&tables, &apart()).unwrap_err(), id);
                let peer = consumer.engine.connect(new, pinned).unwrap();
                let read = peer.read(&with_tables(&consumer, &peer), &apart()).unwrap();
                assert_eq!(read.wait(PATIENCE).unwrap().unwrap().bytes, 256);
                assert_eq!(consumer.block(0, 6), [0x55; 64]);
            }
        }
    }
}

/// What no description has named, no peer holds: nobody is asked, not even one that would not answer.
#[test]
fn a_region_that_nobody_was_told_of_is_given_up_at_once() {
    let kind = loopback();
    let (service, parked) = park();
    let other = start(&kind, Engine::builder(config("other")).service(7, service));
    let engine = engine(&kind, "e");
    let _peer = connect(&engine, &other, Lane::Served);
    let (_, unknown, _) = more(&engine);
    let (_, known, _) = more(&engine);
    parked.park(&other);
    unknown.deregister(Duration::ZERO).unwrap();
    engine.describe().unwrap();
    let error = known.deregister(Duration::ZERO).unwrap_err();
    assert!(error.to_string().contains("peer other"), "{error}");
    parked.go();
    quarantine_is_empty(&engine);
}

#[test]
fn many_regions_are_withdrawn_together_and_dropping_does_not_block() {
    for kind in kinds() {
        let producer = engine(&kind, "producer");
        let regions: Vec<_> = (0..200).map(|_| more(&producer).1).collect();
        let consumer = side(engine(&kind, "consumer"), 1, 8, 64, 0);
        let peer = connect(&consumer.engine, &producer, Lane::Native);
        let tables: Vec<_> = peer.tables().collect();
        drop(regions);
        quarantine_is_empty(&producer);
        for theirs in tables {
            let tables = [(consumer.tables[0].clone(), theirs)];
            peer.read(&tables, &apart()).unwrap_err();
        }
        assert_eq!(producer.counters().peers_lost, 0);
    }
}

/// Whatever a read that crosses with the withdrawal becomes, it is over when the region is.
#[test]
fn a_region_is_not_read_after_it_was_given_up() {
    for lane in [Lane::Served, Lane::Native] {
        let kind = loopback();
        let producer = engine(&kind, "producer");
        let consumer = side(engine(&kind, "consumer"), 1, 8, 64, 0);
        for round in 0..100_u32 {
            let (memory, region, _) = more(&producer);
            memory.fill(0, 512, 0x11).unwrap();
            let peer = connect(&consumer.engine, &producer, lane);
            let tables = with_tables(&consumer, &peer);
            let reader = std::thread::spawn({
                let peer = peer.clone();
                move || {
                    let mut reads = Vec::new();
                    let refused = loop {
                        match peer.read(&tables, &apart()) {
                            Ok(read) => reads.push(read),
                            Err(error) => break error,
                        }
                    };
                    (reads, refused)
                }
            });
            for _ in 0..round * 200 {
                std::hint::spin_loop();
            }
            region.deregister(PATIENCE).unwrap();
            memory.fill(0, 512, 0xEE).unwrap();
            let (reads, refused) = reader.join().unwrap();
            assert!(matches!(refused, ReadError::Withdrawn { .. }), "{refused}");
            for read in reads {
                if let Err(error) = read.wait(PATIENCE).unwrap() {
                    assert_eq!(error.class(), ErrorClass::Rejected, "{error}");
                }
            }
            let mut bytes = [0; 512];
            consumer.memory.read_at(0, &mut bytes).unwrap();
            assert!(!bytes.contains(&0xEE), "round {round} over {lane}");
        }
        assert_eq!(producer.counters().peers_lost, 0);
    }
}

/// C86: a peer dies with an operation in flight. Its transfer fails at once; its state, and what the
/// operation may write to, are kept until the endpoint is closed, and no longer.
#[test]
fn c86_a_dead_peer_is_kept_while_an_operation_is_in_flight() {
    let Held {
        producer,
        consumer,
        peer,
        control,
    } = held(PATIENCE);
    control.stall_endpoint(FIRST);
    let mut slow = FaultRates::none().with(Fault::CloseDelayed, 1000);
    slow.max_delay = 200_000;
    control.set_rates(slow);
    let before = consumer.engine.counters().ucx_operations;
    let transfer = peer.read(&with_tables(&consumer, &peer), &apart()).unwrap();
    until("the first operation", || {
        consumer.engine.counters().ucx_operations > before
    });
    control.fail_endpoint(FIRST);
    until("the outcome", || transfer.poll_outcome().is_some());
    let mut held = 0;
    while !transfer.is_quiesced() {
        // The two go one after the other, a moment before it is quiet.
        let operations = consumer._region.operations();
        let bytes = consumer.engine.counters().quarantined_bytes;
        held += u32::from((operations, bytes) == (1, 256));
        std::thread::yield_now();
    }
    assert!(held > 0, "the end of the endpoint was not late");
    let error = transfer.wait(PATIENCE).unwrap().unwrap_err();
    assert!(matches!(error, TransferError::PeerLost(_)), "{error}");
    assert_eq!(consumer._region.operations(), 0);
    assert_eq!(consumer.engine.counters().quarantined_bytes, 0);
    control.release();
    control.set_rates(FaultRates::none());
    let peer = connect(&consumer.engine, &producer.engine, Lane::Native);
    let read = peer.read(&with_tables(&consumer, &peer), &apart()).unwrap();
    assert_eq!(read.wait(PATIENCE).unwrap().unwrap().bytes, 256);
}

//! Loads in several parts, cache groups and ranks, of which one fails: what is named, and when it is told.

use std::time::Duration;

use kvferry_connector::contract::{
    FailedBlock, LoadFailure, Params, Received, SchedulerConnector, WorkerConnector,
};
use kvferry_connector::remote::{RemoteConfig, Role};
use kvferry_engine::fabric::{Fault, FaultControl, FaultRates};
use kvferry_engine::{EngineConfig, LoopbackNetwork};
use serde_json::json;

use crate::bench::{Fabric, PATIENCE, Request, Setup, Side, config, until};

/// Bytes of a block in one layer.
const BYTES: u64 = 4096;
/// Tokens of a prompt: four blocks of the first group, two of the second.
const PROMPT: u32 = 64;
/// What an owner writes who was given the blocks next.
const NEXT_OWNER: u8 = 0xe1;

/// Lanes on which a read is many operations of the reader, so that an ended read can still write.
const LANES: [&str; 2] = ["native", "mapped"];

fn tune(engine: &mut EngineConfig) {
    // What is held up on purpose is neither dead nor to be broken off.
    engine.suspect_after = PATIENCE;
    engine.dead_after = PATIENCE;
    engine.escalation_step = PATIENCE;
    engine.allow_emulation = true;
}

/// A producer without faults, and a consumer of which rank 1, or the only one, has them.
fn sides(lane: &str, control: &FaultControl, block_tokens: &[u32], ranks: u32) -> (Side, Side) {
    let network = LoopbackNetwork::new();
    let settings = |name, role| RemoteConfig {
        lane: lane.parse().unwrap(),
        block_tokens: block_tokens.to_vec(),
        ranks,
        ..config(name, role)
    };
    let plain = Fabric::Loopback(network.clone());
    let faulty = Fabric::Faulty(network, control.clone());
    let side = |name, role, faulty_rank: Option<u32>| {
        let fabric = |rank| {
            let fabric = match faulty_rank {
                Some(faulty_rank) if faulty_rank == rank => &faulty,
                _ => &plain,
            };
            fabric.clone()
        };
        let setup = Setup {
            fabric: &fabric,
            block_bytes: BYTES,
            tune,
        };
        Side::with(&settings(name, role), &setup)
    };
    (
        side("prefill", Role::Producer, None),
        side("decode", Role::Consumer, Some(ranks - 1)),
    )
}

/// Computes a request in every group and holds it.
fn prefill(side: &mut Side, name: &str, blocks: &[Vec<u32>], byte: u8) -> Params {
    let request = Request::export(name, PROMPT);
    side.scheduler.on_new_request(&request.view());
    side.step(&[&request]);
    for (group, blocks) in (0..).zip(blocks) {
        side.write_in(group, blocks, in_group(byte, group));
    }
    let params = side.export(&request, blocks);
    side.step(&[]);
    params
}

fn in_group(byte: u8, group: u32) -> u8 {
    byte + 40 * group as u8
}

/// Bytes that are not those of the request.
fn wrong(side: &Side, blocks: &[Vec<u32>], byte: u8) -> usize {
    let groups = (0..).zip(blocks);
    groups
        .map(|(group, blocks)| side.wrong_in(group, blocks, in_group(byte, group)))
        .sum()
}

/// All blocks of a request, in the order in which they are reported.
fn all_of(blocks: &[Vec<u32>]) -> Vec<FailedBlock> {
    let groups = (0..).zip(blocks);
    let all = groups.flat_map(|(group, blocks)| {
        let block = move |&block| FailedBlock { group, block };
        blocks.iter().map(block)
    });
    let mut all: Vec<FailedBlock> = all.collect();
    all.sort_unstable();
    all
}

/// C25, C44: of a request's two groups one is refused while the other is under way. Nothing is reported until
/// that one is quiet; then this request alone has failed, with the blocks of both groups by their names.
#[test]
fn c25_a_refused_group_is_told_when_its_sibling_is_quiet() {
    let control = FaultControl::new(1, FaultRates::none()).unwrap();
    let (mut producer, mut consumer) = sides("native", &control, &[16, 32], 1);
    // The other group may be called off before any operation of it has begun, or after.
    for round in 0..20 {
        a_group_is_refused(&mut producer, &mut consumer, &control, round);
    }
}

fn a_group_is_refused(
    producer: &mut Side,
    consumer: &mut Side,
    control: &FaultControl,
    round: u32,
) {
    let there = [
        vec![vec![2, 3, 4, 5], vec![6, 7]],
        vec![vec![12, 13, 14, 15], vec![16, 17]],
    ];
    // The same ids mean other blocks in another group.
    let here = [
        vec![vec![20, 21, 22, 23], vec![22, 23]],
        vec![vec![30, 31, 32, 33], vec![20, 21]],
    ];
    let offers = ["right", "wrong"].map(|name| {
        let n = usize::from(name == "wrong");
        let name = format!("{name}-{round}");
        let byte = 10 + 90 * n as u8;
        let mut params = prefill(producer, &name, &there[n], byte);
        if n == 1 {
            params["remote_block_ids"][1] = json!([16, 5000]);
        }
        (Request::new(&name, PROMPT, Some(params)), byte)
    });
    for (request, _) in &offers {
        consumer.scheduler.on_new_request(&request.view());
    }
    consumer.step(&[]);
    until("both renewals", || producer.renewed(0) >= 2);
    control.stall();
    for ((request, _), blocks) in offers.iter().zip(&here) {
        let matched = consumer.scheduler.matched_tokens(&request.view(), 0);
        assert_eq!(matched.tokens(), PROMPT);
        consumer.alloc_groups(request, blocks, 0, PROMPT);
    }
    let quarantined = |side: &Side| side.workers[0].engine().counters().quarantined_bytes;
    let mut received = Vec::new();
    until("the refusal", || {
        received.extend(consumer.step(&[]).received);
        !received.is_empty() || quarantined(consumer) > 0
    });
    // Its blocks are somebody else's once it is reported.
    let hand_on = |side: &Side| {
        assert_eq!(quarantined(side), 0);
        for (group, blocks) in (0..).zip(&here[1]) {
            side.write_in(group, blocks, NEXT_OWNER);
        }
    };
    let has_begun = received.is_empty();
    if has_begun {
        // Its first group has been cancelled, and the operations of that are not over.
        for _ in 0..50 {
            assert_eq!(consumer.step(&[]).received, [], "reported while it is read");
            std::thread::sleep(Duration::from_millis(1));
        }
    } else {
        hand_on(consumer);
    }
    control.release();
    while received.len() < 2 {
        let next = consumer.step_until("both reports", |report| {
            (!report.received.is_empty()).then(|| report.received.clone())
        });
        if next.iter().any(|it| it.failure.is_some()) {
            hand_on(consumer);
        }
        received.extend(next);
    }
    received.sort_by(|a, b| a.request.cmp(&b.request));
    let expected = [
        Received {
            request: offers[0].0.id.clone(),
            failure: None,
            failed: Vec::new(),
        },
        Received {
            request: offers[1].0.id.clone(),
            failure: Some(LoadFailure::Rejected),
            failed: all_of(&here[1]),
        },
    ];
    assert_eq!(received, expected);
    assert_eq!(wrong(consumer, &here[0], offers[0].1), 0);
    for (group, blocks) in (0..).zip(&here[1]) {
        assert_eq!(consumer.wrong_in(group, blocks, NEXT_OWNER), 0);
    }
    let stats = consumer.scheduler.stats();
    let count = u64::from(round) + 1;
    assert_eq!((stats.loaded, stats.failed.rejected), (count, count));
    assert_eq!(stats.failed.total(), count);
    // Both leases were released.
    until("both leases' ends", || {
        producer.step(&[]);
        producer.scheduler.stats().parts_released == 2 * count
    });
}

/// C25: any operation of either group fails, and others end late. When that is reported the blocks of both
/// groups get another owner, whose bytes stay.
#[test]
fn c25_whichever_group_fails_both_are_quiet_when_that_is_told() {
    for lane in LANES {
        let control = FaultControl::new(25, FaultRates::none()).unwrap();
        let (mut producer, mut consumer) = sides(lane, &control, &[16, 32], 1);
        let there = [vec![2, 3, 4, 5], vec![6, 7]];
        // No two neighbours: every block is an operation, or a copy, of its own.
        let here = [vec![20, 22, 24, 26], vec![31, 29]];
        let (mut failed, mut loaded) = (0, 0);
        for round in 0..60_u32 {
            let byte = 1 + round as u8;
            let params = prefill(&mut producer, &format!("p{round}"), &there, byte);
            let request = Request::new(&format!("d{round}"), PROMPT, Some(params));
            consumer.scheduler.on_new_request(&request.view());
            consumer.step(&[]);
            // Of twelve reads, or of a batch of copies per group: about half of the loads fail.
            let (fails, of_1000, delayed) = match lane {
                "native" => (Fault::ReadFailed, 60, Fault::ReadDelayed),
                _ => (Fault::CopyFailed, 300, Fault::CopyDelayed),
            };
            let mut rates = FaultRates::none().with(fails, of_1000).with(delayed, 900);
            // In turns of a thread that does nothing else.
            rates.max_delay = 5_000;
            control.set_rates(rates);
            consumer.alloc_groups(&request, &here, 0, PROMPT);
            let received = consumer.received(&request);
            if received.failure.is_none() {
                loaded += 1;
                assert_eq!(wrong(&consumer, &here, byte), 0, "{lane}, round {round}");
                continue;
            }
            failed += 1;
            assert_eq!(received.failure, Some(LoadFailure::Peer));
            assert_eq!(received.failed, all_of(&here));
            for (group, blocks) in (0..).zip(&here) {
                consumer.write_in(group, blocks, NEXT_OWNER);
            }
            assert_eq!(consumer.workers[0].engine().counters().quarantined_bytes, 0);
            // Longer than what is delayed takes.
            std::thread::sleep(Duration::from_millis(20));
            for (group, blocks) in (0..).zip(&here) {
                let wrong = consumer.wrong_in(group, blocks, NEXT_OWNER);
                assert_eq!(wrong, 0, "{lane}, round {round}: written after the report");
            }
        }
        assert!(failed >= 5 && loaded >= 5, "{lane}: {failed} and {loaded}");
        assert_eq!(consumer.workers[0].loader_stats().reading, 0);
        assert_eq!(consumer.scheduler.stats().failed.peer, failed);
    }
}

/// C25: of two ranks one cannot read. The request is reported once, when both are over, and its blocks have failed
/// although the other rank has them.
#[test]
fn c25_a_rank_that_fails_is_told_when_the_other_is_over() {
    for first_fails in [false, true] {
        let control = FaultControl::new(3, FaultRates::none()).unwrap();
        let (mut producer, mut consumer) = sides("native", &control, &[16], 2);
        let (there, here) = ([vec![2, 3, 4, 5]], [vec![20, 21, 22, 23]]);
        let params = prefill(&mut producer, "p", &there, 10);
        let request = Request::new("d", PROMPT, Some(params));
        consumer.scheduler.on_new_request(&request.view());
        consumer.step(&[]);
        // Each rank holds the lease at both.
        until("every renewal", || {
            producer.renewed(0) >= 2 && producer.renewed(1) >= 2
        });
        control.stall();
        if first_fails {
            // Rank 0 fails at once, rank 1 is still reading.
            producer.workers[0].shutdown(Duration::ZERO);
        }
        consumer.alloc_groups(&request, &here, 0, PROMPT);
        let done = |side: &Side| {
            let stats = side.workers[0].loader_stats();
            stats.loaded + stats.failed
        };
        until("the end on rank 0", || {
            assert_eq!(consumer.step(&[]).received, [], "only one rank is over");
            done(&consumer) == 1
        });
        for _ in 0..20 {
            assert_eq!(consumer.step(&[]).received, [], "only one rank is over");
        }
        if !first_fails {
            let rates = FaultRates::none().with(Fault::EndpointFailed, 1000);
            control.set_rates(rates);
            producer.workers[1].shutdown(Duration::ZERO);
        }
        control.release();
        let received = consumer.received(&request);
        assert!(received.failure.is_some(), "{received:?}");
        assert_eq!(received.failed, all_of(&here));
        for _ in 0..5 {
            assert_eq!(consumer.step(&[]).received, []);
        }
        assert_eq!(consumer.scheduler.stats().failed.total(), 1);
    }
}

//! `RemotePrefill` between processes: when leases end, what is told of loads, and who survives whom.

use std::time::{Duration, Instant};

use kvferry_tests::harness::{Case, PATIENCE, until};
use kvferry_tests::roles::{SideChild, SideSpec};

/// A prompt of 160 tokens: ten blocks.
const PROMPT: u32 = 160;
const THERE: [u32; 10] = [9, 3, 4, 30, 12, 50, 41, 42, 43, 7];
const HERE: [u32; 10] = [20, 21, 5, 40, 8, 1, 2, 60, 61, 62];

const LANES: [&str; 3] = ["served", "mapped", "attached"];

fn side(name: &str, reads: bool, lane: &str, lease_ms: u64) -> SideChild {
    let spec = SideSpec {
        name: name.into(),
        reads,
        lane: lane.into(),
        lease_ms,
    };
    SideChild::start(&spec, &[("UCX_NET_DEVICES", Some("lo"))])
}

fn pair(lane: &str, lease_ms: u64) -> (SideChild, SideChild) {
    (
        side("prefill", false, lane, lease_ms),
        side("decode", true, lane, lease_ms),
    )
}

/// C111: the lease ends, and that is answered, within 100 ms of the consumer's last byte, while the producer's
/// engine takes no step; the blocks are free at its next one.
fn c111_a_lease_ends_while_the_producer_takes_no_steps(lane: &'static str) {
    let (mut producer, mut consumer) = pair(lane, 30_000);
    for round in 0..5_u8 {
        let name = format!("r{round}");
        let byte = 10 * round;
        let params = producer.prefill(&name, PROMPT, &THERE, byte);
        let before = producer.stats();
        assert_eq!((before.held, before.released), (1, u64::from(round)));
        assert_eq!(consumer.admit(&name, PROMPT, &params, &HERE), PROMPT);
        let loaded = consumer.received(&name);
        assert_eq!(loaded.failure, "");
        assert_eq!(consumer.wrong(&HERE, byte), 0);
        assert!(loaded.confirm_us_max <= 100_000, "{loaded:?}");
        // Answered means ended.
        let after = producer.stats();
        assert_eq!((after.held, after.released), (0, u64::from(round) + 1));
        assert_eq!(after.steps, before.steps);
        assert_eq!(producer.step().sent, [name.as_str()]);
        consumer.finish(&name, false);
    }
    consumer.child.finish_well();
    producer.child.finish_well();
}

/// C23: after an abort that the consumer saw, the lease ends within a second, whatever the load was
/// doing, and the producer takes no step for it.
fn an_abort_ends_the_lease_within_a_second(lane: &'static str) {
    let (mut producer, mut consumer) = pair(lane, 30_000);
    for round in 0..4_u8 {
        let name = format!("r{round}");
        let params = producer.prefill(&name, PROMPT, &THERE, 1);
        assert_eq!(consumer.admit(&name, PROMPT, &params, &HERE), PROMPT);
        let aborted = Instant::now();
        consumer.finish(&name, true);
        until("the lease's end", || producer.stats().held == 0);
        assert!(
            aborted.elapsed() < Duration::from_secs(1),
            "{:?}",
            aborted.elapsed()
        );
        let stats = producer.stats();
        assert_eq!((stats.released, stats.expired), (u64::from(round) + 1, 0));
        assert_eq!(producer.step().sent, [name.as_str()]);
    }
    until("nothing under way", || {
        consumer.step();
        consumer.stats().loads == 0
    });
    assert_eq!(consumer.stats().quarantined, 0);
    consumer.child.finish_well();
    producer.child.finish_well();
}

/// C26: a consumer that is killed frees the blocks within one lease and a tick (of up to 1 s).
fn c26_a_killed_consumers_blocks_are_free_within_a_lease() {
    let lease = Duration::from_millis(1500);
    let (mut producer, mut consumer) = pair("served", lease.as_millis() as u64);
    let params = producer.prefill("queued", PROMPT, &THERE, 1);
    // Queued: it is alive, and keeps the lease beyond its duration.
    consumer.queue("queued", PROMPT, &params);
    until("the greeting", || producer.connected() == 1);
    std::thread::sleep(2 * lease);
    let stats = producer.stats();
    assert_eq!(stats.expired, 0, "{stats:?}");
    consumer.child.kill();
    let killed = Instant::now();
    until("the lease's end", || producer.stats().held == 0);
    // From its last renewal on, so not longer than from now.
    assert!(
        killed.elapsed() <= lease + Duration::from_secs(2),
        "{:?}",
        killed.elapsed()
    );
    assert_eq!(producer.step().sent, ["queued"]);
    producer.child.finish_well();
}

/// C18, C52: a producer that is killed costs the requests that needed it, in time, and the next life
/// serves the next one.
fn c18_a_killed_producer_fails_its_requests_and_the_next_life_serves(lane: &'static str) {
    let (mut producer, mut consumer) = pair(lane, 30_000);
    let params = producer.prefill("first", PROMPT, &THERE, 1);
    assert_eq!(consumer.admit("first", PROMPT, &params, &HERE), PROMPT);
    assert_eq!(consumer.received("first").failure, "");
    let lost = producer.prefill("lost", PROMPT, &THERE, 2);
    producer.child.kill();
    assert_eq!(consumer.admit("lost", PROMPT, &lost, &HERE), PROMPT);
    let failed = consumer.received("lost");
    assert_eq!(failed.failure, "peer");
    // The directory's port is closed with the process, so nothing has to be waited for.
    assert!(failed.after_ms < 10_000, "{failed:?}");
    let mut again = side("prefill", false, lane, 30_000);
    let params = again.prefill("next", PROMPT, &THERE, 90);
    assert_eq!(consumer.admit("next", PROMPT, &params, &HERE), PROMPT);
    assert_eq!(consumer.received("next").failure, "");
    assert_eq!(consumer.wrong(&HERE, 90), 0);
    assert_eq!(again.step().sent, ["next"]);
    consumer.child.finish_well();
    again.child.finish_well();
}

/// C28 by SIGSTOP: the consumer stands still with its read begun, until its lease has ended and the
/// blocks have a new owner. What it has then is never accepted.
fn c28_a_consumer_that_stood_still_fails_its_load(lane: &'static str) {
    let (mut producer, mut consumer) = pair(lane, 1000);
    let mut accepted = 0;
    for round in 0..3_u8 {
        let name = format!("r{round}");
        let params = producer.prefill(&name, PROMPT, &THERE, 1);
        assert_eq!(consumer.admit(&name, PROMPT, &params, &HERE), PROMPT);
        consumer.child.stop();
        let deadline = Instant::now() + PATIENCE;
        while producer.stats().held > 0 {
            assert!(Instant::now() < deadline, "the lease never ends");
            std::thread::sleep(Duration::from_millis(20));
        }
        let stats = producer.stats();
        producer.write(&THERE, 200);
        producer.step();
        consumer.child.go_on();
        let loaded = consumer.received(&name);
        if loaded.failure.is_empty() {
            // It was over before it stood still: then with the old bytes, and confirmed.
            accepted += 1;
            assert_eq!(consumer.wrong(&HERE, 1), 0);
        }
        assert_eq!(stats.released, accepted, "{loaded:?}");
        consumer.finish(&name, false);
    }
    consumer.child.finish_well();
    producer.child.finish_well();
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = vec![Case::new(
        "c26_a_killed_consumers_blocks_are_free_within_a_lease",
        c26_a_killed_consumers_blocks_are_free_within_a_lease,
    )];
    type Test = fn(&'static str);
    let per_lane: [(&str, Test); 4] = [
        (
            "c111_a_lease_ends_while_the_producer_takes_no_steps",
            c111_a_lease_ends_while_the_producer_takes_no_steps,
        ),
        (
            "c23_an_abort_ends_the_lease_within_a_second",
            an_abort_ends_the_lease_within_a_second,
        ),
        (
            "c18_a_killed_producer_fails_its_requests_and_the_next_life_serves",
            c18_a_killed_producer_fails_its_requests_and_the_next_life_serves,
        ),
        (
            "c28_a_consumer_that_stood_still_fails_its_load",
            c28_a_consumer_that_stood_still_fails_its_load,
        ),
    ];
    for (name, test) in per_lane {
        for lane in LANES {
            cases.push(Case::new(format!("{name}::{lane}"), move || test(lane)));
        }
    }
    cases
}

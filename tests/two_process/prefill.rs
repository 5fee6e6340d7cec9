//! `RemotePrefill` between processes: when leases end, what is told of loads, and who survives whom.

use std::time::{Duration, Instant};

use kvferry_tests::harness::{Case, PATIENCE, until};
use kvferry_tests::roles::{SideChild, SideSpec, TERMINATION};
use serde_json::json;

/// A prompt of 160 tokens: ten blocks.
pub(crate) const PROMPT: u32 = 160;
/// Where the producer has it, and where it is loaded.
pub(crate) const THERE: [u32; 10] = [9, 3, 4, 30, 12, 50, 41, 42, 43, 7];
pub(crate) const HERE: [u32; 10] = [20, 21, 5, 40, 8, 1, 2, 60, 61, 62];

pub(crate) const LANES: [&str; 3] = ["served", "mapped", "attached"];

pub(crate) fn side(name: &str, reads: bool, lane: &str, lease_ms: u64) -> SideChild {
    side_of(name, reads, lane, lease_ms, 512)
}

fn side_of(name: &str, reads: bool, lane: &str, lease_ms: u64, block_bytes: u64) -> SideChild {
    let spec = SideSpec {
        name: name.into(),
        reads,
        lane: lane.into(),
        lease_ms,
        block_bytes,
    };
    SideChild::start(&spec, &[("UCX_NET_DEVICES", Some("lo"))])
}

pub(crate) fn pair(lane: &str, lease_ms: u64) -> (SideChild, SideChild) {
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

/// C22: the consumer refuses the request before it was ever looked up: the producer's blocks are free within a
/// second, and nothing was read.
fn c22_a_refused_request_frees_the_blocks_within_a_second() {
    let (mut producer, mut consumer) = pair("served", 30_000);
    // Also the first one, for which there is no connection yet.
    for round in 1..=3_u64 {
        let name = format!("r{round}");
        let params = producer.prefill(&name, PROMPT, &THERE, 1);
        let refused = Instant::now();
        consumer.queue(&name, PROMPT, &params);
        consumer.finish(&name, true);
        until("the lease's end", || producer.stats().held == 0);
        let after = refused.elapsed();
        assert!(after < Duration::from_secs(1), "{after:?}");
        let stats = producer.stats();
        assert_eq!((stats.released, stats.expired), (round, 0));
        assert_eq!(producer.step().sent, [name.as_str()]);
    }
    let figures = consumer.figures();
    assert_eq!((figures["bytes"], figures["requests"]), (0, 0));
    consumer.child.finish_well();
    producer.child.finish_well();
}

/// C29: consumed, repeated, stale, foreign and out of range: five explicit failures, and what was there is not
/// counted as loaded.
fn c29_references_that_do_not_hold_are_failures(lane: &'static str) {
    let (mut producer, mut consumer) = pair(lane, 30_000);
    let params = producer.prefill("good", PROMPT, &THERE, 1);
    assert_eq!(consumer.admit("good", PROMPT, &params, &HERE), PROMPT);
    assert_eq!(consumer.received("good").failure, "");
    assert_eq!(producer.step().sent, ["good"]);
    producer.write(&THERE, 200);
    let held = producer.prefill("held", PROMPT, &THERE, 60);
    let mut stale = held.clone();
    stale["kvferry"]["epoch"] = json!(1);
    let mut foreign = held.clone();
    foreign["kvferry"]["instance"] = json!("0123456789abcdef0123456789abcdef");
    let mut outside = held;
    outside["remote_block_ids"][0][9] = json!(5000);
    for (name, params, failure) in [
        ("consumed", &params, "lease"),
        ("repeated", &params, "lease"),
        ("stale", &stale, "lease"),
        ("foreign", &foreign, "lease"),
        ("outside", &outside, "rejected"),
    ] {
        assert_eq!(
            consumer.admit(name, PROMPT, params, &HERE),
            PROMPT,
            "{name}"
        );
        assert_eq!(consumer.received(name).failure, failure, "{name}");
        consumer.finish(name, false);
    }
    let figures = consumer.figures();
    assert_eq!((figures["loaded"], figures["failed"]), (1, 5));
    consumer.child.finish_well();
    producer.child.finish_well();
}

/// C99: SIGTERM on a producer that holds two leases. One is read and released in the time that there is, the
/// other is taken back at the limit; its reader has failed within a second of asking.
fn c99_a_terminated_producer_drains_within_its_limit() {
    let (mut producer, mut consumer) = pair("served", 30_000);
    let offers = [("read", 10), ("left", 60)].map(|(name, byte)| {
        let blocks = THERE.map(|block| (block + byte) % 64);
        (name, producer.prefill(name, PROMPT, &blocks, byte as u8))
    });
    for (name, params) in &offers {
        consumer.queue(name, PROMPT, params);
    }
    until("both renewals", || producer.stats().renewed >= 2);
    let told = Instant::now();
    producer.terminate();
    let [(_, read), (_, left)] = &offers;
    assert_eq!(consumer.admit("read", PROMPT, read, &HERE), PROMPT);
    assert_eq!(consumer.received("read").failure, "");
    assert_eq!(consumer.wrong(&HERE, 10), 0);
    let end = producer.terminated();
    assert!(told.elapsed() >= TERMINATION, "a lease was still held");
    // The engine's own end is in it.
    assert!(end.took_ms < 2 * TERMINATION.as_millis() as u64, "{end:?}");
    assert_eq!((end.released, end.revoked), (1, 1));
    assert_eq!(end.sent, ["read", "left"]);
    producer.child.finish_well();
    let asked = Instant::now();
    let _ = consumer.admit("left", PROMPT, left, &HERE);
    until("the end of the request", || {
        consumer.step();
        let figures = consumer.figures();
        figures["failed"] == 1 || figures["lost"] == 1
    });
    assert!(
        asked.elapsed() < Duration::from_secs(1),
        "{:?}",
        asked.elapsed()
    );
    consumer.child.finish_well();
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

/// C24: a load is aborted while it is read, and when that is reported its blocks are given to somebody else, here and
/// at the producer: the bytes of the new owners stay.
fn c24_blocks_of_an_aborted_load_keep_their_new_owners_bytes(lane: &'static str) {
    const OTHERS: [u32; 2] = [33, 35];
    const OWNER: u8 = 200;
    // 20 MiB: long enough to be in the middle of.
    let side = |name, reads| side_of(name, reads, lane, 30_000, 1 << 20);
    let (mut producer, mut consumer) = (side("prefill", false), side("decode", true));
    let mut aborted = 0;
    for round in 0..120_u8 {
        let name = format!("r{round}");
        let params = producer.prefill(&name, PROMPT, &THERE, round);
        let fence = producer.prefill(&format!("f{round}"), 32, &[57, 58], 90);
        // What is served comes when it is not wanted any more; what is copied is being copied.
        let stands_still = lane == "served" && round > 0;
        if stands_still {
            producer.child.stop();
        }
        consumer.admit_and_abort(&name, PROMPT, &params, &HERE);
        let mut reports = consumer.reports_of(&name);
        consumer.write(&HERE, OWNER);
        if stands_still {
            producer.child.go_on();
        }
        aborted += u32::from(reports == ["aborted"]);
        until("the lease's end", || producer.stats().held == 1);
        assert_eq!(producer.step().sent, [name.as_str()]);
        producer.write(&THERE, 99);
        // Comes behind whatever the aborted read has under way.
        assert_eq!(consumer.admit("fence", 32, &fence, &OTHERS), 32);
        assert_eq!(consumer.received("fence").failure, "");
        assert_eq!(consumer.wrong(&OTHERS, 90), 0);
        consumer.finish("fence", false);
        assert_eq!(consumer.wrong(&HERE, OWNER), 0, "{reports:?}");
        reports.extend(consumer.step().received.into_iter().map(|it| it.1));
        assert_eq!(reports.len(), 1, "{reports:?}");
        let stats = consumer.stats();
        assert_eq!((stats.loads, stats.quarantined), (0, 0));
        if aborted >= 3 {
            break;
        }
    }
    assert!(aborted >= 3, "{aborted} were in the middle");
    let stats = producer.stats();
    assert_eq!((stats.expired, stats.revoked, stats.held), (0, 0, 0));
    consumer.child.finish_well();
    producer.child.finish_well();
}

/// C31, C26: the request waits for five leases, its renewals keep the blocks, and then the right bytes are read.
fn c31_renewals_keep_a_lease_for_five_durations(lane: &'static str) {
    let lease = Duration::from_millis(1000);
    let (mut producer, mut consumer) = pair(lane, lease.as_millis() as u64);
    let params = producer.prefill("queued", PROMPT, &THERE, 1);
    let before = producer.stats();
    consumer.queue("queued", PROMPT, &params);
    let queued = Instant::now();
    // Every sixth of a duration; neither side takes a step.
    until("renewals", || queued.elapsed() >= 5 * lease);
    let stats = producer.stats();
    assert_eq!((stats.held, stats.expired), (1, 0), "{stats:?}");
    assert!(stats.renewed - before.renewed >= 10, "{stats:?}");
    assert_eq!(stats.steps, before.steps);
    assert_eq!(consumer.admit("queued", PROMPT, &params, &HERE), PROMPT);
    assert_eq!(consumer.received("queued").failure, "");
    assert_eq!(consumer.wrong(&HERE, 1), 0);
    assert_eq!(producer.step().sent, ["queued"]);
    // Released is not renewed any more.
    let renewed = producer.stats().renewed;
    std::thread::sleep(lease);
    assert_eq!(producer.stats().renewed, renewed);
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

/// C18: the producer's process ends while a load needs it, and another one waits: both have failed within a second.
fn c18_a_producer_that_ends_fails_what_needs_it_within_a_second(lane: &'static str) {
    let (mut producer, mut consumer) = pair(lane, 30_000);
    let params = producer.prefill("first", PROMPT, &THERE, 1);
    assert_eq!(consumer.admit("first", PROMPT, &params, &HERE), PROMPT);
    assert_eq!(consumer.received("first").failure, "");
    let loading = producer.prefill("loading", PROMPT, &THERE, 2);
    let waiting = producer.prefill("waiting", PROMPT, &THERE, 3);
    consumer.queue("waiting", PROMPT, &waiting);
    // It stands still, so the load is not over: its bytes do not come, or nobody confirms them.
    producer.child.stop();
    assert_eq!(consumer.admit("loading", PROMPT, &loading, &HERE), PROMPT);
    assert_eq!(consumer.step().received, []);
    producer.child.kill();
    let killed = Instant::now();
    let failed = consumer.received("loading");
    assert_eq!(failed.failure, "peer");
    let after = killed.elapsed();
    assert!(after < Duration::from_secs(1), "{after:?}");
    let asked = Instant::now();
    assert_eq!(consumer.admit("waiting", PROMPT, &waiting, &HERE), PROMPT);
    assert_eq!(consumer.received("waiting").failure, "peer");
    let after = asked.elapsed();
    assert!(after < Duration::from_secs(1), "{after:?}");
    let stats = consumer.stats();
    assert_eq!((stats.loads, stats.quarantined), (0, 0));
    consumer.child.finish_well();
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
    let mut cases = vec![
        Case::new(
            "c26_a_killed_consumers_blocks_are_free_within_a_lease",
            c26_a_killed_consumers_blocks_are_free_within_a_lease,
        ),
        Case::new(
            "c22_a_refused_request_frees_the_blocks_within_a_second",
            c22_a_refused_request_frees_the_blocks_within_a_second,
        ),
        Case::new(
            "c99_a_terminated_producer_drains_within_its_limit",
            c99_a_terminated_producer_drains_within_its_limit,
        ),
    ];
    type Test = fn(&'static str);
    let per_lane: [(&str, Test); 8] = [
        (
            "c29_references_that_do_not_hold_are_failures",
            c29_references_that_do_not_hold_are_failures,
        ),
        (
            "c24_blocks_of_an_aborted_load_keep_their_new_owners_bytes",
            c24_blocks_of_an_aborted_load_keep_their_new_owners_bytes,
        ),
        (
            "c31_renewals_keep_a_lease_for_five_durations",
            c31_renewals_keep_a_lease_for_five_durations,
        ),
        (
            "c18_a_producer_that_ends_fails_what_needs_it_within_a_second",
            c18_a_producer_that_ends_fails_what_needs_it_within_a_second,
        ),
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

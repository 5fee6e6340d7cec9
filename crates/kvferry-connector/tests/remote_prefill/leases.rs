//! Leases that end too early, and producers that go away.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvferry_connector::contract::{LoadFailure, SchedulerConnector, WorkerConnector};
use kvferry_connector::lease::LeaseConfig;
use kvferry_connector::remote::Role;
use serde_json::json;

use crate::bench::{Fabric, Request, Side, config, pair, pair_of};

fn short(duration: Duration) -> LeaseConfig {
    LeaseConfig {
        duration,
        ..LeaseConfig::default()
    }
}

/// C28: a lease that has ended before the read: a failed load, and its blocks' new bytes count for nothing.
#[test]
fn c28_a_load_under_an_expired_lease_fails() {
    let (mut producer, mut consumer) = pair_of(&Fabric::loopback(), |config| {
        config.lease = short(Duration::from_millis(50));
    });
    let prefilled = Request::export("p", 32);
    let params = producer.prefill(&prefilled, &[2, 3], 1);
    producer.step(&[]);
    producer.sent(&prefilled);
    producer.write(&[2, 3], 200);
    let request = Request::new("d", 32, Some(params));
    assert_eq!(consumer.admit(&request, &[8, 9], 0), 32);
    let received = consumer.received(&request);
    assert_eq!(received.failure, Some(LoadFailure::Lease));
    let failed: Vec<u32> = received.failed.iter().map(|it| it.block).collect();
    assert_eq!(failed, [8, 9]);
    let stats = consumer.scheduler.stats();
    assert_eq!((stats.loaded, stats.failed.lease), (0, 1));
    assert_eq!(producer.scheduler.stats().parts_expired, 1);
}

/// C26: a consumer that is alive and queued for five leases keeps the blocks, and reads the right bytes.
#[test]
fn c26_a_queued_request_keeps_its_lease_alive() {
    let lease = Duration::from_millis(300);
    let (mut producer, mut consumer) = pair_of(&Fabric::loopback(), |config| {
        config.lease = short(lease);
    });
    let prefilled = Request::export("p", 32);
    let params = producer.prefill(&prefilled, &[2, 3], 1);
    producer.step(&[]);
    let request = Request::new("d", 32, Some(params));
    consumer.scheduler.on_new_request(&request.view());
    consumer.step(&[]);
    // The lease would have ended five times; the scheduler has nothing to do.
    std::thread::sleep(5 * lease);
    assert_eq!(producer.step(&[]).sent, []);
    assert_eq!(consumer.admit(&request, &[8, 9], 0), 32);
    assert_eq!(consumer.received(&request).failure, None);
    assert_eq!(consumer.wrong(&[8, 9], 1), 0);
    producer.sent(&prefilled);
    let leases = producer.workers[0]
        .lease_snapshot(Duration::from_secs(10))
        .unwrap();
    assert!(leases.counters.renewed >= 5, "{leases:?}");
    assert_eq!((leases.counters.released, leases.counters.expired), (1, 0));
}

/// C29: consumed, stale, foreign, out of range and repeated: five failures, no byte accepted.
#[test]
fn c29_references_that_do_not_hold_are_failures() {
    let (mut producer, mut consumer) = pair(&Fabric::loopback());
    let prefilled = Request::export("p", 32);
    let params = producer.prefill(&prefilled, &[2, 3], 1);
    producer.step(&[]);
    let good = Request::new("good", 32, Some(params.clone()));
    assert_eq!(consumer.admit(&good, &[8, 9], 0), 32);
    assert_eq!(consumer.received(&good).failure, None);
    producer.sent(&prefilled);
    producer.write(&[2, 3], 200);
    let held = producer.prefill(&Request::export("q", 32), &[4, 5], 60);
    producer.step(&[]);
    let mut stale = held.clone();
    stale["kvferry"]["epoch"] = json!(1);
    let mut foreign = held.clone();
    foreign["kvferry"]["instance"] = json!("0123456789abcdef0123456789abcdef");
    let mut outside = held;
    outside["remote_block_ids"] = json!([[4, 5000]]);
    for (name, params, failure) in [
        ("consumed", params.clone(), LoadFailure::Lease),
        ("repeated", params, LoadFailure::Lease),
        ("stale", stale, LoadFailure::Lease),
        ("foreign", foreign, LoadFailure::Lease),
        ("outside", outside, LoadFailure::Rejected),
    ] {
        let request = Request::new(name, 32, Some(params));
        assert_eq!(consumer.admit(&request, &[18, 19], 0), 32, "{name}");
        let received = consumer.received(&request);
        assert_eq!(received.failure, Some(failure), "{name}");
        assert_eq!(received.failed.len(), 2, "{name}");
    }
    assert_eq!(consumer.scheduler.stats().loaded, 1);
}

/// C85: an address that belongs to another engine: both ids and the address are in the log, and the
/// load fails.
#[test]
fn c85_another_engine_at_the_address_is_refused() {
    let fabric = Fabric::loopback();
    let (mut producer, mut consumer) = pair(&fabric);
    let kept = keep_log();
    let other = Side::new(&config("stranger", Role::Producer), &fabric);
    let prefilled = Request::export("p", 32);
    let mut params = producer.prefill(&prefilled, &[2, 3], 1);
    let port = other.scheduler.directory_address().unwrap().port();
    params["remote_port"] = json!(port);
    let request = Request::new("d", 32, Some(params));
    assert_eq!(consumer.admit(&request, &[8, 9], 0), 32);
    assert_eq!(
        consumer.received(&request).failure,
        Some(LoadFailure::Rejected)
    );
    assert_eq!(consumer.touched(&[8, 9]), 0);
    let log = kept.text();
    let line = log.lines().find(|line| line.contains("not connected"));
    let line = line.unwrap();
    for named in [
        format!("127.0.0.1:{port}"),
        "stranger".into(),
        "prefill".into(),
    ] {
        assert!(line.contains(&named), "{named}: {line}");
    }
}

/// C18, C92: a producer that is gone is a failed load, once, and within the time to connect.
#[test]
fn c18_a_producer_that_is_gone_fails_the_load() {
    let (mut producer, mut consumer) = pair(&Fabric::loopback());
    let prefilled = Request::export("p", 32);
    let params = producer.prefill(&prefilled, &[2, 3], 1);
    drop(producer);
    let request = Request::new("d", 32, Some(params));
    assert_eq!(consumer.admit(&request, &[8, 9], 0), 32);
    assert_eq!(consumer.received(&request).failure, Some(LoadFailure::Peer));
    assert_eq!(consumer.touched(&[8, 9]), 0);
    assert!(!consumer.scheduler.has_pending_work());
}

/// C83 with leases: the producer is replaced under its name; old offers fail, new ones work.
#[test]
fn a_restarted_producer_serves_new_leases_and_none_of_its_last_life() {
    let fabric = Fabric::loopback();
    let (mut producer, mut consumer) = pair(&fabric);
    let old = producer.prefill(&Request::export("p", 32), &[2, 3], 1);
    producer.step(&[]);
    let first = Request::new("first", 32, Some(old.clone()));
    consumer.scheduler.on_new_request(&first.view());
    consumer.step(&[]);
    drop(producer);
    let mut again = Side::new(&config("prefill", Role::Producer), &fabric);
    let new = again.prefill(&Request::export("p", 32), &[4, 5], 70);
    again.step(&[]);
    let mut moved = old;
    moved["remote_port"] = new["remote_port"].clone();
    for (name, params, failure) in [
        ("old address", moved, Some(LoadFailure::Lease)),
        ("new", new, None),
    ] {
        let request = Request::new(name, 32, Some(params));
        assert_eq!(consumer.admit(&request, &[8, 9], 0), 32, "{name}");
        assert_eq!(consumer.received(&request).failure, failure, "{name}");
    }
    assert_eq!(consumer.wrong(&[8, 9], 70), 0);
    // The one that was queued over the restart fails too.
    consumer.alloc(&first, &[18, 19], 0, 32);
    let failure = consumer.received(&first).failure;
    assert!(
        matches!(failure, Some(LoadFailure::Peer | LoadFailure::Lease)),
        "{failure:?}"
    );
}

/// C99: a shutdown with held leases: they may be released for a while, then they are revoked.
#[test]
fn c99_a_shutdown_revokes_what_nobody_releases() {
    let (mut producer, mut consumer) = pair(&Fabric::loopback());
    let prefilled = Request::export("p", 32);
    let params = producer.prefill(&prefilled, &[2, 3], 1);
    producer.step(&[]);
    producer.scheduler.begin_shutdown();
    producer.workers[0].shutdown(Duration::from_millis(100));
    producer.sent(&prefilled);
    assert_eq!(producer.scheduler.stats().parts_revoked, 1);
    let request = Request::new("d", 32, Some(params));
    assert_eq!(consumer.admit(&request, &[8, 9], 0), 32);
    assert_eq!(consumer.received(&request).failure, Some(LoadFailure::Peer));
}

/// Where the log goes in one test.
#[derive(Clone, Default)]
struct Kept(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Kept {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Kept {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }

    /// Warnings of connectors without their values, and how often each was written.
    fn lines(&self) -> BTreeMap<String, usize> {
        let log = self.text();
        let mut lines = BTreeMap::new();
        for line in log
            .lines()
            .filter(|line| line.contains("kvferry_connector::"))
        {
            let (_, line) = line.split_once(" WARN ").unwrap_or(("", line));
            let words = line.split(' ').take_while(|word| !word.contains('='));
            *lines
                .entry(words.collect::<Vec<_>>().join(" "))
                .or_default() += 1;
        }
        lines
    }
}

/// Keeps warnings and errors from here on.
fn keep_log() -> Kept {
    let kept = Kept::default();
    let writer = kept.clone();
    tracing_subscriber::fmt()
        .with_ansi(false)
        .with_max_level(tracing::Level::WARN)
        .with_writer(move || writer.clone())
        .init();
    kept
}

/// C119: many loads fail for the same reason: every one is counted and reported, and the log says so once.
#[test]
fn c119_a_storm_of_failures_is_one_line() {
    const COUNT: u32 = 30;
    let kept = keep_log();
    let (mut producer, mut consumer) = pair(&Fabric::loopback());
    let params = producer.prefill(&Request::export("p", 32), &[2, 3], 1);
    producer.step(&[]);
    let mut foreign = params;
    foreign["remote_block_ids"] = json!([[4, 5000]]);
    for number in 0..COUNT {
        let request = Request::new(&format!("r{number}"), 32, Some(foreign.clone()));
        assert_eq!(consumer.admit(&request, &[8, 9], 0), 32);
        assert!(consumer.received(&request).failure.is_some());
    }
    assert_eq!(consumer.scheduler.stats().failed.total(), u64::from(COUNT));
    let lines: Vec<_> = kept.lines().into_iter().collect();
    let expected = "kvferry_connector::remote::worker::loader: a load fails";
    assert_eq!(lines, [(expected.to_owned(), 1)]);
}

/// C19, C119: hundreds of leases expire, are released too late, and come with parameters that nobody can read. All are
/// counted, each lease has one end, and no line is written twice.
#[test]
fn c19_expiry_and_lateness_in_masses_are_counted_and_not_logged_one_by_one() {
    const COUNT: u32 = 300;
    let kept = keep_log();
    let (mut producer, mut consumer) = pair_of(&Fabric::loopback(), |config| {
        config.lease = short(Duration::from_millis(500));
        config.max_concurrent_loads = COUNT as usize;
    });
    let mut requests = Vec::new();
    for number in 0..COUNT {
        let name = format!("r{number}");
        let params = producer.prefill(&Request::export(&name, 32), &[2, 3], 1);
        requests.push(Request::new(&name, 32, Some(params)));
    }
    let mut sent = Vec::new();
    producer.step_until("every expiry", |report| {
        sent.extend(report.sent.iter().cloned());
        (sent.len() == COUNT as usize).then_some(())
    });
    sent.sort();
    sent.dedup();
    assert_eq!(sent.len(), COUNT as usize, "a lease ended twice");
    for request in &requests {
        assert_eq!(consumer.admit(request, &[8, 9], 0), 32);
    }
    let mut failed = 0;
    consumer.step_until("every failure", |report| {
        for received in &report.received {
            assert_eq!(received.failure, Some(LoadFailure::Lease));
            failed += 1;
        }
        (failed == COUNT).then_some(())
    });
    for number in 0..COUNT {
        let params = json!({"do_remote_prefill": "yes"});
        let request = Request::new(&format!("x{number}"), 32, params.as_object().cloned());
        consumer.scheduler.on_new_request(&request.view());
    }
    let count = u64::from(COUNT);
    let (there, here) = (producer.scheduler.stats(), consumer.scheduler.stats());
    assert_eq!((there.parts_expired, there.parts_released), (count, 0));
    assert_eq!((here.failed.lease, here.failed.total()), (count, count));
    assert_eq!(here.malformed, count);
    for (line, times) in kept.lines() {
        assert_eq!(times, 1, "{line}");
    }
    assert!(
        kept.lines()
            .keys()
            .any(|line| line.contains("a load fails"))
    );
}

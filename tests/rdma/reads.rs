//! Reads over rc: bytes, counts, and that the producer has no part in them.

use kvferry_tests::harness::{Case, Child};
use kvferry_tests::roles::native::{Connected, Ended, Limited, Reader};
use kvferry_tests::roles::{Counted, EngineSettings, Layout, Started};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::devices::Devices;
use crate::{Pair, settings};

const LAYOUT: Layout = Layout {
    layers: 2,
    blocks: 128,
    block_bytes: 4096,
};
const BYTES: u64 = 2 * 128 * 4096;

fn read(consumer: &mut Child) -> Ended {
    let _: Value = consumer.ask("start 40000");
    consumer.ask("finish")
}

fn well(ended: &Ended, reads: u64) {
    assert_eq!(
        (ended.error.as_str(), ended.wrong_bytes),
        ("", 0),
        "{ended:?}"
    );
    assert_eq!(
        (ended.bytes, ended.operations),
        (BYTES, 2 * 128),
        "{ended:?}"
    );
    let by_lane = (ended.native_bytes, ended.served_bytes);
    assert_eq!(by_lane, (reads * BYTES, 0), "{ended:?}");
    assert_eq!(ended.quarantined_bytes, 0);
}

/// Two hosts with RDMA and nothing configured: the native lane, over rc, one GET per run.
fn native_is_chosen_and_moves_every_byte(devices: &Devices, transports: Option<&str>) {
    let mut pair = Pair::start(devices, transports, LAYOUT, &settings());
    let Connected {
        error,
        lane,
        transports,
    } = &pair.connected;
    assert_eq!((error.as_str(), lane.as_str()), ("", "native"));
    let data = transports.split_once("data over ").unwrap().1;
    assert!(
        data.contains("rc_verbs/") || data.contains("rc_mlx5/"),
        "{transports}"
    );
    assert!(!data.contains("tcp"), "{transports}");
    let ended = read(&mut pair.consumer);
    well(&ended, 1);
    let gets: u64 = pair.consumer.ask("operations");
    assert!((256..=257).contains(&gets), "{gets} GETs for 256 runs");
    let counted: Counted = pair.producer.ask("count");
    assert_eq!(counted.bytes_served, 0);
    pair.consumer.finish_well();
    pair.producer.finish_well();
}

/// The list of the user decides: without rc there is no native lane, and the reason says what was found.
fn without_rc_there_is_no_native_lane(devices: &Devices) {
    let mut pair = Pair::start(devices, Some("ud"), LAYOUT, &settings());
    assert_eq!(pair.connected.error, "");
    assert_eq!(pair.connected.lane, "served");
    assert!(!pair.connected.transports.contains("data over"));
    let _: Value = pair.consumer.ask("start 40000");
    let ended: Ended = pair.consumer.ask("finish");
    assert_eq!((ended.error.as_str(), ended.wrong_bytes), ("", 0));
    assert_eq!((ended.native_bytes, ended.served_bytes), (0, BYTES));
    pair.consumer.finish_well();
    // C48: the strict option fails instead.
    let strict = EngineSettings {
        require_rdma: true,
        ..settings()
    };
    let reader = Reader {
        from: pair.description.clone(),
        lane: "auto".into(),
        layout: LAYOUT,
    };
    let strict = strict.to_json();
    let environment = [
        ("UCX_TLS", Some("ud")),
        ("UCX_NET_DEVICES", Some(devices.second.as_str())),
        (EngineSettings::VARIABLE, Some(strict.as_str())),
    ];
    let mut consumer = Child::start("native-reader", &reader, &environment);
    let connected: Connected = consumer.hear();
    for part in ["require_rdma", "no transport with a real GET", "ud_verbs/"] {
        assert!(connected.error.contains(part), "{}", connected.error);
    }
    consumer.finish_well();
    pair.producer.finish_well();
}

/// C48: with RDMA on both sides the strict option is no obstacle.
fn c48_require_rdma_takes_the_native_lane(devices: &Devices) {
    let strict = EngineSettings {
        require_rdma: true,
        ..settings()
    };
    let mut pair = Pair::start(devices, None, LAYOUT, &strict);
    assert_eq!(
        (pair.connected.error.as_str(), pair.connected.lane.as_str()),
        ("", "native")
    );
    well(&read(&mut pair.consumer), 1);
    pair.consumer.finish_well();
    pair.producer.finish_well();
}

/// One-sided: every thread of the producer is stopped, and the read completes.
fn a_read_completes_while_the_producer_is_stopped(devices: &Devices) {
    let patient = EngineSettings {
        suspect_ms: 60_000,
        ..settings()
    };
    let mut pair = Pair::start(devices, None, LAYOUT, &patient);
    well(&read(&mut pair.consumer), 1);
    let before: Counted = pair.producer.ask("count");
    let pid = Pid::from_raw(pair.producer.pid() as i32).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    let ended = read(&mut pair.consumer);
    kill_process(pid, Signal::CONT).unwrap();
    well(&ended, 2);
    let after: Counted = pair.producer.ask("count");
    assert_eq!((before.bytes_served, after.bytes_served), (0, 0));
    pair.consumer.finish_well();
    pair.producer.finish_well();
}

/// Connections are set up by messages that somebody must answer. If nobody does, connecting fails in time,
/// names what was tried, and costs nothing else: the engine then connects to a living peer, and ends well.
fn connecting_to_nobody_is_an_error(devices: &Devices, signal: Signal) {
    let hasty = EngineSettings {
        connect_ms: 4000,
        ..settings()
    };
    let mut pair = Pair::start(devices, None, LAYOUT, &hasty);
    assert_eq!(pair.connected.error, "");
    let stranger = Pair::producer(devices, None, LAYOUT);
    let started: Started = stranger.hear();
    let pid = Pid::from_raw(stranger.pid() as i32).unwrap();
    kill_process(pid, signal).unwrap();
    let description = serde_json::to_string(&started.description).unwrap();
    let connected: Connected = pair.consumer.ask(&format!("connect {description}"));
    assert!(
        connected.error.contains("peer producer pp0tp0"),
        "{}",
        connected.error
    );
    assert!(connected.error.contains("rc_verbs/"), "{}", connected.error);
    // It had the name of the first producer, in whose place it came; that one is connected anew.
    let connected: Connected = pair.consumer.ask("connect");
    assert_eq!(
        (connected.error.as_str(), connected.lane.as_str()),
        ("", "native")
    );
    well(&read(&mut pair.consumer), 1);
    pair.consumer.finish_well();
    pair.producer.finish_well();
}

/// C66: more than may be locked. The error names the limit and the need, of a registration and of the
/// start, where UCX has buffers of its own to lock.
fn c66_a_limit_for_locked_memory_is_named(devices: &Devices, limit: Option<u64>) {
    let limited = Limited {
        limit,
        bytes: 16 << 20,
    };
    let settings = settings().to_json();
    let environment = [
        ("UCX_NET_DEVICES", Some(devices.first.as_str())),
        (EngineSettings::VARIABLE, Some(settings.as_str())),
    ];
    let mut child = Child::start("register", &limited, &environment);
    let (limit, error): (u64, String) = child.hear();
    for part in [&format!("(RLIMIT_MEMLOCK) is {limit};"), "ulimit -l"] {
        assert!(error.contains(part), "{error}");
    }
    if limited.limit.is_none() {
        assert!(
            error.starts_with("16777216 bytes of host memory at 0x"),
            "{error}"
        );
        // What was pinned is what the limit leaves one mebibyte of.
        let pinned = limit - (1 << 20);
        let need = format!(
            "takes {} bytes of pinned memory, {pinned} of",
            pinned + (16 << 20)
        );
        assert!(error.contains(&need), "{error}");
    }
    child.finish_well();
}

pub(crate) fn cases(devices: &Devices) -> Vec<Case> {
    let case = |name: String, run: fn(&Devices)| {
        let devices = devices.clone();
        Case::new(name, move || run(&devices))
    };
    let mut cases = Vec::new();
    let lists = [
        ("default", None),
        ("rc", Some("rc")),
        ("ib", Some("ib")),
        ("names", Some("rc_verbs,ud_verbs:aux")),
        ("negated", Some("^tcp,sm")),
    ];
    for (name, transports) in lists {
        let devices = devices.clone();
        cases.push(Case::new(
            format!("native_is_chosen_and_moves_every_byte::{name}"),
            move || native_is_chosen_and_moves_every_byte(&devices, transports),
        ));
    }
    cases.push(case(
        "c48_without_rc_there_is_no_native_lane".into(),
        without_rc_there_is_no_native_lane,
    ));
    cases.push(case(
        "c48_require_rdma_takes_the_native_lane".into(),
        c48_require_rdma_takes_the_native_lane,
    ));
    cases.push(case(
        "a_read_completes_while_the_producer_is_stopped".into(),
        a_read_completes_while_the_producer_is_stopped,
    ));
    for (name, signal) in [("stopped", Signal::STOP), ("killed", Signal::KILL)] {
        let devices = devices.clone();
        cases.push(Case::new(
            format!("connecting_to_nobody_is_an_error::{name}"),
            move || connecting_to_nobody_is_an_error(&devices, signal),
        ));
    }
    for (name, limit) in [("registration", None), ("start", Some(1 << 20))] {
        let devices = devices.clone();
        cases.push(Case::new(
            format!("c66_a_limit_for_locked_memory_is_named::{name}"),
            move || c66_a_limit_for_locked_memory_is_named(&devices, limit),
        ));
    }
    cases
}

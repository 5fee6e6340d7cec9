//! C24 for the native lane: a read that ends early, with GETs on the wire, and what becomes of the memory.
//! Whatever the producer is doing, after *quiesced* nothing is written any more: a new owner's bytes stay.

use std::time::{Duration, Instant};

use kvferry_tests::harness::{Case, PATIENCE};
use kvferry_tests::roles::native::Ended;
use kvferry_tests::roles::{EngineSettings, Layout};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::devices::Devices;
use crate::{Pair, settings};

const LAYOUT: Layout = Layout {
    layers: 1,
    blocks: 512,
    block_bytes: 4096,
};

/// What ends the read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Cancel,
    Deadline,
}

/// What the producer does meanwhile.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Producer {
    Runs,
    IsStopped,
    IsKilled,
}

fn a_new_owners_bytes_stay(devices: &Devices, end: End, producer: Producer) {
    let mut pair = Pair::start(devices, None, LAYOUT, &settings());
    assert_eq!(pair.connected.lane, "native");
    // Once in peace: connections are up, and what is counted below is posted by the second read.
    let _: Value = pair.consumer.ask("start 40000");
    let ended: Ended = pair.consumer.ask("finish");
    assert_eq!((ended.error.as_str(), ended.wrong_bytes), ("", 0));
    let before: u64 = pair.consumer.ask("operations");

    // Nothing passes, so that what is posted stays under way.
    let silence = devices.disturb("loss 100%");
    let timeout = if end == End::Deadline { 1500 } else { 40_000 };
    let _: Value = pair.consumer.ask(&format!("start {timeout}"));
    let deadline = Instant::now() + PATIENCE;
    while pair.consumer.ask::<u64>("operations") < before + 64 {
        assert!(Instant::now() < deadline, "no GETs are posted");
    }
    let pid = Pid::from_raw(pair.producer.pid() as i32).unwrap();
    match producer {
        Producer::Runs => {}
        Producer::IsStopped => kill_process(pid, Signal::STOP).unwrap(),
        Producer::IsKilled => pair.producer.kill(),
    }
    if end == End::Cancel {
        let _: Value = pair.consumer.ask("cancel");
    }
    let ended: Ended = pair.consumer.ask("finish");
    let reason = match end {
        End::Cancel => "cancelled",
        End::Deadline => "stalled",
    };
    assert!(ended.error.contains(reason), "{ended:?}");
    assert_eq!(ended.quarantined_bytes, 0, "{ended:?}");

    // The memory has a new owner. Now everything passes that was held up, and is sent again.
    let _: Value = pair.consumer.ask("own");
    drop(silence);
    assert!(pair.consumer.is_quiet_for(Duration::from_secs(3)));
    let foreign: u64 = pair.consumer.ask("foreign");
    assert_eq!(foreign, 0, "bytes of the new owner were overwritten");

    // Nothing else was lost: the next read works, over a new connection.
    if producer != Producer::IsKilled {
        if producer == Producer::IsStopped {
            kill_process(pid, Signal::CONT).unwrap();
        }
        let connected: kvferry_tests::roles::Connected = pair.consumer.ask("connect");
        assert_eq!(
            (connected.error.as_str(), connected.lane.as_str()),
            ("", "native")
        );
        let _: Value = pair.consumer.ask("start 40000");
        let ended: Ended = pair.consumer.ask("finish");
        assert_eq!((ended.error.as_str(), ended.wrong_bytes), ("", 0));
    }
    pair.consumer.finish_well();
    if producer != Producer::IsKilled {
        pair.producer.finish_well();
    }
}

/// Lost and late packets cost time, and no bytes.
fn a_lossy_network_costs_time_only(devices: &Devices) {
    let patient = EngineSettings {
        suspect_ms: 60_000,
        ..settings()
    };
    let mut pair = Pair::start(devices, None, LAYOUT, &patient);
    let _disturbed = devices.disturb("delay 2ms 1ms loss 1%");
    let _: Value = pair.consumer.ask("start 40000");
    let ended: Ended = pair.consumer.ask("finish");
    assert_eq!(
        (ended.error.as_str(), ended.wrong_bytes),
        ("", 0),
        "{ended:?}"
    );
    assert_eq!(ended.native_bytes, 512 * 4096);
    pair.consumer.finish_well();
    pair.producer.finish_well();
}

pub(crate) fn cases(devices: &Devices) -> Vec<Case> {
    let mut cases = Vec::new();
    let case = |name: String, run: Box<dyn FnOnce() + Send>| {
        let mut case = Case::new(name, run);
        case.skip = devices.undisturbed();
        case
    };
    for (end, how) in [(End::Cancel, "cancel"), (End::Deadline, "deadline")] {
        for (producer, what) in [
            (Producer::Runs, "running"),
            (Producer::IsStopped, "stopped"),
            (Producer::IsKilled, "killed"),
        ] {
            let devices = devices.clone();
            cases.push(case(
                format!("c24_a_new_owners_bytes_stay::{how}::{what}"),
                Box::new(move || a_new_owners_bytes_stay(&devices, end, producer)),
            ));
        }
    }
    let devices = devices.clone();
    cases.push(case(
        "a_lossy_network_costs_time_only".into(),
        Box::new(move || a_lossy_network_costs_time_only(&devices)),
    ));
    cases
}

//! `kvferry demo` over lanes and transports, and with faults.

use std::io::BufReader;
use std::process::{ChildStderr, Stdio};

use serde_json::Value;

use crate::support::{
    BYTES, Running, SIZES, check_good, finish, first_line, kvferry, object, rest, signal, stderr,
    stdout,
};

/// A small demo with `UCX_TLS` set or unset, as its JSON object.
fn run(lane: &str, tls: Option<&str>) -> Value {
    let mut command = kvferry(["demo", "--json", "--lane", lane]);
    command.args(SIZES);
    if let Some(tls) = tls {
        command.env("UCX_TLS", tls);
    }
    let output = finish(command);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    object(&output)
}

#[test]
fn every_lane_moves_the_same_over_whatever_ucx_finds() {
    let served = run("served", None);
    check_good(&served, "served");
    for lane in ["mapped", "native", "attached"] {
        let other = run(lane, None);
        check_good(&other, lane);
        assert_eq!(served["loaded_tokens"], other["loaded_tokens"]);
    }
}

#[test]
fn both_lanes_move_the_same_over_tcp() {
    let (served, native) = (run("served", Some("tcp")), run("native", Some("tcp")));
    check_good(&served, "served");
    check_good(&native, "native");
}

#[test]
fn the_automatic_lane_is_one_that_does_not_emulate() {
    check_good(&run("auto", None), "mapped");
}

#[test]
fn the_seed_changes_the_ids_and_not_the_amount() {
    for seed in ["0", "3", "18446744073709551614"] {
        let mut command = kvferry(["demo", "--json", "--seed", seed]);
        command.args(SIZES);
        check_good(&object(&finish(command)), "mapped");
    }
}

#[test]
fn one_block_of_the_smallest_size_is_a_run_too() {
    let args = [
        "demo",
        "--json",
        "--requests=1",
        "--blocks=1",
        "--block-bytes=128",
        "--layers=1",
    ];
    let output = finish(kvferry(args));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(object(&output)["verified_bytes"].as_u64(), Some(128));
}

#[test]
fn emulation_is_said_and_only_for_the_native_lane() {
    for (lane, said) in [("native", true), ("served", false)] {
        let mut command = kvferry(["demo", "--lane", lane]);
        command.args(SIZES);
        let output = finish(command);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        assert_eq!(
            stderr(&output).contains("UCX emulates it"),
            said,
            "{}",
            stderr(&output)
        );
        assert!(stderr(&output).contains(&format!("{BYTES} of {BYTES} bytes verified")));
        let table = stdout(&output);
        let row = |name: &str| {
            let line = table.lines().find(|line| line.starts_with(name)).unwrap();
            line[name.len()..].trim().to_owned()
        };
        assert_eq!(row("requests"), "16 of 16");
        assert!(
            row("verified").contains(&format!("({BYTES} bytes)")),
            "{table}"
        );
        assert!(row("lane").starts_with(lane), "{table}");
        assert_eq!(row("leases"), "16 released, 0 held");
    }
}

/// A demo with a fault, which must fail: its object and its standard error.
fn faulty(fault: &str, lane: &str) -> (Value, String) {
    let mut command = kvferry(["demo", "--json", "--fault", fault, "--lane", lane]);
    command.args(SIZES);
    let output = finish(command);
    let told = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{told}");
    let object = object(&output);
    for failure in object["failures"].as_array().unwrap() {
        assert!(
            told.contains(&format!("failure: {}", failure.as_str().unwrap())),
            "{told}"
        );
    }
    (object, told)
}

#[test]
fn a_read_that_never_happens_is_noticed() {
    for lane in ["mapped", "native", "attached", "served"] {
        let (object, told) = faulty("skip-read", lane);
        assert!(
            told.contains("a rule was broken") && told.contains("a loaded block"),
            "{told}"
        );
        let carried = format!("carried over the {lane} lane: 0, and should be {BYTES}");
        assert!(told.contains(&carried), "{told}");
        assert_eq!(object["verified_bytes"].as_u64(), Some(0));
    }
}

#[test]
fn a_damaged_byte_is_noticed() {
    let (object, told) = faulty("damage", "served");
    assert!(
        told.contains("a rule was broken") && told.contains("a loaded block"),
        "{told}"
    );
    // The middle of a block of 16 tokens with 256 bytes each, in the first layer.
    assert!(told.contains("token 8 of it, layer 0 "), "{told}");
    // Nothing after it counts.
    assert!(object["verified_bytes"].as_u64().unwrap() < BYTES);
    assert!(object["requests"].as_u64().unwrap() < 16);
}

#[test]
fn a_request_that_never_reaches_the_consumer_is_noticed() {
    let (object, told) = faulty("lose-request", "served");
    assert!(
        told.contains("requests with the right tokens: 15, and should be 16"),
        "{told}"
    );
    assert!(
        told.contains("leases still held by the producer: 1, and should be 0"),
        "{told}"
    );
    assert_eq!(object["leases_held"].as_u64(), Some(1));
    assert_eq!(object["blocks_in_use"].as_u64(), Some(9));
    assert_eq!(object["leases_released"].as_u64(), Some(15));
}

#[test]
fn requests_of_many_blocks_are_asked_for_in_long_messages() {
    for lane in ["served", "native"] {
        let args = [
            "demo",
            "--json",
            "--requests=4",
            "--blocks=9000",
            "--block-bytes=128",
        ];
        let mut command = kvferry(args);
        command.args(["--layers=2", "--seed=0", "--lane", lane]);
        let output = finish(command);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        assert_eq!(
            object(&output)["verified_bytes"].as_u64(),
            Some(4 * 9000 * 2 * 128)
        );
    }
}

/// A demo that would go on for hours, once it has begun to read, and its standard error.
fn endless() -> (Running, BufReader<ChildStderr>) {
    let mut command = kvferry(["demo", "--json", "--requests=100000000", "--block-bytes=4K"]);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let mut demo = Running::start(command);
    let (line, told) = first_line(demo.child().stderr.take().unwrap());
    assert!(line.starts_with("  0 %"), "{line}");
    (demo, told)
}

#[test]
fn an_interrupted_demo_leaves_no_process_behind() {
    for name in ["TERM", "KILL"] {
        let (mut demo, told) = endless();
        signal(demo.child().id(), name);
        assert_eq!(demo.output().status.code(), None, "ended by the signal");
        // The producer shares the pipe, so its end is that of both processes.
        rest(told);
    }
}

#[test]
fn a_producer_that_dies_is_noticed() {
    let (mut demo, told) = endless();
    let pid = demo.child().id();
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    signal(children.trim().parse().unwrap(), "KILL");
    assert_eq!(demo.output().status.code(), Some(1));
    let told = rest(told);
    assert!(told.contains("failure: the producer is gone: "), "{told}");
    assert!(
        told.contains("failure: the producer process failed (signal: 9"),
        "{told}"
    );
}

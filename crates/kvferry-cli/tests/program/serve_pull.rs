//! `kvferry serve` and `kvferry pull` as commands of their own.

use std::io::{BufReader, Write};
use std::net::TcpStream;
use std::process::{ChildStdout, Stdio};

use crate::support::{
    Running, SIZES, check_good, finish, first_line, kvferry, object, rest, signal, stderr,
};

/// A producer, its address, and its remaining output.
fn serve(options: &[&str]) -> (Running, String, BufReader<ChildStdout>) {
    let mut command = kvferry(["serve"]);
    command.args(SIZES).args(options);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut producer = Running::start(command);
    let (line, out) = first_line(producer.child().stdout.take().unwrap());
    let address = line.trim().strip_prefix("serving at ").unwrap().to_owned();
    (producer, address, out)
}

/// Interrupts a producer, which must end in order; returns its standard error.
fn interrupt(mut producer: Running, name: &str) -> String {
    signal(producer.child().id(), name);
    let output = producer.output();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    stderr(&output)
}

#[test]
fn a_producer_serves_one_pull_after_another_until_it_is_interrupted() {
    let (producer, address, out) = serve(&[]);
    for _ in 0..2 {
        let output = finish(kvferry(["pull", &address, "--json"]));
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        check_good(&object(&output), "mapped");
    }
    let told = interrupt(producer, "INT");
    assert!(
        told.contains("shutting down") && !told.contains("revoked"),
        "{told}"
    );
    assert_eq!(
        rest(out),
        "",
        "the address is all that goes to standard output"
    );
}

#[test]
fn several_pulls_at_once_each_get_everything() {
    let (producer, address, _out) = serve(&[]);
    let pulls: Vec<Running> = (0..3)
        .map(|_| {
            let mut command = kvferry(["pull", &address, "--json"]);
            command
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            Running::start(command)
        })
        .collect();
    for pull in pulls {
        let output = pull.output();
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        check_good(&object(&output), "mapped");
    }
    interrupt(producer, "TERM");
}

#[test]
fn the_native_lane_needs_the_producer_to_allow_emulation() {
    let (producer, address, _out) = serve(&[]);
    let output = finish(kvferry(["pull", &address, "--lane=native"]));
    assert_eq!(output.status.code(), Some(1));
    let told = stderr(&output);
    assert!(
        told.contains("lane native") && told.contains("data context"),
        "{told}"
    );
    interrupt(producer, "INT");

    let (producer, address, _out) = serve(&["--allow-emulation"]);
    let output = finish(kvferry(["pull", &address, "--lane=native", "--json"]));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    check_good(&object(&output), "native");
    interrupt(producer, "INT");
}

#[test]
fn garbage_at_the_directory_disturbs_nobody() {
    let (producer, address, _out) = serve(&[]);
    let mut stranger = TcpStream::connect(&address).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let output = finish(kvferry(["pull", &address, "--json"]));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    check_good(&object(&output), "mapped");
    interrupt(producer, "INT");
}

#[test]
fn a_second_signal_ends_a_producer_that_waits_for_a_lease() {
    let (mut producer, address, _out) = serve(&[]);
    let mut command = kvferry(["pull", &address, "--json", "--fault=lose-request"]);
    command.stdin(Stdio::null());
    let output = finish(command);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(object(&output)["leases_held"].as_u64(), Some(1));
    let pid = producer.child().id();
    let mut told = BufReader::new(producer.child().stderr.take().unwrap());
    signal(pid, "INT");
    let mut line = String::new();
    while !line.contains("shutting down") {
        line.clear();
        assert_ne!(
            std::io::BufRead::read_line(&mut told, &mut line).unwrap(),
            0
        );
    }
    signal(pid, "INT");
    assert_eq!(producer.output().status.code(), Some(1));
}

#[test]
fn a_producer_that_the_demo_started_ends_with_its_standard_input() {
    let mut command = kvferry(["serve", "--machine"]);
    command.args(SIZES);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut producer = Running::start(command);
    let (line, out) = first_line(producer.child().stdout.take().unwrap());
    let ready: serde_json::Value = serde_json::from_str(&line).unwrap();
    let address = ready["address"].as_str().unwrap();
    // A lease that is never released does not hold it up.
    let output = finish(kvferry(["pull", address, "--fault=lose-request"]));
    assert_eq!(output.status.code(), Some(1));
    drop(producer.child().stdin.take());
    let output = producer.output();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(
        stderr(&output).contains("revoked: 1"),
        "{}",
        stderr(&output)
    );
    assert_eq!(rest(out), "");
}

//! What is refused, with which exit status and which words.

use std::process::Command;

use crate::support::{finish, kvferry, stderr, stdout};

/// Runs a command that must end with a status, print nothing on standard output, and say all of
/// `parts` on standard error.
fn refused(command: Command, status: i32, parts: &[&str]) {
    let text = format!("{command:?}");
    let output = finish(command);
    let told = stderr(&output);
    assert_eq!(output.status.code(), Some(status), "{text}: {told}");
    assert_eq!(stdout(&output), "", "{text}");
    for part in parts {
        assert!(told.contains(part), "{text}: {part:?} is not in {told}");
    }
}

#[test]
fn a_lane_that_there_is_not_is_refused_with_those_there_are() {
    refused(
        kvferry(["demo", "--lane", "fast"]),
        2,
        &["fast", "mapped, native, attached or served"],
    );
}

#[test]
fn sizes_that_make_no_sense_are_refused_with_the_value() {
    for (args, parts) in [
        (&["--requests=0"][..], &["--requests is 0"][..]),
        (&["--blocks=0"], &["--blocks is 0"]),
        (&["--block-bytes=0"], &["--block-bytes is 0"]),
        (&["--layers=0"], &["--layers is 0"]),
        (
            &["--block-bytes=1000"],
            &["--block-bytes is 1000", "multiple of 128"],
        ),
        (&["--blocks=65537"], &["--blocks is 65537", "1 to 65536"]),
        (&["--block-bytes=1X"], &["\"1X\""]),
        (&["--block-bytes=16777216T"], &["16777216T", "2^64"]),
        (
            &["--requests=18446744073709551615"],
            &["18446744073709551615 requests", "2^64"],
        ),
        (
            &["--block-bytes=1T"],
            &["two pools would take ", "bytes of memory", "are available"],
        ),
    ] {
        let mut command = kvferry(["demo"]);
        command.args(args);
        refused(command, 2, parts);
        let mut command = kvferry(["serve"]);
        command.args(args);
        refused(
            command,
            2,
            if args == ["--block-bytes=1T"] {
                &["the producer's pool"]
            } else {
                parts
            },
        );
    }
}

#[test]
fn no_command_a_wrong_one_and_a_wrong_filter_are_refused() {
    refused(kvferry([]), 2, &["Usage: kvferry"]);
    refused(kvferry(["fly"]), 2, &["fly"]);
    refused(kvferry(["pull"]), 2, &["HOST:PORT"]);
    let mut command = kvferry(["demo"]);
    command.env("KVFERRY_LOG", "engine=verbose");
    refused(command, 2, &["KVFERRY_LOG", "engine=verbose"]);
}

#[test]
fn help_and_version_are_no_errors_and_faults_stay_hidden() {
    for (args, part) in [
        (["demo", "--help"], "--lane"),
        (["--version", ""], "kvferry 0."),
    ] {
        let output = finish(kvferry(args.into_iter().filter(|arg| !arg.is_empty())));
        assert_eq!(output.status.code(), Some(0));
        assert!(stdout(&output).contains(part) && !stdout(&output).contains("--fault"));
    }
}

#[test]
fn an_address_where_nobody_listens_is_named() {
    // A port that was free a moment ago.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    drop(listener);
    refused(kvferry(["pull", &address, "--json"]), 1, &[&address]);
    refused(kvferry(["pull", "127.0.0.1"]), 1, &["127.0.0.1"]);
}

#[test]
fn an_address_in_use_is_named() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let command = kvferry([
        "serve",
        "--listen",
        &address,
        "--requests=1",
        "--block-bytes=1K",
    ]);
    refused(command, 1, &[&address, "in use"]);
}

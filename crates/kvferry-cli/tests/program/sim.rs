//! `kvferry sim`.

use std::process::Output;

use serde_json::Value;

use crate::support::{finish, kvferry, stderr, stdout};

fn sim(arguments: &[&str]) -> Output {
    let mut command = kvferry(["sim"]);
    command.args(arguments);
    finish(command)
}

#[test]
fn a_run_says_what_came_of_it() {
    for connector in ["remote", "storage", "multi"] {
        let output = sim(&[
            "--requests",
            "20",
            "--seed",
            "5",
            "--connector",
            connector,
            "--json",
        ]);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(report["requests"], 20);
        assert_eq!(report["finished"], 20, "{connector}");
        assert_eq!(
            (&report["failed"], &report["violation"]),
            (&Value::from(0), &Value::Null)
        );
    }
}

#[test]
fn a_table_is_for_people() {
    let output = sim(&["--requests", "10", "--faults", "mixed", "--carrier", "ucx"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let table = stdout(&output);
    assert!(table.contains("requests          10\n"), "{table}");
    assert!(table.ends_with("every rule held\n"), "{table}");
}

#[test]
fn a_bad_command_line_is_status_2() {
    for arguments in [
        &["--faults", "many"][..],
        &["--requests", "-1"],
        &["--connector", "nixl"],
        &["--carrier", "pigeon"],
    ] {
        let output = sim(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(output.stdout.is_empty());
    }
}

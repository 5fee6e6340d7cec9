//! Regions, connections and reads in any order, as they are and under valgrind.

#![allow(missing_docs, clippy::unwrap_used)]

use std::process::{Command, ExitCode, Stdio};

use kvferry_tests::harness::{Case, Child, main as run_cases};
use kvferry_tests::roles::{Disorder, Disordered};

const SUPPRESSIONS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/valgrind.supp");

fn disorder(lane: &str, seed: u64, steps: u32) -> Disorder {
    Disorder {
        lane: lane.into(),
        seed,
        steps,
        withdraw: lane != "native",
        pools: lane == "mapped",
    }
}

/// Lets it do its steps, in parts that take less than anybody's patience, and end well: under
/// valgrind also without an error, which it says on standard error.
fn run(mut child: Child) -> Disordered {
    for _ in 0..4 {
        let _: Disordered = child.ask("go");
    }
    let result = child.ask("end");
    child.finish_well();
    result
}

/// C54: regions, connections and reads come and go in any order, also with reads in flight. Every
/// read ends, what was read is right, and nothing is left in quarantine.
fn c54_in_any_order(lane: &'static str) {
    let mut all = Disordered::default();
    for seed in 0..12 {
        let one = run(Child::start("disorder", &disorder(lane, seed, 150), &[]));
        all.read += one.read;
        all.compared += one.compared;
        all.cancelled += one.cancelled;
        all.refused += one.refused;
        all.dropped += one.dropped;
        all.busy += one.busy;
    }
    println!("{all:?}");
    assert!(all.read > 0 && all.compared > all.read && all.dropped > 0);
    assert!(all.cancelled > 0 && all.refused > 0 && all.busy > 0);
}

/// The same under valgrind: no access to memory that was given back, and nothing lost.
fn c54_in_any_order_under_valgrind(lane: &'static str) {
    let suppressions = format!("--suppressions={SUPPRESSIONS}");
    let valgrind = [
        "valgrind",
        "--quiet",
        "--error-exitcode=97",
        "--leak-check=full",
        "--show-leak-kinds=definite,indirect,possible",
        "--num-callers=40",
        "--fair-sched=yes",
        "--gen-suppressions=all",
        &suppressions,
    ];
    for seed in 100..102 {
        let plan = disorder(lane, seed, 60);
        let result = run(Child::start_under(&valgrind, "disorder", &plan, &[]));
        println!("{result:?}");
        assert!(result.read > 0 && result.compared > 0);
    }
}

fn why_no_valgrind() -> Option<String> {
    let tried = Command::new("valgrind")
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    match tried {
        Ok(status) if status.success() => None,
        Ok(status) => Some(format!("valgrind --version ends with {status}")),
        Err(error) => Some(format!("valgrind cannot be run: {error}")),
    }
}

fn main() -> ExitCode {
    let mut cases = Vec::new();
    for lane in ["served", "native", "mapped", "attached"] {
        cases.push(Case::new(format!("c54_in_any_order::{lane}"), move || {
            c54_in_any_order(lane);
        }));
        let mut valgrind = Case::new(
            format!("c54_in_any_order_under_valgrind::{lane}"),
            move || {
                c54_in_any_order_under_valgrind(lane);
            },
        );
        valgrind.skip = why_no_valgrind();
        cases.push(valgrind);
    }
    run_cases(cases)
}

//! The table of usable lanes against the lanes.

use std::process::Command;

use kvferry_tests::harness::{Case, PATIENCE};
use kvferry_tests::roles::{EngineChild, EngineSpec, Layout, Memory};

const TABLE: &str = include_str!("../../docs/usable-lanes.md");

const PRODUCER: Layout = Layout {
    layers: 2,
    blocks: 200,
    block_bytes: 4096,
};
const CONSUMER: Layout = Layout {
    layers: 2,
    blocks: 100,
    block_bytes: 4096,
};
const LANES: [&str; 4] = ["mapped", "native", "attached", "served"];
/// A user that has no processes.
const SOMEBODY: u32 = 61_234;

#[derive(Clone, Debug)]
struct Row {
    ucx: String,
    emulation: bool,
    memory: Memory,
    place: String,
    /// Nothing for a usable lane, or what its refusal says.
    lanes: [Option<String>; 4],
    auto: String,
}

fn cells(line: &str) -> Vec<String> {
    let inside = line.trim().trim_matches('|');
    inside
        .split('|')
        .map(|cell| cell.trim().to_owned())
        .collect()
}

fn reason(key: &str) -> String {
    let start = format!("* {key}: ");
    let line = TABLE.lines().find_map(|line| line.strip_prefix(&start));
    line.unwrap_or_else(|| panic!("no reason {key}")).to_owned()
}

/// The rows, each with its transport lists.
fn rows() -> Vec<(Row, Vec<Option<&'static str>>)> {
    let lines = TABLE.lines().filter(|line| line.starts_with("| "));
    lines
        .map(cells)
        .filter(|cells| cells[0] != "UCX" && !cells[0].starts_with("---"))
        .map(|cells| {
            let lane = |n: usize| match cells[5 + n].as_str() {
                "yes" => None,
                key => Some(reason(key)),
            };
            let lists = match cells[1].as_str() {
                "three" => vec![None, Some("tcp"), Some("posix,sysv,cma,tcp")],
                "tcp" => vec![Some("tcp")],
                other => panic!("no transports {other}"),
            };
            let memory = match cells[3].as_str() {
                "pool" => Memory::Pool,
                "foreign" => Memory::Foreign,
                other => panic!("no memory {other}"),
            };
            let row = Row {
                ucx: cells[0].clone(),
                emulation: cells[2] == "yes",
                memory,
                place: cells[4].clone(),
                lanes: [lane(0), lane(1), lane(2), lane(3)],
                auto: cells[9].clone(),
            };
            (row, lists)
        })
        .collect()
}

/// 40 blocks in 24 runs of ids.
fn scattered() -> Vec<(u32, u32)> {
    (0..8)
        .flat_map(|group| {
            let (local, remote) = (group * 8, (group * 53) % 190);
            let neighbours = (0..3).map(move |n| (local + n, remote + n));
            neighbours.chain([(local + 5, remote + 7), (local + 4, remote + 9)])
        })
        .collect()
}

fn works(program: &str, arguments: &[&str]) -> bool {
    let status = Command::new(program).args(arguments).arg("true").output();
    status.is_ok_and(|output| output.status.success())
}

const USER_NAMESPACE: [&str; 3] = ["unshare", "--user", "--map-root-user"];
const UNMAPPED: [&str; 2] = ["unshare", "--user"];
const PID_NAMESPACE: [&str; 4] = ["unshare", "--pid", "--fork", "--kill-child"];

/// Why a row cannot be tested here.
fn obstacle(row: &Row) -> Option<String> {
    let root = rustix::process::geteuid().is_root();
    let needs = |ok: bool, what: &str| (!ok).then(|| what.to_owned());
    match row.place.as_str() {
        "another user" | "changed privileges" => needs(root, "needs root, to be another user"),
        "producer in a user namespace" => needs(
            works("unshare", &USER_NAMESPACE[1..]),
            "user namespaces cannot be made here (unshare --user)",
        ),
        "consumer in an unmapped user namespace" => needs(
            works("unshare", &UNMAPPED[1..]),
            "user namespaces cannot be made here (unshare --user)",
        ),
        "producer in a pid namespace" | "consumer in a pid namespace" => needs(
            works("unshare", &PID_NAMESPACE[1..]),
            "pid namespaces cannot be made here (unshare --pid needs root)",
        ),
        _ => None,
    }
}

/// Starts the two processes of a row.
fn pair(row: &Row, transports: Option<&str>) -> (EngineChild, EngineChild) {
    let environment = [("UCX_TLS", transports)];
    let mut ours = EngineSpec::consumer(CONSUMER);
    let mut theirs = EngineSpec::producer(PRODUCER);
    (ours.emulation, theirs.emulation) = (row.emulation, row.emulation);
    theirs.memory = row.memory;
    let (mut our_wrapper, mut their_wrapper): (&[&str], &[&str]) = (&[], &[]);
    match row.place.as_str() {
        "same user" | "another host" => {}
        "sharing is off" => theirs.shares = false,
        "another user" => theirs.user = Some(SOMEBODY),
        "changed privileges" => (ours.user, theirs.user) = (Some(SOMEBODY), Some(SOMEBODY)),
        "producer in a user namespace" => their_wrapper = &USER_NAMESPACE,
        "consumer in an unmapped user namespace" => our_wrapper = &UNMAPPED,
        "producer in a pid namespace" => their_wrapper = &PID_NAMESPACE,
        "consumer in a pid namespace" => our_wrapper = &PID_NAMESPACE,
        other => panic!("no place {other}"),
    }
    let producer = EngineChild::start_under(their_wrapper, &theirs, &environment);
    let consumer = EngineChild::start_under(our_wrapper, &ours, &environment);
    (producer, consumer)
}

fn a_row_holds(row: &Row, transports: Option<&str>) {
    let (mut producer, mut consumer) = pair(row, transports);
    let elsewhere = (row.place == "another host").then_some("another host");
    let description = producer.describe();
    let pairs = scattered();
    let bytes = 2 * 40 * 4096;
    for (lane, refusal) in LANES.into_iter().zip(&row.lanes) {
        let connected = consumer.connect_as_if(&description, lane, elsewhere);
        if let Some(reason) = refusal {
            assert!(
                connected.error.contains(lane) && connected.error.contains(reason),
                "{lane}: {reason:?} expected: {:?}",
                connected.error
            );
            continue;
        }
        assert_eq!(
            (connected.error.as_str(), connected.lane.as_str()),
            ("", lane)
        );
        consumer.fill(kvferry_tests::pattern::POISON);
        let before = consumer.counters();
        consumer.read(&pairs, PATIENCE);
        let ended = consumer.wait();
        assert_eq!((ended.error.as_str(), ended.bytes), ("", bytes), "{lane}");
        assert_eq!(ended.operations, 2 * 24);
        assert_eq!(consumer.wrong(&pairs), 0, "{lane}");
        let after = consumer.counters();
        for other in LANES {
            let moved = after[other] - before[other];
            assert_eq!(
                moved,
                if other == lane { bytes } else { 0 },
                "{lane}: {other}"
            );
        }
        let data = (after["ucx_operations"] - before["ucx_operations"])
            - (after["messages"] - before["messages"]);
        assert_eq!(data, if lane == "native" { 2 * 24 } else { 0 }, "{lane}");
        let copies = matches!(lane, "mapped" | "attached");
        assert_eq!(after["batches"] - before["batches"], u64::from(copies));
        assert_eq!(after["quarantined"], 0);
    }
    let connected = consumer.connect_as_if(&description, "auto", elsewhere);
    assert_eq!((connected.error.as_str(), &connected.lane), ("", &row.auto));
    // C62: said once, however often it happens.
    let falls_back = row.auto == "served" && elsewhere.is_none() && row.place != "sharing is off";
    consumer.connect_as_if(&description, "auto", elsewhere);
    let warnings = consumer.warnings();
    let said = |line: &&String| line.contains("because no faster lane can be used");
    assert_eq!(
        warnings.iter().filter(said).count(),
        usize::from(falls_back),
        "{warnings:?}"
    );
    consumer.child.finish_well();
    producer.child.finish_well();
}

/// The field case that a place stands for.
fn number(place: &str) -> &'static str {
    match place {
        "another user" | "changed privileges" => "c62_",
        place if place.contains("user namespace") => "c62_",
        place if place.contains("pid namespace") => "c63_",
        _ => "",
    }
}

pub(crate) fn cases() -> Vec<Case> {
    let ours = std::env::var("KVFERRY_EXPECT_UCX").unwrap_or_default();
    let mut cases = Vec::new();
    for (row, lists) in rows() {
        if row.ucx != "any" && row.ucx != ours {
            continue;
        }
        for transports in lists {
            let memory = format!("{:?}", row.memory).to_lowercase();
            let emulation = if row.emulation { "emulation" } else { "plain" };
            let name = format!(
                "{}usable_lanes::{}::{memory}::{emulation}::{}",
                number(&row.place),
                row.place.replace(' ', "_"),
                transports.unwrap_or("default")
            );
            let skip = obstacle(&row);
            let row = row.clone();
            let mut case = Case::new(name, move || a_row_holds(&row, transports));
            case.skip = skip;
            cases.push(case);
        }
    }
    assert!(cases.len() >= 20, "the table was not read");
    cases
}

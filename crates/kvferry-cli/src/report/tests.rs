use super::*;

const PLAN: DemoPlan = DemoPlan {
    requests: 16,
    blocks: 4,
    block_bytes: 1024,
    layers: 2,
    seed: 0,
};
/// 14 whole requests and a half one.
const BLOCKS: u64 = 14 * 4 + 2;
const BYTES: u64 = BLOCKS * 2048;

fn counters(set: impl FnOnce(&mut CounterSnapshot)) -> CounterSnapshot {
    let mut counters = CounterSnapshot::default();
    set(&mut counters);
    counters
}

/// The facts of a good run over the served lane.
fn good() -> Facts<'static> {
    Facts {
        plan: &PLAN,
        lane: Lane::Served,
        transports: "tcp".to_owned(),
        emulated: false,
        ucx: Some(UcxVersion {
            major: 1,
            minor: 13,
            release: 1,
        }),
        producer_ucx: None,
        loads: LoaderStats {
            blocks: BLOCKS,
            bytes: BYTES,
            operations: 100,
            reading_us: 500_000,
            ..LoaderStats::default()
        },
        tokens: Counts {
            loaded_tokens: BLOCKS * 16,
            ..Counts::default()
        },
        totals: Totals {
            requests: 16,
            verified_bytes: BYTES,
            ..Totals::default()
        },
        before: counters(|counters| {
            counters.ucx_operations = 2;
            counters.messages_sent = 2;
        }),
        after: counters(|counters| {
            counters.ucx_operations = 50;
            counters.messages_sent = 50;
            counters.served_bytes = BYTES;
        }),
        quarantined_bytes: 0,
        summary: Ok(DemoSummary {
            leases_released: 16,
            ..DemoSummary::default()
        }),
    }
}

/// The failures of a run that differs from a good one.
fn failures(change: impl FnOnce(&mut Facts<'static>)) -> Vec<String> {
    let mut facts = good();
    change(&mut facts);
    Report::new(facts).failures
}

#[test]
fn a_good_run_has_no_failures() {
    assert_eq!(Report::new(good()).failures, Vec::<String>::new());
    let native = failures(|facts| {
        facts.lane = Lane::Native;
        facts.after.served_bytes = 0;
        facts.after.native_bytes = BYTES;
        facts.after.ucx_operations = 150;
    });
    assert_eq!(native, Vec::<String>::new());
}

#[test]
fn whatever_is_missing_or_left_over_is_a_failure_with_both_numbers() {
    let summary = |change: fn(&mut DemoSummary)| {
        move |facts: &mut Facts<'static>| facts.summary.iter_mut().for_each(change)
    };
    let cases: [(Vec<String>, &str); 11] = [
        (
            failures(|facts| facts.tokens.loaded_tokens = 0),
            "tokens loaded: 0, and should be 928",
        ),
        (
            failures(|facts| facts.totals.requests = 15),
            "right tokens: 15, and should be 16",
        ),
        (
            failures(|facts| facts.loads.blocks += 1),
            "blocks read: 59, and should be 58",
        ),
        (
            failures(|facts| facts.loads.bytes -= 1),
            "bytes read: 118783, and should be 118784",
        ),
        (
            failures(|facts| facts.totals.verified_bytes = 0),
            "verified: 0, and should be 118784",
        ),
        (
            failures(|facts| facts.after.served_bytes = 7),
            "served lane: 7, and should be 118784",
        ),
        (
            failures(|facts| facts.after.native_bytes = 7),
            "native lane: 7, and should be 0",
        ),
        (
            failures(|facts| facts.quarantined_bytes = 8),
            "bytes in quarantine: 8",
        ),
        (
            failures(summary(|summary| summary.leases_held = 1)),
            "still held by the producer: 1",
        ),
        (
            failures(summary(|summary| summary.blocks_in_use = 4)),
            "in use at the producer: 4",
        ),
        (
            failures(summary(|summary| summary.leases_expired = 1)),
            "leases that expired: 1",
        ),
    ];
    for (failures, part) in cases {
        assert_eq!(failures.len(), 1, "{failures:?}");
        assert!(failures[0].contains(part), "{failures:?}");
    }
    let lost = failures(|facts| {
        facts.summary = Err(CliError::Producer("is gone".to_owned()));
    });
    assert_eq!(lost, ["the run was not summed up: the producer is gone"]);
    let idle = failures(|facts| facts.after = facts.before);
    assert!(
        idle.iter()
            .any(|failure| failure.contains("UCX carried nothing")),
        "{idle:?}"
    );
}

#[test]
fn native_reads_are_one_get_for_each_run() {
    let failures = failures(|facts| {
        facts.lane = Lane::Native;
        facts.after.served_bytes = 0;
        facts.after.native_bytes = BYTES;
        facts.after.ucx_operations = 149;
    });
    assert_eq!(
        failures,
        ["GETs posted for the runs that were read: 99, and should be 100"]
    );
}

#[test]
fn failures_are_listed_once_and_not_without_end() {
    let mut totals = Totals::default();
    for n in 0..LISTED + 5 {
        totals.fail(format!("failure {n}"));
        totals.fail("failure 0".to_owned());
    }
    assert_eq!((totals.failures.len(), totals.more_failures), (LISTED, 5));
}

#[test]
fn failures_beyond_the_list_are_counted() {
    let failures = failures(|facts| {
        facts.totals.failures = vec!["one".to_owned()];
        facts.totals.more_failures = 3;
    });
    assert_eq!(failures, ["one", "and 3 more failures"]);
}

#[test]
fn the_json_object_has_the_promised_fields() {
    let text = serde_json::to_string(&Report::new(good())).unwrap();
    let object: serde_json::Value = serde_json::from_str(&text).unwrap();
    for (field, value) in [
        ("requests", 16),
        ("blocks", BLOCKS),
        ("bytes", BYTES),
        ("verified_bytes", BYTES),
        ("ucx_operations", 48),
        ("operations", 100),
        ("leases_held", 0),
        ("leases_released", 16),
        ("quarantined_bytes", 0),
    ] {
        assert_eq!(object[field].as_u64(), Some(value), "{field}");
    }
    assert_eq!(object["lane"], "served");
    assert_eq!(object["bytes_by_lane"]["served"].as_u64(), Some(BYTES));
    assert_eq!(object["bytes_by_lane"]["native"].as_u64(), Some(0));
    assert_eq!(object["ucx_version"], "1.13.1");
    assert_eq!(object["failures"].as_array().map(Vec::len), Some(0));
    let speed = object["gb_per_s"].as_f64().unwrap();
    assert!((speed - 0.000_237_568).abs() < 1e-9, "{speed}");
}

#[test]
fn the_table_has_one_row_for_each_fact() {
    let table = Report::new(good()).to_string();
    for row in [
        "requests        16 of 16",
        "blocks          58 of 1 KiB in 2 layers",
        "verified        116 KiB (118784 bytes)",
        "lane            served",
        "leases          16 released, 0 held",
        "UCX             1.13.1, the producer's none",
    ] {
        assert!(table.lines().any(|line| line == row), "{row}\n{table}");
    }
    assert_eq!(size(3 << 40), "3 TiB");
    assert_eq!(size(1536), "1.50 KiB");
}

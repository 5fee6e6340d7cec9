//! `kvferry bench`: what is measured is what was asked for, and every byte of it is right.

use std::collections::BTreeSet;
use std::io::Write;

use serde_json::Value;

use crate::support::{finish, kvferry};

const READ: [&str; 5] = [
    "bench",
    "read",
    "--block-bytes=4K,64K",
    "--repetitions=2",
    "--json",
];

fn rows(more: &[&str]) -> Vec<Value> {
    let output = finish(kvferry(READ.into_iter().chain(more.iter().copied())));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{errors}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn every_lane_and_contender_has_a_row_per_block_size() {
    let rows = rows(&[
        "--blocks=96,48",
        "--layers=2",
        "--pattern=runs:8",
        "--lane=mapped,attached,served",
        "--queue-depth=3",
        "--workers=2",
        "--compare=memcpy,socket",
    ]);
    let found: BTreeSet<(u64, &str, &str)> = rows
        .iter()
        .map(|row| {
            let text = |key: &str| row[key].as_str().unwrap();
            let bytes = row["block_bytes"].as_u64().unwrap();
            (bytes, text("contender"), text("lane"))
        })
        .collect();
    let mut expected = BTreeSet::new();
    for bytes in [4096, 65_536] {
        for lane in ["mapped", "attached", "served"] {
            expected.insert((bytes, "kvferry", lane));
        }
        expected.insert((bytes, "memcpy", "2 threads"));
        expected.insert((bytes, "socket", "tcp, in order"));
    }
    assert_eq!(found, expected);
    assert_eq!(rows.len(), expected.len());
    for row in &rows {
        let (bytes, blocks) = if row["block_bytes"] == 4096 {
            (4096, 96)
        } else {
            (65_536, 48)
        };
        assert_eq!(row["blocks"], blocks, "{row}");
        assert_eq!(row["layers"], 2);
        assert_eq!(row["pattern"], "runs:8");
        assert_eq!(row["repetitions"], 2);
        assert_eq!(row["wrong_blocks"], 0, "{row}");
        let rate = |key: &str| row[key].as_f64().unwrap();
        assert!(rate("gb_per_s_worst") > 0.0 && rate("gb_per_s_worst") <= rate("gb_per_s_median"));
        assert!(rate("gb_per_s_median") <= rate("gb_per_s_best"));
        // Per block of a layer, of the best turn.
        let ns = f64::from(bytes) / rate("gb_per_s_best");
        assert!(
            (ns - rate("ns_per_block")).abs() < 1.0 + ns / 100.0,
            "{row}"
        );
        let ratio = |key: &str| row[key].as_f64();
        assert!(ratio("ratio_to_memcpy").is_some() && ratio("ratio_to_socket").is_some());
        assert_eq!(ratio("ratio_to_nixl"), None);
        if row["contender"] == "memcpy" {
            assert_eq!(ratio("ratio_to_memcpy"), Some(1.0));
        }
        // Runs of 8 blocks are one operation each, and the three reads in flight cut none.
        if row["lane"] == "mapped" {
            assert_eq!(row["operations"], blocks / 8 * 2, "{row}");
        }
    }
}

#[test]
fn a_plot_has_a_line_per_contender() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("read.svg");
    let plot = format!("--plot={}", file.display());
    rows(&["--bytes=512K", "--compare=memcpy", &plot]);
    let svg = std::fs::read_to_string(&file).unwrap();
    for text in ["kvferry, mapped", "memcpy", "4 KiB", "64 KiB"] {
        assert!(svg.contains(text), "no {text:?} in the plot");
    }
    let nowhere = finish(kvferry(READ.into_iter().chain([
        "--bytes=512K",
        "--compare=memcpy",
        "--plot=/nowhere/read.svg",
    ])));
    assert_eq!(nowhere.status.code(), Some(1));
    let errors = String::from_utf8_lossy(&nowhere.stderr);
    assert!(
        errors.contains("/nowhere/read.svg could not be drawn"),
        "{errors}"
    );
}

/// The protocol of drivers, with a driver that lies about its bytes: wrong blocks are a failure, and a driver that
/// ends is one that is named.
#[test]
fn a_contender_with_wrong_bytes_or_without_answers_fails_the_run() {
    let directory = tempfile::tempdir().unwrap();
    let driver = directory.path().join("nixl_driver.py");
    let script = |turn: &str| {
        let mut file = std::fs::File::create(&driver).unwrap();
        write!(
            file,
            r#"read -r wanted
case $wanted in *'"block_bytes":4096,"blocks":16,"layers":1,"pattern":"random"'*) ;; *) exit 3 ;; esac
echo '{{"lane":"a stub","bytes":65536}}'
while read -r again; do {turn}; done
"#
        )
        .unwrap();
    };
    let run = || {
        let peers = format!("--peers={}", directory.path().display());
        let args = [
            "bench",
            "read",
            "--block-bytes=4K",
            "--blocks=16",
            "--repetitions=3",
            "--compare=nixl",
            "--python=sh",
            "--json",
            &peers,
        ];
        finish(kvferry(args))
    };
    script(r#"echo '{"seconds":0.5,"operations":16,"wrong":2}'"#);
    let output = run();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.contains("blocks with wrong bytes: 6"), "{errors}");
    let rows: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    let stub = rows.iter().find(|row| row["contender"] == "nixl").unwrap();
    assert_eq!(
        (&stub["lane"], &stub["wrong_blocks"]),
        (&"a stub".into(), &6.into())
    );
    assert!((stub["gb_per_s_best"].as_f64().unwrap() - 0.000_131_072).abs() < 1e-12);
    script("exit 4");
    let output = run();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(
        errors.contains("the nixl process has ended before it answered"),
        "{errors}"
    );
    script("echo nonsense");
    let errors = String::from_utf8_lossy(&run().stderr).into_owned();
    assert!(
        errors.contains(r#"the nixl process said "nonsense""#),
        "{errors}"
    );
}

#[test]
fn what_makes_no_sense_is_refused_before_anything_starts() {
    for (args, words) in [
        (
            &["--blocks=1,2,3"][..],
            "--blocks has 3 numbers for 2 block sizes",
        ),
        (&["--blocks=0"], "--blocks is 0"),
        (&["--layers=0"], "--layers is 0"),
        (
            &["--block-bytes=12"],
            "--block-bytes is 12: give a multiple of 8",
        ),
        (&["--pattern=runs:0"], "is no pattern"),
        (&["--lane=rdma"], "rdma"),
        (&["--compare=everything"], "everything"),
        (&["--bytes=1000T"], "bytes of memory"),
    ] {
        let args = ["bench", "read"].into_iter().chain(args.iter().copied());
        let args: Vec<&str> = args
            .chain(
                ["--block-bytes=4K,8K"]
                    .into_iter()
                    .filter(|_| !words.contains("12")),
            )
            .collect();
        let output = finish(kvferry(args.iter().copied()));
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {errors}");
        assert!(errors.contains(words), "{args:?}: {errors}");
    }
}

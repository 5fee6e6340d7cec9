//! Random scenarios over the real connectors: with faults in the fabric between them, and over UCX.
//!
//! Threads are behind these connectors, so a seed's run is not the same twice; what is checked holds in every
//! order. `KVFERRY_SIM_SEEDS` says how many seeds each test takes.

use std::path::{Path, PathBuf};

use kvferry_sim::{Carrier, Connectors, Faults, Options, RealFactory, Report, run};

const REQUESTS: u32 = 30;

fn seeds(usual: u64) -> u64 {
    let text = std::env::var("KVFERRY_SIM_SEEDS").ok();
    text.map_or(usual, |text| text.parse().unwrap())
}

fn connectors(name: &str, path: PathBuf) -> Connectors {
    match name {
        "remote" => Connectors::Remote,
        "storage" => Connectors::Storage(path),
        _ => Connectors::Multi(path),
    }
}

/// Every rule holds for so many seeds; without faults every request has the right tokens.
///
/// Files are saved by threads, which a run need not wait for: what a connector with a directory saved is
/// surely there for a second run of the same seed, and not before.
fn every_rule_holds(name: &str, faults: Faults, carrier: Carrier, count: u64) {
    let (mut finished, mut loads) = (0, 0);
    let runs = if name == "storage" { 2 } else { 1 };
    for seed in 1..=seeds(count) {
        let files = tempfile::tempdir().unwrap();
        for _ in 0..runs {
            let report = one_run(name, faults, carrier, seed, files.path());
            finished += u64::from(report.finished);
            loads += report.total().loads;
        }
    }
    assert!(
        finished > 0 && loads > 0,
        "{finished} finished, {loads} loads"
    );
}

fn one_run(name: &str, faults: Faults, carrier: Carrier, seed: u64, files: &Path) -> Report {
    let options = Options {
        requests: REQUESTS,
        seed,
        faults,
        // As vLLM, which these connectors are for.
        keeps_last: false,
        ..Options::default()
    };
    let connectors = connectors(name, files.to_owned());
    let mut factory = RealFactory::new(connectors, carrier, faults, seed);
    let report = run(&options, &mut factory).unwrap();
    let (carrier, level) = (carrier.name(), faults.name());
    assert_eq!(
        report.violation, None,
        "again with: kvferry sim --requests {REQUESTS} --seed {seed} --faults {level} --connector \
         {name} --carrier {carrier}"
    );
    if faults == Faults::None {
        assert_eq!(report.finished, REQUESTS, "seed {seed}");
    }
    report
}

macro_rules! tests {
    ($($test:ident: $name:literal, $faults:ident, $carrier:ident, $count:literal;)*) => {
        $(
            #[test]
            fn $test() {
                every_rule_holds($name, Faults::$faults, Carrier::$carrier, $count);
            }
        )*
    };
}

tests! {
    remote_without_faults: "remote", None, Loopback, 20;
    remote_with_faults: "remote", Mixed, Loopback, 20;
    remote_with_harsh_faults: "remote", Harsh, Loopback, 20;
    remote_with_reads_that_lie: "remote", Lying, Loopback, 10;
    storage_without_faults: "storage", None, Loopback, 20;
    storage_with_faults: "storage", Mixed, Loopback, 20;
    storage_with_harsh_faults: "storage", Harsh, Loopback, 20;
    multi_without_faults: "multi", None, Loopback, 20;
    multi_with_faults: "multi", Mixed, Loopback, 20;
    multi_with_harsh_faults: "multi", Harsh, Loopback, 20;
    multi_with_reads_that_lie: "multi", Lying, Loopback, 10;
    remote_over_ucx_without_faults: "remote", None, Ucx, 8;
    remote_over_ucx_with_faults: "remote", Mixed, Ucx, 8;
    multi_over_ucx_with_harsh_faults: "multi", Harsh, Ucx, 8;
}

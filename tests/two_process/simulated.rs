//! The simulator's engines in processes of their own, with `RemotePrefill` over UCX between them: random
//! arrivals, aborts, preemptions, rejections and crashes from a seed. Every rule of the simulator holds in each
//! process, every request gets the right tokens or an explicit failure, and nothing is left.

use std::time::Duration;

use kvferry_sim::{Cluster, Faults, Options, Patience, Scenario};
use kvferry_tests::harness::Case;
use kvferry_tests::roles::Processes;

const REQUESTS: u32 = 15;

/// What came of some seeds.
#[derive(Debug, Default)]
struct Sums {
    right: u32,
    loaded: u64,
    restarts: u32,
}

fn every_rule_holds_between_processes(faults: Faults) {
    let seeds = std::env::var("KVFERRY_SIM_SEEDS").ok();
    let seeds: u64 = seeds.map_or(10, |text| text.parse().unwrap());
    let mut sums = Sums::default();
    for seed in 1..=seeds {
        let options = Options {
            requests: REQUESTS,
            seed,
            faults,
            ..Options::default()
        };
        let patience = Patience {
            idle_ticks: 500,
            time: Duration::from_secs(60),
        };
        let mut processes = Processes;
        let scenario = Scenario::random(&options);
        let mut cluster = Cluster::new(scenario, patience, &mut processes).unwrap();
        let played = cluster.run();
        assert!(played.is_ok(), "seed {seed}: {}", played.unwrap_err());
        let report = cluster.report();
        if faults == Faults::None {
            assert_eq!((report.finished, report.failed), (REQUESTS, 0), "{seed}");
        }
        sums.right += report.finished;
        sums.loaded += report.total().loaded_tokens;
        sums.restarts += report.restarts;
    }
    assert!(sums.right > 0 && sums.loaded > 0, "{sums:?}");
    // With the usual seeds, some engines were killed and started again.
    assert_eq!(sums.restarts > 0, faults == Faults::Harsh, "{sums:?}");
}

pub(crate) fn cases() -> Vec<Case> {
    [
        ("none", Faults::None),
        ("mixed", Faults::Mixed),
        ("harsh", Faults::Harsh),
    ]
    .map(|(name, faults)| {
        Case::new(
            format!("every_rule_holds_between_processes::{name}"),
            move || every_rule_holds_between_processes(faults),
        )
    })
    .into()
}

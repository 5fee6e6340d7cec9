//! C132: what a request costs does not depend on how many there were before.

use std::collections::BTreeMap;

use kvferry_tests::harness::{Case, until};
use kvferry_tests::roles::SideChild;

use super::prefill::{HERE, LANES, PROMPT, THERE, pair};

type Figures = BTreeMap<String, u64>;

/// What only grows.
const COSTS: [&str; 6] = [
    "allocations",
    "messages",
    "ucx_operations",
    "block_operations",
    "batches",
    "bytes",
];

/// What there is at a time, apart from memory.
const HOLDINGS: [&str; 6] = [
    "tombstones",
    "leases",
    "requests",
    "connections",
    "threads",
    "descriptors",
];

/// Allocations that come and go with time: a renewal, a ping, a queue that has grown.
const BY_CHANCE: u64 = 20;

/// Memory that a table may keep from the time when it was full: tombstones live for a lease's duration.
const KEPT_BYTES: u64 = 64 << 10;

struct Sides {
    producer: SideChild,
    consumer: SideChild,
}

impl Sides {
    fn figures(&mut self) -> [Figures; 2] {
        [self.producer.figures(), self.consumer.figures()]
    }

    /// One request, from its prefill to its blocks' return: what that cost on either side.
    fn request(&mut self, number: u32) -> [Figures; 2] {
        let name = format!("request-{number:05}");
        let byte = number as u8;
        let before = self.figures();
        let params = self.producer.prefill(&name, PROMPT, &THERE, byte);
        assert_eq!(self.consumer.admit(&name, PROMPT, &params, &HERE), PROMPT);
        assert_eq!(self.consumer.received(&name).failure, "", "{name}");
        self.consumer.finish(&name, false);
        assert_eq!(self.producer.step().sent, [name.as_str()]);
        let after = self.figures();
        assert_eq!(self.consumer.wrong(&HERE, byte), 0, "{name}");
        let mut costs = after;
        for (costs, before) in costs.iter_mut().zip(&before) {
            costs.retain(|name, _| COSTS.contains(&name.as_str()));
            for (name, cost) in costs {
                *cost -= before[name];
            }
        }
        costs
    }

    /// What these requests cost, each figure by itself, in the middle of them: what comes and goes with time is not in
    /// it, nor a message that is counted with the request before or after its own.
    fn typical(&mut self, numbers: std::ops::Range<u32>) -> [Figures; 2] {
        let mut seen: [BTreeMap<String, Vec<u64>>; 2] = Default::default();
        for number in numbers {
            for (seen, costs) in seen.iter_mut().zip(self.request(number)) {
                for (name, cost) in costs {
                    seen.entry(name).or_default().push(cost);
                }
            }
        }
        seen.map(|figures| {
            let middle = |mut costs: Vec<u64>| {
                costs.sort_unstable();
                costs[costs.len() / 2]
            };
            let figures = figures.into_iter();
            figures.map(|(name, costs)| (name, middle(costs))).collect()
        })
    }

    /// What is there when nothing is remembered for a time any more.
    fn at_rest(&mut self) -> [Figures; 2] {
        until("the end of the tombstones", || {
            let [producer, consumer] = self.figures();
            producer["tombstones"] + consumer["tombstones"] == 0
        });
        self.figures()
    }
}

/// C132: messages, operations and allocations of the tenth request and of the thousandth, and what is there
/// after either.
fn c132_the_thousandth_request_costs_what_the_tenth_did(lane: &'static str) {
    let (producer, consumer) = pair(lane, 2_000);
    let mut sides = Sides { producer, consumer };
    // Buffers and tables reach their sizes first.
    sides.typical(0..5);
    let tenth = sides.typical(5..15);
    let early = sides.at_rest();
    sides.typical(15..990);
    let thousandth = sides.typical(990..1_000);
    let late = sides.at_rest();
    for (side, n) in [("producer", 0), ("consumer", 1)] {
        let (tenth, thousandth) = (&tenth[n], &thousandth[n]);
        println!("{lane}, {side}: {tenth:?}, then {thousandth:?}");
        for name in COSTS {
            let chance = if name == "allocations" { BY_CHANCE } else { 0 };
            assert!(
                thousandth[name] <= tenth[name] + chance,
                "{side}: {} {name} at request 10, {} at request 1,000",
                tenth[name],
                thousandth[name]
            );
        }
        for name in HOLDINGS {
            assert_eq!(late[n][name], early[n][name], "{side}: {name}");
        }
        let (early, late) = (early[n]["live_bytes"], late[n]["live_bytes"]);
        println!("{lane}, {side}: {early} bytes, then {late}");
        assert!(
            late <= early + KEPT_BYTES,
            "{side}: {early} bytes, then {late}"
        );
    }
    // And it did something: two layers of ten blocks.
    assert_eq!(tenth[1]["bytes"], 20 * 512);
    sides.consumer.child.finish_well();
    sides.producer.child.finish_well();
}

pub(crate) fn cases() -> Vec<Case> {
    let case = |lane| {
        Case::new(
            format!("c132_the_thousandth_request_costs_what_the_tenth_did::{lane}"),
            move || c132_the_thousandth_request_costs_what_the_tenth_did(lane),
        )
    };
    LANES.map(case).into()
}

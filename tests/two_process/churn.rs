//! Things done very often: what both processes hold afterwards is what they held before.

use std::time::{Duration, Instant};

use kvferry_tests::harness::{Case, Child};
use kvferry_tests::roles::{Churn, Layout, Resources, Stage, Started, Work};

use super::support::LANES;

/// The first stages warm up: allocators, queues and UCX's own pools reach their sizes. With 60 stages a process gets no
/// larger than with 10; after one stage it can lack 900 KiB of that, after three it lacked at most 420 in 16 runs.
const WARM_UP: u64 = 3;
const STAGES: u64 = 12;

/// What may come on top from the end of the warm-up to the end of the last stage. Memory: pages
/// of code that were not run before, and what the allocator keeps. Mappings: its arenas' pieces.
const ALLOWED: Resources = Resources {
    rss_kib: 512,
    fds: 0,
    maps: 4,
};

/// The allocator keeps more where whole threads with their arenas come and go. An engine that
/// stayed would be a megabyte, and six descriptors.
const ALLOWED_FOR_LIVES: Resources = Resources {
    rss_kib: 8 << 10,
    ..ALLOWED
};

const LAYOUT: Layout = Layout {
    layers: 2,
    blocks: 256,
    block_bytes: 512,
};

/// What a process holds, once it holds no more than `limit`; given up after a while. What a stage
/// left behind takes a moment to go: a closed connection stays until its goodbye has left, the
/// thread of an engine ends after it has said so.
fn settled(child: &mut Child, limit: Option<&Resources>) -> Resources {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let now: Resources = child.ask("resources");
        if limit.is_none_or(|limit| now.is_within(limit)) || Instant::now() > deadline {
            return now;
        }
        assert!(child.is_quiet_for(Duration::from_millis(100)));
    }
}

/// C69: `STAGES` times `per_stage` of `work`. What both processes hold is flat from the warm-up's end to the last
/// stage's.
fn flat(work: Work, per_stage: u64, lane: &'static str, transports: Option<&'static str>) {
    let environment = [("UCX_TLS", transports)];
    let mut producer = Child::start("producer", &LAYOUT, &environment);
    let started: Started = producer.hear();
    let churn = Churn {
        from: started.description,
        lane: lane.into(),
        layout: LAYOUT,
        work,
        per_stage,
    };
    let mut consumer = Child::start("churn", &churn, &environment);
    let stage = |producer: &mut Child, consumer: &mut Child| {
        let stage: Stage = consumer.ask("go");
        assert_eq!((stage.done, stage.lane.as_str()), (per_stage, lane));
        let reads = match work {
            Work::Registrations => per_stage.div_ceil(8),
            Work::Transfers | Work::Connections | Work::Lives => per_stage,
        };
        assert_eq!(stage.read + stage.cancelled, reads, "each read has ended");
        if matches!(work, Work::Registrations) {
            let _: Resources = producer.ask(&format!("register {per_stage}"));
        }
    };
    for _ in 0..WARM_UP {
        stage(&mut producer, &mut consumer);
    }
    let before = [&mut producer, &mut consumer].map(|child| settled(child, None));
    for _ in WARM_UP..STAGES {
        stage(&mut producer, &mut consumer);
    }
    let allowed = match work {
        Work::Lives => ALLOWED_FOR_LIVES,
        Work::Transfers | Work::Registrations | Work::Connections => ALLOWED,
    };
    for (child, before) in [&mut producer, &mut consumer].into_iter().zip(before) {
        let limit = before.and(&allowed);
        let after = settled(child, Some(&limit));
        println!("{before:?} then {after:?}");
        assert!(after.is_within(&limit), "{before:?} grew to {after:?}");
    }
    consumer.finish_well();
    producer.finish_well();
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for lane in LANES {
        for (name, work, per_stage) in [
            ("c69_a_hundred_thousand_transfers", Work::Transfers, 10_000),
            ("c69_ten_thousand_registrations", Work::Registrations, 1000),
            ("c69_a_thousand_connections", Work::Connections, 100),
            ("c69_two_hundred_lives_of_an_engine", Work::Lives, 20),
        ] {
            cases.push(Case::new(format!("{name}::{lane}"), move || {
                flat(work, per_stage, lane, None);
            }));
        }
    }
    cases
}

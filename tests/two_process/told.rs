//! What the log says, and how often. C118: which lane moved the bytes, and what carries it, is in a log line and
//! in a metric. C119: a peer cannot fill the log.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use kvferry_connector::metrics::ENGINE;
use kvferry_tests::harness::{Case, until};
use kvferry_tests::roles::{EngineChild, EngineSpec, Layout, Packed, Settings};

use super::support::{LANES, SLACK, consumer, publish, publisher_for};

const BLOCKS: u32 = 8;
const BYTES: u64 = 4096;

/// Where the log goes.
#[derive(Clone, Default)]
struct Kept(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Kept {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Kept {
    fn lines(&self, text: &str) -> Vec<String> {
        let log = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        let lines = log.lines().filter(|line| line.contains(text));
        lines.map(str::to_owned).collect()
    }
}

/// Keeps this process's log.
fn keep() -> Kept {
    let kept = Kept::default();
    let writer = kept.clone();
    tracing_subscriber::fmt()
        .with_ansi(false)
        .with_env_filter("info,kvferry_engine=debug")
        .with_writer(move || writer.clone())
        .init();
    kept
}

/// C119: a peer that comes and goes is told of once in ten seconds, with how many lines were held back.
fn c119_a_peer_that_comes_and_goes_does_not_fill_the_log() {
    const ROUNDS: u64 = 10;
    let kept = keep();
    let here = consumer(Settings::default(), BLOCKS, BYTES);
    let begun = Instant::now();
    let layout = Layout {
        layers: 1,
        blocks: 4,
        block_bytes: 4096,
    };
    for round in 1..=ROUNDS {
        let mut there = EngineChild::start(&EngineSpec::consumer(layout), &[]);
        let to = Packed::of(&here.engine);
        assert_eq!(there.connect(&to, "served").error, "");
        there.child.finish_well();
        until("its end", || here.engine.counters().peers_lost == round);
    }
    let periods = 1 + (begun.elapsed().as_secs() / 10) as usize;
    for text in ["greeted by a peer", "peer lost"] {
        let said = kept.lines(text);
        assert!((1..=periods).contains(&said.len()), "{said:?}");
        assert!(said[0].contains("held_back=0"), "{said:?}");
    }
    here.engine.shutdown(SLACK).unwrap();
}

fn c118_the_lane_that_moved_the_bytes_is_told(lane: &'static str) {
    let kept = keep();
    let (mut producer, published) = publish(&publisher_for(lane, "producer", BLOCKS, BYTES), &[]);
    let consumer = consumer(Settings::default(), BLOCKS, BYTES);
    let peer = consumer.connect(published.description.unpack(), lane);
    let said = kept.lines("connected peer=producer");
    assert_eq!(said.len(), 1, "{said:?}");
    // At the level that is on by default.
    assert!(said[0].contains(" INFO "), "{}", said[0]);
    assert!(said[0].contains(&format!(" lane={lane} ")), "{}", said[0]);
    let transports = peer.transports();
    assert!(!transports.is_empty());
    assert!(
        said[0].ends_with(&format!("transports={transports}")),
        "{}",
        said[0]
    );
    for table in [0, 1] {
        consumer.reads(&peer, table);
    }
    let bytes = 2 * u64::from(BLOCKS) * BYTES;
    // Of the figures that are published, this lane's has all bytes and no other has any.
    let counters = consumer.engine.counters();
    let lanes: Vec<(&str, u64)> = ENGINE
        .iter()
        .filter(|metric| metric.name == "kvferry_lane_bytes_total")
        .map(|metric| (metric.label.unwrap().1, (metric.read)(&counters)))
        .collect();
    assert_eq!(lanes.len(), LANES.len());
    for (name, moved) in lanes {
        assert_eq!(moved, if name == lane { bytes } else { 0 }, "{name}");
    }
    // And who asks for more is told it of every read.
    let said = kept.lines("transfer succeeded");
    assert_eq!(said.len(), 2, "{said:?}");
    for line in said {
        assert!(line.contains(&format!("lane={lane}")), "{line}");
        assert!(line.contains(&format!("bytes={}", bytes / 2)), "{line}");
    }
    consumer.engine.shutdown(SLACK).unwrap();
    producer.finish_well();
}

pub(crate) fn cases() -> Vec<Case> {
    let case = |lane| {
        Case::new(
            format!("c118_the_lane_that_moved_the_bytes_is_told::{lane}"),
            move || c118_the_lane_that_moved_the_bytes_is_told(lane),
        )
    };
    let mut cases: Vec<Case> = LANES.map(case).into();
    cases.push(Case::new(
        "c119_a_peer_that_comes_and_goes_does_not_fill_the_log",
        c119_a_peer_that_comes_and_goes_does_not_fill_the_log,
    ));
    cases
}

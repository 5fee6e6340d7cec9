//! C118: which lane moved the bytes, and what carries it, is in a log line and in a metric.

use std::sync::{Arc, Mutex};

use kvferry_connector::metrics::ENGINE;
use kvferry_tests::harness::Case;

use super::support::{LANES, SLACK, consumer, publish, publisher_for};
use kvferry_tests::roles::Settings;

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

fn c118_the_lane_that_moved_the_bytes_is_told(lane: &'static str) {
    let kept = Kept::default();
    let writer = kept.clone();
    tracing_subscriber::fmt()
        .with_ansi(false)
        .with_env_filter("info,kvferry_engine=debug")
        .with_writer(move || writer.clone())
        .init();
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
    LANES.map(case).into()
}

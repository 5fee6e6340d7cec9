//! How a transfer ends, per lane, and that its memory is then somebody else's: cancelled or timed out
//! in the middle, with the peer running, stopped and killed. The memory gets a new owner, the peer goes
//! on, and not a byte of the new owner's is touched.

use std::time::Duration;

use kvferry_tests::harness::{Case, PATIENCE};
use kvferry_tests::roles::{Ended, EngineChild, EngineSpec, Layout, Memory};

/// 96 MiB: long enough to be in the middle of, on any lane.
const LARGE: Layout = Layout {
    layers: 3,
    blocks: 8_192,
    block_bytes: 4096,
};
const SENTINEL: u8 = 0x5A;
/// More tries than any machine needs to be in the middle of a transfer once.
const TRIES: usize = 50;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Peer {
    Running,
    Stopped,
    Killed,
}

struct Pair {
    producer: EngineChild,
    consumer: EngineChild,
    pairs: Vec<(u32, u32)>,
}

fn pair(lane: &str) -> Pair {
    let environment = [("UCX_TLS", Some("tcp"))];
    let mut theirs = EngineSpec::producer(LARGE);
    if lane == "attached" {
        theirs.memory = Memory::Foreign;
    }
    let mut producer = EngineChild::start(&theirs, &environment);
    let mut consumer = EngineChild::start(&EngineSpec::consumer(LARGE), &environment);
    let description = producer.describe();
    let connected = consumer.connect(&description, lane);
    assert_eq!(
        (connected.error.as_str(), connected.lane.as_str()),
        ("", lane)
    );
    // No two neighbours: one piece each.
    let count = LARGE.blocks;
    let pairs = (0..count).map(|n| (n, count - 1 - n)).collect();
    Pair {
        producer,
        consumer,
        pairs,
    }
}

impl Pair {
    /// The transfer has ended. Its memory gets a new owner and the peer goes on, or another one comes;
    /// reads work, and the sentinel is where it was.
    fn hands_its_memory_back(mut self, lane: &str, peer: Peer) {
        self.consumer.fill(SENTINEL);
        let counters = self.consumer.counters();
        assert_eq!((counters["quarantined"], counters["kept"]), (0, 0));
        match peer {
            Peer::Running => {}
            Peer::Stopped => self.producer.child.go_on(),
            Peer::Killed => {
                let mut spec = EngineSpec::producer(LARGE);
                if lane == "attached" {
                    spec.memory = Memory::Foreign;
                }
                self.producer = EngineChild::start(&spec, &[("UCX_TLS", Some("tcp"))]);
            }
        }
        // Whatever the old transfer had under way comes before what a new one brings.
        let description = self.producer.describe();
        let connected = self.consumer.connect(&description, lane);
        assert_eq!(connected.error, "");
        self.consumer.read(&[(0, 7)], PATIENCE);
        assert_eq!(self.consumer.wait().error, "");
        // Three layers, one block each.
        let block = 3 * LARGE.block_bytes;
        let foreign = self.consumer.check(SENTINEL);
        assert!(
            foreign <= block,
            "{} bytes were written later",
            foreign - block
        );
        assert!(foreign > 0);
        self.consumer.child.finish_well();
        self.producer.child.finish_well();
    }
}

/// Cancelled in the middle.
fn cancelled(lane: &'static str, peer: Peer) {
    let mut it = pair(lane);
    for _ in 0..TRIES {
        it.consumer.read(&it.pairs, PATIENCE);
        if peer == Peer::Running {
            let moved = it.consumer.cancel_midway();
            let ended = it.consumer.wait();
            if moved.is_some() && ended.kind == "cancelled" {
                it.hands_its_memory_back(lane, peer);
                return;
            }
            assert_eq!(ended.error, "", "it had ended before");
            continue;
        }
        // Stopped or killed in the middle, as far as anybody can tell; then cancelled, unless the lane
        // needs no peer and went on to its end.
        match peer {
            Peer::Stopped => it.producer.child.stop(),
            _ => it.producer.child.kill(),
        }
        let _ = it.consumer.cancel_now();
        let ended = it.consumer.wait();
        let fine = match ended.kind.as_str() {
            "cancelled" | "" => true,
            "lost" | "operation" => peer == Peer::Killed,
            _ => false,
        };
        assert!(fine, "{ended:?}");
        it.hands_its_memory_back(lane, peer);
        return;
    }
    panic!("never in the middle");
}

/// Timed out in the middle.
fn timed_out(lane: &'static str, peer: Peer) {
    let mut it = pair(lane);
    match peer {
        Peer::Running => {}
        Peer::Stopped => it.producer.child.stop(),
        Peer::Killed => it.producer.child.kill(),
    }
    for n in 0..TRIES {
        // Short enough to be over before the bytes are; of a stopped peer it is, on lanes that need it.
        let timeout = Duration::from_millis(1 + n as u64 % 5);
        let refused = it.consumer.read_or_refused(&it.pairs, timeout);
        if let Some(reason) = refused {
            assert!(
                peer == Peer::Killed && reason.contains("the peer is gone"),
                "{reason}"
            );
            break;
        }
        let ended = it.consumer.wait();
        let Ended { kind, .. } = &ended;
        match (kind.as_str(), peer) {
            ("stalled", _) => break,
            ("lost" | "operation", Peer::Killed) => break,
            // Faster than its deadline: once more.
            ("", _) => {}
            _ => panic!("{ended:?}"),
        }
        assert!(
            n + 1 < TRIES || peer != Peer::Running,
            "never in the middle"
        );
    }
    it.hands_its_memory_back(lane, peer);
}

pub(crate) fn cases() -> Vec<Case> {
    // An emulated read's producer aborts on UCX 1.13 when its consumer's endpoint is closed.
    let emulated = std::env::var("KVFERRY_EXPECT_UCX").is_ok_and(|version| version != "1.13");
    let mut cases = Vec::new();
    for lane in ["mapped", "attached", "served", "native"] {
        for peer in [Peer::Running, Peer::Stopped, Peer::Killed] {
            let state = format!("{peer:?}").to_lowercase();
            let mut both = [
                Case::new(
                    format!("c50_ended_by_cancel::{lane}::peer_{state}"),
                    move || cancelled(lane, peer),
                ),
                Case::new(
                    format!("c50_ended_by_deadline::{lane}::peer_{state}"),
                    move || timed_out(lane, peer),
                ),
            ];
            if lane == "native" && !emulated {
                for case in &mut both {
                    case.skip = Some(
                        "UCX 1.13 aborts the producer of an emulated read whose consumer leaves; \
                         real ones are tested over RDMA"
                            .into(),
                    );
                }
            }
            cases.extend(both);
        }
    }
    cases
}

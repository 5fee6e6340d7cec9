//! Another life of an engine in the same process: the same number, the same memory, other content.

use kvferry_engine::LaneChoice;
use kvferry_tests::harness::{Case, Child, until};
use kvferry_tests::roles::{EngineSettings, NEW_OWNERS, Published, Reader, Settings};

use super::support::{
    Consumer, SLACK, begin, consumer, finish, publish, publisher, publisher_for, reads_all, start,
};
use super::transports::{Namespaces, ip, no_namespaces};

const BLOCKS: u32 = 64;
const BYTES: u64 = 16 << 10;

/// Whether all bytes of a table are those of the next life.
fn is_new(consumer: &Consumer, table: usize) -> bool {
    let memory = &consumer.memory[table];
    let mut bytes = vec![0; memory.bytes() as usize];
    memory.read_at(0, &mut bytes).unwrap();
    bytes.iter().all(|&byte| byte == NEW_OWNERS)
}

/// C83: an engine is shut down and started again in its process, over the same memory with another
/// content. What is held of the life before is of no use: no read by it succeeds, and a read that is
/// refused leaves the blocks as they were.
fn c83_another_life_in_the_same_process(lane: &'static str) {
    let publisher = publisher_for(lane, "producer", BLOCKS, BYTES);
    let (mut child, mut published) = publish(&publisher, &[]);
    let consumer = consumer(Settings::default(), BLOCKS, BYTES);
    let choice: LaneChoice = lane.parse().unwrap();
    let mut peer = consumer.connect(published.description.unpack(), lane);
    for table in [0, 1] {
        consumer.reads(&peer, table);
    }
    for life in 1..=10 {
        let next: Published = child.ask("restart");
        if lane != "attached" {
            // A mapping says nothing of who writes there: the goodbye does.
            until("the goodbye", || peer.gone().is_some());
        }
        for table in [0, 1] {
            consumer.poison(table);
            match consumer.start(&peer, table, SLACK) {
                // What a call had moved before it saw whose that is stays in the blocks.
                Ok(transfer) => assert!(transfer.wait(SLACK * 2).unwrap().is_err()),
                Err(_) => assert_eq!(consumer.wrong(table, false), 0),
            }
        }
        let old = published.description.unpack();
        assert!(consumer.engine.connect(old, choice).is_err());
        published = next;
        peer = consumer.connect(published.description.unpack(), lane);
        for table in [0, 1] {
            consumer.poison(table);
            let transfer = consumer.start(&peer, table, SLACK).unwrap();
            transfer.wait(SLACK * 2).unwrap().unwrap();
            assert!(is_new(&consumer, table));
        }
        let counters = consumer.engine.counters();
        assert_eq!(
            (counters.peers_connected, counters.peers_lost),
            (life + 1, life)
        );
    }
    consumer.is_quiet();
    child.finish_well();
}

/// C83: the same where the consumer cannot hear of it. Nothing comes back from the producer over the
/// network any more; its process is there, and so are its memory and another life. An attached read
/// finds other bytes where the incarnation was.
fn c83_a_life_that_ended_unheard_is_known_by_its_word() {
    let namespaces = Namespaces::new("word");
    let share = std::env::temp_dir().join(format!("kvf-word-{}", std::process::id()));
    std::fs::create_dir_all(&share).unwrap();
    let settings = |device: &str| {
        EngineSettings {
            allow_emulation: false,
            net_devices: Some(device.to_owned()),
            ..EngineSettings::default()
        }
        .to_json()
    };
    let (ours, theirs) = (settings("a0"), settings("b0"));
    let environment = |settings| {
        [
            ("UCX_TLS", Some("tcp")),
            (EngineSettings::VARIABLE, Some(settings)),
            // Nor does the kernel tell.
            ("UCX_TCP_KEEPIDLE", Some("1000s")),
        ]
    };
    let [a, b] = &namespaces.names;
    let mut publisher = publisher("producer", BLOCKS, BYTES);
    publisher.share = Some(share.clone());
    let around = environment(theirs.as_str());
    let mut producer = Child::start_in(b, "publisher", &publisher, &around);
    let published: Published = producer.hear();
    let reader = Reader {
        name: "consumer".into(),
        blocks: BLOCKS,
        block_bytes: BYTES,
        settings: Settings {
            suspect: Some(3_600_000),
            dead: Some(3_600_000),
            ..Settings::default()
        },
    };
    let mut consumer = Child::start_in(a, "reader", &reader, &environment(ours.as_str()));
    let _: serde_json::Value = consumer.hear();
    reads_all(&mut consumer, "p", &published, "attached");
    // To an address of nobody's.
    ip(&format!(
        "-n {b} neigh replace 10.71.0.1 lladdr 02:00:00:00:00:01 dev b0 nud permanent"
    ));
    let _: Published = producer.ask("restart");
    begin(&mut consumer, "p", 0);
    let done = finish(&mut consumer, "p");
    assert!(done.error.contains("is not incarnation"), "{done:?}");
    assert_eq!((done.wrong_bytes, done.open), (0, 0));
    let refused = start(&mut consumer, "p", 1);
    assert!(refused.error.contains("gone"), "{refused:?}");
    consumer.finish_well();
    producer.finish_well();
    std::fs::remove_dir_all(share).unwrap();
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for lane in ["served", "mapped", "attached"] {
        cases.push(Case::new(
            format!("c83_another_life_in_the_same_process::{lane}"),
            move || c83_another_life_in_the_same_process(lane),
        ));
    }
    let mut word = Case::new(
        "c83_a_life_that_ended_unheard_is_known_by_its_word",
        c83_a_life_that_ended_unheard_is_known_by_its_word,
    );
    word.skip = no_namespaces();
    cases.push(word);
    cases
}

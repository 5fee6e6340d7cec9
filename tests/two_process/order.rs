//! What comes before what: the data before the message that follows it, every sibling's end before
//! the failure is told.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use kvferry_engine::{
    Engine, ErrorClass, Fault, FaultControl, FaultFabric, FaultRates, Replies, Sender, Service,
    UcxFabric, UcxOptions,
};
use kvferry_tests::harness::{Case, PATIENCE, until};
use kvferry_tests::pattern::wrong_bytes_as;
use kvferry_tests::roles::{OVERWRITE_CHANNEL, config};

use super::support::{LANES, publish, publisher_for, with_blocks};

/// Hands what it hears to the test.
struct Forward(mpsc::Sender<Vec<u8>>);

impl Service for Forward {
    fn on_message(&mut self, _: Sender, payload: &[u8], _: &mut Replies) {
        let _ = self.0.send(payload.to_vec());
    }

    fn on_tick(&mut self, _: Instant, _: &mut Replies) -> Option<Instant> {
        None
    }
}

/// C35: a read, and right behind its end a message, on whose receipt the producer overwrites the
/// blocks with the next round's pattern. What was read is looked at only then: it is this round's,
/// every byte.
fn c35_the_release_never_overtakes_the_data(lane: &'static str) {
    const ROUNDS: u32 = 10_000;
    const BLOCKS: u32 = 4;
    // A read takes several segments, so that there is something to be overtaken.
    let small = [("UCX_TCP_TX_SEG_SIZE", Some("8K"))];
    let (mut producer, published) = publish(&publisher_for(lane, "producer", BLOCKS, 8192), &small);
    let (heard, echoes) = mpsc::channel();
    let engine = Engine::builder(config("consumer"))
        .service(OVERWRITE_CHANNEL, Box::new(Forward(heard)))
        .start()
        .unwrap();
    let consumer = with_blocks(engine, BLOCKS, 8192);
    let peer = consumer.connect(published.description.unpack(), lane);
    // The pattern of table 0 is there from the start.
    for round in 0..ROUNDS {
        let transfer = consumer.start(&peer, 0, PATIENCE).unwrap();
        transfer.wait(PATIENCE).unwrap().unwrap();
        let next = u64::from(round + 1).to_le_bytes();
        peer.send(OVERWRITE_CHANNEL, next.to_vec()).unwrap();
        // Overwritten for sure before we look.
        assert_eq!(echoes.recv_timeout(PATIENCE).unwrap(), next);
        for block in 0..BLOCKS {
            let source = Some(BLOCKS - 1 - block);
            let (table, memory) = (&consumer.tables[0], &consumer.memory[0]);
            let wrong = wrong_bytes_as(table, memory, block, source, round);
            assert_eq!(wrong, 0, "round {round}, block {block}");
        }
    }
    consumer.is_quiet();
    producer.finish_well();
}

/// C25: of the many operations of a read one fails, at once, while others end late. Whoever waits is
/// told when all have ended: nothing is written to memory that was handed back.
fn c25_a_failure_is_told_when_all_siblings_have_ended(lane: &'static str) {
    const BLOCKS: u32 = 256;
    let (bytes, failed_of_1000, (fails, delayed)) = match lane {
        "native" => (1024, 20, (Fault::ReadFailed, Fault::ReadDelayed)),
        // 32 MiB in eight batches.
        _ => (128 << 10, 200, (Fault::CopyFailed, Fault::CopyDelayed)),
    };
    let publisher = publisher_for(lane, "producer", BLOCKS, bytes);
    let (mut producer, published) = publish(&publisher, &[]);
    let control = FaultControl::new(25, FaultRates::none()).unwrap();
    let engine = {
        let control = control.clone();
        let mut config = config("consumer");
        // Turns are slow on a busy machine: reads that are late are not stuck.
        config.escalation_step = PATIENCE;
        let options = UcxOptions::from(&config);
        Engine::builder(config)
            .start_on(move || FaultFabric::new(UcxFabric::new(&options)?, &control))
            .unwrap()
    };
    let consumer = with_blocks(engine, BLOCKS, bytes);
    let peer = consumer.connect(published.description.unpack(), lane);
    // A delayed read starts, or its end is told, up to this many turns later.
    let mut rates = FaultRates::none()
        .with(fails, failed_of_1000)
        .with(delayed, 900);
    rates.max_delay = 20_000;
    control.set_rates(rates);
    let (mut failed, mut early) = (0, 0);
    for _ in 0..20 {
        consumer.poison(0);
        let transfer = consumer.start(&peer, 0, PATIENCE * 2).unwrap();
        until("the outcome", || transfer.poll_outcome().is_some());
        early += u32::from(!transfer.is_quiesced());
        // By now the failure is known; whoever waits is not told before the rest is over.
        match transfer.wait(PATIENCE).unwrap() {
            Ok(_) => assert_eq!(consumer.wrong(0, true), 0),
            Err(error) => {
                assert_eq!(error.class(), ErrorClass::Peer, "{error}");
                assert!(transfer.is_quiesced());
                assert_eq!(consumer.regions[0].operations(), 0);
                assert_eq!(consumer.engine.counters().quarantined_bytes, 0);
                consumer.poison(0);
                failed += 1;
                // Longer than any delay.
                std::thread::sleep(Duration::from_millis(100));
                assert_eq!(consumer.wrong(0, false), 0, "written after the end");
            }
        }
    }
    assert!(
        failed > 5 && early > 5,
        "{failed} failed, {early} were open"
    );
    // One operation that failed is the transfer's, not the peer's.
    control.set_rates(FaultRates::none());
    assert!(peer.gone().is_none());
    consumer.reads(&peer, 1);
    consumer.is_quiet();
    producer.finish_well();
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    // Served reads are not operations of ours.
    for lane in ["native", "mapped", "attached"] {
        cases.push(Case::new(
            format!("c25_a_failure_is_told_when_all_siblings_have_ended::{lane}"),
            move || c25_a_failure_is_told_when_all_siblings_have_ended(lane),
        ));
    }
    for lane in LANES {
        cases.push(Case::new(
            format!("c35_the_release_never_overtakes_the_data::{lane}"),
            move || c35_the_release_never_overtakes_the_data(lane),
        ));
    }
    cases
}

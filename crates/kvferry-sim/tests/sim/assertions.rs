//! Every assertion of vLLM, and every rule of the contract, fires for a connector that breaks it.
//! Those that the contract's types cannot break (an async offer of 0 tokens, no plan for a step)
//! are in `scheduler/admit.rs`, or have no form.

use kvferry_connector::contract::Matched;
use kvferry_sim::{EngineConfig, Kind, SchedulerConfig, SimEngine, Violation};

use crate::puppet::*;

fn engine() -> (Puppet, SimEngine) {
    Puppet::engine(EngineConfig::default(), &model())
}

/// An engine with a request of 10 tokens that waits for a load of 8 of them.
fn parked() -> (Puppet, SimEngine) {
    let (puppet, mut engine) = engine();
    puppet.offer_async(8);
    engine.add(request("a", 10, 2)).unwrap();
    engine.step().unwrap();
    assert_eq!(engine.scheduler().parked().count(), 1);
    (puppet, engine)
}

macro_rules! assert_broken {
    ($engine:expr, $pattern:pat) => {
        let violation = until_broken(&mut $engine);
        assert!(matches!(violation, $pattern), "{violation}");
    };
}

#[test]
fn vllm_1_completions_for_requests_that_are_not_there() {
    for received in [true, false] {
        let (puppet, mut engine) = engine();
        engine.add(request("a", 5, 1)).unwrap();
        until_output(&mut engine, "a");
        match received {
            true => puppet.received(&id("a"), None),
            false => puppet.sent(&id("a")),
        }
        assert_broken!(engine, Violation::UnknownCompletion { .. });
    }
}

#[test]
fn vllm_1_both_kinds_for_one_finish() {
    let (puppet, mut engine) = engine();
    puppet.hold(true);
    engine.add(request("a", 5, 1)).unwrap();
    until_output(&mut engine, "a");
    puppet.received(&id("a"), None);
    assert_broken!(
        engine,
        Violation::WrongCompletion {
            kind: Kind::Received,
            ..
        }
    );
    // And the other way round: it was aborted during its load, and is reported as sent.
    let (puppet, mut engine) = parked();
    engine.abort(&id("a")).unwrap();
    puppet.sent(&id("a"));
    assert_broken!(
        engine,
        Violation::WrongCompletion {
            kind: Kind::Sent,
            ..
        }
    );
}

#[test]
fn c102_vllm_1_a_duplicate_completion() {
    let (puppet, mut engine) = engine();
    puppet.hold(true);
    engine.add(request("a", 5, 1)).unwrap();
    until_output(&mut engine, "a");
    puppet.sent(&id("a"));
    engine.step().unwrap();
    puppet.sent(&id("a"));
    assert_broken!(
        engine,
        Violation::UnknownCompletion {
            kind: Kind::Sent,
            ..
        }
    );
    // A rank that speaks for the other one.
    let config = EngineConfig {
        ranks: 2,
        ..EngineConfig::default()
    };
    let (puppet, mut engine) = Puppet::engine(config, &model());
    puppet.offer_async(8);
    engine.add(request("a", 10, 2)).unwrap();
    engine.step().unwrap();
    puppet.rank_received(1, &id("a"), None);
    engine.step().unwrap();
    puppet.rank_received(1, &id("a"), None);
    assert_broken!(engine, Violation::ReportedTwice { rank: 1, .. });
}

#[test]
fn vllm_2_received_without_waiting() {
    // A request that was never parked, and one whose load was over already.
    let (puppet, mut engine) = engine();
    engine.add(request("a", 5, 9)).unwrap();
    engine.step().unwrap();
    puppet.received(&id("a"), None);
    assert_broken!(engine, Violation::ReceivedNotParked { .. });
}

#[test]
fn vllm_2_sent_before_the_end() {
    let (puppet, mut engine) = parked();
    puppet.sent(&id("a"));
    assert_broken!(engine, Violation::SentUnfinished { .. });
}

#[test]
fn vllm_4_offers_past_the_prompt_and_of_the_whole_prompt_as_a_sync_load() {
    // The constructors clamp to the prompt that they are told.
    for matched in [
        Matched::load_async(11, 0, 11),
        Matched::load_sync(11, 0, 11),
    ] {
        let (puppet, mut engine) = engine();
        puppet.offer(move |_, _| matched);
        engine.add(request("a", 10, 2)).unwrap();
        assert_broken!(engine, Violation::OfferTooLong { prompt: 10, .. });
    }
}

#[test]
fn c4_an_offer_after_the_load_was_consumed() {
    // Only a prompt of one token is looked up after its load: nothing of it counts as computed.
    for matched in [
        Matched::load_async(1, 0, 1),
        Matched::Later(std::time::Duration::ZERO),
    ] {
        let (puppet, mut engine) = engine();
        puppet.offer_async(1);
        engine.add(request("a", 1, 2)).unwrap();
        engine.step().unwrap();
        puppet.bring(&model(), &tokens(1), 0..1);
        puppet.offer(move |_, _| matched);
        puppet.received(&id("a"), None);
        assert_broken!(engine, Violation::OfferedAgain { .. });
    }
}

#[test]
fn c91_an_offer_after_two_failed_loads() {
    let scheduler = SchedulerConfig {
        failure_policy: kvferry_sim::FailurePolicy::Recompute,
        ..SchedulerConfig::default()
    };
    let config = EngineConfig {
        scheduler,
        ..EngineConfig::default()
    };
    let (puppet, mut engine) = Puppet::engine(config, &model());
    puppet.offer_async(8);
    engine.add(request("a", 10, 2)).unwrap();
    for _ in 0..2 {
        engine.step().unwrap();
        assert_eq!(engine.scheduler().parked().count(), 1);
        puppet.received(&id("a"), Some(&[]));
        engine.step().unwrap();
    }
    assert_broken!(engine, Violation::TooManyTries { failed: 2, .. });
}

#[test]
fn blocks_held_during_a_load_or_without_blocks() {
    let (puppet, mut engine) = parked();
    puppet.hold(true);
    let breach = engine.abort(&id("a")).unwrap_err();
    assert!(
        matches!(breach.violation, Violation::HoldDuringLoad { .. }),
        "{breach}"
    );
    let breach = engine.reject(request("b", 10, 2)).unwrap_err();
    assert!(
        matches!(breach.violation, Violation::HoldWithoutBlocks { .. }),
        "{breach}"
    );
}

#[test]
fn a_failed_block_that_was_not_to_be_loaded() {
    let (puppet, mut engine) = parked();
    puppet.received(&id("a"), Some(&[(0, 60)]));
    assert_broken!(
        engine,
        Violation::FailedBlockNotLoaded {
            group: 0,
            block: 60,
            ..
        }
    );
}

#[test]
fn a_load_that_brings_the_wrong_bytes() {
    let (puppet, mut engine) = parked();
    // Of the load's two blocks the last token is missing.
    puppet.bring(&model(), &tokens(10), 0..7);
    puppet.received(&id("a"), None);
    assert_broken!(engine, Violation::WrongBytes { token: 3, .. });
}

#[test]
fn a_sync_load_that_is_not_there_before_the_forward() {
    let (puppet, mut engine) = engine();
    puppet.offer(|request, computed| Matched::load_sync(request.prompt, computed, 8));
    engine.add(request("a", 10, 2)).unwrap();
    assert_broken!(
        engine,
        Violation::WrongBytes {
            what: "a block of a sync load",
            ..
        }
    );
}

#[test]
fn c23_a_write_after_the_load_was_reported() {
    let (puppet, mut engine) = parked();
    engine.abort(&id("a")).unwrap();
    puppet.received(&id("a"), None);
    engine.step().unwrap();
    assert_eq!(engine.scheduler().held(), 0);
    engine.check_end().unwrap();
    // The blocks are free; now the load's late bytes come.
    puppet.bring(&model(), &tokens(10), 4..5);
    let breach = engine.check_end().unwrap_err();
    assert!(
        matches!(breach.violation, Violation::LateWrite { .. }),
        "{breach}"
    );
    puppet.offer(|_, _| Matched::None);
    engine.add(request("b", 254, 1)).unwrap();
    assert_broken!(engine, Violation::LateWrite { .. });
}

#[test]
fn c7_a_write_to_blocks_that_are_held_for_others() {
    let (puppet, mut engine) = engine();
    puppet.hold(true);
    engine.add(request("a", 10, 1)).unwrap();
    until_output(&mut engine, "a");
    puppet.bring(&model(), &tokens(11)[1..], 3..4);
    puppet.sent(&id("a"));
    assert_broken!(
        engine,
        Violation::WrongBytes {
            what: "a held block",
            ..
        }
    );
}

#[test]
fn c91_a_poisoned_prefix_cache() {
    let (puppet, mut engine) = engine();
    engine.add(request("a", 10, 1)).unwrap();
    until_output(&mut engine, "a");
    puppet.bring(&model(), &tokens(11)[1..], 3..4);
    engine.add(request("b", 10, 1)).unwrap();
    assert_broken!(
        engine,
        Violation::WrongBytes {
            what: "a block from the prefix cache",
            ..
        }
    );
}

#[test]
fn something_is_left_at_the_end() {
    let (puppet, mut engine) = engine();
    puppet.hold(true);
    engine.add(request("a", 10, 1)).unwrap();
    until_output(&mut engine, "a");
    assert!(!engine.is_idle());
    let left = engine.check_end().unwrap_err().to_string();
    assert!(
        left.contains("1 ended requests hold blocks, 61 of 64 blocks"),
        "{left}"
    );
    puppet.sent(&id("a"));
    engine.step().unwrap();
    engine.check_end().unwrap();
    puppet.0.lock().unwrap().pending = true;
    assert!(!engine.is_idle() && engine.check_end().is_err());
}

//! Loads, as the scheduler sees them.

use kvferry_connector::contract::{Finish, Matched};
use kvferry_sim::{EngineConfig, FailurePolicy, Model, SchedulerConfig, SimEngine, State};

use crate::puppet::*;

fn with(scheduler: SchedulerConfig) -> (Puppet, SimEngine) {
    Puppet::engine(
        EngineConfig {
            scheduler,
            ..EngineConfig::default()
        },
        &model(),
    )
}

fn recompute() -> SchedulerConfig {
    SchedulerConfig {
        failure_policy: FailurePolicy::Recompute,
        ..SchedulerConfig::default()
    }
}

/// A request of 10 tokens that waits for a load of 8.
fn parked(scheduler: SchedulerConfig) -> (Puppet, SimEngine) {
    let (puppet, mut engine) = with(scheduler);
    puppet.offer_async(8);
    engine.add(request("a", 10, 2)).unwrap();
    engine.step().unwrap();
    assert_eq!(engine.scheduler().state(&id("a")), Some(State::Parked));
    puppet.offer(|_, _| Matched::None);
    (puppet, engine)
}

#[test]
fn c4_after_a_load_the_blocks_are_said_again_and_nobody_is_asked_again() {
    let (puppet, mut engine) = parked(SchedulerConfig::default());
    engine.step().unwrap();
    puppet.bring(&model(), &tokens(10), 0..8);
    puppet.received(&id("a"), None);
    assert_right(&model(), &until_output(&mut engine, "a"), 10, 2);
    assert_eq!(
        puppet.calls(),
        [
            "new a 10x1",
            "lookup a 0",
            "alloc a 0+8",
            "report 1+0",
            "alloc a 8+0",
            "step a 8+2 blocks 3 renewed",
            "step a 10+1 blocks 0",
            "finished a Length computed 11-0 blocks 3",
        ]
    );
    let counts = engine.scheduler().counts();
    assert_eq!(
        (counts.loads, counts.loaded_tokens, counts.computed_tokens),
        (1, 8, 3)
    );
    engine.check_end().unwrap();
}

#[test]
fn the_whole_prompt_may_be_loaded_and_its_last_token_is_computed_again() {
    for length in [1, 10] {
        let (puppet, mut engine) = with(SchedulerConfig::default());
        puppet.offer_async(length);
        engine.add(request("a", length, 2)).unwrap();
        engine.step().unwrap();
        puppet.bring(&model(), &tokens(length), 0..length);
        puppet.offer(|_, _| Matched::None);
        puppet.received(&id("a"), None);
        assert_right(&model(), &until_output(&mut engine, "a"), length, 2);
        // With one token nothing is computed afterwards, so it is looked up a second time.
        let calls = puppet.calls();
        let lookups = calls.iter().filter(|call| call.starts_with("lookup a 0"));
        assert_eq!(lookups.count(), if length == 1 { 2 } else { 1 });
        let last = format!("alloc a {}+0", length - 1);
        assert!(calls.contains(&last), "{calls:?}");
        engine.check_end().unwrap();
    }
}

#[test]
fn c3_a_finished_load_waits_until_its_request_can_be_scheduled() {
    let scheduler = SchedulerConfig {
        max_running: 1,
        ..SchedulerConfig::default()
    };
    let (puppet, mut engine) = parked(scheduler);
    puppet.bring(&model(), &tokens(10), 0..8);
    let mut other = request("b", 6, 9);
    other.prompt[0] = 77;
    engine.add(other).unwrap();
    engine.step().unwrap();
    puppet.received(&id("a"), None);
    for _ in 0..4 {
        engine.step().unwrap();
        assert_eq!(engine.scheduler().state(&id("a")), Some(State::Ready));
    }
    until_output(&mut engine, "b");
    assert_right(&model(), &until_output(&mut engine, "a"), 10, 2);
    engine.check_end().unwrap();
}

#[test]
fn c9_loads_are_used_in_the_order_in_which_they_finish() {
    let (puppet, mut engine) = with(SchedulerConfig::default());
    puppet.offer_async(8);
    for (place, name) in (0..).zip(["a", "b", "c"]) {
        let mut new = request(name, 10, 1);
        new.prompt[0] = 100 + place;
        engine.add(new).unwrap();
    }
    let mut prompt = tokens(10);
    engine.step().unwrap();
    assert_eq!(engine.scheduler().parked().count(), 3);
    puppet.offer(|_, _| Matched::None);
    // The last allocation is that of c.
    prompt[0] = 102;
    puppet.bring(&model(), &prompt, 0..8);
    puppet.received(&id("c"), None);
    let output = until_output(&mut engine, "c");
    assert_eq!(output.generated, model().reference(&prompt, "", 1));
    assert_eq!(engine.scheduler().parked().count(), 2);
    for name in ["b", "a"] {
        engine.abort(&id(name)).unwrap();
        puppet.received(&id(name), Some(&[]));
    }
    engine.step().unwrap();
    engine.check_end().unwrap();
}

#[test]
fn c23_an_aborted_load_keeps_its_blocks_until_it_is_reported_and_no_longer() {
    let (puppet, mut engine) = parked(SchedulerConfig::default());
    let blocks = engine.scheduler().blocks(&id("a")).unwrap().clone();
    engine.abort(&id("a")).unwrap();
    assert_eq!(until_output(&mut engine, "a").how, Finish::Aborted);
    for _ in 0..5 {
        engine.step().unwrap();
        assert_eq!(engine.scheduler().blocks(&id("a")), Some(&blocks));
    }
    assert!(!engine.is_idle());
    puppet.received(&id("a"), None);
    engine.step().unwrap();
    assert_eq!(engine.scheduler().blocks(&id("a")), None);
    assert!(engine.is_idle());
    engine.check_end().unwrap();
}

#[test]
fn c23_an_abort_after_the_report_frees_at_once() {
    let scheduler = SchedulerConfig {
        max_running: 1,
        ..SchedulerConfig::default()
    };
    let (puppet, mut engine) = parked(scheduler);
    puppet.bring(&model(), &tokens(10), 0..8);
    let mut other = request("b", 6, 9);
    other.prompt[0] = 77;
    engine.add(other).unwrap();
    engine.step().unwrap();
    puppet.received(&id("a"), None);
    engine.step().unwrap();
    engine.abort(&id("a")).unwrap();
    assert_eq!(engine.scheduler().held(), 0);
    until_output(&mut engine, "b");
    engine.check_end().unwrap();
}

#[test]
fn c90_with_the_fail_policy_a_failed_load_is_an_explicit_failure() {
    let (puppet, mut engine) = parked(SchedulerConfig::default());
    puppet.received(&id("a"), Some(&[]));
    assert_eq!(until_output(&mut engine, "a").how, Finish::Failed);
    let counts = engine.scheduler().counts();
    assert_eq!(
        (counts.failed_loads, counts.loads, counts.loaded_tokens),
        (1, 0, 0)
    );
    // The connector hears of the end before it hears of the report, as in vLLM.
    let calls = puppet.calls();
    assert_eq!(
        calls[calls.len() - 2..],
        ["finished a Failed computed 8-0 blocks 2", "report 1+0"]
    );
    engine.check_end().unwrap();
}

#[test]
fn c90_c91_with_recompute_a_failed_load_is_neither_cached_nor_counted() {
    let (puppet, mut engine) = parked(recompute());
    // Wrong bytes, reported as such.
    puppet.bring(&model(), &tokens(11)[1..], 0..8);
    puppet.received(&id("a"), Some(&[]));
    assert_right(&model(), &until_output(&mut engine, "a"), 10, 2);
    let counts = engine.scheduler().counts();
    assert_eq!(
        (counts.failed_loads, counts.loads, counts.loaded_tokens),
        (1, 0, 0)
    );
    // Whoever comes next hits what was computed.
    engine.add(request("b", 10, 2)).unwrap();
    assert_right(&model(), &until_output(&mut engine, "b"), 10, 2);
    assert_eq!(engine.scheduler().counts().local_tokens, 8);
    engine.check_end().unwrap();
}

#[test]
fn c44_blocks_before_the_first_failed_one_are_kept() {
    let (puppet, mut engine) = parked(recompute());
    let second = engine.scheduler().blocks(&id("a")).unwrap()[0][1];
    puppet.bring(&model(), &tokens(10), 0..4);
    puppet.received(&id("a"), Some(&[(0, second)]));
    assert_right(&model(), &until_output(&mut engine, "a"), 10, 2);
    // Something is computed, so it is not looked up again.
    let calls = puppet.calls();
    assert!(calls.contains(&"alloc a 4+0".to_owned()), "{calls:?}");
    assert!(!calls.contains(&"lookup a 4".to_owned()), "{calls:?}");
    assert_eq!(engine.scheduler().counts().loaded_tokens, 0);
    engine.check_end().unwrap();
}

#[test]
fn c44_with_several_groups_a_failed_load_keeps_nothing() {
    let scheduler = recompute();
    let config = EngineConfig {
        scheduler,
        ..EngineConfig::default()
    };
    let (puppet, mut engine) = Puppet::engine(config, &windowed());
    puppet.offer_async(8);
    engine.add(request("a", 10, 2)).unwrap();
    engine.step().unwrap();
    let blocks = engine.scheduler().blocks(&id("a")).unwrap().clone();
    assert_eq!((&blocks[0], &blocks[1]), (&vec![1, 2], &vec![0, 1]));
    puppet.offer(|_, _| Matched::None);
    // Block 1 is the window group's second and the other group's first.
    puppet.received(&id("a"), Some(&[(1, 1)]));
    assert_right(&windowed(), &until_output(&mut engine, "a"), 10, 2);
    assert_eq!(
        puppet
            .calls()
            .iter()
            .filter(|call| *call == "lookup a 0")
            .count(),
        2
    );
    engine.check_end().unwrap();
}

#[test]
fn c91_a_second_load_may_follow_a_failed_one() {
    let (puppet, mut engine) = parked(recompute());
    let first = engine.scheduler().blocks(&id("a")).unwrap()[0][0];
    puppet.received(&id("a"), Some(&[(0, first)]));
    puppet.offer_async(10);
    engine.step().unwrap();
    engine.step().unwrap();
    assert_eq!(engine.scheduler().state(&id("a")), Some(State::Parked));
    puppet.offer(|_, _| Matched::None);
    puppet.bring(&model(), &tokens(10), 0..10);
    puppet.received(&id("a"), None);
    assert_right(&model(), &until_output(&mut engine, "a"), 10, 2);
    let counts = engine.scheduler().counts();
    assert_eq!(
        (counts.failed_loads, counts.loads, counts.loaded_tokens),
        (1, 1, 10)
    );
    engine.check_end().unwrap();
}

#[test]
fn an_offer_may_be_taken_as_nothing_or_as_less() {
    let (puppet, mut engine) = with(SchedulerConfig {
        zero_percent: 100,
        ..SchedulerConfig::default()
    });
    puppet.offer(|request, computed| match computed {
        0 => Matched::load_async(request.prompt, 0, 8),
        _ => Matched::None,
    });
    engine.add(request("a", 10, 2)).unwrap();
    assert_right(&model(), &until_output(&mut engine, "a"), 10, 2);
    assert!(puppet.calls().contains(&"alloc a 0+0".to_owned()));
    assert_eq!(engine.scheduler().counts().zeroed_offers, 1);
    let (puppet, mut engine) = with(SchedulerConfig {
        less_percent: 100,
        ..SchedulerConfig::default()
    });
    puppet.offer_async(8);
    for number in 0..20 {
        let mut new = request(&format!("a{number}"), 10, 2);
        new.prompt[0] = 100 + number;
        engine.add(new).unwrap();
    }
    engine.step().unwrap();
    let calls = puppet.calls();
    let taken = calls
        .iter()
        .filter_map(|call| call.split_once("alloc ")?.1.split_once('+'));
    let taken: Vec<u32> = taken
        .map(|(_, external)| external.parse().unwrap())
        .collect();
    assert!(taken.iter().all(|&tokens| (1..=8).contains(&tokens)));
    assert!(taken.iter().any(|&tokens| tokens < 8), "{taken:?}");
}

#[test]
fn a_sync_load_is_computed_upon_in_the_same_step() {
    /// Brings the bytes inside of `after_alloc`'s own step, in `begin_step`.
    fn run(model: &Model) {
        let (puppet, mut engine) = Puppet::engine(EngineConfig::default(), model);
        let of = model.clone();
        let bring = move |puppet: &Puppet| puppet.bring(&of, &tokens(10), 0..9);
        puppet.0.lock().unwrap().at_begin = Some(Box::new(bring));
        puppet.offer(|request, computed| Matched::load_sync(request.prompt, computed, 10));
        engine.add(request("a", 10, 2)).unwrap();
        engine.step().unwrap();
        assert_eq!(engine.scheduler().state(&id("a")), Some(State::Running));
        assert_right(model, &until_output(&mut engine, "a"), 10, 2);
        assert_eq!(engine.scheduler().counts().loaded_tokens, 9);
        engine.check_end().unwrap();
    }
    run(&model());
}

#[test]
fn every_rank_must_report_and_reports_may_come_steps_later() {
    let config = EngineConfig {
        ranks: 2,
        report_delay: 3,
        ..EngineConfig::default()
    };
    let (puppet, mut engine) = Puppet::engine(config, &model());
    puppet.offer_async(8);
    engine.add(request("a", 10, 2)).unwrap();
    engine.step().unwrap();
    engine.abort(&id("a")).unwrap();
    puppet.rank_received(1, &id("a"), None);
    for _ in 0..10 {
        engine.step().unwrap();
        assert_eq!(engine.scheduler().held(), 1);
    }
    puppet.rank_received(0, &id("a"), None);
    let mut steps = 0;
    while engine.scheduler().held() > 0 {
        engine.step().unwrap();
        steps += 1;
    }
    assert!((1..=4).contains(&steps), "{steps}");
    engine.check_end().unwrap();
}

#[test]
fn ready_requests_that_block_one_another_are_computed_anew() {
    // Two loads fill the pool of 7 blocks; both requests need a block more. With `reserve` the second
    // load would have to wait.
    let (puppet, mut engine) = with(SchedulerConfig {
        reserve: false,
        blocks: 8,
        max_running: 4,
        ..recompute()
    });
    puppet.offer_async(12);
    engine.add(request("a", 20, 1)).unwrap();
    let mut second = request("b", 20, 1);
    second.prompt[0] = 77;
    let prompt = second.prompt.clone();
    engine.add(second).unwrap();
    engine.step().unwrap();
    assert_eq!(engine.scheduler().parked().count(), 2);
    puppet.offer(|_, _| Matched::None);
    puppet.bring(&model(), &prompt, 0..12);
    puppet.received(&id("b"), None);
    puppet.0.lock().unwrap().allocated = engine.scheduler().blocks(&id("a")).unwrap().clone();
    puppet.bring(&model(), &tokens(20), 0..12);
    puppet.received(&id("a"), None);
    let mut outputs = Vec::new();
    for _ in 0..50 {
        engine.step().unwrap();
        outputs.extend(engine.take_outputs());
    }
    outputs.sort_by_key(|output| output.id.clone());
    assert_right(&model(), &outputs[0], 20, 1);
    assert_eq!(outputs[1].generated, model().reference(&prompt, "", 1));
    assert_eq!(engine.scheduler().counts().preemptions, 1);
    engine.check_end().unwrap();
}

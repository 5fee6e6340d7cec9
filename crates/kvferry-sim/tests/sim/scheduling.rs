//! The scheduler's own mechanisms, as a connector sees them.

use kvferry_connector::contract::{Finish, Matched};
use kvferry_sim::{EngineConfig, SchedulerConfig, SimEngine, State};

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

#[test]
fn c5_a_prompt_in_chunks_has_the_blocks_of_all_chunks() {
    let (puppet, mut engine) = with(SchedulerConfig {
        token_budget: 6,
        ..SchedulerConfig::default()
    });
    puppet.hold(true);
    engine.add(request("a", 14, 1)).unwrap();
    let output = until_output(&mut engine, "a");
    assert_right(&model(), &output, 14, 1);
    assert_eq!(
        puppet.calls(),
        [
            "new a 14x1",
            "lookup a 0",
            "alloc a 0+0",
            "step a 0+6 blocks 2 renewed",
            "step a 6+6 blocks 1",
            "step a 12+2 blocks 1",
            "finished a Length computed 14-0 blocks 4",
        ]
    );
    puppet.sent(&id("a"));
    engine.step().unwrap();
    engine.check_end().unwrap();
}

#[test]
fn a_local_hit_is_less_than_the_prompt() {
    let (puppet, mut engine) = with(SchedulerConfig::default());
    for name in ["a", "b"] {
        engine.add(request(name, 8, 1)).unwrap();
        let output = until_output(&mut engine, name);
        assert_right(&model(), &output, 8, 1);
    }
    assert!(puppet.calls().contains(&"lookup b 4".to_owned()));
    assert_eq!(engine.scheduler().counts().local_tokens, 4);
    engine.check_end().unwrap();
}

#[test]
fn c6_a_request_that_is_preempted_in_its_last_step_ends_without_blocks() {
    // Two prompts fill a pool of 6 blocks; with async scheduling the first one's second step takes the
    // other's blocks while its only token is under way.
    let (puppet, mut engine) = with(SchedulerConfig {
        blocks: 7,
        asynchronous: true,
        ..SchedulerConfig::default()
    });
    engine.add(request("a", 12, 12)).unwrap();
    let mut second = request("b", 11, 1);
    second.prompt[0] = 77;
    engine.add(second).unwrap();
    for name in ["b", "a"] {
        until_output(&mut engine, name);
    }
    let calls = puppet.calls();
    let preempted = calls.iter().position(|call| call == "preempted b");
    let finished = calls
        .iter()
        .find(|call| call.starts_with("finished b"))
        .unwrap();
    assert!(preempted.is_some(), "{calls:?}");
    assert!(finished.contains("computed 0-0 blocks 0"), "{finished}");
    engine.check_end().unwrap();
}

#[test]
fn a_preempted_request_is_computed_again_with_the_same_tokens() {
    let (puppet, mut engine) = with(SchedulerConfig {
        blocks: 8,
        ..SchedulerConfig::default()
    });
    engine.add(request("a", 9, 16)).unwrap();
    let mut second = request("b", 9, 16);
    second.prompt[0] = 77;
    let prompt = second.prompt.clone();
    engine.add(second).unwrap();
    let mut outputs = Vec::new();
    for _ in 0..200 {
        engine.step().unwrap();
        outputs.extend(engine.take_outputs());
    }
    assert_eq!(outputs[0].generated, model().reference(&tokens(9), "", 16));
    assert_eq!(outputs[1].generated, model().reference(&prompt, "", 16));
    assert!(engine.scheduler().counts().preemptions > 0);
    assert!(
        puppet
            .calls()
            .iter()
            .any(|call| call.ends_with("renewed") && call.contains("step b 0+"))
    );
    engine.check_end().unwrap();
}

#[test]
fn async_scheduling_computes_ahead_of_its_outputs() {
    let stops = kvferry_sim::Model {
        stop_every: 3,
        ..model()
    };
    let scheduler = SchedulerConfig {
        asynchronous: true,
        ..SchedulerConfig::default()
    };
    let config = EngineConfig {
        scheduler,
        ..EngineConfig::default()
    };
    let (puppet, mut engine) = Puppet::engine(config, &stops);
    puppet.hold(true);
    engine.add(request("a", 5, 50)).unwrap();
    let output = until_output(&mut engine, "a");
    assert_eq!(
        (output.how, &output.generated),
        (Finish::Stopped, &stops.reference(&tokens(5), "", 50))
    );
    let computed = 5 + output.generated.len();
    // One more position than the tokens up to the stop need is under way, and may still be written.
    let finished = format!("finished a Stopped computed {computed}-1 blocks");
    let calls = puppet.calls();
    assert!(
        calls.iter().any(|call| call.starts_with(&finished)),
        "{calls:?}"
    );
    engine.step().unwrap();
    puppet.sent(&id("a"));
    engine.step().unwrap();
    engine.step().unwrap();
    engine.check_end().unwrap();
}

#[test]
fn lookahead_gives_slots_beyond_the_tokens() {
    let (puppet, mut engine) = with(SchedulerConfig {
        lookahead: 9,
        ..SchedulerConfig::default()
    });
    engine.add(request("a", 4, 3)).unwrap();
    until_output(&mut engine, "a");
    // Room for 9 more from the first step on.
    let steps: Vec<_> = puppet
        .calls()
        .into_iter()
        .filter(|call| call.starts_with("step"))
        .collect();
    assert_eq!(
        steps,
        [
            "step a 0+4 blocks 4 renewed",
            "step a 4+1 blocks 0",
            "step a 5+1 blocks 0"
        ]
    );
    engine.check_end().unwrap();
}

#[test]
fn c43_a_window_moves_on_and_leaves_null_blocks() {
    let (_, mut engine) = Puppet::engine(EngineConfig::default(), &windowed());
    engine.add(request("a", 9, 12)).unwrap();
    engine.step().unwrap();
    engine.step().unwrap();
    engine.step().unwrap();
    // 11 are computed; the query that was at 10 looked back to 6.
    let blocks = engine.scheduler().blocks(&id("a")).unwrap().clone();
    assert_eq!((blocks[0].len(), &blocks[1]), (3, &vec![0, 2, 3]));
    let output = until_output(&mut engine, "a");
    assert_right(&windowed(), &output, 9, 12);
    engine.check_end().unwrap();
}

#[test]
fn what_can_never_run_is_refused_before_admission() {
    let (puppet, mut engine) = with(SchedulerConfig {
        blocks: 4,
        ..SchedulerConfig::default()
    });
    engine.add(request("a", 12, 1)).unwrap();
    assert_eq!(until_output(&mut engine, "a").how, Finish::Failed);
    // vLLM makes the prompt `[0]` out of it.
    assert_eq!(
        puppet.calls(),
        ["new a 1x0", "finished a Failed computed 0-0 blocks 0"]
    );
    engine.reject(request("b", 3, 1)).unwrap();
    assert_eq!(until_output(&mut engine, "b").how, Finish::Aborted);
    assert_eq!(
        puppet.calls(),
        ["new b 1x0", "finished b Aborted computed 0-0 blocks 0"]
    );
    engine.check_end().unwrap();
}

#[test]
fn c9_a_request_that_is_put_off_holds_no_blocks_and_holds_up_nobody() {
    let (puppet, mut engine) = with(SchedulerConfig::default());
    puppet.offer(|request, _| match request.id.as_str() {
        "a" => Matched::Later(std::time::Duration::from_secs(60)),
        _ => Matched::None,
    });
    engine.add(request("a", 10, 1)).unwrap();
    engine.add(request("b", 10, 1)).unwrap();
    until_output(&mut engine, "b");
    assert_eq!(
        engine
            .scheduler()
            .blocks(&id("a"))
            .map(|blocks| blocks[0].len()),
        Some(0)
    );
    assert_eq!(engine.scheduler().state(&id("a")), Some(State::Waiting));
    let asked = engine.scheduler().counts().put_off;
    engine.step().unwrap();
    assert_eq!(
        engine.scheduler().counts().put_off,
        asked + 1,
        "asked again in every step"
    );
    puppet.offer(|_, _| Matched::None);
    assert_right(&model(), &until_output(&mut engine, "a"), 10, 1);
    engine.check_end().unwrap();
}

#[test]
fn c11_the_end_of_an_unknown_request_is_nothing() {
    let (puppet, mut engine) = with(SchedulerConfig::default());
    engine.abort(&id("a")).unwrap();
    engine.add(request("a", 10, 4)).unwrap();
    engine.step().unwrap();
    engine.abort(&id("a")).unwrap();
    engine.abort(&id("a")).unwrap();
    let ends = puppet
        .calls()
        .iter()
        .filter(|call| call.starts_with("finished"))
        .count();
    assert_eq!(ends, 1);
    engine.check_end().unwrap();
}

#[test]
fn a_forward_may_last_several_ticks_in_which_nothing_is_reported() {
    for asynchronous in [false, true] {
        let scheduler = SchedulerConfig {
            asynchronous,
            ..SchedulerConfig::default()
        };
        let config = EngineConfig {
            scheduler,
            forward_ticks: (3, 3),
            ..EngineConfig::default()
        };
        let (puppet, mut engine) = Puppet::engine(config, &model());
        engine.add(request("a", 6, 2)).unwrap();
        engine.step().unwrap();
        assert_eq!(engine.scheduler().blocks(&id("a")).unwrap()[0].len(), 2);
        // The second step is scheduled before the first one's output only with async scheduling.
        engine.step().unwrap();
        let steps = puppet
            .calls()
            .iter()
            .filter(|call| call.starts_with("step"))
            .count();
        assert_eq!(steps, 1 + usize::from(asynchronous));
        assert!(engine.take_outputs().is_empty());
        assert_right(&model(), &until_output(&mut engine, "a"), 6, 2);
        engine.step().unwrap();
        engine.check_end().unwrap();
    }
}

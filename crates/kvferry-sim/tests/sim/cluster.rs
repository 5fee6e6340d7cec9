//! Several engines with the router between them.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use kvferry_connector::contract::Params;

use kvferry_sim::*;

use crate::direct::{Behaviour, Direct, Sin};

const PATIENCE: Patience = Patience {
    idle_ticks: 1000,
    time: Duration::ZERO,
};

fn client(name: &str, length: u32, abort: Option<Abort>) -> ClientRequest {
    ClientRequest {
        name: name.into(),
        prompt: Prompt {
            prefix: 0,
            shared: 0,
            length,
            salt: length,
        },
        extra_key: String::new(),
        max_tokens: 6,
        arrival: 1,
        route: Route::Split {
            prefill: 0,
            decode: 1,
        },
        abort,
        typed_router: false,
    }
}

fn scenario(requests: Vec<ClientRequest>) -> Scenario {
    let engine = |name: &str, role| EngineConfig {
        name: name.into(),
        role,
        ..Default::default()
    };
    Scenario {
        model: Model {
            stop_every: 0,
            ..Model::default()
        },
        engines: vec![
            engine("prefill", Role::Prefill),
            engine("decode", Role::Decode),
        ],
        requests,
        restarts: Vec::new(),
        failures_allowed: false,
    }
}

fn play(scenario: Scenario, behaviour: Behaviour) -> Result<Report, SimError> {
    let mut direct = Direct::new(behaviour);
    let mut cluster = Cluster::new(scenario, PATIENCE, &mut direct)?;
    cluster.run()?;
    Ok(cluster.report())
}

const SLOW: Behaviour = Behaviour {
    sync: false,
    ticks: (3, 9),
    fail_percent: 0,
    later_ticks: 0,
    sin: None,
};

#[test]
fn a_prompt_is_computed_here_and_its_tokens_come_from_there() {
    let fast = Behaviour::default();
    for behaviour in [
        fast,
        SLOW,
        Behaviour {
            later_ticks: 5,
            ..SLOW
        },
        Behaviour { sync: true, ..fast },
    ] {
        for asynchronous in [false, true] {
            let mut scenario = scenario(vec![client("a", 30, None), client("b", 1, None)]);
            for engine in &mut scenario.engines {
                engine.scheduler.asynchronous = asynchronous;
            }
            let report = play(scenario, behaviour).unwrap();
            assert_eq!((report.finished, report.tokens), (2, 12));
            let [(_, prefill), (_, decode)] = &report.engines[..] else {
                panic!()
            };
            assert_eq!(
                (prefill.held, prefill.computed_tokens, prefill.loads),
                (2, 31, 0)
            );
            // A sync load leaves the last token, of a single one all; an async load computes it again.
            let loads = if behaviour.sync { (1, 29) } else { (2, 31) };
            assert_eq!((decode.loads, decode.loaded_tokens), loads);
            assert_eq!(decode.computed_tokens, 2 + 2 * 5);
        }
    }
}

#[test]
fn the_hooks_come_in_vllms_order() {
    let mut direct = Direct {
        trace: Some(Trace::new()),
        ..Direct::new(SLOW)
    };
    let trace = direct.trace.clone().unwrap();
    let mut cluster =
        Cluster::new(scenario(vec![client("a", 9, None)]), PATIENCE, &mut direct).unwrap();
    cluster.run().unwrap();
    let mut lines = Vec::new();
    trace.write(&mut lines).unwrap();
    let calls: Vec<Call> = String::from_utf8(lines)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(calls, trace.calls());
    let of = |engine: &str, idle: bool| -> Vec<String> {
        let scheduler = calls
            .iter()
            .filter(|call| call.engine == engine && call.rank.is_none());
        let busy = scheduler.filter(|call| {
            idle || call.hook != "build_step"
                || call.with["scheduled"].as_array().unwrap().len() == 1
        });
        busy.map(|call| call.hook.clone()).collect()
    };
    let first = [
        "on_new_request",
        "matched_tokens",
        "after_alloc",
        "build_step",
    ];
    let prefill = [&first[..], &["request_finished", "on_report"]].concat();
    assert_eq!(of("prefill", false), prefill);
    let decode = [
        &first[..3],
        &["on_report", "after_alloc"],
        &["build_step"; 6],
        &["request_finished"],
    ]
    .concat();
    assert_eq!(of("decode", false), decode);
    // Steps that compute nothing have a plan too.
    assert!(of("decode", true).len() > decode.len());
    let lookups: Vec<_> = calls
        .iter()
        .filter(|call| call.hook == "matched_tokens")
        .collect();
    let answers: Vec<_> = lookups
        .iter()
        .map(|call| call.with["answer"].to_string())
        .collect();
    assert_eq!(answers, ["[0,false]", "[9,true]"]);
}

#[test]
fn c23_a_client_may_go_away_at_every_tick() {
    let mut aborted_loads = 0;
    for asynchronous in [false, true] {
        for tick in 0..45 {
            let mut scenario = scenario(vec![
                client("a", 30, Some(Abort::After(tick))),
                client("b", 29, None),
            ]);
            for engine in &mut scenario.engines {
                engine.scheduler.asynchronous = asynchronous;
                engine.scheduler.token_budget = 8;
                engine.forward_ticks = (1, 2);
                engine.report_delay = 2;
                engine.scheduler.reuse = Reuse::Newest;
            }
            let report = play(scenario, SLOW).unwrap();
            assert_eq!(report.finished + report.aborted, 2, "tick {tick}");
            aborted_loads += report.total().aborted_loads;
        }
    }
    assert!(aborted_loads >= 4, "{aborted_loads}");
}

#[test]
fn a_client_may_be_refused_or_go_away_between_the_engines() {
    for abort in [
        Abort::Rejected,
        Abort::Abandoned,
        Abort::WhileLoading(0),
        Abort::WhileLoading(2),
    ] {
        let report = play(scenario(vec![client("a", 30, Some(abort))]), SLOW).unwrap();
        assert_eq!((report.aborted, report.total().held), (1, 1));
        // Only a lease that nobody ever hears of has to run out.
        assert_eq!(
            report.ticks > 150,
            abort == Abort::Abandoned,
            "{abort:?}: {}",
            report.ticks
        );
        let loads = u64::from(matches!(abort, Abort::WhileLoading(_)));
        assert_eq!(report.total().aborted_loads, loads);
    }
}

#[test]
fn a_router_that_drops_what_it_does_not_know_costs_the_transfer_only() {
    let request = ClientRequest {
        typed_router: true,
        ..client("a", 30, None)
    };
    let report = play(scenario(vec![request]), SLOW).unwrap();
    assert_eq!((report.finished, report.total().loads), (1, 0));
    assert_eq!(report.engines[1].1.computed_tokens, 30 + 5);
}

#[test]
fn a_producer_that_went_away_costs_what_it_held() {
    for policy in [FailurePolicy::Fail, FailurePolicy::Recompute] {
        let mut scenario = scenario(vec![
            client("a", 30, None),
            ClientRequest {
                arrival: 30,
                ..client("b", 20, None)
            },
        ]);
        scenario.engines[1].scheduler.failure_policy = policy;
        scenario.failures_allowed = true;
        // The prompt is there in tick 1, the read would be over in tick 5 at the earliest.
        scenario.restarts = vec![Restart { engine: 0, tick: 4 }];
        let report = play(scenario, SLOW).unwrap();
        let recompute = u32::from(policy == FailurePolicy::Recompute);
        assert_eq!(
            (report.finished, report.failed),
            (1 + recompute, 1 - recompute)
        );
        assert_eq!((report.restarts, report.total().failed_loads), (1, 1));
        assert_eq!(report.total().loads, 1);
    }
}

#[test]
fn a_consumer_that_went_away_costs_its_requests() {
    let mut scenario = scenario(vec![
        client("a", 30, None),
        ClientRequest {
            arrival: 30,
            ..client("b", 20, None)
        },
    ]);
    scenario.failures_allowed = true;
    scenario.restarts = vec![Restart { engine: 1, tick: 4 }];
    let report = play(scenario, SLOW).unwrap();
    assert_eq!((report.finished, report.failed), (1, 1));
}

#[test]
fn a_scenario_can_be_replayed_from_its_json() {
    let options = Options {
        requests: 60,
        seed: 11,
        faults: Faults::Harsh,
        ..Options::default()
    };
    let scenario = Scenario::random(&options);
    let text = serde_json::to_string_pretty(&scenario).unwrap();
    let read: Scenario = serde_json::from_str(&text).unwrap();
    assert_eq!(read, scenario);
    let first = play(scenario, SLOW).unwrap();
    assert_eq!(play(read, SLOW).unwrap(), first);
    assert_ne!(first.digest, 0);
}

#[test]
fn a_run_of_a_seed_is_always_the_same_and_breaks_nothing() {
    let mut loads = 0;
    for (faults, seeds) in [(Faults::None, 6), (Faults::Mixed, 12), (Faults::Harsh, 20)] {
        for seed in 0..seeds {
            let options = Options {
                requests: 60,
                seed,
                faults,
                patience: PATIENCE,
                ..Options::default()
            };
            let fail_percent = if faults == Faults::None { 0 } else { 10 };
            let behaviour = Behaviour {
                fail_percent,
                later_ticks: seed as u32 % 3,
                ..SLOW
            };
            let report = run(&options, &mut Direct::new(behaviour)).unwrap();
            assert_eq!(report.violation, None, "{faults:?} {seed}");
            assert_eq!(report.finished + report.failed + report.aborted, 60);
            loads += report.total().loads;
            assert_eq!(run(&options, &mut Direct::new(behaviour)).unwrap(), report);
            if faults == Faults::None {
                assert_eq!(report.finished, 60);
            }
        }
    }
    assert!(loads > 500, "{loads}");
}

#[test]
fn a_connector_that_lies_is_found() {
    for (sin, says) in [
        (Sin::ReportsEarly, "has wrong bytes"),
        (Sin::NeverReports, "nothing happens any more"),
        (Sin::WritesLate, "wr"),
        (Sin::HidesFailures, "has wrong bytes"),
        (Sin::IgnoresLeases, "has wrong bytes"),
    ] {
        let fail_percent = if sin == Sin::HidesFailures { 30 } else { 0 };
        let behaviour = Behaviour {
            sin: Some(sin),
            fail_percent,
            ..SLOW
        };
        let found = (0..40).find_map(|seed| {
            let options = Options {
                requests: 60,
                seed,
                faults: Faults::Harsh,
                patience: PATIENCE,
                restarts: false,
                ..Options::default()
            };
            run(&options, &mut Direct::new(behaviour))
                .unwrap()
                .violation
        });
        let found = found.unwrap_or_else(|| panic!("{sin:?} was not found"));
        assert!(found.contains(says), "{sin:?}: {found}");
    }
}

#[test]
fn with_no_faults_a_failure_is_a_violation() {
    let options = Options {
        requests: 40,
        patience: PATIENCE,
        ..Options::default()
    };
    let behaviour = Behaviour {
        fail_percent: 40,
        ..SLOW
    };
    let violation = (0..10).find_map(|seed| {
        run(
            &Options {
                seed,
                ..options.clone()
            },
            &mut Direct::new(behaviour),
        )
        .unwrap()
        .violation
    });
    let violation = violation.unwrap();
    assert!(violation.contains("ended without a result"), "{violation}");
}

#[test]
fn what_cannot_work_is_refused_with_the_field() {
    let refused = |change: &dyn Fn(&mut Scenario)| {
        let mut scenario = scenario(vec![client("a", 5, None)]);
        change(&mut scenario);
        play(scenario, SLOW).unwrap_err().to_string()
    };
    assert_eq!(
        refused(&|s| s.engines[0].ranks = 0),
        "ranks: is 0; give at least 1"
    );
    assert_eq!(
        refused(&|s| s.engines[0].ranks = 3),
        "ranks: 2 heads cannot be shared out to 3"
    );
    assert_eq!(
        refused(&|s| s.model.layers = vec![0, 1]),
        "layers: there is no cache group 1"
    );
    assert_eq!(
        refused(&|s| s.requests[0].route = Route::Local { engine: 2 }),
        "engine: there is no engine 2, only 2"
    );
}

/// The time goes on in a thread of its own, as that of a connector with threads.
struct Threaded {
    inner: Direct,
    now: mpsc::Receiver<u64>,
}

impl ConnectorFactory for Threaded {
    fn build(&mut self, spec: &EngineSpec<'_>) -> Result<Halves, FactoryError> {
        self.inner.build(spec)
    }

    fn idle(&mut self) {
        if let Ok(tick) = self.now.recv_timeout(Duration::from_secs(30)) {
            self.inner.tick(tick);
        }
    }
}

#[test]
fn connectors_with_threads_are_waited_for_in_time_not_in_turns() {
    let (sender, now) = mpsc::sync_channel(0);
    let clock = thread::spawn(move || (1..).take_while(|&tick| sender.send(tick).is_ok()).count());
    let mut factory = Threaded {
        inner: Direct::new(SLOW),
        now,
    };
    let patience = Patience {
        idle_ticks: 0,
        time: Duration::from_secs(60),
    };
    let mut cluster = Cluster::new(
        scenario(vec![client("a", 30, None)]),
        patience,
        &mut factory,
    )
    .unwrap();
    cluster.run().unwrap();
    assert_eq!(cluster.report().finished, 1);
    drop(factory);
    assert!(clock.join().unwrap() >= 3);
}

#[test]
fn a_shutdown_ends_what_is_held() {
    let mut direct = Direct::new(SLOW);
    let (config, model) = (EngineConfig::default(), Model::default());
    let spec = EngineSpec {
        config: &config,
        model: &model,
        life: 0,
    };
    let halves = direct.build(&spec).unwrap();
    let mut engine = SimEngine::new(config.clone(), &model, halves).unwrap();
    let mut params = Params::new();
    params.insert("do_remote_decode".into(), true.into());
    engine
        .add(NewRequest {
            params: Some(params),
            ..crate::puppet::request("a", 9, 1)
        })
        .unwrap();
    let output = crate::puppet::until_output(&mut engine, "a");
    assert!(
        output
            .params
            .is_some_and(|params| params["remote_num_tokens"] == 9)
    );
    engine.step().unwrap();
    assert!(!engine.is_idle());
    engine.shutdown(Duration::from_secs(30)).unwrap();
    assert!(engine.is_idle());
    engine.check_end().unwrap();
}

//! Random scenarios over the scripted connectors: whatever clients, pools and loads do, every request
//! ends with the right tokens or an explicit failure, and everything is as at the start.

use std::time::Duration;

use kvferry_sim::*;
use proptest::prelude::*;

use crate::direct::{Behaviour, Direct};

const PATIENCE: Patience = Patience {
    idle_ticks: 1000,
    time: Duration::ZERO,
};

prop_compose! {
    fn scheduler()(
        block_tokens in Just(4_u32),
        // Requests have at most 30 + 8 tokens and 6 of lookahead: 11 blocks.
        blocks in 12_u32..60,
        max_running in 1_u32..6,
        token_budget in 1_u32..40,
        asynchronous: bool,
        lookahead in 0_u32..7,
        recompute: bool,
        zero_percent in prop_oneof![Just(0_u32), 0_u32..100],
        less_percent in prop_oneof![Just(0_u32), 0_u32..100],
        newest: bool,
        reserve: bool,
    ) -> SchedulerConfig {
        SchedulerConfig {
            block_tokens, blocks, max_running, token_budget, chunked: true, reserve, asynchronous, lookahead,
            failure_policy: if recompute { FailurePolicy::Recompute } else { FailurePolicy::Fail },
            max_tries: 2,
            zero_percent, less_percent, keeps_last: true,
            reuse: if newest { Reuse::Newest } else { Reuse::Vllm },
            scatter: None,
        }
    }
}

prop_compose! {
    fn engine()(
        scheduler in scheduler(),
        forward_ticks in (0_u32..3, 0_u32..4),
        report_delay in 0_u32..4,
        interleaved: bool,
        seed: u64,
    ) -> EngineConfig {
        EngineConfig { scheduler, forward_ticks, report_delay, interleaved, seed, ..EngineConfig::default() }
    }
}

fn abort() -> impl Strategy<Value = Option<Abort>> {
    prop_oneof![
        3 => Just(None),
        1 => (0_u32..50).prop_map(|ticks| Some(Abort::After(ticks))),
        1 => (0_u32..5).prop_map(|ticks| Some(Abort::WhileLoading(ticks))),
        1 => prop_oneof![Just(Some(Abort::Rejected)), Just(Some(Abort::Abandoned))],
    ]
}

prop_compose! {
    fn request()(
        prefix in 0_u32..2,
        shared in 0_u32..30,
        length in 1_u32..=30,
        extra_key in prop_oneof![3 => Just(String::new()), 1 => Just("lora".to_owned())],
        max_tokens in 1_u32..=8,
        arrival in 0_u64..30,
        route in prop_oneof![
            4 => Just(Route::Split { prefill: 0, decode: 1 }),
            1 => Just(Route::Split { prefill: 2, decode: 1 }),
            1 => Just(Route::Split { prefill: 0, decode: 2 }),
            1 => (0_usize..3).prop_map(|engine| Route::Local { engine }),
        ],
        abort in abort(),
        typed_router in prop::bool::weighted(0.1),
    ) -> ClientRequest {
        ClientRequest {
            name: String::new(),
            prompt: Prompt { prefix, shared, length, salt: 0 },
            extra_key, max_tokens, arrival, route, abort, typed_router,
        }
    }
}

prop_compose! {
    fn scenario()(
        engines in [engine(), engine(), engine()],
        two_ranks: bool,
        window in prop::option::of(1_u32..12),
        stop_every in prop_oneof![Just(0_u32), Just(3), Just(16)],
        mut requests in prop::collection::vec(request(), 1..20),
        restarts in prop::collection::vec((0_usize..3, 1_u64..60), 0..3),
    ) -> Scenario {
        let mut model = Model { stop_every, ..Model::default() };
        if let Some(tokens) = window {
            model.groups.push(GroupKind::Window { tokens });
            model.layers = vec![0, 1];
        }
        for (number, request) in (0..).zip(&mut requests) {
            request.name = format!("r{number}");
            request.prompt.salt = number;
        }
        let names = ["prefill", "decode", "both"];
        let engines = names.into_iter().zip(engines).map(|(name, engine)| EngineConfig {
            name: name.into(),
            ranks: if two_ranks { 2 } else { 1 },
            ..engine
        });
        Scenario {
            model,
            engines: engines.collect(),
            requests,
            restarts: restarts.into_iter().map(|(engine, tick)| Restart { engine, tick }).collect(),
            failures_allowed: true,
        }
    }
}

prop_compose! {
    fn behaviour()(
        ticks in (0_u32..5, 0_u32..12),
        fail_percent in prop_oneof![Just(0_u32), 0_u32..60],
        later_ticks in prop_oneof![Just(0_u32), 0_u32..10],
    ) -> Behaviour {
        Behaviour { sync: false, ticks, fail_percent, later_ticks, sin: None }
    }
}

fn play(scenario: Scenario, behaviour: Behaviour) -> Result<(Report, Vec<Outcome>), SimError> {
    let mut direct = Direct::new(behaviour);
    let mut cluster = Cluster::new(scenario, PATIENCE, &mut direct)?;
    cluster.run()?;
    let outcomes = cluster.outcomes().flatten().cloned().collect();
    Ok((cluster.report(), outcomes))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, max_shrink_iters: 400, ..ProptestConfig::default() })]

    #[test]
    fn every_request_ends_well_and_nothing_is_left(
        scenario in scenario(),
        behaviour in behaviour(),
    ) {
        let calm = scenario.restarts.is_empty() && behaviour.fail_percent == 0;
        let (report, outcomes) = play(scenario.clone(), behaviour)
            .map_err(|error| TestCaseError::fail(error.to_string()))?;
        prop_assert_eq!(outcomes.len(), scenario.requests.len());
        for (request, outcome) in scenario.requests.iter().zip(&outcomes) {
            match outcome {
                // Tokens were compared with the model's by the cluster.
                Outcome::Tokens(tokens) => prop_assert!(!tokens.is_empty()),
                Outcome::Aborted => prop_assert!(request.abort.is_some()),
                // Without faults nobody fails.
                Outcome::Failed(why) => prop_assert!(!calm, "{}: {why}", request.name),
            }
        }
        // The same again.
        prop_assert_eq!(play(scenario, behaviour).map(|(report, _)| report).ok(), Some(report));
    }

    /// Sync loads: no lease may end and no load fail, as there is no way to say so.
    #[test]
    fn sync_loads_too(mut scenario in scenario(), later_ticks in 0_u32..3) {
        scenario.restarts.clear();
        scenario.failures_allowed = false;
        let behaviour = Behaviour { sync: true, later_ticks, ..Behaviour::default() };
        let played = play(scenario, behaviour);
        prop_assert!(played.is_ok(), "{}", played.unwrap_err());
    }
}

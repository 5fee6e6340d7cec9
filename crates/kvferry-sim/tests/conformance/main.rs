//! The simulator's hook calls, compared with those of a real vLLM for the same scripts.
//!
//! `scenarios/` has the scripts with what `scripts/record-hooks` recorded from vLLM. Here each is
//! played on [`SimEngine`] with a connector that does the same, and every call must be the same:
//! `compare.rs` says what of a call counts, `docs/sim.md` where the two differ all the same. No vLLM
//! is needed.

#![allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

mod compare;
mod puppet;
mod script;

use kvferry_sim::{Call, Model, SimEngine, Trace};
use serde_json::json;

use puppet::Puppet;
use script::Script;

/// As the recorded model: two layers, and nobody stops by itself.
fn model() -> Model {
    Model {
        layers: vec![0, 0],
        stop_every: 0,
        ..Model::default()
    }
}

fn marker(hook: &str, with: serde_json::Value) -> Call {
    Call {
        engine: String::new(),
        rank: None,
        hook: hook.into(),
        with,
    }
}

/// Whether vLLM's engine core would take a turn: it sleeps when no request is there, nothing is held,
/// and its workers know of all ends. (The simulator steps whenever it is told to.)
fn awake(engine: &SimEngine, calls: &[Call]) -> bool {
    let untold = calls
        .iter()
        .rev()
        .take_while(|call| call.hook != "build_step")
        .any(|call| call.hook == "request_finished");
    untold || engine.scheduler().live() > 0 || engine.scheduler().held() > 0
}

/// One turn of vLLM's engine core.
fn turn(engine: &mut SimEngine, script: &Script, step: u32, trace: &Trace) {
    engine.step().unwrap();
    if !script.aborts_in_forward() {
        return;
    }
    // The forward of a step that computes something ends in the next tick.
    let calls = trace.calls();
    let built = calls.iter().rfind(|call| call.hook == "build_step");
    let computes = built.is_some_and(|call| call.with["scheduled"] != json!([]));
    for request in &script.requests {
        if request.abort_in == Some(step) {
            engine.abort(&request.id).unwrap();
        }
    }
    if computes {
        engine.step().unwrap();
    }
}

fn play(script: &Script) -> Vec<Call> {
    let puppet = Puppet::new(script);
    let trace = Trace::new();
    let halves = puppet.halves().traced("simulator", &trace);
    let mut engine = SimEngine::new(script.config(), &model(), halves).unwrap();
    let mut calls = trace.calls();
    let mut seen = calls.len();
    for step in 1..=script.steps {
        puppet.begin(step);
        calls.push(marker("step", json!({ "number": step })));
        for request in script.requests.iter().filter(|one| one.add == step) {
            match request.reject {
                true => engine.reject(request.to_new()).unwrap(),
                false => engine.add(request.to_new()).unwrap(),
            }
        }
        for request in &script.requests {
            if request.abort == Some(step) {
                engine.abort(&request.id).unwrap();
            }
        }
        if awake(&engine, &trace.calls()) {
            turn(&mut engine, script, step, &trace);
        } else {
            calls.push(marker("asleep", json!({})));
        }
        let all = trace.calls();
        calls.extend_from_slice(&all[seen..]);
        seen = all.len();
    }
    engine.check_end().unwrap();
    calls
}

fn check(name: &str) {
    let script = Script::read(name);
    assert!(
        script.recorded.vllm.starts_with("0.32."),
        "recorded from vLLM {}",
        script.recorded.vllm
    );
    if let Some(difference) = first_difference(&script) {
        panic!("{name}: the simulator does not do what vLLM did, {difference}");
    }
}

fn first_difference(script: &Script) -> Option<String> {
    let calls = play(script);
    let vllm = &script.recorded.calls;
    if !script.aborts_in_forward() {
        return compare::difference(vllm, &calls);
    }
    // vLLM hears of such an abort when the workers' part of the step is over, the simulator before that.
    // They are two processes, and neither half can see which it was.
    [true, false].into_iter().find_map(|worker| {
        compare::difference(&compare::half(vllm, worker), &compare::half(&calls, worker))
    })
}

/// A test per scenario.
macro_rules! scenarios {
    ($($name:ident),* $(,)?) => {
        const NAMES: &[&str] = &[$(stringify!($name)),*];
        $(
            #[test]
            fn $name() {
                check(stringify!($name));
            }
        )*
    };
}

scenarios!(
    abort,
    abort_in_forward,
    abort_ready,
    chunked,
    failed_fail,
    failed_prefix,
    failed_recompute,
    hold,
    later,
    load,
    load_cap,
    many,
    mixed,
    order,
    plain,
    preempt,
    preempt_load,
    prefix,
    reject,
    room,
    room_loads,
    zero,
);

/// A known difference. After a failed load the prompt is still on vLLM's list of those under way, so a
/// second load is to leave free what the very same request needs: with few blocks it waits for ever,
/// and who has blocks is in front of everybody. The simulator does not count the request itself.
#[test]
fn retry() {
    let script = Script::read("retry");
    let difference = first_difference(&script).unwrap();
    let lines: Vec<&str> = difference.lines().map(str::trim).collect();
    assert_eq!(
        lines[0], r#"call 19, after step {"number":3}:"#,
        "{difference}"
    );
    let sides = |who: &str| {
        lines
            .iter()
            .find_map(|line| line.strip_prefix(who))
            .unwrap()
    };
    assert_eq!(sides("vLLM       "), r#"build_step {"scheduled":[]}"#);
    assert!(
        sides("simulator  ").starts_with(r#"after_alloc {"blocks":[[5,4,3,2,1]],"external":150"#)
    );
}

#[test]
fn every_scenario_has_a_test() {
    let files = std::fs::read_dir(script::folder()).unwrap();
    let mut names: Vec<String> = files
        .map(|file| file.unwrap().path())
        .filter(|path| path.extension().is_some_and(|kind| kind == "json"))
        .map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned())
        .collect();
    names.sort();
    let mut tested: Vec<&str> = NAMES.iter().copied().chain(["retry"]).collect();
    tested.sort_unstable();
    assert_eq!(names, tested);
}

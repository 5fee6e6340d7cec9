//! Whether two sequences of hook calls are the same.
//!
//! Compared are the names of the hooks in their order, scheduler's and worker's in one sequence, and
//! of each what [`shown`] leaves. Block ids are compared as they are: both engines hand out block 1
//! first, and which block comes when is something that a connector sees.

use kvferry_sim::Call;
use serde_json::{Value, json};

/// A call as it is compared: its hook, and those of its arguments and answers that both sides have.
///
/// Left out are transfer parameters, a plan, and the number of a step (vLLM's connector is not told
/// one); of a report how it failed; and the order in a report, which in vLLM is that of a set.
fn shown(call: &Call) -> String {
    let with = &call.with;
    let sorted = |list: &Value, name: &dyn Fn(&Value) -> Value| {
        let mut names: Vec<Value> = list.as_array().unwrap().iter().map(name).collect();
        names.sort_by_key(Value::to_string);
        Value::from(names)
    };
    let id = |one: &Value| one.clone();
    // In the simulator's trace a received load is an object, in vLLM's its id.
    let received_id = |one: &Value| one.get("request").unwrap_or(one).clone();
    let kept = match call.hook.as_str() {
        "on_new_request" => json!({"request": with["request"], "prompt": with["prompt"]}),
        "build_step" => json!({"scheduled": with["scheduled"]}),
        "on_report" => json!({
            "received": sorted(&with["received"], &received_id),
            "sent": sorted(&with["sent"], &id),
        }),
        "take_report" => {
            let answer = &with["answer"];
            let received = |one: &Value| {
                json!({
                    "request": one["request"], "failed": !one["failure"].is_null(), "blocks": one["failed"],
                })
            };
            json!({
                "received": sorted(&answer["received"], &received),
                "sent": sorted(&answer["sent"], &id),
            })
        }
        _ => with.clone(),
    };
    let whose = if call.rank.is_some() { "worker " } else { "" };
    format!("{whose}{} {kept}", call.hook)
}

/// The calls of one half, with the steps.
pub(crate) fn half(calls: &[Call], worker: bool) -> Vec<Call> {
    let is_marker = |call: &Call| ["step", "asleep"].contains(&call.hook.as_str());
    let of = |call: &&Call| call.rank.is_some() == worker || is_marker(call);
    calls.iter().filter(of).cloned().collect()
}

/// The first difference, with what led to it.
pub(crate) fn difference(vllm: &[Call], simulator: &[Call]) -> Option<String> {
    let vllm: Vec<String> = vllm.iter().map(shown).collect();
    let simulator: Vec<String> = simulator.iter().map(shown).collect();
    let longest = vllm.len().max(simulator.len());
    let at = (0..longest).find(|&at| vllm.get(at) != simulator.get(at))?;
    let step = vllm[..at.min(vllm.len())]
        .iter()
        .rfind(|call| call.starts_with("step "));
    let mut text = format!(
        "call {at}, after {}:\n",
        step.map_or("the start", String::as_str)
    );
    let from = at.saturating_sub(6);
    for call in &vllm[from.min(vllm.len())..at.min(vllm.len())] {
        text += &format!("    both       {call}\n");
    }
    for (who, calls) in [("vLLM     ", &vllm), ("simulator", &simulator)] {
        for call in calls.iter().skip(at).take(4) {
            text += &format!("    {who}  {call}\n");
        }
    }
    Some(text)
}

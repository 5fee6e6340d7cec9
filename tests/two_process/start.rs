//! What a transport list allows, known when the engine starts.

use kvferry_tests::harness::{Case, Child};
use serde_json::Value;

fn start(transports: Option<&str>) -> (bool, String) {
    let mut child = Child::start("start", &(), &[("UCX_TLS", transports)]);
    let answer: Value = child.hear();
    child.finish_well();
    (
        answer["started"].as_bool().unwrap(),
        answer["error"].as_str().unwrap().to_owned(),
    )
}

/// C72: a transport list that cannot carry messages is refused with the reason.
fn c72_a_transport_list_that_cannot_carry_messages_is_refused() {
    let (started, error) = start(Some("cma"));
    assert!(!started);
    assert!(
        error.contains("UCX_TLS") && error.contains("cma"),
        "{error}"
    );
}

/// C121: a host with nothing but tcp starts (that it transfers is `same_bytes_and_counts`).
fn c121_a_tcp_only_host_starts() {
    assert_eq!(start(Some("tcp")), (true, String::new()));
    assert_eq!(start(None), (true, String::new()));
}

/// A process may end with its engines at work: the progress threads leave UCX before UCX's
/// destructors run. Many times, since without that only some ends go wrong.
fn the_end_of_a_process_with_a_running_engine_is_clean() {
    for _ in 0..30 {
        let mut child = Child::start("leave", &(), &[]);
        let _: Value = child.hear();
        child.finish_well();
    }
}

pub(crate) fn cases() -> Vec<Case> {
    vec![
        Case::new(
            "c72_a_transport_list_that_cannot_carry_messages_is_refused",
            c72_a_transport_list_that_cannot_carry_messages_is_refused,
        ),
        Case::new(
            "the_end_of_a_process_with_a_running_engine_is_clean",
            the_end_of_a_process_with_a_running_engine_is_clean,
        ),
        Case::new("c121_a_tcp_only_host_starts", c121_a_tcp_only_host_starts),
    ]
}

//! C98: the directory goes away and comes back. Who is connected does not notice; who is not connects by itself.

use std::net::TcpListener;

use kvferry_tests::harness::{Case, until};
use kvferry_tests::roles::SideChild;
use serde_json::json;

use super::prefill::{HERE, PROMPT, THERE, pair, side};

fn c98_a_directory_that_restarts_is_asked_again() {
    const LEASE_MS: u64 = 5_000;
    let (mut producer, mut known) = pair("served", LEASE_MS);
    let mut late = side("late", true, "served", LEASE_MS);
    let port = producer.directory(true);
    let offer = |producer: &mut SideChild, name: &str, byte| {
        let mut params = producer.prefill(name, PROMPT, &THERE, byte);
        params["remote_port"] = json!(port);
        params
    };
    let params = offer(&mut producer, "first", 1);
    assert_eq!(known.admit("first", PROMPT, &params, &HERE), PROMPT);
    assert_eq!(known.received("first").failure, "");

    assert_eq!(producer.directory(false), port);
    // Connected as it is, it needs nobody to tell it where the producer is.
    let params = offer(&mut producer, "second", 50);
    assert_eq!(known.admit("second", PROMPT, &params, &HERE), PROMPT);
    assert_eq!(known.received("second").failure, "");
    assert_eq!(known.wrong(&HERE, 50), 0);

    // This one is not, and its request waits.
    let params = offer(&mut producer, "third", 90);
    // Whoever asks meanwhile is heard by nobody who can answer.
    let nobody = TcpListener::bind(("127.0.0.1", port)).unwrap();
    late.queue("third", PROMPT, &params);
    drop(nobody.accept().unwrap());
    drop(nobody);
    assert_eq!((producer.connected(), late.connected()), (1, 0));

    assert_eq!(producer.directory(true), port);
    // It takes no step and is told nothing: it connects, and keeps its lease from then on.
    until("a second connection", || producer.connected() == 2);
    until("a renewal", || producer.stats().renewed > 0);
    let stats = producer.stats();
    assert_eq!((stats.released, stats.expired, stats.held), (2, 0, 1));
    assert_eq!(late.admit("third", PROMPT, &params, &HERE), PROMPT);
    assert_eq!(late.received("third").failure, "");
    assert_eq!(late.wrong(&HERE, 90), 0);
    // The other one has not been connected anew.
    assert_eq!(known.connected(), 1);
    for side in [&mut late, &mut known, &mut producer] {
        side.child.finish_well();
    }
}

pub(crate) fn cases() -> Vec<Case> {
    vec![Case::new(
        "c98_a_directory_that_restarts_is_asked_again",
        c98_a_directory_that_restarts_is_asked_again,
    )]
}

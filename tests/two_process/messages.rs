//! Messages between processes: large ones whole, many of them, none while nobody speaks.

use std::time::Duration;

use kvferry_tests::harness::{Case, Child};
use kvferry_tests::roles::{Counted, FloodResult, Layout, Renewal, RenewalResult, Started};
use serde_json::{Value, json};

const SMALL: Layout = Layout {
    layers: 1,
    blocks: 4,
    block_bytes: 64,
};

/// C32: a renewal that names 1,000 leases is larger than a segment and arrives whole, and so does
/// the answer. `segment` makes tcp's segments small, as its default is.
fn c32_a_renewal_naming_a_thousand_leases(segment: Option<&'static str>) {
    let environment = [
        ("UCX_TLS", Some("tcp")),
        ("UCX_TCP_TX_SEG_SIZE", segment),
        ("UCX_TCP_RX_SEG_SIZE", segment),
    ];
    let mut producer = Child::start("producer", &SMALL, &environment);
    let started: Started = producer.hear();
    assert_eq!(producer.ask::<Value>("lease 1000"), json!({ "held": 1000 }));
    assert_eq!(producer.ask::<Value>("revoke 500"), json!({ "held": 999 }));
    let renewal = Renewal {
        from: started.description,
        instance: started.instance,
        epochs: (1, 1003),
    };
    let mut consumer = Child::start("renew", &renewal, &environment);
    let result: RenewalResult = consumer.hear();
    assert!(result.bytes > 8 * 1003, "{}", result.bytes);
    assert_eq!(result.gone, [(500, "revoked".to_owned())]);
    assert_eq!(result.unknown, [1001, 1002, 1003]);
    consumer.finish_well();
    producer.finish_well();
}

/// C60: 100,000 messages with the blocking wait on, none lost, none out of order; then an idle
/// engine with a connected peer uses under 1 % of a core.
fn c60_a_hundred_thousand_messages_and_an_idle_engine(transports: Option<&'static str>) {
    let environment = [("UCX_TLS", transports)];
    let mut producer = Child::start("producer", &SMALL, &environment);
    let started: Started = producer.hear();
    let mut consumer = Child::start("flood", &(started.description, 100_000_u64), &environment);
    assert_eq!(
        consumer.hear::<FloodResult>(),
        FloodResult { confirmed: 100_000 }
    );
    let before: Counted = producer.ask("count");
    assert_eq!((before.in_order, before.out_of_order), (100_000, 0));
    let idle = Duration::from_secs(5);
    assert!(producer.is_quiet_for(idle));
    let after: Counted = producer.ask("count");
    let used = after.cpu_ms - before.cpu_ms;
    assert!(
        u128::from(used) * 100 <= idle.as_millis(),
        "{used} ms of {idle:?}"
    );
    assert!(
        after.sleeps > before.sleeps,
        "the wait is not a blocking one"
    );
    consumer.finish_well();
    producer.finish_well();
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = vec![];
    for (name, segment) in [("raised_segments", None), ("small_segments", Some("8K"))] {
        cases.push(Case::new(
            format!("c32_a_renewal_naming_a_thousand_leases::{name}"),
            move || c32_a_renewal_naming_a_thousand_leases(segment),
        ));
    }
    for (name, transports) in super::reads::TRANSPORTS {
        cases.push(Case::new(
            format!("c60_a_hundred_thousand_messages_and_an_idle_engine::{name}"),
            move || c60_a_hundred_thousand_messages_and_an_idle_engine(transports),
        ));
    }
    cases
}

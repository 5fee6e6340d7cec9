//! Tests between two real processes over real UCX. Run once per UCX generation.

#![allow(missing_docs, clippy::unwrap_used)]

mod ends;
mod messages;
mod mixed;
mod order;
mod peers;
mod reads;
mod start;
mod support;
mod withdraw;

fn main() -> std::process::ExitCode {
    let mut cases = reads::cases();
    cases.extend(messages::cases());
    cases.extend(start::cases());
    cases.extend(ends::cases());
    cases.extend(mixed::cases());
    cases.extend(order::cases());
    cases.extend(peers::cases());
    cases.extend(withdraw::cases());
    kvferry_tests::harness::main(cases)
}

//! Tests between two real processes over real UCX. Run once per UCX generation.

#![allow(missing_docs, clippy::unwrap_used)]

mod ends;
mod messages;
mod reads;
mod start;
mod support;
mod withdraw;

fn main() -> std::process::ExitCode {
    let mut cases = reads::cases();
    cases.extend(messages::cases());
    cases.extend(start::cases());
    cases.extend(ends::cases());
    cases.extend(withdraw::cases());
    kvferry_tests::harness::main(cases)
}

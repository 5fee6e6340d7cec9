//! Tests between two real processes over real UCX. Run once per UCX generation.

#![allow(missing_docs, clippy::unwrap_used)]

mod memory;
mod messages;
mod reads;
mod start;

fn main() -> std::process::ExitCode {
    let mut cases = reads::cases();
    cases.extend(messages::cases());
    cases.extend(memory::cases());
    cases.extend(start::cases());
    kvferry_tests::harness::main(cases)
}

//! Tests between two real processes over real UCX. Run once per UCX generation.

#![allow(missing_docs, clippy::unwrap_used)]

mod churn;
mod ends;
mod idle;
mod memory;
mod messages;
mod reads;
mod start;
mod transports;
mod usable;

fn main() -> std::process::ExitCode {
    let mut cases = reads::cases();
    cases.extend(messages::cases());
    cases.extend(memory::cases());
    cases.extend(start::cases());
    cases.extend(ends::cases());
    cases.extend(usable::cases());
    cases.extend(churn::cases());
    cases.extend(idle::cases());
    cases.extend(transports::cases());
    kvferry_tests::harness::main(cases)
}

//! Tests between two real processes over real UCX. Run once per UCX generation.

#![allow(missing_docs, clippy::unwrap_used)]

mod churn;
mod corpus;
mod directory;
mod ends;
mod idle;
mod intruder;
mod killed;
mod lives;
mod memory;
mod messages;
mod mixed;
mod nearly_right;
mod order;
mod peers;
mod prefill;
mod reads;
mod replaced;
mod shutdown;
mod simulated;
mod standstill;
mod start;
mod steady;
mod support;
mod told;
mod transports;
mod usable;
mod withdraw;

#[global_allocator]
static ALLOCATOR: kvferry_tests::counting::Counting = kvferry_tests::counting::Counting;

fn main() -> std::process::ExitCode {
    let mut cases = reads::cases();
    cases.extend(messages::cases());
    cases.extend(memory::cases());
    cases.extend(start::cases());
    cases.extend(ends::cases());
    cases.extend(shutdown::cases());
    cases.extend(usable::cases());
    cases.extend(churn::cases());
    cases.extend(idle::cases());
    cases.extend(transports::cases());
    cases.extend(mixed::cases());
    cases.extend(order::cases());
    cases.extend(peers::cases());
    cases.extend(standstill::cases());
    cases.extend(prefill::cases());
    cases.extend(steady::cases());
    cases.extend(directory::cases());
    cases.extend(told::cases());
    cases.extend(simulated::cases());
    cases.extend(replaced::cases());
    cases.extend(killed::cases());
    cases.extend(lives::cases());
    cases.extend(withdraw::cases());
    cases.extend(corpus::cases());
    cases.extend(nearly_right::cases());
    kvferry_tests::harness::main(cases)
}

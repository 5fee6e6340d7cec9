//! Scenarios: what a seed stands for.

use kvferry_engine::{Fault, FaultRates};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};

#[derive(Clone, Debug)]
pub(super) enum Step {
    /// Reads this many blocks into destination 0 or 1, with a deadline in milliseconds.
    Read {
        destination: usize,
        blocks: u32,
        timeout: u64,
    },
    /// Cancels the transfer of this number, modulo their count.
    Cancel(usize),
    /// Waits for one, likewise.
    Wait(usize),
    /// Sends a message with this many bytes behind its number.
    Say(usize),
    Disconnect,
    Connect,
    /// The producer connects to the consumer, perhaps while that connects to it.
    ConnectBack,
    /// Gives destination 1 up, with a limit in milliseconds, or drops it.
    Deregister(Option<u64>),
    /// Stalls the consumer's fabric or the producer's.
    Stall(bool),
    Release,
    /// Turns the faults off or on.
    Faults(bool),
}

#[derive(Clone, Debug)]
pub(super) struct Scenario {
    pub(super) consumer: FaultRates,
    pub(super) producer: FaultRates,
    pub(super) steps: Vec<Step>,
    pub(super) by_shutdown: bool,
}

fn rates() -> impl Strategy<Value = FaultRates> {
    // Silent corruption, and what only the end of the engine ends, have tests of their own.
    let loud: Vec<Fault> = Fault::ALL
        .iter()
        .copied()
        .filter(|fault| {
            !matches!(
                fault,
                Fault::SegmentCorrupted
                    | Fault::RegisterRefused
                    | Fault::CopyStuck
                    | Fault::ResetStuck
            )
        })
        .collect();
    let some = (
        prop::sample::select(loud),
        prop_oneof![3 => 1..40_u16, 1 => 40..300_u16],
    );
    let delay = prop_oneof![1..20_u32, 1..5_000_u32];
    let faults = prop::collection::vec(some, 1..9);
    (faults, delay, 1..64_u32, any::<bool>()).prop_map(|(faults, delay, window, one_report)| {
        let mut rates = FaultRates::none();
        for (fault, rate) in faults {
            rates = rates.with(fault, rate);
        }
        rates.max_delay = delay;
        rates.reorder_window = window;
        rates.one_report = one_report;
        rates
    })
}

fn step() -> impl Strategy<Value = Step> {
    let limit = prop_oneof![Just(None), (1..60_u64).prop_map(Some)];
    let read = (0..2_usize, 1..24_u32, prop_oneof![1..40_u64, 200..300_u64]);
    prop_oneof![
        12 => read.prop_map(|(destination, blocks, timeout)| Step::Read { destination, blocks, timeout }),
        3 => any::<usize>().prop_map(Step::Cancel),
        2 => any::<usize>().prop_map(Step::Wait),
        3 => (0..2000_usize).prop_map(Step::Say),
        1 => Just(Step::Disconnect),
        2 => Just(Step::Connect),
        1 => Just(Step::ConnectBack),
        1 => limit.prop_map(Step::Deregister),
        1 => any::<bool>().prop_map(Step::Stall),
        1 => Just(Step::Release),
        1 => any::<bool>().prop_map(Step::Faults),
    ]
}

fn scenario() -> impl Strategy<Value = Scenario> {
    let steps = prop::collection::vec(step(), 8..48);
    (rates(), rates(), steps, any::<bool>()).prop_map(|(consumer, producer, steps, by_shutdown)| {
        Scenario {
            consumer,
            producer,
            steps,
            by_shutdown,
        }
    })
}

impl Scenario {
    pub(super) fn of(seed: u64) -> Self {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
        let mut runner = TestRunner::new_with_rng(ProptestConfig::default(), rng);
        scenario().new_tree(&mut runner).unwrap().current()
    }
}

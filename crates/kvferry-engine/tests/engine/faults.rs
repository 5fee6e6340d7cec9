//! Two engines over fabrics that lose, delay, reorder, repeat, garble, fail and stall: whatever the
//! schedule, every transfer has one outcome in time and quiesces, memory is quiet when it is handed
//! back, and a success means the right bytes.
//!
//! A case is a seed. `PROPTEST_CASES` sets how many are run; one that failed prints its seed, and
//! `KVFERRY_FAULT_SEED` runs it again, alone.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvferry_engine::{
    BlockPair, Engine, EngineConfig, Fault, FaultControl, FaultFabric, FaultRates, HostPool, Lane,
    LaneChoice, LoopbackFabric, MemoryRegion, Peer, PeerId, Region, Replies, Sender, Service,
    Table, TableSpec, Transfer, TransferError, UcxFabric,
};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};

use crate::support::*;

/// What a machine with other things to do may add to any deadline.
const SLACK: Duration = Duration::from_secs(5);
const BLOCK: u64 = 1500;
/// Blocks of a destination region; no two reads of a case share one.
const BLOCKS: u32 = 512;
const SOURCES: u32 = 16;
/// Before a read, and afterwards when somebody else has the memory.
const UNTOUCHED: u8 = 0xEE;
const SENTINEL: u8 = 0x5A;

#[derive(Clone, Debug)]
enum Step {
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
struct Scenario {
    consumer: FaultRates,
    producer: FaultRates,
    steps: Vec<Step>,
    by_shutdown: bool,
}

fn rates() -> impl Strategy<Value = FaultRates> {
    // Silent corruption has tests of its own.
    let loud: Vec<Fault> = Fault::ALL
        .iter()
        .copied()
        .filter(|fault| !matches!(fault, Fault::SegmentCorrupted | Fault::RegisterRefused))
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
    fn of(seed: u64) -> Self {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
        let mut runner = TestRunner::new_with_rng(ProptestConfig::default(), rng);
        scenario().new_tree(&mut runner).unwrap().current()
    }
}

fn hasty(name: &str) -> EngineConfig {
    let mut config = config(name);
    config.ping_interval = Duration::from_millis(20);
    config.suspect_after = Duration::from_millis(200);
    config.dead_after = Duration::from_millis(200);
    config.connect_timeout = Duration::from_millis(200);
    config.transfer_timeout = Duration::from_millis(300);
    config
}

type Heard = HashMap<PeerId, Vec<(u64, u64)>>;

/// What an engine was told, by connection: whose message it is, and its number. The producer's
/// tells it back.
#[derive(Clone, Default)]
struct Diary {
    heard: Arc<Mutex<Heard>>,
    echoes: bool,
}

const CHANNEL: u16 = 7;

impl Service for Diary {
    fn on_message(&mut self, from: Sender, bytes: &[u8], replies: &mut Replies) {
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        let entry = (number(0), number(8));
        let mut heard = self.heard.lock().unwrap();
        heard.entry(from.peer).or_default().push(entry);
        if self.echoes {
            replies.send(from.peer, CHANNEL, bytes.to_vec());
        }
    }

    fn on_tick(&mut self, _: Instant, _: &mut Replies) -> Option<Instant> {
        None
    }
}

fn faulty(kind: &Kind, name: &str, control: &FaultControl, diary: &Diary) -> Engine {
    let builder = Engine::builder(hasty(name)).service(CHANNEL, Box::new(diary.clone()));
    let control = control.clone();
    match kind {
        Kind::Loopback(network) => {
            let network = network.clone();
            builder
                .start_on(move || FaultFabric::new(LoopbackFabric::new(&network, 512)?, &control))
        }
        Kind::Ucx => builder.start_on(move || FaultFabric::new(UcxFabric::new(true)?, &control)),
    }
    .unwrap()
}

/// A registered destination and how much of it has been given to reads.
struct Destination {
    memory: MemoryRegion,
    region: Option<Region>,
    table: Table,
    used: u32,
}

impl Destination {
    fn new(engine: &Engine) -> Self {
        let pool = HostPool::new((BLOCK * u64::from(BLOCKS)) as usize).unwrap();
        let memory = pool.region().unwrap();
        memory.fill(0, memory.bytes(), UNTOUCHED).unwrap();
        let region = engine.register(&memory).unwrap();
        let table = engine
            .add_table(&region, TableSpec::dense(BLOCK, BLOCKS))
            .unwrap();
        Self {
            memory,
            region: Some(region),
            table,
            used: 0,
        }
    }
}

struct Flight {
    transfer: Transfer,
    started: Instant,
    timeout: Duration,
    memory: MemoryRegion,
    pairs: Vec<BlockPair>,
    /// It has quiesced, was looked at, and its memory has a new owner.
    over: bool,
}

impl Flight {
    fn blocks(&self) -> impl Iterator<Item = (BlockPair, Vec<u8>)> + '_ {
        self.pairs.iter().map(|&pair| {
            let mut bytes = vec![0; BLOCK as usize];
            let at = u64::from(pair.local) * BLOCK;
            self.memory.read_at(at, &mut bytes).unwrap();
            (pair, bytes)
        })
    }

    fn is_right(&self) -> bool {
        self.blocks().all(|(pair, bytes)| {
            let expected = (0..BLOCK).map(|byte| pattern(0, pair.remote, byte));
            bytes.into_iter().eq(expected)
        })
    }
}

struct Case {
    lane: Lane,
    producer: Side,
    consumer: Engine,
    producer_control: FaultControl,
    control: FaultControl,
    destinations: Vec<Destination>,
    peer: Option<Peer>,
    flights: Vec<Flight>,
    /// Successes whose bytes the verifier refused.
    wrong: u64,
    diary: Diary,
    producer_diary: Diary,
    /// Messages sent on each of our connections.
    said: HashMap<PeerId, u64>,
}

impl Case {
    fn new(kind: &Kind, lane: Lane, seed: u64) -> Self {
        let producer_control = FaultControl::new(!seed, FaultRates::none()).unwrap();
        let control = FaultControl::new(seed, FaultRates::none()).unwrap();
        let diary = Diary::default();
        let producer_diary = Diary {
            echoes: true,
            ..Diary::default()
        };
        let engine = faulty(kind, "producer", &producer_control, &producer_diary);
        let producer = side(engine, 1, SOURCES, BLOCK, 0);
        producer.fill();
        let consumer = faulty(kind, "consumer", &control, &diary);
        let destinations = vec![Destination::new(&consumer), Destination::new(&consumer)];
        let mut case = Self {
            lane,
            producer,
            consumer,
            producer_control,
            control,
            destinations,
            peer: None,
            flights: Vec::new(),
            wrong: 0,
            diary,
            producer_diary,
            said: HashMap::new(),
        };
        case.connect();
        assert!(case.peer.is_some(), "nothing is wrong yet");
        case
    }

    fn set_rates(&self, consumer: FaultRates, producer: FaultRates) {
        self.control.set_rates(consumer);
        self.producer_control.set_rates(producer);
    }

    fn connect(&mut self) {
        let config = self.consumer.config();
        let limit = config.connect_timeout + SLACK;
        let started = Instant::now();
        let description = self.producer.engine.describe().unwrap();
        let result = self
            .consumer
            .connect(description, LaneChoice::Pinned(self.lane));
        assert!(started.elapsed() < limit, "a connect took too long");
        if let Ok(peer) = result {
            self.peer = Some(peer);
        }
    }

    /// Both sides at once, and neither waits longer than it may.
    fn connect_back(&mut self) {
        let description = self.consumer.describe().unwrap();
        let producer = self.producer.engine.clone();
        let back = std::thread::spawn(move || {
            let started = Instant::now();
            drop(producer.connect(description, LaneChoice::Pinned(Lane::Served)));
            let limit = producer.config().connect_timeout + SLACK;
            assert!(started.elapsed() < limit, "a connect took too long");
        });
        self.connect();
        back.join().unwrap();
    }

    fn read(&mut self, destination: usize, blocks: u32, timeout: Duration) {
        if self.peer.as_ref().is_some_and(|peer| peer.gone().is_some()) {
            self.connect();
        }
        let Some(peer) = &self.peer else {
            return;
        };
        let destination = &mut self.destinations[destination];
        let first = destination.used;
        if first + blocks > BLOCKS {
            return;
        }
        // A gap after every third, so that some are merged and some are not.
        let pairs: Vec<BlockPair> = (0..blocks)
            .map(|n| BlockPair::new(first + n, (first + n + n / 3) % SOURCES))
            .collect();
        let tables: Vec<_> = std::iter::once(destination.table.clone())
            .zip(peer.tables())
            .collect();
        let started = Instant::now();
        // A lost peer and a region that was given up refuse: no transfer then.
        if let Ok(transfer) = peer.read_within(&tables, &pairs, timeout) {
            destination.used += blocks;
            self.flights.push(Flight {
                transfer,
                started,
                timeout,
                memory: destination.memory.clone(),
                pairs,
                over: false,
            });
        }
    }

    fn say(&mut self, bytes: usize) {
        let Some(peer) = &self.peer else {
            return;
        };
        let connections = self.said.len() as u64;
        // The upper half names the connection.
        let next = self.said.entry(peer.id()).or_insert(connections << 32);
        let mut message = (*next >> 32).to_le_bytes().to_vec();
        message.extend_from_slice(&(*next & 0xFFFF_FFFF).to_le_bytes());
        message.resize(16 + bytes, 0);
        // A peer that is gone is told nothing.
        if peer.send(CHANNEL, message).is_ok() {
            *next += 1;
        }
    }

    /// Waits a moment for the echo of the last message.
    fn hears_the_echo(&self) -> bool {
        let Some(peer) = &self.peer else {
            return false;
        };
        let Some(said) = self.said.get(&peer.id()) else {
            return false;
        };
        let Some(number) = (*said & 0xFFFF_FFFF).checked_sub(1) else {
            return false;
        };
        let last = (*said >> 32, number);
        let deadline = Instant::now() + Duration::from_millis(300);
        while peer.gone().is_none() && Instant::now() < deadline {
            let heard = self.diary.heard.lock().unwrap();
            if heard.get(&peer.id()).and_then(|heard| heard.last()) == Some(&last) {
                return true;
            }
            drop(heard);
            std::thread::yield_now();
        }
        false
    }

    /// Messages of a connection arrive in order and without a gap, or the connection ends.
    fn check_diaries(&self) {
        for diary in [&self.diary, &self.producer_diary] {
            for heard in diary.heard.lock().unwrap().values() {
                let connection = heard[0].0;
                let expected = (0..).map(|number| (connection, number));
                assert!(
                    heard.iter().copied().eq(expected.take(heard.len())),
                    "{heard:?}"
                );
            }
        }
    }

    /// Waits for the two events of a transfer and passes its memory on.
    fn finish(&mut self, number: usize) {
        let flight = &mut self.flights[number];
        if std::mem::replace(&mut flight.over, true) {
            return;
        }
        let limit = flight.timeout + SLACK;
        while flight.transfer.poll_outcome().is_none() {
            let waited = flight.started.elapsed();
            assert!(waited < limit, "transfer {number}: no outcome: {waited:?}");
            let _ = flight.transfer.wait(Duration::from_millis(1));
        }
        let outcome = flight.transfer.poll_outcome().unwrap();
        let after = flight.transfer.wait(limit);
        let after = after.unwrap_or_else(|| panic!("transfer {number} does not quiesce"));
        assert_eq!(outcome.is_ok(), after.is_ok(), "two outcomes");
        match &after {
            Ok(report) => {
                assert_eq!(report.bytes, flight.pairs.len() as u64 * BLOCK);
                self.wrong += u64::from(!flight.is_right());
            }
            Err(TransferError::Memory(error) | TransferError::Request(error)) => {
                panic!("transfer {number}: {error}");
            }
            Err(_) => {}
        }
        for pair in &flight.pairs {
            let at = u64::from(pair.local) * BLOCK;
            flight.memory.fill(at, BLOCK, SENTINEL).unwrap();
        }
    }

    fn deregister(&mut self, limit: Option<u64>) {
        let Some(region) = self.destinations[1].region.take() else {
            return;
        };
        match limit {
            None => drop(region),
            Some(limit) => {
                let limit = Duration::from_millis(limit);
                let started = Instant::now();
                let given_up = region.deregister(limit).is_ok();
                assert!(started.elapsed() < limit + SLACK);
                if given_up {
                    self.take_over();
                }
            }
        }
    }

    /// Destination 1 was given up: nothing is in flight to it, and it has a new owner at once.
    fn take_over(&mut self) {
        let memory = self.destinations[1].memory.clone();
        for number in 0..self.flights.len() {
            if self.flights[number].memory.address() == memory.address() {
                // Its holds go first, then it says so: a moment, not its deadline.
                let flight = &self.flights[number];
                until("quiet", || flight.transfer.is_quiesced());
                self.finish(number);
            }
        }
        memory.fill(0, memory.bytes(), SENTINEL).unwrap();
    }

    fn finish_all(&mut self) {
        for number in 0..self.flights.len() {
            self.finish(number);
        }
    }

    fn step(&mut self, step: &Step, scenario: &Scenario) {
        let count = self.flights.len();
        match *step {
            Step::Read {
                destination,
                blocks,
                timeout,
            } => self.read(destination, blocks, Duration::from_millis(timeout)),
            Step::Cancel(n) if count > 0 => self.flights[n % count].transfer.cancel(),
            Step::Wait(n) if count > 0 => self.finish(n % count),
            Step::Cancel(_) | Step::Wait(_) => {}
            Step::Say(bytes) => self.say(bytes),
            Step::Disconnect => {
                if let Some(peer) = self.peer.take() {
                    peer.disconnect();
                }
            }
            Step::Connect => self.connect(),
            Step::ConnectBack => self.connect_back(),
            Step::Deregister(limit) => self.deregister(limit),
            Step::Stall(true) => self.control.stall(),
            Step::Stall(false) => self.producer_control.stall(),
            Step::Release => self.release(),
            Step::Faults(true) => self.set_rates(scenario.consumer, scenario.producer),
            Step::Faults(false) => self.set_rates(FaultRates::none(), FaultRates::none()),
        }
    }

    fn release(&self) {
        self.control.release();
        self.producer_control.release();
    }

    /// When nothing goes wrong any more, reads succeed and messages are answered again, soon.
    fn recover(&mut self) {
        self.release();
        self.set_rates(FaultRates::none(), FaultRates::none());
        self.destinations[0] = Destination::new(&self.consumer);
        // A native read that runs late would close the endpoint under it.
        let timeout = match self.lane {
            Lane::Native => SLACK,
            _ => Duration::from_millis(300),
        };
        let deadline = Instant::now() + 2 * SLACK;
        loop {
            assert!(Instant::now() < deadline, "no recovery");
            if self.peer.as_ref().is_none_or(|peer| peer.gone().is_some()) {
                self.connect();
            }
            let before = self.flights.len();
            self.read(0, 1, timeout);
            if before < self.flights.len() {
                let wrong = self.wrong;
                self.finish(before);
                assert_eq!(self.wrong, wrong);
                let outcome = self.flights[before].transfer.poll_outcome();
                self.say(0);
                if outcome.is_some_and(|outcome| outcome.is_ok()) && self.hears_the_echo() {
                    return;
                }
            }
        }
    }

    fn injected(&self, fault: Fault) -> u64 {
        self.control.injected(fault) + self.producer_control.injected(fault)
    }

    /// Ends everything and checks what must be true then.
    fn end(mut self, by_shutdown: bool) {
        if !by_shutdown {
            self.finish_all();
            until("quarantine is empty", || {
                let counters = self.consumer.counters();
                (counters.quarantined_bytes, counters.quarantined_regions) == (0, 0)
            });
            for region in self.destinations.iter().flat_map(|d| &d.region) {
                assert_eq!(region.operations(), 0);
            }
            self.recover();
        }
        for engine in [&self.consumer, &self.producer.engine] {
            let (limit, started) = (Duration::from_millis(200), Instant::now());
            engine.shutdown(limit).unwrap();
            assert!(started.elapsed() < limit + SLACK, "a late shutdown");
        }
        // After a shutdown too, everything has its outcome and its quiet, at once.
        assert!(self.flights.iter().all(|f| f.transfer.is_quiesced()));
        self.finish_all();
        let counters = self.consumer.counters();
        assert_eq!(counters.quarantined_bytes, 0);
        assert_eq!(counters.quarantined_regions, 0);
        let ended = counters.transfers_succeeded + counters.transfers_failed;
        assert_eq!(counters.transfers_started, ended, "one outcome each");
        for region in self.destinations.iter().flat_map(|d| &d.region) {
            assert_eq!(region.operations(), 0);
        }
        assert_eq!(self.producer._region.operations(), 0);
        // The memory of every transfer belongs to somebody else since its end.
        for (number, flight) in self.flights.iter().enumerate() {
            for (pair, bytes) in flight.blocks() {
                assert!(
                    bytes.iter().all(|&byte| byte == SENTINEL),
                    "transfer {number} wrote block {} after its end",
                    pair.local
                );
            }
        }
        // A header that was changed may put one message in the place of another.
        if self.injected(Fault::SegmentGarbled) == 0 {
            self.check_diaries();
        }
        let lies = self.injected(Fault::ReadEmpty);
        assert!(
            self.wrong <= lies,
            "{} successes with wrong bytes, {lies} reads lied",
            self.wrong
        );
    }
}

fn run(kind: Kind, lane: Lane, seed: u64) {
    let scenario = Scenario::of(seed);
    let mut case = Case::new(&kind, lane, seed);
    case.set_rates(scenario.consumer, scenario.producer);
    for step in &scenario.steps {
        case.step(step, &scenario);
    }
    case.end(scenario.by_shutdown);
}

/// Cases of a test where `PROPTEST_CASES` is not set, over the two lanes together.
const CASES: u64 = 48;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{name}={text:?}: a number is expected")),
    )
}

/// Runs the cases of a lane, a few at a time: most of their time is spent waiting.
fn run_all(kind: impl Fn() -> Kind + Sync, lane: Lane, share: u64, test: &str) {
    let cases = number("PROPTEST_CASES").unwrap_or(CASES).div_ceil(share);
    let only = number("KVFERRY_FAULT_SEED");
    let next = AtomicU64::new(0);
    let work = || {
        loop {
            let n = next.fetch_add(1, Ordering::Relaxed);
            let seed = match only {
                Some(seed) if n == 0 => seed,
                None if n < cases => n,
                _ => return,
            };
            let result = catch_unwind(AssertUnwindSafe(|| run(kind(), lane, seed)));
            if let Err(panic) = result {
                eprintln!(
                    "seed {seed} failed over the {lane} lane: {:#?}\nrun it again with: \
                     KVFERRY_FAULT_SEED={seed} cargo test -p kvferry-engine --test engine {test}",
                    Scenario::of(seed)
                );
                resume_unwind(panic);
            }
        }
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..4).map(|_| scope.spawn(work)).collect();
        for worker in workers {
            if let Err(panic) = worker.join() {
                resume_unwind(panic);
            }
        }
    });
}

/// A success that lies is found out by comparing bytes, each time.
#[test]
fn what_is_silently_wrong_is_noticed_by_the_verifier() {
    for (lane, fault) in [
        (Lane::Native, Fault::ReadEmpty),
        (Lane::Served, Fault::SegmentCorrupted),
    ] {
        let mut case = Case::new(&loopback(), lane, 1);
        case.set_rates(FaultRates::none().with(fault, 1000), FaultRates::none());
        for blocks in 1..9 {
            case.read(0, blocks, PATIENCE);
        }
        case.finish_all();
        let counters = case.consumer.counters();
        assert_eq!(counters.transfers_succeeded, 8);
        assert_eq!(case.wrong, 8, "{fault:?}");
        case.recover();
        assert_eq!(case.wrong, 8);
    }
}

/// Operations that never complete: the outcome comes by the deadline, quiet with the endpoint's end,
/// and the peer can be connected anew.
#[test]
fn reads_that_never_complete_end_with_the_endpoint() {
    for kind in kinds() {
        let mut case = Case::new(&kind, Lane::Native, 2);
        match kind {
            Kind::Loopback(_) => {
                let stuck = FaultRates::none().with(Fault::ReadStuck, 1000);
                case.set_rates(stuck, FaultRates::none());
            }
            // Reads that UCX does not know of: see `any_schedule_over_ucx`.
            Kind::Ucx => case.control.stall(),
        }
        for blocks in 1..9 {
            case.read(0, blocks, Duration::from_millis(20));
        }
        for flight in &case.flights {
            let error = flight.transfer.wait(PATIENCE).unwrap().unwrap_err();
            assert!(
                matches!(
                    error,
                    TransferError::Stalled { .. } | TransferError::PeerLost(_)
                ),
                "{error}"
            );
        }
        assert!(case.peer.as_ref().unwrap().gone().is_some());
        case.end(false);
    }
}

/// A fabric that stands still: deadlines are kept, memory is quiet, and its release heals.
#[test]
fn a_stall_of_either_side_costs_its_transfers_and_nothing_else() {
    for lane in [Lane::Served, Lane::Native] {
        for ours in [true, false] {
            let mut case = Case::new(&loopback(), lane, 3);
            let side = if ours {
                &case.control
            } else {
                &case.producer_control
            };
            side.stall();
            case.read(0, 8, Duration::from_millis(20));
            case.read(1, 8, Duration::from_millis(300));
            case.finish_all();
            // One-sided reads need no thread of the producer's.
            let expected = if ours || lane == Lane::Served { 2 } else { 0 };
            assert_eq!(case.consumer.counters().transfers_failed, expected);
            case.end(false);
        }
    }
}

#[test]
fn any_schedule_over_the_served_lane() {
    run_all(
        loopback,
        Lane::Served,
        2,
        "any_schedule_over_the_served_lane",
    );
}

#[test]
fn any_schedule_over_the_native_lane() {
    run_all(
        loopback,
        Lane::Native,
        2,
        "any_schedule_over_the_native_lane",
    );
}

/// The served lane only: UCX 1.13 ends the process of a producer whose consumer closes an endpoint
/// in the middle of an emulated read.
#[test]
fn any_schedule_over_ucx() {
    run_all(|| Kind::Ucx, Lane::Served, 6, "any_schedule_over_ucx");
}

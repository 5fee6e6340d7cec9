//! One case: what its steps do, and what must be true at its end.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use kvferry_engine::{
    BlockPair, Engine, Fault, FaultControl, FaultRates, Lane, LaneChoice, Peer, PeerId,
    TransferError,
};

use super::parts::{BLOCK, BLOCKS, CHANNEL, Destination, Diary, Flight, SENTINEL, SOURCES, faulty};
use super::scenario::{Scenario, Step};
use crate::support::*;

/// What a machine with other things to do may add to any deadline.
const SLACK: Duration = Duration::from_secs(5);

pub(super) struct Case {
    lane: Lane,
    producer: Side,
    pub(super) consumer: Engine,
    pub(super) producer_control: FaultControl,
    pub(super) control: FaultControl,
    destinations: Vec<Destination>,
    pub(super) peer: Option<Peer>,
    pub(super) flights: Vec<Flight>,
    /// Successes whose bytes the verifier refused.
    pub(super) wrong: u64,
    diary: Diary,
    producer_diary: Diary,
    /// Messages sent on each of our connections.
    said: HashMap<PeerId, u64>,
}

impl Case {
    pub(super) fn new(kind: &Kind, lane: Lane, seed: u64) -> Self {
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

    pub(super) fn set_rates(&self, consumer: FaultRates, producer: FaultRates) {
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

    pub(super) fn read(&mut self, destination: usize, blocks: u32, timeout: Duration) {
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

    pub(super) fn finish_all(&mut self) {
        for number in 0..self.flights.len() {
            self.finish(number);
        }
    }

    pub(super) fn step(&mut self, step: &Step, scenario: &Scenario) {
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
    pub(super) fn recover(&mut self) {
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
            // A suspect peer fails reads at once, without end; it is heard again or lost.
            if let Some(peer) = &self.peer {
                until("a sign", || !peer.is_suspect() || peer.gone().is_some());
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
    pub(super) fn end(mut self, by_shutdown: bool) {
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
        let lies = self.injected(Fault::ReadEmpty) + self.injected(Fault::CopyEmpty);
        assert!(
            self.wrong <= lies,
            "{} successes with wrong bytes, {lies} reads lied",
            self.wrong
        );
    }
}

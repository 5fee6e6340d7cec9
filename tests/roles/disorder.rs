//! Two engines in one process, whose regions, connections and reads come and go in random order,
//! made for a tool that watches every access, such as valgrind.
//!
//! Most memory is from the heap and given back at the first moment at which the engine allows it:
//! whatever still touches it then is an access to freed memory.

mod side;

use std::time::{Duration, Instant};

use kvferry_engine::{BlockPair, Peer, ReadError, RemoteTable, Table, Transfer, TransferError};
use serde::{Deserialize, Serialize};
use serde_json::json;

use self::side::{Piece, Side};
use super::{Packed, connect};
use crate::harness::{PATIENCE, requests, say};
use crate::pattern::byte;
use crate::random::Random;

/// What to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Disorder {
    /// Over which lane.
    pub lane: String,
    /// The same seed, the same steps.
    pub seed: u64,
    /// How many steps for each request.
    pub steps: u32,
    /// Whether the producer may give up regions that a peer may be reading. Not where reads are
    /// emulated by UCX: it reads whatever address it is sent.
    pub withdraw: bool,
    /// Whether all of the producer's memory is pools, as only those can be mapped.
    pub pools: bool,
}

/// How reads ended.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disordered {
    /// Succeeded; what nobody else wrote was compared.
    pub read: u64,
    /// Blocks that were compared.
    pub compared: u64,
    /// Cancelled.
    pub cancelled: u64,
    /// Refused, before or after they were started, for a table that is gone.
    pub refused: u64,
    /// Ended by the end of their connection or of the engine.
    pub lost: u64,
    /// Handles dropped in flight.
    pub dropped: u64,
    /// Regions that were in use when they were to be deregistered.
    pub busy: u64,
    /// Regions made.
    pub regions: u64,
}

/// A read in flight.
struct Flight {
    transfer: Transfer,
    /// The piece that it reads into, and the tables in there.
    piece: u32,
    tables: Vec<(usize, RemoteTable)>,
    pairs: Vec<BlockPair>,
}

struct Run<'a> {
    plan: &'a Disorder,
    random: Random,
    producer: Side,
    consumer: Side,
    peer: Option<Peer>,
    /// Tables of peers and regions that may be gone.
    stale: Vec<(Table, RemoteTable)>,
    flights: Vec<Flight>,
    result: Disordered,
}

pub(super) fn run(plan: &Disorder) {
    let mut run = Run {
        plan,
        random: Random::new(plan.seed),
        producer: Side::start("producer"),
        consumer: Side::start("consumer"),
        peer: None,
        stale: Vec::new(),
        flights: Vec::new(),
        result: Disordered::default(),
    };
    for request in requests() {
        if request == "end" {
            return run.end();
        }
        for _ in 0..plan.steps {
            run.step();
        }
        say(&json!(run.result));
    }
}

impl Run<'_> {
    fn step(&mut self) {
        match self.random.below(20) {
            0..2 => self.add(true),
            2..4 => self.add(false),
            4 => self.connect(),
            5..11 => drop(self.read()),
            11 => self.read_stale(),
            12 => self.cancel(),
            13 => self.drop_handle(),
            14..17 => self.finish_one(),
            17 if self.plan.withdraw => self.give_up(true),
            17 => self.give_up(false),
            18 => self.give_up_in_use(),
            _ if self.random.once_in(4) => self.disconnect(),
            _ => {}
        }
        self.producer.free_what_is_quiet();
        self.consumer.free_what_is_quiet();
    }

    fn add(&mut self, producer: bool) {
        let side = if producer {
            &mut self.producer
        } else {
            &mut self.consumer
        };
        if side.pieces.len() < 8 {
            side.add(&mut self.random, producer, producer && self.plan.pools);
            self.result.regions += 1;
        }
    }

    /// Connects, or learns of the producer's tables as they are now.
    fn connect(&mut self) {
        let to = Packed::of(&self.producer.engine);
        self.peer = Some(connect(&self.consumer.engine, &to, &self.plan.lane));
    }

    fn disconnect(&mut self) {
        if let Some(peer) = self.peer.take() {
            peer.disconnect();
        }
    }

    /// Starts a read between tables that fit, if there are any. Returns the piece that it reads into.
    fn read(&mut self) -> Option<u32> {
        let Some(peer) = self.peer.clone() else {
            self.connect();
            return None;
        };
        let count = self.consumer.pieces.len();
        if count == 0 {
            return None;
        }
        let place = self.random.below(count);
        let piece = &mut self.consumer.pieces[place];
        let block_bytes = piece.tables[0].description().block_bytes;
        let fits: Vec<RemoteTable> = peer
            .tables()
            .filter(|table| table.description().block_bytes == block_bytes)
            .collect();
        if fits.is_empty() {
            return None;
        }
        let first = &fits[self.random.below(fits.len())];
        // All tables of a region have as many blocks.
        let same = fits
            .iter()
            .filter(|table| table.description().region == first.description().region);
        let tables: Vec<_> = same.take(piece.tables.len()).cloned().enumerate().collect();
        let blocks = first.description().block_count as usize;
        let pairs = piece.pairs(&mut self.random, blocks);
        let both: Vec<_> = tables
            .iter()
            .map(|(local, remote)| (piece.tables[*local].clone(), remote.clone()))
            .collect();
        match peer.read(&both, &pairs) {
            Ok(transfer) => {
                piece.begin(&pairs);
                if self.random.once_in(8) {
                    transfer.cancel();
                }
                self.stale.truncate(16);
                self.stale.insert(0, both[0].clone());
                self.flights.push(Flight {
                    transfer,
                    piece: piece.number,
                    tables,
                    pairs,
                });
                Some(piece.number)
            }
            Err(ReadError::PeerGone(_)) => {
                self.result.lost += 1;
                None
            }
            // Known by a description that is older.
            Err(ReadError::Withdrawn { .. }) => {
                self.result.refused += 1;
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// A read that names what may be gone on either side.
    fn read_stale(&mut self) {
        let Some(peer) = &self.peer else { return };
        let Some(both) = self.random.take(&mut self.stale) else {
            return;
        };
        match peer.read(&[both], &[]) {
            // Nothing to read: only the names are looked at.
            Ok(transfer) => drop(transfer.wait(PATIENCE).unwrap().unwrap()),
            Err(
                ReadError::LocalTable { .. }
                | ReadError::StaleTable { .. }
                | ReadError::Withdrawn { .. },
            ) => self.result.refused += 1,
            Err(ReadError::PeerGone(_)) => self.result.lost += 1,
            Err(error) => panic!("{error}"),
        }
    }

    fn cancel(&mut self) {
        if !self.flights.is_empty() {
            let place = self.random.below(self.flights.len());
            self.flights[place].transfer.cancel();
        }
    }

    /// Drops a read's handle. It goes on; its blocks are not compared any more.
    fn drop_handle(&mut self) {
        if let Some(flight) = self.random.take(&mut self.flights) {
            drop(flight.transfer);
            self.result.dropped += 1;
        }
    }

    fn finish_one(&mut self) {
        if let Some(flight) = self.random.take(&mut self.flights) {
            self.finish(flight);
        }
    }

    fn finish(&mut self, flight: Flight) {
        let outcome = flight.transfer.wait(PATIENCE).unwrap();
        assert!(flight.transfer.is_quiesced());
        let piece = self.consumer.find(flight.piece);
        match outcome {
            Ok(_) => {
                self.result.read += 1;
                if let Some(piece) = &piece {
                    self.result.compared += compare(piece, &flight);
                }
            }
            Err(TransferError::Cancelled) => self.result.cancelled += 1,
            Err(TransferError::Rejected { .. }) => self.result.refused += 1,
            Err(TransferError::PeerLost(_) | TransferError::Stopped) => self.result.lost += 1,
            Err(error) => panic!("{error}"),
        }
        if let Some(piece) = piece {
            piece.end(&flight.pairs);
        }
    }

    fn give_up(&mut self, producer: bool) {
        let side = if producer {
            &mut self.producer
        } else {
            &mut self.consumer
        };
        if let Some(piece) = self.random.take(&mut side.pieces) {
            self.result.busy += u64::from(side.give_up(piece, &mut self.random));
        }
    }

    /// Gives up memory that a read was started into just now, and perhaps cancelled.
    fn give_up_in_use(&mut self) {
        let Some(number) = self.read() else { return };
        if let Some(flight) = self.flights.last()
            && self.random.once_in(2)
        {
            flight.transfer.cancel();
        }
        let place = self
            .consumer
            .pieces
            .iter()
            .position(|piece| piece.number == number);
        let piece = self.consumer.pieces.swap_remove(place.unwrap());
        self.result.busy += u64::from(self.consumer.give_up(piece, &mut self.random));
    }

    /// Everything goes, in random order.
    fn end(mut self) {
        while !self.flights.is_empty() && !self.random.once_in(8) {
            self.finish_one();
        }
        if self.random.once_in(2) {
            self.disconnect();
        }
        let patience = Duration::from_secs(30);
        if self.random.once_in(2) {
            while !self.consumer.pieces.is_empty() {
                self.give_up(false);
            }
        }
        self.consumer.engine.shutdown(patience).unwrap();
        for flight in std::mem::take(&mut self.flights) {
            self.finish(flight);
        }
        // Nobody reads any more.
        while !self.producer.pieces.is_empty() {
            self.give_up(true);
        }
        self.producer.engine.shutdown(patience).unwrap();
        for side in [&self.producer, &self.consumer] {
            let counters = side.engine.counters();
            assert_eq!(
                (counters.quarantined_bytes, counters.quarantined_regions),
                (0, 0)
            );
        }
        wait_for_threads();
        // Sides free what they kept: both engines have stopped.
        say(&json!(self.result));
    }
}

/// Waits until no thread is left but this one: an engine says that it has stopped a moment before
/// its thread has ended, and what a thread holds at the end of the process looks lost.
fn wait_for_threads() {
    let deadline = Instant::now() + PATIENCE;
    while std::fs::read_dir("/proc/self/task").unwrap().count() > 1 {
        assert!(Instant::now() < deadline, "a thread does not end");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Compares what a read has written, where nothing else wrote. Returns the number of blocks.
fn compare(piece: &Piece, flight: &Flight) -> u64 {
    let mut compared = 0;
    for (local, remote) in &flight.tables {
        let (d, layer) = (
            piece.tables[*local].description(),
            remote.description().layer,
        );
        for pair in flight
            .pairs
            .iter()
            .filter(|pair| piece.is_alone(pair.local))
        {
            let mut bytes = vec![0; d.block_bytes as usize];
            let at = d.offset + u64::from(pair.local) * d.block_stride;
            piece.memory.read_at(at, &mut bytes).unwrap();
            for (at, got) in bytes.into_iter().enumerate() {
                let expected = byte(layer, pair.remote, at as u64);
                assert_eq!(got, expected, "byte {at} of {pair:?}, layer {layer}");
            }
            compared += 1;
        }
    }
    compared
}

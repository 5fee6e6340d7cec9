//! Transfers as the progress thread sees them: from the start to the outcome and to quiet.
//!
//! A slot is used again with another generation, so that data for an ended transfer finds nothing.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_wire::{BlockRun, RegionSet, RejectCode, TransferId, WireError};

use super::core::Core;
use super::escalation::Tried;
use crate::counters::{add, subtract};
use crate::error::TransferError;
use crate::lane::Lane;
use crate::lane::cursor::Cursor;
use crate::lane::served::{Extents, Scatter, ScatterError};
use crate::plan::{BlockPair, PairRuns, is_dense};
use crate::region::RegionHold;
use crate::same_host::SameHost;
use crate::transfer::{Outcome, ReadCommand, TablePair, TransferCell, TransferReport};

pub(super) struct TransferState {
    number: u64,
    pub(super) peer: u64,
    pub(super) lane: Lane,
    pub(super) same_host: Option<Arc<SameHost>>,
    pub(super) tables: Vec<TablePair>,
    pub(super) pairs: Vec<BlockPair>,
    /// Stream offset at which each table begins.
    starts: Vec<u64>,
    /// Runs of ids among the pairs.
    runs: usize,
    holds: Vec<RegionHold>,
    pub(super) total: u64,
    /// Bytes that have arrived (served) or that finished operations stand for (the others).
    pub(super) done: u64,
    /// Runs, or what was posted so far (native).
    pub(super) operations: u64,
    extents: Extents,
    pub(super) cursor: Cursor,
    pub(super) in_flight: u64,
    started: Instant,
    timeout: Duration,
    deadline: Instant,
    cell: Arc<TransferCell>,
    /// The peer was asked for a stream.
    requested: bool,
    /// It has its outcome and waits for quiet.
    pub(super) ended: bool,
    /// What was done for that.
    pub(super) tried: Tried,
    /// From the start to quiet.
    span: tracing::Span,
}

impl TransferState {
    /// The peer's first table of this transfer that lies in one of its regions `regions`, unless
    /// the peer itself reads it for us.
    fn table_in(&self, regions: &RegionSet) -> Option<u32> {
        let mut tables = self.tables.iter().filter(|_| self.lane != Lane::Served);
        let found = tables.find(|pair| regions.contains(pair.remote.region));
        found.map(|pair| pair.remote.id)
    }

    /// Why it fails at once although the peer is connected.
    fn refusal(&self, peer: &super::peers::PeerState, now: Instant) -> Option<TransferError> {
        let mut tables = self.tables.iter();
        // Withdrawn between the call and now.
        if let Some(pair) = tables.find(|pair| peer.life.is_withdrawn(pair.remote.region)) {
            return Some(TransferError::Rejected {
                code: RejectCode::Withdrawn,
                detail: u64::from(pair.remote.id),
            });
        }
        peer.life.is_suspect().then(|| TransferError::Stalled {
            done: 0,
            total: self.total,
            waited: now.saturating_duration_since(peer.last_heard),
        })
    }

    /// The request for the served lane.
    fn request(&self, id: TransferId) -> Result<Vec<u8>, WireError> {
        let tables: Vec<u32> = self.tables.iter().map(|pair| pair.remote.id).collect();
        let runs = Counted {
            left: self.runs,
            runs: PairRuns::new(&self.pairs),
        };
        kvferry_wire::encode_read(id, &tables, runs)
    }
}

#[derive(Default)]
struct Slot {
    generation: u32,
    state: Option<Box<TransferState>>,
}

/// All transfers of an engine.
#[derive(Default)]
pub(super) struct Transfers {
    slots: Vec<Slot>,
    free: Vec<u32>,
    numbers: HashMap<u64, u32>,
    deadlines: BTreeSet<(Instant, u32)>,
}

impl Transfers {
    fn insert(&mut self, state: TransferState) -> TransferId {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            (self.slots.len() - 1) as u32
        });
        self.numbers.insert(state.number, slot);
        self.deadlines.insert((state.deadline, slot));
        let place = &mut self.slots[slot as usize];
        // Zero stands for "no transfer" on the wire.
        place.generation = place.generation.wrapping_add(1).max(1);
        place.state = Some(Box::new(state));
        TransferId {
            slot,
            generation: place.generation,
        }
    }

    fn remove(&mut self, slot: u32) -> Option<Box<TransferState>> {
        let state = self.slots.get_mut(slot as usize)?.state.take()?;
        self.numbers.remove(&state.number);
        self.deadlines.remove(&(state.deadline, slot));
        self.free.push(slot);
        Some(state)
    }

    /// The transfer in a slot, whatever its generation.
    pub(super) fn in_slot(&mut self, slot: u32) -> Option<&mut TransferState> {
        self.slots.get_mut(slot as usize)?.state.as_deref_mut()
    }

    pub(super) fn id_of(&self, slot: u32) -> Option<TransferId> {
        let generation = self.slots.get(slot as usize)?.generation;
        Some(TransferId { slot, generation })
    }

    /// The transfer of this id, and no later one in its slot.
    pub(super) fn get(&mut self, id: TransferId) -> Option<&mut TransferState> {
        let place = self.slots.get_mut(id.slot as usize)?;
        if place.generation != id.generation {
            return None;
        }
        place.state.as_deref_mut()
    }

    fn of_peer(&self, peer: u64) -> Vec<u32> {
        self.occupied()
            .filter(|(_, state)| state.peer == peer)
            .map(|(slot, _)| slot)
            .collect()
    }

    /// Transfers from these regions of a peer that read one-sidedly and have something left to post:
    /// their slots, and the first such table.
    pub(super) fn to_be_posted(&self, peer: u64, regions: &RegionSet) -> Vec<(u32, u32)> {
        let of_peer = self.occupied().filter(|(_, state)| {
            state.peer == peer && !state.ended && !state.cursor.is_behind(&state.tables)
        });
        of_peer
            .filter_map(|(slot, state)| Some((slot, state.table_in(regions)?)))
            .collect()
    }

    /// Whether a one-sided operation on these regions of a peer is under way.
    pub(super) fn touches(&self, peer: u64, regions: &RegionSet) -> bool {
        self.occupied().any(|(_, state)| {
            state.peer == peer && state.in_flight > 0 && state.table_in(regions).is_some()
        })
    }

    fn occupied(&self) -> impl Iterator<Item = (u32, &TransferState)> {
        self.slots
            .iter()
            .enumerate()
            .filter_map(|(slot, place)| Some((slot as u32, place.state.as_deref()?)))
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|&(deadline, _)| deadline)
    }
}

impl Core {
    /// A handle asks for a read. It has been checked; only the peer may have gone since.
    pub(super) fn start_read(&mut self, command: ReadCommand) {
        add(&self.counters().transfers_started, 1);
        let (peer, lane) = (command.peer.0, command.lane);
        let state = self.new_transfer(command);
        let ready = self
            .peers
            .get(&peer)
            .is_some_and(super::peers::PeerState::is_ready);
        let refusal = self
            .peers
            .get(&peer)
            .and_then(|peer| state.refusal(peer, self.now));
        let id = self.transfers.insert(state);
        if !ready {
            self.end_transfer(id.slot, Err(TransferError::PeerLost("it is gone".into())));
            return;
        }
        if let Some(error) = refusal {
            self.end_transfer(id.slot, Err(error));
            return;
        }
        if lane != Lane::Served {
            if let Some(state) = self.peers.get_mut(&peer) {
                state.reads.push_back(id);
            }
            self.activate(peer);
            return;
        }
        let Some(state) = self.transfers.get(id) else {
            return;
        };
        match state.request(id) {
            Ok(message) => {
                state.requested = true;
                self.push_message(peer, message);
            }
            Err(error) => {
                self.end_transfer(id.slot, Err(TransferError::Request(error.to_string())));
            }
        }
    }

    fn new_transfer(&self, command: ReadCommand) -> TransferState {
        let ReadCommand {
            number,
            peer,
            lane,
            same_host,
            tables,
            pairs,
            holds,
            timeout,
            deadline,
            cell,
        } = command;
        let mut starts = Vec::with_capacity(tables.len());
        let (mut total, mut operations) = (0_u64, 0_u64);
        let runs = PairRuns::new(&pairs).count();
        for pair in &tables {
            let local = pair.local.description();
            starts.push(total);
            // Cannot overflow: the blocks lie in memory on both sides.
            total += local.block_bytes * pairs.len() as u64;
            let merge = is_dense(local) && is_dense(&pair.remote);
            operations += if merge { runs } else { pairs.len() } as u64;
        }
        TransferState {
            number,
            peer: peer.0,
            lane,
            same_host,
            tables,
            pairs,
            starts,
            runs,
            holds,
            total,
            done: 0,
            operations: if lane == Lane::Native { 0 } else { operations },
            extents: Extents::default(),
            cursor: Cursor::default(),
            in_flight: 0,
            started: self.now,
            timeout,
            deadline,
            cell,
            requested: false,
            ended: false,
            tried: Tried::default(),
            span: tracing::debug_span!("transfer", number, peer = peer.0, %lane, bytes = total),
        }
    }

    /// Bytes of a stream have arrived.
    pub(super) fn served_data(&mut self, peer: u64, id: TransferId, offset: u64, bytes: &[u8]) {
        let Some(state) = self.transfers.get(id) else {
            // Normal after a cancel or a deadline.
            add(&self.shared.counters.segments_dropped, 1);
            return;
        };
        if state.peer != peer || state.lane != Lane::Served {
            self.protocol_violation("data for another peer's transfer");
            return;
        }
        let scatter = Scatter {
            tables: &state.tables,
            starts: &state.starts,
            pairs: &state.pairs,
            total: state.total,
        };
        match scatter.write(offset, bytes) {
            Ok(()) => {}
            Err(ScatterError::Memory(error)) => {
                self.end_transfer(id.slot, Err(error.into()));
                return;
            }
            Err(error) => {
                self.break_off(id, error.to_string());
                return;
            }
        }
        if !state.extents.insert(offset, offset + bytes.len() as u64) {
            self.break_off(id, format!("it sent bytes at offset {offset} twice"));
            return;
        }
        state.done += bytes.len() as u64;
        let whole = state.done == state.total;
        add(&self.shared.counters.served_bytes, bytes.len() as u64);
        if whole {
            self.succeed(id.slot);
        }
    }

    /// The peer breaks the protocol: the transfer fails, and so does the connection.
    fn break_off(&mut self, id: TransferId, what: String) {
        let Some(peer) = self.transfers.get(id).map(|state| state.peer) else {
            return;
        };
        let lost = format!("it broke the protocol: {what}");
        self.end_transfer(id.slot, Err(TransferError::Protocol(what)));
        self.lose(peer, &lost);
    }

    pub(super) fn succeed(&mut self, slot: u32) {
        let Some(state) = self.transfers.in_slot(slot) else {
            return;
        };
        let report = TransferReport {
            bytes: state.total,
            operations: state.operations,
            lane: Some(state.lane),
            elapsed: state.started.elapsed(),
        };
        add(&self.shared.counters.block_operations, report.operations);
        self.end_transfer(slot, Ok(report));
    }

    /// Gives a transfer its outcome. It stays, in quarantine, while operations may touch memory.
    pub(super) fn end_transfer(&mut self, slot: u32, outcome: Outcome) {
        let Some(state) = self.transfers.in_slot(slot) else {
            return;
        };
        if state.ended {
            return;
        }
        state.ended = true;
        let peer = state.peer;
        // What the peer ended itself, or was lost with it, needs no cancel.
        let streams_on = state.requested
            && matches!(
                &outcome,
                Err(TransferError::Cancelled
                    | TransferError::Memory(_)
                    | TransferError::Stalled { .. }
                    | TransferError::Stopped)
            );
        let counter = match &outcome {
            Ok(report) => {
                let operations = report.operations;
                tracing::debug!(parent: &state.span, operations, "transfer succeeded");
                &self.shared.counters.transfers_succeeded
            }
            Err(error) => {
                tracing::debug!(parent: &state.span, %error, "transfer failed");
                &self.shared.counters.transfers_failed
            }
        };
        add(counter, 1);
        if streams_on && let Some(id) = self.transfers.id_of(slot) {
            self.cancel_stream(peer, id);
        }
        let Some(state) = self.transfers.in_slot(slot) else {
            return;
        };
        if state.in_flight > 0 {
            add(&self.shared.counters.quarantined_bytes, state.total);
            state.cell.complete(outcome);
            let due = self.now + self.shared.config.escalation_step;
            self.escalations.insert(due, slot);
            return;
        }
        if let Some(state) = self.transfers.remove(slot) {
            finish(*state, Some(outcome));
        }
    }

    pub(super) fn quiesce(&mut self, slot: u32) {
        if let Some(state) = self.transfers.remove(slot) {
            subtract(&self.shared.counters.quarantined_bytes, state.total);
            self.is_quiet(slot, state.tried, state.total);
            finish(*state, None);
        }
    }

    /// Fails every transfer of a peer.
    pub(super) fn fail_transfers_of(
        &mut self,
        peer: u64,
        error: impl Fn(u64, u64) -> TransferError,
    ) {
        for slot in self.transfers.of_peer(peer) {
            if let Some(state) = self.transfers.in_slot(slot) {
                let error = error(state.done, state.total);
                self.end_transfer(slot, Err(error));
            }
        }
    }

    /// The peer refused a served transfer.
    pub(super) fn fail_served(&mut self, peer: u64, id: TransferId, error: TransferError) {
        if self
            .transfers
            .get(id)
            .is_some_and(|state| state.peer == peer)
        {
            self.end_transfer(id.slot, Err(error));
        }
    }

    /// A handle gives up.
    pub(super) fn cancel(&mut self, number: u64) {
        if let Some(&slot) = self.transfers.numbers.get(&number) {
            self.end_transfer(slot, Err(TransferError::Cancelled));
        }
    }

    /// Tells the peer to send no more of a served transfer.
    fn cancel_stream(&mut self, peer: u64, id: TransferId) {
        if self
            .peers
            .get(&peer)
            .is_some_and(super::peers::PeerState::is_ready)
        {
            self.push_message(peer, kvferry_wire::encode_read_cancel(id));
        }
    }

    /// Judges the deadlines of transfers.
    pub(super) fn transfer_timers(&mut self) -> bool {
        let mut any = false;
        while let Some(&(deadline, slot)) = self.transfers.deadlines.first()
            && deadline <= self.now
        {
            any = true;
            let Some(state) = self.transfers.in_slot(slot) else {
                self.transfers.deadlines.remove(&(deadline, slot));
                continue;
            };
            let error = TransferError::Stalled {
                done: state.done,
                total: state.total,
                waited: state.timeout,
            };
            self.transfers.deadlines.remove(&(deadline, slot));
            self.end_transfer(slot, Err(error));
        }
        any
    }

    /// Ends every transfer that is left, when the fabric is gone. Unless all is `quiet`, copies that
    /// have not ended keep their memory for ever.
    pub(super) fn abandon_transfers(&mut self, quiet: bool) {
        let slots: Vec<u32> = self.transfers.occupied().map(|(slot, _)| slot).collect();
        for slot in slots {
            let Some(state) = self.transfers.in_slot(slot) else {
                continue;
            };
            let copies = matches!(state.lane, Lane::Mapped | Lane::Attached);
            if state.in_flight > 0 && copies && !quiet {
                let bytes = state.total;
                self.end_transfer(slot, Err(TransferError::Stopped));
                tracing::error!(
                    bytes,
                    "copies outlast their engine; their memory is never handed back"
                );
                // Its holds are never let go of, and nobody is told that it is quiet.
                std::mem::forget(self.transfers.remove(slot));
                continue;
            }
            state.in_flight = 0;
            self.end_transfer(slot, Err(TransferError::Stopped));
            self.quiesce(slot);
        }
    }
}

/// Lets go of the memory first, so that whoever sees the end can act on it.
fn finish(state: TransferState, outcome: Option<Outcome>) {
    let TransferState {
        cell,
        holds,
        tables,
        ..
    } = state;
    drop((holds, tables));
    if let Some(outcome) = outcome {
        cell.complete(outcome);
    }
    cell.quiesce();
}

/// Runs of ids for the wire, whose number is known.
struct Counted<'a> {
    left: usize,
    runs: PairRuns<'a>,
}

impl Iterator for Counted<'_> {
    type Item = BlockRun;

    fn next(&mut self) -> Option<BlockRun> {
        let run = self.runs.next()?;
        self.left -= 1;
        Some(BlockRun {
            first: run.first.remote,
            count: run.count,
        })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Counted<'_> {}

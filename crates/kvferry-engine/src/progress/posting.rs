//! Reads that this engine does by itself: native reads and batches of copies.
//!
//! Transfers of one peer take turns, one operation each. What is in flight from a peer is bounded in
//! operations and in bytes; an operation that is larger than the bound goes alone.

use std::collections::HashMap;

use kvferry_wire::{RegionDescription, RejectCode, TransferId};

use super::core::Core;
use super::peers::{Endpoint, PeerState};
use crate::chunks::Chunks;
use crate::counters::add;
use crate::error::TransferError;
use crate::fabric::{
    CopyEnd, EndpointId, Fabric, FabricError, KeyId, Posted, ReadOperation, ReadToken,
};
use crate::lane::Lane;
use crate::lane::cursor::Step;
use crate::memory::{CopyBatch, CopyError, MAX_PIECES, MemoryError};

/// Operations of one peer posted per turn.
const READS_PER_TURN: usize = 256;
/// Bytes of a batch of copies; a larger piece is cut. Small enough for several threads to share a
/// transfer, large enough for 64 blocks of 64 KiB in one call.
const BATCH_BYTES: u64 = 4 << 20;
/// Copies need no registration, and so know no chunks.
const WHOLE: Chunks = Chunks::whole();
/// Batches kept for reuse.
const MAX_FREE_BATCHES: usize = 64;

/// Operations in flight, by the token that the fabric reports.
#[derive(Default)]
pub(super) struct Flights {
    slots: Vec<Option<Flight>>,
    free: Vec<usize>,
}

struct Flight {
    transfer: TransferId,
    bytes: u64,
}

impl Flights {
    fn insert(&mut self, transfer: TransferId, bytes: u64) -> ReadToken {
        let flight = Some(Flight { transfer, bytes });
        let slot = match self.free.pop() {
            Some(slot) => {
                self.slots[slot] = flight;
                slot
            }
            None => {
                self.slots.push(flight);
                self.slots.len() - 1
            }
        };
        ReadToken(slot as u64)
    }

    fn remove(&mut self, token: ReadToken) -> Option<Flight> {
        let slot = usize::try_from(token.0).ok()?;
        let flight = self.slots.get_mut(slot)?.take()?;
        self.free.push(slot);
        Some(flight)
    }
}

impl PeerState {
    /// Whether another operation may be posted.
    pub(super) fn may_post(&self, window: usize, window_bytes: u64) -> bool {
        self.endpoint == Endpoint::Open
            && self.is_ready()
            && !self.reads.is_empty()
            && self.reads_in_flight < window
            && self.bytes_in_flight < window_bytes
    }
}

impl Core {
    /// Posts what the windows allow. True if anything was.
    pub(super) fn post_some(&mut self, id: u64, fabric: &mut dyn Fabric) -> bool {
        let config = &self.shared.config;
        let (window, window_bytes) = (config.read_window, config.read_window_bytes);
        let mut any = false;
        for _ in 0..READS_PER_TURN {
            let Some(peer) = self.peers.get_mut(&id) else {
                break;
            };
            if !peer.may_post(window, window_bytes) {
                break;
            }
            let room = if peer.reads_in_flight == 0 {
                u64::MAX
            } else {
                window_bytes - peer.bytes_in_flight
            };
            let Some(transfer) = peer.reads.pop_front() else {
                break;
            };
            let posted = match self.transfers.get(transfer).map(|state| state.lane) {
                Some(Lane::Mapped | Lane::Attached) => self.post_copies(id, transfer, fabric),
                Some(Lane::Native) => self.post_read(id, transfer, room, fabric),
                Some(Lane::Served) | None => Ok(Turn::Over),
            };
            match posted {
                Ok(Turn::Posted { more }) => {
                    any = true;
                    if more && let Some(peer) = self.peers.get_mut(&id) {
                        // To the end of the line, so that other transfers get their turn.
                        peer.reads.push_back(transfer);
                    }
                }
                Ok(Turn::Over) => {}
                Ok(Turn::NoRoom) => {
                    if let Some(peer) = self.peers.get_mut(&id) {
                        peer.reads.push_front(transfer);
                    }
                    break;
                }
                Err(error) => self.end_transfer(transfer.slot, Err(error)),
            }
        }
        any
    }

    /// Posts the next run of a native transfer.
    fn post_read(
        &mut self,
        id: u64,
        transfer: TransferId,
        room: u64,
        fabric: &mut dyn Fabric,
    ) -> Result<Turn, TransferError> {
        // By its whole id: the slot may have been given to another transfer since.
        let Some(state) = self.transfers.get(transfer).filter(|state| !state.ended) else {
            return Ok(Turn::Over);
        };
        let (Some(peer), Some(pair)) =
            (self.peers.get_mut(&id), state.cursor.current(&state.tables))
        else {
            return Ok(Turn::Over);
        };
        let region_id = pair.remote.region;
        let remote = peer
            .description
            .regions
            .iter()
            .find(|region| region.id == region_id);
        let remote = remote.ok_or_else(|| no_region(pair.remote.id))?;
        let (local, theirs) = (pair.local.region(), Chunks::of(remote));
        let chunks = (local.chunks, theirs);
        let step = state
            .cursor
            .step(&state.tables, &state.pairs, chunks, u64::MAX);
        let Some(Step { run, after }) = step else {
            return Ok(Turn::Over);
        };
        if run.bytes > room {
            return Ok(Turn::NoRoom);
        }
        let chunk = theirs.index_of(run.remote_offset);
        let key = match peer.keys.get(&(region_id, chunk)) {
            Some(&key) => key,
            None => import_key(fabric, id, remote, chunk, &mut peer.keys)?,
        };
        let handle = local.handle_at(run.local_offset);
        let operation = ReadOperation {
            key,
            remote_address: remote.base + run.remote_offset,
            local: &local.memory,
            // Blocks lie within their region, and its chunks cover it.
            local_handle: handle.ok_or(MemoryError::OutOfBounds {
                offset: run.local_offset,
                bytes: run.bytes,
                region_bytes: local.memory.bytes(),
            })?,
            local_offset: run.local_offset,
            bytes: run.bytes,
        };
        let token = self.flights.insert(transfer, run.bytes);
        add(&self.shared.counters.ucx_operations, 1);
        let posted = match fabric.read(EndpointId(id), token, &operation) {
            Ok(posted) => posted,
            Err(error) => {
                self.flights.remove(token);
                return Err(TransferError::Operation(error));
            }
        };
        state.cursor = after;
        state.operations += 1;
        state.in_flight += 1;
        peer.reads_in_flight += 1;
        peer.bytes_in_flight += run.bytes;
        let more = !state.cursor.is_behind(&state.tables);
        if let Posted::Done(()) = posted {
            // One path for both kinds of completion.
            self.operation_done(token, Ok(()));
        }
        Ok(Turn::Posted { more })
    }

    /// Hands the next batch of a transfer to the copy threads.
    fn post_copies(
        &mut self,
        id: u64,
        transfer: TransferId,
        fabric: &mut dyn Fabric,
    ) -> Result<Turn, TransferError> {
        let Some(state) = self.transfers.get(transfer).filter(|state| !state.ended) else {
            return Ok(Turn::Over);
        };
        let (Some(peer), Some(same_host)) = (self.peers.get_mut(&id), &state.same_host) else {
            return Ok(Turn::Over);
        };
        let mut batch = self.free_batches.pop().unwrap_or_default();
        let process = match state.lane {
            Lane::Attached => Some(same_host.process().map_err(refused)?.clone()),
            _ => None,
        };
        let attached = process.is_some();
        batch.reset(process);
        let mut cursor = state.cursor;
        while batch.len() < MAX_PIECES && batch.bytes() < BATCH_BYTES {
            let room = BATCH_BYTES - batch.bytes();
            let step = cursor.step(&state.tables, &state.pairs, (WHOLE, WHOLE), room);
            let (Some(pair), Some(Step { run, after })) = (cursor.current(&state.tables), step)
            else {
                break;
            };
            let region_id = pair.remote.region;
            let to = (&pair.local.region().memory, run.local_offset);
            let (offset, bytes) = (run.remote_offset, run.bytes);
            if attached {
                let regions = &peer.description.regions;
                let remote = regions.iter().find(|region| region.id == region_id);
                let remote = remote.ok_or_else(|| no_region(pair.remote.id))?;
                batch.add_from_process(remote.base + offset, to, bytes)?;
            } else {
                let pool = same_host
                    .pool(region_id)
                    .map_err(|reason| refused(&reason))?;
                batch.add_from_pool(&pool, offset, to, bytes)?;
            }
            cursor = after;
        }
        let bytes = batch.bytes();
        if bytes == 0 {
            return Ok(Turn::Over);
        }
        let token = self.flights.insert(transfer, bytes);
        if let Err((batch, error)) = fabric.copy(EndpointId(id), token, batch) {
            self.flights.remove(token);
            self.recycle_batch(batch);
            return Err(TransferError::Operation(error));
        }
        add(&self.shared.counters.copy_batches, 1);
        state.cursor = cursor;
        state.in_flight += 1;
        peer.reads_in_flight += 1;
        peer.bytes_in_flight += bytes;
        let more = !state.cursor.is_behind(&state.tables);
        Ok(Turn::Posted { more })
    }

    /// A batch of copies has ended.
    pub(super) fn batch_done(&mut self, token: ReadToken, end: CopyEnd) {
        let CopyEnd { batch, result } = end;
        self.recycle_batch(batch);
        let result = match result {
            Ok(stats) => {
                let counters = &self.shared.counters;
                add(&counters.attached_calls, stats.calls);
                add(&counters.attached_short_calls, stats.short);
                Ok(())
            }
            Err(error) => Err(error),
        };
        let gone = match &result {
            Err(error @ (CopyError::Gone { .. } | CopyError::Stranger { .. })) => {
                Some(error.to_string())
            }
            _ => None,
        };
        let peer = self.operation_done(token, result.map_err(|error| copy_failed(&error)));
        if let (Some(reason), Some(peer)) = (gone, peer) {
            self.fail(peer, &reason);
        }
    }

    /// An operation of some transfer has ended; returns whose peer's.
    pub(super) fn operation_done(
        &mut self,
        token: ReadToken,
        result: Result<(), FabricError>,
    ) -> Option<u64> {
        let Flight {
            transfer: id,
            bytes,
        } = self.flights.remove(token)?;
        let state = self.transfers.get(id)?;
        state.in_flight = state.in_flight.saturating_sub(1);
        let (peer, lane, ended) = (state.peer, state.lane, state.ended);
        let quiet = state.in_flight == 0;
        let posted_all = state.cursor.is_behind(&state.tables);
        if result.is_ok() {
            state.done += bytes;
            let counters = &self.shared.counters;
            let counter = match lane {
                Lane::Mapped => &counters.mapped_bytes,
                Lane::Attached => &counters.attached_bytes,
                Lane::Native | Lane::Served => &counters.native_bytes,
            };
            add(counter, bytes);
        }
        if let Some(peer_state) = self.peers.get_mut(&peer) {
            peer_state.reads_in_flight = peer_state.reads_in_flight.saturating_sub(1);
            peer_state.bytes_in_flight = peer_state.bytes_in_flight.saturating_sub(bytes);
        }
        self.activate(peer);
        match (ended, result) {
            (true, _) if quiet => self.quiesce(id.slot),
            (true, _) => {}
            (false, Err(error)) => {
                self.end_transfer(id.slot, Err(TransferError::Operation(error)));
            }
            (false, Ok(())) if quiet && posted_all => self.succeed(id.slot),
            (false, Ok(())) => {}
        }
        Some(peer)
    }

    fn recycle_batch(&mut self, mut batch: Box<CopyBatch>) {
        // What it kept alive is let go of now, not when it is used again.
        batch.reset(None);
        if self.free_batches.len() < MAX_FREE_BATCHES {
            self.free_batches.push(batch);
        }
    }
}

/// What became of a transfer's turn.
enum Turn {
    /// Something was posted, and more is left or not.
    Posted { more: bool },
    /// There is nothing to post.
    Over,
    /// The next operation must wait for others to end.
    NoRoom,
}

/// A description's tables lie in its regions: a newer description of the peer has this one no more, and
/// overtook the withdrawal.
fn no_region(table: u32) -> TransferError {
    TransferError::Rejected {
        code: RejectCode::Withdrawn,
        detail: u64::from(table),
    }
}

/// What the peer shares has changed since the lane was chosen.
fn refused(reason: &str) -> TransferError {
    TransferError::Operation(FabricError::new("copy", reason))
}

fn copy_failed(error: &CopyError) -> FabricError {
    FabricError::new("copy", error.to_string())
}

fn import_key(
    fabric: &mut dyn Fabric,
    id: u64,
    remote: &RegionDescription,
    chunk: u64,
    keys: &mut HashMap<(u32, u64), KeyId>,
) -> Result<KeyId, TransferError> {
    let packed = usize::try_from(chunk)
        .ok()
        .and_then(|chunk| remote.keys.get(chunk));
    let packed = packed.ok_or_else(|| {
        TransferError::Protocol(format!("its region {} has no remote key", remote.id))
    })?;
    let key = fabric
        .import_key(EndpointId(id), packed)
        .map_err(TransferError::Operation)?;
    keys.insert((remote.id, chunk), key);
    Ok(key)
}

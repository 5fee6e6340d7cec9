//! What leaves: pieces of messages, streams of blocks, native reads.
//!
//! Peers take turns, and within a peer so do the reads it asked for, one segment each. Messages go
//! before streams. A peer's segments and reads in flight are bounded by the configuration.

use std::collections::HashMap;

use kvferry_wire::{
    ReadRejected, RegionDescription, RejectCode, SEGMENT_HEADER_BYTES, SegmentBody, SegmentHeader,
    TransferId,
};

use super::core::Core;
use super::peers::{Endpoint, Phase};
use super::transfers::token;
use crate::chunks::Chunks;
use crate::counters::add;
use crate::error::TransferError;
use crate::fabric::{EndpointId, Fabric, KeyId, Posted, ReadOperation, SendBuffer};
use crate::lane::native::Step;
use crate::memory::MemoryError;
use crate::message::Piece;

/// Segments of one peer per turn, so that what arrives is not left waiting.
const SEGMENTS_PER_TURN: usize = 16;
/// Native reads of one peer posted per turn.
const READS_PER_TURN: usize = 256;

/// What there was to send.
enum Filled {
    Nothing,
    Segment,
    /// The stream of a read cannot go on.
    Broken {
        transfer: TransferId,
        table: u32,
        reason: String,
    },
}

impl Core {
    /// Sends and posts what can be. True if anything was.
    pub(super) fn pump(&mut self, fabric: &mut dyn Fabric) -> bool {
        let mut any = false;
        for _ in 0..self.active.len() {
            let Some(id) = self.active.pop_front() else {
                break;
            };
            if let Some(peer) = self.peers.get_mut(&id) {
                peer.queued = false;
            }
            let sent = self.send_some(id, fabric);
            let posted = self.post_some(id, fabric);
            any |= sent || posted;
            if self.can_go_on(id) {
                self.activate(id);
            }
        }
        any
    }

    /// True if another turn would send or post something.
    fn can_go_on(&self, id: u64) -> bool {
        let config = &self.shared.config;
        self.peers.get(&id).is_some_and(|peer| {
            let has_segments = !peer.outbox.is_empty() || !peer.jobs.is_empty();
            peer.endpoint == Endpoint::Open
                && ((has_segments && peer.in_flight < config.send_window)
                    || (!peer.reads.is_empty() && peer.reads_in_flight < config.read_window))
        })
    }

    fn send_some(&mut self, id: u64, fabric: &mut dyn Fabric) -> bool {
        let window = self.shared.config.send_window;
        let mut any = false;
        for _ in 0..SEGMENTS_PER_TURN {
            let open = self
                .peers
                .get(&id)
                .is_some_and(|peer| peer.endpoint == Endpoint::Open && peer.in_flight < window);
            if !open {
                break;
            }
            let mut buffer = self.take_buffer();
            match self.fill(id, &mut buffer) {
                Filled::Segment => any = true,
                Filled::Nothing => {
                    self.recycle(buffer);
                    break;
                }
                Filled::Broken {
                    transfer,
                    table,
                    reason,
                } => {
                    self.recycle(buffer);
                    tracing::warn!(peer = id, %transfer, reason, "a peer's read cannot be served");
                    let rejected = ReadRejected {
                        transfer,
                        code: RejectCode::Withdrawn,
                        detail: u64::from(table),
                    };
                    add(&self.counters().reads_rejected, 1);
                    self.push_message(id, kvferry_wire::encode_read_rejected(&rejected));
                    continue;
                }
            }
            add(&self.counters().ucx_operations, 1);
            match fabric.send(EndpointId(id), buffer) {
                Ok(Posted::Done(buffer)) => self.recycle(buffer),
                Ok(Posted::Pending) => {
                    if let Some(peer) = self.peers.get_mut(&id) {
                        peer.in_flight += 1;
                    }
                }
                Err((buffer, error)) => {
                    self.recycle(buffer);
                    self.lose(id, &error.to_string());
                    break;
                }
            }
        }
        any
    }

    /// Writes the peer's next segment into a buffer.
    fn fill(&mut self, id: u64, buffer: &mut SendBuffer) -> Filled {
        let source = self.shared.incarnation;
        let counters = &self.shared.counters;
        let Some(peer) = self.peers.get_mut(&id) else {
            return Filled::Nothing;
        };
        let destination = peer.incarnation();
        let Some((head, room)) = buffer.bytes.split_first_chunk_mut::<SEGMENT_HEADER_BYTES>()
        else {
            return Filled::Nothing;
        };
        let (body, payload) = if let Some(piece) = peer.outbox.next_piece(room.len()) {
            let Piece {
                message_bytes,
                offset,
                payload,
            } = piece;
            room[..payload.len()].copy_from_slice(payload);
            let bytes = payload.len();
            peer.outbox.settle();
            if offset as usize + bytes == message_bytes as usize {
                add(&counters.messages_sent, 1);
            }
            (
                SegmentBody::Message {
                    message_bytes,
                    offset,
                },
                bytes,
            )
        } else if let Some(mut job) = peer.jobs.pop_front() {
            let offset = job.stream;
            let bytes = match job.gather(room) {
                Ok(bytes) => bytes,
                Err(error) => {
                    return Filled::Broken {
                        transfer: job.transfer,
                        table: job.current_table(),
                        reason: error.to_string(),
                    };
                }
            };
            let transfer = job.transfer;
            if !job.is_finished() {
                // To the end of the line, so that other reads get their turn.
                peer.jobs.push_back(job);
            }
            add(&counters.bytes_served_to_peers, bytes as u64);
            (SegmentBody::Data { transfer, offset }, bytes)
        } else {
            return Filled::Nothing;
        };
        let header = SegmentHeader {
            source,
            destination,
            connection: peer.connection(),
            sequence: peer.sequence,
            body,
        };
        header.write(head);
        buffer.filled = SEGMENT_HEADER_BYTES + payload;
        peer.sequence += 1;
        Filled::Segment
    }

    fn post_some(&mut self, id: u64, fabric: &mut dyn Fabric) -> bool {
        let window = self.shared.config.read_window;
        let mut any = false;
        for _ in 0..READS_PER_TURN {
            let Some(peer) = self.peers.get_mut(&id) else {
                break;
            };
            if peer.reads_in_flight >= window || !matches!(peer.phase, Phase::Ready) {
                break;
            }
            let Some(&transfer) = peer.reads.front() else {
                break;
            };
            match self.post_next(id, transfer, fabric) {
                Ok(true) => any = true,
                Ok(false) => {
                    if let Some(peer) = self.peers.get_mut(&id) {
                        peer.reads.pop_front();
                    }
                }
                Err(error) => {
                    if let Some(peer) = self.peers.get_mut(&id) {
                        peer.reads.pop_front();
                    }
                    self.end_transfer(transfer.slot, Err(error));
                }
            }
        }
        any
    }

    /// Posts the next run of a native transfer, or the next piece of one that crosses the end of a
    /// chunk; false if there is none.
    fn post_next(
        &mut self,
        id: u64,
        transfer: TransferId,
        fabric: &mut dyn Fabric,
    ) -> Result<bool, TransferError> {
        // By its whole id: the slot may have been given to another transfer since.
        let Some(state) = self.transfers.get(transfer) else {
            return Ok(false);
        };
        if state.ended {
            return Ok(false);
        }
        let (Some(peer), Some(pair)) =
            (self.peers.get_mut(&id), state.cursor.current(&state.tables))
        else {
            return Ok(false);
        };
        let region_id = pair.remote.region;
        let remote = peer
            .description
            .regions
            .iter()
            .find(|region| region.id == region_id);
        let remote = remote.ok_or_else(|| {
            TransferError::Protocol(format!(
                "its table names region {region_id}, which it has not"
            ))
        })?;
        let (local, theirs) = (pair.local.region(), Chunks::of(remote));
        let step = state
            .cursor
            .step(&state.tables, &state.pairs, local.chunks, theirs);
        let Some(Step { run, after }) = step else {
            return Ok(false);
        };
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
        add(&self.shared.counters.ucx_operations, 1);
        let posted = fabric
            .read(EndpointId(id), token(transfer), &operation)
            .map_err(TransferError::Operation)?;
        state.cursor = after;
        state.operations += 1;
        state.in_flight += 1;
        peer.reads_in_flight += 1;
        if let Posted::Done(()) = posted {
            // One path for both kinds of completion.
            self.native_done(token(transfer), Ok(()));
        }
        Ok(true)
    }
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

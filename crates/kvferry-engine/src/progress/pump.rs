//! What leaves: pieces of messages, streams of blocks.
//!
//! Peers take turns, and within a peer so do the reads it asked for, one segment each. Messages go
//! before streams. A peer's segments and reads in flight are bounded by the configuration.

use kvferry_wire::{
    ReadRejected, RejectCode, SEGMENT_HEADER_BYTES, SegmentBody, SegmentHeader, TransferId,
};

use super::core::Core;
use super::peers::Endpoint;
use crate::counters::add;
use crate::fabric::{EndpointId, Fabric, Posted, SendBuffer};
use crate::message::Piece;

/// Segments of one peer per turn, so that what arrives is not left waiting.
const SEGMENTS_PER_TURN: usize = 16;

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
            let may_send = peer.endpoint == Endpoint::Open
                && has_segments
                && peer.in_flight < config.send_window;
            may_send || peer.may_post(config.read_window, config.read_window_bytes)
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
                    let name = self.peers.get(&id).map(|it| it.name());
                    let name = name.unwrap_or_default();
                    if let Some(held_back) = self.log.admit("not served", &name, self.now) {
                        tracing::warn!(peer = name, %transfer, reason, held_back, "a peer's read cannot be served");
                    }
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
}

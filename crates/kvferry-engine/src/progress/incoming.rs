//! What arrives: segments, messages, and the fabric's reports.

use std::time::Duration;

use kvferry_wire::{Incarnation, Message, ReadRequest, RejectCode, Segment, TransferId};

use super::core::Core;
use super::greeting::{MAX_STRANGERS, Stranger};
use super::peers::{Endpoint, Phase};
use crate::counters::{add, subtract};
use crate::error::TransferError;
use crate::fabric::{CopyEnd, EndpointId, FabricError, ReadToken, SendBuffer, Sink};
use crate::lane::served::ServeJob;
use crate::message::{Arrival, Inbox};
use crate::service::{PeerId, Sender};

/// How late services' deadlines are judged at most while there is always something to read.
const MAX_LAG: Duration = Duration::from_secs(1);
/// Read requests of one peer that may wait; more are refused as busy.
const MAX_JOBS: usize = 1024;
/// Bytes of such requests together.
const MAX_JOB_BYTES: usize = 64 << 20;

impl Sink for Core {
    fn segment(&mut self, bytes: &[u8]) {
        match Segment::parse(bytes) {
            Ok(segment) => self.arrived(&segment),
            Err(error) => self.drop_segment(&error.to_string()),
        }
    }

    fn sent(&mut self, endpoint: EndpointId, buffer: SendBuffer, result: Result<(), FabricError>) {
        self.recycle(buffer);
        if let Some(peer) = self.peers.get_mut(&endpoint.0) {
            peer.in_flight = peer.in_flight.saturating_sub(1);
            self.activate(endpoint.0);
        }
        if let Err(error) = result {
            self.endpoint_failed(endpoint, error);
        }
    }

    fn read_done(&mut self, token: ReadToken, result: Result<(), FabricError>) {
        self.operation_done(token, result);
    }

    fn copy_done(&mut self, token: ReadToken, end: CopyEnd) {
        self.batch_done(token, end);
    }

    fn endpoint_failed(&mut self, endpoint: EndpointId, error: FabricError) {
        let reason = error.to_string();
        self.fail(endpoint.0, &reason);
    }

    fn closed(&mut self, endpoint: EndpointId) {
        if let Some(peer) = self.peers.get_mut(&endpoint.0) {
            peer.endpoint = Endpoint::None;
        }
        // A fabric that is shut down closes what nobody has given up yet.
        self.lose(endpoint.0, "its endpoint was closed");
        self.forget_peer(endpoint.0);
    }

    fn protocol_error(&mut self, what: &'static str) {
        self.protocol_violation(what);
    }
}

impl Core {
    /// Something that no kvferry sends; counted, and logged at debug level since anybody can send
    /// it as often as he likes.
    pub(super) fn protocol_violation(&mut self, what: &str) {
        self.drop_segment(what);
    }

    fn drop_segment(&mut self, why: &str) {
        add(&self.counters().segments_dropped, 1);
        tracing::debug!(why, "segment dropped");
    }

    fn arrived(&mut self, segment: &Segment<'_>) {
        let source = segment.header.source;
        let connection = segment.header.connection;
        let id = self.by_incarnation.get(&source).copied();
        let for_us = segment.header.destination == self.shared.incarnation;
        if let (Some(id), true) = (id, for_us)
            && let Some(peer) = self.peers.get_mut(&id)
            && peer.inbound == Some(connection)
        {
            peer.last_heard = self.now;
            if peer.set_suspect(false) {
                subtract(&self.shared.counters.peers_suspect, 1);
                tracing::info!(peer = %peer.name(), "a suspect peer is heard again");
            }
            // Out while it delivers, so that what it delivers can change the peer's state.
            let Some(mut inbox) = peer.inbox.take() else {
                return;
            };
            let result = inbox.accept(segment, &mut |arrival| self.deliver(id, source, arrival));
            if let Some(peer) = self.peers.get_mut(&id) {
                peer.inbox = Some(inbox);
            }
            match result {
                Ok(true) => {}
                Ok(false) => self.drop_segment("duplicate"),
                Err(error) => self.lose(id, &error.to_string()),
            }
            return;
        }
        // A connection of ours that the other side has said nothing on yet.
        let unbound = id.filter(|id| {
            for_us
                && self
                    .peers
                    .get(id)
                    .is_some_and(|peer| peer.inbound.is_none())
        });
        self.stranger(segment, unbound);
    }

    /// A segment of a connection that nobody has greeted on. Only a greeting, or the answer to ours,
    /// makes it somebody's; also if it was meant for an earlier life at our address.
    fn stranger(&mut self, segment: &Segment<'_>, unbound: Option<u64>) {
        let source = segment.header.source;
        let key = (source, segment.header.connection);
        let mut stranger = self.strangers.remove(&key).unwrap_or_else(|| Stranger {
            inbox: Box::new(Inbox::new()),
            since: self.now,
        });
        let mut adopted = None;
        let result = stranger
            .inbox
            .accept(segment, &mut |arrival| match adopted {
                Some(id) => self.deliver(id, source, arrival),
                None => adopted = self.stranger_says(key, unbound, arrival),
            });
        match (adopted, result) {
            (Some(id), Ok(_)) => {
                if let Some(peer) = self.peers.get_mut(&id) {
                    peer.inbound = Some(key.1);
                    peer.inbox = Some(stranger.inbox);
                    peer.last_heard = self.now;
                }
            }
            (Some(id), Err(error)) => self.lose(id, &error.to_string()),
            (None, Ok(_)) => self.keep_stranger(key, stranger),
            (None, Err(error)) => self.drop_segment(&error.to_string()),
        }
    }

    fn keep_stranger(&mut self, key: (Incarnation, u32), stranger: Stranger) {
        if self.strangers.len() >= MAX_STRANGERS {
            let oldest = self.strangers.iter().min_by_key(|(_, other)| other.since);
            if let Some(oldest) = oldest.map(|(key, _)| *key) {
                self.strangers.remove(&oldest);
            }
        }
        self.strangers.insert(key, stranger);
        self.schedule_peer_tick();
    }

    /// What a stranger's message makes of it: the peer whose connection this is from now on.
    fn stranger_says(
        &mut self,
        (source, connection): (Incarnation, u32),
        unbound: Option<u64>,
        arrival: Arrival<'_>,
    ) -> Option<u64> {
        let Arrival::Message(bytes) = arrival else {
            self.drop_segment("data of a stranger");
            return None;
        };
        match Message::parse(bytes) {
            Ok(Message::Hello(hello)) => {
                let hello = self.hello(source, connection, hello)?;
                let withdrawn = hello.withdrawn;
                let id = match unbound {
                    // Both sides greeted at once: theirs is answered here, ours will be there.
                    Some(id) => {
                        self.accept(id, connection);
                        id
                    }
                    None => self.welcome(hello.from, connection),
                };
                self.learn_withdrawn(id, &withdrawn);
                Some(id)
            }
            Ok(Message::HelloReply(reply)) => self
                .hello_reply(source, reply)
                .filter(|&id| Some(id) == unbound),
            Ok(other) => {
                let what = other.kind_name();
                self.drop_segment(&format!("{what} of a stranger"));
                None
            }
            Err(error) => {
                self.drop_segment(&error.to_string());
                None
            }
        }
    }

    fn deliver(&mut self, peer: u64, source: Incarnation, arrival: Arrival<'_>) {
        match arrival {
            Arrival::Data {
                transfer,
                offset,
                bytes,
            } => {
                self.served_data(peer, transfer, offset, bytes);
            }
            Arrival::Message(bytes) => match Message::parse(bytes) {
                Ok(message) => {
                    add(&self.counters().messages_received, 1);
                    self.message(peer, source, message, bytes);
                }
                Err(error) => {
                    let name = self.peers.get(&peer).map(|it| it.name());
                    let name = name.unwrap_or_default();
                    if let Some(held_back) = self.log.admit("unreadable", &name, self.now) {
                        tracing::warn!(peer = name, %error, held_back, "a peer sent a message that cannot be read");
                    }
                    self.lose(peer, &error.to_string());
                }
            },
        }
    }

    fn message(&mut self, peer: u64, source: Incarnation, message: Message<'_>, bytes: &[u8]) {
        match message {
            Message::Hello(hello) => {
                let inbound = self.peers.get(&peer).and_then(|state| state.inbound);
                if let Some(connection) = inbound
                    && self.hello(source, connection, hello).is_some()
                {
                    self.accept(peer, connection);
                }
            }
            Message::HelloReply(reply) => {
                self.hello_reply(source, reply);
            }
            Message::Ping { token } => {
                self.push_message(peer, kvferry_wire::encode_pong(token));
            }
            // Any byte counts as life; the answer says nothing more.
            Message::Pong { .. } => {}
            Message::Read(request) => self.read_request(peer, &request, bytes),
            Message::ReadRejected(rejected) => {
                let error = TransferError::Rejected {
                    code: rejected.code,
                    detail: rejected.detail,
                };
                self.fail_served(peer, rejected.transfer, error);
            }
            Message::ReadCancel { transfer } => self.stop_serving(peer, transfer),
            Message::Service { channel, payload } => self.service(peer, source, channel, payload),
            Message::Goodbye => self.lose(peer, "it said goodbye"),
            Message::Withdraw(regions) => self.withdrawn_by(peer, regions),
            Message::Withdrawn(regions) => self.let_go(peer, &regions),
        }
    }

    fn service(&mut self, peer: u64, source: Incarnation, channel: u16, payload: &[u8]) {
        let Some(slot) = self
            .services
            .iter_mut()
            .find(|slot| slot.channel == channel)
        else {
            tracing::debug!(peer, channel, "a message for a channel without a service");
            add(&self.counters().messages_dropped, 1);
            return;
        };
        let from = Sender {
            peer: PeerId(peer),
            incarnation: source,
        };
        slot.service.on_message(from, payload, &mut self.replies);
        // What a message starts may end by itself: ask anew when the next look is due.
        slot.next = Some(self.now);
        self.send_replies();
    }

    fn read_request(&mut self, peer: u64, request: &ReadRequest<'_>, bytes: &[u8]) {
        let Some(state) = self.peers.get_mut(&peer) else {
            return;
        };
        let transfer = request.transfer();
        let waiting: usize = state.jobs.iter().map(ServeJob::request_bytes).sum();
        // The peer is ready as soon as it has answered, even if its answer is still to be acted on.
        let job = if !matches!(state.phase, Phase::Ready | Phase::Greeting { .. }) {
            Err(kvferry_wire::ReadRejected {
                transfer,
                code: RejectCode::Withdrawn,
                detail: request.tables().next().map_or(0, u64::from),
            })
        } else if state.jobs.len() >= MAX_JOBS || waiting + bytes.len() > MAX_JOB_BYTES {
            Err(kvferry_wire::ReadRejected {
                transfer,
                code: RejectCode::Busy,
                detail: state.jobs.len() as u64,
            })
        } else {
            let catalog = self.shared.catalog();
            let job = ServeJob::new(request, bytes, |id| catalog.table(id).cloned());
            // Tables that were are not unknown: the read may have crossed with their withdrawal.
            job.map_err(|rejected| match rejected.code {
                RejectCode::UnknownTable if rejected.detail < u64::from(catalog.next_table) => {
                    kvferry_wire::ReadRejected {
                        code: RejectCode::Withdrawn,
                        ..rejected
                    }
                }
                _ => rejected,
            })
        };
        match job {
            Ok(job) => {
                state.jobs.push_back(job);
                self.activate(peer);
            }
            Err(rejected) => {
                tracing::debug!(peer, %transfer, code = %rejected.code, "read refused");
                add(&self.counters().reads_rejected, 1);
                self.push_message(peer, kvferry_wire::encode_read_rejected(&rejected));
            }
        }
    }

    fn stop_serving(&mut self, peer: u64, transfer: TransferId) {
        if let Some(state) = self.peers.get_mut(&peer) {
            state.jobs.retain(|job| job.transfer != transfer);
        }
    }

    /// Calls every service whose time has come.
    ///
    /// The time that services are told is that at which everything that had arrived was delivered,
    /// so that nothing that came in time is judged late. While the fabric never runs dry it is
    /// [`MAX_LAG`] old at most.
    pub(super) fn service_timers(&mut self) -> bool {
        let now = self
            .now
            .checked_sub(MAX_LAG)
            .map_or(self.drained, |lag| self.drained.max(lag));
        let all = std::mem::take(&mut self.tick_services);
        let mut any = false;
        for slot in &mut self.services {
            if all || slot.next.is_some_and(|next| next <= now) {
                any = true;
                slot.next = slot.service.on_tick(now, &mut self.replies);
            }
        }
        self.send_replies();
        any
    }
}

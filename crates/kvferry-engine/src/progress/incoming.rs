//! What arrives: segments, messages, and the fabric's reports.

use std::time::Duration;

use kvferry_wire::{Incarnation, Message, ReadRequest, Segment, TransferId};

use super::core::Core;
use super::greeting::{MAX_STRANGERS, Stranger};
use super::peers::Phase;
use crate::counters::add;
use crate::error::TransferError;
use crate::fabric::{EndpointId, FabricError, ReadToken, SendBuffer, Sink};
use crate::lane::served::ServeJob;
use crate::message::{Arrival, Inbox};
use crate::service::{PeerId, Sender};

/// How late services' deadlines are judged at most while there is always something to read.
const MAX_LAG: Duration = Duration::from_secs(1);
/// Read requests of one peer that may wait; more are refused as busy.
const MAX_JOBS: usize = 1024;

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
            self.lose(endpoint.0, &error.to_string());
        }
    }

    fn read_done(&mut self, token: ReadToken, result: Result<(), FabricError>) {
        self.native_done(token, result);
    }

    fn endpoint_failed(&mut self, endpoint: EndpointId, error: FabricError) {
        self.lose(endpoint.0, &error.to_string());
    }

    fn closed(&mut self, endpoint: EndpointId) {
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
        let known = self.by_incarnation.get(&source).copied();
        let for_us = segment.header.destination == self.shared.incarnation;
        if let (Some(id), true) = (known, for_us)
            && let Some(peer) = self.peers.get_mut(&id)
            && peer.is_from(connection)
        {
            peer.last_heard = self.now;
            peer.suspect = false;
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
        self.stranger(segment);
    }

    /// A segment of an engine, or a connection, that has not greeted. Only a greeting or the refusal
    /// of ours is of interest, also if it was meant for an earlier life at our address.
    fn stranger(&mut self, segment: &Segment<'_>) {
        let source = segment.header.source;
        let key = (source, segment.header.connection);
        if !self.strangers.contains_key(&key) {
            if self.strangers.len() >= MAX_STRANGERS {
                let oldest = self
                    .strangers
                    .iter()
                    .min_by_key(|(_, s)| s.since)
                    .map(|(k, _)| *k);
                if let Some(oldest) = oldest {
                    self.strangers.remove(&oldest);
                }
            }
            let stranger = Stranger {
                inbox: Box::new(Inbox::new()),
                since: self.now,
            };
            self.strangers.insert(key, stranger);
            self.schedule_peer_tick();
        }
        let Some(mut stranger) = self.strangers.remove(&key) else {
            return;
        };
        let mut welcome = None;
        let result = stranger.inbox.accept(segment, &mut |arrival| {
            let Arrival::Message(bytes) = arrival else {
                self.drop_segment("data of a stranger");
                return;
            };
            match Message::parse(bytes) {
                Ok(Message::Hello(hello)) => {
                    let from = hello.from.clone();
                    if self.hello(source, None, hello) {
                        welcome = Some(from);
                    }
                }
                Ok(Message::HelloReply(reply)) => self.hello_reply(source, reply),
                Ok(other) => {
                    let what = other.kind_name();
                    self.drop_segment(&format!("{what} of a stranger"));
                }
                Err(error) => self.drop_segment(&error.to_string()),
            }
        });
        match (result, welcome) {
            (Ok(_), Some(description)) => {
                self.welcome(description, key.1, stranger.inbox);
            }
            (Ok(_), None) => {
                self.strangers.insert(key, stranger);
            }
            (Err(error), _) => self.drop_segment(&error.to_string()),
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
                    tracing::warn!(peer, %error, "a peer sent a message that cannot be read");
                    self.lose(peer, &error.to_string());
                }
            },
        }
    }

    fn message(&mut self, peer: u64, source: Incarnation, message: Message<'_>, bytes: &[u8]) {
        match message {
            Message::Hello(hello) => {
                self.hello(source, Some(peer), hello);
            }
            Message::HelloReply(reply) => self.hello_reply(source, reply),
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
        if !matches!(state.phase, Phase::Ready) {
            return;
        }
        let transfer = request.transfer();
        let job = if state.jobs.len() >= MAX_JOBS {
            Err(kvferry_wire::ReadRejected {
                transfer,
                code: kvferry_wire::RejectCode::Busy,
                detail: state.jobs.len() as u64,
            })
        } else {
            let catalog = self.shared.catalog();
            ServeJob::new(request, bytes, |id| catalog.table(id).cloned())
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

//! The state of a progress thread.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam::channel::Sender;
use kvferry_wire::{Description, Incarnation, RegionSet, SEGMENT_HEADER_BYTES};

use super::asked::Asked;
use super::backoff::Backoff;
use super::escalation::Escalations;
use super::greeting::Stranger;
use super::peers::PeerState;
use super::posting::Flights;
use super::transfers::Transfers;
use crate::command::ReleaseRegion;
use crate::counters::{Counters, add};
use crate::error::EngineError;
use crate::fabric::{Capabilities, Fabric, SendBuffer};
use crate::limit::LogLimits;
use crate::memory::CopyBatch;
use crate::peer::check_payload;
use crate::service::{PeerId, Replies, Service};
use crate::shared::Shared;

/// What a report asked for that needs the fabric.
pub(super) enum Action {
    /// Make the endpoint of a peer that greeted us.
    Connect(u64),
    /// A peer has answered our greeting: pick its lane.
    Greeted(u64),
    /// Close a peer's endpoint.
    Close(u64),
    /// Destroy what carries one-sided reads.
    Reset,
    /// Tell an engine, which is no peer, that its greeting is refused.
    Refuse {
        to: Box<Description>,
        reply: Vec<u8>,
    },
}

pub(super) struct ServiceSlot {
    pub(super) channel: u16,
    pub(super) service: Box<dyn Service>,
    pub(super) next: Option<Instant>,
}

pub(super) struct ShutdownState {
    pub(super) deadline: Instant,
    pub(super) replies: Vec<Sender<()>>,
}

pub(crate) struct Core {
    pub(super) shared: Arc<Shared>,
    pub(super) max_segment: usize,
    pub(super) services: Vec<ServiceSlot>,
    pub(super) replies: Replies,
    pub(super) peers: HashMap<u64, PeerState>,
    pub(super) by_incarnation: HashMap<Incarnation, u64>,
    pub(super) strangers: HashMap<(Incarnation, u32), Stranger>,
    pub(super) next_peer: u64,
    pub(super) transfers: Transfers,
    /// Peers that have something to send or to post.
    pub(super) active: VecDeque<u64>,
    pub(super) actions: Vec<Action>,
    pub(super) releases: Vec<ReleaseRegion>,
    /// Whether some of them are new.
    pub(super) released: bool,
    /// Regions of theirs that peers were not asked about yet.
    pub(super) unasked: RegionSet,
    pub(super) asked: Asked,
    pub(super) backoff: Backoff,
    /// Peers whose withdrawals we have not answered.
    pub(super) owing: Vec<u64>,
    pub(super) free_buffers: Vec<SendBuffer>,
    pub(super) flights: Flights,
    pub(super) escalations: Escalations,
    #[expect(clippy::vec_box, reason = "they go to threads and back as they are")]
    pub(super) free_batches: Vec<Box<CopyBatch>>,
    pub(super) now: Instant,
    /// When everything that had arrived had last been looked at.
    pub(super) drained: Instant,
    pub(super) next_peer_tick: Option<Instant>,
    pub(super) tick_services: bool,
    pub(super) shutdown: Option<ShutdownState>,
    pub(super) log: LogLimits,
}

/// Buffers kept for reuse.
const MAX_FREE_BUFFERS: usize = 64;
/// A turn that begins this long after the last one means that we, not our peers, were away.
const LOST_TIME: Duration = Duration::from_millis(500);

impl Core {
    pub(super) fn new(
        shared: Arc<Shared>,
        capabilities: &Capabilities,
        services: Vec<(u16, Box<dyn Service>)>,
    ) -> Result<Self, EngineError> {
        let max_segment = capabilities.max_segment_bytes;
        if max_segment <= SEGMENT_HEADER_BYTES {
            return Err(EngineError::Config {
                field: "max_segment_bytes of the fabric",
                value: max_segment.to_string(),
                expected: "more than a segment header",
            });
        }
        let now = Instant::now();
        let services = services
            .into_iter()
            .map(|(channel, service)| ServiceSlot {
                channel,
                service,
                next: Some(now),
            })
            .collect();
        let config = &shared.config;
        let (min, max) = (config.reconnect_backoff_min, config.reconnect_backoff_max);
        // Random already.
        let seed = shared.incarnation.to_bytes().into_iter();
        let seed = seed.fold(0_u64, |seed, byte| seed.rotate_left(8) ^ u64::from(byte));
        let backoff = Backoff::new(min, max, seed);
        Ok(Self {
            max_segment,
            shared,
            services,
            replies: Replies::default(),
            peers: HashMap::new(),
            by_incarnation: HashMap::new(),
            strangers: HashMap::new(),
            next_peer: 1,
            transfers: Transfers::default(),
            active: VecDeque::new(),
            actions: Vec::new(),
            releases: Vec::new(),
            released: false,
            unasked: RegionSet::default(),
            asked: Asked::default(),
            backoff,
            owing: Vec::new(),
            free_buffers: Vec::new(),
            flights: Flights::default(),
            escalations: Escalations::default(),
            free_batches: Vec::new(),
            now,
            drained: now,
            next_peer_tick: None,
            tick_services: false,
            shutdown: None,
            log: LogLimits::default(),
        })
    }

    pub(super) fn counters(&self) -> &Counters {
        &self.shared.counters
    }

    /// Takes the time. If the thread itself was away, the silence of peers in that time is not held
    /// against them.
    pub(super) fn begin_turn(&mut self) -> Instant {
        let now = Instant::now();
        if now.duration_since(self.now) > LOST_TIME
            && let Some(deadline) = self.next_deadline()
        {
            // A sleep ends at the next deadline; what came after it was lost.
            let lost = now.saturating_duration_since(deadline.max(self.now));
            if lost > LOST_TIME {
                tracing::warn!(?lost, "the progress thread was held up");
                for peer in self.peers.values_mut() {
                    peer.was_away(lost);
                }
                self.asked.was_away(lost);
            }
        }
        self.now = now;
        now
    }

    /// Lets go of the services, for an end that must not call them.
    pub(super) fn drop_services(&mut self) {
        self.services.clear();
    }

    /// Does what reports asked for. True if there was anything.
    pub(super) fn act(&mut self, fabric: &mut dyn Fabric) -> bool {
        let mut any = false;
        while !self.actions.is_empty() {
            any = true;
            for action in std::mem::take(&mut self.actions) {
                match action {
                    Action::Connect(peer) => self.connect_back(peer, fabric),
                    Action::Greeted(peer) => self.greeted(peer, fabric),
                    Action::Close(peer) => self.close_endpoint(peer, fabric),
                    Action::Reset => self.reset(fabric),
                    Action::Refuse { to, reply } => self.refuse_greeting(*to, reply, fabric),
                }
            }
        }
        // Behind the answers to greetings: before them, messages are nobody's.
        any |= self.withdraw(fabric);
        any | self.answer_withdrawals(fabric)
    }

    /// Marks a peer as having something to send or post.
    pub(super) fn activate(&mut self, peer: u64) {
        if let Some(state) = self.peers.get_mut(&peer)
            && !state.queued
        {
            state.queued = true;
            self.active.push_back(peer);
        }
    }

    /// Queues an encoded message. To a peer that is gone it is dropped and counted.
    pub(super) fn push_message(&mut self, peer: u64, message: Vec<u8>) {
        match self.peers.get_mut(&peer) {
            Some(state) if !state.is_lost() => {
                state.outbox.push(message);
                self.activate(peer);
            }
            _ => add(&self.shared.counters.messages_dropped, 1),
        }
    }

    /// Queues a service message.
    pub(super) fn push_service(&mut self, peer: PeerId, channel: u16, payload: &[u8]) {
        let encoded = check_payload(payload.len())
            .map_err(|error| error.to_string())
            .and_then(|()| {
                kvferry_wire::encode_service(channel, payload).map_err(|error| error.to_string())
            });
        match encoded {
            Ok(message) => self.push_message(peer.0, message),
            Err(error) => {
                if let Some(held_back) = self.log.admit("not sent", &peer.to_string(), self.now) {
                    tracing::warn!(%peer, channel, error, held_back, "a service message was not sent");
                }
                add(&self.shared.counters.messages_dropped, 1);
            }
        }
    }

    /// Sends what services queued.
    pub(super) fn send_replies(&mut self) {
        if self.replies.outgoing.is_empty() {
            return;
        }
        for (peer, channel, payload) in std::mem::take(&mut self.replies.outgoing) {
            self.push_service(peer, channel, &payload);
        }
    }

    pub(super) fn take_buffer(&mut self) -> SendBuffer {
        self.free_buffers
            .pop()
            .unwrap_or_else(|| SendBuffer::new(self.max_segment))
    }

    pub(super) fn recycle(&mut self, buffer: SendBuffer) {
        if self.free_buffers.len() < MAX_FREE_BUFFERS {
            self.free_buffers.push(buffer);
        }
    }
}

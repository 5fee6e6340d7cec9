//! Peers as the progress thread sees them: their state, their end.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crossbeam::channel::Sender;
use kvferry_wire::{Description, Incarnation, RegionSet, TransferId};

use super::core::{Action, Core};
use crate::counters::{add, subtract};
use crate::error::{ConnectError, TransferError};
use crate::fabric::{EndpointId, Fabric, KeyId};
use crate::lane::served::ServeJob;
use crate::message::{Inbox, Outbox};
use crate::peer::{Greeted, Life};
use crate::service::PeerId;

/// Somebody who waits for a greeting to be answered.
pub(super) type Waiter = Sender<Result<Greeted, ConnectError>>;

pub(super) enum Phase {
    /// We have greeted and wait for the answer.
    Greeting {
        since: Instant,
        deadline: Instant,
        waiters: Vec<Waiter>,
    },
    /// Greeted and answered.
    Ready,
    /// Saying goodbye; closed when all is sent, at the latest at the deadline.
    Leaving {
        deadline: Instant,
        reason: String,
        /// Whether it was ready before; a refused engine was no peer.
        was_ready: bool,
    },
    /// Over; waits for its endpoint to be closed.
    Lost,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Endpoint {
    None,
    Open,
    Closing,
}

pub(super) struct PeerState {
    pub(super) id: u64,
    pub(super) description: Arc<Description>,
    pub(super) phase: Phase,
    pub(super) endpoint: Endpoint,
    pub(super) transports: String,
    pub(super) gone: Arc<OnceLock<String>>,
    pub(super) life: Arc<Life>,
    pub(super) outbox: Outbox,
    /// The next sequence number to send.
    pub(super) sequence: u64,
    /// The peer's number for this connection, once it has said anything.
    pub(super) inbound: Option<u32>,
    /// Taken out while a segment is being delivered.
    pub(super) inbox: Option<Box<Inbox>>,
    /// Segments handed to the fabric and not reported.
    pub(super) in_flight: usize,
    /// Reads that the peer asked for.
    pub(super) jobs: VecDeque<ServeJob>,
    /// Transfers with something left to post; they take turns.
    pub(super) reads: VecDeque<TransferId>,
    /// Their operations in flight: how many, and of how many bytes.
    pub(super) reads_in_flight: usize,
    pub(super) bytes_in_flight: u64,
    /// The peer's regions and their chunks whose keys were imported.
    pub(super) keys: HashMap<(u32, u64), KeyId>,
    /// Withdrawals of the peer that we have not answered.
    pub(super) owed: Vec<RegionSet>,
    pub(super) last_heard: Instant,
    pub(super) last_ping: Instant,
    /// The segment that is missing while later ones are there, and since when.
    pub(super) gap: Option<(u64, Instant)>,
    /// Whether it is in `Core::active`.
    pub(super) queued: bool,
}

impl PeerState {
    pub(super) fn incarnation(&self) -> Incarnation {
        self.description.incarnation
    }

    pub(super) fn name(&self) -> String {
        format!("{} {}", self.description.engine, self.description.rank)
    }

    pub(super) fn is_lost(&self) -> bool {
        matches!(self.phase, Phase::Lost)
    }

    pub(super) fn is_ready(&self) -> bool {
        matches!(self.phase, Phase::Ready)
    }

    /// Says whether it has been silent for too long; true if that is news.
    pub(super) fn set_suspect(&self, suspect: bool) -> bool {
        self.life.set_suspect(suspect) != suspect
    }

    /// Time that our own thread was away is not held against the peer.
    pub(super) fn was_away(&mut self, lost: Duration) {
        self.last_heard += lost;
        if let Some((_, since)) = &mut self.gap {
            *since += lost;
        }
        if let Phase::Greeting { deadline, .. } = &mut self.phase {
            *deadline += lost;
        }
    }

    /// Our number for the connection, as segments carry it. The low half of the id is enough: it
    /// only has to differ from other connections that are remembered somewhere.
    pub(super) fn connection(&self) -> u32 {
        self.id as u32
    }

    /// True if the same worker of the same engine is meant, in whatever life.
    pub(super) fn is_same_worker(&self, other: &Description) -> bool {
        self.description.engine == other.engine && self.description.rank == other.rank
    }
}

impl Core {
    /// Adds a peer. Other connections and lives of the same worker stay until this one is known to be
    /// there, see [`retire_others`](Self::retire_others).
    pub(super) fn add_peer(
        &mut self,
        description: Arc<Description>,
        phase: Phase,
        inbound: Option<u32>,
        inbox: Box<Inbox>,
    ) -> u64 {
        let incarnation = description.incarnation;
        let id = self.insert_peer(description, phase, inbound, inbox);
        self.by_incarnation.insert(incarnation, id);
        id
    }

    /// Adds the state of a connection; its number is also its endpoint's.
    pub(super) fn insert_peer(
        &mut self,
        description: Arc<Description>,
        phase: Phase,
        inbound: Option<u32>,
        inbox: Box<Inbox>,
    ) -> u64 {
        let id = self.next_peer;
        self.next_peer += 1;
        let state = PeerState {
            id,
            description,
            phase,
            endpoint: Endpoint::None,
            transports: String::new(),
            gone: Arc::default(),
            life: Arc::default(),
            outbox: Outbox::default(),
            sequence: 0,
            inbound,
            inbox: Some(inbox),
            in_flight: 0,
            jobs: VecDeque::new(),
            reads: VecDeque::new(),
            reads_in_flight: 0,
            bytes_in_flight: 0,
            keys: HashMap::new(),
            owed: Vec::new(),
            last_heard: self.now,
            last_ping: self.now,
            gap: None,
            queued: false,
        };
        self.peers.insert(id, state);
        add(&self.counters().connections_held, 1);
        self.schedule_peer_tick();
        id
    }

    /// A worker that has greeted or answered on the connection `id` is there: that ends its other
    /// connections and lives. An attempt alone proves nothing, since the description may be an old one.
    pub(super) fn retire_others(&mut self, id: u64) {
        let Some(peer) = self.peers.get(&id) else {
            return;
        };
        let is_other = |other: &&PeerState| {
            other.id != id && !other.is_lost() && other.is_same_worker(&peer.description)
        };
        let earlier = self.peers.values().filter(is_other);
        let earlier: Vec<u64> = earlier.map(|peer| peer.id).collect();
        for id in earlier {
            self.lose(
                id,
                "replaced by a new connection or a new life of the same worker",
            );
        }
    }

    /// What a handle of a ready peer is made of.
    pub(super) fn greeted_peer(
        &self,
        id: u64,
        fabric: &dyn Fabric,
    ) -> Result<Greeted, ConnectError> {
        let Some(peer) = self.peers.get(&id) else {
            return Err(ConnectError::Engine("the peer is gone".into()));
        };
        Ok(Greeted {
            id: PeerId(id),
            description: Arc::clone(&peer.description),
            transports: peer.transports.clone(),
            native: fabric.native_reads(EndpointId(id)),
            gone: Arc::clone(&peer.gone),
            life: Arc::clone(&peer.life),
        })
    }

    /// Ends a peer that has failed by itself, and is not tried again at once. Besides, UCX 1.13 aborts if an
    /// endpoint is made to an address of which it is just tearing a connection down.
    pub(super) fn fail(&mut self, id: u64, reason: &str) {
        if let Some(peer) = self.peers.get(&id).filter(|peer| peer.is_ready()) {
            let lost = ConnectError::Lost {
                peer: peer.name(),
                tried: peer.transports.clone(),
                reason: reason.into(),
            };
            self.backoff.failed(&peer.description, self.now, lost);
        }
        self.lose(id, reason);
    }

    /// Ends a peer: its transfers fail, its endpoint is closed, its services are told.
    pub(super) fn lose(&mut self, id: u64, reason: &str) {
        let Some(peer) = self.peers.get_mut(&id) else {
            return;
        };
        if peer.is_lost() {
            return;
        }
        let name = peer.name();
        let phase = std::mem::replace(&mut peer.phase, Phase::Lost);
        // A goodbye of ours was the first reason.
        let reason = match &phase {
            Phase::Leaving { reason, .. } => &reason.clone(),
            _ => reason,
        };
        // Counted first, so that whoever sees it gone finds it so.
        if peer.set_suspect(false) {
            subtract(&self.shared.counters.peers_suspect, 1);
        }
        let _ = peer.gone.set(reason.to_owned());
        peer.jobs.clear();
        peer.reads.clear();
        peer.outbox = Outbox::default();
        peer.owed.clear();
        self.asked.ending(id);
        let incarnation = peer.incarnation();
        let endpoint = peer.endpoint;
        let tried = peer.transports.clone();
        if self.by_incarnation.get(&incarnation) == Some(&id) {
            self.by_incarnation.remove(&incarnation);
            self.shared.same_host().remove(&incarnation);
        }
        match phase {
            Phase::Greeting { waiters, .. } => {
                let lost = ConnectError::Lost {
                    peer: name,
                    tried,
                    reason: reason.into(),
                };
                // Nobody waits any more if it was refused or not answered.
                if !waiters.is_empty() {
                    self.backoff
                        .failed(&peer.description, self.now, lost.clone());
                }
                for waiter in waiters {
                    let _ = waiter.send(Err(lost.clone()));
                }
            }
            Phase::Leaving {
                was_ready: false, ..
            } => {
                tracing::debug!(engine = %name, %incarnation, reason, "connection closed");
            }
            Phase::Ready | Phase::Leaving { .. } => {
                if let Some(held_back) = self.log.admit("lost", &name.to_string(), self.now) {
                    tracing::info!(peer = %name, %incarnation, reason, held_back, "peer lost");
                }
                add(&self.counters().peers_lost, 1);
                for slot in &mut self.services {
                    slot.service.on_peer_gone(PeerId(id));
                }
            }
            Phase::Lost => {}
        }
        self.fail_transfers_of(id, |_, _| TransferError::PeerLost(reason.into()));
        match endpoint {
            Endpoint::Open => self.actions.push(Action::Close(id)),
            Endpoint::None => self.forget_peer(id),
            Endpoint::Closing => {}
        }
    }

    pub(super) fn close_endpoint(&mut self, id: u64, fabric: &mut dyn Fabric) {
        if let Some(peer) = self.peers.get_mut(&id)
            && peer.endpoint == Endpoint::Open
        {
            peer.endpoint = Endpoint::Closing;
            fabric.close(EndpointId(id));
        }
    }

    /// The endpoint is closed and everything on it was reported: nothing is left of the peer.
    pub(super) fn forget_peer(&mut self, id: u64) {
        if self.peers.remove(&id).is_some() {
            subtract(&self.counters().connections_held, 1);
        }
        self.asked.gone(id);
    }
}

//! Greetings: no data moves on an endpoint before a `Hello` with both lives was answered on it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_wire::{Description, Hello, HelloRejectCode, HelloReply, Incarnation};

use super::core::{Action, Core};
use super::peers::{Endpoint, Phase};
use crate::command::ConnectCommand;
use crate::config::incompatibility;
use crate::counters::add;
use crate::error::ConnectError;
use crate::fabric::{EndpointId, Fabric, FabricError};
use crate::generations::misread;
use crate::message::Inbox;

/// An engine that has sent segments but no whole greeting.
pub(super) struct Stranger {
    pub(super) inbox: Box<Inbox>,
    pub(super) since: Instant,
}

/// Strangers kept at once; the oldest makes room.
pub(super) const MAX_STRANGERS: usize = 64;
/// How long a refusal or a goodbye may take to leave.
pub(super) const LINGER: Duration = Duration::from_secs(1);

impl Core {
    /// A handle asks for a peer.
    pub(super) fn connect(&mut self, command: ConnectCommand, fabric: &mut dyn Fabric) {
        let ConnectCommand {
            description,
            timeout,
            reply,
        } = command;
        if let Some(&id) = self.by_incarnation.get(&description.incarnation)
            && let Some(peer) = self.peers.get_mut(&id)
        {
            match &mut peer.phase {
                Phase::Ready => {
                    // The same life, which may have added tables since.
                    peer.description = description;
                    let _ = reply.send(self.greeted_peer(id, fabric));
                    return;
                }
                Phase::Greeting { waiters, .. } => {
                    waiters.push(reply);
                    return;
                }
                Phase::Leaving { .. } | Phase::Lost => self.lose(id, "connected anew"),
            }
        }
        if let Err(early) = self.backoff.check(&description, self.now) {
            let _ = reply.send(Err(ConnectError::BackingOff {
                peer: format!("{} {}", description.engine, description.rank),
                retry_in: early.retry_in,
                last: Box::new(early.last),
            }));
            return;
        }
        let name = format!("{} {}", description.engine, description.rank);
        let found = fabric.capabilities();
        let same_host = description.host == self.shared.host;
        if let Some(reason) = misread(found.ucx, description.ucx, same_host, found.loopback) {
            let _ = reply.send(Err(ConnectError::Unreachable {
                peer: name,
                tried: found.transports.clone(),
                source: FabricError::new("connect", reason),
            }));
            return;
        }
        let deadline = self.now + timeout;
        let phase = Phase::Greeting {
            since: self.now,
            deadline,
            waiters: Vec::new(),
        };
        let expects = description.incarnation;
        let id = self.add_peer(
            Arc::clone(&description),
            phase,
            None,
            Box::new(Inbox::new()),
        );
        if let Err(source) = fabric.connect(EndpointId(id), &description.addresses) {
            let tried = fabric.capabilities().transports.clone();
            let error = ConnectError::Unreachable {
                peer: name,
                tried,
                source,
            };
            self.backoff.failed(&description, self.now, error.clone());
            let _ = reply.send(Err(error));
            self.lose(id, "no endpoint could be made");
            return;
        }
        let greeting = self.greeting(expects);
        let Some(peer) = self.peers.get_mut(&id) else {
            return;
        };
        peer.endpoint = Endpoint::Open;
        peer.transports = fabric.transports(EndpointId(id));
        match greeting {
            Ok(message) => {
                if let Phase::Greeting { waiters, .. } = &mut peer.phase {
                    waiters.push(reply);
                }
                self.push_message(id, message);
            }
            Err(reason) => {
                let _ = reply.send(Err(ConnectError::BadDescription { reason }));
                self.lose(id, "the greeting could not be written");
            }
        }
    }

    fn greeting(&self, expects: Incarnation) -> Result<Vec<u8>, String> {
        let from = self.shared.describe().ok_or("the engine has not started")?;
        let withdrawn = self.shared.catalog().withdrawn.clone();
        let hello = Hello {
            expects,
            from,
            withdrawn,
        };
        kvferry_wire::encode_hello(&hello).map_err(|error| error.to_string())
    }

    /// A whole greeting has come from an engine. If it is right, returns who greets; else it is
    /// refused.
    pub(super) fn hello(
        &mut self,
        source: Incarnation,
        connection: u32,
        hello: Hello,
    ) -> Option<Hello> {
        if hello.from.incarnation != source {
            self.protocol_violation("a greeting in another engine's name");
            return None;
        }
        if hello.expects != self.shared.incarnation {
            let reply = HelloReply::Rejected {
                connection,
                code: HelloRejectCode::WrongIncarnation,
                reason: format!(
                    "this address belongs to engine {} incarnation {} now; fetch its description again",
                    self.shared.config.engine_id, self.shared.incarnation
                ),
            };
            self.refuse(hello.from, &reply);
            return None;
        }
        if self.shutdown.is_some() {
            let reply = HelloReply::Rejected {
                connection,
                code: HelloRejectCode::ShuttingDown,
                reason: format!("engine {} is shutting down", self.shared.config.engine_id),
            };
            self.refuse(hello.from, &reply);
            return None;
        }
        let ours = &self.shared.config.compatibility;
        if let Some(reason) = incompatibility(ours, &hello.from.compatibility) {
            let reply = HelloReply::Rejected {
                connection,
                code: HelloRejectCode::Incompatible,
                reason,
            };
            self.refuse(hello.from, &reply);
            return None;
        }
        Some(hello)
    }

    /// Makes a peer of a stranger whose greeting was right.
    pub(super) fn welcome(&mut self, description: Description, connection: u32) -> u64 {
        let inbox = Box::new(Inbox::new());
        let description = Arc::new(description);
        let id = self.add_peer(description, Phase::Ready, Some(connection), inbox);
        self.retire_others(id);
        self.actions.push(Action::Connect(id));
        id
    }

    /// Makes the endpoint back to a peer that greeted us, and answers.
    pub(super) fn connect_back(&mut self, id: u64, fabric: &mut dyn Fabric) {
        let Some(peer) = self.peers.get_mut(&id) else {
            return;
        };
        if peer.is_lost() || peer.endpoint != Endpoint::None {
            return;
        }
        match fabric.connect(EndpointId(id), &peer.description.addresses) {
            Ok(()) => {
                peer.endpoint = Endpoint::Open;
                peer.transports = fabric.transports(EndpointId(id));
                let name = peer.description.engine.as_str();
                if let Some(held_back) = self.log.admit("greeted", name, self.now) {
                    tracing::info!(
                        peer = name,
                        rank = %peer.description.rank,
                        incarnation = %peer.incarnation(),
                        transports = %peer.transports,
                        held_back,
                        "greeted by a peer"
                    );
                }
                let inbound = peer.inbound;
                self.backoff.reached(&peer.description);
                add(&self.counters().peers_connected, 1);
                if let Some(connection) = inbound {
                    self.accept(id, connection);
                }
            }
            Err(error) => {
                let name = peer.name();
                if let Some(held_back) = self.log.admit("no way back", &name, self.now) {
                    tracing::warn!(peer = name, %error, held_back, "no endpoint back to a peer that greeted");
                }
                self.lose(id, "no endpoint back could be made");
            }
        }
    }

    /// Answers a greeting that came on the peer's connection `connection`.
    pub(super) fn accept(&mut self, id: u64, connection: u32) {
        let reply = HelloReply::Accepted {
            incarnation: self.shared.incarnation,
            connection,
            withdrawn: self.shared.catalog().withdrawn.clone(),
        };
        match kvferry_wire::encode_hello_reply(&reply) {
            Ok(message) => self.push_message(id, message),
            Err(error) => tracing::error!(%error, "a greeting could not be answered"),
        }
    }

    fn refuse(&mut self, to: Description, reply: &HelloReply) {
        let name = to.engine.as_str();
        if let Some(held_back) = self.log.admit("greeting refused", name, self.now) {
            tracing::info!(peer = name, rank = %to.rank, ?reply, held_back, "greeting refused");
        }
        match kvferry_wire::encode_hello_reply(reply) {
            Ok(reply) => self.actions.push(Action::Refuse {
                to: Box::new(to),
                reply,
            }),
            Err(error) => tracing::error!(%error, "a greeting could not be refused"),
        }
    }

    /// Sends a refusal over an endpoint of its own, which is closed when it has left.
    pub(super) fn refuse_greeting(
        &mut self,
        to: Description,
        reply: Vec<u8>,
        fabric: &mut dyn Fabric,
    ) {
        let addresses = to.addresses.clone();
        let phase = Phase::Leaving {
            deadline: self.now + LINGER,
            reason: "its greeting was refused".into(),
            was_ready: false,
        };
        let id = self.insert_peer(Arc::new(to), phase, None, Box::new(Inbox::new()));
        match fabric.connect(EndpointId(id), &addresses) {
            Ok(()) => {
                if let Some(peer) = self.peers.get_mut(&id) {
                    peer.endpoint = Endpoint::Open;
                }
                self.push_message(id, reply);
            }
            Err(error) => {
                tracing::debug!(%error, "a refusal could not be delivered");
                self.lose(id, "no endpoint for a refusal");
            }
        }
    }

    /// Our greeting was answered. Returns whose answer it is if the peer can be used; a refusal may
    /// come from a stranger.
    pub(super) fn hello_reply(&mut self, source: Incarnation, reply: HelloReply) -> Option<u64> {
        match reply {
            HelloReply::Accepted {
                incarnation,
                connection,
                withdrawn,
            } => {
                let id = self.greeting_on(connection).filter(|id| {
                    let peer = self.peers.get(id);
                    incarnation == source && peer.is_some_and(|peer| peer.incarnation() == source)
                });
                match id {
                    Some(id) => {
                        // Before anybody can read.
                        self.learn_withdrawn(id, &withdrawn);
                        self.actions.push(Action::Greeted(id));
                    }
                    None => self.protocol_violation("an answer to a greeting that was not sent"),
                }
                id
            }
            HelloReply::Rejected {
                connection,
                code,
                reason,
            } => {
                let Some(id) = self.greeting_on(connection) else {
                    self.protocol_violation("a refusal of a greeting that was not sent");
                    return None;
                };
                let peer = self.peers.get_mut(&id)?;
                let name = peer.name();
                if let Phase::Greeting { waiters, .. } = &mut peer.phase {
                    for waiter in std::mem::take(waiters) {
                        let _ = waiter.send(Err(ConnectError::Refused {
                            peer: name.clone(),
                            reason: format!("{code}: {reason}"),
                        }));
                    }
                }
                self.lose(id, "the greeting was refused");
                None
            }
        }
    }

    /// The peer that we greet on the connection of this number.
    fn greeting_on(&self, connection: u32) -> Option<u64> {
        self.peers
            .values()
            .find(|peer| {
                peer.connection() == connection && matches!(peer.phase, Phase::Greeting { .. })
            })
            .map(|peer| peer.id)
    }

    /// Our greeting was answered: the peer can be used.
    pub(super) fn greeted(&mut self, id: u64, fabric: &dyn Fabric) {
        let Some(peer) = self.peers.get_mut(&id) else {
            return;
        };
        if !matches!(peer.phase, Phase::Greeting { .. }) {
            return;
        }
        // First, so that whoever is told finds one life.
        self.retire_others(id);
        let Some(peer) = self.peers.get_mut(&id) else {
            return;
        };
        let phase = std::mem::replace(&mut peer.phase, Phase::Ready);
        peer.transports = fabric.transports(EndpointId(id));
        self.backoff.reached(&peer.description);
        add(&self.counters().peers_connected, 1);
        if let Phase::Greeting { waiters, .. } = phase {
            for waiter in waiters {
                let _ = waiter.send(self.greeted_peer(id, fabric));
            }
        }
    }

    /// Greetings whose time is over, and strangers who never greeted.
    pub(super) fn greeting_timers(&mut self) {
        let now = self.now;
        let timeout = self.shared.config.connect_timeout;
        self.strangers
            .retain(|_, stranger| now.duration_since(stranger.since) < timeout);
        let late: Vec<u64> = self
            .peers
            .values()
            .filter(
                |peer| matches!(peer.phase, Phase::Greeting { deadline, .. } if deadline <= now),
            )
            .map(|peer| peer.id)
            .collect();
        for id in late {
            let Some(peer) = self.peers.get_mut(&id) else {
                continue;
            };
            let (name, tried) = (peer.name(), peer.transports.clone());
            if let Phase::Greeting { since, waiters, .. } = &mut peer.phase {
                let waited = now.duration_since(*since);
                let error = ConnectError::NoAnswer {
                    peer: name,
                    tried,
                    waited,
                };
                for waiter in std::mem::take(waiters) {
                    let _ = waiter.send(Err(error.clone()));
                }
                self.backoff.failed(&peer.description, now, error);
            }
            self.lose(id, "the greeting was not answered in time");
        }
    }
}

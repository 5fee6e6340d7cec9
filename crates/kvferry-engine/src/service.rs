//! Upper layers on the progress thread.
//!
//! A [`Service`] answers peers without waiting for anybody's engine step: the lease table is one.

use std::time::Instant;

use kvferry_wire::Incarnation;

/// A peer's number in this engine; never reused while the engine lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerId(pub(crate) u64);

impl PeerId {
    /// A peer that no engine has, for tests of services.
    #[must_use]
    pub const fn for_tests(number: u64) -> Self {
        Self(number)
    }
}

impl std::fmt::Display for PeerId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "peer {}", self.0)
    }
}

/// The peer a message came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sender {
    /// Where answers go.
    pub peer: PeerId,
    /// The life that sent it.
    pub incarnation: Incarnation,
}

/// Messages that a service wants sent; they leave when the call returns.
#[derive(Debug, Default)]
pub struct Replies {
    pub(crate) outgoing: Vec<(PeerId, u16, Vec<u8>)>,
}

impl Replies {
    /// An empty set; the engine makes its own, this is for tests of services.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sends `payload` (1 byte to 16 MiB less a header) to a peer's service on `channel`. A message
    /// to a peer that is gone is dropped and counted.
    pub fn send(&mut self, peer: PeerId, channel: u16, payload: Vec<u8>) {
        self.outgoing.push((peer, channel, payload));
    }

    /// Takes what was queued, for tests of services.
    pub fn take(&mut self) -> Vec<(PeerId, u16, Vec<u8>)> {
        std::mem::take(&mut self.outgoing)
    }
}

/// A part of an upper layer that runs on the engine's progress thread.
///
/// Every method must return at once: while it runs, nothing else of the engine does. Blocking calls
/// of [`Engine`](crate::Engine) (register, connect, deregister, shutdown) only time out here. Messages that
/// arrived are always delivered before [`on_tick`](Self::on_tick), so a service that judges
/// deadlines there has seen everything that came in time.
///
/// ```
/// use std::time::Instant;
/// use kvferry_engine::{Replies, Sender, Service};
///
/// /// Answers every message with its length.
/// struct Lengths;
///
/// impl Service for Lengths {
///     fn on_message(&mut self, from: Sender, payload: &[u8], replies: &mut Replies) {
///         let length = payload.len() as u64;
///         replies.send(from.peer, 7, length.to_le_bytes().to_vec());
///     }
///
///     fn on_tick(&mut self, _now: Instant, _replies: &mut Replies) -> Option<Instant> {
///         None // it has no deadlines
///     }
/// }
/// ```
pub trait Service: Send {
    /// A peer's message on this service's channel. The bytes are the peer's: parse, never trust.
    fn on_message(&mut self, from: Sender, payload: &[u8], replies: &mut Replies);

    /// Called when the deadline that it last returned has passed and after
    /// [`Engine::wake_services`](crate::Engine::wake_services); may be called more often. Returns
    /// when it wants to be called next.
    fn on_tick(&mut self, now: Instant, replies: &mut Replies) -> Option<Instant>;

    /// A peer is gone for good; its [`PeerId`] will not be seen again.
    fn on_peer_gone(&mut self, _peer: PeerId) {}
}

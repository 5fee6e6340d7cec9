//! The first sends on an endpoint over tcp with UCX 1.13, which UCX must not be left to queue.
//!
//! Before it queues a send, 1.13 asks the peer for the number of its side (`ucp_ep_resolve_remote_id`),
//! and the peer's UCX answers over a connection that it makes for that. While such a message is in a
//! queue, because a connection is being made or is busy, the death of the other process aborts this one
//! (assertions in `ucp_request.c:684` and `wireup_ep.c:241`; the first is gone in 1.14). So a send waits
//! here until it can go out at once, and the question is asked with the first one after that: then both
//! sides have connections, with nothing queued on them.

use std::collections::{HashMap, VecDeque};

use ucx_sys::features;

use super::endpoint::Link;
use super::transports;
use crate::fabric::{EndpointId, SendBuffer};

/// Whether the first sends to this endpoint have to wait for its connection.
pub(super) fn is_needed(message: &Link) -> bool {
    if features().version.at_least(1, 14) {
        return false;
    }
    // SAFETY: the endpoint was made just now by a worker of this thread.
    let lanes = unsafe { transports::of(message.handle()) };
    lanes.iter().any(|lane| lane.name.starts_with("tcp/"))
}

/// How far an endpoint has come.
#[derive(Debug)]
enum Stage {
    /// Nothing went out yet, or not all that came before the connection.
    Connecting(VecDeque<SendBuffer>),
    /// The peer is not asked yet.
    Unasked,
}

/// What a send is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// Go out at once, or wait.
    AtOnce,
    /// Wait behind others.
    Wait,
    /// Ask the peer.
    Ask,
    /// What UCX does.
    Usual,
}

/// Endpoints of which UCX does not know the peer's number.
#[derive(Debug, Default)]
pub(super) struct Opening(HashMap<EndpointId, Stage>);

impl Opening {
    /// An endpoint that is being connected.
    pub(super) fn begin(&mut self, endpoint: EndpointId) {
        self.0.insert(endpoint, Stage::Connecting(VecDeque::new()));
    }

    /// What the next send is to do.
    pub(super) fn turn(&self, endpoint: EndpointId) -> Turn {
        match self.0.get(&endpoint) {
            Some(Stage::Connecting(held)) if held.is_empty() => Turn::AtOnce,
            Some(Stage::Connecting(_)) => Turn::Wait,
            Some(Stage::Unasked) => Turn::Ask,
            None => Turn::Usual,
        }
    }

    /// A send waits behind the others.
    pub(super) fn hold(&mut self, endpoint: EndpointId, buffer: SendBuffer) {
        if let Some(Stage::Connecting(held)) = self.0.get_mut(&endpoint) {
            held.push_back(buffer);
        }
    }

    /// What was tried waits on.
    pub(super) fn hold_first(&mut self, endpoint: EndpointId, buffer: SendBuffer) {
        if let Some(Stage::Connecting(held)) = self.0.get_mut(&endpoint) {
            held.push_front(buffer);
        }
    }

    /// Endpoints with something to be tried.
    pub(super) fn waiting(&self) -> Vec<EndpointId> {
        let waiting = |&(_, stage): &(&EndpointId, &Stage)| matches!(stage, Stage::Connecting(held) if !held.is_empty());
        self.0.iter().filter(waiting).map(|(&id, _)| id).collect()
    }

    /// The next send to be tried.
    pub(super) fn next(&mut self, endpoint: EndpointId) -> Option<SendBuffer> {
        match self.0.get_mut(&endpoint)? {
            Stage::Connecting(held) => held.pop_front(),
            Stage::Unasked => None,
        }
    }

    /// Everything went out that waited.
    pub(super) fn connected(&mut self, endpoint: EndpointId) {
        self.0.insert(endpoint, Stage::Unasked);
    }

    /// The peer is asked, or the endpoint given up: what still waits.
    pub(super) fn end(&mut self, endpoint: EndpointId) -> VecDeque<SendBuffer> {
        match self.0.remove(&endpoint) {
            Some(Stage::Connecting(held)) => held,
            Some(Stage::Unasked) | None => VecDeque::new(),
        }
    }
}

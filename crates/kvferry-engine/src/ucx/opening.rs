//! Sends on endpoints whose connection is still being made, where UCX must not be given them.
//!
//! UCX 1.13 asks the peer for its side's number before it takes a send that it cannot carry out at once
//! (`ucp_ep_resolve_remote_id`). The peer's UCX answers over a tcp connection that it makes for that;
//! should the asking process die before it has accepted that connection, the peer's process aborts
//! (`ucp_request.c:684`; the assertion is gone in 1.14). So there, until the first send went out at
//! once, the rest waits here and is tried again whenever something has happened.

use std::collections::{HashMap, VecDeque};

use ucx_sys::features;

use super::endpoint::Link;
use super::transports;
use crate::fabric::{EndpointId, SendBuffer};

/// Whether sends to this endpoint have to wait for its connection.
pub(super) fn is_needed(message: &Link) -> bool {
    if features().version.at_least(1, 14) {
        return false;
    }
    // SAFETY: the endpoint was made just now by a worker of this thread.
    let lanes = unsafe { transports::of(message.handle()) };
    lanes.iter().any(|lane| lane.name.starts_with("tcp/"))
}

/// What waits, by endpoint. An endpoint is here from its making to its first send that went out.
#[derive(Debug, Default)]
pub(super) struct Opening(HashMap<EndpointId, VecDeque<SendBuffer>>);

impl Opening {
    /// An endpoint that is being connected.
    pub(super) fn begin(&mut self, endpoint: EndpointId) {
        self.0.insert(endpoint, VecDeque::new());
    }

    /// Whether nothing went out on it yet.
    pub(super) fn has(&self, endpoint: EndpointId) -> bool {
        self.0.contains_key(&endpoint)
    }

    /// Whether something waits already, so that order asks for more to wait.
    pub(super) fn is_waiting(&self, endpoint: EndpointId) -> bool {
        self.0.get(&endpoint).is_some_and(|held| !held.is_empty())
    }

    /// Keeps a send for later.
    pub(super) fn hold(&mut self, endpoint: EndpointId, buffer: SendBuffer) {
        self.0.entry(endpoint).or_default().push_back(buffer);
    }

    /// Puts back what was taken to be tried.
    pub(super) fn hold_first(&mut self, endpoint: EndpointId, buffer: SendBuffer) {
        self.0.entry(endpoint).or_default().push_front(buffer);
    }

    /// Endpoints with something to be tried.
    pub(super) fn waiting(&self) -> Vec<EndpointId> {
        let waiting = self.0.iter().filter(|(_, held)| !held.is_empty());
        waiting.map(|(&endpoint, _)| endpoint).collect()
    }

    /// The next send to be tried.
    pub(super) fn next(&mut self, endpoint: EndpointId) -> Option<SendBuffer> {
        self.0.get_mut(&endpoint)?.pop_front()
    }

    /// The connection is there, or the endpoint is given up: what still waits.
    pub(super) fn end(&mut self, endpoint: EndpointId) -> VecDeque<SendBuffer> {
        self.0.remove(&endpoint).unwrap_or_default()
    }
}

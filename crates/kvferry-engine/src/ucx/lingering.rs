//! Message sides of closed endpoints whose sends have not ended.
//!
//! An endpoint is closed at once for its owner, who gets other buffers back. Its sends end when the peer
//! takes them or when the connection breaks, and touch only their own buffers; then the message side is
//! closed too. UCX's tcp is not to be closed by force before: it forgets to say that it waits for room
//! no more, and when that peer dies later, it uses the connection after it has freed it (measured with
//! 1.13.1 and 1.22.0, a crash each time).

use std::collections::HashMap;

use super::endpoint::Link;
use super::operations::Operations;
use crate::fabric::EndpointId;

struct Left {
    link: Link,
    sends: usize,
    closing: bool,
}

/// See the module's text.
#[derive(Default)]
pub(super) struct Lingering(HashMap<EndpointId, Left>);

impl Lingering {
    /// Takes over a message side with so many sends, at least one.
    pub(super) fn insert(&mut self, endpoint: EndpointId, link: Link, sends: usize) {
        let left = Left {
            link,
            sends,
            closing: false,
        };
        self.0.insert(endpoint, left);
    }

    /// One of its sends has ended; with the last one it is closed.
    pub(super) fn send_ended(&mut self, endpoint: EndpointId, operations: &mut Operations) {
        if let Some(left) = self.0.get_mut(&endpoint) {
            left.sends = left.sends.saturating_sub(1);
            if left.sends == 0 {
                self.close(endpoint, operations);
            }
        }
    }

    fn close(&mut self, endpoint: EndpointId, operations: &mut Operations) {
        if let Some(left) = self.0.get_mut(&endpoint)
            && !std::mem::replace(&mut left.closing, true)
            && !left.link.close(endpoint, operations)
        {
            self.0.remove(&endpoint);
        }
    }

    /// Its closing has ended; false if it is none of these.
    pub(super) fn closed(&mut self, endpoint: EndpointId) -> bool {
        self.0.remove(&endpoint).is_some()
    }

    /// Closes all by force: their worker is about to be destroyed.
    pub(super) fn close_all(&mut self, operations: &mut Operations) {
        for endpoint in self.0.keys().copied().collect::<Vec<_>>() {
            self.close(endpoint, operations);
        }
    }

    /// Forgets all, whose worker is gone.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

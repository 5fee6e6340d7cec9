//! Messages over segments: cutting, order, duplicates, gaps and reassembly.
//!
//! The fabric carries segments whole but promises no order. A sequence number per peer and
//! direction puts pieces of messages back in order; data segments of the served lane carry their
//! own position and are used as they come.

mod inbox;
mod outbox;

pub(crate) use inbox::{Arrival, Inbox};
pub(crate) use outbox::{Outbox, Piece};

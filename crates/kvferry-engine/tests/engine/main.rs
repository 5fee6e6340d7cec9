//! Two engines in one process, over the loopback fabric and over UCX: bytes, counts, errors.
//!
//! What needs two processes lives in the workspace's `tests/`.

#![allow(missing_docs, clippy::unwrap_used)]

mod chunks;
mod ends;
mod faults;
mod hostile;
mod lanes;
mod memory;
mod messages;
mod peers;
mod reads;
mod reconnect;
mod support;
mod withdraw;

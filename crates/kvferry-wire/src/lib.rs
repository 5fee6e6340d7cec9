//! Everything of kvferry that crosses a process boundary.
//!
//! Responsible for the bytes: layouts, versions, size caps and what a value must satisfy. Not
//! responsible for sockets, order, deadlines or what a message means to a transfer or a lease.
//!
//! Invariant: parsing is validation. A value that a parser returned has been checked in full, and
//! the rest of kvferry does not check it again. No parser panics, whatever the bytes.
//!
//! # Layers
//! - [`segment`]: what one active message carries, a piece of a message or bytes of a transfer.
//! - [`message`]: a reassembled message between two engines.
//! - [`hello`], [`description`]: the greeting and what an engine says about itself.
//! - [`regions`]: sets of region ids, in greetings and messages.
//! - [`lease`], [`demo`], [`checksum`]: payloads of [`Message::Service`], one channel each.
//! - [`directory`]: frames on the directory's TCP port.
//! - [`share`]: packets on the unix socket between engines of one host.
//!
//! # HISTORY
//! Every format has a version of its own; messages are at version 2, all others at version 1, the
//! first. A msgpack body may gain fields within a version, because readers skip fields they do not
//! know. Anything else
//! (a field that goes, changes meaning or becomes mandatory, a new enum variant, any change of a
//! fixed layout) is a new version.
#![forbid(unsafe_code)]

pub mod checksum;
pub mod demo;
pub mod description;
pub mod directory;
mod error;
mod fixed;
pub mod hello;
pub mod ids;
pub mod lease;
pub mod message;
mod packed;
pub mod params;
pub mod regions;
pub mod segment;
pub mod share;

pub use checksum::{CHECKSUM_CHANNEL, ChecksumMessage, GroupBlock, NoChecksums};
pub use demo::{DEMO_CHANNEL, DemoPlan, DemoReply, DemoRequest, DemoSummary};
pub use description::{
    Addresses, Description, Interior, MemoryKind, RegionDescription, TableDescription, UcxVersion,
    check_table,
};
pub use directory::{DirectoryReply, DirectoryRequest, FrameHeader};
pub use error::WireError;
pub use hello::{Hello, HelloRejectCode, HelloReply};
pub use ids::{EngineId, Epoch, Incarnation, Instance, LeaseId, Rank, ReaderId, RequestId};
pub use lease::{
    Epochs, Gone, GoneEpochs, LEASE_CHANNEL, LeaseMessage, MAX_RENEWALS, Verdict, encode_release,
    encode_released, encode_renew, encode_renewed,
};
pub use message::{
    BlockRun, MAX_READ_TABLES, Message, ReadRejected, ReadRequest, RejectCode, encode_goodbye,
    encode_hello, encode_hello_reply, encode_ping, encode_pong, encode_read, encode_read_cancel,
    encode_read_rejected, encode_service, encode_withdraw, encode_withdrawn,
};
pub use regions::{RegionRange, RegionSet};
pub use segment::{
    MAX_MESSAGE_BYTES, SEGMENT_HEADER_BYTES, Segment, SegmentBody, SegmentHeader, TransferId,
};
pub use share::{MAX_POOLS_PER_PACKET, MAX_SHARE_BYTES, ShareReply, ShareRequest, SharedPool};

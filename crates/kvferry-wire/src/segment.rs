//! Segments: one active message each, a piece of a message or bytes of a transfer's stream.
//!
//! Responsible for the header in front of every segment and for the limits of its payload. Not
//! responsible for order, gaps or reassembly: those compare the sequence numbers of many segments.
//!
//! Invariant: a parsed [`Segment`] has a payload, the payload lies within the message or stream
//! that it belongs to, and neither end of it is the zero incarnation. This is the hot path:
//! neither writing nor parsing allocates.
//!
//! Layout of version 1, 64 bytes, little-endian, no padding:
//!
//! | at | bytes | field |
//! | --- | --- | --- |
//! | 0 | 2 | magic `kf` |
//! | 2 | 1 | format version, 1 |
//! | 3 | 1 | kind: 1 message, 2 data |
//! | 4 | 16 | source incarnation |
//! | 20 | 16 | destination incarnation |
//! | 36 | 8 | sequence number |
//! | 44 | 4 | connection |
//! | 48 | 16 | message: size `u32`, offset `u32`, zero `u64`; data: slot `u32`, generation `u32`, offset `u64` |

use std::fmt;

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U32, U64},
};

use crate::{Incarnation, WireError};

/// Bytes of the header in front of a segment's payload.
pub const SEGMENT_HEADER_BYTES: usize = size_of::<Layout>();

/// Largest message, reassembled.
pub const MAX_MESSAGE_BYTES: usize = 16 << 20;

/// Version of the segment layout.
pub const SEGMENT_VERSION: u8 = 1;

const MAGIC: [u8; 2] = *b"kf";
const KIND_MESSAGE: u8 = 1;
const KIND_DATA: u8 = 2;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Layout {
    magic: [u8; 2],
    version: u8,
    kind: u8,
    source: [u8; 16],
    destination: [u8; 16],
    sequence: U64,
    connection: U32,
    first: U32,
    second: U32,
    third: U64,
}

/// A transfer as its consumer numbers it: a place in its table, and how often the place was used.
///
/// The generation is never 0; parsers refuse it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransferId {
    /// Place in the consumer's table of transfers.
    pub slot: u32,
    /// Use of that place, from 1.
    pub generation: u32,
}

impl TransferId {
    pub(crate) fn checked(slot: u32, generation: u32) -> Result<Self, WireError> {
        if generation == 0 {
            return Err(WireError::bad(
                "transfer.generation",
                generation,
                "at least 1",
            ));
        }
        Ok(Self { slot, generation })
    }
}

impl fmt::Display for TransferId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.slot, self.generation)
    }
}

/// What a segment carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentBody {
    /// A piece of a message.
    Message {
        /// Size of the whole message in bytes, at most [`MAX_MESSAGE_BYTES`].
        message_bytes: u32,
        /// Where in the message the payload begins.
        offset: u32,
    },
    /// Bytes of a transfer's stream (served lane), which [`ReadRequest`](crate::ReadRequest)
    /// defines.
    Data {
        /// The transfer.
        transfer: TransferId,
        /// Where in the stream the payload begins.
        offset: u64,
    },
}

/// The header of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentHeader {
    /// The engine that sends.
    pub source: Incarnation,
    /// The engine that is meant; anybody else drops the segment.
    pub destination: Incarnation,
    /// The sender's number for this connection, so that the segments of an earlier connection
    /// between the same two engines are told apart.
    pub connection: u32,
    /// Counts the segments of this connection in this direction, from 0.
    pub sequence: u64,
    /// What the payload is.
    pub body: SegmentBody,
}

impl SegmentHeader {
    /// Writes the header. The payload follows it directly.
    ///
    /// The limits that [`Segment::parse`] checks are the sender's duty: whether a piece lies within
    /// its message is not known here.
    pub fn write(&self, out: &mut [u8; SEGMENT_HEADER_BYTES]) {
        let (kind, first, second, third) = match self.body {
            SegmentBody::Message {
                message_bytes,
                offset,
            } => (KIND_MESSAGE, message_bytes, offset, 0),
            SegmentBody::Data { transfer, offset } => {
                (KIND_DATA, transfer.slot, transfer.generation, offset)
            }
        };
        let layout = Layout {
            magic: MAGIC,
            version: SEGMENT_VERSION,
            kind,
            source: self.source.to_bytes(),
            destination: self.destination.to_bytes(),
            sequence: self.sequence.into(),
            connection: self.connection.into(),
            first: first.into(),
            second: second.into(),
            third: third.into(),
        };
        out.copy_from_slice(layout.as_bytes());
    }
}

/// A segment as it arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment<'a> {
    /// Where it comes from, and what it is.
    pub header: SegmentHeader,
    /// Its bytes, at least one.
    pub payload: &'a [u8],
}

impl<'a> Segment<'a> {
    /// Reads a segment and checks it.
    ///
    /// # Errors
    /// [`WireError::TooShort`] without a whole header and a payload; [`WireError::Version`] for
    /// another layout; [`WireError::BadValue`] naming the field for anything else.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, WireError> {
        let Ok((layout, payload)) = Layout::ref_from_prefix(bytes) else {
            return Err(too_short(SEGMENT_HEADER_BYTES, bytes.len()));
        };
        if layout.magic != MAGIC {
            return Err(WireError::bad(
                "segment.magic",
                hex(layout.magic),
                "6b66 (\"kf\")",
            ));
        }
        if layout.version != SEGMENT_VERSION {
            return Err(WireError::Version {
                what: "segment",
                got: layout.version.into(),
                min: SEGMENT_VERSION.into(),
                max: SEGMENT_VERSION.into(),
            });
        }
        if payload.is_empty() {
            return Err(too_short(SEGMENT_HEADER_BYTES + 1, bytes.len()));
        }
        let body = match layout.kind {
            KIND_MESSAGE => parse_message(layout, payload.len())?,
            KIND_DATA => parse_data(layout, payload.len())?,
            kind => {
                return Err(WireError::bad(
                    "segment.kind",
                    kind,
                    "1 (message) or 2 (data)",
                ));
            }
        };
        let header = SegmentHeader {
            source: end("segment.source", layout.source)?,
            destination: end("segment.destination", layout.destination)?,
            connection: layout.connection.get(),
            sequence: layout.sequence.get(),
            body,
        };
        Ok(Self { header, payload })
    }
}

fn parse_message(layout: &Layout, payload: usize) -> Result<SegmentBody, WireError> {
    let (message_bytes, offset) = (layout.first.get(), layout.second.get());
    if message_bytes == 0 || message_bytes as usize > MAX_MESSAGE_BYTES {
        return Err(WireError::bad(
            "segment.message_bytes",
            message_bytes,
            "1 to 16777216",
        ));
    }
    if u64::from(offset) + payload as u64 > u64::from(message_bytes) {
        return Err(WireError::bad(
            "segment.offset",
            format!("{offset} with {payload} bytes of a message of {message_bytes}"),
            "a piece within the message",
        ));
    }
    if layout.third.get() != 0 {
        return Err(WireError::bad("segment.reserved", layout.third, "0"));
    }
    Ok(SegmentBody::Message {
        message_bytes,
        offset,
    })
}

fn parse_data(layout: &Layout, payload: usize) -> Result<SegmentBody, WireError> {
    let transfer = TransferId::checked(layout.first.get(), layout.second.get())?;
    let offset = layout.third.get();
    if offset.checked_add(payload as u64).is_none() {
        return Err(WireError::bad(
            "segment.offset",
            format!("{offset} with {payload} bytes"),
            "an end below 2^64",
        ));
    }
    Ok(SegmentBody::Data { transfer, offset })
}

fn end(field: &'static str, bytes: [u8; 16]) -> Result<Incarnation, WireError> {
    Incarnation::from_bytes(bytes).map_err(|_| WireError::bad(field, 0_u8, "not zero"))
}

fn too_short(need: usize, got: usize) -> WireError {
    WireError::TooShort {
        what: "segment",
        need,
        got,
    }
}

fn hex(bytes: [u8; 2]) -> String {
    format!("{:04x}", u16::from_be_bytes(bytes))
}

#[cfg(test)]
mod tests;

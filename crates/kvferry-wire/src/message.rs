//! Messages between two engines, after reassembly.
//!
//! Responsible for the kinds of message and their layouts. Not responsible for cutting them into
//! segments, nor for the payload of a service: that is opaque here.
//!
//! Invariant: a parsed [`Message`] is complete, nothing is left over, and each of its fields has a
//! value that is allowed. All layouts are fixed and little-endian, except the two greetings.
//!
//! Every message starts with four bytes: version, kind, and a `u16` that is the channel of a
//! service message and 0 in all others.
//!
//! | kind | name | then |
//! | --- | --- | --- |
//! | 1 | hello | [`Hello`] body |
//! | 2 | hello reply | [`HelloReply`] body |
//! | 3, 4 | ping, pong | token `u64` |
//! | 5 | read | slot, generation, tables, runs (`u32` each), table ids (`u32`), runs (first `u32`, count `u32`) |
//! | 6 | read rejected | slot `u32`, generation `u32`, detail `u64`, code `u8` |
//! | 7 | read cancel | slot `u32`, generation `u32` |
//! | 8 | service | payload |
//! | 9 | goodbye | nothing |
//! | 10, 11 | withdraw, withdrawn | ranges `u32`, ranges of region ids (first `u32`, last `u32`) |
//!
//! # HISTORY
//! Version 1: the first.
//! Version 2: withdraw and withdrawn.

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U16, U32, U64},
};

use crate::{
    Hello, HelloReply, RegionSet, WireError,
    packed::check_at_most,
    segment::{MAX_MESSAGE_BYTES, TransferId},
};

mod read;
mod withdraw;

pub use read::{
    BlockRun, BlockRunLayout, MAX_READ_TABLES, ReadRejected, ReadRequest, RejectCode, encode_read,
};
pub use withdraw::{encode_withdraw, encode_withdrawn};

/// Version of the message layouts.
pub const MESSAGE_VERSION: u8 = 2;

/// Bytes in front of every message's body.
pub const MESSAGE_HEADER_BYTES: usize = size_of::<HeaderLayout>();

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct HeaderLayout {
    version: u8,
    kind: u8,
    channel: U16,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct TransferLayout {
    slot: U32,
    generation: U32,
}

impl TransferLayout {
    fn checked(self) -> Result<TransferId, WireError> {
        TransferId::checked(self.slot.get(), self.generation.get())
    }
}

impl From<TransferId> for TransferLayout {
    fn from(id: TransferId) -> Self {
        Self {
            slot: id.slot.into(),
            generation: id.generation.into(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Kind {
    Hello = 1,
    HelloReply = 2,
    Ping = 3,
    Pong = 4,
    Read = 5,
    ReadRejected = 6,
    ReadCancel = 7,
    Service = 8,
    Goodbye = 9,
    Withdraw = 10,
    Withdrawn = 11,
}

impl Kind {
    fn parse(byte: u8) -> Result<Self, WireError> {
        Ok(match byte {
            1 => Self::Hello,
            2 => Self::HelloReply,
            3 => Self::Ping,
            4 => Self::Pong,
            5 => Self::Read,
            6 => Self::ReadRejected,
            7 => Self::ReadCancel,
            8 => Self::Service,
            9 => Self::Goodbye,
            10 => Self::Withdraw,
            11 => Self::Withdrawn,
            _ => return Err(WireError::bad("message.kind", byte, "1 to 11")),
        })
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Hello => "hello",
            Self::HelloReply => "hello reply",
            Self::Ping => "ping",
            Self::Pong => "pong",
            Self::Read => "read",
            Self::ReadRejected => "read rejected",
            Self::ReadCancel => "read cancel",
            Self::Service => "service",
            Self::Goodbye => "goodbye",
            Self::Withdraw => "withdraw",
            Self::Withdrawn => "withdrawn",
        }
    }
}

/// One message from a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(
    clippy::large_enum_variant,
    reason = "a message lives on the stack while it is handled; greetings are rare"
)]
pub enum Message<'a> {
    /// Opens a connection.
    Hello(Hello),
    /// Answers [`Message::Hello`].
    HelloReply(HelloReply),
    /// Asks for a sign of life.
    Ping {
        /// Returned in the [`Message::Pong`].
        token: u64,
    },
    /// Answers [`Message::Ping`].
    Pong {
        /// The ping's token.
        token: u64,
    },
    /// Asks for blocks to be streamed (served lane).
    Read(ReadRequest<'a>),
    /// Refuses a read; no more of its stream will come.
    ReadRejected(ReadRejected),
    /// Asks for no more of a stream.
    ReadCancel {
        /// The read's transfer.
        transfer: TransferId,
    },
    /// A message of an upper layer.
    Service {
        /// Which upper layer.
        channel: u16,
        /// Its bytes, possibly none.
        payload: &'a [u8],
    },
    /// The sender leaves and answers nothing more.
    Goodbye,
    /// The sender gives these of its regions up, at least one: no read of them is to start any more.
    Withdraw(RegionSet),
    /// Answers [`Message::Withdraw`]: the sender has no operation on these regions of the receiver and
    /// no key to them. It may answer in parts.
    Withdrawn(RegionSet),
}

impl<'a> Message<'a> {
    /// Reads a message and checks it.
    ///
    /// # Errors
    /// [`WireError::Version`] for another layout or greeting version; otherwise what is wrong,
    /// with the field and its value.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, WireError> {
        let (kind, channel, body) = parse_header(bytes)?;
        Ok(match kind {
            Kind::Hello => Self::Hello(Hello::decode(body)?),
            Kind::HelloReply => Self::HelloReply(HelloReply::decode(body)?),
            Kind::Ping => Self::Ping {
                token: exactly::<U64>("ping", body)?.get(),
            },
            Kind::Pong => Self::Pong {
                token: exactly::<U64>("pong", body)?.get(),
            },
            Kind::Read => Self::Read(ReadRequest::parse_body(body)?),
            Kind::ReadRejected => Self::ReadRejected(ReadRejected::parse_body(body)?),
            Kind::ReadCancel => Self::ReadCancel {
                transfer: exactly::<TransferLayout>("read cancel", body)?.checked()?,
            },
            Kind::Service => Self::Service {
                channel,
                payload: body,
            },
            Kind::Goodbye => {
                exactly::<()>("goodbye", body)?;
                Self::Goodbye
            }
            Kind::Withdraw => Self::Withdraw(withdraw::parse_body("withdraw", body)?),
            Kind::Withdrawn => Self::Withdrawn(withdraw::parse_body("withdrawn", body)?),
        })
    }

    /// The kind in words, for logs and counters.
    #[must_use]
    pub const fn kind_name(&self) -> &'static str {
        match self {
            Self::Hello(_) => Kind::Hello,
            Self::HelloReply(_) => Kind::HelloReply,
            Self::Ping { .. } => Kind::Ping,
            Self::Pong { .. } => Kind::Pong,
            Self::Read(_) => Kind::Read,
            Self::ReadRejected(_) => Kind::ReadRejected,
            Self::ReadCancel { .. } => Kind::ReadCancel,
            Self::Service { .. } => Kind::Service,
            Self::Goodbye => Kind::Goodbye,
            Self::Withdraw(_) => Kind::Withdraw,
            Self::Withdrawn(_) => Kind::Withdrawn,
        }
        .name()
    }
}

fn parse_header(bytes: &[u8]) -> Result<(Kind, u16, &[u8]), WireError> {
    check_at_most("message", bytes.len(), MAX_MESSAGE_BYTES)?;
    let Ok((header, body)) = HeaderLayout::ref_from_prefix(bytes) else {
        return Err(WireError::TooShort {
            what: "message",
            need: MESSAGE_HEADER_BYTES,
            got: bytes.len(),
        });
    };
    if header.version != MESSAGE_VERSION {
        return Err(WireError::Version {
            what: "message",
            got: header.version.into(),
            min: MESSAGE_VERSION.into(),
            max: MESSAGE_VERSION.into(),
        });
    }
    let kind = Kind::parse(header.kind)?;
    let channel = header.channel.get();
    if channel != 0 && kind != Kind::Service {
        return Err(WireError::bad(
            "message.channel",
            channel,
            "0, but in service messages",
        ));
    }
    Ok((kind, channel, body))
}

/// Reads a body that is one `T` and nothing else.
fn exactly<T>(what: &'static str, body: &[u8]) -> Result<T, WireError>
where
    T: FromBytes + KnownLayout + Immutable + Unaligned + Copy,
{
    let need = size_of::<T>();
    match T::read_from_prefix(body) {
        Err(_) => Err(WireError::TooShort {
            what,
            need,
            got: body.len(),
        }),
        Ok((_, rest)) if !rest.is_empty() => Err(WireError::Trailing {
            what,
            extra: rest.len(),
        }),
        Ok((value, _)) => Ok(value),
    }
}

/// Starts a message whose body will have `body_bytes`.
fn start(kind: Kind, channel: u16, body_bytes: usize) -> Vec<u8> {
    let header = HeaderLayout {
        version: MESSAGE_VERSION,
        kind: kind as u8,
        channel: channel.into(),
    };
    let mut bytes = Vec::with_capacity(MESSAGE_HEADER_BYTES + body_bytes);
    bytes.extend_from_slice(header.as_bytes());
    bytes
}

fn whole(kind: Kind, channel: u16, body: &[u8]) -> Vec<u8> {
    let mut bytes = start(kind, channel, body.len());
    bytes.extend_from_slice(body);
    bytes
}

/// Writes [`Message::Hello`].
///
/// # Errors
/// As [`Hello::encode`], and [`WireError::TooLong`] over [`MAX_MESSAGE_BYTES`].
pub fn encode_hello(hello: &Hello) -> Result<Vec<u8>, WireError> {
    let bytes = whole(Kind::Hello, 0, &hello.encode()?);
    check_at_most("hello", bytes.len(), MAX_MESSAGE_BYTES)?;
    Ok(bytes)
}

/// Writes [`Message::HelloReply`].
///
/// # Errors
/// As [`HelloReply::encode`].
pub fn encode_hello_reply(reply: &HelloReply) -> Result<Vec<u8>, WireError> {
    Ok(whole(Kind::HelloReply, 0, &reply.encode()?))
}

/// Writes [`Message::Ping`].
#[must_use]
pub fn encode_ping(token: u64) -> Vec<u8> {
    whole(Kind::Ping, 0, U64::new(token).as_bytes())
}

/// Writes [`Message::Pong`].
#[must_use]
pub fn encode_pong(token: u64) -> Vec<u8> {
    whole(Kind::Pong, 0, U64::new(token).as_bytes())
}

/// Writes [`Message::ReadRejected`].
#[must_use]
pub fn encode_read_rejected(rejected: &ReadRejected) -> Vec<u8> {
    whole(Kind::ReadRejected, 0, rejected.layout().as_bytes())
}

/// Writes [`Message::ReadCancel`].
#[must_use]
pub fn encode_read_cancel(transfer: TransferId) -> Vec<u8> {
    whole(
        Kind::ReadCancel,
        0,
        TransferLayout::from(transfer).as_bytes(),
    )
}

/// Writes [`Message::Service`].
///
/// # Errors
/// [`WireError::TooLong`] if the message would exceed [`MAX_MESSAGE_BYTES`].
pub fn encode_service(channel: u16, payload: &[u8]) -> Result<Vec<u8>, WireError> {
    check_at_most(
        "service message",
        MESSAGE_HEADER_BYTES + payload.len(),
        MAX_MESSAGE_BYTES,
    )?;
    Ok(whole(Kind::Service, channel, payload))
}

/// Writes [`Message::Goodbye`].
#[must_use]
pub fn encode_goodbye() -> Vec<u8> {
    start(Kind::Goodbye, 0, 0)
}

#[cfg(test)]
mod tests;

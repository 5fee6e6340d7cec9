//! The greeting: the first message on a new endpoint, in both directions.
//!
//! Responsible for the bodies of [`Message::Hello`](crate::Message::Hello) and
//! [`Message::HelloReply`](crate::Message::HelloReply). Not responsible for who is accepted.
//!
//! Invariant: a parsed [`Hello`] names the incarnation that its sender means to reach and carries
//! a description that passed its own validation.
//!
//! The description travels encoded, with its own version, inside the greeting: a greeting of this
//! version with a description of another one is [`WireError::Version`] and can be answered.
//!
//! # HISTORY
//! Version 1: the first. Later, without a new version: the regions that were withdrawn.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{
    Description, Incarnation, RegionSet, WireError,
    packed::{Format, check_reason, clean_reason},
    segment::MAX_MESSAGE_BYTES,
};

/// Version of both greeting bodies.
pub const HELLO_VERSION: u16 = 1;

const HELLO: Format = Format {
    what: "hello",
    version: HELLO_VERSION,
    max_bytes: MAX_MESSAGE_BYTES,
};
const REPLY: Format = Format {
    what: "hello reply",
    version: HELLO_VERSION,
    max_bytes: 64 << 10,
};

/// Opens a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The incarnation that the sender found in the directory; anybody else rejects it.
    pub expects: Incarnation,
    /// Who the sender is.
    pub from: Description,
    /// Regions of the sender that earlier descriptions of this incarnation may name and that are
    /// not to be read any more.
    pub withdrawn: RegionSet,
}

#[derive(Serialize, Deserialize)]
struct HelloBody {
    expects: Incarnation,
    #[serde(with = "serde_bytes")]
    from: Vec<u8>,
    #[serde(default, skip_serializing_if = "RegionSet::is_empty")]
    withdrawn: RegionSet,
}

impl Hello {
    /// Reads the body of a greeting.
    ///
    /// # Errors
    /// [`WireError::Version`] if the greeting or its description has another version; otherwise
    /// what is wrong, with the field and its value.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let body: HelloBody = HELLO.decode(bytes)?;
        Ok(Self {
            expects: body.expects,
            from: Description::decode(&body.from)?,
            withdrawn: body.withdrawn,
        })
    }

    /// Writes the body of a greeting.
    ///
    /// # Errors
    /// As [`Description::encode`], and [`WireError::TooLong`] if it does not fit a message.
    pub fn encode(&self) -> Result<Vec<u8>, WireError> {
        HELLO.encode(&HelloBody {
            expects: self.expects,
            from: self.from.encode()?,
            withdrawn: self.withdrawn.clone(),
        })
    }
}

/// Answers a greeting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HelloReply {
    /// The connection may be used.
    Accepted {
        /// The incarnation that answers, the one that was expected.
        incarnation: Incarnation,
        /// The connection that the greeting came on, by its sender's number.
        connection: u32,
        /// As [`Hello::withdrawn`]: the description that was greeted may be an old one.
        #[serde(default, skip_serializing_if = "RegionSet::is_empty")]
        withdrawn: RegionSet,
    },
    /// The connection may not be used.
    Rejected {
        /// The connection that the greeting came on, by its sender's number: the answer may come
        /// from an engine that the sender knows nothing of.
        connection: u32,
        /// Why, for the program.
        code: HelloRejectCode,
        /// Why, for people: at most 1,024 bytes, no control characters.
        reason: String,
    },
}

/// Why a greeting is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HelloRejectCode {
    /// Another incarnation was expected: the engine restarted, or a stranger answers.
    WrongIncarnation,
    /// The greeting or description has a version that this side does not read.
    Version,
    /// The two engines can not exchange blocks; the reason names the field.
    Incompatible,
    /// The engine takes no new peers.
    ShuttingDown,
}

impl fmt::Display for HelloRejectCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::WrongIncarnation => "wrong incarnation",
            Self::Version => "version",
            Self::Incompatible => "incompatible",
            Self::ShuttingDown => "shutting down",
        })
    }
}

impl HelloReply {
    /// Reads the body of an answer.
    ///
    /// # Errors
    /// [`WireError::Version`] for another version; otherwise what is wrong.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let reply: Self = REPLY.decode(bytes)?;
        if let Self::Rejected { reason, .. } = &reply {
            check_reason("hello reply.reason", reason)?;
        }
        Ok(reply)
    }

    /// Writes the body of an answer. A reason that is too long is cut, control characters in it
    /// become spaces.
    ///
    /// # Errors
    /// [`WireError::Msgpack`] if the encoder fails.
    pub fn encode(&self) -> Result<Vec<u8>, WireError> {
        match self {
            Self::Accepted { .. } => REPLY.encode(self),
            Self::Rejected {
                connection,
                code,
                reason,
            } => REPLY.encode(&Self::Rejected {
                connection: *connection,
                code: *code,
                reason: clean_reason(reason),
            }),
        }
    }
}

#[cfg(test)]
mod tests;

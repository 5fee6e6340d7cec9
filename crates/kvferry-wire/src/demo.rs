//! What `kvferry serve`, `pull` and `demo` say to one another: payloads of
//! [`Message::Service`](crate::Message::Service) on [`DEMO_CHANNEL`].
//!
//! Responsible for the bodies and their limits: what a router and a prefill engine say to one another
//! in other places. Not responsible for what the prompts are, nor for what the transfer parameters
//! say ([`params`](crate::params)).
//!
//! Invariant: a parsed plan has no zero sizes, whole tokens in its blocks, and its total does not
//! overflow.
//!
//! # HISTORY
//! Version 1: the first; offers named leases and blocks. Version 2: transfer parameters do.

use serde::{Deserialize, Serialize};

use crate::{
    WireError,
    packed::{Format, check_at_most, check_reason, clean_reason},
    params::Params,
};

/// The service channel of the demo.
pub const DEMO_CHANNEL: u16 = 2;
/// Version of both bodies.
pub const DEMO_VERSION: u16 = 2;
/// Tokens of a block.
pub const DEMO_BLOCK_TOKENS: u32 = 16;
/// What a block's bytes are a multiple of: a token has at least 8 in a layer.
pub const DEMO_BLOCK_UNIT: u64 = DEMO_BLOCK_TOKENS as u64 * 8;
/// Most blocks in one request.
pub const MAX_DEMO_BLOCKS: usize = 65_536;
/// Most requests offered at the same time.
pub const MAX_DEMO_IN_FLIGHT: u32 = 65_536;

const REQUEST: Format = Format {
    what: "demo request",
    version: DEMO_VERSION,
    max_bytes: 4 << 10,
};
const REPLY: Format = Format {
    what: "demo reply",
    version: DEMO_VERSION,
    max_bytes: 4 << 20,
};

/// Consumer to producer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DemoRequest {
    /// Starts a run.
    Begin {
        /// Requests that the consumer reads at the same time, 1 to [`MAX_DEMO_IN_FLIGHT`].
        in_flight: u32,
    },
    /// Asks for a request of the plan to be computed and held.
    Prefill {
        /// Which, from 0; once per run.
        request: u64,
    },
    /// Ends the run and asks for the producer's view of it.
    Finish,
}

impl DemoRequest {
    /// Reads a payload and checks it.
    ///
    /// # Errors
    /// [`WireError::Version`] for another version; otherwise what is wrong.
    pub fn decode(payload: &[u8]) -> Result<Self, WireError> {
        let request: Self = REQUEST.decode(payload)?;
        request.check()?;
        Ok(request)
    }

    /// Checks the request and writes the payload.
    ///
    /// # Errors
    /// [`WireError::BadValue`], naming the field.
    pub fn encode(&self) -> Result<Vec<u8>, WireError> {
        self.check()?;
        REQUEST.encode(self)
    }

    fn check(&self) -> Result<(), WireError> {
        match self {
            Self::Begin { in_flight } if !(1..=MAX_DEMO_IN_FLIGHT).contains(in_flight) => Err(
                WireError::bad("demo request.in_flight", in_flight, "1 to 65536"),
            ),
            _ => Ok(()),
        }
    }
}

/// What a run consists of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DemoPlan {
    /// Requests in all, at least 1.
    pub requests: u64,
    /// Blocks of a request, 1 to [`MAX_DEMO_BLOCKS`].
    pub blocks: u32,
    /// Bytes of a block in one layer, a multiple of [`DEMO_BLOCK_UNIT`].
    pub block_bytes: u64,
    /// Layers, at least 1.
    pub layers: u32,
    /// What the prompts are made from.
    pub seed: u64,
}

impl DemoPlan {
    fn check(&self) -> Result<(), WireError> {
        for (field, value) in [
            ("demo plan.requests", self.requests),
            ("demo plan.blocks", self.blocks.into()),
            ("demo plan.block_bytes", self.block_bytes),
            ("demo plan.layers", self.layers.into()),
        ] {
            if value == 0 {
                return Err(WireError::bad(field, value, "at least 1"));
            }
        }
        check_at_most("demo plan.blocks", self.blocks as usize, MAX_DEMO_BLOCKS)?;
        if !self.block_bytes.is_multiple_of(DEMO_BLOCK_UNIT) {
            return Err(WireError::bad(
                "demo plan.block_bytes",
                self.block_bytes,
                "a multiple of 128",
            ));
        }
        let total = (u64::from(self.blocks) * u64::from(self.layers))
            .checked_mul(self.block_bytes)
            .and_then(|bytes| bytes.checked_mul(self.requests));
        if total.is_none() {
            return Err(WireError::bad(
                "demo plan.requests",
                format!(
                    "{} of {} blocks of {} bytes in {} layers",
                    self.requests, self.blocks, self.block_bytes, self.layers
                ),
                "a total below 2^64 bytes",
            ));
        }
        Ok(())
    }
}

/// The producer's view of a run when it is over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DemoSummary {
    /// Leases still held.
    pub leases_held: u64,
    /// Leases that ended because their readers released them.
    pub leases_released: u64,
    /// Leases that ended because nobody renewed them.
    pub leases_expired: u64,
    /// Leases that the producer took back.
    pub leases_revoked: u64,
    /// Blocks that are not free.
    pub blocks_in_use: u64,
    /// Bytes that an operation may still touch.
    pub quarantined_bytes: u64,
}

/// Producer to consumer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DemoReply {
    /// Answers [`DemoRequest::Begin`].
    Welcome(DemoPlan),
    /// Answers [`DemoRequest::Prefill`]: it is held.
    Prefilled {
        /// Which.
        request: u64,
        /// For whoever reads its blocks.
        params: Params,
    },
    /// Answers [`DemoRequest::Prefill`]: it is not held.
    Failed {
        /// Which.
        request: u64,
        /// Why, for people: at most 1,024 bytes, no control characters.
        reason: String,
    },
    /// Answers [`DemoRequest::Finish`].
    Summary(DemoSummary),
    /// The question can not be answered.
    Refused {
        /// Why, for people: at most 1,024 bytes, no control characters.
        reason: String,
    },
}

impl DemoReply {
    /// Reads a payload and checks it.
    ///
    /// # Errors
    /// [`WireError::Version`] for another version; otherwise what is wrong.
    pub fn decode(payload: &[u8]) -> Result<Self, WireError> {
        let reply: Self = REPLY.decode(payload)?;
        if let Self::Refused { reason } | Self::Failed { reason, .. } = &reply {
            check_reason("demo reply.reason", reason)?;
        }
        reply.check()?;
        Ok(reply)
    }

    /// Checks the reply and writes the payload. A reason that is too long is cut, control
    /// characters in it become spaces.
    ///
    /// # Errors
    /// [`WireError::BadValue`] or [`WireError::TooLong`], naming the field.
    pub fn encode(&self) -> Result<Vec<u8>, WireError> {
        self.check()?;
        match self {
            Self::Refused { reason } => REPLY.encode(&Self::Refused {
                reason: clean_reason(reason),
            }),
            Self::Failed { request, reason } => REPLY.encode(&Self::Failed {
                request: *request,
                reason: clean_reason(reason),
            }),
            _ => REPLY.encode(self),
        }
    }

    fn check(&self) -> Result<(), WireError> {
        match self {
            Self::Welcome(plan) => plan.check(),
            Self::Prefilled { .. }
            | Self::Failed { .. }
            | Self::Summary(_)
            | Self::Refused { .. } => Ok(()),
        }
    }
}

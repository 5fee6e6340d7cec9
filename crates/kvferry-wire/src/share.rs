//! What two engines on one host say over the unix socket: which pools there are, as descriptors, and
//! how a process proves which life of which engine it is.
//!
//! Responsible for the bodies of [`ShareRequest`] and [`ShareReply`]. Not responsible for the socket,
//! for descriptors, or for who may ask.
//!
//! Each body is one packet of a `SOCK_SEQPACKET` socket. A reply names the descriptors that travel
//! with it (`SCM_RIGHTS`), in their order; pools that do not fit one packet come in further ones.
//!
//! # HISTORY
//! Version 1: the first.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use crate::{
    Incarnation, WireError,
    packed::{Format, check_at_most, check_reason, clean_reason},
};

/// Version of both bodies.
pub const SHARE_VERSION: u16 = 1;
/// Largest body, in bytes: one packet.
pub const MAX_SHARE_BYTES: usize = 16 << 10;
/// Most pools in one packet. Linux passes at most 253 descriptors at once.
pub const MAX_POOLS_PER_PACKET: usize = 128;

const REQUEST: Format = Format {
    what: "share request",
    version: SHARE_VERSION,
    max_bytes: MAX_SHARE_BYTES,
};
const REPLY: Format = Format {
    what: "share reply",
    version: SHARE_VERSION,
    max_bytes: MAX_SHARE_BYTES,
};

/// Asks an engine on this host for its pools.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShareRequest {
    /// Who asks.
    pub from: Incarnation,
    /// Who is meant; anybody else refuses.
    pub expects: Incarnation,
}

impl ShareRequest {
    /// Reads a request.
    ///
    /// # Errors
    /// [`WireError::Version`] for another version; otherwise what is wrong.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        REQUEST.decode(bytes)
    }

    /// Writes a request.
    ///
    /// # Errors
    /// [`WireError::Msgpack`] if the encoder fails.
    pub fn encode(&self) -> Result<Vec<u8>, WireError> {
        REQUEST.encode(self)
    }
}

/// A pool whose descriptor comes with the packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedPool {
    /// The region that it is, from its first byte on.
    pub region: u32,
    /// Length of the region in bytes, at least 1.
    pub bytes: u64,
}

/// Answers a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ShareReply {
    /// Pools of the engine; the first packet, or another one.
    Pools {
        /// Who answers, the one that was expected.
        incarnation: Incarnation,
        /// Where, in the address space of the process that answers, the 16 bytes of its incarnation
        /// lie for as long as the engine lives.
        word: u64,
        /// One per descriptor, in their order: at most [`MAX_POOLS_PER_PACKET`], no region twice.
        pools: Vec<SharedPool>,
        /// Whether another packet follows.
        more: bool,
    },
    /// Nothing is shared.
    Refused {
        /// Why, for people: at most 1,024 bytes, no control characters.
        reason: String,
    },
}

impl ShareReply {
    /// Reads an answer.
    ///
    /// # Errors
    /// [`WireError::Version`] for another version; otherwise what is wrong.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let reply: Self = REPLY.decode(bytes)?;
        reply.validate()?;
        Ok(reply)
    }

    /// Writes an answer. A reason that is too long is cut, control characters in it become spaces.
    ///
    /// # Errors
    /// As [`ShareReply::decode`] has them for the same value.
    pub fn encode(&self) -> Result<Vec<u8>, WireError> {
        match self {
            Self::Pools { .. } => {
                self.validate()?;
                REPLY.encode(self)
            }
            Self::Refused { reason } => REPLY.encode(&Self::Refused {
                reason: clean_reason(reason),
            }),
        }
    }

    fn validate(&self) -> Result<(), WireError> {
        let (word, pools) = match self {
            Self::Refused { reason } => return check_reason("share reply.reason", reason),
            Self::Pools { word, pools, .. } => (word, pools),
        };
        if *word == 0 {
            return Err(WireError::bad("share reply.word", word, "an address"));
        }
        check_at_most("share reply.pools", pools.len(), MAX_POOLS_PER_PACKET)?;
        let mut seen = HashSet::new();
        for pool in pools {
            if pool.bytes == 0 {
                return Err(WireError::bad(
                    "share reply.pools.bytes",
                    0_u8,
                    "at least 1",
                ));
            }
            if !seen.insert(pool.region) {
                let region = pool.region;
                return Err(WireError::bad(
                    "share reply.pools.region",
                    region,
                    "no region twice",
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(pools: Vec<SharedPool>) -> ShareReply {
        ShareReply::Pools {
            incarnation: Incarnation::from_bytes([3; 16]).unwrap(),
            word: 0x7f00_0000_1000,
            pools,
            more: false,
        }
    }

    #[test]
    fn a_full_packet_fits_and_one_more_pool_does_not() {
        let pool = |region| SharedPool {
            region: u32::MAX - region,
            bytes: u64::MAX,
        };
        let full: Vec<SharedPool> = (0..MAX_POOLS_PER_PACKET as u32).map(pool).collect();
        let bytes = reply(full.clone()).encode().unwrap();
        assert_eq!(ShareReply::decode(&bytes), Ok(reply(full.clone())));
        let over = [full, vec![pool(500)]].concat();
        assert!(matches!(
            reply(over).encode(),
            Err(WireError::TooLong {
                max: MAX_POOLS_PER_PACKET,
                got: 129,
                ..
            })
        ));
    }

    #[test]
    fn empty_and_repeated_pools_are_refused() {
        let pool = |region, bytes| SharedPool { region, bytes };
        assert!(reply(vec![pool(1, 0)]).encode().is_err());
        assert!(reply(vec![pool(1, 5), pool(1, 5)]).encode().is_err());
        assert!(reply(vec![]).encode().is_ok());
    }
}

//! Frames of the directory, which serves the ranks' descriptions over TCP.
//!
//! Responsible for framing and the two bodies. Not responsible for the connection, its deadlines,
//! or the descriptions, which stay encoded here.
//!
//! Invariant: a frame is refused after its first eight bytes if it is not ours or too large, so a
//! stray client costs eight bytes of reading.
//!
//! A frame is the magic `kfd1`, the body's length as little-endian `u32`, and the body: a `u16`
//! version, then msgpack.
//!
//! # HISTORY
//! Version 1: the first.

use std::collections::HashSet;

use serde::{Deserialize, Deserializer, Serialize};

use crate::{
    EngineId, Instance, Rank, WireError,
    description::MAX_DESCRIPTION_BYTES,
    packed::{Format, capped, check_at_most, check_reason, clean_reason, shown},
};

/// Bytes in front of every body.
pub const FRAME_HEADER_BYTES: usize = 8;
/// Version of both bodies.
pub const DIRECTORY_VERSION: u16 = 1;
/// Largest body of a request.
pub const MAX_DIRECTORY_REQUEST_BYTES: usize = 64 << 10;
/// Largest body of a reply.
pub const MAX_DIRECTORY_REPLY_BYTES: usize = 64 << 20;
/// Most ranks in a request or reply.
pub const MAX_DIRECTORY_RANKS: usize = 4_096;

const MAGIC: [u8; 4] = *b"kfd1";

const REQUEST: Format = Format {
    what: "directory request",
    version: DIRECTORY_VERSION,
    max_bytes: MAX_DIRECTORY_REQUEST_BYTES,
};
const REPLY: Format = Format {
    what: "directory reply",
    version: DIRECTORY_VERSION,
    max_bytes: MAX_DIRECTORY_REPLY_BYTES,
};

/// The eight bytes in front of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader;

impl FrameHeader {
    /// Reads a header and returns the length of the body, 1 to `cap`.
    ///
    /// # Errors
    /// [`WireError::BadValue`] if it is no frame of the directory or has no body,
    /// [`WireError::TooLong`] if the body is larger than `cap`.
    pub fn parse(header: &[u8; FRAME_HEADER_BYTES], cap: usize) -> Result<usize, WireError> {
        let [m0, m1, m2, m3, l0, l1, l2, l3] = *header;
        let magic = [m0, m1, m2, m3];
        if magic != MAGIC {
            let got = shown(&magic.escape_ascii().to_string());
            return Err(WireError::bad(
                "frame.magic",
                got,
                "\"kfd1\", a kvferry directory frame",
            ));
        }
        let length = u32::from_le_bytes([l0, l1, l2, l3]);
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if length == 0 {
            return Err(WireError::bad("frame.length", length, "at least 1"));
        }
        check_at_most("frame.length", length, cap)?;
        Ok(length)
    }
}

fn frame(body: &[u8]) -> Result<Vec<u8>, WireError> {
    let length = u32::try_from(body.len()).map_err(|_| WireError::TooLong {
        what: "frame.length",
        max: u32::MAX as usize,
        got: body.len(),
    })?;
    Ok([&MAGIC[..], &length.to_le_bytes(), body].concat())
}

/// Asks for descriptions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectoryRequest {
    /// The ranks wanted, at most [`MAX_DIRECTORY_RANKS`]; `None` asks for all.
    #[serde(default, deserialize_with = "optional_ranks")]
    pub ranks: Option<Vec<Rank>>,
}

fn optional_ranks<'de, D: Deserializer<'de>>(input: D) -> Result<Option<Vec<Rank>>, D::Error> {
    #[derive(Deserialize)]
    struct Ranks(#[serde(deserialize_with = "ranks")] Vec<Rank>);
    Ok(Option::<Ranks>::deserialize(input)?.map(|ranks| ranks.0))
}

fn ranks<'de, D: Deserializer<'de>>(input: D) -> Result<Vec<Rank>, D::Error> {
    capped(input, "ranks", MAX_DIRECTORY_RANKS)
}

fn entries<'de, D: Deserializer<'de>>(input: D) -> Result<Vec<EntryBody>, D::Error> {
    capped(input, "entries", MAX_DIRECTORY_RANKS)
}

impl DirectoryRequest {
    /// Reads a frame's body.
    ///
    /// # Errors
    /// [`WireError::Version`] for another version; otherwise what is wrong.
    pub fn decode_body(body: &[u8]) -> Result<Self, WireError> {
        let request: Self = REQUEST.decode(body)?;
        request.check()?;
        Ok(request)
    }

    /// Writes the frame, header included.
    ///
    /// # Errors
    /// [`WireError::TooLong`] over [`MAX_DIRECTORY_RANKS`].
    pub fn encode_frame(&self) -> Result<Vec<u8>, WireError> {
        self.check()?;
        frame(&REQUEST.encode(self)?)
    }

    fn check(&self) -> Result<(), WireError> {
        let ranks = self.ranks.as_ref().map_or(0, Vec::len);
        check_at_most("directory request.ranks", ranks, MAX_DIRECTORY_RANKS)
    }
}

/// Answers a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DirectoryReply {
    /// What is known. Ranks that were asked for and are missing have not published yet.
    Entries {
        /// The scheduler half that issues leases, where there is one.
        instance: Option<Instance>,
        /// The engine that the directory belongs to.
        engine: EngineId,
        /// Encoded descriptions ([`Description::encode`](crate::Description::encode)) by rank, at
        /// most [`MAX_DIRECTORY_RANKS`], no rank twice.
        entries: Vec<(Rank, Vec<u8>)>,
    },
    /// The request can not be answered.
    Refused {
        /// Why, for people: at most 1,024 bytes, no control characters.
        reason: String,
    },
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ReplyBody {
    Entries {
        instance: Option<Instance>,
        engine: EngineId,
        #[serde(deserialize_with = "entries")]
        entries: Vec<EntryBody>,
    },
    Refused {
        reason: String,
    },
}

#[derive(Serialize, Deserialize)]
struct EntryBody {
    rank: Rank,
    #[serde(with = "serde_bytes")]
    description: Vec<u8>,
}

impl DirectoryReply {
    /// Reads a frame's body.
    ///
    /// # Errors
    /// [`WireError::Version`] for another version; otherwise what is wrong.
    pub fn decode_body(body: &[u8]) -> Result<Self, WireError> {
        let reply = match REPLY.decode(body)? {
            ReplyBody::Entries {
                instance,
                engine,
                entries,
            } => Self::Entries {
                instance,
                engine,
                entries: entries
                    .into_iter()
                    .map(|entry| (entry.rank, entry.description))
                    .collect(),
            },
            ReplyBody::Refused { reason } => {
                check_reason("directory reply.reason", &reason)?;
                Self::Refused { reason }
            }
        };
        reply.check()?;
        Ok(reply)
    }

    /// Writes the frame, header included. A reason that is too long is cut, control characters in
    /// it become spaces.
    ///
    /// # Errors
    /// [`WireError::TooLong`] over the caps, [`WireError::BadValue`] for a rank that appears twice.
    pub fn encode_frame(&self) -> Result<Vec<u8>, WireError> {
        self.check()?;
        let body = match self {
            Self::Entries {
                instance,
                engine,
                entries,
            } => ReplyBody::Entries {
                instance: *instance,
                engine: engine.clone(),
                entries: entries
                    .iter()
                    .map(|(rank, description)| EntryBody {
                        rank: *rank,
                        description: description.clone(),
                    })
                    .collect(),
            },
            Self::Refused { reason } => ReplyBody::Refused {
                reason: clean_reason(reason),
            },
        };
        frame(&REPLY.encode(&body)?)
    }

    fn check(&self) -> Result<(), WireError> {
        let Self::Entries { entries, .. } = self else {
            return Ok(());
        };
        check_at_most(
            "directory reply.entries",
            entries.len(),
            MAX_DIRECTORY_RANKS,
        )?;
        let mut ranks = HashSet::with_capacity(entries.len());
        for (rank, description) in entries {
            check_at_most(
                "directory reply.description",
                description.len(),
                MAX_DESCRIPTION_BYTES,
            )?;
            if !ranks.insert(*rank) {
                return Err(WireError::bad(
                    "directory reply.rank",
                    rank,
                    "a rank that appears once",
                ));
            }
        }
        Ok(())
    }
}

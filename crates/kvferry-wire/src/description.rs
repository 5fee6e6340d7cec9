//! What an engine says about itself: who it is, how it is reached, and where its blocks lie.
//!
//! Responsible for the fields, their limits and for tables that lie within their regions. Not
//! responsible for deciding whether two engines fit together: that compares two descriptions.
//!
//! Invariant: whatever [`Description::decode`] returns passes [`Description::validate`], and
//! [`Description::encode`] writes nothing that does not.
//!
//! # HISTORY
//! Version 1: the first.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};

use crate::{EngineId, Incarnation, Instance, Rank, WireError, packed::Format};

mod validate;

pub use validate::check_table;

/// Version of an encoded description.
pub const DESCRIPTION_VERSION: u16 = 1;
/// Largest encoded description.
pub const MAX_DESCRIPTION_BYTES: usize = 16 << 20;
/// Most regions in a description.
pub const MAX_REGIONS: usize = 4_096;
/// Most tables in a description.
pub const MAX_TABLES: usize = 65_536;
/// Largest worker address.
pub const MAX_ADDRESS_BYTES: usize = 64 << 10;
/// Largest packed remote key.
pub const MAX_KEY_BYTES: usize = 4 << 10;
/// Most packed remote keys in a description, all regions together.
pub const MAX_KEYS: usize = 65_536;
/// Most compatibility fields.
pub const MAX_COMPATIBILITY_FIELDS: usize = 256;
/// Longest name of a compatibility field, in bytes.
pub const MAX_FIELD_NAME_BYTES: usize = 128;
/// Longest value of a compatibility field, in bytes.
pub const MAX_FIELD_VALUE_BYTES: usize = 4 << 10;
/// Longest host identification, in bytes.
pub const MAX_HOST_BYTES: usize = 256;
/// Longest version text, layout name or packing tag, in bytes.
pub const MAX_TAG_BYTES: usize = 128;
/// Longest unix socket name, in bytes: what `sockaddr_un` holds beside its final zero.
pub const MAX_UNIX_SOCKET_BYTES: usize = 107;

const FORMAT: Format = Format {
    what: "description",
    version: DESCRIPTION_VERSION,
    max_bytes: MAX_DESCRIPTION_BYTES,
};

/// The version of the UCX library that an engine runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct UcxVersion {
    /// 1 in `1.13.0`.
    pub major: u32,
    /// 13 in `1.13.0`.
    pub minor: u32,
    /// 0 in `1.13.0`.
    pub release: u32,
}

impl fmt::Display for UcxVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.release)
    }
}

/// Where an engine's workers are reached, as their transport packs addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Addresses {
    /// The message context's worker; at most [`MAX_ADDRESS_BYTES`], not empty.
    #[serde(with = "serde_bytes")]
    pub message: Vec<u8>,
    /// The data context's worker, where there is one.
    #[serde(default, with = "serde_bytes")]
    pub data: Option<Vec<u8>>,
}

/// What kind of memory a region is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemoryKind {
    /// Memory of the host.
    Host,
    /// Memory of an NVIDIA device.
    Cuda {
        /// The device's number in its process.
        device: u16,
    },
    /// Memory of an AMD device.
    Rocm {
        /// The device's number in its process.
        device: u16,
    },
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Cuda { device } => write!(f, "cuda:{device}"),
            Self::Rocm { device } => write!(f, "rocm:{device}"),
        }
    }
}

/// A registered range of memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionDescription {
    /// The engine's number for it; unique in a description.
    pub id: u32,
    /// First address, in the engine's address space.
    pub base: u64,
    /// Length, at least 1; `base + bytes` does not overflow.
    pub bytes: u64,
    /// Kind of memory. Regions of one kind do not overlap.
    pub kind: MemoryKind,
    /// Length of the chunks in which it is registered, 1 to `bytes`: chunk `n` begins
    /// `n * chunk_bytes` bytes into the region, and the last may be shorter. One chunk where no
    /// device limits a registration.
    pub chunk_bytes: u64,
    /// The packed remote key of each chunk, where there is a data context, otherwise none; each 1
    /// to [`MAX_KEY_BYTES`] bytes, at most [`MAX_KEYS`] in a description.
    #[serde(
        default,
        serialize_with = "validate::write_keys",
        deserialize_with = "validate::keys"
    )]
    pub keys: Vec<Vec<u8>>,
}

impl RegionDescription {
    /// Number of chunks.
    #[must_use]
    pub const fn chunks(&self) -> u64 {
        match self.chunk_bytes {
            // Refused by `validate`.
            0 => 1,
            chunk_bytes => self.bytes.div_ceil(chunk_bytes),
        }
    }
}

/// Blocks at equal distances within one region: one layer of one cache group.
///
/// Block `n` begins `offset + n * block_stride` bytes into the region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableDescription {
    /// The engine's number for it; unique in a description.
    pub id: u32,
    /// The region it lies in.
    pub region: u32,
    /// Where in the region block 0 begins, in bytes.
    pub offset: u64,
    /// Length of a block, at least 1.
    pub block_bytes: u64,
    /// Distance between the beginnings of neighbours, at least `block_bytes`.
    pub block_stride: u64,
    /// Number of blocks, at least 1.
    pub block_count: u32,
    /// The cache group whose block ids index the table.
    pub group: u32,
    /// The layer, counted over all pipeline stages.
    pub layer: u32,
    /// What is inside a block.
    pub interior: Interior,
}

/// The inside of a block, for whoever reads part of one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interior {
    /// The layout's name as vLLM gives it, or `opaque`; 1 to [`MAX_TAG_BYTES`] bytes.
    pub layout: String,
    /// KV heads, at least 1.
    pub heads: u32,
    /// Bytes between heads.
    pub head_stride: u64,
    /// Tokens, at least 1.
    pub tokens: u32,
    /// Bytes between tokens.
    pub token_stride: u64,
    /// Planes (2 where keys and values are apart), at least 1.
    pub planes: u32,
    /// A tag for anything else that both sides must agree on.
    #[serde(default)]
    pub packing: Option<String>,
}

impl Interior {
    /// The interior of blocks that only move whole.
    #[must_use]
    pub fn opaque() -> Self {
        Self {
            layout: "opaque".to_owned(),
            heads: 1,
            head_stride: 0,
            tokens: 1,
            token_stride: 0,
            planes: 1,
            packing: None,
        }
    }
}

/// What one rank of an engine says about itself.
///
/// ```
/// use kvferry_wire::{Addresses, Description, EngineId, Incarnation, Rank, WireError};
///
/// let mine = Description {
///     engine: EngineId::new("prefill-0")?,
///     incarnation: Incarnation::random()?,
///     rank: Rank::default(),
///     instance: None,
///     kvferry_version: "0.1.0".to_owned(),
///     ucx: None,
///     host: "a host".to_owned(),
///     addresses: Addresses { message: vec![1, 2, 3], data: None },
///     compatibility: [("model".to_owned(), "toy".to_owned())].into(),
///     regions: Vec::new(),
///     tables: Vec::new(),
///     unix_socket: None,
/// };
/// assert_eq!(Description::decode(&mine.encode()?)?, mine);
/// # Ok::<(), WireError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Description {
    /// The configured id of the engine.
    pub engine: EngineId,
    /// This life of this rank.
    pub incarnation: Incarnation,
    /// Its place in the engine.
    pub rank: Rank,
    /// The scheduler half that issues leases, where there is one.
    pub instance: Option<Instance>,
    /// Version of kvferry; at most [`MAX_TAG_BYTES`] bytes.
    pub kvferry_version: String,
    /// Version of UCX; `None` for the in-process fabric.
    pub ucx: Option<UcxVersion>,
    /// Equal values mean the same host (a boot id); at most [`MAX_HOST_BYTES`] bytes.
    pub host: String,
    /// Where its workers are reached.
    pub addresses: Addresses,
    /// What must be equal on both sides, by name; at most [`MAX_COMPATIBILITY_FIELDS`].
    #[serde(deserialize_with = "validate::compatibility")]
    pub compatibility: BTreeMap<String, String>,
    /// Registered memory, at most [`MAX_REGIONS`].
    #[serde(deserialize_with = "validate::regions")]
    pub regions: Vec<RegionDescription>,
    /// Where blocks lie, at most [`MAX_TABLES`].
    #[serde(deserialize_with = "validate::tables")]
    pub tables: Vec<TableDescription>,
    /// The socket that hands out file descriptors to the same host, where there is one; at most
    /// [`MAX_UNIX_SOCKET_BYTES`] bytes, a leading `@` standing for the abstract namespace.
    pub unix_socket: Option<String>,
}

impl Description {
    /// Reads an encoded description and checks it.
    ///
    /// # Errors
    /// [`WireError::Version`] for another format version, whatever follows it; otherwise what is
    /// wrong, with the field and its value.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let description: Self = FORMAT.decode(bytes)?;
        description.validate()?;
        Ok(description)
    }

    /// Checks the description and writes it: a `u16` version, then msgpack.
    ///
    /// # Errors
    /// As [`validate`](Self::validate), and [`WireError::TooLong`] over
    /// [`MAX_DESCRIPTION_BYTES`].
    pub fn encode(&self) -> Result<Vec<u8>, WireError> {
        self.validate()?;
        FORMAT.encode(self)
    }
}

#[cfg(test)]
mod tests;

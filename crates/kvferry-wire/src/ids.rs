//! Names of things that more than one process talks about.
//!
//! Every type here is valid by construction: a value that exists has been checked, and the rest
//! of kvferry never checks it again.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::WireError;

/// Longest engine or request id, in bytes.
///
/// vLLM's request ids are a prefix, a UUID and a few suffixes (under 100 bytes); clients may
/// choose their own, so there is room.
pub const MAX_NAME_BYTES: usize = 512;

macro_rules! random_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "serde_bytes::ByteArray<16>", into = "serde_bytes::ByteArray<16>")]
        pub struct $name(u128);

        impl $name {
            /// Draws a new one from the operating system's random source.
            ///
            /// # Errors
            /// [`WireError::NoRandomness`] if the operating system refuses.
            pub fn random() -> Result<Self, WireError> {
                loop {
                    let mut bytes = [0_u8; 16];
                    getrandom::fill(&mut bytes)
                        .map_err(|error| WireError::NoRandomness(error.to_string()))?;
                    if let Ok(id) = Self::from_bytes(bytes) {
                        return Ok(id);
                    }
                }
            }

            /// Reads the little-endian bytes of an id.
            ///
            /// # Errors
            /// [`WireError::BadValue`] for zero, which stands for "none" in fixed layouts.
            pub fn from_bytes(bytes: [u8; 16]) -> Result<Self, WireError> {
                match u128::from_le_bytes(bytes) {
                    0 => Err(WireError::bad(stringify!($name), 0_u8, "not zero")),
                    value => Ok(Self(value)),
                }
            }

            /// The id as little-endian bytes.
            #[must_use]
            pub const fn to_bytes(self) -> [u8; 16] {
                self.0.to_le_bytes()
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{self}")
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:032x}", self.0)
            }
        }

        impl TryFrom<serde_bytes::ByteArray<16>> for $name {
            type Error = WireError;
            fn try_from(bytes: serde_bytes::ByteArray<16>) -> Result<Self, WireError> {
                Self::from_bytes(bytes.into_array())
            }
        }

        impl From<$name> for serde_bytes::ByteArray<16> {
            fn from(id: $name) -> Self {
                Self::new(id.to_bytes())
            }
        }
    };
}

random_id! {
    /// One life of one engine: drawn at every start, carried by every message.
    ///
    /// Two engines that answer at the same address at different times have different
    /// incarnations; that is how a peer notices a restart or a stranger.
    Incarnation
}

random_id! {
    /// One life of a producer's scheduler half; the first part of every lease.
    Instance
}

macro_rules! name_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(Box<str>);

        impl $name {
            /// Checks a name: 1 to [`MAX_NAME_BYTES`] bytes of UTF-8 without control characters.
            ///
            /// # Errors
            /// [`WireError::BadValue`] naming what is wrong.
            pub fn new(name: impl Into<String>) -> Result<Self, WireError> {
                let name: String = name.into();
                if name.is_empty() || name.len() > MAX_NAME_BYTES {
                    return Err(WireError::bad(
                        stringify!($name),
                        format!("{} bytes", name.len()),
                        "1 to 512 bytes",
                    ));
                }
                if name.chars().any(char::is_control) {
                    return Err(WireError::bad(
                        stringify!($name),
                        format!("{name:?}"),
                        "no control characters",
                    ));
                }
                Ok(Self(name.into_boxed_str()))
            }

            /// The name itself.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&*self.0, f)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl TryFrom<String> for $name {
            type Error = WireError;
            fn try_from(name: String) -> Result<Self, WireError> {
                Self::new(name)
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> Self {
                name.0.into()
            }
        }
    };
}

name_id! {
    /// An engine's configured id (vLLM's `engine_id`): stable over restarts, unlike its
    /// [`Incarnation`].
    EngineId
}

name_id! {
    /// A request's id as its *producer* knows it.
    RequestId
}

/// The order in which a scheduler half issued its leases; strictly increasing within an
/// [`Instance`], starting at 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u64", into = "u64")]
pub struct Epoch(u64);

impl Epoch {
    /// Checks an epoch.
    ///
    /// # Errors
    /// [`WireError::BadValue`] for zero, which is the high-water mark before the first lease.
    pub fn new(value: u64) -> Result<Self, WireError> {
        if value == 0 {
            Err(WireError::bad("epoch", 0_u8, "at least 1"))
        } else {
            Ok(Self(value))
        }
    }

    /// The number itself, at least 1.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl TryFrom<u64> for Epoch {
    type Error = WireError;
    fn try_from(value: u64) -> Result<Self, WireError> {
        Self::new(value)
    }
}

impl From<Epoch> for u64 {
    fn from(epoch: Epoch) -> Self {
        epoch.0
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// One lease: the right to read one request's blocks.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LeaseId {
    /// The scheduler half that issued it.
    pub instance: Instance,
    /// Its place in that half's order.
    pub epoch: Epoch,
    /// The request, by the producer's name for it.
    pub request: RequestId,
}

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.instance, self.epoch, self.request)
    }
}

/// Who reads under a lease: one load of one consumer engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ReaderId {
    /// The consumer engine's life.
    pub incarnation: Incarnation,
    /// The consumer's own number for the load; a second load of the same lease has another one.
    pub load: u64,
}

impl fmt::Display for ReaderId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.incarnation, self.load)
    }
}

/// A worker's place in its engine: pipeline stage and tensor-parallel rank.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Rank {
    /// Pipeline stage, from 0.
    pub pp: u16,
    /// Tensor-parallel rank, from 0.
    pub tp: u16,
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pp{}tp{}", self.pp, self.tp)
    }
}

#[cfg(test)]
mod tests;

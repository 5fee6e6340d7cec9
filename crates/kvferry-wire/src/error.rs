//! What can be wrong with bytes from another process.

use thiserror::Error;

/// Why bytes were refused. Each variant names what was looked at and the offending value.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WireError {
    /// The bytes end before `what` does.
    #[error("{what} needs {need} bytes, got {got}")]
    TooShort {
        /// The item being read.
        what: &'static str,
        /// Bytes it needs.
        need: usize,
        /// Bytes that were there.
        got: usize,
    },
    /// `what` is larger than its cap.
    #[error("{what} is {got} bytes or items, at most {max} are allowed")]
    TooLong {
        /// The item being read or written.
        what: &'static str,
        /// The cap.
        max: usize,
        /// Its actual size.
        got: usize,
    },
    /// Bytes are left over after `what`.
    #[error("{what} is followed by {extra} bytes that belong to nothing")]
    Trailing {
        /// The item that was read.
        what: &'static str,
        /// Bytes left over.
        extra: usize,
    },
    /// Another format version.
    #[error("{what} has version {got}, this build reads {min} to {max}")]
    Version {
        /// The item being read.
        what: &'static str,
        /// The version found.
        got: u32,
        /// Oldest readable version.
        min: u32,
        /// Newest readable version.
        max: u32,
    },
    /// A field has a value that is not allowed.
    #[error("{field} is {value}, expected {expected}")]
    BadValue {
        /// The field.
        field: &'static str,
        /// Its value, printed.
        value: String,
        /// What would have been right.
        expected: &'static str,
    },
    /// msgpack could not be decoded.
    #[error("{what} is not the msgpack that was expected: {reason}")]
    Msgpack {
        /// The item being read.
        what: &'static str,
        /// The decoder's words.
        reason: String,
    },
    /// The operating system gave no random bytes.
    #[error("the operating system's random source failed: {0}")]
    NoRandomness(String),
}

impl WireError {
    pub(crate) fn bad(field: &'static str, value: impl ToString, expected: &'static str) -> Self {
        Self::BadValue {
            field,
            value: value.to_string(),
            expected,
        }
    }
}

//! Service payloads of fixed layout: two bytes, version and kind, and what the kind says.
//!
//! Responsible for the header and for cutting typed pieces off bytes. Not for what a field may hold.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::WireError;

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Header {
    version: u8,
    kind: u8,
}

/// The kind of a payload of this version, and the rest.
pub(crate) fn open<'a>(
    what: &'static str,
    version: u8,
    payload: &'a [u8],
) -> Result<(u8, &'a [u8]), WireError> {
    let (header, body) = prefix::<Header>(what, payload)?;
    if header.version != version {
        return Err(WireError::Version {
            what,
            got: header.version.into(),
            min: version.into(),
            max: version.into(),
        });
    }
    Ok((header.kind, body))
}

/// Starts a payload of which `body` is the fixed part and `more` bytes follow.
pub(crate) fn start(
    version: u8,
    kind: u8,
    body: &(impl IntoBytes + Immutable),
    more: usize,
) -> Vec<u8> {
    let header = Header { version, kind };
    let size = size_of::<Header>() + size_of_val(body) + more;
    let mut bytes = Vec::with_capacity(size);
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(body.as_bytes());
    bytes
}

/// Splits off a `T`.
pub(crate) fn prefix<'a, T>(what: &'static str, bytes: &'a [u8]) -> Result<(T, &'a [u8]), WireError>
where
    T: FromBytes + KnownLayout + Immutable + Unaligned,
{
    T::read_from_prefix(bytes).map_err(|_| WireError::TooShort {
        what,
        need: size_of::<T>(),
        got: bytes.len(),
    })
}

/// Takes bytes for exactly `count` items.
pub(crate) fn exact_slice<'a, T>(
    what: &'static str,
    bytes: &'a [u8],
    count: usize,
) -> Result<&'a [T], WireError>
where
    T: FromBytes + KnownLayout + Immutable + Unaligned,
{
    let need = count.saturating_mul(size_of::<T>());
    if bytes.len() > need {
        return Err(WireError::Trailing {
            what,
            extra: bytes.len() - need,
        });
    }
    <[T]>::ref_from_bytes_with_elems(bytes, count).map_err(|_| WireError::TooShort {
        what,
        need,
        got: bytes.len(),
    })
}

/// Defines a one-byte code with its number on the wire and its words.
macro_rules! code {
    (
        $(#[$doc:meta])* $name:ident in $field:literal, $range:literal:
        $($(#[$variant_doc:meta])* $variant:ident = $number:literal, $words:literal;)*
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum $name {
            $($(#[$variant_doc])* $variant = $number,)*
        }

        impl $name {
            /// Every value, in the order of the numbers on the wire.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            pub(crate) fn parse(byte: u8) -> Result<Self, $crate::WireError> {
                match byte {
                    $($number => Ok(Self::$variant),)*
                    _ => Err($crate::WireError::bad($field, byte, $range)),
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(match self {
                    $(Self::$variant => $words,)*
                })
            }
        }
    };
}

pub(crate) use code;

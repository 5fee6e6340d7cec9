//! Versioned msgpack: a little-endian `u16` version, then one msgpack value and nothing else.
//!
//! Responsible for the version, the size cap, the nesting limit and bytes left over. What the
//! value must satisfy is checked by its own type.

use std::{fmt, io::Cursor, marker::PhantomData};

use serde::{
    Deserialize, Deserializer, Serialize,
    de::{DeserializeOwned, Error as _, SeqAccess, Visitor},
};

use crate::WireError;

/// Bytes of the version in front of the msgpack.
const VERSION_BYTES: usize = 2;

/// Deepest nesting that any of our types has is 6; unknown fields may add some.
const MAX_DEPTH: usize = 32;

/// Longest reason that a peer may send as text, in bytes.
pub(crate) const MAX_REASON_BYTES: usize = 1024;

/// One kind of versioned body.
pub(crate) struct Format {
    /// Its name in errors.
    pub(crate) what: &'static str,
    /// The only version this build reads and writes.
    pub(crate) version: u16,
    /// Cap on the whole body, version included.
    pub(crate) max_bytes: usize,
}

impl Format {
    /// Writes `value` as named maps, so that readers can skip fields they do not know.
    pub(crate) fn encode<T: Serialize>(&self, value: &T) -> Result<Vec<u8>, WireError> {
        let mut bytes = self.version.to_le_bytes().to_vec();
        rmp_serde::encode::write_named(&mut bytes, value).map_err(|error| self.msgpack(&error))?;
        self.check_length(bytes.len())?;
        Ok(bytes)
    }

    /// Reads a body. The version is judged before the rest is looked at.
    pub(crate) fn decode<T: DeserializeOwned>(&self, bytes: &[u8]) -> Result<T, WireError> {
        let Some((version, rest)) = bytes.split_first_chunk::<VERSION_BYTES>() else {
            return Err(WireError::TooShort {
                what: self.what,
                need: VERSION_BYTES,
                got: bytes.len(),
            });
        };
        let version = u16::from_le_bytes(*version);
        if version != self.version {
            return Err(WireError::Version {
                what: self.what,
                got: version.into(),
                min: self.version.into(),
                max: self.version.into(),
            });
        }
        self.check_length(bytes.len())?;
        let mut deserializer = rmp_serde::Deserializer::new(Cursor::new(rest));
        deserializer.set_max_depth(MAX_DEPTH);
        let value = T::deserialize(&mut deserializer).map_err(|error| self.msgpack(&error))?;
        match rest
            .len()
            .saturating_sub(usize::try_from(deserializer.position()).unwrap_or(0))
        {
            0 => Ok(value),
            extra => Err(WireError::Trailing {
                what: self.what,
                extra,
            }),
        }
    }

    fn check_length(&self, bytes: usize) -> Result<(), WireError> {
        check_at_most(self.what, bytes, self.max_bytes)
    }

    fn msgpack(&self, error: &dyn fmt::Display) -> WireError {
        WireError::Msgpack {
            what: self.what,
            reason: clean_reason(&error.to_string()),
        }
    }
}

/// Refuses more than `max` bytes or items.
pub(crate) fn check_at_most(what: &'static str, got: usize, max: usize) -> Result<(), WireError> {
    if got > max {
        Err(WireError::TooLong { what, max, got })
    } else {
        Ok(())
    }
}

/// Checks a text that a peer chose: it will end up in logs and on terminals.
pub(crate) fn check_text(field: &'static str, text: &str, max: usize) -> Result<(), WireError> {
    check_at_most(field, text.len(), max)?;
    if text.chars().any(char::is_control) {
        return Err(WireError::bad(field, shown(text), "no control characters"));
    }
    Ok(())
}

/// Checks the text of a refusal that a peer sent.
pub(crate) fn check_reason(field: &'static str, reason: &str) -> Result<(), WireError> {
    check_text(field, reason, MAX_REASON_BYTES)
}

/// A refusal's text as it may be sent: at most [`MAX_REASON_BYTES`], without control characters.
///
/// Reasons quote values, so their length is not in the caller's hand; a refusal must not fail
/// because its explanation is long.
pub(crate) fn clean_reason(reason: &str) -> String {
    let mut clean = String::with_capacity(reason.len().min(MAX_REASON_BYTES));
    for character in reason.chars() {
        let character = if character.is_control() {
            ' '
        } else {
            character
        };
        if clean.len() + character.len_utf8() > MAX_REASON_BYTES {
            break;
        }
        clean.push(character);
    }
    clean
}

/// A peer's text as an error quotes it: escaped, and cut after 64 characters.
pub(crate) fn shown(text: &str) -> String {
    const SHOWN: usize = 64;
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{:?}...", text.get(..end).unwrap_or_default()),
        None => format!("{text:?}"),
    }
}

/// Deserializes a sequence and stops at the first item past `max`, so that a short body of tiny
/// items can not make us hold a large vector.
pub(crate) fn capped<'de, T, D>(
    deserializer: D,
    field: &'static str,
    max: usize,
) -> Result<Vec<T>, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    capped_by(deserializer, field, max, |_| Ok(()))
}

/// [`capped`], and stops at the first item that `allow` refuses: items may hold sequences that are
/// bounded together.
pub(crate) fn capped_by<'de, T, D>(
    deserializer: D,
    field: &'static str,
    max: usize,
    allow: impl FnMut(&T) -> Result<(), String>,
) -> Result<Vec<T>, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    struct Capped<T, A> {
        field: &'static str,
        max: usize,
        allow: A,
        item: PhantomData<T>,
    }

    impl<'de, T, A> Visitor<'de> for Capped<T, A>
    where
        T: Deserialize<'de>,
        A: FnMut(&T) -> Result<(), String>,
    {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "at most {} items in {}", self.max, self.field)
        }

        fn visit_seq<S: SeqAccess<'de>>(mut self, mut items: S) -> Result<Vec<T>, S::Error> {
            let mut all = Vec::new();
            while let Some(item) = items.next_element()? {
                if all.len() == self.max {
                    return Err(S::Error::custom(format_args!(
                        "more than {} items in {}",
                        self.max, self.field
                    )));
                }
                (self.allow)(&item).map_err(S::Error::custom)?;
                all.push(item);
            }
            Ok(all)
        }
    }

    deserializer.deserialize_seq(Capped {
        field,
        max,
        allow,
        item: PhantomData,
    })
}

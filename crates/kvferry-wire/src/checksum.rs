//! Checksums of blocks, for consumers that compare what they have read: payloads of
//! [`Message::Service`](crate::Message::Service) on [`CHECKSUM_CHANNEL`].
//!
//! Responsible for their layouts. Not responsible for computing or comparing.
//!
//! The checksum of a block is XXH3 (64 bits, seed 0, <https://github.com/Cyan4973/xxHash>) over its bytes in all
//! tables of its cache group, in ascending order of their layer numbers.
//!
//! Every payload starts with two bytes, version and kind; all numbers are little-endian.
//!
//! | kind | name | then |
//! | --- | --- | --- |
//! | 1 | ask | token `u64`, count `u32`, blocks (group `u32`, block `u32`) |
//! | 2 | sums | token, count, sums `u64` in the order of the question |
//! | 3 | refused | token, why `u8` |
//!
//! # HISTORY
//! Version 1: the first.

use std::borrow::Borrow;
use std::fmt;

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U32, U64},
};

use crate::{
    WireError,
    fixed::{code, exact_slice, open, prefix, start},
    packed::check_at_most,
};

/// The service channel of checksums.
pub const CHECKSUM_CHANNEL: u16 = 3;
/// Version of the layouts.
pub const CHECKSUM_VERSION: u8 = 1;
/// Most blocks in one question.
pub const MAX_CHECKED_BLOCKS: usize = 1 << 20;

const KIND_ASK: u8 = 1;
const KIND_SUMS: u8 = 2;
const KIND_REFUSED: u8 = 3;

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct ListLayout {
    token: U64,
    count: U32,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RefusedLayout {
    token: U64,
    why: u8,
}

#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
struct BlockLayout {
    group: U32,
    block: U32,
}

/// A block over all layers of its cache group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupBlock {
    /// The cache group.
    pub group: u32,
    /// The block's id in the engine that is asked.
    pub block: u32,
}

code! {
    /// Why there are no checksums.
    NoChecksums in "refused.why", "1 to 5":
    /// The rank has registered no blocks yet.
    NotReady = 1, "no blocks are registered yet";
    /// A block or its group is not there.
    UnknownBlock = 2, "no such block";
    /// The blocks are not in host memory.
    NotHost = 3, "the blocks are not in host memory";
    /// Too many questions wait.
    Busy = 4, "too many questions wait";
    /// The rank is ending.
    Ending = 5, "the engine is ending";
}

/// Blocks as they lie in a message.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct GroupBlocks<'a>(&'a [BlockLayout]);

impl<'a> GroupBlocks<'a> {
    /// The blocks in the order of the message.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = GroupBlock> + use<'a> {
        self.0.iter().map(|it| GroupBlock {
            group: it.group.get(),
            block: it.block.get(),
        })
    }
}

impl fmt::Debug for GroupBlocks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// Checksums as they lie in a message.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Sums<'a>(&'a [U64]);

impl<'a> Sums<'a> {
    /// The checksums in the order of the message.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = u64> + use<'a> {
        self.0.iter().map(|sum| sum.get())
    }
}

impl fmt::Debug for Sums<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// One message about checksums.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChecksumMessage<'a> {
    /// Consumer to producer rank: what are the checksums of these blocks?
    Ask {
        /// Returned in the answer.
        token: u64,
        /// The blocks, 1 to [`MAX_CHECKED_BLOCKS`]; one may be there more than once.
        blocks: GroupBlocks<'a>,
    },
    /// These are.
    Sums {
        /// The question's token.
        token: u64,
        /// As many as blocks were asked for, 1 to [`MAX_CHECKED_BLOCKS`].
        sums: Sums<'a>,
    },
    /// There is no answer.
    Refused {
        /// The question's token.
        token: u64,
        /// Why.
        why: NoChecksums,
    },
}

impl<'a> ChecksumMessage<'a> {
    /// Reads a payload and checks it.
    ///
    /// # Errors
    /// [`WireError::Version`] for another layout; otherwise what is wrong, with the field and its
    /// value.
    pub fn parse(payload: &'a [u8]) -> Result<Self, WireError> {
        let (kind, body) = open("checksum message", CHECKSUM_VERSION, payload)?;
        match kind {
            KIND_ASK => {
                let (token, blocks) = parse_list("ask", "ask.blocks", body)?;
                let blocks = GroupBlocks(blocks);
                Ok(Self::Ask { token, blocks })
            }
            KIND_SUMS => {
                let (token, sums) = parse_list("sums", "sums.sums", body)?;
                let sums = Sums(sums);
                Ok(Self::Sums { token, sums })
            }
            KIND_REFUSED => {
                let (layout, rest) = prefix::<RefusedLayout>("refused", body)?;
                exact_slice::<u8>("refused", rest, 0)?;
                Ok(Self::Refused {
                    token: layout.token.get(),
                    why: NoChecksums::parse(layout.why)?,
                })
            }
            kind => Err(WireError::bad("checksum message.kind", kind, "1 to 3")),
        }
    }
}

fn parse_list<'a, T>(
    what: &'static str,
    field: &'static str,
    body: &'a [u8],
) -> Result<(u64, &'a [T]), WireError>
where
    T: FromBytes + KnownLayout + Immutable + Unaligned,
{
    let (layout, rest) = prefix::<ListLayout>(what, body)?;
    let count = layout.count.get() as usize;
    check_count(field, count)?;
    Ok((layout.token.get(), exact_slice(what, rest, count)?))
}

fn check_count(field: &'static str, count: usize) -> Result<(), WireError> {
    if count == 0 {
        return Err(WireError::bad(field, count, "1 to 1048576"));
    }
    check_at_most(field, count, MAX_CHECKED_BLOCKS)
}

/// Writes [`ChecksumMessage::Ask`]. Takes blocks by value or by reference.
///
/// # Errors
/// [`WireError::BadValue`] for no blocks, [`WireError::TooLong`] for more than [`MAX_CHECKED_BLOCKS`].
pub fn encode_ask(
    token: u64,
    blocks: impl IntoIterator<Item: Borrow<GroupBlock>>,
) -> Result<Vec<u8>, WireError> {
    let blocks = blocks.into_iter().map(|block| {
        let block = block.borrow();
        BlockLayout {
            group: block.group.into(),
            block: block.block.into(),
        }
    });
    encode_list(KIND_ASK, "ask.blocks", token, blocks)
}

/// Writes [`ChecksumMessage::Sums`].
///
/// # Errors
/// [`WireError::BadValue`] for no sums, [`WireError::TooLong`] for more than [`MAX_CHECKED_BLOCKS`].
pub fn encode_sums(token: u64, sums: impl IntoIterator<Item = u64>) -> Result<Vec<u8>, WireError> {
    let sums = sums.into_iter().map(U64::new);
    encode_list(KIND_SUMS, "sums.sums", token, sums)
}

fn encode_list<T: IntoBytes + Immutable>(
    kind: u8,
    field: &'static str,
    token: u64,
    items: impl Iterator<Item = T>,
) -> Result<Vec<u8>, WireError> {
    let items: Vec<T> = items.take(MAX_CHECKED_BLOCKS + 1).collect();
    check_count(field, items.len())?;
    let layout = ListLayout {
        token: token.into(),
        // Checked a line above.
        count: U32::new(items.len() as u32),
    };
    let mut bytes = start(CHECKSUM_VERSION, kind, &layout, size_of_val(&*items));
    bytes.extend_from_slice(items.as_bytes());
    Ok(bytes)
}

/// Writes [`ChecksumMessage::Refused`].
#[must_use]
pub fn encode_refused(token: u64, why: NoChecksums) -> Vec<u8> {
    let layout = RefusedLayout {
        token: token.into(),
        why: why as u8,
    };
    start(CHECKSUM_VERSION, KIND_REFUSED, &layout, 0)
}

//! Reads on the served lane: the request and its refusal.
//!
//! Responsible for naming blocks compactly and for the order of the stream that answers. Whether
//! tables exist and blocks lie within them is known to the producer only.

use std::fmt;

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U32, U64},
};

use super::{
    Kind, MESSAGE_HEADER_BYTES, TransferLayout, check_at_most, exactly, parse_header, start,
};
use crate::{
    WireError,
    segment::{MAX_MESSAGE_BYTES, TransferId},
};

/// Most tables in one read.
pub const MAX_READ_TABLES: usize = 65_536;

/// Neighbouring blocks of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockRun {
    /// The first block.
    pub first: u32,
    /// How many, at least 1; `first + count` does not overflow.
    pub count: u32,
}

impl BlockRun {
    fn check(self) -> Result<(), WireError> {
        if self.count == 0 {
            return Err(WireError::bad("run.count", self.count, "at least 1"));
        }
        if self.first.checked_add(self.count).is_none() {
            return Err(WireError::bad(
                "run.first",
                format!("{} with {} blocks", self.first, self.count),
                "an end below 2^32",
            ));
        }
        Ok(())
    }
}

/// A [`BlockRun`] as it lies in a message.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct BlockRunLayout {
    first: U32,
    count: U32,
}

impl From<BlockRunLayout> for BlockRun {
    fn from(layout: BlockRunLayout) -> Self {
        Self {
            first: layout.first.get(),
            count: layout.count.get(),
        }
    }
}

impl From<BlockRun> for BlockRunLayout {
    fn from(run: BlockRun) -> Self {
        Self {
            first: run.first.into(),
            count: run.count.into(),
        }
    }
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct ReadLayout {
    transfer: TransferLayout,
    tables: U32,
    runs: U32,
}

/// Asks for the same blocks of one or more tables.
///
/// The answer is a stream of bytes: for each table in order, for each run in order, for each block
/// of the run in order, the block's `block_bytes` bytes. The offset of
/// [`SegmentBody::Data`](crate::SegmentBody::Data) is a position in that stream. Its length is
/// [`block_count`](Self::block_count) times the sum of the tables' `block_bytes`.
///
/// Tables and runs may repeat and may overlap; then the stream carries the bytes again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadRequest<'a> {
    transfer: TransferId,
    tables: &'a [U32],
    runs: &'a [BlockRunLayout],
}

impl<'a> ReadRequest<'a> {
    /// The transfer that the answer will name.
    #[must_use]
    pub const fn transfer(&self) -> TransferId {
        self.transfer
    }

    /// The producer's table ids, at least one.
    pub fn tables(&self) -> impl ExactSizeIterator<Item = u32> + Clone + use<'a> {
        self.tables.iter().map(|table| table.get())
    }

    /// The runs of blocks, at least one.
    pub fn runs(&self) -> impl ExactSizeIterator<Item = BlockRun> + Clone + use<'a> {
        self.runs.iter().map(|&run| run.into())
    }

    /// One run, found in constant time (an iterator's `nth` would walk to it).
    #[must_use]
    pub fn run(&self, index: usize) -> Option<BlockRun> {
        self.runs.get(index).map(|&run| run.into())
    }

    /// Number of tables.
    #[must_use]
    pub const fn table_count(&self) -> usize {
        self.tables.len()
    }

    /// Number of runs.
    #[must_use]
    pub const fn run_count(&self) -> usize {
        self.runs.len()
    }

    /// Number of blocks that the runs name, which are read of each table. Adds up the runs.
    #[must_use]
    pub fn block_count(&self) -> u64 {
        self.runs().map(|run| u64::from(run.count)).sum()
    }

    /// Looks at the bytes of a whole read message again, without going through its runs.
    ///
    /// For bytes that [`Message::parse`](crate::Message::parse) has accepted as a read, the result
    /// equals what it returned then. On other bytes this is still safe and panics never, but runs
    /// may be empty or overflow.
    ///
    /// # Errors
    /// As `Message::parse` if header or lengths are wrong, or if it is no read.
    pub fn view(bytes: &'a [u8]) -> Result<Self, WireError> {
        match parse_header(bytes)? {
            (Kind::Read, _, body) => Self::view_body(body),
            (kind, _, _) => Err(WireError::bad("message.kind", kind.name(), "read")),
        }
    }

    pub(super) fn parse_body(body: &'a [u8]) -> Result<Self, WireError> {
        let request = Self::view_body(body)?;
        request.runs().try_for_each(BlockRun::check)?;
        Ok(request)
    }

    fn view_body(body: &'a [u8]) -> Result<Self, WireError> {
        let need = size_of::<ReadLayout>();
        let Ok((layout, rest)) = ReadLayout::ref_from_prefix(body) else {
            return Err(WireError::TooShort {
                what: "read",
                need,
                got: body.len(),
            });
        };
        let transfer = layout.transfer.checked()?;
        let (table_count, run_count) = (layout.tables.get() as usize, layout.runs.get() as usize);
        check_counts(table_count, run_count)?;
        let need = need
            .saturating_add(table_count.saturating_mul(size_of::<U32>()))
            .saturating_add(run_count.saturating_mul(size_of::<BlockRunLayout>()));
        let too_short = || WireError::TooShort {
            what: "read",
            need,
            got: body.len(),
        };
        let (tables, rest) =
            <[U32]>::ref_from_prefix_with_elems(rest, table_count).map_err(|_| too_short())?;
        let (runs, rest) = <[BlockRunLayout]>::ref_from_prefix_with_elems(rest, run_count)
            .map_err(|_| too_short())?;
        if !rest.is_empty() {
            return Err(WireError::Trailing {
                what: "read",
                extra: rest.len(),
            });
        }
        Ok(Self {
            transfer,
            tables,
            runs,
        })
    }
}

fn check_counts(tables: usize, runs: usize) -> Result<(), WireError> {
    if tables == 0 {
        return Err(WireError::bad("read.tables", tables, "at least 1"));
    }
    check_at_most("read.tables", tables, MAX_READ_TABLES)?;
    if runs == 0 {
        return Err(WireError::bad("read.runs", runs, "at least 1"));
    }
    Ok(())
}

/// Writes [`Message::Read`](crate::Message::Read) with one allocation of the exact size.
///
/// # Errors
/// [`WireError::BadValue`] for a transfer, run or count that a parser would refuse, or if `runs`
/// yields another number of items than it announced; [`WireError::TooLong`] over
/// [`MAX_READ_TABLES`] or [`MAX_MESSAGE_BYTES`].
pub fn encode_read(
    transfer: TransferId,
    tables: &[u32],
    runs: impl ExactSizeIterator<Item = BlockRun>,
) -> Result<Vec<u8>, WireError> {
    TransferId::checked(transfer.slot, transfer.generation)?;
    let announced = runs.len();
    check_counts(tables.len(), announced)?;
    let body_bytes = size_of::<ReadLayout>()
        .saturating_add(size_of_val(tables))
        .saturating_add(announced.saturating_mul(size_of::<BlockRunLayout>()));
    check_at_most(
        "read",
        body_bytes.saturating_add(MESSAGE_HEADER_BYTES),
        MAX_MESSAGE_BYTES,
    )?;
    let count = |what, items: usize| {
        u32::try_from(items)
            .map(U32::new)
            .map_err(|_| WireError::TooLong {
                what,
                max: u32::MAX as usize,
                got: items,
            })
    };
    let layout = ReadLayout {
        transfer: transfer.into(),
        tables: count("read.tables", tables.len())?,
        runs: count("read.runs", announced)?,
    };
    let mut bytes = start(Kind::Read, 0, body_bytes);
    bytes.extend_from_slice(layout.as_bytes());
    for &table in tables {
        bytes.extend_from_slice(U32::new(table).as_bytes());
    }
    let mut written = 0_usize;
    for run in runs.take(announced.saturating_add(1)) {
        run.check()?;
        written += 1;
        if written <= announced {
            bytes.extend_from_slice(BlockRunLayout::from(run).as_bytes());
        }
    }
    if written != announced {
        return Err(WireError::bad(
            "read.runs",
            format!("{written} items or more, {announced} announced"),
            "as many as announced",
        ));
    }
    Ok(bytes)
}

/// Why a producer refuses a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum RejectCode {
    /// No such table; the detail is its id.
    UnknownTable = 1,
    /// A block outside its table; the detail is the block's id.
    BlockOutOfRange = 2,
    /// Too many reads at once; the detail is their number.
    Busy = 3,
    /// The table cannot be read any more: its region or the connection ends, or its memory cannot be
    /// copied; the detail is the table's id.
    Withdrawn = 4,
}

impl RejectCode {
    fn parse(byte: u8) -> Result<Self, WireError> {
        Ok(match byte {
            1 => Self::UnknownTable,
            2 => Self::BlockOutOfRange,
            3 => Self::Busy,
            4 => Self::Withdrawn,
            _ => return Err(WireError::bad("read rejected.code", byte, "1 to 4")),
        })
    }
}

impl fmt::Display for RejectCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::UnknownTable => "unknown table",
            Self::BlockOutOfRange => "block out of range",
            Self::Busy => "busy",
            Self::Withdrawn => "withdrawn",
        })
    }
}

/// Refuses a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadRejected {
    /// The read's transfer.
    pub transfer: TransferId,
    /// Why.
    pub code: RejectCode,
    /// The offending id or number, as the code says.
    pub detail: u64,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct ReadRejectedLayout {
    transfer: TransferLayout,
    detail: U64,
    code: u8,
}

impl ReadRejected {
    pub(super) fn parse_body(body: &[u8]) -> Result<Self, WireError> {
        let layout: ReadRejectedLayout = exactly("read rejected", body)?;
        Ok(Self {
            transfer: layout.transfer.checked()?,
            code: RejectCode::parse(layout.code)?,
            detail: layout.detail.get(),
        })
    }

    pub(super) fn layout(&self) -> ReadRejectedLayout {
        ReadRejectedLayout {
            transfer: self.transfer.into(),
            detail: self.detail.into(),
            code: self.code as u8,
        }
    }
}

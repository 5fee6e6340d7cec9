//! The end of regions: [`Message::Withdraw`](super::Message::Withdraw) and its answer.
//!
//! Responsible for the two bodies, which are one layout. Not responsible for who waits for whom.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, little_endian::U32};

use super::{Kind, start};
use crate::{
    WireError,
    packed::check_at_most,
    regions::{MAX_REGION_RANGES, RegionRange, RegionSet},
};

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RangeLayout {
    first: U32,
    last: U32,
}

pub(super) fn parse_body(what: &'static str, body: &[u8]) -> Result<RegionSet, WireError> {
    let too_short = |need| WireError::TooShort {
        what,
        need,
        got: body.len(),
    };
    let (count, rest) = U32::ref_from_prefix(body).map_err(|_| too_short(size_of::<U32>()))?;
    let count = count.get() as usize;
    if count == 0 {
        return Err(WireError::bad("regions", count, "at least 1"));
    }
    check_at_most("regions", count, MAX_REGION_RANGES)?;
    let need = size_of::<U32>() + count * size_of::<RangeLayout>();
    let (ranges, rest) =
        <[RangeLayout]>::ref_from_prefix_with_elems(rest, count).map_err(|_| too_short(need))?;
    if !rest.is_empty() {
        return Err(WireError::Trailing {
            what,
            extra: rest.len(),
        });
    }
    let ranges = ranges.iter().map(|range| RegionRange {
        first: range.first.get(),
        last: range.last.get(),
    });
    RegionSet::from_ranges(ranges.collect())
}

/// Writes [`Message::Withdraw`](super::Message::Withdraw).
///
/// # Errors
/// [`WireError::BadValue`] for an empty set, [`WireError::TooLong`] over
/// [`MAX_REGION_RANGES`].
pub fn encode_withdraw(regions: &RegionSet) -> Result<Vec<u8>, WireError> {
    encode(Kind::Withdraw, regions)
}

/// Writes [`Message::Withdrawn`](super::Message::Withdrawn).
///
/// # Errors
/// As [`encode_withdraw`].
pub fn encode_withdrawn(regions: &RegionSet) -> Result<Vec<u8>, WireError> {
    encode(Kind::Withdrawn, regions)
}

fn encode(kind: Kind, regions: &RegionSet) -> Result<Vec<u8>, WireError> {
    let ranges = regions.ranges();
    if ranges.is_empty() {
        return Err(WireError::bad("regions", 0, "at least 1"));
    }
    check_at_most("regions", ranges.len(), MAX_REGION_RANGES)?;
    let mut bytes = start(kind, 0, size_of::<U32>() + size_of_val(ranges));
    // Fits: the cap is far below.
    bytes.extend_from_slice(U32::new(ranges.len() as u32).as_bytes());
    for range in ranges {
        let layout = RangeLayout {
            first: range.first.into(),
            last: range.last.into(),
        };
        bytes.extend_from_slice(layout.as_bytes());
    }
    Ok(bytes)
}

//! Sets of region ids: which regions an engine has withdrawn.
//!
//! Responsible for their form on the wire, in greetings and in messages. An engine numbers its
//! regions upwards and never uses a number again, so neighbours that are gone become one range, and
//! a set has at most one range more than the engine has regions.
//!
//! Invariant: ranges are in order, not empty, and at least one id apart.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, de::Error as _};

use crate::{
    WireError,
    description::MAX_REGIONS,
    packed::{capped, check_at_most},
};

/// Most ranges that a set has on the wire: what lies between as many regions as an engine may have,
/// one of which is being registered.
pub const MAX_REGION_RANGES: usize = MAX_REGIONS + 2;

/// Neighbouring region ids, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RegionRange {
    /// The lowest id.
    pub first: u32,
    /// The highest id, at least `first`.
    pub last: u32,
}

/// A set of region ids.
///
/// ```
/// use kvferry_wire::RegionSet;
///
/// let set: RegionSet = [3, 1, 2, 9].into_iter().collect();
/// assert!(set.contains(2) && !set.contains(4));
/// assert_eq!(set.to_string(), "1-3, 9");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RegionSet {
    ranges: Vec<RegionRange>,
}

impl RegionSet {
    /// Checks ranges that came from elsewhere.
    ///
    /// # Errors
    /// [`WireError::BadValue`] for a range that is empty, out of order or not apart from the one
    /// before; [`WireError::TooLong`] over [`MAX_REGION_RANGES`].
    pub fn from_ranges(ranges: Vec<RegionRange>) -> Result<Self, WireError> {
        check_at_most("regions", ranges.len(), MAX_REGION_RANGES)?;
        let mut next = Some(0_u32);
        for (place, range) in ranges.iter().enumerate() {
            if range.last < range.first {
                return Err(WireError::bad("regions.last", range.last, "at least first"));
            }
            // The first range may begin at 0; later ones leave at least one id out.
            let lowest = match place {
                0 => Some(0),
                _ => next.and_then(|next| next.checked_add(1)),
            };
            if lowest.is_none_or(|lowest| range.first < lowest) {
                let expected = "ranges in order, at least one id apart";
                return Err(WireError::bad("regions.first", range.first, expected));
            }
            next = range.last.checked_add(1);
        }
        Ok(Self { ranges })
    }

    /// The ranges, in order.
    #[must_use]
    pub fn ranges(&self) -> &[RegionRange] {
        &self.ranges
    }

    /// True if no id is in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Whether an id is in it.
    #[must_use]
    pub fn contains(&self, id: u32) -> bool {
        let place = self.ranges.partition_point(|range| range.last < id);
        self.ranges
            .get(place)
            .is_some_and(|range| range.first <= id)
    }

    /// Adds an id.
    pub fn insert(&mut self, id: u32) {
        self.insert_range(RegionRange {
            first: id,
            last: id,
        });
    }

    /// Adds everything that is in another set.
    pub fn extend(&mut self, other: &Self) {
        for &range in &other.ranges {
            self.insert_range(range);
        }
    }

    /// Adds a range, which must not be empty, and joins it with those that it meets or touches.
    fn insert_range(&mut self, range: RegionRange) {
        let RegionRange {
            mut first,
            mut last,
        } = range;
        // Those that end before `first - 1` stay in front, those that begin after `last + 1` behind.
        let start = self
            .ranges
            .partition_point(|old| old.last.saturating_add(1) < first);
        let end = self
            .ranges
            .partition_point(|old| old.first <= last.saturating_add(1));
        if let Some(joined) = self.ranges.get(start..end)
            && let (Some(lowest), Some(highest)) = (joined.first(), joined.last())
        {
            first = first.min(lowest.first);
            last = last.max(highest.last);
        }
        self.ranges
            .splice(start..end.max(start), [RegionRange { first, last }]);
    }
}

impl FromIterator<u32> for RegionSet {
    fn from_iter<I: IntoIterator<Item = u32>>(ids: I) -> Self {
        let mut set = Self::default();
        for id in ids {
            set.insert(id);
        }
        set
    }
}

impl fmt::Display for RegionSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, range) in self.ranges.iter().enumerate() {
            let comma = if place == 0 { "" } else { ", " };
            match range.last - range.first {
                0 => write!(f, "{comma}{}", range.first)?,
                _ => write!(f, "{comma}{}-{}", range.first, range.last)?,
            }
        }
        Ok(())
    }
}

impl Serialize for RegionSet {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let pairs: Vec<(u32, u32)> = self.ranges.iter().map(|r| (r.first, r.last)).collect();
        pairs.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for RegionSet {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let pairs: Vec<(u32, u32)> = capped(deserializer, "regions", MAX_REGION_RANGES)?;
        let ranges = pairs
            .into_iter()
            .map(|(first, last)| RegionRange { first, last })
            .collect();
        Self::from_ranges(ranges).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn set(ranges: &[(u32, u32)]) -> Result<RegionSet, WireError> {
        let range = |&(first, last)| RegionRange { first, last };
        RegionSet::from_ranges(ranges.iter().map(range).collect())
    }

    #[test]
    fn ranges_that_are_not_a_set_are_refused() {
        assert!(set(&[(0, 3), (5, 5), (u32::MAX, u32::MAX)]).is_ok());
        for (bad, field) in [
            (vec![(3, 2)], "regions.last"),
            (vec![(0, 3), (4, 5)], "regions.first"),
            (vec![(0, 3), (2, 5)], "regions.first"),
            (vec![(6, 7), (0, 3)], "regions.first"),
            (vec![(6, u32::MAX), (0, 0)], "regions.first"),
            (vec![(6, u32::MAX), (u32::MAX, u32::MAX)], "regions.first"),
        ] {
            let error = set(&bad).unwrap_err();
            assert!(
                matches!(error, WireError::BadValue { field: f, .. } if f == field),
                "{bad:?}: {error}"
            );
        }
        let apart = |count: usize| {
            set(&(0..count as u32)
                .map(|n| (2 * n, 2 * n))
                .collect::<Vec<_>>())
        };
        assert!(apart(MAX_REGION_RANGES).is_ok());
        assert!(matches!(
            apart(MAX_REGION_RANGES + 1),
            Err(WireError::TooLong { .. })
        ));
    }

    proptest! {
        /// Against the obvious set: what is in it, and that its form is the one that parsers accept.
        #[test]
        fn a_set_agrees_with_a_tree(
            ids in prop::collection::vec(prop_oneof![0_u32..40, (u32::MAX - 9)..=u32::MAX], 0..60),
            others in prop::collection::vec(0_u32..60, 0..20),
        ) {
            let mut set: RegionSet = ids.iter().copied().collect();
            set.extend(&others.iter().copied().collect());
            let tree: BTreeSet<u32> = ids.into_iter().chain(others).collect();
            for id in (0..70).chain(u32::MAX - 12..=u32::MAX) {
                prop_assert_eq!(set.contains(id), tree.contains(&id), "{}", id);
            }
            let count: u64 = set.ranges().iter().map(|r| u64::from(r.last - r.first) + 1).sum();
            prop_assert_eq!(count, tree.len() as u64);
            prop_assert_eq!(RegionSet::from_ranges(set.ranges().to_vec()), Ok(set));
        }
    }
}

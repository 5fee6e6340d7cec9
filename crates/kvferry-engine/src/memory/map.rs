//! Which ranges are registered: an ordered map that refuses partial overlaps.

use std::collections::BTreeMap;

use kvferry_wire::MemoryKind;

/// What an insertion found.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Inserted {
    /// The range is new.
    New,
    /// The same range was there already; it is now counted once more. Its id is returned.
    Again(u32),
}

#[derive(Debug)]
struct Entry {
    bytes: u64,
    id: u32,
    count: usize,
}

/// Registered ranges by (kind, address). Ranges of different kinds live in different address
/// spaces and never overlap.
#[derive(Debug, Default)]
pub(crate) struct RegionMap {
    ranges: BTreeMap<(MemoryKind, u64), Entry>,
}

impl RegionMap {
    /// Adds a range, or counts it once more if exactly this range is there.
    ///
    /// # Errors
    /// The range it overlaps, as (address, bytes).
    pub(crate) fn insert(
        &mut self,
        kind: MemoryKind,
        address: u64,
        bytes: u64,
        id: u32,
    ) -> Result<Inserted, (u64, u64)> {
        if let Some(entry) = self.ranges.get_mut(&(kind, address))
            && entry.bytes == bytes
        {
            entry.count += 1;
            return Ok(Inserted::Again(entry.id));
        }
        // The last range that starts before our end is the only one that can overlap: ranges in
        // the map are disjoint, so an earlier one ends before that one starts.
        let end = address + bytes;
        let before = self.ranges.range((kind, 0)..(kind, end)).next_back();
        if let Some((&(_, start), entry)) = before
            && start + entry.bytes > address
        {
            return Err((start, entry.bytes));
        }
        self.ranges.insert(
            (kind, address),
            Entry {
                bytes,
                id,
                count: 1,
            },
        );
        Ok(Inserted::New)
    }

    /// Takes one count off a range; true when it was the last and the range is gone.
    pub(crate) fn remove(&mut self, kind: MemoryKind, address: u64) -> bool {
        match self.ranges.get_mut(&(kind, address)) {
            Some(entry) if entry.count > 1 => {
                entry.count -= 1;
                false
            }
            Some(_) => {
                self.ranges.remove(&(kind, address));
                true
            }
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HOST: MemoryKind = MemoryKind::Host;

    #[test]
    fn identical_ranges_are_counted_and_overlaps_refused() {
        let mut map = RegionMap::default();
        assert_eq!(map.insert(HOST, 100, 50, 1), Ok(Inserted::New));
        assert_eq!(map.insert(HOST, 100, 50, 2), Ok(Inserted::Again(1)));
        assert_eq!(map.insert(HOST, 100, 51, 3), Err((100, 50)));
        assert_eq!(map.insert(HOST, 149, 1, 3), Err((100, 50)));
        assert_eq!(map.insert(HOST, 99, 2, 3), Err((100, 50)));
        assert_eq!(map.insert(HOST, 0, 1000, 3), Err((100, 50)));
        assert_eq!(map.insert(HOST, 150, 10, 3), Ok(Inserted::New));
        assert_eq!(map.insert(HOST, 50, 50, 4), Ok(Inserted::New));
        assert_eq!(
            map.insert(MemoryKind::Cuda { device: 0 }, 120, 1, 5),
            Ok(Inserted::New)
        );
        assert!(!map.remove(HOST, 100));
        assert!(map.remove(HOST, 100));
        assert!(!map.remove(HOST, 100));
        assert_eq!(map.insert(HOST, 120, 1, 6), Ok(Inserted::New));
    }

    proptest! {
        #[test]
        fn the_map_agrees_with_a_list(ops in prop::collection::vec((0_u64..64, 1_u64..16), 1..60)) {
            let mut map = RegionMap::default();
            let mut list: Vec<(u64, u64)> = Vec::new();
            for (id, (address, bytes)) in ops.into_iter().enumerate() {
                let same = list.contains(&(address, bytes));
                let overlap = list.iter().any(|&(a, b)| a < address + bytes && address < a + b);
                let got = map.insert(HOST, address, bytes, id as u32);
                prop_assert_eq!(matches!(got, Ok(Inserted::Again(_))), same);
                prop_assert_eq!(got.is_err(), overlap && !same);
                if matches!(got, Ok(Inserted::New)) {
                    list.push((address, bytes));
                }
            }
        }
    }
}

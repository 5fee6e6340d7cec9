//! Places in memory: which of them are registered together, and which get into one another's way.

use std::collections::BTreeMap;

use kvferry_engine::wire::MemoryKind;

use super::{DiscoveryError, FoundRegion, FoundTable, Plane};

/// Blocks at equal distances, from an address on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Strided {
    pub(super) address: u64,
    pub(super) bytes: u64,
    /// At least `bytes`.
    pub(super) stride: u64,
    /// At least 1.
    pub(super) blocks: u32,
}

impl Strided {
    /// Where the last block ends.
    pub(super) const fn end(&self) -> u64 {
        self.at(self.blocks - 1) + self.bytes
    }

    const fn at(&self, block: u32) -> u64 {
        self.address + self.stride * block as u64
    }

    /// Whether a byte is in blocks of both.
    fn meets(&self, other: &Self) -> bool {
        let (low, high) = if self.address <= other.address {
            (self, other)
        } else {
            (other, self)
        };
        if high.address >= low.end() {
            return false;
        }
        if low.stride == high.stride {
            // `high` begins in a block of `low` or in the gap behind one, and then there is a next one.
            let shift = (high.address - low.address) % low.stride;
            return shift < low.bytes || shift + high.bytes > low.stride;
        }
        let (mut a, mut b) = (0, 0);
        while a < low.blocks && b < high.blocks {
            let (from_a, from_b) = (low.at(a), high.at(b));
            if from_a + low.bytes <= from_b {
                a += 1;
            } else if from_b + high.bytes <= from_a {
                b += 1;
            } else {
                return true;
            }
        }
        false
    }
}

/// Regions around the planes, one per storage or fewer, and the planes' tables in them.
pub(super) fn regions(planes: Vec<Plane>) -> (Vec<FoundRegion>, Vec<FoundTable>) {
    let mut used = BTreeMap::<(MemoryKind, (u64, u64)), (u64, u64)>::new();
    for plane in &planes {
        let (from, to) = (plane.place.address, plane.place.end());
        let range = used
            .entry((plane.kind, plane.storage))
            .or_insert((from, to));
        *range = (range.0.min(from), range.1.max(to));
    }
    let mut ranges: Vec<(MemoryKind, u64, u64)> = used
        .into_iter()
        .map(|((kind, _), (from, to))| (kind, from, to))
        .collect();
    ranges.sort_unstable();
    let mut regions = Vec::<FoundRegion>::new();
    for (kind, from, to) in ranges {
        match regions.last_mut() {
            Some(last) if last.kind == kind && from < last.address + last.bytes => {
                last.bytes = last.bytes.max(to - last.address);
            }
            _ => regions.push(FoundRegion {
                address: from,
                bytes: to - from,
                kind,
            }),
        }
    }
    let tables = planes.into_iter().map(|plane| {
        // The last one that begins at the plane or before it: the one around it.
        let at = (plane.kind, plane.place.address);
        let after = regions.partition_point(|region| (region.kind, region.address) <= at);
        let region = after.saturating_sub(1);
        FoundTable {
            region,
            offset: plane.place.address - regions[region].address,
            ..plane.table
        }
    });
    let tables = tables.collect();
    (regions, tables)
}

/// Refuses bytes that are in blocks of two tables of a group.
pub(super) fn refuse_overlaps(
    regions: &[FoundRegion],
    tables: &[FoundTable],
) -> Result<(), DiscoveryError> {
    let mut places: Vec<_> = tables
        .iter()
        .map(|table| {
            let place = Strided {
                address: regions[table.region].address + table.offset,
                bytes: table.block_bytes,
                stride: table.block_stride,
                blocks: table.blocks,
            };
            (table.group, table.region, place, table)
        })
        .collect();
    places.sort_by_key(|(group, region, place, _)| (*group, *region, place.address));
    for (index, (group, region, place, table)) in places.iter().enumerate() {
        let met = places[index + 1..]
            .iter()
            .take_while(|(other_group, other_region, other, _)| {
                (other_group, other_region) == (group, region) && other.address < place.end()
            })
            .find(|(_, _, other, _)| place.meets(other));
        if let Some((_, _, _, other)) = met {
            return Err(DiscoveryError::Overlap {
                group: *group,
                layers: [table.name.clone(), other.name.clone()],
            });
        }
    }
    Ok(())
}

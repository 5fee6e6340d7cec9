//! How a region is cut where a device limits the length of one registration.
//!
//! Pure. Chunk `n` begins `n * chunk_bytes` bytes into the region and the last may be shorter, so
//! that both sides compute the same boundaries from two numbers of the description.
//!
//! Invariant: the chunks of a region cover it exactly, and none is empty.

use kvferry_wire::RegionDescription;

/// The chunks of one region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chunks {
    bytes: u64,
    chunk_bytes: u64,
}

impl Chunks {
    /// Cuts a region of `bytes` bytes, at least 1, into chunks of at most `limit` bytes.
    pub(crate) fn new(bytes: u64, limit: Option<u64>) -> Self {
        let chunk_bytes = limit.unwrap_or(bytes).clamp(1, bytes.max(1));
        Self { bytes, chunk_bytes }
    }

    /// One chunk, whatever the region.
    pub(crate) const fn whole() -> Self {
        Self {
            bytes: u64::MAX,
            chunk_bytes: u64::MAX,
        }
    }

    /// The chunks that a peer has described.
    pub(crate) fn of(region: &RegionDescription) -> Self {
        Self::new(region.bytes, Some(region.chunk_bytes))
    }

    /// Length of every chunk but perhaps the last.
    pub(crate) fn chunk_bytes(self) -> u64 {
        self.chunk_bytes
    }

    /// How many there are.
    pub(crate) fn count(self) -> u64 {
        self.bytes.div_ceil(self.chunk_bytes)
    }

    /// Each chunk's offset and length.
    pub(crate) fn ranges(self) -> impl Iterator<Item = (u64, u64)> {
        (0..self.count()).map(move |index| {
            let offset = index * self.chunk_bytes;
            (offset, self.chunk_bytes.min(self.bytes - offset))
        })
    }

    /// The number of the chunk that a byte of the region lies in.
    pub(crate) fn index_of(self, offset: u64) -> u64 {
        offset / self.chunk_bytes
    }

    /// Bytes from a byte of the region to the end of its chunk, at least 1.
    pub(crate) fn left(self, offset: u64) -> u64 {
        self.chunk_bytes - offset % self.chunk_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_a_region_and_the_last_may_be_shorter() {
        let ranges = |bytes, limit| Chunks::new(bytes, limit).ranges().collect::<Vec<_>>();
        assert_eq!(ranges(10, None), [(0, 10)]);
        assert_eq!(ranges(10, Some(100)), [(0, 10)]);
        assert_eq!(ranges(10, Some(10)), [(0, 10)]);
        assert_eq!(ranges(10, Some(4)), [(0, 4), (4, 4), (8, 2)]);
        assert_eq!(ranges(8, Some(4)), [(0, 4), (4, 4)]);
        let chunks = Chunks::new(10, Some(4));
        assert_eq!([0, 3, 4, 9].map(|at| chunks.index_of(at)), [0, 0, 1, 2]);
        assert_eq!([0, 3, 4, 9].map(|at| chunks.left(at)), [4, 1, 4, 3]);
        // No description that was checked says so, and no division by it is made.
        assert_eq!(Chunks::new(1, Some(0)).count(), 1);
        assert_eq!(Chunks::new(u64::MAX, Some(1 << 20)).count(), 1 << 44);
    }
}

//! The bytes that blocks carry, and digests of them.
//!
//! Every 8 bytes name their place: they depend on the seed, the request, the layer, the block's
//! place in the request and the offset in the block. A block that lands anywhere but where it
//! belongs, a stale one, or one that is cut short is therefore wrong in nearly every byte.

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// What destinations are filled with before a read.
pub(crate) const POISON: u8 = 0xEE;

/// The odd number closest to 2^64 divided by the golden ratio: neighbouring words differ in about
/// half of their bits.
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// Where a block belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) request: u64,
    pub(crate) layer: u32,
    /// The block's place in its request, from 0.
    pub(crate) block: u32,
}

/// The pattern of one seed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pattern {
    seed: u64,
}

impl Pattern {
    pub(crate) const fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// Writes the bytes of one block in one layer.
    pub(crate) fn fill(self, place: Place, out: &mut [u8]) {
        let mut state = self.key(place);
        let (words, tail) = out.as_chunks_mut::<8>();
        for word in words {
            *word = word_of(state);
            state = state.wrapping_add(STEP);
        }
        let last = word_of(state);
        tail.copy_from_slice(&last[..tail.len()]);
    }

    /// A number that belongs to one block in one layer.
    const fn key(self, place: Place) -> u64 {
        let block = (place.layer as u64) << 32 | place.block as u64;
        mix(mix(mix(self.seed ^ STEP).wrapping_add(place.request)).wrapping_add(block))
    }
}

const fn word_of(state: u64) -> [u8; 8] {
    (state ^ (state >> 32)).to_le_bytes()
}

/// A bijection in which every bit of the input changes about half of the output.
pub(crate) const fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    value = (value ^ (value >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    value ^ (value >> 32)
}

/// The digest of one block over all layers, in their order.
pub(crate) struct BlockDigest(Xxh3);

impl BlockDigest {
    pub(crate) fn new() -> Self {
        Self(Xxh3::new())
    }

    pub(crate) fn layer(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(crate) fn finish(self) -> u64 {
        self.0.digest()
    }
}

/// The digest of a request, from those of its blocks in their order.
pub(crate) fn request_digest(blocks: &[u64]) -> u64 {
    let bytes: Vec<u8> = blocks
        .iter()
        .flat_map(|digest| digest.to_le_bytes())
        .collect();
    xxh3_64(&bytes)
}

#[cfg(test)]
mod tests;

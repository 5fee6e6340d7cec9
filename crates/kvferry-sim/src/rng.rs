//! Random numbers that are the same in every build.
//!
//! Responsible for a run being a function of its seed: the generator is written out here
//! (SplitMix64), because a crate's generators may change between its versions and a seed in a bug
//! report must not. Not for anything secret.

/// A generator. Equal seeds give equal sequences.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// From a seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// One of its own for a part, so that what other parts draw does not change what this one does.
    #[must_use]
    pub fn part(seed: u64, name: &str) -> Self {
        Self(xxhash_rust::xxh3::xxh3_64_with_seed(name.as_bytes(), seed))
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number under `bound`; 0 for a bound of 0.
    pub fn below(&mut self, bound: u32) -> u32 {
        // The upper half of a product: no division, and a bias far below what a run could show.
        ((u128::from(self.bits()) * u128::from(bound)) >> 64) as u32
    }

    /// A number from `low` to `high`, both included; `low` if `high` is less.
    pub fn between(&mut self, low: u32, high: u32) -> u32 {
        low + self.below(high.saturating_sub(low).saturating_add(1))
    }

    /// True in `percent` of 100 cases.
    pub fn chance(&mut self, percent: u32) -> bool {
        self.below(100) < percent
    }
}

/// SplitMix64's finalizer: a bijection that spreads every bit.
#[must_use]
pub(crate) const fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_of_a_seed_is_fixed() {
        // SplitMix64's published first outputs for seed 0.
        let mut rng = Rng::new(0);
        let first: Vec<u64> = (0..3).map(|_| rng.bits()).collect();
        assert_eq!(
            first,
            [
                0xe220_a839_7b1d_cdaf,
                0x6e78_9e6a_a1b9_65f4,
                0x06c4_5d18_8009_454f
            ]
        );
    }

    #[test]
    fn numbers_stay_in_their_bounds() {
        let mut rng = Rng::part(7, "bounds");
        assert!((0..1000).all(|_| rng.below(3) < 3));
        assert!((0..1000).all(|_| (4..=6).contains(&rng.between(4, 6))));
        assert_eq!(
            (rng.below(0), rng.between(5, 5), rng.between(9, 2)),
            (0, 9 - 4, 9)
        );
        assert!(!rng.chance(0) && rng.chance(100));
    }
}

//! How much of a request a consumer reads: mostly all of it, sometimes half, sometimes nothing.
//!
//! The choice depends on the seed and the request's number only, so what a run must move can be
//! computed without running it.

use kvferry_wire::DemoPlan;

/// How much of a request is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Share {
    /// Every block.
    All,
    /// Every second block, beginning with the first.
    Half,
    /// No block, as when the consumer has them all already. The request is released all the same.
    Nothing,
}

impl Share {
    /// One request of 16 is read by half and one of 16 not at all; the seed says which.
    pub(crate) const fn of(seed: u64, request: u64) -> Self {
        match request.wrapping_add(seed) % 16 {
            7 => Self::Half,
            15 => Self::Nothing,
            _ => Self::All,
        }
    }

    /// Whether the block at this place of the request is read.
    pub(crate) const fn takes(self, block: u32) -> bool {
        match self {
            Self::All => true,
            Self::Half => block.is_multiple_of(2),
            Self::Nothing => false,
        }
    }

    /// How many of `blocks` blocks are read.
    pub(crate) const fn count(self, blocks: u32) -> u32 {
        match self {
            Self::All => blocks,
            Self::Half => blocks.div_ceil(2),
            Self::Nothing => 0,
        }
    }
}

/// Blocks that a whole run reads.
pub(crate) fn blocks_to_read(plan: &DemoPlan) -> u64 {
    // The shares repeat after 16 requests, however many there are.
    let count = |requests: u64| -> u64 {
        (0..requests)
            .map(|request| u64::from(Share::of(plan.seed, request).count(plan.blocks)))
            .sum()
    };
    (plan.requests / 16) * count(16) + count(plan.requests % 16)
}

/// Bytes that a whole run reads.
pub(crate) fn bytes_to_read(plan: &DemoPlan) -> u64 {
    // At most the plan's total, which does not overflow.
    blocks_to_read(plan) * u64::from(plan.layers) * plan.block_bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(requests: u64, blocks: u32, seed: u64) -> DemoPlan {
        DemoPlan {
            requests,
            blocks,
            block_bytes: 10,
            layers: 3,
            seed,
        }
    }

    #[test]
    fn sixteen_requests_have_one_half_and_one_left_alone() {
        for seed in [0, 1, 99, u64::MAX] {
            assert_eq!(blocks_to_read(&plan(16, 8, seed)), 14 * 8 + 4);
            assert_eq!(blocks_to_read(&plan(16, 1, seed)), 15);
            assert_eq!(bytes_to_read(&plan(32, 9, seed)), 2 * (14 * 9 + 5) * 30);
        }
    }

    #[test]
    fn a_run_is_the_sum_of_its_requests() {
        for (requests, blocks, seed) in [(1, 1, 0), (7, 5, 3), (45, 6, 12), (100, 3, u64::MAX)] {
            let mut sum = 0;
            for request in 0..requests {
                let share = Share::of(seed, request);
                sum += (0..blocks).filter(|&block| share.takes(block)).count() as u64;
            }
            assert_eq!(blocks_to_read(&plan(requests, blocks, seed)), sum);
        }
    }
}

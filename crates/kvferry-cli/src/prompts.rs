//! The requests of a run: their prompts, and how much of each a consumer has to read.
//!
//! Everything follows from the plan, so both sides know the prompts and what a run must move can be
//! computed without running it. Most requests are new. One of 16 has the first half of the one before
//! it, which the consumer finds in its own prefix cache, and one of 16 is wholly in it.

use kvferry_wire::DemoPlan;
use kvferry_wire::demo::DEMO_BLOCK_TOKENS;

/// How much of a request is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Share {
    /// Every block.
    All,
    /// The second half, with the block in the middle.
    Half,
    /// No block. The request is released all the same.
    Nothing,
}

impl Share {
    /// One request of 16 is read by half and one of 16 not at all; the seed says which. The first has
    /// none before it.
    pub(crate) const fn of(seed: u64, request: u64) -> Self {
        match request.wrapping_add(seed) % 16 {
            7 if request > 0 => Self::Half,
            15 if request > 0 => Self::Nothing,
            _ => Self::All,
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

/// The tokens of a request.
pub(crate) fn prompt(plan: &DemoPlan, request: u64) -> Vec<u32> {
    let length = plan.blocks * DEMO_BLOCK_TOKENS;
    let own = |request: u64| {
        let key = mix(mix(plan.seed ^ STEP).wrapping_add(request));
        (0..length).map(move |token| (mix(key ^ u64::from(token)) >> 32) as u32)
    };
    match Share::of(plan.seed, request) {
        Share::All => own(request).collect(),
        Share::Half => {
            let shared = plan.blocks / 2 * DEMO_BLOCK_TOKENS;
            let before = own(request - 1).take(shared as usize);
            before.chain(own(request).skip(shared as usize)).collect()
        }
        // All full blocks, and the token that is computed in any case.
        Share::Nothing => {
            let shared = (plan.blocks - 1) * DEMO_BLOCK_TOKENS + 1;
            own(request - 1).take(shared as usize).collect()
        }
    }
}

/// The odd number closest to 2^64 divided by the golden ratio.
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// A bijection in which every bit of the input changes about half of the output.
const fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    value = (value ^ (value >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    value ^ (value >> 32)
}

/// Blocks that a whole run reads.
pub(crate) fn blocks_to_read(plan: &DemoPlan) -> u64 {
    let read = |request| u64::from(Share::of(plan.seed, request).count(plan.blocks));
    // The shares repeat after 16 requests, however many there are, but for the first one's.
    let count = |from: u64, requests: u64| (from..from + requests).map(read).sum::<u64>();
    let rest = plan.requests - 1;
    read(0) + (rest / 16) * count(1, 16) + count(1, rest % 16)
}

/// Bytes of a block over all layers.
pub(crate) fn whole_block(plan: &DemoPlan) -> u64 {
    u64::from(plan.layers) * plan.block_bytes
}

/// Bytes that a whole run reads.
pub(crate) fn bytes_to_read(plan: &DemoPlan) -> u64 {
    // At most the plan's total, which does not overflow.
    blocks_to_read(plan) * whole_block(plan)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(requests: u64, blocks: u32, seed: u64) -> DemoPlan {
        DemoPlan {
            requests,
            blocks,
            block_bytes: 128,
            layers: 3,
            seed,
        }
    }

    #[test]
    fn sixteen_requests_have_one_half_and_one_left_alone() {
        for seed in [0, 1, 99, u64::MAX - 1] {
            assert_eq!(blocks_to_read(&plan(16, 8, seed)), 14 * 8 + 4);
            assert_eq!(blocks_to_read(&plan(16, 1, seed)), 15);
            assert_eq!(bytes_to_read(&plan(32, 9, seed)), 2 * (14 * 9 + 5) * 384);
        }
    }

    #[test]
    fn a_run_is_the_sum_of_its_requests() {
        for (requests, blocks, seed) in [(1, 1, 0), (7, 5, 3), (45, 6, 7), (100, 3, u64::MAX)] {
            let shares = (0..requests).map(|request| Share::of(seed, request));
            let sum: u64 = shares.map(|share| u64::from(share.count(blocks))).sum();
            assert_eq!(blocks_to_read(&plan(requests, blocks, seed)), sum);
        }
    }

    /// What is not read is what full blocks of the prompt before have in common with this one.
    #[test]
    fn what_is_not_read_is_in_the_prompt_before() {
        for blocks in [1, 2, 9] {
            let plan = plan(40, blocks, 5);
            for request in 1..plan.requests {
                let (before, own) = (prompt(&plan, request - 1), prompt(&plan, request));
                let equal = before.iter().zip(&own).take_while(|(a, b)| a == b).count() as u32;
                // The last token is computed in any case.
                let cached = equal.min(own.len() as u32 - 1) / DEMO_BLOCK_TOKENS;
                let missing = own.len() as u32 - cached * DEMO_BLOCK_TOKENS;
                let share = Share::of(plan.seed, request);
                let read = share.count(blocks);
                if share == Share::Nothing {
                    assert_eq!(
                        (missing, read),
                        (1, 0),
                        "{blocks} blocks, request {request}"
                    );
                } else {
                    assert_eq!(missing, read * DEMO_BLOCK_TOKENS, "{blocks}, {request}");
                }
            }
        }
    }
}

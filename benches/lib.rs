//! Shared parts of the benchmarks: tables and block ids as a scheduler produces them.

use kvferry_engine::BlockPair;
use kvferry_wire::{Interior, TableDescription};

/// A dense table of opaque blocks.
#[must_use]
pub fn table(block_bytes: u64, block_count: u32) -> TableDescription {
    TableDescription {
        id: 0,
        region: 0,
        offset: 0,
        block_bytes,
        block_stride: block_bytes,
        block_count,
        group: 0,
        layer: 0,
        interior: Interior::opaque(),
    }
}

/// `count` pairs in runs of `run` neighbours, scattered over twice as many remote blocks.
#[must_use]
pub fn pairs(count: u32, run: u32) -> Vec<BlockPair> {
    let runs = count.div_ceil(run);
    (0..count)
        .map(|n| {
            let (which, within) = (n / run, n % run);
            // An odd factor visits every run of a power of two once.
            let place = u64::from(which) * 48_271 % u64::from(runs.next_power_of_two());
            BlockPair::new(n, place as u32 * run + within)
        })
        .collect()
}

//! What is read: how many blocks of which size, in which order, and what is in them.

use std::fmt;
use std::str::FromStr;

use kvferry_engine::{BlockPair, Engine, MemoryRegion, Region, Table, TableError, TableSpec};
use kvferry_sim::Rng;

use crate::error::CliError;

/// Which blocks follow one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pattern {
    /// Each alone, at a random place on both sides.
    Random,
    /// So many neighbours at a time.
    Runs(u32),
    /// All in order, on both sides.
    Sequential,
}

impl FromStr for Pattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let run = text.strip_prefix("runs:").map(str::parse);
        match (text, run) {
            ("random", _) => Ok(Self::Random),
            ("sequential", _) => Ok(Self::Sequential),
            (_, Some(Ok(length @ 1..))) => Ok(Self::Runs(length)),
            _ => Err(format!(
                "{text:?} is no pattern: give random, runs:N with N of 1 or more, or sequential"
            )),
        }
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Random => f.write_str("random"),
            Self::Runs(length) => write!(f, "runs:{length}"),
            Self::Sequential => f.write_str("sequential"),
        }
    }
}

/// One block size's reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Case {
    pub(crate) block_bytes: u64,
    pub(crate) blocks: u32,
    pub(crate) layers: u32,
    pub(crate) pattern: Pattern,
    pub(crate) seed: u64,
}

/// What destinations hold before they are read into.
const POISON: u8 = 0xA5;

impl Case {
    pub(crate) fn check(&self) -> Result<(), CliError> {
        if self.blocks == 0 {
            return Err(CliError::Usage(
                "--blocks is 0: give 1 or more, or larger --bytes".to_owned(),
            ));
        }
        match self.checked_bytes() {
            // A pool on each side, and one more for a contender of its own.
            Some(bytes) => crate::memory::check("the benchmark's pools", bytes.checked_mul(4)),
            None => crate::memory::check("the benchmark's pools", None),
        }
    }

    fn checked_bytes(&self) -> Option<u64> {
        (u64::from(self.blocks) * u64::from(self.layers)).checked_mul(self.block_bytes)
    }

    /// Bytes of a read, over all layers.
    pub(crate) fn bytes(&self) -> u64 {
        self.checked_bytes().unwrap_or(u64::MAX)
    }

    /// Blocks that are moved, each layer's counted.
    pub(crate) fn moved_blocks(&self) -> u64 {
        u64::from(self.blocks) * u64::from(self.layers)
    }

    /// The options that give the other process the same blocks.
    pub(crate) fn as_options(&self) -> Vec<String> {
        vec![
            format!("--block-bytes={}", self.block_bytes),
            format!("--blocks={}", self.blocks),
            format!("--layers={}", self.layers),
        ]
    }

    /// Which block is read into which: every block of both sides once.
    pub(crate) fn pairs(&self) -> Vec<BlockPair> {
        let run = match self.pattern {
            Pattern::Random => 1,
            Pattern::Runs(length) => length.min(self.blocks),
            Pattern::Sequential => self.blocks,
        };
        // Whole runs change places; what is left over stays at the end.
        let whole = self.blocks / run;
        let mut rng = Rng::part(self.seed, "pairs");
        let mut shuffled = || {
            let mut order: Vec<u32> = (0..whole).collect();
            for last in (1..order.len()).rev() {
                order.swap(last, rng.below(last as u32 + 1) as usize);
            }
            order
        };
        let (local, remote) = (shuffled(), shuffled());
        let runs = local
            .iter()
            .zip(&remote)
            .map(|(&local, &remote)| (local * run, remote * run));
        let rest = (whole * run..self.blocks).map(|block| BlockPair::new(block, block));
        runs.flat_map(|(local, remote)| {
            (0..run).map(move |at| BlockPair::new(local + at, remote + at))
        })
        .chain(rest)
        .collect()
    }

    /// A table per layer, one behind the other from the start of the region.
    pub(crate) fn tables(
        &self,
        engine: &Engine,
        region: &Region,
    ) -> Result<Vec<Table>, TableError> {
        let layer_bytes = u64::from(self.blocks) * self.block_bytes;
        let table = |layer: u32| {
            let spec = TableSpec::dense(self.block_bytes, self.blocks);
            engine.add_table(region, spec.at(u64::from(layer) * layer_bytes).layer(layer))
        };
        (0..self.layers).map(table).collect()
    }

    /// Where a block is, in such a region.
    pub(crate) fn offset(&self, layer: u32, block: u32) -> u64 {
        (u64::from(layer) * u64::from(self.blocks) + u64::from(block)) * self.block_bytes
    }

    /// Fills a region of the reading side with what no block holds.
    pub(crate) fn poison(&self, memory: &MemoryRegion) -> Result<(), CliError> {
        Ok(memory.fill(0, self.bytes(), POISON)?)
    }

    /// Fills a region of the side that is read: every block differs from every other.
    pub(crate) fn fill(&self, memory: &MemoryRegion) -> Result<(), CliError> {
        let mut content = vec![0; self.block_bytes as usize];
        for layer in 0..self.layers {
            for block in 0..self.blocks {
                self.content(layer, block, &mut content);
                memory.write_at(self.offset(layer, block), &content)?;
            }
        }
        Ok(())
    }

    /// Blocks, each layer's counted, that do not hold what their pair says.
    pub(crate) fn wrong(
        &self,
        memory: &MemoryRegion,
        pairs: &[BlockPair],
    ) -> Result<u64, CliError> {
        let mut expected = vec![0; self.block_bytes as usize];
        let mut found = expected.clone();
        let mut wrong = 0;
        for layer in 0..self.layers {
            for pair in pairs {
                self.content(layer, pair.remote, &mut expected);
                memory.read_at(self.offset(layer, pair.local), &mut found)?;
                wrong += u64::from(found != expected);
            }
        }
        Ok(wrong)
    }

    /// Counting words from a start that is the block's own.
    pub(crate) fn content(&self, layer: u32, block: u32, into: &mut [u8]) {
        let start = (u64::from(layer) << 32 | u64::from(block)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        for (word, slot) in (0_u64..).zip(into.chunks_exact_mut(8)) {
            slot.copy_from_slice(&start.wrapping_add(word).to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn case(blocks: u32, pattern: &str) -> Case {
        Case {
            block_bytes: 64,
            blocks,
            layers: 2,
            pattern: pattern.parse().unwrap(),
            seed: 3,
        }
    }

    /// Neighbours that follow one another on both sides.
    fn runs(pairs: &[BlockPair]) -> usize {
        let breaks = pairs
            .windows(2)
            .filter(|two| two[1].local != two[0].local + 1 || two[1].remote != two[0].remote + 1);
        breaks.count() + 1
    }

    #[test]
    fn every_block_is_paired_once_in_runs_of_the_pattern() {
        for (pattern, least, most) in [
            ("random", 950, 1003),
            ("runs:10", 90, 101),
            ("runs:5000", 1, 1),
            ("sequential", 1, 1),
        ] {
            let pairs = case(1003, pattern).pairs();
            let local: HashSet<u32> = pairs.iter().map(|pair| pair.local).collect();
            let remote: HashSet<u32> = pairs.iter().map(|pair| pair.remote).collect();
            assert_eq!((pairs.len(), local.len(), remote.len()), (1003, 1003, 1003));
            let runs = runs(&pairs);
            assert!((least..=most).contains(&runs), "{pattern}: {runs} runs");
        }
        assert_eq!(case(50, "random").pairs(), case(50, "random").pairs());
    }

    #[test]
    fn what_is_wrong_is_counted_per_block_and_layer() {
        let case = case(40, "random");
        let pool = || {
            kvferry_engine::HostPool::new(case.bytes() as usize)
                .and_then(|pool| pool.region())
                .unwrap()
        };
        let (from, to, pairs) = (pool(), pool(), case.pairs());
        case.fill(&from).unwrap();
        case.poison(&to).unwrap();
        assert_eq!(case.wrong(&to, &pairs).unwrap(), 80);
        for layer in 0..2 {
            for pair in &pairs {
                let (here, there) = (
                    case.offset(layer, pair.local),
                    case.offset(layer, pair.remote),
                );
                MemoryRegion::copy(&from, there, &to, here, 64).unwrap();
            }
        }
        assert_eq!(case.wrong(&to, &pairs).unwrap(), 0);
        to.write_at(case.offset(1, 7) + 63, &[1]).unwrap();
        assert_eq!(case.wrong(&to, &pairs).unwrap(), 1);
    }

    #[test]
    fn patterns_are_read_and_written() {
        for text in ["random", "runs:16", "sequential"] {
            assert_eq!(text.parse::<Pattern>().unwrap().to_string(), text);
        }
        for text in ["", "runs", "runs:0", "runs:-1", "Random"] {
            assert!(text.parse::<Pattern>().is_err(), "{text}");
        }
    }
}

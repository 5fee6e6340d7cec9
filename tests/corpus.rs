//! Garbage for everything that parses bytes of other processes: the golden fixtures of `kvferry-wire`,
//! what a seed makes of them, and what fuzzing has found, where it has been run.
//!
//! The same fixtures and the same seed give the same garbage, in the same order.

use std::fs;
use std::path::{Path, PathBuf};

use crate::random::Random;

const SEED: u64 = 0x6b76_6665_7272_7921;
/// Pairs of fixtures that are spliced.
const SPLICES: usize = 500;
/// Inputs taken from what fuzzing has found, for each target.
const FOUND: usize = 100;
/// No longer than fits one segment.
const LONGEST: usize = 4000;

/// One input.
#[derive(Clone, Debug)]
pub struct Garbage {
    /// The parser that its fixture is for.
    pub target: String,
    /// The bytes; right ones, if it is a fixture as it is.
    pub bytes: Vec<u8>,
}

/// Everything.
#[must_use]
pub fn corpus() -> Vec<Garbage> {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    let fixtures = inputs(&tests.join("../crates/kvferry-wire/fixtures"), usize::MAX);
    assert!(fixtures.len() > 30, "the fixtures are not where they were");
    let mut random = Random::new(SEED);
    let mut all = fixtures.clone();
    for fixture in &fixtures {
        all.extend(mutations(fixture, &mut random));
    }
    for _ in 0..SPLICES {
        let [first, second] = [0, 1].map(|_| &fixtures[random.below(fixtures.len())]);
        let head = &first.bytes[..random.below(first.bytes.len())];
        let tail = &second.bytes[random.below(second.bytes.len())..];
        all.push(Garbage {
            target: first.target.clone(),
            bytes: [head, tail].concat(),
        });
    }
    all.extend(inputs(&tests.join("../fuzz/corpus"), FOUND));
    // Beside the build of this program, where `scripts/fuzz` leaves what it found.
    let program = std::env::current_exe().unwrap();
    let found = program
        .ancestors()
        .map(|directory| directory.join("fuzz/corpus"))
        .find(|directory| directory.is_dir());
    all.extend(found.iter().flat_map(|found| inputs(found, FOUND)));
    all
}

/// A part of it: all that is for `target`, and each `step`th of the rest.
#[must_use]
pub fn mostly(corpus: &[Garbage], targets: &[&str], step: usize) -> Vec<Garbage> {
    let is_taken = |(n, garbage): &(usize, &Garbage)| {
        targets.contains(&garbage.target.as_str()) || n.is_multiple_of(step)
    };
    let part = corpus.iter().enumerate().filter(is_taken);
    part.map(|(_, garbage)| garbage.clone()).collect()
}

/// What can be done to one input: cut anywhere, each byte changed, each place that may be a length
/// changed, more behind its end.
pub fn mutations(of: &Garbage, random: &mut Random) -> Vec<Garbage> {
    let bytes = &of.bytes;
    let mut all: Vec<Vec<u8>> = (0..bytes.len()).map(|end| bytes[..end].to_vec()).collect();
    for at in 0..bytes.len() {
        let mut changed = bytes.clone();
        changed[at] ^= 1 + random.below(255) as u8;
        all.push(changed);
    }
    for at in (0..bytes.len().saturating_sub(3)).step_by(4) {
        for length in [0, bytes.len() as u32 + 1, (16 << 20) + 1, u32::MAX] {
            let mut changed = bytes.clone();
            changed[at..at + 4].copy_from_slice(&length.to_le_bytes());
            all.push(changed);
        }
    }
    for at in 0..bytes.len() {
        // Where msgpack says how long something is: bytes, a text, a list or a map without end.
        let longest: &[u8] = match bytes[at] {
            0xc4..=0xc6 => &[0xc6, 255, 255, 255, 255],
            0xd9..=0xdb | 0xa0..=0xbf => &[0xdb, 255, 255, 255, 255],
            0xdc..=0xdd | 0x90..=0x9f => &[0xdd, 255, 255, 255, 255],
            0xde..=0xdf | 0x80..=0x8f => &[0xdf, 255, 255, 255, 255],
            _ => continue,
        };
        all.push([&bytes[..at], longest, &bytes[at + 1..]].concat());
    }
    all.push([bytes.as_slice(), &[0]].concat());
    all.push([bytes.as_slice(), bytes].concat());
    let target = &of.target;
    let garbage = all.into_iter().map(|bytes| Garbage {
        target: target.clone(),
        bytes,
    });
    garbage.collect()
}

/// The files in a directory of directories that are called like their parsers, `most` of each.
fn inputs(directory: &Path, most: usize) -> Vec<Garbage> {
    let list = |directory: &Path| -> Vec<PathBuf> {
        let entries = fs::read_dir(directory).into_iter().flatten();
        let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        paths
    };
    let mut all = Vec::new();
    for target in list(directory) {
        let name = target.file_name().unwrap().to_string_lossy().into_owned();
        let files = list(&target);
        let step = (files.len() / most).max(1);
        for file in files.iter().step_by(step).take(most) {
            let mut bytes = fs::read(file).unwrap();
            bytes.truncate(LONGEST);
            let target = name.clone();
            all.push(Garbage { target, bytes });
        }
    }
    all
}

//! Compares what lies in memory with what should.
//!
//! Everything is checked twice against different sources: with the pattern, which the consumer
//! computes itself, and with the digests, which the producer took from its bytes before the read.

use kvferry_engine::MemoryError;
use kvferry_wire::{DemoOffer, DemoPlan};

use super::tally::Tally;
use crate::blocks::Blocks;
use crate::pattern::{BlockDigest, POISON, Pattern, Place, request_digest};
use crate::share::Share;

/// Checks the blocks of one request; returns the first thing that is wrong.
pub(super) fn check_request(
    plan: &DemoPlan,
    offer: &DemoOffer,
    share: Share,
    blocks: &Blocks,
    destinations: &[u32],
) -> Result<(), String> {
    let request = offer.request;
    let wrong = |error: MemoryError| format!("request {request}: {error}");
    let mut scratch = Scratch::new(plan);
    let mut digests = Vec::with_capacity(destinations.len());
    let places = (0..).zip(destinations).zip(&offer.digests);
    for ((block, &id), &digest) in places {
        let place = |layer| Place {
            request,
            layer,
            block,
        };
        if !share.takes(block) {
            for layer in 0..plan.layers {
                if !scratch.is_poison(blocks, layer, id).map_err(wrong)? {
                    return Err(format!(
                        "{}: bytes were written that nobody asked for",
                        name(place(layer))
                    ));
                }
            }
            continue;
        }
        let mut found = BlockDigest::new();
        for layer in 0..plan.layers {
            scratch.check(blocks, place(layer), id)?;
            found.layer(&scratch.found);
        }
        let found = found.finish();
        if found != digest {
            return Err(format!(
                "request {request}, block {block}: its digest is {found:016x}, the producer's was \
                 {digest:016x}"
            ));
        }
        digests.push(found);
    }
    let found = request_digest(&digests);
    if share == Share::All && found != offer.digest {
        return Err(format!(
            "request {request}: its digest is {found:016x}, the producer's was {:016x}",
            offer.digest
        ));
    }
    Ok(())
}

/// Checks that the blocks that nobody reads into are what they were.
pub(super) fn check_guards(blocks: &Blocks, guards: &[u32], tally: &Tally) {
    let shape = blocks.shape();
    let mut scratch = Scratch::of(shape.block_bytes, Pattern::new(0));
    for &id in guards {
        for layer in 0..shape.layers {
            match scratch.is_poison(blocks, layer, id) {
                Ok(true) => {}
                Ok(false) => tally.fail(format!(
                    "block {id} of layer {layer} was written, but belongs to no read"
                )),
                Err(error) => tally.fail(error.to_string()),
            }
        }
    }
}

fn name(place: Place) -> String {
    format!(
        "request {}, layer {}, block {}",
        place.request, place.layer, place.block
    )
}

/// Buffers for one block in one layer.
struct Scratch {
    pattern: Pattern,
    found: Vec<u8>,
    expected: Vec<u8>,
    poison: Vec<u8>,
}

impl Scratch {
    fn new(plan: &DemoPlan) -> Self {
        Self::of(plan.block_bytes, Pattern::new(plan.seed))
    }

    fn of(block_bytes: u64, pattern: Pattern) -> Self {
        let bytes = block_bytes as usize;
        Self {
            pattern,
            found: vec![0; bytes],
            expected: vec![0; bytes],
            poison: vec![POISON; bytes],
        }
    }

    fn is_poison(&mut self, blocks: &Blocks, layer: u32, id: u32) -> Result<bool, MemoryError> {
        blocks.read(layer, id, &mut self.found)?;
        Ok(self.found == self.poison)
    }

    fn check(&mut self, blocks: &Blocks, place: Place, id: u32) -> Result<(), String> {
        blocks
            .read(place.layer, id, &mut self.found)
            .map_err(|error| format!("{}: {error}", name(place)))?;
        self.pattern.fill(place, &mut self.expected);
        if self.found == self.expected {
            return Ok(());
        }
        if self.found == self.poison {
            return Err(format!("{}: nothing was written", name(place)));
        }
        let mut differing = self.found.iter().zip(&self.expected).enumerate();
        let first = differing.find(|(_, (found, expected))| found != expected);
        Err(match first {
            Some((offset, (found, expected))) => format!(
                "{}: byte {offset} is {found:#04x} and should be {expected:#04x}",
                name(place)
            ),
            None => format!("{}: the bytes differ", name(place)),
        })
    }
}

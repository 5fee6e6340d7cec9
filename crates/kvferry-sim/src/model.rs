//! What the simulated engine computes.
//!
//! Responsible for bytes and tokens as pure functions: the KV bytes of a position follow from all
//! tokens up to it, the next token follows from the KV bytes that are really in the blocks. So a
//! wrong byte anywhere in a request's blocks gives wrong tokens, and [`Model::reference`] says
//! without any cache or transfer what the right ones are. Not for where the bytes are
//! ([`memory`](crate::memory)).

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::rng::mix;

/// What of the past a cache group's layers look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupKind {
    /// Everything.
    Full,
    /// The last `tokens` positions, the current one included; at least 1. Blocks that are wholly
    /// outside are given up, and the null block stands in their place.
    Window {
        /// The window's length.
        tokens: u32,
    },
}

impl GroupKind {
    /// The first position that a query at `position` looks at.
    #[must_use]
    pub const fn first_visible(self, position: u32) -> u32 {
        match self {
            Self::Full => 0,
            Self::Window { tokens } => (position + 1).saturating_sub(tokens),
        }
    }
}

/// A model: the same for every engine that works on the same requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Model {
    /// The cache groups; at least one.
    pub groups: Vec<GroupKind>,
    /// The cache group of each layer; every group has at least one.
    pub layers: Vec<u32>,
    /// KV heads of a layer, at least 1. Ranks share them out, or repeat them if there are more ranks.
    pub heads: u32,
    /// Bytes that a head keeps of a position, at least 8.
    pub head_bytes: u32,
    /// A request stops by itself at a token that is divisible by this; 0 for never.
    pub stop_every: u32,
}

impl Default for Model {
    fn default() -> Self {
        Self {
            groups: vec![GroupKind::Full],
            layers: vec![0, 0],
            heads: 2,
            head_bytes: 8,
            stop_every: 16,
        }
    }
}

/// Longest [`Model::head_bytes`].
pub const MAX_HEAD_BYTES: u32 = 256;

impl Model {
    /// A hash of everything up to and with each token: what the KV bytes of its position follow from.
    pub(crate) fn extend(chain: &mut Vec<u64>, extra_key: &str, tokens: &[u32]) {
        let seed = xxhash_rust::xxh3::xxh3_64(extra_key.as_bytes());
        let mut last = chain.last().copied().unwrap_or(seed);
        for &token in tokens {
            last = mix(last.rotate_left(17) ^ u64::from(token) ^ 0x6b76_6665_7272_7900);
            chain.push(last);
        }
    }

    /// The chain of a whole request.
    #[must_use]
    pub fn chain(extra_key: &str, tokens: &[u32]) -> Vec<u64> {
        let mut chain = Vec::with_capacity(tokens.len());
        Self::extend(&mut chain, extra_key, tokens);
        chain
    }

    /// The bytes that one head of one layer keeps of a position.
    pub fn cell(chain: u64, layer: u32, head: u32, out: &mut [u8]) {
        let mut state = mix(chain ^ (u64::from(layer) << 32 | u64::from(head)).wrapping_add(1));
        for piece in out.chunks_mut(8) {
            state = mix(state.wrapping_add(0x9e37_79b9_7f4a_7c15));
            piece.copy_from_slice(&state.to_le_bytes()[..piece.len()]);
        }
    }

    /// The next token after `length` positions, from cells that `read` gets: (layer, position,
    /// head, where to).
    ///
    /// # Errors
    /// Those of `read`.
    pub fn next_token<E>(
        &self,
        length: u32,
        mut read: impl FnMut(u32, u32, u32, &mut [u8]) -> Result<(), E>,
    ) -> Result<u32, E> {
        let mut cell = [0_u8; MAX_HEAD_BYTES as usize];
        let cell = &mut cell[..self.head_bytes.min(MAX_HEAD_BYTES) as usize];
        let mut digest = Xxh3::new();
        for (layer, &group) in (0..).zip(&self.layers) {
            let first = match self.groups.get(group as usize) {
                Some(kind) => kind.first_visible(length.saturating_sub(1)),
                None => 0,
            };
            for position in first..length {
                for head in 0..self.heads {
                    read(layer, position, head, cell)?;
                    digest.update(cell);
                }
            }
        }
        Ok((digest.digest() >> 33) as u32)
    }

    /// Whether a request stops by itself at this token.
    #[must_use]
    pub const fn stops(&self, token: u32) -> bool {
        self.stop_every != 0 && token.is_multiple_of(self.stop_every)
    }

    /// What a request generates, computed without blocks, caches and transfers.
    #[must_use]
    pub fn reference(&self, prompt: &[u32], extra_key: &str, max_tokens: u32) -> Vec<u32> {
        let mut chain = Self::chain(extra_key, prompt);
        let mut generated = Vec::new();
        while generated.len() < max_tokens as usize {
            let next = self.next_token(chain.len() as u32, |layer, position, head, cell| {
                Self::cell(chain[position as usize], layer, head, cell);
                Ok::<(), std::convert::Infallible>(())
            });
            let Ok(token) = next;
            generated.push(token);
            if self.stops(token) {
                break;
            }
            Self::extend(&mut chain, extra_key, &[token]);
        }
        generated
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_follow_from_every_byte_that_is_looked_at() {
        let model = Model {
            groups: vec![GroupKind::Full, GroupKind::Window { tokens: 3 }],
            layers: vec![0, 1],
            ..Model::default()
        };
        let chain = Model::chain("", &[1, 2, 3, 4, 5]);
        let token = |wrong: Option<(u32, u32, u32)>| {
            model
                .next_token(5, |layer, position, head, cell| {
                    Model::cell(chain[position as usize], layer, head, cell);
                    cell[7] ^= u8::from(wrong == Some((layer, position, head)));
                    Ok::<(), ()>(())
                })
                .unwrap()
        };
        for position in 0..5 {
            assert_ne!(token(None), token(Some((0, position, 1))));
            // The window of the second group: positions 2, 3 and 4.
            let outside = token(None) == token(Some((1, position, 1)));
            assert_eq!(outside, position < 2);
        }
    }

    #[test]
    fn the_reference_ends_at_a_stop_or_at_the_limit() {
        let model = Model {
            stop_every: 4,
            ..Model::default()
        };
        let long = model.reference(&[1, 2, 3], "", 100);
        assert!(long.len() < 100 && long.last().is_some_and(|&token| token.is_multiple_of(4)));
        assert!(long[..long.len() - 1].iter().all(|token| token % 4 != 0));
        assert_eq!(model.reference(&[1, 2, 3], "", 1), long[..1]);
        // Content depends on the extra key.
        assert_ne!(model.reference(&[1, 2, 3], "lora", 1), long[..1]);
    }
}

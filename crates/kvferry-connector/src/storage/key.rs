//! What a block's file is named by.
//!
//! Responsible for the hash chain, in the manner of vLLM's prefix caching: a block's key hashes its
//! parent's key, its own token ids and the request's extra key, so that equal keys mean equal
//! contents. The first parent is a seed of everything else that the bytes depend on.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_bytes::ByteArray;

use super::StorageConfig;
use super::file::VERSION;

/// The key of a full block's content, together with everything before it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "ByteArray<32>", into = "ByteArray<32>")]
pub struct BlockKey([u8; 32]);

impl BlockKey {
    /// Its bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl From<ByteArray<32>> for BlockKey {
    fn from(bytes: ByteArray<32>) -> Self {
        Self(bytes.into_array())
    }
}

impl From<BlockKey> for ByteArray<32> {
    fn from(key: BlockKey) -> Self {
        Self::new(key.0)
    }
}

impl From<[u8; 32]> for BlockKey {
    fn from(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }
}

impl fmt::Display for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&blake3::Hash::from_bytes(self.0).to_hex())
    }
}

impl fmt::Debug for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// What all blocks of a configuration have in common: equal for engines that share blocks.
pub(super) fn namespace(config: &StorageConfig) -> BlockKey {
    let mut hasher = blake3::Hasher::new_derive_key("kvferry shared storage 2026 namespace");
    hasher.update(&VERSION.to_le_bytes());
    text(&mut hasher, &config.model);
    text(&mut hasher, &config.layout);
    hasher.update(&config.world.to_le_bytes());
    for tokens in &config.block_tokens {
        hasher.update(&tokens.to_le_bytes());
    }
    BlockKey(*hasher.finalize().as_bytes())
}

/// With its length, so that two texts in a row are never taken for two others.
fn text(hasher: &mut blake3::Hasher, text: &str) {
    hasher.update(&(text.len() as u64).to_le_bytes());
    hasher.update(text.as_bytes());
}

/// The keys of one request's full blocks in one cache group.
#[derive(Clone, Debug)]
pub(super) struct Chain {
    seed: BlockKey,
    block_tokens: usize,
    keys: Vec<BlockKey>,
}

impl Chain {
    pub(super) fn new(namespace: BlockKey, group: u32, block_tokens: u32) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("kvferry shared storage 2026 group");
        hasher.update(&namespace.0);
        hasher.update(&group.to_le_bytes());
        hasher.update(&block_tokens.to_le_bytes());
        Self {
            seed: BlockKey(*hasher.finalize().as_bytes()),
            block_tokens: block_tokens as usize,
            keys: Vec::new(),
        }
    }

    /// Appends the keys of the blocks that `tokens`, all of the request's so far, fill.
    pub(super) fn extend(&mut self, tokens: &[u32], extra: &str) {
        let from = self.keys.len() * self.block_tokens;
        for block in tokens
            .get(from..)
            .unwrap_or_default()
            .chunks_exact(self.block_tokens)
        {
            let parent = self.keys.last().unwrap_or(&self.seed);
            let mut hasher = blake3::Hasher::new();
            hasher.update(&parent.0);
            for token in block {
                hasher.update(&token.to_le_bytes());
            }
            text(&mut hasher, extra);
            self.keys.push(BlockKey(*hasher.finalize().as_bytes()));
        }
    }

    pub(super) fn keys(&self) -> &[BlockKey] {
        &self.keys
    }

    pub(super) const fn block_tokens(&self) -> usize {
        self.block_tokens
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::super::StorageSettings;
    use super::*;
    use crate::contract::Role;

    fn config() -> StorageConfig {
        StorageConfig {
            settings: StorageSettings::at("/tmp/kv"),
            model: "llama".to_owned(),
            layout: "LBHNC float32".to_owned(),
            block_tokens: vec![4],
            reach: Vec::new(),
            role: Role::Both,
            world: 1,
            one_pool: true,
        }
    }

    fn keys(config: &StorageConfig, group: u32, tokens: &[u32], extra: &str) -> Vec<BlockKey> {
        let mut chain = Chain::new(namespace(config), group, config.block_tokens[0]);
        chain.extend(tokens, extra);
        chain.keys
    }

    #[test]
    fn everything_that_the_bytes_depend_on_changes_every_key() {
        let tokens: Vec<u32> = (0..12).collect();
        let base = config();
        let with = |change: fn(&mut StorageConfig)| {
            let mut config = base.clone();
            change(&mut config);
            keys(&config, 0, &tokens, "")
        };
        let all = [
            keys(&base, 0, &tokens, ""),
            keys(&base, 1, &tokens, ""),
            keys(&base, 0, &tokens, "lora-7"),
            with(|config| config.model = "llam".to_owned()),
            with(|config| config.layout = "aLBHNC float32".to_owned()),
            with(|config| config.layout = "LBHNC bfloat16".to_owned()),
            with(|config| config.world = 2),
            with(|config| config.block_tokens.push(4)),
        ];
        let different: HashSet<BlockKey> = all.iter().flatten().copied().collect();
        assert_eq!(different.len(), all.len() * 3);
    }

    #[test]
    fn keys_are_the_same_in_every_build() {
        // Files outlive programs: this changes only together with the version of the format.
        assert_eq!(
            keys(&config(), 0, &[1, 2, 3, 4], "")[0].to_string(),
            "4db126010c1d8ac5381048e04b76c50f5b68128bc6600ff016e585f4d889a325"
        );
    }

    proptest! {
        /// However the tokens come, the keys are those of the whole; and two requests share exactly
        /// the keys of their common full blocks.
        #[test]
        fn a_chain_is_a_function_of_the_prefix(
            tokens in proptest::collection::vec(0_u32..4, 0..60),
            cut in 0_usize..60,
            change in 0_usize..60,
        ) {
            let whole = keys(&config(), 0, &tokens, "x");
            prop_assert_eq!(whole.len(), tokens.len() / 4);
            let mut chain = Chain::new(namespace(&config()), 0, 4);
            chain.extend(&tokens[..cut.min(tokens.len())], "x");
            chain.extend(&tokens, "x");
            prop_assert_eq!(chain.keys(), &whole[..]);
            if change < tokens.len() {
                let mut other = tokens.clone();
                other[change] += 1;
                let other = keys(&config(), 0, &other, "x");
                for (index, (a, b)) in whole.iter().zip(&other).enumerate() {
                    prop_assert_eq!(a == b, (index + 1) * 4 <= change);
                }
            }
        }
    }
}

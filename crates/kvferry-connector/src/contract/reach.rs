//! How far back attention looks.

use serde::{Deserialize, Serialize};

/// How far back a cache group's attention reaches, and so which of its blocks a scheduler keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reach {
    /// To the first token.
    #[default]
    All,
    /// Over this many tokens, the one that is computed among them; at least 1.
    Window(u32),
    /// To the first of this many tokens that are looked at together; at least 1.
    Chunk(u32),
}

impl Reach {
    /// Whether it is over no tokens at all, which means nothing.
    pub(crate) const fn is_zero(self) -> bool {
        matches!(self, Self::Window(0) | Self::Chunk(0))
    }

    /// The first token that is still looked at when so many tokens count as computed. vLLM has the null block for those
    /// that are wholly before it (`get_num_skipped_tokens`).
    pub(crate) fn first_kept(self, computed: u32) -> u32 {
        match self {
            Self::All => 0,
            Self::Window(window) => computed.saturating_sub(window.saturating_sub(1)),
            // Nothing of a whole chunk is kept.
            Self::Chunk(chunk) => computed - computed.checked_rem(chunk).unwrap_or(0),
        }
    }

    /// Whether computing the last of `prompt` tokens again reaches into a block that was dropped when all of them counted
    /// as computed. vLLM computes that token again after a load of the whole prompt, and lays blocks out as if it did not.
    pub(crate) fn misses_the_last(self, prompt: u32, block_tokens: u32) -> bool {
        let kept = self.first_kept(prompt) / block_tokens;
        let needed = self.first_kept(prompt.saturating_sub(1)) / block_tokens;
        needed < kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_keeps_what_its_next_token_looks_at() {
        assert_eq!(Reach::All.first_kept(320), 0);
        // Token 320 looks at 225 to 320.
        assert_eq!(Reach::Window(96).first_kept(320), 225);
        assert_eq!(Reach::Window(96).first_kept(95), 0);
        assert_eq!(Reach::Window(96).first_kept(96), 1);
        // Token 127 looks at 64 to 127, and token 128 at itself.
        assert_eq!(Reach::Chunk(64).first_kept(127), 64);
        assert_eq!(Reach::Chunk(64).first_kept(128), 128);
    }

    #[test]
    fn the_last_token_misses_a_block_where_a_window_begins_at_a_blocks_end() {
        let missed = |reach: Reach| -> Vec<u32> {
            (1..200)
                .filter(|&prompt| reach.misses_the_last(prompt, 32))
                .collect()
        };
        assert_eq!(missed(Reach::Window(96)), [127, 159, 191]);
        assert_eq!(missed(Reach::Window(97)), [128, 160, 192]);
        assert_eq!(missed(Reach::Chunk(64)), [64, 128, 192]);
        assert!(missed(Reach::All).is_empty());
    }
}

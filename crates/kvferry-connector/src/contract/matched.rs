//! The answer to a lookup.

use std::num::NonZeroU32;
use std::time::Duration;

/// A number of tokens that a connector offers to load: at least 1, within the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Offer(NonZeroU32);

impl Offer {
    /// How many tokens, at least 1.
    #[must_use]
    pub const fn tokens(self) -> u32 {
        self.0.get()
    }
}

/// What a connector has of a request beyond what is computed.
///
/// Values come from the constructors, which clamp; so none trips vLLM's assertions (no tokens as an
/// async load, tokens past the prompt, the whole prompt as a sync load).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Matched {
    /// Nothing.
    None,
    /// Not known yet: the scheduler asks again in a later step, for at most this long from now on.
    Later(Duration),
    /// This many tokens, which the worker has in place before the step's forward.
    Sync(Offer),
    /// This many tokens, which arrive while the request waits and holds its blocks.
    Async(Offer),
}

impl Matched {
    /// An async load of what `available` tokens give beyond the `computed` ones, within a prompt of
    /// `prompt` tokens; [`Matched::None`] if that is nothing.
    ///
    /// ```
    /// use kvferry_connector::contract::Matched;
    ///
    /// assert!(matches!(Matched::load_async(321, 64, 320), Matched::Async(offer) if offer.tokens() == 256));
    /// assert_eq!(Matched::load_async(320, 320, 320), Matched::None);
    /// ```
    #[must_use]
    pub fn load_async(prompt: u32, computed: u32, available: u32) -> Self {
        let beyond = available.min(prompt).saturating_sub(computed);
        NonZeroU32::new(beyond).map_or(Self::None, |tokens| Self::Async(Offer(tokens)))
    }

    /// The same as a sync load, which leaves at least the prompt's last token to be computed.
    ///
    /// ```
    /// use kvferry_connector::contract::Matched;
    ///
    /// assert!(matches!(Matched::load_sync(320, 0, 320), Matched::Sync(offer) if offer.tokens() == 319));
    /// ```
    #[must_use]
    pub fn load_sync(prompt: u32, computed: u32, available: u32) -> Self {
        let beyond = available
            .min(prompt.saturating_sub(1))
            .saturating_sub(computed);
        NonZeroU32::new(beyond).map_or(Self::None, |tokens| Self::Sync(Offer(tokens)))
    }

    /// Tokens that are offered; 0 for none and for later.
    #[must_use]
    pub const fn tokens(self) -> u32 {
        match self {
            Self::None | Self::Later(_) => 0,
            Self::Sync(offer) | Self::Async(offer) => offer.tokens(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// vLLM's assertions on a lookup's answer, for any numbers at all.
        #[test]
        fn no_answer_trips_the_scheduler(prompt: u32, computed: u32, available: u32) {
            for matched in [
                Matched::load_async(prompt, computed, available),
                Matched::load_sync(prompt, computed, available),
            ] {
                let end = u64::from(computed) + u64::from(matched.tokens());
                match matched {
                    Matched::Async(offer) => prop_assert!(offer.tokens() > 0 && end <= prompt.into()),
                    Matched::Sync(offer) => prop_assert!(offer.tokens() > 0 && end < prompt.into()),
                    other => prop_assert_eq!(other, Matched::None),
                }
            }
        }
    }
}

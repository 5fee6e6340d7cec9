//! Where a request's load stands, for connectors that may be asked again after a preemption.

/// The state of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum LoadState {
    /// Tokens may be offered.
    #[default]
    Open,
    /// It was scheduled without a load.
    Declined,
    /// A load is under way; the request was preempted meanwhile, or not.
    Loading { preempted: bool },
    /// It ended well.
    Loaded,
    /// It did not. Final: what follows is that the request is computed.
    Failed,
}

impl LoadState {
    pub(crate) fn is_open(self) -> bool {
        self == Self::Open
    }

    /// It is scheduled without tokens from outside.
    pub(crate) fn declined(&mut self) {
        if self.is_open() {
            *self = Self::Declined;
        }
    }

    /// Tokens were taken.
    pub(crate) fn begun(&mut self) {
        *self = Self::Loading { preempted: false };
    }

    /// The load was reported. After a preemption its blocks are gone, and it may be asked for again.
    pub(crate) fn ended(&mut self, well: bool) {
        *self = match (well, *self) {
            (false, _) => Self::Failed,
            (true, Self::Loading { preempted: true }) => Self::Open,
            (true, _) => Self::Loaded,
        };
    }

    /// The request has lost its blocks; true if tokens may be offered again.
    pub(crate) fn preempted(&mut self) -> bool {
        *self = match *self {
            Self::Loading { .. } => Self::Loading { preempted: true },
            Self::Failed => Self::Failed,
            Self::Open | Self::Declined | Self::Loaded => Self::Open,
        };
        self.is_open()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// C4: what was loaded is not offered again, unless its blocks are gone. C91: what has failed never is.
    #[test]
    fn c4_c91_tokens_are_offered_again_only_after_a_preemption() {
        let mut state = LoadState::default();
        state.begun();
        state.declined();
        assert!(!state.is_open());
        state.ended(true);
        assert_eq!(state, LoadState::Loaded);
        state.declined();
        assert_eq!(state, LoadState::Loaded);
        assert!(state.preempted() && state.is_open());

        state.begun();
        assert!(!state.preempted(), "the load is still under way");
        state.ended(true);
        assert!(state.is_open());

        state.declined();
        assert_eq!(state, LoadState::Declined);
        assert!(state.preempted());
        state.begun();
        state.preempted();
        state.ended(false);
        assert_eq!(state, LoadState::Failed);
        assert!(!state.preempted() && !state.is_open());
    }
}

//! A request, as the scheduler has it.

use std::time::Instant;

use kvferry_connector::contract::{Finish, Params, RequestView};
use kvferry_wire::RequestId;
use serde::{Deserialize, Serialize};

use crate::model::Model;

/// A request that comes in.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NewRequest {
    /// Its id, not used in this engine before.
    pub id: RequestId,
    /// Its prompt, at least 1 token.
    pub prompt: Vec<u32>,
    /// How many tokens it may generate, at least 1.
    pub max_tokens: u32,
    /// Its transfer parameters.
    pub params: Option<Params>,
    /// What else its content depends on.
    pub extra_key: String,
}

/// A request that ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Output {
    /// Its id.
    pub id: RequestId,
    /// What it generated.
    pub generated: Vec<u32>,
    /// How it ended.
    pub how: Finish,
    /// Transfer parameters for whoever reads its blocks.
    pub params: Option<Params>,
}

/// Where a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It waits and has no blocks.
    Waiting,
    /// It waits for its load and has blocks (`WAITING_FOR_REMOTE_KVS`).
    Parked,
    /// Its load is over, and it waits to be scheduled with the blocks that it has.
    Ready,
    /// It has blocks and computes.
    Running,
}

/// The tokens that a load is to bring: positions `from` to `to`, without `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Load {
    pub(crate) from: u32,
    pub(crate) to: u32,
    /// Set when it failed: positions that can be kept.
    pub(crate) failed: Option<u32>,
}

/// Blocks per cache group.
pub type Tables = Vec<Vec<u32>>;

#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) id: RequestId,
    pub(crate) tokens: Vec<u32>,
    /// One per token.
    pub(crate) chain: Vec<u64>,
    pub(crate) prompt: u32,
    pub(crate) max_tokens: u32,
    pub(crate) params: Option<Params>,
    pub(crate) extra_key: String,
    pub(crate) state: State,
    /// Positions that are computed or loaded, those of steps and loads under way included.
    pub(crate) computed: u32,
    /// Those of steps under way.
    pub(crate) in_flight: u32,
    /// Tokens that steps under way will bring.
    pub(crate) placeholders: u32,
    /// Counts how often it lost its blocks; steps under way before that do not count for it.
    pub(crate) epoch: u32,
    pub(crate) tables: Tables,
    /// Blocks per group that the workers know of; `None`: they do not know the request.
    pub(crate) told: Option<Vec<usize>>,
    /// Its prompt is being loaded or computed, and the blocks that it still needs for that are kept for
    /// it: loads may not take them.
    pub(crate) prefilling: bool,
    /// Its load, until that is settled.
    pub(crate) load: Option<Load>,
    /// A load was consumed since it has its blocks.
    pub(crate) consumed: bool,
    pub(crate) failed_loads: u32,
    /// Until when it may be put off.
    pub(crate) later_until: Option<Instant>,
    /// How often an offer was taken; so that the next draw is another one.
    pub(crate) offers: u64,
}

impl Request {
    pub(crate) fn new(new: NewRequest, groups: usize) -> Self {
        Self {
            chain: Model::chain(&new.extra_key, &new.prompt),
            id: new.id,
            prompt: new.prompt.len() as u32,
            tokens: new.prompt,
            max_tokens: new.max_tokens,
            params: new.params,
            extra_key: new.extra_key,
            state: State::Waiting,
            computed: 0,
            in_flight: 0,
            placeholders: 0,
            epoch: 0,
            tables: vec![Vec::new(); groups],
            told: None,
            prefilling: false,
            load: None,
            consumed: false,
            failed_loads: 0,
            later_until: None,
            offers: 0,
        }
    }

    pub(crate) fn view(&self) -> RequestView<'_> {
        RequestView {
            id: &self.id,
            tokens: &self.tokens,
            prompt: self.prompt,
            params: self.params.as_ref(),
            extra_key: &self.extra_key,
        }
    }

    pub(crate) fn len(&self) -> u32 {
        self.tokens.len() as u32
    }

    pub(crate) fn generated(&self) -> &[u32] {
        &self.tokens[self.prompt as usize..]
    }

    pub(crate) fn push(&mut self, token: u32) {
        Model::extend(&mut self.chain, &self.extra_key, &[token]);
        self.tokens.push(token);
    }

    pub(crate) fn has_blocks(&self) -> bool {
        self.tables.iter().any(|table| !table.is_empty())
    }

    /// Tokens that the next step can compute: with async scheduling also one that is not known yet.
    pub(crate) fn wanted(&self) -> u32 {
        if self.generated().len() as u32 + self.placeholders >= self.max_tokens {
            return 0;
        }
        (self.len() + self.placeholders).saturating_sub(self.computed)
    }
}

//! What passes between the halves of [`SharedStorage`](super).

use kvferry_wire::RequestId;
use serde::{Deserialize, Serialize};

use super::BlockKey;
use crate::contract::FailedBlock;

/// A block, and the key of the content that it has or is to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyedBlock {
    /// The content's key.
    pub key: BlockKey,
    /// The cache group.
    pub group: u32,
    /// The block's id here.
    pub block: u32,
}

/// Blocks to load for a request; reported as received, also if there are none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Load {
    /// The request.
    pub request: RequestId,
    /// What to read.
    pub blocks: Vec<KeyedBlock>,
    /// Blocks that were asked for and whose content has no key; they are reported as failed.
    pub unknown: Vec<FailedBlock>,
}

/// A block to save; its end is reported in [`Report::ended`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Save {
    /// Its number; ascends.
    pub number: u64,
    /// The request that it is of.
    pub request: RequestId,
    /// What to write.
    pub block: KeyedBlock,
}

/// Orders of one step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Saves whose blocks have a new owner from this step on: what they have read since counts for
    /// nothing. They end by this.
    pub revoke: Vec<u64>,
    /// Loads to be broken off. They are reported all the same.
    pub abort: Vec<RequestId>,
    /// Loads, which start with the step.
    pub load: Vec<Load>,
    /// Saves, which start when the step's forward is over.
    pub save: Vec<Save>,
    /// Requests that have ended and whose blocks are held until their saves are done; reported as
    /// sent then.
    pub finished: Vec<RequestId>,
}

/// What a rank tells the scheduler half.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Saves that read their block no more, each once, however they ended.
    pub ended: Vec<u64>,
}

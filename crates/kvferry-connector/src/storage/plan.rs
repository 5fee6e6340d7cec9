//! What passes between the halves of [`SharedStorage`](super).

use kvferry_wire::RequestId;
use serde::{Deserialize, Serialize};

/// Blocks to load for a request; reported as received.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Load {
    /// The request.
    pub request: RequestId,
    /// The key of each block's content, its cache group and its id here.
    pub blocks: Vec<(String, u32, u32)>,
}

/// A block to save.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Save {
    /// The request that it is of.
    pub request: RequestId,
    /// The key of its content.
    pub key: String,
    /// Its cache group.
    pub group: u32,
    /// Its id here.
    pub block: u32,
}

/// Orders of one step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Loads, which start with the step.
    pub load: Vec<Load>,
    /// Saves, which start when the step's forward is over.
    pub save: Vec<Save>,
    /// Requests that have ended and whose blocks are held until their saves are done; reported as
    /// sent then.
    pub finished: Vec<RequestId>,
}

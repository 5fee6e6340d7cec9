//! What the scheduler half tells the worker halves beyond the children's own plans.

use kvferry_wire::RequestId;
use serde::{Deserialize, Serialize};

use crate::contract::StepPlan;

/// The child that loads for a request: its report of that is the only one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chosen {
    /// The request.
    pub request: RequestId,
    /// The child's place.
    pub child: u32,
}

/// A finished request, and who holds its blocks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holding {
    /// The request.
    pub request: RequestId,
    /// The children's places, ascending; at least one.
    pub children: Vec<u32>,
    /// Its load is still under way, and the report of that frees the blocks: the children's "sent" is for them
    /// alone.
    pub silent: bool,
}

/// Orders of one step. A rank counts "sent" by it: the halves may be in different processes, and
/// only the scheduler half knows how many children hold a request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// One plan per child, in their order.
    pub children: Vec<StepPlan>,
    /// Loads that begin, by this step's plans of the children or by later ones.
    pub chosen: Vec<Chosen>,
    /// Requests that have finished since the last step and are held.
    pub holding: Vec<Holding>,
}

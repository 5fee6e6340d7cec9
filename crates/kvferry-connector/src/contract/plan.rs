//! What a step has workers do.

use serde::{Deserialize, Serialize};

use crate::{multi, remote, storage};

/// The scheduler half's orders for one step; every rank gets the same. An empty one is a few bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StepPlan {
    /// Of [`RemotePrefill`](crate::remote).
    Remote(remote::Plan),
    /// Of [`SharedStorage`](crate::storage).
    Storage(storage::Plan),
    /// Of a [`MultiConnector`](crate::multi).
    Multi(multi::Plan),
}

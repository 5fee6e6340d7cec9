//! Everything of kvferry that crosses a process boundary.
#![forbid(unsafe_code)]

mod error;
pub mod ids;

pub use error::WireError;
pub use ids::{EngineId, Epoch, Incarnation, Instance, LeaseId, Rank, ReaderId, RequestId};

//! `SharedStorage`: full blocks as content-addressed files.

mod plan;

pub use plan::{Load, Plan, Save};

//! The simulator with scripted connectors: an obedient one that moves bytes between engines
//! (`direct`), and one that says whatever a test wants (`puppet`).
#![allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

mod assertions;
mod cluster;
mod direct;
mod freed;
mod loads;
mod properties;
mod puppet;
mod real;
mod scheduling;

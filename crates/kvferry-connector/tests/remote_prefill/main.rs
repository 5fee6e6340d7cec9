//! `RemotePrefill`, both halves of both sides in one process, driven step by step: over the loopback
//! fabric, with faults, and over UCX.

// Clippy knows test functions, but not their helpers.
#![allow(clippy::unwrap_used)]

mod aborts;
mod bench;
mod faults;
mod groups;
mod leases;
mod loads;
mod lost;
mod seed;
mod verify;

//! Shared parts of the cross-process tests.
//!
//! [`corpus`] is garbage for the parsers. [`counting`] is an allocator. [`harness`] starts a test binary again in another role and talks to it over pipes; [`roles`] are
//! what it can be; [`pattern`] says which byte belongs where; [`random`] repeats itself.
//!
//! This crate is test code: a failure is a panic with a message.
#![allow(clippy::unwrap_used)]

pub mod corpus;
pub mod counting;
pub mod harness;
pub mod pattern;
pub mod random;
pub mod roles;

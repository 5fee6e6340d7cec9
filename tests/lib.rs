//! Shared parts of the cross-process tests.

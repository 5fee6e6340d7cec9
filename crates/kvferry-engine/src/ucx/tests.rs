//! The fabric over the UCX that is loaded.

//! Bindings to UCX's UCP layer, generated from the headers of the UCX that is installed, and the
//! few lines of C around it (`native/shim.c`).
//!
//! No logic lives here, no ownership and no policy: every item means what UCX's documentation says.
//! The shim's functions are named `kvf_*` and described in `native/shim.h`.
//!
//! # One build, any UCX
//!
//! A build made with the headers of any UCX from 1.13 on runs with any UCX from 1.13 on, because the
//! library's name is the same in all of them. This crate keeps that true: it binds only functions
//! that 1.13 has, [`kvf_init`] asks for API 1.13, and what later versions added is in [`Features`],
//! filled at run time from the library that was really loaded. Structures of later headers are
//! longer than those of 1.13; UCX reads the fields named in `field_mask` and no others, so start
//! from `Default::default()` (all zero) and set fields by name. Constants keep their values, except
//! those that count others (`UCS_MEMORY_TYPE_LAST`, `UCS_MEMORY_TYPE_UNKNOWN`): do not use them.
//!
//! # Which UCX is linked
//!
//! `UCX_DIR`, a prefix with `include/` and `lib/`, goes first; pkg-config's package `ucx` is next.
//! That decides the headers and what the linker sees. The *loader* decides anew in every process: a
//! program linked against a UCX outside the system's library directories loads the system's UCX
//! unless `LD_LIBRARY_PATH` or a run path says otherwise. A build script cannot give a run path to
//! programs of other packages, so whoever wants one reads `DEP_UCP_LIBDIR` in a build script of a
//! package that depends on this one and prints `cargo::rustc-link-arg=-Wl,-rpath,<dir>`.
//! `DEP_UCP_ROOT` (where known), `DEP_UCP_INCLUDE` and `DEP_UCP_VERSION` are there too.
//! [`features`] tells which library it was in the end.
//!
//! # Where UCX's log goes
//!
//! UCX logs to standard output. [`kvf_log_set`] sends its messages to a function instead, from the
//! call on. What UCX writes while it is being loaded, and the tables that 1.22 prints, cannot be
//! caught; they appear at log levels `debug` and finer only, and go where `UCX_LOG_FILE` says.

#![allow(unsafe_code)]

mod features;

/// What bindgen made of `native/ucx.h`.
mod bindings {
    #![allow(
        missing_docs,
        non_camel_case_types,
        non_snake_case,
        non_upper_case_globals,
        unreachable_pub,
        clippy::all,
        clippy::pedantic,
        clippy::undocumented_unsafe_blocks
    )]

    include!(concat!(env!("OUT_DIR"), "/bindings.rs"));
}

pub use bindings::*;
pub use features::{
    EpQueryTransports, Features, HEADERS_VERSION, TcpSegmentKeys, Version, features,
};

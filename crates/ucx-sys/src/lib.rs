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
//! # Which UCX is loaded
//!
//! `UCX_DIR`, a prefix with `include/`, or else pkg-config's package `ucx`, decides the headers of the build, and
//! nothing else: programs do not link UCX. [`load`] loads one, `libucp.so.0` as the dynamic loader finds it
//! (`LD_LIBRARY_PATH`, the system's directories) or the file that it is told, and fills the table that the functions of
//! this crate go through. **It comes before everything else**: all functions have it that it has succeeded, and panic
//! otherwise. [`features`] tells which library it was, [`copies`] which others are in the process. A library that is
//! loaded stays.
//!
//! # Where UCX's log goes
//!
//! UCX logs to standard output. [`kvf_log_set`] sends its messages to a function instead, from the
//! call on. What UCX writes while it is being loaded, and the tables that 1.22 prints, cannot be
//! caught; they appear at log levels `debug` and finer only, and go where `UCX_LOG_FILE` says.

#![allow(unsafe_code)]

mod features;
mod library;

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
pub use features::{EpQueryTransports, Features, HEADERS_VERSION, TcpSegmentKeys, Version};
pub use library::{LoadError, MIN_VERSION, copies, features, load, loaded};

//! The program as its users start it: processes, exit statuses, standard output and error.

#![allow(missing_docs)]
#![allow(clippy::unwrap_used)]

mod bench;
mod demo;
mod refusals;
mod serve_pull;
mod sim;
mod support;

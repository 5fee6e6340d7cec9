//! The directory: how a consumer learns what a producer's ranks are and where they are reached.
//!
//! A producer's scheduler half (or its only process) runs a [`DirectoryServer`], the one TCP port
//! that it listens on. Each rank publishes its encoded [`Description`] there. A consumer calls
//! [`fetch`] with the ranks it needs and gets their descriptions; everything after that goes over
//! the workers' own addresses.
//!
//! Responsible for the connections: sockets, deadlines, limits and a diagnosis for people. Not
//! responsible for the bytes of a frame ([`kvferry_wire::directory`]), for comparing two
//! descriptions, or for checking that the engine found is the one that was meant: [`fetch`]
//! reports the engine's id and its caller judges it.
//!
//! Invariants:
//! * What is served has been decoded once, when it was published; it names the rank it is filed
//!   under and the engine that the directory belongs to.
//! * No client, however slow or hostile, delays another one by more than the limits below, and
//!   none makes the server hold more memory than they allow.
//!
//! # Wire format
//! [`kvferry_wire::directory`]: frames of 4 magic bytes, a `u32` length and a versioned msgpack
//! body. A connection carries any number of requests, one after the other. A rank that was asked
//! for and has not been published is missing in the reply, because ranks of one engine start at
//! different times; [`fetch`] turns that into [`DirectoryError::MissingRanks`].
//!
//! # Limits
//! One thread serves all connections without blocking on any. A request and its reply take at most
//! [`DirectoryConfig::request_timeout`], a connection lives at most
//! [`DirectoryConfig::connection_timeout`], and at most [`DirectoryConfig::max_connections`] are
//! open. When all places are taken, the connection that has been without progress for longest makes
//! room, provided that it has been so for [`EVICTION_GRACE`]; until then a new client waits in the
//! listener's backlog.
//!
//! There is no authentication and no encryption: the port is for one trust domain.
//!
//! # Example
//! ```
//! use std::time::Duration;
//!
//! use kvferry_connector::directory::{DirectoryConfig, DirectoryServer, fetch};
//! use kvferry_wire::{Addresses, Description, EngineId, Incarnation, Rank};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let engine = EngineId::new("prefill-0")?;
//! let description = Description {
//!     engine: engine.clone(),
//!     incarnation: Incarnation::random()?,
//!     rank: Rank::default(),
//!     instance: None,
//!     kvferry_version: "0.1.0".to_owned(),
//!     ucx: None,
//!     host: "a host".to_owned(),
//!     addresses: Addresses { message: vec![1, 2, 3], data: None },
//!     compatibility: Default::default(),
//!     regions: Vec::new(),
//!     tables: Vec::new(),
//!     unix_socket: None,
//! };
//!
//! let server = DirectoryServer::bind("127.0.0.1:0", DirectoryConfig::new(engine.clone()))?;
//! server.publish(Rank::default(), description.encode()?)?;
//!
//! let listing = fetch(server.local_addr(), None, Duration::from_secs(5))?;
//! assert_eq!(listing.engine, engine);
//! assert_eq!(listing.entries[&Rank::default()], description);
//! # Ok(())
//! # }
//! ```
//!
//! [`Description`]: kvferry_wire::Description

use std::time::Duration;

use kvferry_wire::directory::MAX_DIRECTORY_REPLY_BYTES;
use kvferry_wire::{EngineId, Instance};

mod client;
mod connection;
mod error;
mod log;
mod published;
mod server;
mod stats;

pub use client::{DirectoryListing, fetch};
pub use error::{BindError, DirectoryError, PublishError, Stage};
pub use server::DirectoryServer;
pub use stats::DirectoryStats;

/// How long a connection must have made no progress before it can be closed to make room for
/// another one. It covers a round trip between distant hosts.
pub const EVICTION_GRACE: Duration = Duration::from_millis(250);

/// Most connections that can be configured.
pub const MAX_CONNECTIONS: usize = 4_096;

/// Longest timeout that can be configured.
pub const MAX_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// What a [`DirectoryServer`] says about its engine, and its limits.
#[derive(Clone, Debug)]
pub struct DirectoryConfig {
    /// The engine that the directory belongs to.
    pub engine: EngineId,
    /// The scheduler half that issues the engine's leases, where there is one.
    pub instance: Option<Instance>,
    /// Connections open at once, 1 to [`MAX_CONNECTIONS`]; 64 by default.
    pub max_connections: usize,
    /// Limit on one request with its reply, counted from the connection's start or the end of the
    /// previous reply; more than zero, at most [`MAX_TIMEOUT`]; 5 s by default.
    pub request_timeout: Duration,
    /// Limit on a connection's life; at least `request_timeout`, at most [`MAX_TIMEOUT`]; 60 s by
    /// default.
    pub connection_timeout: Duration,
    /// Largest sum of the descriptions in one reply, in bytes, 1 to
    /// [`MAX_DIRECTORY_REPLY_BYTES`], which is the default. A request for more is refused with the
    /// advice to ask for fewer ranks. All replies that are being sent together hold at most four
    /// times as much.
    pub max_reply_bytes: usize,
}

impl DirectoryConfig {
    /// The default limits for `engine`, without an instance.
    #[must_use]
    pub const fn new(engine: EngineId) -> Self {
        Self {
            engine,
            instance: None,
            max_connections: 64,
            request_timeout: Duration::from_secs(5),
            connection_timeout: Duration::from_secs(60),
            max_reply_bytes: MAX_DIRECTORY_REPLY_BYTES,
        }
    }

    fn check(&self) -> Result<(), BindError> {
        let bad = |field, value: String, expected| {
            Err(BindError::Config {
                field,
                value,
                expected,
            })
        };
        if !(1..=MAX_CONNECTIONS).contains(&self.max_connections) {
            let value = self.max_connections.to_string();
            return bad("max_connections", value, "1 to 4096");
        }
        if self.request_timeout.is_zero() || self.request_timeout > MAX_TIMEOUT {
            let value = format!("{:?}", self.request_timeout);
            return bad("request_timeout", value, "more than 0 s, at most 24 h");
        }
        if self.connection_timeout < self.request_timeout || self.connection_timeout > MAX_TIMEOUT {
            let value = format!("{:?}", self.connection_timeout);
            return bad(
                "connection_timeout",
                value,
                "at least request_timeout, at most 24 h",
            );
        }
        if !(1..=MAX_DIRECTORY_REPLY_BYTES).contains(&self.max_reply_bytes) {
            let value = self.max_reply_bytes.to_string();
            return bad("max_reply_bytes", value, "1 to 67108864");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;

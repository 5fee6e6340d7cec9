//! How a [`RemotePrefill`](super) is set up, and why that can fail.

use std::net::IpAddr;
use std::time::Duration;

use kvferry_engine::{EngineError, LaneChoice};
use kvferry_wire::params::{MAX_GROUPS, MAX_RANKS};
use kvferry_wire::{EngineId, WireError};
use thiserror::Error;

use crate::contract::{Reach, Role};
use crate::directory::{BindError, PublishError};
use crate::lease::{BorrowConfig, LeaseConfig, LeaseConfigError};

/// Settings of both halves; they must be equal in both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteConfig {
    /// The engine's id, unique among all that reach one another.
    pub engine: EngineId,
    /// Which side it is on.
    pub role: Role,
    /// Ranks of this engine, 1 to [`MAX_RANKS`].
    pub ranks: u32,
    /// Tokens of a block, per cache group; each at least 1, 1 to [`MAX_GROUPS`] groups.
    pub block_tokens: Vec<u32>,
    /// How far back each group's attention reaches; groups beyond its end reach to the first token.
    pub reach: Vec<Reach>,
    /// Where the directory listens: a host name or address of this host.
    pub listen_host: String,
    /// Its port; 0 takes any free one.
    pub listen_port: u16,
    /// The host that consumers are told; `None` for the address that is listened at.
    pub advertise_host: Option<String>,
    /// Leases that this engine issues.
    pub lease: LeaseConfig,
    /// Leases of others.
    pub borrow: BorrowConfig,
    /// Fewer remote tokens than this are computed here instead; under 2 counts as 2.
    pub recompute_threshold_tokens: u32,
    /// Loads that a rank runs at the same time, at least 1; others wait.
    pub max_concurrent_loads: usize,
    /// Time for the blocks of a load to arrive, from its read's start on; and for their checksums, from its end on.
    pub read_timeout: Duration,
    /// Whether checksums of blocks that were read are compared with the producer's before they count.
    pub verify: bool,
    /// Time for finding and greeting a peer, from the moment on at which a load wants it.
    pub connect_timeout: Duration,
    /// How bytes move.
    pub lane: LaneChoice,
}

impl RemoteConfig {
    /// Defaults: one rank, both roles, loopback at any port, the automatic lane.
    #[must_use]
    pub fn new(engine: EngineId, block_tokens: Vec<u32>) -> Self {
        Self {
            engine,
            role: Role::Both,
            ranks: 1,
            reach: Vec::new(),
            block_tokens,
            listen_host: "127.0.0.1".to_owned(),
            listen_port: 0,
            advertise_host: None,
            lease: LeaseConfig::default(),
            borrow: BorrowConfig::default(),
            recompute_threshold_tokens: 2,
            max_concurrent_loads: 32,
            read_timeout: Duration::from_secs(10),
            verify: false,
            connect_timeout: Duration::from_secs(5),
            lane: LaneChoice::Auto,
        }
    }

    pub(crate) fn validate(&self) -> Result<(), RemoteError> {
        let wrong = |field, value: String, expected| {
            Err(RemoteError::Config {
                field,
                value,
                expected,
            })
        };
        if !(1..=MAX_RANKS).contains(&self.ranks) {
            return wrong("ranks", self.ranks.to_string(), "1 to 4096");
        }
        let groups = self.block_tokens.len();
        if !(1..=MAX_GROUPS).contains(&groups) || self.block_tokens.contains(&0) {
            let expected = "1 to 64 groups with blocks of at least 1 token";
            return wrong("block_tokens", format!("{:?}", self.block_tokens), expected);
        }
        if self.reach.len() > groups || self.reach.iter().any(|reach| reach.is_zero()) {
            let expected = "at most one for each of block_tokens, none of 0 tokens";
            return wrong("reach", format!("{:?}", self.reach), expected);
        }
        let listens = self.role != Role::Consumer;
        let is_unspecified = |host: &str| {
            let host = host.trim_start_matches('[').trim_end_matches(']');
            host.parse::<IpAddr>().is_ok_and(|ip| ip.is_unspecified())
        };
        // Consumers on other hosts would connect to themselves.
        let told = self.advertise_host.as_ref().unwrap_or(&self.listen_host);
        if listens && is_unspecified(told) {
            let expected = "an address that consumers can connect to; to listen at every address, set \
                            advertise_host as well";
            return wrong("the host that consumers are told", told.clone(), expected);
        }
        if self.max_concurrent_loads == 0 {
            return wrong("max_concurrent_loads", "0".to_owned(), "at least 1");
        }
        for (field, value) in [
            ("read_timeout", self.read_timeout),
            ("connect_timeout", self.connect_timeout),
            ("borrow.confirm_timeout", self.borrow.confirm_timeout),
            ("borrow.resend_after", self.borrow.resend_after),
            ("borrow.lease_max", self.borrow.lease_max),
        ] {
            let range = Duration::from_millis(1)..=Duration::from_secs(7 * 24 * 60 * 60);
            if !range.contains(&value) {
                return wrong(field, format!("{value:?}"), "1 ms to 7 days");
            }
        }
        self.lease.validate()?;
        Ok(())
    }
}

/// Why a half could not be made or set up.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RemoteError {
    /// A setting that is out of range.
    #[error("{field} is {value}, expected {expected}")]
    Config {
        /// Which.
        field: &'static str,
        /// Its value.
        value: String,
        /// What would do.
        expected: &'static str,
    },
    /// A setting of the leases.
    #[error(transparent)]
    Lease(#[from] LeaseConfigError),
    /// The directory does not listen.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// A rank's description was refused.
    #[error(transparent)]
    Publish(#[from] PublishError),
    /// RDMA is asked for, and no peer could ever be read by it.
    #[error(
        "{setting} asks for one-sided reads by hardware, and this engine has none: {reason}; choose another device, or \
         remove the setting"
    )]
    NoRdma {
        /// `require_rdma`, or the lane.
        setting: &'static str,
        /// What UCX has found instead.
        reason: String,
    },
    /// The engine does not start or has stopped.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The engine's description cannot be written.
    #[error(transparent)]
    Description(#[from] WireError),
    /// The system gives no thread.
    #[error("no thread could be started: {0}")]
    Thread(std::io::Error),
}

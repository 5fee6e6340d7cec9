//! The directory's warnings. Nothing is counted here.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use kvferry_engine::LogLimit;
use kvferry_wire::WireError;

/// The warnings, each kind at most once per second.
pub(super) struct Log {
    garbage: LogLimit,
    timed_out: LogLimit,
    evicted: LogLimit,
    refused: LogLimit,
    accept_failed: LogLimit,
}

impl Default for Log {
    fn default() -> Self {
        let limit = || LogLimit::new(Duration::from_secs(1));
        Self {
            garbage: limit(),
            timed_out: limit(),
            evicted: limit(),
            refused: limit(),
            accept_failed: limit(),
        }
    }
}

impl Log {
    pub(super) fn garbage(&mut self, peer: SocketAddr, error: &WireError, now: Instant) {
        if let Some(suppressed) = self.garbage.admit(now) {
            tracing::warn!(%peer, %error, suppressed, "directory: closed a connection that sent no request");
        }
    }

    pub(super) fn timed_out(&mut self, peer: SocketAddr, awaited: &str, now: Instant) {
        if let Some(suppressed) = self.timed_out.admit(now) {
            tracing::warn!(%peer, awaited, suppressed, "directory: closed a connection that was too slow");
        }
    }

    pub(super) fn evicted(&mut self, peer: SocketAddr, others: usize, now: Instant) {
        if let Some(suppressed) = self.evicted.admit(now) {
            tracing::warn!(%peer, others, suppressed, "directory: closed a connection to make room");
        }
    }

    pub(super) fn refused(&mut self, peer: SocketAddr, reason: &str, now: Instant) {
        if let Some(suppressed) = self.refused.admit(now) {
            tracing::warn!(%peer, reason, suppressed, "directory: refused a request");
        }
    }

    pub(super) fn accept_failed(&mut self, error: &std::io::Error, now: Instant) {
        if let Some(suppressed) = self.accept_failed.admit(now) {
            tracing::warn!(%error, suppressed, "directory: could not accept a connection");
        }
    }
}

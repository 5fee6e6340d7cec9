//! How an engine behaves: every knob, its unit, its default.

use std::collections::BTreeMap;
use std::time::Duration;

use kvferry_wire::{EngineId, Instance, Rank};

use crate::error::EngineError;

/// An engine's configuration. Made by [`EngineConfig::new`] and changed field by field.
///
/// ```
/// use std::time::Duration;
/// use kvferry_engine::EngineConfig;
/// use kvferry_engine::wire::EngineId;
///
/// let mut config = EngineConfig::new(EngineId::new("prefill-0")?);
/// config.transfer_timeout = Duration::from_secs(5);
/// config.compatibility.insert("dtype".into(), "bfloat16".into());
/// config.validate()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct EngineConfig {
    /// The engine's id; stable over restarts.
    pub engine_id: EngineId,
    /// The worker's place in its engine.
    pub rank: Rank,
    /// The scheduler half's instance, where there is one; published in the description.
    pub instance: Option<Instance>,
    /// How long the progress thread polls after the last event before it sleeps. 0 to 1 s, default
    /// 20 microseconds.
    pub spin: Duration,
    /// Build a data context even where its GETs are emulated by active messages. For tests and
    /// people who insist; default false.
    pub allow_emulation: bool,
    /// Quiet time after which a peer is pinged. Default 500 ms.
    pub ping_interval: Duration,
    /// Silence after which a peer is suspect: its transfers fail as stalled. Default 2 s.
    pub suspect_after: Duration,
    /// Further silence after which a suspect peer is dead. Default 10 s.
    pub dead_after: Duration,
    /// Time for a peer to let go of a region that is given up here; then it is disconnected. Longer
    /// than `suspect_after`, so that a hiccup costs nothing, and shorter than the time after which a
    /// silent peer is dead anyway. Default 5 s.
    pub withdraw_timeout: Duration,
    /// Time for a greeting to be answered. Default 10 s.
    pub connect_timeout: Duration,
    /// Time without another attempt after an attempt to connect to a worker has failed; doubled with
    /// each failure in a row, up to a quarter shorter at random. 0 for none. Default 100 ms.
    pub reconnect_backoff_min: Duration,
    /// The longest such time. At least `reconnect_backoff_min`, to 1 day. Default 5 s.
    pub reconnect_backoff_max: Duration,
    /// Deadline of a transfer that names none. Default 30 s.
    pub transfer_timeout: Duration,
    /// Time for the progress thread to take a registration or the like. Default 10 s.
    pub command_timeout: Duration,
    /// Segments in flight to one peer, served lane and messages together. 1 to 1,024, default 8.
    pub send_window: usize,
    /// GETs in flight to one peer. 1 to 4,096, default 64.
    pub read_window: usize,
    /// Strings that both sides must agree on, such as model and cache layout. A greeting between
    /// engines whose values for one name differ is refused; names that only one side has are not
    /// compared.
    pub compatibility: BTreeMap<String, String>,
}

impl EngineConfig {
    /// The defaults, for an engine of this id.
    #[must_use]
    pub fn new(engine_id: EngineId) -> Self {
        Self {
            engine_id,
            rank: Rank::default(),
            instance: None,
            spin: Duration::from_micros(20),
            allow_emulation: false,
            ping_interval: Duration::from_millis(500),
            suspect_after: Duration::from_secs(2),
            dead_after: Duration::from_secs(10),
            withdraw_timeout: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(10),
            reconnect_backoff_min: Duration::from_millis(100),
            reconnect_backoff_max: Duration::from_secs(5),
            transfer_timeout: Duration::from_secs(30),
            command_timeout: Duration::from_secs(10),
            send_window: 8,
            read_window: 64,
            compatibility: BTreeMap::new(),
        }
    }

    /// Checks every range.
    ///
    /// # Errors
    /// [`EngineError::Config`] naming the first field that is out of range.
    pub fn validate(&self) -> Result<(), EngineError> {
        let bad = |field, value: String, expected| EngineError::Config {
            field,
            value,
            expected,
        };
        if self.spin > Duration::from_secs(1) {
            return Err(bad("spin", format!("{:?}", self.spin), "at most 1 s"));
        }
        for (field, value) in [
            ("ping_interval", self.ping_interval),
            ("suspect_after", self.suspect_after),
            ("dead_after", self.dead_after),
            ("withdraw_timeout", self.withdraw_timeout),
            ("connect_timeout", self.connect_timeout),
            ("transfer_timeout", self.transfer_timeout),
            ("command_timeout", self.command_timeout),
        ] {
            if value < Duration::from_millis(1) || value > Duration::from_secs(86_400) {
                return Err(bad(field, format!("{value:?}"), "1 ms to 1 day"));
            }
        }
        if self.suspect_after <= self.ping_interval {
            return Err(bad(
                "suspect_after",
                format!("{:?}", self.suspect_after),
                "more than ping_interval",
            ));
        }
        let (min, max) = (self.reconnect_backoff_min, self.reconnect_backoff_max);
        if max < min || max > Duration::from_secs(86_400) {
            return Err(bad(
                "reconnect_backoff_max",
                format!("{max:?}"),
                "reconnect_backoff_min to 1 day",
            ));
        }
        if !(1..=1024).contains(&self.send_window) {
            return Err(bad(
                "send_window",
                self.send_window.to_string(),
                "1 to 1024",
            ));
        }
        if !(1..=4096).contains(&self.read_window) {
            return Err(bad(
                "read_window",
                self.read_window.to_string(),
                "1 to 4096",
            ));
        }
        Ok(())
    }
}

/// The first name for which both sides have a value, and another one.
pub(crate) fn incompatibility(
    ours: &BTreeMap<String, String>,
    theirs: &BTreeMap<String, String>,
) -> Option<String> {
    ours.iter().find_map(|(name, value)| {
        let other = theirs.get(name).filter(|other| *other != value)?;
        Some(format!(
            "the engines differ in {name}: {value:?} here, {other:?} at the peer"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_out_of_range_are_named() {
        let good = EngineConfig::new(EngineId::new("e").unwrap());
        good.validate().unwrap();
        let mut bad = good.clone();
        bad.send_window = 0;
        assert_eq!(
            bad.validate().unwrap_err().to_string(),
            "configuration: send_window is 0, expected 1 to 1024"
        );
        let mut bad = good.clone();
        bad.suspect_after = bad.ping_interval;
        assert!(
            bad.validate()
                .unwrap_err()
                .to_string()
                .contains("suspect_after")
        );
        let mut bad = good;
        bad.transfer_timeout = Duration::ZERO;
        assert!(
            bad.validate()
                .unwrap_err()
                .to_string()
                .contains("transfer_timeout is 0ns")
        );
    }
}

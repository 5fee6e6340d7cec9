//! How long leases live and how much the table keeps for peers.

use std::time::Duration;

use thiserror::Error;

/// Longest time that a lease duration, `lease_max` or `early_hold` may be set to: seven days.
pub const MAX_LEASE: Duration = Duration::from_secs(7 * 24 * 60 * 60);

const SHORTEST: Duration = Duration::from_millis(1);

/// Limits of a [`LeaseTable`](super::LeaseTable).
///
/// ```
/// use std::time::Duration;
///
/// use kvferry_connector::lease::LeaseConfig;
///
/// let config = LeaseConfig { duration: Duration::from_secs(5), ..LeaseConfig::default() };
/// assert!(config.validate().is_ok());
///
/// let error = LeaseConfig { duration: Duration::ZERO, ..config }.validate().unwrap_err();
/// assert_eq!(error.to_string(), "lease setting `duration` is 0ns, it must be at least 1ms");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseConfig {
    /// Time from activation, or from the last renewal, to expiry; also how long the table
    /// remembers an ended lease. 1 ms to `lease_max`, 30 s by default.
    ///
    /// A consumer must stop waiting for the answer to a release within this time: afterwards the
    /// answer is [`UnknownEpoch`](kvferry_wire::lease::Verdict::UnknownEpoch), whatever it was.
    pub duration: Duration,
    /// Time after activation at which a lease expires however often it is renewed, and time
    /// after reservation at which one expires that was never activated. `duration` to
    /// [`MAX_LEASE`], 10 min by default.
    pub lease_max: Duration,
    /// Most readers that one lease may expect. 1 or more, 1,024 by default.
    pub max_consumers: u32,
    /// Most releases of one peer that wait for their lease to be issued; 0 keeps none.
    /// 1,024 by default.
    pub early_per_peer: usize,
    /// How far above the high-water mark the epoch of a waiting release may be. 65,536 by
    /// default.
    pub early_distance: u64,
    /// How long a release waits for its lease to be issued. 1 ms to [`MAX_LEASE`], 10 s by
    /// default.
    pub early_hold: Duration,
}

impl Default for LeaseConfig {
    fn default() -> Self {
        Self {
            duration: Duration::from_secs(30),
            lease_max: Duration::from_secs(600),
            max_consumers: 1_024,
            early_per_peer: 1_024,
            early_distance: 65_536,
            early_hold: Duration::from_secs(10),
        }
    }
}

impl LeaseConfig {
    /// Checks every setting against its range.
    ///
    /// # Errors
    /// The first setting that is out of range.
    pub fn validate(&self) -> Result<(), LeaseConfigError> {
        for (setting, value) in [
            ("duration", self.duration),
            ("lease_max", self.lease_max),
            ("early_hold", self.early_hold),
        ] {
            if value < SHORTEST {
                return Err(LeaseConfigError::TooShort {
                    setting,
                    value,
                    min: SHORTEST,
                });
            }
            if value > MAX_LEASE {
                return Err(LeaseConfigError::TooLong {
                    setting,
                    value,
                    max: MAX_LEASE,
                });
            }
        }
        if self.lease_max < self.duration {
            return Err(LeaseConfigError::TooShort {
                setting: "lease_max",
                value: self.lease_max,
                min: self.duration,
            });
        }
        if self.max_consumers == 0 {
            return Err(LeaseConfigError::NoConsumers);
        }
        Ok(())
    }
}

/// A lease setting that is out of range.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LeaseConfigError {
    /// A time is too short.
    #[error("lease setting `{setting}` is {value:?}, it must be at least {min:?}")]
    TooShort {
        /// Which one.
        setting: &'static str,
        /// What it was set to.
        value: Duration,
        /// Its minimum.
        min: Duration,
    },
    /// A time is too long.
    #[error("lease setting `{setting}` is {value:?}, it must be at most {max:?}")]
    TooLong {
        /// Which one.
        setting: &'static str,
        /// What it was set to.
        value: Duration,
        /// Its maximum.
        max: Duration,
    },
    /// No lease could ever be released.
    #[error("lease setting `max_consumers` is 0, it must be at least 1")]
    NoConsumers,
}

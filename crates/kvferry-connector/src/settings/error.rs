//! What is wrong with a setting.

use std::fmt;
use std::time::Duration;

use thiserror::Error;

/// Where a setting comes from.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    /// The configuration that vLLM was given.
    Json,
    /// The environment variable of this name.
    Variable(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Json => f.write_str("kv_connector_extra_config"),
            Self::Variable(name) => write!(f, "the environment variable {name}"),
        }
    }
}

/// Why settings were not taken.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SettingsError {
    /// A key that nobody reads.
    #[error("{connector}: the unknown key {key:?} in kv_connector_extra_config; {suggestion}")]
    UnknownKey {
        /// Whose configuration.
        connector: &'static str,
        /// The key.
        key: String,
        /// What may be meant, or what there is.
        suggestion: String,
    },
    /// A key of the other connector.
    #[error(
        "{connector}: the key {key:?} in kv_connector_extra_config is one of {owner}; move it to there, or \
         remove it"
    )]
    OtherConnector {
        /// Whose configuration.
        connector: &'static str,
        /// The key.
        key: String,
        /// Whose key.
        owner: &'static str,
    },
    /// A value of the wrong type, or out of range.
    #[error("{connector}: `{key}`, from {origin}, is {found}, expected {expected}")]
    Value {
        /// Whose configuration.
        connector: &'static str,
        /// The key.
        key: &'static str,
        /// Where the value comes from.
        origin: Origin,
        /// The value, as JSON; the beginning of a long one.
        found: String,
        /// What would do.
        expected: String,
    },
    /// A key that cannot be left out.
    #[error(
        "{connector}: `{key}` is needed; set it in kv_connector_extra_config or in the environment"
    )]
    Missing {
        /// Whose configuration.
        connector: &'static str,
        /// The key.
        key: &'static str,
    },
    /// A key that means nothing without another.
    #[error("{connector}: `{key}` is set without `{needed}`; set that too, or remove it")]
    Needs {
        /// Whose configuration.
        connector: &'static str,
        /// The key.
        key: &'static str,
        /// The other.
        needed: &'static str,
    },
    /// A lease would end before it is due for a renewal.
    #[error(
        "KvferryConnector: `lease_duration` is {duration:?}, more than `lease_max`, {max:?}; lower it or raise \
         `lease_max`"
    )]
    LeaseTimes {
        /// The one.
        duration: Duration,
        /// The other.
        max: Duration,
    },
}

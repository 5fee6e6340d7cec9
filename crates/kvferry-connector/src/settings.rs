//! The settings of the connectors as vLLM's users write them: `kv_connector_extra_config`, and environment
//! variables over it.
//!
//! Responsible for reading them, for saying what is wrong with one, and for handing them to the parts that
//! they are meant for. Not for what a setting does, nor for defaults: these are the parts' own. What
//! [`Settings`] and [`StorageOnly`] hold is in range, so that no part refuses it.
//!
//! A number, a time or a switch may also be written as a text (`"30"`, `"true"`). Times are seconds, fractions
//! allowed. `null` means absent. `KVFERRY_` with the key in capitals is the variable that overrides a key,
//! whatever its value in the configuration is; an empty variable is none.

use std::path::PathBuf;
use std::time::Duration;

use kvferry_engine::{EngineConfig, LaneChoice};
use kvferry_wire::EngineId;

use crate::contract::{Params, Role};
use crate::lease::{BorrowConfig, LeaseConfig};
use crate::nearest::nearest;
use crate::remote::RemoteConfig;
use crate::storage::StorageSettings;

mod error;
mod keys;
mod reading;
#[cfg(test)]
mod tests;

pub use error::{Origin, SettingsError};

use keys::{CONNECTOR, Draft, KVFERRY, STORAGE, STORAGE_ONLY};

/// Which UCX is loaded.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum UcxChoice {
    /// `system`: that of the system's library path.
    System,
    /// `libucx`: that of the Python package of this name.
    Libucx,
    /// The one at this path.
    Path(PathBuf),
}

/// The settings of `KvferryConnector`.
///
/// ```
/// use kvferry_connector::settings::Settings;
///
/// let read = |config: serde_json::Value| {
///     Settings::from_json(config.as_object().unwrap(), |_| None)
/// };
/// let settings = read(serde_json::json!({"lease_duration": "2.5", "workers": 4})).unwrap();
/// assert_eq!((settings.lease_duration.as_millis(), settings.workers), (2_500, 4));
///
/// let error = read(serde_json::json!({"leese_duration": 2.5})).unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "KvferryConnector: the unknown key \"leese_duration\" in kv_connector_extra_config; did you mean \
///      \"lease_duration\"?"
/// );
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// How long a lease lives without a renewal; at most `lease_max`.
    pub lease_duration: Duration,
    /// How long a lease lives at most.
    pub lease_max: Duration,
    /// The host or address at which the directory listens.
    pub side_channel_host: String,
    /// Its port; 0 takes any free one.
    pub side_channel_port: u16,
    /// The host that consumers are told; `None` for the address that is listened at.
    pub advertise_host: Option<String>,
    /// How bytes move.
    pub lane: LaneChoice,
    /// Whether peers without a real one-sided read are refused.
    pub require_rdma: bool,
    /// UCX's network devices.
    pub devices: Option<String>,
    /// UCX's transports.
    pub transports: Option<String>,
    /// Copy threads of a rank.
    pub workers: usize,
    /// Fewer remote tokens than this are computed.
    pub recompute_threshold_tokens: u32,
    /// Loads of a rank that run at the same time.
    pub max_concurrent_loads: usize,
    /// Time for the blocks of a load to arrive.
    pub read_timeout: Duration,
    /// Whether checksums of what was read are compared with the producer's.
    pub verify: bool,
    /// Time for finding and greeting a peer.
    pub connect_timeout: Duration,
    /// Time for a release to be answered.
    pub confirm_timeout: Duration,
    /// How long leases are waited for at the end.
    pub shutdown_timeout: Duration,
    /// Where blocks are saved and loaded as well.
    pub shared_storage: Option<StorageSettings>,
    /// Which UCX is loaded; `None` leaves it to the plugin.
    pub ucx: Option<UcxChoice>,
}

/// The parts' own defaults; a test compares.
impl Default for Settings {
    fn default() -> Self {
        let (lease, borrow) = (LeaseConfig::default(), BorrowConfig::default());
        Self {
            lease_duration: lease.duration,
            lease_max: lease.lease_max,
            side_channel_host: "127.0.0.1".to_owned(),
            side_channel_port: 0,
            advertise_host: None,
            lane: LaneChoice::Auto,
            require_rdma: false,
            devices: None,
            transports: None,
            workers: 2,
            recompute_threshold_tokens: 2,
            max_concurrent_loads: 32,
            read_timeout: Duration::from_secs(10),
            verify: false,
            connect_timeout: Duration::from_secs(5),
            confirm_timeout: borrow.confirm_timeout,
            shutdown_timeout: Duration::from_secs(3),
            shared_storage: None,
            ucx: None,
        }
    }
}

impl Settings {
    /// Reads a `kv_connector_extra_config`. `env` looks a variable up.
    ///
    /// # Errors
    /// The first thing that is wrong: an unknown key, one of the other connector, a value of the wrong type or
    /// out of range, times that contradict one another.
    pub fn from_json(
        extra: &Params,
        env: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, SettingsError> {
        let draft: Draft = reading::read(CONNECTOR, KVFERRY, STORAGE, extra, &env)?;
        let Draft { settings, storage } = draft;
        if settings.lease_max < settings.lease_duration {
            return Err(SettingsError::LeaseTimes {
                duration: settings.lease_duration,
                max: settings.lease_max,
            });
        }
        // A size without a directory may be a variable that is meant for the storage connector.
        let has_directory = !storage.path.as_os_str().is_empty();
        if !has_directory && extra.get(keys::MAX_BYTES).is_some_and(|it| !it.is_null()) {
            return Err(SettingsError::Needs {
                connector: CONNECTOR,
                key: keys::MAX_BYTES,
                needed: keys::PATH,
            });
        }
        Ok(Self {
            shared_storage: has_directory.then_some(storage),
            ..settings
        })
    }

    /// What `RemotePrefill` is set to, in an engine of this id, role and number of ranks, with blocks of that many
    /// tokens per cache group.
    #[must_use]
    pub fn remote(
        &self,
        engine: EngineId,
        role: Role,
        ranks: u32,
        block_tokens: Vec<u32>,
    ) -> RemoteConfig {
        RemoteConfig {
            role,
            ranks,
            listen_host: self.side_channel_host.clone(),
            listen_port: self.side_channel_port,
            advertise_host: self.advertise_host.clone(),
            lease: LeaseConfig {
                duration: self.lease_duration,
                lease_max: self.lease_max,
                ..LeaseConfig::default()
            },
            borrow: BorrowConfig {
                confirm_timeout: self.confirm_timeout,
                lease_max: self.lease_max,
                ..BorrowConfig::default()
            },
            recompute_threshold_tokens: self.recompute_threshold_tokens,
            max_concurrent_loads: self.max_concurrent_loads,
            read_timeout: self.read_timeout,
            verify: self.verify,
            connect_timeout: self.connect_timeout,
            lane: self.lane,
            ..RemoteConfig::new(engine, block_tokens)
        }
    }

    /// What the engine of a rank is set to.
    #[must_use]
    pub fn engine(&self, id: EngineId) -> EngineConfig {
        let mut config = EngineConfig::new(id);
        config.copy_threads = self.workers;
        config.transports = self.transports.clone();
        config.net_devices = self.devices.clone();
        config.require_rdma = self.require_rdma;
        config
    }

    /// What `SharedStorage` is set to, if blocks are saved as well.
    #[must_use]
    pub fn storage(&self) -> Option<StorageSettings> {
        self.shared_storage.clone()
    }

    /// What is set, as `key=value`, with the variable that it comes from if it is not from the configuration.
    pub fn chosen(extra: &Params, env: impl Fn(&str) -> Option<String>) -> Vec<String> {
        reading::chosen(KVFERRY, extra, &env)
    }

    /// The keys, each with its default and what it does, in which range.
    pub fn describe() -> impl Iterator<Item = (&'static str, &'static str, String)> {
        reading::describe(KVFERRY)
    }
}

/// The settings of `KvferryStorageConnector`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StorageOnly {
    /// What `SharedStorage` is set to; its directory is not empty.
    pub storage: StorageSettings,
}

impl StorageOnly {
    /// Reads a `kv_connector_extra_config`. `env` looks a variable up.
    ///
    /// # Errors
    /// The first thing that is wrong, as for [`Settings::from_json`], or a missing directory.
    pub fn from_json(
        extra: &Params,
        env: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, SettingsError> {
        let Draft { storage, .. } = reading::read(STORAGE_ONLY, STORAGE, KVFERRY, extra, &env)?;
        if storage.path.as_os_str().is_empty() {
            return Err(SettingsError::Missing {
                connector: STORAGE_ONLY,
                key: keys::PATH,
            });
        }
        Ok(Self { storage })
    }

    /// What is set, as [`Settings::chosen`] has it.
    pub fn chosen(extra: &Params, env: impl Fn(&str) -> Option<String>) -> Vec<String> {
        reading::chosen(STORAGE, extra, &env)
    }

    /// The keys, each with its default and what it does, in which range.
    pub fn describe() -> impl Iterator<Item = (&'static str, &'static str, String)> {
        reading::describe(STORAGE)
    }
}

/// Those of these environment variables that look like an override and are none, each with the one that may be
/// meant.
///
/// ```
/// use kvferry_connector::settings::misspelt;
///
/// let there = ["KVFERRY_LANE", "KVFERRY_LEASE_DURATOIN", "KVFERRY_LOG", "HOME"];
/// let found: Vec<_> = misspelt(there.into_iter()).collect();
/// assert_eq!(found, [("KVFERRY_LEASE_DURATOIN", "KVFERRY_LEASE_DURATION".to_owned())]);
/// ```
pub fn misspelt<'a>(
    names: impl Iterator<Item = &'a str>,
) -> impl Iterator<Item = (&'a str, String)> {
    let keys = || KVFERRY.iter().chain(STORAGE).map(|key| key.name);
    names.filter_map(move |name| {
        let key = name.strip_prefix(reading::PREFIX)?.to_lowercase();
        if keys().any(|known| known == key) {
            return None;
        }
        nearest(&key, keys()).map(|known| (name, reading::variable(known)))
    })
}

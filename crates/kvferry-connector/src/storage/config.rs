//! What a shared storage is set to.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::contract::{Reach, Role};

/// Most I/O threads of a rank.
pub const MAX_IO_THREADS: usize = 64;
/// Most cache groups.
pub const MAX_GROUPS: usize = 64;
/// Longest of the times that can be set.
pub const MAX_TIME: Duration = Duration::from_secs(60 * 60);

/// What a user sets: the `kv_connector_extra_config` of a `SharedStorage`.
///
/// ```
/// use kvferry_connector::storage::StorageSettings;
///
/// let settings: StorageSettings =
///     serde_json::from_str(r#"{"path": "/mnt/kv", "max_bytes": 1073741824}"#).unwrap();
/// assert_eq!(settings.io_threads, 4);
/// assert!(serde_json::from_str::<StorageSettings>(r#"{"path": "/mnt/kv", "max_byte": 1}"#).is_err());
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StorageSettings {
    /// The directory, which any number of engines may share. vLLM's `shared_storage_path` is taken
    /// too.
    #[serde(alias = "shared_storage_path")]
    pub path: PathBuf,
    /// Most bytes of all files in the directory, of all engines and models. At least 1; a block with
    /// its header has to fit. 64 GiB by default.
    #[serde(default = "max_bytes")]
    pub max_bytes: u64,
    /// Threads of each rank that read and write files, 1 to [`MAX_IO_THREADS`]; as many blocks are
    /// loaded at a time. 4 by default.
    #[serde(default = "io_threads")]
    pub io_threads: usize,
    /// Most blocks of a rank that wait to be saved; further ones are not saved. At least 1; 4,096 by
    /// default.
    #[serde(default = "max_pending_saves")]
    pub max_pending_saves: usize,
    /// How long a request waits to hear which of its blocks are on disk, in milliseconds, 1 to one
    /// hour. 500 by default.
    #[serde(default = "lookup_timeout_ms")]
    pub lookup_timeout_ms: u64,
    /// How long a load or a save may take, in milliseconds, 1 to one hour; a load fails then, a save
    /// is given up. 30,000 by default.
    #[serde(default = "io_timeout_ms")]
    pub io_timeout_ms: u64,
}

const fn max_bytes() -> u64 {
    64 << 30
}

const fn io_threads() -> usize {
    4
}

const fn max_pending_saves() -> usize {
    4_096
}

const fn lookup_timeout_ms() -> u64 {
    500
}

const fn io_timeout_ms() -> u64 {
    30_000
}

impl StorageSettings {
    /// The defaults, at this directory.
    #[must_use]
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            max_bytes: max_bytes(),
            io_threads: io_threads(),
            max_pending_saves: max_pending_saves(),
            lookup_timeout_ms: lookup_timeout_ms(),
            io_timeout_ms: io_timeout_ms(),
        }
    }
}

/// A shared storage as an engine uses it: the settings, and what its blocks are.
///
/// Engines find one another's blocks if model, layout, block sizes and number of ranks are equal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StorageConfig {
    /// What the user sets.
    pub settings: StorageSettings,
    /// The model, with its revision if that can change under the name. Not empty.
    pub model: String,
    /// Layout and data type of the blocks, as the engine words them. Not empty.
    pub layout: String,
    /// Tokens of a block, per cache group; 1 to [`MAX_GROUPS`] groups, each at least 1.
    pub block_tokens: Vec<u32>,
    /// How far back each group's attention reaches; groups beyond its end reach to the first token.
    pub reach: Vec<Reach>,
    /// Whether it saves, loads, or both.
    pub role: Role,
    /// Ranks that hold a part of every block, at least 1.
    pub world: u32,
    /// Whether the groups' blocks are out of one pool, as in vLLM, so that an id means the same memory
    /// in every group; otherwise each group counts its own blocks.
    pub one_pool: bool,
}

impl StorageConfig {
    /// Checks every value against its range.
    ///
    /// # Errors
    /// The first that is out of range.
    pub fn validate(&self) -> Result<(), StorageConfigError> {
        let settings = &self.settings;
        for (setting, empty) in [
            ("path", settings.path.as_os_str().is_empty()),
            ("model", self.model.is_empty()),
            ("layout", self.layout.is_empty()),
        ] {
            if empty {
                return Err(StorageConfigError::Empty { setting });
            }
        }
        let millis = MAX_TIME.as_millis() as u64;
        for (setting, value, max) in [
            ("max_bytes", settings.max_bytes, u64::MAX),
            (
                "io_threads",
                settings.io_threads as u64,
                MAX_IO_THREADS as u64,
            ),
            (
                "max_pending_saves",
                settings.max_pending_saves as u64,
                u64::MAX,
            ),
            ("lookup_timeout_ms", settings.lookup_timeout_ms, millis),
            ("io_timeout_ms", settings.io_timeout_ms, millis),
            ("world", self.world.into(), u32::MAX.into()),
            (
                "number of cache groups",
                self.block_tokens.len() as u64,
                MAX_GROUPS as u64,
            ),
        ] {
            if value < 1 || value > max {
                return Err(StorageConfigError::OutOfRange {
                    setting,
                    value,
                    max,
                });
            }
        }
        for (group, &tokens) in self.block_tokens.iter().enumerate() {
            if tokens == 0 {
                return Err(StorageConfigError::BlockTokens { group });
            }
        }
        if self.reach.len() > self.block_tokens.len() || self.reach.iter().any(|it| it.is_zero()) {
            return Err(StorageConfigError::Reach {
                reach: self.reach.clone(),
                groups: self.block_tokens.len(),
            });
        }
        if self.unit_checked().is_none() {
            return Err(StorageConfigError::BlockSizes {
                block_tokens: self.block_tokens.clone(),
            });
        }
        Ok(())
    }

    /// The least number of tokens that is whole blocks in every group.
    pub(super) fn unit(&self) -> u32 {
        self.unit_checked().unwrap_or(u32::MAX)
    }

    fn unit_checked(&self) -> Option<u32> {
        self.block_tokens.iter().try_fold(1_u32, |unit, &tokens| {
            (unit / gcd(unit, tokens)).checked_mul(tokens)
        })
    }

    pub(super) const fn io_timeout(&self) -> Duration {
        Duration::from_millis(self.settings.io_timeout_ms)
    }

    pub(super) const fn lookup_timeout(&self) -> Duration {
        Duration::from_millis(self.settings.lookup_timeout_ms)
    }
}

const fn gcd(mut a: u32, mut b: u32) -> u32 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// A value of a [`StorageConfig`] that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum StorageConfigError {
    /// A text is missing.
    #[error("shared storage: `{setting}` is empty; set it")]
    Empty {
        /// Which one.
        setting: &'static str,
    },
    /// A number is out of range.
    #[error("shared storage: `{setting}` is {value}, it must be 1 to {max}")]
    OutOfRange {
        /// Which one.
        setting: &'static str,
        /// What it was set to.
        value: u64,
        /// Its maximum.
        max: u64,
    },
    /// A cache group has blocks of no tokens.
    #[error(
        "shared storage: blocks of cache group {group} have 0 tokens, they must have at least 1"
    )]
    BlockTokens {
        /// The group.
        group: usize,
    },
    /// A reach of no group, or over no token.
    #[error(
        "shared storage: the groups' `reach` is {reach:?}, expected at most one for each of {groups} groups, none of \
         0 tokens"
    )]
    Reach {
        /// What was given.
        reach: Vec<Reach>,
        /// How many groups there are.
        groups: usize,
    },
    /// There is no reasonable number of tokens that is whole blocks in every group.
    #[error(
        "shared storage: the least common multiple of the groups' block sizes {block_tokens:?} is more \
         than 4294967295 tokens"
    )]
    BlockSizes {
        /// The sizes.
        block_tokens: Vec<u32>,
    },
    /// A rank that the world does not have.
    #[error("shared storage: rank {rank} of {world} ranks; ranks count from 0")]
    Rank {
        /// The rank.
        rank: u32,
        /// How many there are.
        world: u32,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> StorageConfig {
        StorageConfig {
            settings: StorageSettings::at("/tmp/kv"),
            model: "m".to_owned(),
            layout: "LBHNC float32".to_owned(),
            block_tokens: vec![16, 24],
            reach: Vec::new(),
            role: Role::Both,
            world: 1,
            one_pool: true,
        }
    }

    #[test]
    fn a_good_configuration_passes_and_its_unit_is_whole_blocks_in_every_group() {
        assert_eq!(config().validate(), Ok(()));
        assert_eq!(config().unit(), 48);
    }

    #[test]
    fn what_is_out_of_range_is_named_with_its_value() {
        let text = |change: fn(&mut StorageConfig)| {
            let mut config = config();
            change(&mut config);
            config.validate().unwrap_err().to_string()
        };
        assert_eq!(
            text(|config| config.settings.io_threads = 65),
            "shared storage: `io_threads` is 65, it must be 1 to 64"
        );
        assert_eq!(
            text(|config| config.model.clear()),
            "shared storage: `model` is empty; set it"
        );
        assert_eq!(
            text(|config| config.block_tokens[1] = 0),
            "shared storage: blocks of cache group 1 have 0 tokens, they must have at least 1"
        );
        for change in [
            (|config| config.settings.max_bytes = 0) as fn(&mut StorageConfig),
            |config| config.settings.io_timeout_ms = 3_600_001,
            |config| config.settings.lookup_timeout_ms = 0,
            |config| config.settings.max_pending_saves = 0,
            |config| config.block_tokens.clear(),
            |config| config.world = 0,
            |config| config.block_tokens = vec![u32::MAX, u32::MAX - 1],
            |config| config.settings.path.clear(),
            |config| config.layout.clear(),
            |config| config.reach = vec![Reach::All, Reach::Window(0)],
            |config| config.reach = vec![Reach::All; 3],
        ] {
            assert!(!text(change).is_empty());
        }
    }

    #[test]
    fn settings_are_read_from_json_with_defaults_and_unknown_keys_are_named() {
        let read = |text| serde_json::from_str::<StorageSettings>(text);
        assert_eq!(
            read(r#"{"shared_storage_path": "/tmp/kv"}"#).unwrap(),
            StorageSettings::at("/tmp/kv")
        );
        let error = read(r#"{"path": "/tmp/kv", "threads": 3}"#).unwrap_err();
        assert!(error.to_string().contains("threads"), "{error}");
        assert!(read("{}").is_err());
    }
}

//! What Python says of an engine, and the settings that its user wrote.

use std::collections::BTreeMap;
use std::path::PathBuf;

use kvferry_connector::contract::{Params, Role};
use kvferry_connector::remote::{Reach, RemoteConfig};
use kvferry_connector::settings::{Settings, StorageOnly, UcxChoice, misspelt};
use kvferry_wire::EngineId;
use pyo3::prelude::*;
use serde::Deserialize;

use crate::configuration;

/// Which connector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub(crate) enum Kind {
    /// `RemotePrefill`, with `SharedStorage` behind it if a directory is set.
    #[serde(rename = "KvferryConnector")]
    Remote,
    /// `SharedStorage` alone.
    #[serde(rename = "KvferryStorageConnector")]
    Storage,
}

/// An engine, as its halves are told of it. Both halves of an engine get the same.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Setup {
    pub(crate) connector: Kind,
    /// vLLM's engine id; unique among all that reach one another.
    pub(crate) engine_id: String,
    /// vLLM's `kv_role`.
    pub(crate) role: String,
    /// All worker ranks: tensor-parallel times pipeline-parallel ones.
    pub(crate) ranks: u32,
    /// Tokens of a block, per cache group.
    pub(crate) block_tokens: Vec<u32>,
    /// How far back attention reaches, per cache group.
    pub(crate) reach: Vec<Reach>,
    /// The model, with its revision.
    pub(crate) model: String,
    /// Layout and data type of the blocks.
    pub(crate) layout: String,
    /// What two engines must have in common, by name.
    pub(crate) compatibility: BTreeMap<String, String>,
    /// The user's `kv_connector_extra_config`.
    pub(crate) extra: Params,
    /// This engine's number among those that share a configuration: added to a fixed port.
    pub(crate) port_offset: u16,
    /// Where UCX is, if it was chosen.
    pub(crate) ucx_library: Option<PathBuf>,
}

impl Setup {
    pub(crate) fn parse(text: &str) -> PyResult<Self> {
        serde_json::from_str(text).map_err(|error| configuration(format!("setup: {error}")))
    }

    pub(crate) fn engine_id(&self) -> PyResult<EngineId> {
        EngineId::new(&*self.engine_id)
            .map_err(|error| configuration(format!("engine_id {:?}: {error}", self.engine_id)))
    }

    pub(crate) fn role(&self) -> PyResult<Role> {
        let role = Role::ALL.into_iter().find(|role| role.name() == self.role);
        role.ok_or_else(|| {
            let known = Role::ALL.map(Role::name).join(", ");
            configuration(format!(
                "kv_role is {:?}, expected one of {known}",
                self.role
            ))
        })
    }

    pub(crate) fn settings(&self) -> PyResult<Settings> {
        let mut settings = Settings::from_json(&self.extra, variable).map_err(configuration)?;
        if settings.side_channel_port != 0 {
            let port = settings.side_channel_port.checked_add(self.port_offset);
            settings.side_channel_port = port.ok_or_else(|| {
                let (port, offset) = (settings.side_channel_port, self.port_offset);
                configuration(format!(
                    "side_channel_port {port} leaves no room for data-parallel rank {offset}; choose a lower one, or 0"
                ))
            })?;
        }
        Ok(settings)
    }

    pub(crate) fn remote(&self, settings: &Settings) -> PyResult<RemoteConfig> {
        let blocks = self.block_tokens.clone();
        let mut config = settings.remote(self.engine_id()?, self.role()?, self.ranks, blocks);
        config.reach = self.reach.clone();
        Ok(config)
    }

    pub(crate) fn storage_only(&self) -> PyResult<StorageOnly> {
        StorageOnly::from_json(&self.extra, variable).map_err(configuration)
    }
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// What Python needs of a connector's settings: what is set, for the log; whether blocks are saved to a directory; and
/// which UCX is asked for (`"system"`, `"libucx"` or a path).
type Read = (Vec<String>, bool, Option<String>);

/// Reads a `kv_connector_extra_config`, as JSON, and the environment, and raises what is wrong.
#[pyfunction]
pub(crate) fn read_settings(connector: &str, extra: &str) -> PyResult<Read> {
    let extra: Params = serde_json::from_str(extra)
        .map_err(|error| configuration(format!("kv_connector_extra_config: {error}")))?;
    if connector != "KvferryConnector" {
        StorageOnly::from_json(&extra, variable).map_err(configuration)?;
        return Ok((StorageOnly::chosen(&extra, variable), true, None));
    }
    let settings = Settings::from_json(&extra, variable).map_err(configuration)?;
    let ucx = settings.ucx.map(|choice| match choice {
        UcxChoice::System => "system".to_owned(),
        UcxChoice::Libucx => "libucx".to_owned(),
        UcxChoice::Path(path) => path.display().to_string(),
    });
    let chosen = Settings::chosen(&extra, variable);
    Ok((chosen, settings.shared_storage.is_some(), ucx))
}

/// Environment variables that look like settings and are none, each with the one that may be meant.
#[pyfunction]
pub(crate) fn misspelt_variables(names: Vec<String>) -> Vec<(String, String)> {
    let found = misspelt(names.iter().map(String::as_str));
    found
        .map(|(name, meant)| (name.to_owned(), meant))
        .collect()
}

/// The keys of a connector: name, default, and what it does.
#[pyfunction]
pub(crate) fn describe_settings(connector: &str) -> Vec<(&'static str, &'static str, String)> {
    match connector {
        "KvferryConnector" => Settings::describe().collect(),
        _ => StorageOnly::describe().collect(),
    }
}

/// The files of all copies of UCX in this process.
#[pyfunction]
pub(crate) fn ucx_copies() -> Vec<PathBuf> {
    kvferry_engine::ucx_copies()
}

//! The list of children, in the form that vLLM writes it.

use std::fmt;

use serde_json::Value;
use thiserror::Error;

use super::{ComposeError, MultiScheduler, MultiWorker};
use crate::contract::{Params, Role, SchedulerConnector, WorkerConnector};
use crate::nearest::suggestion;

/// Most children.
const MAX_CHILDREN: usize = 16;

/// Keys that vLLM's configuration of a connector has and that mean nothing for a child of ours.
const IGNORED: [&str; 9] = [
    "enable_permute_local_kv",
    "kv_buffer_device",
    "kv_buffer_size",
    "kv_connector_module_path",
    "kv_ip",
    "kv_load_failure_policy",
    "kv_parallel_size",
    "kv_port",
    "kv_rank",
];
const NAME: &str = "kv_connector";
const ROLE: &str = "kv_role";
const EXTRA: &str = "kv_connector_extra_config";
const ENGINE_ID: &str = "engine_id";

/// The connectors that there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ConnectorKind {
    /// [`RemotePrefill`](crate::remote).
    RemotePrefill,
    /// [`SharedStorage`](crate::storage).
    SharedStorage,
}

impl ConnectorKind {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::RemotePrefill, Self::SharedStorage];

    /// What it is called in `kv_connector`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::RemotePrefill => "RemotePrefill",
            Self::SharedStorage => "SharedStorage",
        }
    }
}

impl fmt::Display for ConnectorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One child.
#[derive(Clone, Debug, PartialEq)]
pub struct ChildConfig {
    /// Which connector.
    pub kind: ConnectorKind,
    /// What the engine is for it: each child has its own, which `RemotePrefill` and `SharedStorage` keep to.
    pub role: Role,
    /// Its own settings; empty if there are none. Checked by whoever makes the child.
    pub extra: Params,
}

/// The children, in the order in which they are asked.
///
/// ```
/// use kvferry_connector::multi::{ConnectorKind, MultiConfig};
///
/// let config = MultiConfig::from_json(&serde_json::json!({"connectors": [
///     {"kv_connector": "RemotePrefill", "kv_role": "kv_both"},
///     {"kv_connector": "SharedStorage", "kv_role": "kv_both",
///      "kv_connector_extra_config": {"path": "/mnt/kv"}},
/// ]})).unwrap();
/// assert_eq!(config.children[1].kind, ConnectorKind::SharedStorage);
///
/// let error = MultiConfig::from_json(&serde_json::json!({"connectors": [
///     {"kv_connector": "SharedStorag", "kv_role": "kv_both"},
/// ]})).unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "connectors[0]: `kv_connector` is \"SharedStorag\", which is unknown; did you mean \"SharedStorage\"?"
/// );
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct MultiConfig {
    /// At least one, at most 16.
    pub children: Vec<ChildConfig>,
}

/// What is wrong with a configuration.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum MultiConfigError {
    /// No list.
    #[error(
        "a MultiConnector needs `connectors`, a list of 1 to {MAX_CHILDREN} connectors; {found}"
    )]
    Connectors {
        /// What was there.
        found: String,
    },
    /// A key that nobody reads.
    #[error("{place} has the unknown key {key:?}; {suggestion}")]
    UnknownKey {
        /// Whose.
        place: String,
        /// The key.
        key: String,
        /// The one that may be meant, or those that there are.
        suggestion: String,
    },
    /// A name that there is not.
    #[error("connectors[{child}]: `{key}` is {found:?}, which is unknown; {suggestion}")]
    UnknownName {
        /// The child's place.
        child: usize,
        /// `kv_connector` or `kv_role`.
        key: &'static str,
        /// What it was set to.
        found: String,
        /// The one that may be meant, or those that there are.
        suggestion: String,
    },
    /// A value of another type, or none.
    #[error("connectors[{child}]: `{key}` must be {expected}, it is {found}")]
    Type {
        /// The child's place.
        child: usize,
        /// The key.
        key: &'static str,
        /// What it must be.
        expected: &'static str,
        /// What it is.
        found: &'static str,
    },
    /// vLLM refuses it in a child as well.
    #[error(
        "connectors[{child}]: `engine_id` belongs to the MultiConnector, not to a child; remove it"
    )]
    EngineId {
        /// The child's place.
        child: usize,
    },
}

impl MultiConfig {
    /// Reads the `kv_connector_extra_config` of a MultiConnector.
    ///
    /// # Errors
    /// The first thing that is wrong, with its place, and the nearest name for one that is unknown.
    pub fn from_json(extra_config: &Value) -> Result<Self, MultiConfigError> {
        let list = extra_config.get("connectors");
        let found = |found: String| MultiConfigError::Connectors { found };
        let list = match list {
            None => return Err(found("it has none".to_owned())),
            Some(Value::Array(list)) if (1..=MAX_CHILDREN).contains(&list.len()) => list,
            Some(Value::Array(list)) => return Err(found(format!("it has {}", list.len()))),
            Some(other) => return Err(found(format!("it is {}", type_name(other)))),
        };
        if let Some(key) = extra_config
            .as_object()
            .into_iter()
            .flat_map(Params::keys)
            .find(|key| *key != "connectors")
        {
            return Err(MultiConfigError::UnknownKey {
                place: "the MultiConnector's extra config".to_owned(),
                key: key.clone(),
                suggestion: suggestion(key, std::iter::once("connectors")),
            });
        }
        let children = list
            .iter()
            .enumerate()
            .map(|(index, child)| read_child(index, child));
        Ok(Self {
            children: children.collect::<Result<_, _>>()?,
        })
    }

    /// Makes the scheduler halves of the children, and composes them. `ranks` is how many ranks
    /// report.
    ///
    /// # Errors
    /// The factory's, with the child; children that do not go together.
    pub fn scheduler<F: ChildFactory>(
        &self,
        factory: &F,
        ranks: u32,
    ) -> Result<MultiScheduler, BuildError<F::Error>> {
        let children = self.each(|index, child| factory.scheduler(index, child))?;
        Ok(MultiScheduler::new(children, ranks)?)
    }

    /// Makes this rank's worker halves of the children, and composes them.
    ///
    /// # Errors
    /// The factory's, with the child.
    pub fn worker<F: ChildFactory>(
        &self,
        factory: &F,
    ) -> Result<MultiWorker, BuildError<F::Error>> {
        let children = self.each(|index, child| factory.worker(index, child))?;
        Ok(MultiWorker::new(children))
    }

    fn each<T, E>(
        &self,
        make: impl Fn(usize, &ChildConfig) -> Result<T, E>,
    ) -> Result<Vec<T>, BuildError<E>> {
        let one = |(index, child): (usize, &ChildConfig)| {
            make(index, child).map_err(|source| BuildError::Child {
                index,
                kind: child.kind,
                source,
            })
        };
        self.children.iter().enumerate().map(one).collect()
    }
}

/// Makes children: whoever drives a MultiConnector knows the engine, its ranks and its cache.
pub trait ChildFactory {
    /// What can go wrong.
    type Error;

    /// The scheduler half of the child at this place.
    ///
    /// # Errors
    /// Settings that are wrong, resources that there are not.
    fn scheduler(
        &self,
        index: usize,
        child: &ChildConfig,
    ) -> Result<Box<dyn SchedulerConnector>, Self::Error>;

    /// This rank's worker half of the child at this place.
    ///
    /// # Errors
    /// Settings that are wrong, resources that there are not.
    fn worker(
        &self,
        index: usize,
        child: &ChildConfig,
    ) -> Result<Box<dyn WorkerConnector>, Self::Error>;
}

/// Why the children of a MultiConnector could not be made.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BuildError<E> {
    /// One of them.
    #[error("connectors[{index}] ({kind}): {source}")]
    Child {
        /// Its place.
        index: usize,
        /// Which connector.
        kind: ConnectorKind,
        /// The factory's answer.
        source: E,
    },
    /// They do not go together.
    #[error(transparent)]
    Compose(#[from] ComposeError),
}

fn read_child(child: usize, value: &Value) -> Result<ChildConfig, MultiConfigError> {
    let wrong = |key, expected, found| MultiConfigError::Type {
        child,
        key,
        expected,
        found,
    };
    let Value::Object(object) = value else {
        return Err(wrong("connectors", "a list of objects", type_name(value)));
    };
    for key in object.keys() {
        let known = [NAME, ROLE, EXTRA];
        if key == ENGINE_ID && !object[key].is_null() {
            return Err(MultiConfigError::EngineId { child });
        }
        if key != ENGINE_ID && !known.contains(&key.as_str()) && !IGNORED.contains(&key.as_str()) {
            return Err(MultiConfigError::UnknownKey {
                place: format!("connectors[{child}]"),
                key: key.clone(),
                suggestion: suggestion(key, known.into_iter().chain(IGNORED)),
            });
        }
    }
    let text = |key| match object.get(key) {
        Some(Value::String(text)) => Ok(text.as_str()),
        other => Err(wrong(key, "a text", other.map_or("missing", type_name))),
    };
    let name = text(NAME)?;
    let kind = ConnectorKind::ALL
        .into_iter()
        .find(|kind| kind.name() == name);
    let unknown = |key, found: &str, suggestion| MultiConfigError::UnknownName {
        child,
        key,
        found: found.to_owned(),
        suggestion,
    };
    let kind = kind.ok_or_else(|| {
        unknown(
            NAME,
            name,
            suggestion(
                name,
                ConnectorKind::ALL.into_iter().map(ConnectorKind::name),
            ),
        )
    })?;
    let role_name = text(ROLE)?;
    let role = Role::ALL.into_iter().find(|role| role.name() == role_name);
    let role = role.ok_or_else(|| {
        unknown(
            ROLE,
            role_name,
            suggestion(role_name, Role::ALL.into_iter().map(Role::name)),
        )
    })?;
    let extra = match object.get(EXTRA) {
        None | Some(Value::Null) => Params::new(),
        Some(Value::Object(extra)) => extra.clone(),
        Some(other) => return Err(wrong(EXTRA, "an object", type_name(other))),
    };
    Ok(ChildConfig { kind, role, extra })
}

const fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn error(value: Value) -> String {
        MultiConfig::from_json(&value).unwrap_err().to_string()
    }

    fn child_error(child: Value) -> String {
        error(json!({"connectors": [child]}))
    }

    #[test]
    fn vllms_form_is_read_with_what_vllm_writes_into_it() {
        let config = MultiConfig::from_json(&json!({"connectors": [
            {"kv_connector": "SharedStorage", "kv_role": "kv_producer", "kv_rank": 0, "engine_id": null,
             "kv_connector_module_path": "kvferry.vllm", "kv_connector_extra_config": {"path": "/x"}},
            {"kv_connector": "RemotePrefill", "kv_role": "kv_consumer", "kv_connector_extra_config": null},
        ]}))
        .unwrap();
        let extra = json!({"path": "/x"}).as_object().unwrap().clone();
        let (kind, role) = (ConnectorKind::SharedStorage, Role::Producer);
        assert_eq!(config.children[0], ChildConfig { kind, role, extra });
        let (kind, role, extra) = (ConnectorKind::RemotePrefill, Role::Consumer, Params::new());
        assert_eq!(config.children[1], ChildConfig { kind, role, extra });
    }

    #[test]
    fn what_is_wrong_is_named_with_its_place_and_the_nearest_name() {
        let good = || json!({"kv_connector": "SharedStorage", "kv_role": "kv_both"});
        let with = |key: &str, value: Value| {
            let mut child = good();
            child[key] = value;
            child_error(child)
        };
        assert_eq!(
            with("kv_connector", json!("remote_prefil")),
            "connectors[0]: `kv_connector` is \"remote_prefil\", which is unknown; did you mean \"RemotePrefill\"?"
        );
        assert_eq!(
            with("kv_role", json!("consumer")),
            "connectors[0]: `kv_role` is \"consumer\", which is unknown; did you mean \"kv_consumer\"?"
        );
        assert_eq!(
            with("kv_connector_extra_conf", json!({})),
            "connectors[0] has the unknown key \"kv_connector_extra_conf\"; did you mean \"kv_connector_extra_config\"?"
        );
        assert_eq!(
            with("kv_role", json!(3)),
            "connectors[0]: `kv_role` must be a text, it is a number"
        );
        assert!(
            with("kv_connector_extra_config", json!([]))
                .contains("must be an object, it is a list")
        );
        assert!(with("engine_id", json!("e")).contains("belongs to the MultiConnector"));
        assert!(child_error(json!({"kv_role": "kv_both"})).contains("it is missing"));
        assert!(child_error(json!(5)).contains("a number"));
        assert!(error(json!({})).contains("it has none"));
        assert!(error(json!({"connectors": []})).contains("it has 0"));
        assert!(error(json!({"connectors": {}})).contains("it is an object"));
        assert!(error(json!(null)).contains("it has none"));
        assert!(error(json!({"connectors": [good()], "connector": 1})).contains("\"connector\""));
        assert!(error(json!({"connectors": vec![good(); 17]})).contains("it has 17"));
    }
}

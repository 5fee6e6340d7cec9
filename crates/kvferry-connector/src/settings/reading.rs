//! Reading values by a table of keys.

use std::borrow::Cow;
use std::ops::RangeInclusive;
use std::time::Duration;

use serde_json::Value;

use super::{Origin, SettingsError};
use crate::contract::Params;
use crate::nearest::suggestion;

/// Longest value in an error, in characters.
const MAX_SHOWN: usize = 120;

/// A key of a connector: what it is called, takes, does, and where its value goes.
#[derive(Debug)]
pub(super) struct Key<T: 'static> {
    pub(super) name: &'static str,
    /// As a user would write it, or `none`.
    pub(super) default: &'static str,
    pub(super) kind: Kind<T>,
    pub(super) help: &'static str,
}

/// What a key takes.
#[derive(Debug)]
pub(super) enum Kind<T: 'static> {
    /// A time.
    Seconds(RangeInclusive<f64>, fn(&mut T, Duration)),
    /// A whole number.
    Number(RangeInclusive<u64>, fn(&mut T, u64)),
    /// Yes or no.
    Switch(fn(&mut T, bool)),
    /// A text; what is expected, in short, and what takes it or says at length what it expected.
    Text(&'static str, fn(&mut T, &str) -> Result<(), String>),
}

impl<T> Kind<T> {
    fn expected(&self) -> String {
        match self {
            Self::Seconds(range, _) => format!("seconds, {} to {}", range.start(), range.end()),
            Self::Number(range, _) if *range.end() == u64::MAX => {
                format!("a whole number, {} or more", range.start())
            }
            Self::Number(range, _) => {
                format!("a whole number, {} to {}", range.start(), range.end())
            }
            Self::Switch(_) => "true or false".to_owned(),
            Self::Text(expected, _) => (*expected).to_owned(),
        }
    }

    /// Takes a value, or says what it should be.
    pub(super) fn put(&self, into: &mut T, value: &Value) -> Result<(), String> {
        let taken = match self {
            Self::Seconds(range, put) => seconds(value, range).map(|seconds| put(into, seconds)),
            Self::Number(range, put) => number(value)
                .filter(|number| range.contains(number))
                .map(|number| put(into, number)),
            Self::Switch(put) => switch(value).map(|on| put(into, on)),
            Self::Text(_, put) => match value {
                Value::String(text) => return put(into, text.trim()),
                _ => None,
            },
        };
        taken.ok_or_else(|| self.expected())
    }
}

fn seconds(value: &Value, range: &RangeInclusive<f64>) -> Option<Duration> {
    let seconds = match value {
        Value::Number(number) => number.as_f64()?,
        Value::String(text) => text.trim().parse().ok()?,
        _ => return None,
    };
    if !range.contains(&seconds) {
        return None;
    }
    Duration::try_from_secs_f64(seconds).ok()
}

fn number(value: &Value) -> Option<u64> {
    let whole = |number: f64| {
        // Up to 2^53 every whole number is one of these.
        let fits = number.fract() == 0.0 && (0.0..=9_007_199_254_740_992.0).contains(&number);
        fits.then_some(number as u64)
    };
    match value {
        Value::Number(number) => number.as_u64().or_else(|| whole(number.as_f64()?)),
        Value::String(text) => {
            let text = text.trim();
            text.parse()
                .ok()
                .or_else(|| whole(text.parse::<f64>().ok()?))
        }
        _ => None,
    }
}

fn switch(value: &Value) -> Option<bool> {
    match value {
        Value::Bool(on) => Some(*on),
        Value::String(text) => match text.trim().to_ascii_lowercase().as_str() {
            "true" | "1" => Some(true),
            "false" | "0" => Some(false),
            _ => None,
        },
        _ => None,
    }
}

/// How variables that override keys begin.
pub(super) const PREFIX: &str = "KVFERRY_";

/// The variable that overrides a key.
pub(super) fn variable(key: &str) -> String {
    format!("{PREFIX}{}", key.to_uppercase())
}

/// Reads all keys of a connector. `others` are those of the other one.
pub(super) fn read<T: Default>(
    connector: &'static str,
    keys: &'static [Key<T>],
    others: &'static [Key<T>],
    extra: &Params,
    env: &impl Fn(&str) -> Option<String>,
) -> Result<T, SettingsError> {
    let is_in = |keys: &[Key<T>], name: &str| keys.iter().any(|key| key.name == name);
    if let Some(key) = extra.keys().find(|name| !is_in(keys, name)) {
        let key = key.clone();
        return Err(if is_in(others, &key) {
            SettingsError::OtherConnector {
                connector,
                key,
                owner: super::keys::other(connector),
            }
        } else {
            let suggestion = super::keys::of_nixl(&key)
                .unwrap_or_else(|| suggestion(&key, keys.iter().map(|key| key.name)));
            SettingsError::UnknownKey {
                connector,
                key,
                suggestion,
            }
        });
    }
    let mut into = T::default();
    for (key, value, origin) in set(keys, extra, env) {
        key.kind
            .put(&mut into, &value)
            .map_err(|expected| SettingsError::Value {
                connector,
                key: key.name,
                origin,
                found: shown(&value),
                expected,
            })?;
    }
    Ok(into)
}

/// The keys that are set, by the configuration or over it by a variable.
fn set<'a, T>(
    keys: &'static [Key<T>],
    extra: &'a Params,
    env: &impl Fn(&str) -> Option<String>,
) -> impl Iterator<Item = (&'static Key<T>, Cow<'a, Value>, Origin)> {
    keys.iter().filter_map(move |key| {
        let variable = variable(key.name);
        let text = env(&variable).filter(|text| !text.trim().is_empty());
        match (text.map(Value::String), extra.get(key.name)) {
            (Some(text), _) => Some((key, Cow::Owned(text), Origin::Variable(variable))),
            (None, Some(value)) if !value.is_null() => {
                Some((key, Cow::Borrowed(value), Origin::Json))
            }
            _ => None,
        }
    })
}

/// The same, as a line of the log shows them.
pub(super) fn chosen<T>(
    keys: &'static [Key<T>],
    extra: &Params,
    env: &impl Fn(&str) -> Option<String>,
) -> Vec<String> {
    set(keys, extra, env)
        .map(|(key, value, origin)| match origin {
            Origin::Json => format!("{}={}", key.name, shown(&value)),
            Origin::Variable(name) => format!("{}={} ({name})", key.name, shown(&value)),
        })
        .collect()
}

fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(MAX_SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

/// What is said of each key.
pub(super) fn describe<T>(
    keys: &'static [Key<T>],
) -> impl Iterator<Item = (&'static str, &'static str, String)> {
    keys.iter().map(|key| {
        let help = format!("{} ({})", key.help, key.kind.expected());
        (key.name, key.default, help)
    })
}

//! Transfer parameters: how a producer's offer travels through clients and routers to a consumer.
//!
//! Responsible for reading and writing them. They are JSON in the names of vLLM's NixlConnector, so that its
//! routers pass them on, with kvferry's own part under `kvferry`. Not responsible for what is done about
//! them.
//!
//! Invariant: they come from outside, so whatever is in them is a value here or an error that names the
//! field; nothing of them is trusted before the producer's answer to the release.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use thiserror::Error;

use crate::{EngineId, Epoch, Instance, LeaseId, RequestId};

/// Transfer parameters: the JSON object that travels with a request.
pub type Params = serde_json::Map<String, Value>;

/// Version of the `kvferry` part.
pub const PARAMS_VERSION: u64 = 1;
/// Most cache groups.
pub const MAX_GROUPS: usize = 64;
/// Most block ids of a group.
pub const MAX_GROUP_BLOCKS: usize = 1 << 20;
/// Most ranks of a producer.
pub const MAX_RANKS: u32 = 4_096;
/// Longest lease duration that is taken seriously, in milliseconds: seven days.
pub const MAX_DURATION_MS: u64 = 7 * 24 * 60 * 60 * 1000;

/// What is wrong with a request's transfer parameters.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("kv_transfer_params.{field} is {value}, expected {expected}")]
pub struct ParamsError {
    /// The field, with dots between levels.
    pub field: &'static str,
    /// Its value, cut short.
    pub value: String,
    /// What would do.
    pub expected: &'static str,
}

/// Where a lease is held, and by whom.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Source {
    /// The producer's engine id.
    pub engine: String,
    /// Its directory, as `host:port`.
    pub directory: String,
    /// How many ranks hold a part of the lease: every one is released, read from or not.
    pub ranks: u32,
}

/// A producer's offer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteOffer {
    /// The lease that holds the blocks, under the producer's own request id.
    pub lease: LeaseId,
    /// Where it is held.
    pub source: Source,
    /// Tokens whose blocks are held, from the first on; at least 1.
    pub tokens: u32,
    /// Block ids per cache group, in the order of token positions.
    pub blocks: Vec<Vec<u32>>,
    /// Tokens of a block, per cache group; each at least 1.
    pub block_tokens: Vec<u32>,
    /// How long the lease lives without a renewal, in milliseconds; at least 1.
    pub duration_ms: u64,
}

/// What a request's parameters ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Asked {
    /// Nothing of this connector.
    Nothing,
    /// To hold its blocks for others when it has finished.
    Export,
    /// To read what others hold for it.
    Import(Box<RemoteOffer>),
    /// To read, but kvferry's part is missing: a router has dropped it, or the producer is another connector.
    Unleased,
}

impl Asked {
    /// Reads parameters. Unknown keys are ignored, `null` stands for an absent one.
    ///
    /// ```
    /// use kvferry_wire::params::Asked;
    ///
    /// let sent = serde_json::json!({"do_remote_decode": true, "remote_host": null});
    /// assert_eq!(Asked::parse(sent.as_object().unwrap()), Ok(Asked::Export));
    /// ```
    ///
    /// # Errors
    /// The first field that cannot be used.
    pub fn parse(params: &Params) -> Result<Self, ParamsError> {
        let top = Fields { object: params };
        let import = top.flag("do_remote_prefill", "do_remote_prefill")?;
        let export = top.flag("do_remote_decode", "do_remote_decode")?;
        if import && export {
            return Err(ParamsError {
                field: "do_remote_prefill",
                value: "true, and do_remote_decode too".to_owned(),
                expected: "one of them",
            });
        }
        if !import {
            return Ok(if export { Self::Export } else { Self::Nothing });
        }
        let own = match top.get("kvferry") {
            None => return Ok(Self::Unleased),
            Some(Value::Object(own)) => Fields { object: own },
            Some(other) => return Err(wrong("kvferry", other, "an object")),
        };
        RemoteOffer::parse(top, own).map(|offer| Self::Import(Box::new(offer)))
    }
}

impl RemoteOffer {
    fn parse(top: Fields<'_>, own: Fields<'_>) -> Result<Self, ParamsError> {
        own.number("version", "kvferry.version", 1, PARAMS_VERSION)?;
        let instance = own.text("instance", "kvferry.instance")?;
        let instance = parse_instance(instance).ok_or_else(|| {
            let shown = Value::from(instance);
            wrong(
                "kvferry.instance",
                &shown,
                "32 hexadecimal digits, not all 0",
            )
        })?;
        let epoch = own.number("epoch", "kvferry.epoch", 1, u64::MAX)?;
        let epoch = Epoch::new(epoch)
            .map_err(|_| wrong("kvferry.epoch", &Value::from(epoch), "at least 1"))?;
        let request = top.text("remote_request_id", "remote_request_id")?;
        let request = RequestId::new(request).map_err(|_| {
            let expected = "1 to 512 bytes without control characters";
            wrong("remote_request_id", &Value::from(request), expected)
        })?;
        let engine = top.text("remote_engine_id", "remote_engine_id")?;
        let engine = EngineId::new(engine).map_err(|_| {
            let expected = "1 to 512 bytes without control characters";
            wrong("remote_engine_id", &Value::from(engine), expected)
        })?;
        let host = top.text("remote_host", "remote_host")?;
        if host.is_empty() || host.len() > 255 || host.chars().any(|c| c.is_control() || c == ' ') {
            return Err(wrong(
                "remote_host",
                &Value::from(host),
                "a host name or address",
            ));
        }
        let port = top.number("remote_port", "remote_port", 1, u16::MAX.into())?;
        let host = if host.contains(':') && !host.starts_with('[') {
            format!("[{host}]")
        } else {
            host.to_owned()
        };
        let ranks = match top.get("tp_size") {
            None => 1,
            Some(_) => top.number("tp_size", "tp_size", 1, MAX_RANKS.into())? as u32,
        };
        let blocks = parse_blocks(top.required("remote_block_ids", "remote_block_ids")?)?;
        let tokens =
            top.number("remote_num_tokens", "remote_num_tokens", 1, u32::MAX.into())? as u32;
        let block_tokens = parse_ids(
            "kvferry.block_tokens",
            own.required("block_tokens", "kvferry.block_tokens")?,
            MAX_GROUPS,
        )?;
        if block_tokens.len() != blocks.len() || block_tokens.contains(&0) {
            let shown = own.required("block_tokens", "kvferry.block_tokens")?;
            let expected = "one number above 0 for each list of remote_block_ids";
            return Err(wrong("kvferry.block_tokens", shown, expected));
        }
        let covers =
            |(ids, size): (&Vec<u32>, &u32)| ids.len() as u64 * u64::from(*size) >= tokens.into();
        if !blocks.iter().zip(&block_tokens).all(covers) {
            let expected = "at most what the blocks of each group hold";
            return Err(wrong("remote_num_tokens", &Value::from(tokens), expected));
        }
        Ok(Self {
            lease: LeaseId {
                instance,
                epoch,
                request,
            },
            source: Source {
                engine: engine.as_str().to_owned(),
                directory: format!("{host}:{port}"),
                ranks,
            },
            tokens,
            blocks,
            block_tokens,
            duration_ms: own.number("duration_ms", "kvferry.duration_ms", 1, MAX_DURATION_MS)?,
        })
    }

    /// The parameters that make this offer, for a directory at `host` and `port`.
    #[must_use]
    pub fn to_params(&self, host: &str, port: u16) -> Params {
        let value = json!({
            "do_remote_prefill": true,
            "do_remote_decode": false,
            "remote_block_ids": self.blocks,
            "remote_engine_id": self.source.engine,
            "remote_request_id": self.lease.request.as_str(),
            "remote_host": host,
            "remote_port": port,
            "tp_size": self.source.ranks,
            "remote_num_tokens": self.tokens,
            "kvferry": {
                "version": PARAMS_VERSION,
                "instance": self.lease.instance.to_string(),
                "epoch": self.lease.epoch.get(),
                "duration_ms": self.duration_ms,
                "block_tokens": self.block_tokens,
            },
        });
        match value {
            Value::Object(params) => params,
            _ => Params::new(),
        }
    }
}

fn parse_instance(text: &str) -> Option<Instance> {
    // `from_str_radix` takes a sign.
    if text.len() != 32 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let number = u128::from_str_radix(text, 16).ok()?;
    Instance::from_bytes(number.to_le_bytes()).ok()
}

/// Ids per group: nested, or flat for a single group.
fn parse_blocks(value: &Value) -> Result<Vec<Vec<u32>>, ParamsError> {
    const FIELD: &str = "remote_block_ids";
    let list = value
        .as_array()
        .filter(|list| !list.is_empty())
        .ok_or_else(|| {
            wrong(
                FIELD,
                value,
                "a list of block ids, or one such list per group",
            )
        })?;
    if !list.iter().any(Value::is_array) {
        return Ok(vec![parse_ids(FIELD, value, MAX_GROUP_BLOCKS)?]);
    }
    if list.len() > MAX_GROUPS {
        return Err(wrong(FIELD, &Value::from(list.len()), "at most 64 groups"));
    }
    list.iter()
        .map(|group| parse_ids(FIELD, group, MAX_GROUP_BLOCKS))
        .collect()
}

fn parse_ids(field: &'static str, value: &Value, most: usize) -> Result<Vec<u32>, ParamsError> {
    let expected = "a list of numbers from 0 to 4294967295, not too long";
    let list = value
        .as_array()
        .filter(|list| list.len() <= most)
        .ok_or_else(|| wrong(field, value, expected))?;
    list.iter()
        .map(|id| {
            let number = id.as_u64().and_then(|number| u32::try_from(number).ok());
            number.ok_or_else(|| wrong(field, id, expected))
        })
        .collect()
}

#[derive(Clone, Copy)]
struct Fields<'a> {
    object: &'a Params,
}

impl<'a> Fields<'a> {
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    fn required(&self, key: &str, field: &'static str) -> Result<&'a Value, ParamsError> {
        self.get(key).ok_or_else(|| ParamsError {
            field,
            value: "absent".to_owned(),
            expected: "a value, as the producer wrote it",
        })
    }

    fn flag(&self, key: &str, field: &'static str) -> Result<bool, ParamsError> {
        match self.get(key) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(wrong(field, other, "true or false")),
        }
    }

    fn text(&self, key: &str, field: &'static str) -> Result<&'a str, ParamsError> {
        let value = self.required(key, field)?;
        value
            .as_str()
            .ok_or_else(|| wrong(field, value, "a string"))
    }

    fn number(
        &self,
        key: &str,
        field: &'static str,
        min: u64,
        max: u64,
    ) -> Result<u64, ParamsError> {
        let value = self.required(key, field)?;
        value
            .as_u64()
            .filter(|number| (min..=max).contains(number))
            .ok_or_else(|| wrong(field, value, "a whole number within its range"))
    }
}

/// Longest value that an error shows, in characters.
const SHOWN: usize = 60;

fn wrong(field: &'static str, value: &Value, expected: &'static str) -> ParamsError {
    let mut shown = Shown::default();
    // Cut off where it is long enough: the value may be megabytes.
    let _ = fmt::write(&mut shown, format_args!("{value}"));
    ParamsError {
        field,
        value: shown.text,
        expected,
    }
}

#[derive(Default)]
struct Shown {
    text: String,
    count: usize,
}

impl fmt::Write for Shown {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        for c in part.chars() {
            if self.count == SHOWN {
                self.text.push('…');
                return Err(fmt::Error);
            }
            self.count += 1;
            self.text.push(c);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;

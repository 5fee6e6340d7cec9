//! Engines on one host: what a peer shares over its unix socket, and what of it can be used.
//!
//! Responsible for the socket on both sides, and for why the mapped and the attached lane cannot be
//! used with a peer. Not responsible for mappings and reads themselves (`memory/`), or for the choice
//! among lanes (`lane/`).
//!
//! Invariant: nothing is shared with, and nothing is read of, another user's process.

mod client;
mod server;

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvferry_wire::{Description, Incarnation, MemoryKind};
use rustix::net::SocketAddrUnix;

use crate::error::EngineError;
use crate::memory::{RemotePool, RemoteProcess};

pub(crate) use client::fetch;
pub(crate) use server::ShareServer;

/// Whether, and under which name, an engine shares its pools with engines on the same host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ShareSocket {
    /// It shares nothing, and the mapped and attached lanes do not reach it.
    Off,
    /// A name in the abstract namespace, which belongs to the network namespace: it reaches engines in
    /// containers that share the host's network.
    #[default]
    Abstract,
    /// A socket file in this directory, for containers that share a volume. It is removed when the
    /// engine ends.
    Directory(PathBuf),
}

impl ShareSocket {
    /// # Errors
    /// [`EngineError::Config`] for a directory whose sockets' names would be too long.
    pub(crate) fn validate(&self) -> Result<(), EngineError> {
        match self {
            Self::Directory(directory) if socket_path(directory, "").is_err() => {
                Err(EngineError::Config {
                    field: "share_socket",
                    value: directory.display().to_string(),
                    expected: "an absolute path of at most 58 bytes of UTF-8",
                })
            }
            _ => Ok(()),
        }
    }

    /// The name of an engine's socket, as its description gives it: `@` for the abstract namespace,
    /// otherwise a path. `None` if nothing is shared.
    fn name(&self, incarnation: Incarnation) -> Option<String> {
        match self {
            Self::Off => None,
            Self::Abstract => Some(format!("@kvferry-{incarnation}")),
            Self::Directory(directory) => {
                socket_path(directory, &format!("kvferry-{incarnation}.sock")).ok()
            }
        }
    }
}

/// Room for a socket's file name behind its directory.
const FILE_NAME_BYTES: usize = 48;

fn socket_path(directory: &Path, file: &str) -> Result<String, ()> {
    let text = directory.to_str().ok_or(())?;
    let fits = text.len() + 1 + FILE_NAME_BYTES <= kvferry_wire::description::MAX_UNIX_SOCKET_BYTES;
    if text.starts_with('/') && fits {
        Ok(format!("{}/{file}", text.trim_end_matches('/')))
    } else {
        Err(())
    }
}

fn socket_address(name: &str) -> Result<SocketAddrUnix, rustix::io::Errno> {
    match name.strip_prefix('@') {
        Some(name) => SocketAddrUnix::new_abstract_name(name.as_bytes()),
        None => SocketAddrUnix::new(name),
    }
}

/// Refuses another user's process. Where users of other user namespaces cannot be told from this
/// one, everybody is refused.
fn check_user(theirs: u32) -> Result<(), String> {
    let ours = rustix::process::geteuid().as_raw();
    let overflow = std::fs::read_to_string("/proc/sys/kernel/overflowuid")
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(65_534);
    if ours == overflow && theirs == ours {
        return Err(format!(
            "both run as user {ours}, which stands for every user of another user namespace"
        ));
    }
    if ours != theirs {
        return Err(format!(
            "its process belongs to user {theirs}, this one to user {ours}; run both as one user in one \
             user namespace"
        ));
    }
    Ok(())
}

/// What a peer on this host shares with us.
#[derive(Debug)]
pub(crate) struct SameHost {
    /// By region; what could not be mapped says why.
    pools: Mutex<HashMap<u32, Result<Arc<RemotePool>, String>>>,
    /// Its process, or why its memory cannot be read.
    process: Result<RemoteProcess, String>,
}

impl SameHost {
    fn pools(&self) -> MutexGuard<'_, HashMap<u32, Result<Arc<RemotePool>, String>>> {
        self.pools.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The mapping of a region.
    ///
    /// # Errors
    /// Why there is none.
    pub(crate) fn pool(&self, region: u32) -> Result<Arc<RemotePool>, String> {
        match self.pools().get(&region) {
            Some(found) => found.clone(),
            None => Err(format!(
                "its region {region} is not a host pool that it shares"
            )),
        }
    }

    /// Forgets regions; their mappings go with the last copies out of them.
    pub(crate) fn forget_all(&self, withdrawn: impl Fn(u32) -> bool) {
        self.pools().retain(|&region, _| !withdrawn(region));
    }

    pub(crate) fn process(&self) -> Result<&RemoteProcess, &str> {
        self.process.as_ref().map_err(String::as_str)
    }

    /// Whether all of these regions have been asked for; a peer may have added some since.
    pub(crate) fn covers(&self, used: &UsedRegions) -> bool {
        let pools = self.pools();
        used.0.iter().all(|(region, _)| pools.contains_key(region))
    }

    /// Why the mapped lane cannot be used for these regions, or nothing.
    pub(crate) fn mapped_refusal(&self, used: &UsedRegions) -> Option<String> {
        let mut regions = used.0.iter();
        regions.find_map(|&(region, _)| self.pool(region).err())
    }

    /// Why the attached lane cannot be used for these regions, or nothing.
    pub(crate) fn attached_refusal(&self, used: &UsedRegions) -> Option<String> {
        if let Err(reason) = self.process() {
            return Some(reason.into());
        }
        used.0.iter().find_map(|&(region, kind)| {
            let other = kind != MemoryKind::Host;
            other.then(|| format!("its region {region} is {kind} memory"))
        })
    }
}

/// The regions that a peer's blocks lie in, with their kinds, without those that it has withdrawn: an
/// old description goes on naming those, and no lane need reach them.
#[derive(Debug, Default)]
pub(crate) struct UsedRegions(Vec<(u32, MemoryKind)>);

impl UsedRegions {
    pub(crate) fn of(peer: &Description, withdrawn: impl Fn(u32) -> bool) -> Self {
        let named: HashSet<u32> = peer.tables.iter().map(|table| table.region).collect();
        let used = peer
            .regions
            .iter()
            .filter(|region| named.contains(&region.id) && !withdrawn(region.id));
        Self(used.map(|region| (region.id, region.kind)).collect())
    }
}

/// Why nothing of a peer can be shared, before it is asked; or the name of its socket.
pub(crate) fn reachable<'a>(ours: &str, peer: &'a Description) -> Result<&'a str, String> {
    if peer.host != ours || ours == UNKNOWN_HOST {
        return Err("the peer is on another host".into());
    }
    peer.unix_socket
        .as_deref()
        .ok_or_else(|| "the peer shares nothing: its share_socket is off".into())
}

/// A host that cannot be told from others.
pub(crate) const UNKNOWN_HOST: &str = "unknown";

/// The same text on the same running host, another after a reboot.
pub(crate) fn host_identity() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    match boot.trim() {
        "" => UNKNOWN_HOST.into(),
        boot => boot.into(),
    }
}

/// How long one side of the socket waits for the other to take or send a packet.
const PACKET_TIMEOUT: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests;

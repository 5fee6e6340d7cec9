//! Lanes: how bytes move, per peer.
//!
//! Lanes sit above the fabric. *mapped* copies out of pools that a peer on this host shares, *native*
//! posts one-sided reads in the data context, *attached* reads the memory of a process on this host,
//! and *served* has the producer's progress thread gather blocks and stream them as messages.

pub(crate) mod cursor;
pub(crate) mod served;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use kvferry_wire::{Description, ShareRequest, UcxVersion};

use crate::error::ConnectError;
use crate::fabric::NativeReads;
use crate::generations::can_unpack;
use crate::peer::{Greeted, PeerShared};
use crate::same_host::{SameHost, UsedRegions, fetch, reachable};
use crate::shared::Shared;

/// How bytes move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lane {
    /// Copies out of pools of a peer on this host, which are mapped here.
    Mapped,
    /// One-sided reads in the data context.
    Native,
    /// `process_vm_readv` of a peer on this host.
    Attached,
    /// The peer gathers and sends.
    Served,
}

impl Lane {
    /// Every lane, in order of preference.
    pub const ALL: [Self; 4] = [Self::Mapped, Self::Native, Self::Attached, Self::Served];

    /// The lane's name, as configuration, logs and metrics give it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mapped => "mapped",
            Self::Native => "native",
            Self::Attached => "attached",
            Self::Served => "served",
        }
    }
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Which lane a caller wants.
///
/// ```
/// use kvferry_engine::{Lane, LaneChoice};
///
/// assert_eq!("auto".parse(), Ok(LaneChoice::Auto));
/// assert_eq!("served".parse(), Ok(LaneChoice::Pinned(Lane::Served)));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum LaneChoice {
    /// The first usable one in order of preference. Emulated reads are never chosen.
    #[default]
    Auto,
    /// This one, or an error.
    Pinned(Lane),
}

impl fmt::Display for LaneChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Pinned(lane) => lane.fmt(f),
        }
    }
}

impl FromStr for LaneChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        Lane::ALL
            .into_iter()
            .find(|lane| lane.name() == text)
            .map(Self::Pinned)
            .ok_or_else(|| format!("no lane {text:?}: auto, mapped, native, attached or served"))
    }
}

/// What lane selection knows about us and a peer.
#[derive(Debug)]
pub(crate) struct Situation<'a> {
    /// What the fabric has, at best.
    pub(crate) native: &'a NativeReads,
    pub(crate) ours: Option<UcxVersion>,
    pub(crate) peer: &'a Description,
    /// Where its blocks lie.
    pub(crate) used: &'a UsedRegions,
    /// What the peer shares, or why it shares nothing.
    pub(crate) same_host: Result<&'a SameHost, &'a str>,
    /// What the endpoint to the peer got.
    pub(crate) endpoint: NativeReads,
}

impl Situation<'_> {
    /// Why a lane cannot be used, or nothing.
    pub(crate) fn refusal(&self, lane: Lane) -> Option<String> {
        match lane {
            Lane::Mapped => match self.same_host {
                Ok(same_host) => same_host.mapped_refusal(self.used),
                Err(reason) => Some(reason.into()),
            },
            Lane::Native => self.native_refusal(),
            Lane::Attached => match self.same_host {
                Ok(same_host) => same_host.attached_refusal(self.used),
                Err(reason) => Some(reason.into()),
            },
            Lane::Served => None,
        }
    }

    fn native_refusal(&self) -> Option<String> {
        if let NativeReads::Unavailable(reason) = self.native {
            return Some(reason.clone());
        }
        if self.peer.addresses.data.is_none() {
            return Some("the peer has no data context".into());
        }
        if let (Some(ours), Some(theirs)) = (self.ours, self.peer.ucx)
            && !can_unpack(ours, theirs)
        {
            return Some(format!(
                "UCX {ours} cannot unpack remote keys of UCX {theirs}"
            ));
        }
        match &self.endpoint {
            NativeReads::Unavailable(reason) => Some(reason.clone()),
            NativeReads::Real | NativeReads::Emulated => None,
        }
    }

    /// Why blocks would not come by a GET of the network's own, or nothing.
    pub(crate) fn rdma_refusal(&self, choice: LaneChoice) -> Option<String> {
        match (choice, &self.endpoint) {
            (LaneChoice::Pinned(lane), _) if lane != Lane::Native => {
                Some(format!("lane {lane} was asked for, and it uses none"))
            }
            _ if self.native_refusal().is_some() => self.native_refusal(),
            (_, NativeReads::Emulated) => Some("UCX would emulate the reads".into()),
            _ => None,
        }
    }

    /// Picks a lane.
    ///
    /// # Errors
    /// The pinned lane and why it cannot be used.
    pub(crate) fn choose(&self, choice: LaneChoice) -> Result<Lane, (Lane, String)> {
        match choice {
            LaneChoice::Pinned(lane) => match self.refusal(lane) {
                Some(reason) => Err((lane, reason)),
                None => Ok(lane),
            },
            LaneChoice::Auto => {
                let emulated = matches!(self.endpoint, NativeReads::Emulated);
                let usable = Lane::ALL.into_iter().find(|&lane| {
                    self.refusal(lane).is_none() && !(lane == Lane::Native && emulated)
                });
                // Served is never refused.
                Ok(usable.unwrap_or(Lane::Served))
            }
        }
    }
}

/// Makes the handle of a peer that has answered the greeting, with a lane.
///
/// What the peer shares on this host is asked for here, on the caller's thread and until `deadline`.
///
/// # Errors
/// [`ConnectError::LaneUnavailable`] for a pinned lane.
pub(crate) fn handle(
    shared: &Shared,
    greeted: Greeted,
    choice: LaneChoice,
    deadline: Instant,
) -> Result<PeerShared, ConnectError> {
    let peer = &greeted.description;
    let strict = shared.config.require_rdma;
    let used = || UsedRegions::of(peer, |region| greeted.life.is_withdrawn(region));
    let same_host = match choice {
        LaneChoice::Pinned(Lane::Native | Lane::Served) => Err("it was not asked".into()),
        _ if strict => Err("require_rdma is set".into()),
        _ => same_host(shared, peer, &used(), deadline),
    };
    if greeted.gone.get().is_some() {
        // Lost meanwhile, and so is what it shared.
        shared.same_host().remove(&peer.incarnation);
    }
    if let Ok(same_host) = &same_host {
        // Withdrawn while it was fetched.
        same_host.forget_all(|region| greeted.life.is_withdrawn(region));
    }
    let used = used();
    let unknown = NativeReads::Unavailable("the engine has not started".into());
    let capabilities = shared.started.get().map(|started| &started.capabilities);
    let situation = Situation {
        native: capabilities.map_or(&unknown, |capabilities| &capabilities.native),
        ours: shared.ucx_version(),
        peer,
        endpoint: greeted.native,
        used: &used,
        same_host: same_host.as_deref().map_err(String::as_str),
    };
    let name = format!("{} {}", peer.engine, peer.rank);
    if strict && let Some(reason) = situation.rdma_refusal(choice) {
        return Err(ConnectError::NoRdma {
            peer: name,
            reason,
            found: capabilities.map_or_else(String::new, |it| it.transports.clone()),
            transports: greeted.transports,
        });
    }
    // With `require_rdma` nothing else will do, also where another lane would come first.
    let asked = if strict {
        LaneChoice::Pinned(Lane::Native)
    } else {
        choice
    };
    let lane = match situation.choose(asked) {
        Ok(lane) => lane,
        Err((lane, reason)) => {
            return Err(ConnectError::LaneUnavailable {
                peer: name,
                lane,
                reason,
            });
        }
    };
    if lane == Lane::Served && choice == LaneChoice::Auto && reachable(&shared.host, peer).is_ok() {
        warn_once(shared, &name, &situation);
    }
    tracing::info!(
        peer = %peer.engine,
        rank = %peer.rank,
        incarnation = %peer.incarnation,
        %lane,
        asked = %choice,
        transports = %greeted.transports,
        "connected"
    );
    Ok(PeerShared {
        id: greeted.id,
        lane,
        transports: greeted.transports,
        gone: greeted.gone,
        life: greeted.life,
        same_host: same_host.ok(),
        description: greeted.description,
    })
}

/// A peer on this host that can only be served costs its processor; once per engine that is worth a
/// warning.
fn warn_once(shared: &Shared, peer: &str, situation: &Situation<'_>) {
    if !shared.warned_of_permission.swap(true, Ordering::Relaxed) {
        let reason = |lane| situation.refusal(lane).unwrap_or_default();
        let (mapped, attached) = (reason(Lane::Mapped), reason(Lane::Attached));
        tracing::warn!(
            peer,
            mapped,
            attached,
            "a peer on this host is read by messages, because no faster lane can be used; said once"
        );
    }
}

/// What the peer shares, from memory or by asking it.
fn same_host(
    shared: &Shared,
    peer: &Description,
    used: &UsedRegions,
    deadline: Instant,
) -> Result<Arc<SameHost>, String> {
    let name = reachable(&shared.host, peer)?;
    let known = shared.same_host().get(&peer.incarnation).cloned();
    if let Some(known) = known.filter(|known| known.covers(used)) {
        return Ok(known);
    }
    let request = ShareRequest {
        from: shared.incarnation,
        expects: peer.incarnation,
    };
    let fetched = Arc::new(fetch(name, &request, deadline)?);
    shared
        .same_host()
        .insert(peer.incarnation, Arc::clone(&fetched));
    Ok(fetched)
}

#[cfg(test)]
mod tests;

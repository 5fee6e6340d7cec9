//! Lanes: how bytes move, per peer.
//!
//! Lanes sit above the fabric. *native* posts one-sided reads in the data context; *served* has the
//! producer's progress thread gather blocks and stream them as messages. *mapped* and *attached* are
//! named by the design and not built yet; asking for one is an error that says so.

pub(crate) mod native;
pub(crate) mod served;

use std::fmt;
use std::str::FromStr;

use kvferry_wire::{Description, UcxVersion};

use crate::fabric::NativeReads;

/// How bytes move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lane {
    /// Copies out of a peer's pool that is mapped here. Not built yet.
    Mapped,
    /// One-sided reads in the data context.
    Native,
    /// `process_vm_readv`. Not built yet.
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
    /// What the endpoint to the peer got.
    pub(crate) endpoint: NativeReads,
}

impl Situation<'_> {
    /// Why a lane cannot be used, or nothing.
    pub(crate) fn refusal(&self, lane: Lane) -> Option<String> {
        match lane {
            Lane::Mapped | Lane::Attached => {
                Some("this version of kvferry does not have it yet".into())
            }
            Lane::Served => None,
            Lane::Native => self.native_refusal(),
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

/// Whether a UCX of version `ours` reads the packed keys of version `theirs`.
///
/// The packed format changed after 1.13: later versions do not read 1.13's, while 1.13 reads theirs
/// (measured with 1.13.1 and 1.22.0 in both directions).
pub(crate) fn can_unpack(ours: UcxVersion, theirs: UcxVersion) -> bool {
    let old = |version: UcxVersion| (version.major, version.minor) <= (1, 13);
    old(ours) || !old(theirs)
}

#[cfg(test)]
mod tests;

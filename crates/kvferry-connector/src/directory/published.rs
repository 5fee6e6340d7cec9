//! What the ranks published, and the replies made from it.
//!
//! Plain data without sockets. Every entry has been decoded once and fits the directory's engine.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvferry_wire::directory::{DirectoryReply, MAX_DIRECTORY_RANKS};
use kvferry_wire::{Description, EngineId, Instance, Rank};

use super::PublishError;

/// Checks that `description` is `rank`'s and belongs to the directory.
pub(super) fn check(
    rank: Rank,
    description: &[u8],
    engine: &EngineId,
    instance: Option<Instance>,
) -> Result<(), PublishError> {
    let description = Description::decode(description)
        .map_err(|source| PublishError::Invalid { rank, source })?;
    if description.rank != rank {
        return Err(PublishError::OtherRank {
            rank,
            described: description.rank,
        });
    }
    if description.engine != *engine {
        return Err(PublishError::OtherEngine {
            rank,
            described: description.engine,
            engine: engine.clone(),
        });
    }
    match (description.instance, instance) {
        (Some(described), Some(instance)) if described != instance => {
            Err(PublishError::OtherInstance {
                rank,
                described,
                instance,
            })
        }
        _ => Ok(()),
    }
}

/// The entries by rank. Their bytes are shared with the replies being made from them, so that
/// nobody holds the map's lock while it copies.
#[derive(Debug, Default)]
pub(super) struct Published {
    ranks: BTreeMap<Rank, Arc<[u8]>>,
}

impl Published {
    /// Files a checked description, in place of the rank's previous one.
    pub(super) fn insert(&mut self, rank: Rank, description: Vec<u8>) -> Result<(), PublishError> {
        if self.ranks.len() >= MAX_DIRECTORY_RANKS && !self.ranks.contains_key(&rank) {
            return Err(PublishError::TooManyRanks {
                rank,
                max: MAX_DIRECTORY_RANKS,
            });
        }
        self.ranks.insert(rank, description.into());
        Ok(())
    }

    /// Takes a rank's entry out. Returns whether there was one.
    pub(super) fn remove(&mut self, rank: Rank) -> bool {
        self.ranks.remove(&rank).is_some()
    }

    /// The entries of `ranks` that exist, each once and in order; all of them for `None`.
    pub(super) fn select(&self, ranks: Option<&[Rank]>) -> BTreeMap<Rank, Arc<[u8]>> {
        match ranks {
            None => self.ranks.clone(),
            Some(ranks) => ranks
                .iter()
                .filter_map(|rank| Some((*rank, Arc::clone(self.ranks.get(rank)?))))
                .collect(),
        }
    }
}

/// The reply for `selected`, or the words of a refusal if it would be larger than
/// `max_reply_bytes` or than `room`, what other replies leave of the memory for replies.
pub(super) fn reply(
    engine: &EngineId,
    instance: Option<Instance>,
    selected: &BTreeMap<Rank, Arc<[u8]>>,
    max_reply_bytes: usize,
    room: usize,
) -> Result<Vec<u8>, String> {
    let count = selected.len();
    let bytes: usize = selected.values().map(|description| description.len()).sum();
    if bytes > max_reply_bytes {
        return Err(format!(
            "the descriptions of {count} ranks are {bytes} bytes, a reply carries at most \
             {max_reply_bytes}; ask for fewer ranks at once"
        ));
    }
    if bytes > room {
        return Err(format!(
            "the directory is busy: {bytes} bytes were asked for, and replies to other clients \
             leave room for {room}; try again"
        ));
    }
    let reply = DirectoryReply::Entries {
        instance,
        engine: engine.clone(),
        entries: selected
            .iter()
            .map(|(rank, description)| (*rank, description.to_vec()))
            .collect(),
    };
    // Names of ranks and framing come on top of the descriptions, so the wire's cap can still bite.
    reply
        .encode_frame()
        .map_err(|error| format!("{error}; ask for fewer ranks at once"))
}

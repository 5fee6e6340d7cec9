//! The loader's comparison of what was read with what the producer holds.
//!
//! Between the end of a read and the release of its lease: the producer's rank is asked for the checksums of the
//! blocks that were read, while ours are computed. The lease is kept alive meanwhile, so that the blocks are what
//! they were when they were read. A load that differs has failed, and its lease is released as any other's.

use std::time::Instant;

use kvferry_engine::{Peer, PeerId};
use kvferry_wire::RequestId;
use kvferry_wire::checksum::{CHECKSUM_CHANNEL, GroupBlock, encode_ask};

use super::checksums::Sums;
use super::loader::{Event, Loader};
use super::request::{Borrowed, Phase};
use crate::contract::LoadFailure;
use crate::remote::GroupPairs;

/// Two lists of checksums that are waited for.
#[derive(Debug)]
pub(super) struct Verifying {
    /// Who is asked.
    peer: Peer,
    until: Instant,
    ours: Option<Vec<u64>>,
    theirs: Option<Vec<u64>>,
}

impl Verifying {
    pub(super) const fn until(&self) -> Instant {
        self.until
    }
}

/// The blocks of all groups, one after the other.
fn flat<'a>(
    groups: &'a [GroupPairs],
    blocks: impl Fn(&'a GroupPairs) -> &'a [u32] + Copy + 'a,
) -> impl Iterator<Item = GroupBlock> + 'a {
    groups.iter().flat_map(move |pairs| {
        let group = pairs.group;
        blocks(pairs)
            .iter()
            .map(move |&block| GroupBlock { group, block })
    })
}

impl Loader {
    /// Has both sides' checksums of a load computed whose blocks have all come from this peer.
    pub(super) fn verify(&mut self, request: &RequestId, peer: Peer, now: Instant) {
        let until = now + self.config.read_timeout;
        let Some(borrowed) = self.requests.get_mut(request) else {
            return;
        };
        let Some(hashing) = self.hashing.clone() else {
            return self.fail(
                request,
                LoadFailure::Local,
                "nothing computes checksums here",
            );
        };
        let load = borrowed.load;
        let question = encode_ask(load, flat(&borrowed.blocks, |pairs| &pairs.remote));
        let local = flat(&borrowed.blocks, |pairs| &pairs.local).collect();
        let asked = match question {
            Ok(question) => peer.send(CHECKSUM_CHANNEL, question).map_err(|error| {
                let failure = LoadFailure::Peer;
                (failure, error.to_string())
            }),
            // More blocks than one question has room for.
            Err(error) => Err((LoadFailure::Local, error.to_string())),
        };
        if let Err((failure, error)) = asked {
            let reason = format!("its producer was not asked for checksums: {error}");
            return self.fail(request, failure, &reason);
        }
        borrowed.phase = Phase::Verifying(Box::new(Verifying {
            peer,
            until,
            ours: None,
            theirs: None,
        }));
        let events = self.events.clone();
        hashing.ask(local, move |sums| {
            // The loader may have ended.
            let _ = events.send(Event::Ours { load, sums });
        });
    }

    fn verifying(&mut self, load: u64) -> Option<(RequestId, &mut Verifying)> {
        let request = self.by_load.get(&load)?.clone();
        let borrowed = self.requests.get_mut(&request)?;
        match &mut borrowed.phase {
            Phase::Verifying(verifying) => Some((request, verifying)),
            _ => None,
        }
    }

    /// Our own checksums of a load's blocks.
    pub(super) fn ours(&mut self, load: u64, sums: Sums) {
        let Some((request, verifying)) = self.verifying(load) else {
            return;
        };
        match sums {
            Ok(sums) => {
                verifying.ours = Some(sums);
                self.compare(&request);
            }
            Err(why) => {
                let reason = format!("no checksums of its blocks here: {why}");
                self.fail(&request, LoadFailure::Local, &reason);
            }
        }
    }

    /// A producer's.
    pub(super) fn theirs(&mut self, peer: PeerId, load: u64, sums: Sums) {
        let Some((request, verifying)) = self.verifying(load) else {
            return;
        };
        if verifying.peer.id() != peer {
            return;
        }
        match sums {
            Ok(sums) => {
                verifying.theirs = Some(sums);
                self.compare(&request);
            }
            Err(why) => {
                let reason = format!("its producer gives no checksums: {why}");
                self.fail(&request, LoadFailure::Unconfirmed, &reason);
            }
        }
    }

    fn compare(&mut self, request: &RequestId) {
        let Some(borrowed) = self.requests.get(request) else {
            return;
        };
        let Phase::Verifying(verifying) = &borrowed.phase else {
            return;
        };
        let (Some(ours), Some(theirs)) = (&verifying.ours, &verifying.theirs) else {
            return;
        };
        let blocks: usize = borrowed.blocks.iter().map(|it| it.local.len()).sum();
        if ours.len() != blocks || theirs.len() != blocks {
            let got = theirs.len();
            let reason = format!("its producer gives {got} checksums of {blocks} blocks");
            return self.fail(request, LoadFailure::Rejected, &reason);
        }
        let local = flat(&borrowed.blocks, |pairs| &pairs.local);
        let remote = flat(&borrowed.blocks, |pairs| &pairs.remote);
        let pairs = local.zip(remote);
        let compared = pairs.zip(ours.iter().zip(theirs));
        let mut differing = compared.filter(|(_, (ours, theirs))| ours != theirs);
        let first = differing.next().map(|(pair, _)| pair);
        let corrupt = usize::from(first.is_some()) + differing.count();
        let after = borrowed.quiet_at.map(|at| at.elapsed()).unwrap_or_default();
        self.counters.verified(blocks, corrupt, after);
        match first {
            None => self.release(request, true),
            Some((here, there)) => {
                let reason = format!(
                    "{corrupt} of {blocks} blocks do not hold what the producer's do; the first is block {} of group {}, \
                     read from block {}",
                    here.block, here.group, there.block
                );
                self.fail(request, LoadFailure::Corrupt, &reason);
            }
        }
    }

    /// Fails loads whose checksums do not come any more.
    pub(super) fn end_verifying(&mut self, now: Instant) {
        let over = |borrowed: &Borrowed| match &borrowed.phase {
            Phase::Verifying(it) if it.peer.gone().is_some() => Some(LoadFailure::Peer),
            Phase::Verifying(it) if it.until <= now => Some(LoadFailure::Unconfirmed),
            _ => None,
        };
        let requests = self.requests.iter();
        let ended: Vec<(RequestId, LoadFailure)> = requests
            .filter_map(|(request, borrowed)| Some((request.clone(), over(borrowed)?)))
            .collect();
        for (request, failure) in ended {
            let reason = "its producer has not said what its checksums are";
            self.fail(&request, failure, reason);
        }
    }
}

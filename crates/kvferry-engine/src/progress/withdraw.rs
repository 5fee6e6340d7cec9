//! The end of regions: ours, which peers may hold, and peers', which we may hold.
//!
//! A region of ours that a description named is given up in order: its tables leave the catalog,
//! every peer that may know it is asked to let go, and it is deregistered when all have answered or
//! are gone and no operation of ours is left. Asked ourselves, we start no read of the region any
//! more, end those that have something left to post, and answer when nothing of the rest is in flight
//! and its key is forgotten.
//!
//! Responsible for both sides of that. Not responsible for the memory itself.

use std::sync::Arc;
use std::time::Instant;

use kvferry_wire::regions::MAX_REGION_RANGES;
use kvferry_wire::{RegionSet, RejectCode};

use super::core::Core;
use super::peers::Phase;
use crate::command::{Holders, ReleaseRegion};
use crate::counters::{add, subtract};
use crate::error::TransferError;
use crate::fabric::{EndpointId, Fabric};
use crate::region::RegionInner;

/// Withdrawals of one peer that are answered one by one; what comes beyond is answered together.
const MAX_OWED: usize = 64;

impl Core {
    /// A handle gives a region up. Peers are asked at the end of the turn's actions, when each that
    /// was greeted before has been answered.
    pub(super) fn release(&mut self, release: ReleaseRegion) {
        if release.region.is_described() {
            self.unasked.insert(release.region.id);
        }
        self.releases.push(release);
        self.released = true;
    }

    /// Asks peers to let go of what was given up since, and gives up what nobody holds.
    pub(super) fn withdraw(&mut self, fabric: &mut dyn Fabric) -> bool {
        if !std::mem::take(&mut self.released) {
            return false;
        }
        let regions = std::mem::take(&mut self.unasked);
        if !regions.is_empty() {
            self.ask_peers(&regions);
        }
        self.release_regions(fabric);
        true
    }

    fn ask_peers(&mut self, regions: &RegionSet) {
        // Has fewer ranges than there may be regions.
        let message = match kvferry_wire::encode_withdraw(regions) {
            Ok(message) => message,
            Err(error) => {
                tracing::error!(%error, "a withdrawal could not be written");
                return;
            }
        };
        let mut to_ask = Vec::new();
        for (&id, peer) in &self.peers {
            match peer.phase {
                // What we greet has our description, and may read before we hear of it.
                Phase::Ready | Phase::Greeting { .. } => to_ask.push(id),
                // Not asked any more; what it has in flight ends with its endpoint.
                Phase::Lost
                | Phase::Leaving {
                    was_ready: true, ..
                } => {}
                Phase::Leaving {
                    was_ready: false, ..
                } => continue,
            }
            let since = matches!(peer.phase, Phase::Ready | Phase::Greeting { .. });
            let since = since.then_some(self.now);
            for region in regions.ranges().iter().flat_map(|r| r.first..=r.last) {
                self.asked.ask(region, id, since);
            }
        }
        for id in to_ask {
            self.push_message(id, message.clone());
        }
    }

    /// A peer holds nothing of these regions of ours.
    pub(super) fn let_go(&mut self, peer: u64, regions: &RegionSet) {
        self.asked.answered(peer, regions);
    }

    /// Ends peers that do not let go in time. True if there was one.
    pub(super) fn withdrawal_timers(&mut self) -> bool {
        let limit = self.shared.config.withdraw_timeout;
        let late = self.asked.late(self.now, limit);
        let any = !late.is_empty();
        for (peer, region) in late {
            let reason = format!("it did not let go of region {region} within {limit:?}");
            self.give_up(peer, &reason);
        }
        any
    }

    /// When the next peer is late.
    pub(super) fn next_withdrawal_deadline(&self) -> Option<Instant> {
        Some(self.asked.oldest()? + self.shared.config.withdraw_timeout)
    }

    /// A peer gives these of its regions up.
    pub(super) fn withdrawn_by(&mut self, id: u64, regions: RegionSet) {
        self.learn_withdrawn(id, &regions);
        for (slot, table) in self.transfers.to_be_posted(id, &regions) {
            let error = TransferError::Rejected {
                code: RejectCode::Withdrawn,
                detail: u64::from(table),
            };
            self.end_transfer(slot, Err(error));
        }
        if let Some(peer) = self.peers.get_mut(&id)
            && !peer.is_lost()
        {
            if peer.owed.len() < MAX_OWED {
                peer.owed.push(regions);
            } else if let Some(last) = peer.owed.last_mut() {
                last.extend(&regions);
            }
            if !self.owing.contains(&id) {
                self.owing.push(id);
            }
        }
    }

    /// Remembers what of a peer is not to be read any more.
    pub(super) fn learn_withdrawn(&mut self, id: u64, regions: &RegionSet) {
        let Some(peer) = self.peers.get(&id) else {
            return;
        };
        if !peer.life.withdraw(regions) {
            let what = format!("it withdrew regions in more than {MAX_REGION_RANGES} ranges");
            self.lose(id, &what);
        }
    }

    /// Answers withdrawals of which nothing is held any more. True if there was one.
    pub(super) fn answer_withdrawals(&mut self, fabric: &mut dyn Fabric) -> bool {
        let mut any = false;
        for id in std::mem::take(&mut self.owing) {
            let Some(peer) = self.peers.get_mut(&id) else {
                continue;
            };
            for regions in std::mem::take(&mut peer.owed) {
                if !self.holds_nothing_of(id, &regions) {
                    if let Some(peer) = self.peers.get_mut(&id) {
                        peer.owed.push(regions);
                    }
                    continue;
                }
                any = true;
                self.forget(id, &regions, fabric);
                match kvferry_wire::encode_withdrawn(&regions) {
                    Ok(answer) => self.push_message(id, answer),
                    // Together more than a message holds, which no engine has.
                    Err(error) => self.lose(id, &error.to_string()),
                }
            }
            if self
                .peers
                .get(&id)
                .is_some_and(|peer| !peer.owed.is_empty())
            {
                self.owing.push(id);
            }
        }
        any
    }

    /// Whether no operation of ours on these regions of a peer is under way.
    fn holds_nothing_of(&self, peer: u64, regions: &RegionSet) -> bool {
        !self.transfers.touches(peer, regions)
    }

    /// Lets go of keys and mappings. Nothing is copied out of a mapping any more, so it goes at once.
    fn forget(&mut self, id: u64, regions: &RegionSet, fabric: &mut dyn Fabric) {
        if let Some(peer) = self.peers.get_mut(&id) {
            if let Some(same_host) = self.shared.same_host().get(&peer.incarnation()) {
                same_host.forget_all(|region| regions.contains(region));
            }
            peer.keys.retain(|&(region, _), &mut key| {
                let keep = !regions.contains(region);
                if !keep {
                    fabric.forget_key(EndpointId(id), key);
                }
                keep
            });
        }
    }

    /// Gives up regions that nothing uses any more, and answers those who waited long enough.
    pub(super) fn release_regions(&mut self, fabric: &mut dyn Fabric) -> bool {
        if self.releases.is_empty() {
            return false;
        }
        let (now, before) = (self.now, self.releases.len());
        let mut given_up: Vec<Arc<RegionInner>> = Vec::new();
        let counters = &self.shared.counters;
        let (asked, unasked, peers) = (&self.asked, &self.unasked, &self.peers);
        self.releases.retain_mut(|release| {
            let id = release.region.id;
            let operations = release.region.operations();
            let held = unasked.contains(id) || asked.holders(id).next().is_some();
            if operations == 0 && !held {
                given_up.push(Arc::clone(&release.region));
                // Whoever waits may unmap as soon as he is told: tell him below, after the fabric.
                return true;
            }
            if let Some((_, reply)) = release.waiter.take_if(|(until, _)| *until <= now) {
                // Counted first, so that whoever is told finds it counted.
                add(&counters.quarantined_regions, 1);
                let of = |peer| peers.get(&peer).map(super::peers::PeerState::name);
                let _ = reply.send(Holders {
                    operations,
                    peers: asked.holders(id).filter_map(of).collect(),
                });
            }
            true
        });
        for handle in given_up.iter().flat_map(|region| &region.handles) {
            fabric.deregister(*handle);
        }
        self.releases.retain_mut(|release| {
            if !given_up.iter().any(|gone| gone.id == release.region.id) {
                return true;
            }
            match release.waiter.take() {
                Some((_, reply)) => drop(reply.send(Holders::default())),
                None => subtract(&counters.quarantined_regions, 1),
            }
            false
        });
        self.releases.len() != before
    }
}

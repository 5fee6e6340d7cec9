//! Who may still hold regions that we give up.
//!
//! Responsible for which peers were asked to let go of which region, and since when. Plain data: no
//! message is sent here and no peer is lost.
//!
//! Invariant: a region is free once every peer that was asked has answered or is gone.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use kvferry_wire::RegionSet;

/// A peer that has been asked and has not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Holder {
    peer: u64,
    /// `None` for a peer whose end is under way: it is not asked, and has no deadline.
    since: Option<Instant>,
}

/// Questions without an answer, by region.
#[derive(Debug, Default)]
pub(super) struct Asked {
    regions: HashMap<u32, Vec<Holder>>,
}

impl Asked {
    /// The peer may hold the region: it is asked `since` then, or its end is waited for.
    pub(super) fn ask(&mut self, region: u32, peer: u64, since: Option<Instant>) {
        let holders = self.regions.entry(region).or_default();
        if !holders.iter().any(|holder| holder.peer == peer) {
            holders.push(Holder { peer, since });
        }
    }

    /// The peer holds nothing of these regions. What it was not asked about means nothing.
    pub(super) fn answered(&mut self, peer: u64, regions: &RegionSet) {
        self.remove(peer, |region| regions.contains(region));
    }

    /// The peer's end has begun; it answers nothing any more.
    pub(super) fn ending(&mut self, peer: u64) {
        for holder in self.regions.values_mut().flatten() {
            if holder.peer == peer {
                holder.since = None;
            }
        }
    }

    /// The peer cannot hold anything any more.
    pub(super) fn gone(&mut self, peer: u64) {
        self.remove(peer, |_| true);
    }

    fn remove(&mut self, peer: u64, of: impl Fn(u32) -> bool) {
        self.regions.retain(|&region, holders| {
            if of(region) {
                holders.retain(|holder| holder.peer != peer);
            }
            !holders.is_empty()
        });
    }

    /// Peers that may hold the region.
    pub(super) fn holders(&self, region: u32) -> impl Iterator<Item = u64> + '_ {
        let holders = self.regions.get(&region);
        holders.into_iter().flatten().map(|holder| holder.peer)
    }

    /// Peers whose time is over, with one of the regions that they hold.
    pub(super) fn late(&self, now: Instant, limit: Duration) -> Vec<(u64, u32)> {
        let mut late: Vec<(u64, u32)> = Vec::new();
        for (&region, holders) in &self.regions {
            for holder in holders {
                let is_late = holder
                    .since
                    .is_some_and(|since| now.saturating_duration_since(since) >= limit);
                if is_late && !late.iter().any(|&(peer, _)| peer == holder.peer) {
                    late.push((holder.peer, region));
                }
            }
        }
        late
    }

    /// The longest open question's beginning.
    pub(super) fn oldest(&self) -> Option<Instant> {
        let all = self.regions.values().flatten();
        all.filter_map(|holder| holder.since).min()
    }

    /// Time that our own thread was away is not held against peers.
    pub(super) fn was_away(&mut self, lost: Duration) {
        for holder in self.regions.values_mut().flatten() {
            if let Some(since) = &mut holder.since {
                *since += lost;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    fn set(ids: impl IntoIterator<Item = u32>) -> RegionSet {
        ids.into_iter().collect()
    }

    #[test]
    fn a_region_is_free_when_all_who_were_asked_have_answered_or_are_gone() {
        let (mut asked, now) = (Asked::default(), Instant::now());
        for peer in [1, 2, 3] {
            asked.ask(7, peer, Some(now));
        }
        asked.ask(8, 1, Some(now));
        asked.answered(1, &set([7]));
        asked.answered(2, &set([8, 9]));
        assert_eq!(asked.holders(7).collect::<Vec<_>>(), [2, 3]);
        asked.gone(3);
        asked.answered(2, &set([7]));
        assert_eq!(asked.holders(7).count(), 0);
        assert_eq!(asked.holders(8).collect::<Vec<_>>(), [1]);
        asked.gone(1);
        assert!(asked.regions.is_empty(), "nothing is left behind");
    }

    #[test]
    fn a_peer_is_late_once_and_not_for_time_that_we_lost() {
        let (mut asked, now) = (Asked::default(), Instant::now());
        let limit = Duration::from_secs(5);
        asked.ask(1, 4, Some(now));
        asked.ask(2, 4, Some(now));
        asked.ask(2, 5, Some(now + limit));
        // Asked again, the first time counts.
        asked.ask(1, 4, Some(now + limit));
        asked.ask(1, 6, None);
        assert_eq!(asked.oldest(), Some(now));
        let late = asked.late(now + limit, limit);
        assert_eq!(late.len(), 1);
        assert_eq!(late[0].0, 4);
        asked.was_away(limit);
        assert_eq!(asked.late(now + limit, limit), []);
        let late = asked.late(now + 3 * limit, limit);
        let mut late: Vec<u64> = late.into_iter().map(|(peer, _)| peer).collect();
        late.sort_unstable();
        assert_eq!(late, [4, 5], "one that was not asked is never late");
        asked.ending(4);
        asked.ending(5);
        assert_eq!(
            (asked.late(now + 3 * limit, limit), asked.oldest()),
            (vec![], None)
        );
        assert_eq!(asked.holders(2).count(), 2, "their end is waited for");
    }

    proptest! {
        /// Against a set of pairs: whatever comes in whatever order, who holds what is the same.
        #[test]
        fn questions_agree_with_a_set_of_pairs(
            steps in prop::collection::vec((0_u8..4, 0_u64..4, 0_u32..6, 0_u32..6), 0..60),
        ) {
            let now = Instant::now();
            let (mut asked, mut pairs) = (Asked::default(), BTreeSet::new());
            for (what, peer, region, other) in steps {
                match what {
                    0 | 1 => {
                        asked.ask(region, peer, Some(now));
                        pairs.insert((region, peer));
                    }
                    2 => {
                        asked.answered(peer, &set([region, other]));
                        pairs.retain(|&(r, p)| p != peer || (r != region && r != other));
                    }
                    _ => {
                        asked.gone(peer);
                        pairs.retain(|&(_, p)| p != peer);
                    }
                }
                let mut by_region: BTreeMap<u32, BTreeSet<u64>> = BTreeMap::new();
                for &(region, peer) in &pairs {
                    by_region.entry(region).or_default().insert(peer);
                }
                for region in 0..6 {
                    let holders: BTreeSet<u64> = asked.holders(region).collect();
                    prop_assert_eq!(holders, by_region.remove(&region).unwrap_or_default());
                }
                let late: BTreeSet<u64> = asked
                    .late(now, Duration::ZERO)
                    .into_iter()
                    .map(|(peer, _)| peer)
                    .collect();
                let all: BTreeSet<u64> = pairs.iter().map(|&(_, peer)| peer).collect();
                prop_assert_eq!(late, all);
            }
        }
    }
}

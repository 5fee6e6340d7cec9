//! Deadlines: transfers, peers, services, regions, the shutdown.

use std::time::{Duration, Instant};

use super::core::Core;
use super::peers::Phase;
use crate::counters::add;
use crate::error::TransferError;
use crate::fabric::Fabric;

impl Core {
    /// Judges what is due. True if anything was.
    pub(super) fn timers(&mut self, fabric: &mut dyn Fabric) -> bool {
        let mut any = self.transfer_timers() | self.escalate();
        any |= self.service_timers();
        if self.next_peer_tick.is_some_and(|tick| tick <= self.now) {
            any = true;
            self.next_peer_tick = None;
            self.greeting_timers();
            self.peer_timers();
            self.schedule_peer_tick();
        }
        any |= self.withdrawal_timers();
        any | self.release_regions(fabric)
    }

    /// When the thread must wake at the latest.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let services = self.services.iter().filter_map(|slot| slot.next).min();
        let releases = self
            .releases
            .iter()
            .filter_map(|r| r.waiter.as_ref().map(|(until, _)| *until))
            .min();
        let shutdown = self.shutdown.as_ref().map(|shutdown| shutdown.deadline);
        [
            self.transfers.next_deadline(),
            self.escalations.next(),
            services,
            self.next_peer_tick,
            self.next_withdrawal_deadline(),
            releases,
            shutdown,
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// Peers are looked at twice per ping interval while there are any.
    pub(super) fn schedule_peer_tick(&mut self) {
        let idle = self.peers.is_empty() && self.strangers.is_empty();
        if self.next_peer_tick.is_none() && !idle {
            self.next_peer_tick = Some(self.now + self.shared.config.ping_interval / 2);
        }
    }

    fn peer_timers(&mut self) {
        let config = &self.shared.config;
        let (ping, suspect_after) = (config.ping_interval, config.suspect_after);
        let dead_after = suspect_after + config.dead_after;
        let now = self.now;
        let silent = |since: Instant| now.saturating_duration_since(since);
        let (mut quiet, mut suspects, mut dead, mut leaving) = (vec![], vec![], vec![], vec![]);
        let mut silent_ones = vec![];
        for peer in self.peers.values_mut() {
            let missing = peer.inbox.as_ref().and_then(|inbox| inbox.missing());
            peer.gap = missing.map(|next| match peer.gap {
                Some((same, since)) if same == next => (next, since),
                _ => (next, now),
            });
            match &peer.phase {
                Phase::Ready => {
                    let silence = silent(peer.last_heard);
                    if silence >= dead_after {
                        silent_ones
                            .push((peer.id, format!("silent for {} ms", silence.as_millis())));
                    } else if peer
                        .gap
                        .is_some_and(|(_, since)| silent(since) >= suspect_after)
                    {
                        dead.push((peer.id, "a segment of it is missing".into()));
                    } else if silence >= suspect_after {
                        if peer.set_suspect(true) {
                            add(&self.shared.counters.peers_suspect, 1);
                            tracing::warn!(peer = %peer.name(), ?silence, "peer is suspect");
                        }
                        suspects.push((peer.id, silence));
                    }
                    // On silence alone: a peer that only receives says nothing by itself.
                    if silence >= ping && silent(peer.last_ping) >= ping {
                        peer.last_ping = now;
                        quiet.push(peer.id);
                    }
                }
                Phase::Leaving {
                    deadline, reason, ..
                } => {
                    let sent = peer.outbox.is_empty() && peer.in_flight == 0;
                    if sent || *deadline <= now {
                        leaving.push((peer.id, reason.clone()));
                    }
                }
                Phase::Greeting { .. } | Phase::Lost => {}
            }
        }
        for id in quiet {
            self.push_message(id, kvferry_wire::encode_ping(id));
        }
        for (id, waited) in suspects {
            self.fail_transfers_of(id, |done, total| TransferError::Stalled {
                done,
                total,
                waited,
            });
        }
        for (id, reason) in silent_ones {
            self.give_up(id, &reason);
        }
        for (id, reason) in dead.into_iter().chain(leaving) {
            self.lose(id, &reason);
        }
    }

    /// True when the engine has been shut down and nothing more needs to leave.
    pub(super) fn is_finished(&mut self) -> bool {
        let Some(shutdown) = &self.shutdown else {
            return false;
        };
        let sent = self
            .peers
            .values()
            .all(|peer| peer.is_lost() || (peer.outbox.is_empty() && peer.in_flight == 0));
        sent || shutdown.deadline <= self.now
    }

    /// Until when the fabric may take to end.
    pub(super) fn end_deadline(&self) -> Instant {
        let asked = self
            .shutdown
            .as_ref()
            .map_or(self.now, |shutdown| shutdown.deadline);
        // Closing takes a moment even if the goodbyes took all the time.
        asked.max(Instant::now() + Duration::from_millis(100))
    }
}

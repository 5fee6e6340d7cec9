//! The scheduler half: which requests are read from others, and which are held for others.
//!
//! Responsible for the life of each request on both sides, and for what workers are told. Touches no
//! block, asks nobody.
//!
//! Invariants: a lease is reserved at most once per time that a request is scheduled, and activated
//! only if its parameters leave with the same call; an offer that was taken in is released or read
//! exactly once, whatever becomes of its request.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use kvferry_engine::LogLimits;
use kvferry_wire::params::{Asked, RemoteOffer};
use kvferry_wire::{EngineId, Epoch, Instance, LeaseId, Rank, RequestId};

use super::config::{RemoteConfig, RemoteError};
use super::stats::RemoteStats;
use super::{GroupPairs, Load, Plan, RemoteLease, Report, Source};
use crate::contract::{
    Aggregated, Allocation, Capabilities, Finish, Finished, FinishedRequest, Matched, NULL_BLOCK,
    ReportPart, RequestView, Role, SchedulerConnector, StepPlan, StepView,
};
use crate::directory::{DirectoryConfig, DirectoryServer};
use crate::lease::End;
use crate::metrics::{Figures, REMOTE};

/// A request whose blocks are held at its producer and not asked for yet.
#[derive(Debug)]
struct Offered {
    offer: Box<RemoteOffer>,
    /// The producer says that it is gone.
    lost: bool,
}

/// A request that is to be held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holding {
    /// Not in a step yet.
    Wanted,
    /// Its lease is reserved.
    Reserved(Epoch),
    /// Its lease has ended before it was exported: it will not be.
    Spoiled,
}

/// A lease whose blocks are held for others.
#[derive(Debug)]
struct Held {
    /// Ranks that have not reported its end.
    ranks: u32,
    since: Instant,
}

/// `RemotePrefill`, the scheduler half.
#[derive(Debug)]
pub struct RemoteScheduler {
    config: RemoteConfig,
    instance: Instance,
    directory: Option<Arc<DirectoryServer>>,
    offered: HashMap<RequestId, Offered>,
    /// Requests that are being loaded; nothing is offered to them any more.
    loading: HashSet<RequestId>,
    /// Requests that have ended while they were loaded; their ranks report all the same.
    ending: HashSet<RequestId>,
    holding: HashMap<RequestId, Holding>,
    reserved: HashMap<Epoch, RequestId>,
    held: HashMap<Epoch, Held>,
    issued: u64,
    /// What the next step's plan will say.
    next: Plan,
    draining: bool,
    stats: RemoteStats,
    warned: LogLimits,
}

impl RemoteScheduler {
    /// A scheduler half whose leases are of this instance, drawn anew at every start. One that exports listens at the configured address.
    ///
    /// # Errors
    /// A setting that is out of range, or an address that cannot be listened at.
    pub fn new(config: RemoteConfig, instance: Instance) -> Result<Self, RemoteError> {
        config.validate()?;
        let directory = match config.role {
            Role::Consumer => None,
            Role::Producer | Role::Both => {
                let mut directory = DirectoryConfig::new(config.engine.clone());
                directory.instance = Some(instance);
                let address = (config.listen_host.as_str(), config.listen_port);
                let server = DirectoryServer::bind(Address(address), directory)?;
                Some(Arc::new(server))
            }
        };
        Ok(Self {
            config,
            instance,
            directory,
            offered: HashMap::new(),
            loading: HashSet::new(),
            ending: HashSet::new(),
            holding: HashMap::new(),
            reserved: HashMap::new(),
            held: HashMap::new(),
            issued: 0,
            next: Plan::default(),
            draining: false,
            stats: RemoteStats::default(),
            warned: LogLimits::default(),
        })
    }

    /// Where consumers find this engine; `None` for one that does not export.
    #[must_use]
    pub fn directory_address(&self) -> Option<SocketAddr> {
        self.directory.as_ref().map(|it| it.local_addr())
    }

    /// The directory, for whoever publishes ranks later than this half can be reached.
    #[must_use]
    pub fn directory(&self) -> Option<Arc<DirectoryServer>> {
        self.directory.clone()
    }

    /// Makes a rank's description ([`RemoteWorker::describe`](super::RemoteWorker::describe)) known to
    /// consumers; before requests are taken.
    ///
    /// # Errors
    /// If it is not of this engine or this rank.
    pub fn publish(&self, rank: Rank, description: Vec<u8>) -> Result<(), RemoteError> {
        match &self.directory {
            Some(directory) => Ok(directory.publish(rank, description)?),
            None => Ok(()),
        }
    }

    /// The engine's id.
    #[must_use]
    pub const fn engine(&self) -> &EngineId {
        &self.config.engine
    }

    /// What has happened, and what there is.
    #[must_use]
    pub fn stats(&self) -> RemoteStats {
        RemoteStats {
            loads_waiting: self.offered.len() as u64,
            loads_running: self.loading.len() as u64,
            leases_reserved: self.reserved.len() as u64,
            leases_held: self.held.len() as u64,
            ..self.stats
        }
    }

    /// Takes in an offer: its lease is kept alive from the next step on.
    fn import(&mut self, request: &RequestView<'_>, offer: Box<RemoteOffer>) {
        self.stats.offers += 1;
        self.next.hold.push(RemoteLease {
            request: request.id.clone(),
            lease: offer.lease.clone(),
            source: offer.source.clone(),
            consumers: self.config.ranks,
            duration_ms: offer.duration_ms,
        });
        let lost = false;
        self.offered
            .insert(request.id.clone(), Offered { offer, lost });
    }

    /// `kind` is the reason's name among the counters.
    fn warn(&mut self, kind: &'static str, request: &RequestId, reason: &str) {
        if let Some(held_back) = self.warned.admit(kind, "", Instant::now()) {
            tracing::warn!(%request, reason, held_back, "transfer parameters are not used");
        }
    }

    /// Ends a request's part as a reader.
    fn stop_reading(&mut self, request: &RequestId) {
        if self.offered.remove(request).is_some() {
            self.next.release.push(request.clone());
        } else if self.loading.remove(request) {
            self.ending.insert(request.clone());
            self.next.abort.push(request.clone());
        }
    }

    fn revoke(&mut self, epoch: Epoch) {
        self.reserved.remove(&epoch);
        self.next.leases.revoke.push(epoch);
        self.stats.revoked += 1;
        tracing::debug!(%epoch, "lease revoked");
    }

    /// Holds a finished request's blocks for others, if there are any worth it.
    fn export(&mut self, finished: &FinishedRequest<'_>, epoch: Epoch) -> Finished {
        let request = finished.request;
        let computed = finished.computed.saturating_sub(finished.in_flight);
        let tokens = computed.min(request.prompt);
        let per_group = finished.blocks.0.iter().zip(&self.config.block_tokens);
        let blocks: Vec<Vec<u32>> = per_group
            .map(|(ids, size)| {
                let count = tokens.div_ceil(*size) as usize;
                ids[..count.min(ids.len())].to_vec()
            })
            .collect();
        let sizes = self.config.block_tokens.iter();
        let whole = blocks.len() == self.config.block_tokens.len()
            && blocks
                .iter()
                .zip(sizes)
                .all(|(ids, size)| ids.len() as u64 * u64::from(*size) >= tokens.into());
        let nothing = blocks.iter().flatten().all(|block| *block == NULL_BLOCK);
        let Some(address) = self.directory_address() else {
            self.revoke(epoch);
            return Finished::Free;
        };
        if tokens == 0 || !whole || nothing {
            self.revoke(epoch);
            return Finished::Free;
        }
        self.reserved.remove(&epoch);
        self.next.leases.activate.push(epoch);
        let since = Instant::now();
        let ranks = self.config.ranks;
        self.held.insert(epoch, Held { ranks, since });
        self.stats.exported += 1;
        let offer = RemoteOffer {
            lease: LeaseId {
                instance: self.instance,
                epoch,
                request: request.id.clone(),
            },
            source: Source {
                engine: self.config.engine.as_str().to_owned(),
                directory: String::new(),
                ranks,
            },
            tokens,
            blocks,
            block_tokens: self.config.block_tokens.clone(),
            duration_ms: self.config.lease.duration.as_millis() as u64,
        };
        let host = match &self.config.advertise_host {
            Some(host) => host.clone(),
            None => address.ip().to_string(),
        };
        Finished::Hold {
            params: Some(offer.to_params(&host, address.port())),
        }
    }

    fn ended(&mut self, epoch: Epoch, how: End) {
        if let Some(request) = self.reserved.remove(&epoch) {
            // Before it was exported: there is nothing to hold any more.
            self.holding.insert(request, Holding::Spoiled);
            self.stats.spoiled += 1;
            // Workers remember that it has ended until they hear this.
            self.next.leases.revoke.push(epoch);
            return;
        }
        let Some(held) = self.held.get_mut(&epoch) else {
            return;
        };
        held.ranks = held.ranks.saturating_sub(1);
        match how {
            End::Released => self.stats.parts_released += 1,
            End::Expired => self.stats.parts_expired += 1,
            End::Revoked => self.stats.parts_revoked += 1,
        }
        if held.ranks == 0 {
            let held_for = held.since.elapsed();
            self.held.remove(&epoch);
            tracing::debug!(%epoch, %how, ?held_for, "lease ended on every rank");
        }
    }

    fn report(&mut self, report: &Report) {
        for &(epoch, how) in &report.ended {
            self.ended(epoch, how);
        }
        for request in &report.lost {
            if let Some(offered) = self.offered.get_mut(request)
                && !offered.lost
            {
                offered.lost = true;
                self.stats.lost += 1;
            }
        }
    }
}

/// A host and a port, for a message about them.
struct Address<'a>((&'a str, u16));

impl std::fmt::Display for Address<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.0.0, self.0.1)
    }
}

impl std::net::ToSocketAddrs for Address<'_> {
    type Iter = std::vec::IntoIter<SocketAddr>;

    fn to_socket_addrs(&self) -> std::io::Result<Self::Iter> {
        self.0.to_socket_addrs()
    }
}

/// The blocks of tokens `from..to`, there and here. `None` if one of them does not reach that far, or if the producer
/// has dropped a block (its window had moved on further) that is needed here.
fn pair_blocks(
    offer: &RemoteOffer,
    local: &[Vec<u32>],
    from: u32,
    to: u32,
) -> Option<Vec<GroupPairs>> {
    let groups = offer.blocks.iter().zip(&offer.block_tokens).enumerate();
    let mut all = Vec::with_capacity(offer.blocks.len());
    for (group, (theirs, size)) in groups {
        let (first, last) = ((from / size) as usize, to.div_ceil(*size) as usize);
        let (theirs, ours) = (
            theirs.get(first..last)?,
            local.get(group)?.get(first..last)?,
        );
        let wanted = theirs
            .iter()
            .zip(ours)
            .filter(|(_, ours)| **ours != NULL_BLOCK);
        let (remote, local): (Vec<u32>, Vec<u32>) = wanted.unzip();
        if remote.contains(&NULL_BLOCK) {
            return None;
        }
        if !remote.is_empty() {
            let group = group as u32;
            all.push(GroupPairs {
                group,
                remote,
                local,
            });
        }
    }
    Some(all)
}

impl SchedulerConnector for RemoteScheduler {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            requires_delivery: self.config.role != Role::Consumer,
            best_effort: false,
            loaded_groups: None,
            layout: None,
            reads_freed: false,
        }
    }

    fn on_new_request(&mut self, request: &RequestView<'_>) {
        let Some(params) = request.params else {
            return;
        };
        let is_known = self.offered.contains_key(request.id)
            || self.loading.contains(request.id)
            || self.holding.contains_key(request.id);
        if is_known {
            return;
        }
        match Asked::parse(params) {
            Ok(Asked::Nothing) => {}
            Ok(Asked::Export) if self.config.role == Role::Consumer => {
                self.stats.ignored += 1;
                self.warn(
                    "role",
                    request.id,
                    "do_remote_decode, but this engine is a consumer",
                );
            }
            Ok(Asked::Export) => {
                self.holding.insert(request.id.clone(), Holding::Wanted);
            }
            Ok(Asked::Import(_) | Asked::Unleased) if self.config.role == Role::Producer => {
                self.stats.ignored += 1;
                self.warn(
                    "role",
                    request.id,
                    "do_remote_prefill, but this engine is a producer",
                );
            }
            Ok(Asked::Import(offer)) if offer.block_tokens != self.config.block_tokens => {
                // Nobody can read it, so nobody should keep it.
                self.stats.refused += 1;
                let reason = format!(
                    "block_tokens {:?} there and {:?} here",
                    offer.block_tokens, self.config.block_tokens
                );
                self.warn("blocks", request.id, &reason);
                self.import(request, offer);
                self.stop_reading(request.id);
            }
            Ok(Asked::Import(offer)) => self.import(request, offer),
            Ok(Asked::Unleased) => {
                self.stats.unleased += 1;
                let reason = "no kvferry part in them: a router drops unknown keys, or the producer is not kvferry; \
                              the request is computed here";
                self.warn("unleased", request.id, reason);
            }
            Err(error) => {
                self.stats.malformed += 1;
                self.warn("malformed", request.id, &error.to_string());
            }
        }
    }

    fn matched_tokens(&self, request: &RequestView<'_>, computed: u32) -> Matched {
        let Some(Offered { offer, lost: false }) = self.offered.get(request.id) else {
            return Matched::None;
        };
        let matched = Matched::load_async(request.prompt, computed, offer.tokens);
        if matched.tokens() < self.config.recompute_threshold_tokens.max(2) {
            return Matched::None;
        }
        let mut groups = self.config.reach.iter().zip(&self.config.block_tokens);
        if offer.tokens >= request.prompt
            && groups.any(|(reach, &size)| reach.misses_the_last(request.prompt, size))
        {
            return Matched::None;
        }
        matched
    }

    fn after_alloc(&mut self, request: &RequestView<'_>, allocation: &Allocation<'_>) {
        let Some(Offered { offer, .. }) = self.offered.remove(request.id) else {
            return;
        };
        if allocation.external == 0 {
            self.stats.released_unread += 1;
            self.next.release.push(request.id.clone());
            return;
        }
        let from = allocation.local_computed;
        let to = from.saturating_add(allocation.external);
        // No blocks: the workers report a failed load, as they must report one in any case.
        let blocks = pair_blocks(&offer, allocation.blocks.0, from, to).unwrap_or_default();
        self.stats.loads += 1;
        self.next.load.push(Load {
            request: request.id.clone(),
            blocks,
        });
        self.loading.insert(request.id.clone());
    }

    fn build_step(&mut self, step: &StepView<'_>) -> StepPlan {
        if !self.holding.is_empty() && !self.draining {
            for scheduled in step.scheduled {
                if let Some(holding @ Holding::Wanted) = self.holding.get_mut(scheduled.request.id)
                    && let Ok(epoch) = Epoch::new(self.issued + 1)
                {
                    self.issued += 1;
                    *holding = Holding::Reserved(epoch);
                    let request = scheduled.request.id.clone();
                    self.reserved.insert(epoch, request.clone());
                    self.next.leases.reserve.push((epoch, request));
                }
            }
        }
        let mut plan = std::mem::take(&mut self.next);
        plan.instance = (!plan.leases.reserve.is_empty()).then_some(self.instance);
        plan.leases.issued_up_to = self.issued;
        plan.leases.activate.sort_unstable();
        plan.leases.revoke.sort_unstable();
        StepPlan::Remote(plan)
    }

    fn preempted(&mut self, requests: &[RequestId]) {
        for request in requests {
            if let Some(holding) = self.holding.get_mut(request)
                && let Holding::Reserved(epoch) = *holding
            {
                *holding = Holding::Wanted;
                self.revoke(epoch);
            }
        }
    }

    fn request_finished(&mut self, finished: &FinishedRequest<'_>) -> Finished {
        let request = finished.request.id;
        self.stop_reading(request);
        match self.holding.remove(request) {
            Some(Holding::Reserved(epoch)) if finished.how == Finish::Length && !self.draining => {
                self.export(finished, epoch)
            }
            Some(Holding::Reserved(epoch)) => {
                self.revoke(epoch);
                Finished::Free
            }
            Some(Holding::Wanted | Holding::Spoiled) | None => Finished::Free,
        }
    }

    fn figures(&self, figures: &mut Figures) {
        figures.add(REMOTE, &self.stats());
    }

    fn on_report(&mut self, report: &Aggregated) {
        for (_, part) in &report.parts {
            if let ReportPart::Remote(report) = part {
                self.report(report);
            }
        }
        for received in &report.received {
            // vLLM ends a request whose load has failed before it hands the report on.
            if !self.loading.remove(&received.request) && !self.ending.remove(&received.request) {
                self.stats.late_reports += 1;
                continue;
            }
            match received.failure {
                None => self.stats.loaded += 1,
                Some(failure) => self.stats.failed.count(failure),
            }
        }
    }

    fn has_pending_work(&self) -> bool {
        let loads = !self.loading.is_empty() || !self.ending.is_empty();
        loads || !self.held.is_empty() || !self.next.is_empty()
    }

    fn begin_shutdown(&mut self) {
        self.draining = true;
    }
}

#[cfg(test)]
mod tests;

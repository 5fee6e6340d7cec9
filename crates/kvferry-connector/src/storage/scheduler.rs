//! The scheduler half: what is offered, loaded, saved and held.
//!
//! Responsible for requests and for which block has which content. Loads come from `after_alloc`
//! only, saves from `build_step` only. Not responsible for bytes, and never touches a disk: lookups have a
//! thread of their own ([`super::lookup`]).
//!
//! Invariants: per request, one load until it is preempted, and none after one that failed; each
//! block is saved at most once; a block with a new owner is never read for what it was before.

use std::collections::{HashMap, HashSet};
use std::mem::take;
use std::sync::atomic::Ordering;

use kvferry_wire::RequestId;

use super::key::{Chain, namespace};
use super::lookup::{Known, Lookups};
use super::plan::{KeyedBlock, Load, Plan};
use super::request::Request;
use super::saves::Saves;
use super::worker::OpenStorageError;
use super::{BlockKey, StorageConfig, StorageSchedulerStats};
use crate::contract::{
    Aggregated, Allocation, Capabilities, FailedBlock, Finished, FinishedRequest, Matched,
    NULL_BLOCK, Received, ReportPart, RequestView, Scheduled, SchedulerConnector, StepPlan,
    StepView,
};
use crate::load_state::LoadState;
use crate::metrics::{Figures, STORAGE};

/// A load at most saves this many tokens where it is not worth the while.
const TOO_FEW: u32 = 1;

/// A load that has not been reported.
#[derive(Debug)]
struct Loading {
    tokens: u32,
    /// Group, id, position.
    blocks: Vec<(u32, u32, usize)>,
}

/// The scheduler half of [`SharedStorage`](super).
#[derive(Debug)]
pub struct StorageScheduler {
    config: StorageConfig,
    unit: u32,
    seed: BlockKey,
    lookups: Lookups,
    requests: HashMap<RequestId, Request>,
    loading: HashMap<RequestId, Loading>,
    saves: Saves,
    held: HashSet<RequestId>,
    plan: Plan,
    ending: bool,
    stats: StorageSchedulerStats,
}

impl StorageScheduler {
    /// Starts the lookup thread, if anything is to be loaded. Does not touch the directory, which need not exist yet.
    ///
    /// # Errors
    /// A configuration out of range; no thread.
    pub fn new(config: StorageConfig) -> Result<Self, OpenStorageError> {
        config.validate()?;
        let unit = config.unit();
        let lookups = Lookups::start(&config).map_err(OpenStorageError::Thread)?;
        Ok(Self {
            unit,
            seed: namespace(&config),
            lookups,
            requests: HashMap::new(),
            loading: HashMap::new(),
            saves: Saves::new(
                config.world,
                config.settings.max_pending_saves,
                config.one_pool,
            ),
            held: HashSet::new(),
            plan: Plan::default(),
            ending: false,
            stats: StorageSchedulerStats::default(),
            config,
        })
    }

    /// What it has done so far.
    #[must_use]
    pub fn stats(&self) -> StorageSchedulerStats {
        let counters = &self.lookups.counters;
        StorageSchedulerStats {
            lookups: counters.lookups.load(Ordering::Relaxed),
            misses: counters.misses.load(Ordering::Relaxed),
            lookups_late: counters.late.load(Ordering::Relaxed),
            lookup_errors: counters.errors.load(Ordering::Relaxed),
            saves: self.saves.planned,
            saves_skipped: self.saves.skipped,
            saves_revoked: self.saves.revoked,
            pending_loads: self.loading.len() as u64,
            pending_saves: self.saves.pending() as u64,
            held: self.held.len() as u64,
            ..self.stats
        }
    }

    fn chains(&self, request: &RequestView<'_>) -> Vec<Chain> {
        (0..)
            .zip(&self.config.block_tokens)
            .map(|(group, &tokens)| {
                let mut chain = Chain::new(self.seed, group, tokens);
                chain.extend(request.prompt_tokens(), request.extra_key);
                chain
            })
            .collect()
    }

    /// Plans the load of the `external` tokens. Also for a request that is unknown: a load that was
    /// asked for is reported.
    fn plan_load(&mut self, request: &RequestView<'_>, allocation: &Allocation<'_>) {
        let mut load = Load {
            request: request.id.clone(),
            blocks: Vec::new(),
            unknown: Vec::new(),
        };
        let mut loading = Loading {
            tokens: allocation.external,
            blocks: Vec::new(),
        };
        let end = allocation
            .local_computed
            .saturating_add(allocation.external);
        for ((group, &tokens), index) in (0..).zip(&self.config.block_tokens).zip(0..) {
            let chain = self
                .requests
                .get(request.id)
                .map(|request| &request.chains[index]);
            let ids: &[u32] = allocation.blocks.0.get(index).map_or(&[], Vec::as_slice);
            let positions = allocation.local_computed / tokens..end.div_ceil(tokens);
            for position in positions.start as usize..positions.end as usize {
                // A block that was not given cannot be loaded, and the null block says so.
                let block = ids.get(position).copied();
                let key = chain.and_then(|chain| chain.keys().get(position).copied());
                match (block, key) {
                    (Some(NULL_BLOCK), _) => {}
                    (Some(block), Some(key)) => {
                        load.blocks.push(KeyedBlock { key, group, block });
                        loading.blocks.push((group, block, position));
                    }
                    (block, _) => {
                        let block = block.unwrap_or(NULL_BLOCK);
                        load.unknown.push(FailedBlock { group, block });
                        loading.blocks.push((group, block, position));
                    }
                }
            }
        }
        self.plan.load.push(load);
        self.loading.insert(request.id.clone(), loading);
    }

    fn received(&mut self, received: &Received) {
        let Some(loading) = self.loading.remove(&received.request) else {
            self.stats.unknown += 1;
            return;
        };
        let ok = received.failure.is_none();
        if ok {
            self.stats.hits += 1;
            self.stats.hit_tokens += u64::from(loading.tokens);
        } else {
            self.stats.loads_failed += 1;
        }
        let Some(request) = self.requests.get_mut(&received.request) else {
            return;
        };
        request.load.ended(ok);
        if !ok {
            let failed: HashSet<FailedBlock> = received.failed.iter().copied().collect();
            let bad = |&&(group, block, _): &&(u32, u32, usize)| {
                failed.is_empty() || failed.contains(&FailedBlock { group, block })
            };
            let tainted = loading.blocks.iter().filter(bad);
            request.tainted = tainted
                .map(|&(group, _, position)| (group, position))
                .collect();
        }
        if request.load.is_open() {
            request.lookup = self.lookups.ask(&request.chains, request.prompt(self.unit));
        }
    }

    /// Takes note of the blocks that a request in the step was given.
    fn given(&mut self, scheduled: &Scheduled<'_>) {
        let mut request = self.requests.get_mut(scheduled.request.id);
        if request.is_none() {
            self.stats.unknown += 1;
        }
        let from = if scheduled.renewed {
            scheduled.computed
        } else {
            0
        };
        let groups = self.config.block_tokens.iter().zip(0..).zip(0..);
        for (new, ((&tokens, group), index)) in scheduled.new_blocks.0.iter().zip(groups) {
            // What is before `from` it shares; what is after is written from now on.
            let own = new.get((from / tokens) as usize..).unwrap_or_default();
            self.saves.given_anew(group, own, &mut self.plan.revoke);
            let request = request.as_deref_mut();
            if let Some(blocks) = request.and_then(|request| request.blocks.get_mut(index)) {
                if scheduled.renewed {
                    blocks.clear();
                }
                blocks.extend(new.iter().map(|&block| self.saves.listed(block)));
            }
        }
    }

    /// Plans the saves of a request in the step, when all blocks of the step are given.
    fn scheduled(&mut self, scheduled: &Scheduled<'_>) {
        let view = &scheduled.request;
        let Some(request) = self.requests.get_mut(view.id) else {
            return;
        };
        let end = scheduled.computed.saturating_add(scheduled.tokens);
        request.clean(&self.config.block_tokens, scheduled.computed, end);
        if !self.ending && self.config.role.saves() {
            let full = (end as usize).min(view.tokens.len());
            request.save(view, full, &mut self.saves, &mut self.plan.save);
        }
    }
}

impl SchedulerConnector for StorageScheduler {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            requires_delivery: false,
            best_effort: true,
            loaded_groups: None,
            layout: None,
            reads_freed: true,
        }
    }

    fn on_new_request(&mut self, request: &RequestView<'_>) {
        if self.requests.contains_key(request.id) {
            self.stats.unknown += 1;
            return;
        }
        let chains = self.chains(request);
        let prompt = request.prompt_tokens().len() as u32;
        let groups = chains.len();
        let request_state = Request {
            lookup: self.lookups.ask(&chains, prompt),
            chains,
            load: LoadState::default(),
            blocks: vec![Vec::new(); groups],
            next: vec![0; groups],
            tainted: HashSet::new(),
        };
        self.requests.insert(request.id.clone(), request_state);
    }

    fn matched_tokens(&self, request: &RequestView<'_>, computed: u32) -> Matched {
        let Some(known) = self.requests.get(request.id).filter(|_| !self.ending) else {
            return Matched::None;
        };
        // A prefix that ends inside a block leaves that block to be computed, and all after it.
        if !known.load.is_open() || !computed.is_multiple_of(self.unit) {
            return Matched::None;
        }
        let first = (computed / self.unit) as usize;
        match known.lookup.known() {
            Known::Pending(left) if first < known.lookup.units() => Matched::Later(left),
            Known::Pending(_) | Known::Late => Matched::None,
            Known::Answered => {
                let end = known.lookup.reaches(computed, request.prompt);
                // The last token is computed in any case.
                let saved = end
                    .min(request.prompt.saturating_sub(1))
                    .saturating_sub(computed);
                if saved <= TOO_FEW {
                    return Matched::None;
                }
                Matched::load_async(request.prompt, computed, end)
            }
        }
    }

    fn after_alloc(&mut self, request: &RequestView<'_>, allocation: &Allocation<'_>) {
        for ((&tokens, group), blocks) in self
            .config
            .block_tokens
            .iter()
            .zip(0..)
            .zip(allocation.blocks.0)
        {
            let own = (allocation.local_computed / tokens) as usize;
            let own = blocks.get(own..).unwrap_or_default();
            self.saves.given_anew(group, own, &mut self.plan.revoke);
        }
        let loading = self.loading.contains_key(request.id);
        match self.requests.get_mut(request.id) {
            Some(known) if allocation.external == 0 => {
                known.load.declined();
                return;
            }
            Some(known) if !loading => known.load.begun(),
            Some(_) => {}
            None => self.stats.unknown += 1,
        }
        if allocation.external > 0 && !loading {
            self.plan_load(request, allocation);
        }
    }

    fn build_step(&mut self, step: &StepView<'_>) -> StepPlan {
        // A block that a window left may be anybody's in this very step, also of one further back in it.
        for scheduled in step.scheduled {
            self.given(scheduled);
        }
        for scheduled in step.scheduled {
            self.scheduled(scheduled);
        }
        StepPlan::Storage(take(&mut self.plan))
    }

    fn preempted(&mut self, requests: &[RequestId]) {
        for id in requests {
            let Some(request) = self.requests.get_mut(id) else {
                self.stats.unknown += 1;
                continue;
            };
            self.saves.disown(id);
            request.blocks.iter_mut().for_each(Vec::clear);
            if request.load.preempted() {
                request.lookup = self.lookups.ask(&request.chains, request.prompt(self.unit));
            }
        }
    }

    fn request_finished(&mut self, finished: &FinishedRequest<'_>) -> Finished {
        let id = finished.request.id;
        if self.requests.remove(id).is_none() {
            self.stats.unknown += 1;
            return Finished::Free;
        }
        let saving = self.saves.owned_by(id);
        self.saves.disown(id);
        if self.loading.contains_key(id) {
            match self.plan.load.iter_mut().find(|load| load.request == *id) {
                // It has not started: nothing is read, and it is reported all the same.
                Some(load) => {
                    let blocks = load.blocks.drain(..);
                    let failed = |block: KeyedBlock| FailedBlock {
                        group: block.group,
                        block: block.block,
                    };
                    load.unknown.extend(blocks.map(failed));
                }
                None => self.plan.abort.push(id.clone()),
            }
            return Finished::Free;
        }
        if saving == 0 {
            return Finished::Free;
        }
        self.plan.finished.push(id.clone());
        self.held.insert(id.clone());
        Finished::Hold { params: None }
    }

    fn figures(&self, figures: &mut Figures) {
        figures.add(STORAGE, &self.stats());
    }

    fn on_report(&mut self, report: &Aggregated) {
        for (_, part) in &report.parts {
            if let ReportPart::Storage(part) = part {
                for &number in &part.ended {
                    if !self.saves.ended(number) {
                        self.stats.unknown += 1;
                    }
                }
            }
        }
        for received in &report.received {
            self.received(received);
        }
        for request in &report.sent {
            if !self.held.remove(request) {
                self.stats.unknown += 1;
            }
        }
    }

    fn has_pending_work(&self) -> bool {
        !self.loading.is_empty()
            || !self.held.is_empty()
            || self.saves.pending() > 0
            || self.plan != Plan::default()
    }

    fn begin_shutdown(&mut self) {
        self.ending = true;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::StorageSettings;
    use super::*;
    use crate::contract::Role;

    #[test]
    fn who_asks_before_the_answer_is_told_when_it_is_due_and_afterwards_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let config = StorageConfig {
            settings: StorageSettings::at(directory.path()),
            model: "tiny".to_owned(),
            layout: "LBHNC float32".to_owned(),
            block_tokens: vec![4],
            reach: Vec::new(),
            role: Role::Both,
            world: 1,
            one_pool: true,
        };
        let mut scheduler = StorageScheduler::new(config).unwrap();
        let ids = [RequestId::new("a").unwrap(), RequestId::new("b").unwrap()];
        let view = |id| RequestView {
            id,
            tokens: &[0; 8],
            prompt: 8,
            params: None,
            extra_key: "",
        };
        // A thread that never looks: what is asked of it stays open.
        let (jobs, _queue) = crossbeam::channel::unbounded();
        scheduler.lookups = Lookups::to(jobs, 4, Duration::from_secs(3_600));
        scheduler.on_new_request(&view(&ids[0]));
        let answer = scheduler.matched_tokens(&view(&ids[0]), 0);
        assert!(
            matches!(answer, Matched::Later(left) if left <= Duration::from_secs(3_600)),
            "{answer:?}"
        );
        assert_eq!(scheduler.matched_tokens(&view(&ids[0]), 8), Matched::None);
        scheduler.lookups = Lookups::to(crossbeam::channel::unbounded().0, 4, Duration::ZERO);
        scheduler.on_new_request(&view(&ids[1]));
        assert_eq!(scheduler.matched_tokens(&view(&ids[1]), 0), Matched::None);
    }
}

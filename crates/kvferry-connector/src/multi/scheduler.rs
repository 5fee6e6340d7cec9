//! The scheduler half: asks the children, chooses the one that loads, and counts who holds what.

use std::cell::Cell;
use std::collections::HashMap;
use std::mem::take;

use kvferry_wire::RequestId;
use thiserror::Error;

use super::params;
use super::plan::{Chosen, Holding, Plan};
use super::stats::MultiSchedulerStats;
use crate::contract::{
    Aggregated, Aggregator, Allocation, Capabilities, Finished, FinishedRequest, Matched, Received,
    ReportPart, RequestView, Scheduled, SchedulerConnector, StepPlan, StepView, WorkerReport,
};
use crate::load_state::LoadState;
use crate::metrics::Figures;

/// Why children do not go together.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ComposeError {
    /// There are none.
    #[error("a MultiConnector without children; list at least one connector")]
    NoChildren,
    /// Two of them need different block layouts.
    #[error(
        "child {first} needs block layout {first_layout:?} and child {second} needs {second_layout:?}; an \
         engine has one layout, so remove one of them"
    )]
    Layout {
        /// A child's place.
        first: usize,
        /// What it needs.
        first_layout: String,
        /// Another child's place.
        second: usize,
        /// What that needs.
        second_layout: String,
    },
}

struct Child {
    connector: Box<dyn SchedulerConnector>,
    /// Its place, as parameters have it.
    name: String,
    /// Its ranks' reports.
    ranks: Aggregator,
}

#[derive(Debug)]
struct Request {
    load: LoadState,
    /// The child whose offer the scheduler has. A note of the last answer, which changes no answer.
    offered: Cell<Option<usize>>,
}

/// The scheduler half of [`MultiConnector`](super).
pub struct MultiScheduler {
    children: Vec<Child>,
    capabilities: Capabilities,
    requests: HashMap<RequestId, Request>,
    /// The child that loads for a request, until that is reported.
    loading: HashMap<RequestId, usize>,
    plan: Plan,
    stats: MultiSchedulerStats,
}

impl MultiScheduler {
    /// Of these children, the first asked first. `ranks` is how many ranks report.
    ///
    /// # Errors
    /// No children, or two that need different layouts.
    pub fn new(
        children: Vec<Box<dyn SchedulerConnector>>,
        ranks: u32,
    ) -> Result<Self, ComposeError> {
        let each: Vec<Capabilities> = children.iter().map(|child| child.capabilities()).collect();
        let capabilities = combine(&each)?;
        let number = children.len();
        let child = |(index, connector): (usize, Box<dyn SchedulerConnector>)| Child {
            connector,
            name: index.to_string(),
            ranks: Aggregator::new(ranks),
        };
        Ok(Self {
            children: children.into_iter().enumerate().map(child).collect(),
            capabilities,
            requests: HashMap::new(),
            loading: HashMap::new(),
            plan: Plan::default(),
            stats: MultiSchedulerStats {
                loads: vec![0; number],
                loads_failed: vec![0; number],
                ..MultiSchedulerStats::default()
            },
        })
    }

    /// What it has done so far.
    #[must_use]
    pub fn stats(&self) -> MultiSchedulerStats {
        self.stats.clone()
    }

    /// The first answer that is not "nothing", and whose it is. Every child is asked.
    fn ask(&self, request: &RequestView<'_>, computed: u32) -> Option<(usize, Matched)> {
        let mut first = None;
        for (index, child) in self.children.iter().enumerate() {
            let answer = child
                .connector
                .matched_tokens(&child.view(request), computed);
            if first.is_none() && answer != Matched::None {
                first = Some((index, answer));
            }
        }
        first
    }

    fn received(&mut self, received: &Received) {
        let Some(child) = self.loading.remove(&received.request) else {
            self.stats.unknown += 1;
            return;
        };
        let ok = received.failure.is_none();
        if !ok {
            self.stats.loads_failed[child] += 1;
        }
        if let Some(request) = self.requests.get_mut(&received.request) {
            request.load.ended(ok);
        }
    }
}

impl Child {
    /// The request with this child's parameters.
    fn view<'a>(&self, request: &RequestView<'a>) -> RequestView<'a> {
        RequestView {
            params: params::of_child(request.params, &self.name),
            ..*request
        }
    }
}

/// What several children are as one.
fn combine(children: &[Capabilities]) -> Result<Capabilities, ComposeError> {
    if children.is_empty() {
        return Err(ComposeError::NoChildren);
    }
    let mut layout: Option<(usize, &String)> = None;
    for (second, needed) in children.iter().enumerate() {
        match (layout, &needed.layout) {
            (Some((first, one)), Some(other)) if one != other => {
                return Err(ComposeError::Layout {
                    first,
                    first_layout: one.clone(),
                    second,
                    second_layout: other.clone(),
                });
            }
            (None, Some(other)) => layout = Some((second, other)),
            _ => {}
        }
    }
    // One that loads all groups makes it all.
    let groups: Option<Vec<&Vec<u32>>> = children
        .iter()
        .map(|child| child.loaded_groups.as_ref())
        .collect();
    let loaded_groups = groups.map(|groups| {
        let mut all: Vec<u32> = groups.into_iter().flatten().copied().collect();
        all.sort_unstable();
        all.dedup();
        all
    });
    Ok(Capabilities {
        requires_delivery: children.iter().any(|child| child.requires_delivery),
        best_effort: children.iter().all(|child| child.best_effort),
        loaded_groups,
        layout: layout.map(|(_, layout)| layout.clone()),
        reads_freed: children.iter().any(|child| child.reads_freed),
    })
}

impl SchedulerConnector for MultiScheduler {
    fn capabilities(&self) -> Capabilities {
        self.capabilities.clone()
    }

    fn on_new_request(&mut self, request: &RequestView<'_>) {
        if self.requests.contains_key(request.id) {
            self.stats.unknown += 1;
            return;
        }
        let known = Request {
            load: LoadState::default(),
            offered: Cell::new(None),
        };
        self.requests.insert(request.id.clone(), known);
        for child in &mut self.children {
            let view = child.view(request);
            child.connector.on_new_request(&view);
        }
    }

    fn matched_tokens(&self, request: &RequestView<'_>, computed: u32) -> Matched {
        let Some(known) = self
            .requests
            .get(request.id)
            .filter(|known| known.load.is_open())
        else {
            return Matched::None;
        };
        let answer = self.ask(request, computed);
        let offered = answer.filter(|(_, matched)| matched.tokens() > 0);
        known.offered.set(offered.map(|(child, _)| child));
        answer.map_or(Matched::None, |(_, matched)| matched)
    }

    fn after_alloc(&mut self, request: &RequestView<'_>, allocation: &Allocation<'_>) {
        let mut chosen = None;
        if allocation.external > 0 && !self.loading.contains_key(request.id) {
            // Nobody offered and tokens are wanted all the same: somebody has to report.
            let noted = self
                .requests
                .get(request.id)
                .and_then(|known| known.offered.take());
            let asked = || {
                self.ask(request, allocation.local_computed)
                    .map(|(child, _)| child)
            };
            chosen = Some(noted.or_else(asked).unwrap_or(0));
        }
        match self.requests.get_mut(request.id) {
            Some(known) if chosen.is_some() => known.load.begun(),
            Some(known) => known.load.declined(),
            None => self.stats.unknown += 1,
        }
        if let Some(child) = chosen {
            self.stats.loads[child] += 1;
            self.loading.insert(request.id.clone(), child);
            self.plan.chosen.push(Chosen {
                request: request.id.clone(),
                child: child as u32,
            });
        }
        for (index, child) in self.children.iter_mut().enumerate() {
            let external = if chosen == Some(index) {
                allocation.external
            } else {
                0
            };
            let view = child.view(request);
            child.connector.after_alloc(
                &view,
                &Allocation {
                    external,
                    ..*allocation
                },
            );
        }
    }

    fn build_step(&mut self, step: &StepView<'_>) -> StepPlan {
        let mut plan = take(&mut self.plan);
        let nested = step
            .scheduled
            .iter()
            .any(|scheduled| params::nested(scheduled.request.params));
        plan.children.reserve_exact(self.children.len());
        for child in &mut self.children {
            if !nested {
                plan.children.push(child.connector.build_step(step));
                continue;
            }
            let scheduled: Vec<Scheduled<'_>> = step
                .scheduled
                .iter()
                .map(|scheduled| Scheduled {
                    request: child.view(&scheduled.request),
                    ..*scheduled
                })
                .collect();
            let step = StepView {
                scheduled: &scheduled,
                ..*step
            };
            plan.children.push(child.connector.build_step(&step));
        }
        StepPlan::Multi(plan)
    }

    fn preempted(&mut self, requests: &[RequestId]) {
        for id in requests {
            match self.requests.get_mut(id) {
                Some(known) => {
                    known.offered.set(None);
                    known.load.preempted();
                }
                None => self.stats.unknown += 1,
            }
        }
        for child in &mut self.children {
            child.connector.preempted(requests);
        }
    }

    fn request_finished(&mut self, finished: &FinishedRequest<'_>) -> Finished {
        let id = finished.request.id;
        if self.requests.remove(id).is_none() {
            self.stats.unknown += 1;
            return Finished::Free;
        }
        let (mut holders, mut given) = (Vec::new(), Vec::new());
        for (index, child) in self.children.iter_mut().enumerate() {
            let request = child.view(&finished.request);
            let answer = child.connector.request_finished(&FinishedRequest {
                request,
                ..*finished
            });
            if let Finished::Hold { params } = answer {
                holders.push(index as u32);
                given.extend(params.map(|params| (index, params)));
            }
        }
        if holders.is_empty() {
            return Finished::Free;
        }
        let silent = self.loading.contains_key(id);
        self.plan.holding.push(Holding {
            request: id.clone(),
            children: holders,
            silent,
        });
        if silent {
            return Finished::Free;
        }
        let (params, dropped) = params::merge(given);
        self.stats.params_dropped += dropped;
        Finished::Hold { params }
    }

    fn figures(&self, figures: &mut Figures) {
        for child in &self.children {
            child.connector.figures(figures);
        }
    }

    fn on_report(&mut self, report: &Aggregated) {
        let mut reports: Vec<Vec<(u32, WorkerReport)>> = Vec::new();
        reports.resize_with(self.children.len(), Vec::new);
        for (rank, part) in &report.parts {
            match part {
                ReportPart::Multi(parts) if parts.len() == self.children.len() => {
                    for (of_child, part) in reports.iter_mut().zip(parts) {
                        of_child.push((*rank, part.clone()));
                    }
                }
                _ => self.stats.unknown += 1,
            }
        }
        for (child, reports) in self.children.iter_mut().zip(reports) {
            let whole = child.ranks.take(reports);
            if !whole.is_empty() {
                child.connector.on_report(&whole);
            }
        }
        for received in &report.received {
            self.received(received);
        }
    }

    fn has_pending_work(&self) -> bool {
        !self.loading.is_empty()
            || self.plan != Plan::default()
            || self
                .children
                .iter()
                .any(|child| child.connector.has_pending_work())
    }

    fn begin_shutdown(&mut self) {
        for child in &mut self.children {
            child.connector.begin_shutdown();
        }
    }
}

impl std::fmt::Debug for MultiScheduler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MultiScheduler")
            .field("children", &self.children.len())
            .field("requests", &self.requests)
            .field("loading", &self.loading)
            .finish_non_exhaustive()
    }
}

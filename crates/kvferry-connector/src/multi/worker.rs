//! The worker half: hands plans down, and reports up what the children say, counted.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use kvferry_engine::LogLimit;
use kvferry_wire::RequestId;

use super::plan::{Chosen, Holding, Plan};
use super::stats::MultiWorkerStats;
use crate::contract::{
    CacheLayout, RegisterCacheError, ReportPart, StepPlan, WorkerConnector, WorkerLost,
    WorkerReport,
};
use crate::metrics::Figures;

/// Who of a finished request's holders has not reported.
#[derive(Debug)]
struct Held {
    children: Vec<u32>,
    silent: bool,
}

/// The worker half of [`MultiConnector`](super), of one rank.
pub struct MultiWorker {
    children: Vec<Box<dyn WorkerConnector>>,
    /// The child that loads for a request, until it reports.
    loading: HashMap<RequestId, u32>,
    holding: HashMap<RequestId, Held>,
    stats: MultiWorkerStats,
    stray: LogLimit,
    foreign: LogLimit,
}

impl MultiWorker {
    /// Of these children, in the order of the scheduler half's.
    #[must_use]
    pub fn new(children: Vec<Box<dyn WorkerConnector>>) -> Self {
        const LIMIT: LogLimit = LogLimit::new(Duration::from_secs(1));
        Self {
            children,
            loading: HashMap::new(),
            holding: HashMap::new(),
            stats: MultiWorkerStats::default(),
            stray: LIMIT,
            foreign: LIMIT,
        }
    }

    /// What it has done so far.
    #[must_use]
    pub fn stats(&self) -> MultiWorkerStats {
        MultiWorkerStats {
            held: self.holding.len() as u64,
            loading: self.loading.len() as u64,
            ..self.stats
        }
    }

    fn received_from(&mut self, child: u32, request: &RequestId) -> bool {
        let chosen = self.loading.get(request) == Some(&child);
        if chosen {
            self.loading.remove(request);
        } else {
            self.stats.stray_received += 1;
            self.log_stray(child, request, "received");
        }
        chosen
    }

    /// Whether the child held it; then whether the blocks are free, for `sent`.
    fn sent_from(&mut self, child: u32, request: &RequestId, sent: &mut Vec<RequestId>) -> bool {
        let held = self.holding.get_mut(request);
        let place = held
            .as_ref()
            .and_then(|held| held.children.iter().position(|&of| of == child));
        let (Some(held), Some(place)) = (held, place) else {
            self.stats.stray_sent += 1;
            self.log_stray(child, request, "sent");
            return false;
        };
        held.children.swap_remove(place);
        if held.children.is_empty() {
            if !held.silent {
                sent.push(request.clone());
            }
            self.holding.remove(request);
        }
        true
    }

    fn log_stray(&mut self, child: u32, request: &RequestId, what: &str) {
        if let Some(suppressed) = self.stray.admit(Instant::now()) {
            tracing::warn!(child, %request, what, suppressed, "multi connector: dropped a report that nobody waits for");
        }
    }
}

impl WorkerConnector for MultiWorker {
    fn register(&mut self, layout: &CacheLayout) -> Result<(), RegisterCacheError> {
        self.children
            .iter_mut()
            .try_for_each(|child| child.register(layout))
    }

    fn release_blocks(&mut self, plan: &StepPlan) {
        if let StepPlan::Multi(plan) = plan {
            for (child, plan) in self.children.iter_mut().zip(&plan.children) {
                child.release_blocks(plan);
            }
        }
    }

    fn begin_step(&mut self, plan: StepPlan) {
        // One child may write to a block that another one still reads.
        self.release_blocks(&plan);
        let plan = match plan {
            StepPlan::Multi(plan) if plan.children.len() == self.children.len() => plan,
            _ => {
                self.stats.foreign_plans += 1;
                if let Some(suppressed) = self.foreign.admit(Instant::now()) {
                    tracing::warn!(
                        children = self.children.len(),
                        suppressed,
                        "multi connector: dropped a plan of other children; check that both halves have the same configuration"
                    );
                }
                return;
            }
        };
        let Plan {
            children,
            chosen,
            holding,
        } = plan;
        for Chosen { request, child } in chosen {
            self.loading.insert(request, child);
        }
        for Holding {
            request,
            children,
            silent,
        } in holding
        {
            self.holding.insert(request, Held { children, silent });
        }
        for (child, plan) in self.children.iter_mut().zip(children) {
            child.begin_step(plan);
        }
    }

    fn end_step(&mut self) {
        for child in &mut self.children {
            child.end_step();
        }
    }

    fn take_report(&mut self) -> Result<WorkerReport, WorkerLost> {
        let mut all = WorkerReport::default();
        // One that is lost takes the others' reports along: the engine ends.
        let reports = self.children.iter_mut().map(|child| child.take_report());
        let reports: Vec<WorkerReport> = reports.collect::<Result<_, _>>()?;
        let mut parts: Vec<WorkerReport> = Vec::new();
        for ((mut report, index), place) in reports.into_iter().zip(0_u32..).zip(0_usize..) {
            if report.is_empty() {
                continue;
            }
            report
                .received
                .retain(|received| self.received_from(index, &received.request));
            report
                .sent
                .retain(|request| self.sent_from(index, request, &mut all.sent));
            all.received.extend_from_slice(&report.received);
            if !report.is_empty() {
                parts.resize_with(place, WorkerReport::default);
                parts.push(report);
            }
        }
        if !parts.is_empty() {
            parts.resize_with(self.children.len(), WorkerReport::default);
            all.part = Some(ReportPart::Multi(parts));
        }
        Ok(all)
    }

    fn figures(&mut self, figures: &mut Figures) {
        for child in &mut self.children {
            child.figures(figures);
        }
    }

    fn shutdown(&mut self, within: Duration) {
        let deadline = Instant::now() + within;
        for child in &mut self.children {
            child.shutdown(deadline.saturating_duration_since(Instant::now()));
        }
    }
}

impl std::fmt::Debug for MultiWorker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MultiWorker")
            .field("children", &self.children.len())
            .field("loading", &self.loading)
            .field("holding", &self.holding)
            .finish_non_exhaustive()
    }
}

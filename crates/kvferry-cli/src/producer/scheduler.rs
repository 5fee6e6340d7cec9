//! The producer's scheduler half, watched: how each lease ended, and whose it was.

use std::collections::HashMap;

use crossbeam::channel::Sender;
use kvferry_connector::contract::{
    Aggregated, Allocation, Capabilities, Finished, FinishedRequest, Matched, ReportPart,
    RequestView, SchedulerConnector, StepPlan, StepView,
};
use kvferry_connector::lease::End;
use kvferry_connector::remote::RemoteScheduler;
use kvferry_wire::params::Asked;
use kvferry_wire::{Epoch, RequestId};

/// `RemotePrefill` of one rank, with an ear at its reports.
pub(super) struct Watched {
    inner: RemoteScheduler,
    held: HashMap<Epoch, RequestId>,
    ends: Sender<(RequestId, End)>,
}

impl Watched {
    pub(super) fn new(inner: RemoteScheduler, ends: Sender<(RequestId, End)>) -> Self {
        Self {
            inner,
            held: HashMap::new(),
            ends,
        }
    }
}

impl SchedulerConnector for Watched {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn on_new_request(&mut self, request: &RequestView<'_>) {
        self.inner.on_new_request(request);
    }

    fn matched_tokens(&self, request: &RequestView<'_>, computed: u32) -> Matched {
        self.inner.matched_tokens(request, computed)
    }

    fn after_alloc(&mut self, request: &RequestView<'_>, allocation: &Allocation<'_>) {
        self.inner.after_alloc(request, allocation);
    }

    fn build_step(&mut self, step: &StepView<'_>) -> StepPlan {
        self.inner.build_step(step)
    }

    fn preempted(&mut self, requests: &[RequestId]) {
        self.inner.preempted(requests);
    }

    fn request_finished(&mut self, finished: &FinishedRequest<'_>) -> Finished {
        let answer = self.inner.request_finished(finished);
        if let Finished::Hold {
            params: Some(params),
        } = &answer
            && let Ok(Asked::Import(offer)) = Asked::parse(params)
        {
            let request = finished.request.id.clone();
            self.held.insert(offer.lease.epoch, request);
        }
        answer
    }

    fn on_report(&mut self, report: &Aggregated) {
        for (_, part) in &report.parts {
            let ReportPart::Remote(part) = part else {
                continue;
            };
            for (epoch, how) in &part.ended {
                if let Some(request) = self.held.remove(epoch) {
                    // Nobody counts any more once the producer ends.
                    let _ = self.ends.send((request, *how));
                }
            }
        }
        self.inner.on_report(report);
    }

    fn has_pending_work(&self) -> bool {
        self.inner.has_pending_work()
    }

    fn begin_shutdown(&mut self) {
        self.inner.begin_shutdown();
    }
}

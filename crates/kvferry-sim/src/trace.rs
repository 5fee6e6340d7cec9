//! The sequence of hook calls, to be compared with one recorded from a real vLLM.
//!
//! Responsible for one JSON object per call and line, with arguments and answer. The recorder stands
//! around a connector's halves, so neither side knows of it.

use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvferry_connector::contract::{
    Aggregated, Allocation, CacheLayout, Capabilities, Finished, FinishedRequest, Matched,
    RegisterCacheError, RequestView, SchedulerConnector, StepPlan, StepView, WorkerConnector,
    WorkerLost, WorkerReport,
};
use kvferry_wire::RequestId;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// A hook call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Call {
    /// The engine's name.
    pub engine: String,
    /// The rank for a worker half; nothing for the scheduler half.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// The hook.
    pub hook: String,
    /// Its arguments, and its answer under `answer`.
    pub with: Value,
}

/// Where calls are recorded. A clone records to the same place.
#[derive(Clone, Debug, Default)]
pub struct Trace(Arc<Mutex<Vec<Call>>>);

impl Trace {
    /// An empty one.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn record(&self, engine: &str, rank: Option<u32>, hook: &str, with: Value) {
        let call = Call {
            engine: engine.into(),
            rank,
            hook: hook.into(),
            with,
        };
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(call);
    }

    /// What was recorded so far.
    #[must_use]
    pub fn calls(&self) -> Vec<Call> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Writes one JSON object per line.
    ///
    /// # Errors
    /// Those of the writer.
    pub fn write(&self, to: &mut impl Write) -> std::io::Result<()> {
        for call in self.calls() {
            serde_json::to_writer(&mut *to, &call)?;
            to.write_all(b"\n")?;
        }
        Ok(())
    }
}

/// A scheduler half whose calls are recorded.
pub(crate) struct TracedScheduler {
    pub(crate) inner: Box<dyn SchedulerConnector>,
    pub(crate) trace: Trace,
    pub(crate) engine: String,
}

impl TracedScheduler {
    fn record(&self, hook: &str, with: Value) {
        self.trace.record(&self.engine, None, hook, with);
    }
}

impl SchedulerConnector for TracedScheduler {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn on_new_request(&mut self, request: &RequestView<'_>) {
        self.record(
            "on_new_request",
            json!({"request": request.id, "prompt": request.prompt, "params": request.params}),
        );
        self.inner.on_new_request(request);
    }

    fn matched_tokens(&self, request: &RequestView<'_>, computed: u32) -> Matched {
        let matched = self.inner.matched_tokens(request, computed);
        let answer = match matched {
            Matched::None => json!([0, false]),
            Matched::Later(_) => json!([null, false]),
            Matched::Sync(offer) => json!([offer.tokens(), false]),
            Matched::Async(offer) => json!([offer.tokens(), true]),
        };
        let with = json!({"request": request.id, "computed": computed, "answer": answer});
        self.record("matched_tokens", with);
        matched
    }

    fn after_alloc(&mut self, request: &RequestView<'_>, allocation: &Allocation<'_>) {
        let with = json!({
            "request": request.id, "blocks": allocation.blocks.0,
            "local": allocation.local_computed, "external": allocation.external,
        });
        self.record("after_alloc", with);
        self.inner.after_alloc(request, allocation);
    }

    fn build_step(&mut self, step: &StepView<'_>) -> StepPlan {
        let scheduled: Vec<Value> = step
            .scheduled
            .iter()
            .map(|one| {
                json!({
                    "request": one.request.id, "new_blocks": one.new_blocks.0,
                    "renewed": one.renewed, "computed": one.computed, "tokens": one.tokens,
                })
            })
            .collect();
        let plan = self.inner.build_step(step);
        let with = json!({"step": step.number, "scheduled": scheduled, "answer": plan});
        self.record("build_step", with);
        plan
    }

    fn preempted(&mut self, requests: &[RequestId]) {
        self.record("preempted", json!({ "requests": requests }));
        self.inner.preempted(requests);
    }

    fn request_finished(&mut self, finished: &FinishedRequest<'_>) -> Finished {
        let answer = self.inner.request_finished(finished);
        let held = match &answer {
            Finished::Free => json!([false, null]),
            Finished::Hold { params } => json!([true, params]),
        };
        let with = json!({
            "request": finished.request.id, "blocks": finished.blocks.0,
            "computed": finished.computed, "in_flight": finished.in_flight,
            "how": format!("{:?}", finished.how), "answer": held,
        });
        self.record("request_finished", with);
        answer
    }

    fn on_report(&mut self, report: &Aggregated) {
        self.record(
            "on_report",
            json!({"received": report.received, "sent": report.sent}),
        );
        self.inner.on_report(report);
    }

    fn has_pending_work(&self) -> bool {
        self.inner.has_pending_work()
    }

    fn begin_shutdown(&mut self) {
        self.record("begin_shutdown", json!({}));
        self.inner.begin_shutdown();
    }
}

/// A worker half whose calls are recorded. The plan stands in the scheduler half's `build_step`.
pub(crate) struct TracedWorker {
    pub(crate) inner: Box<dyn WorkerConnector>,
    pub(crate) trace: Trace,
    pub(crate) engine: String,
    pub(crate) rank: u32,
}

impl TracedWorker {
    fn record(&self, hook: &str, with: Value) {
        self.trace.record(&self.engine, Some(self.rank), hook, with);
    }
}

impl WorkerConnector for TracedWorker {
    fn register(&mut self, layout: &CacheLayout) -> Result<(), RegisterCacheError> {
        self.record("register", json!({"layers": layout.layers.len()}));
        self.inner.register(layout)
    }

    fn release_blocks(&mut self, plan: &StepPlan) {
        self.record("release_blocks", json!({}));
        self.inner.release_blocks(plan);
    }

    fn begin_step(&mut self, plan: StepPlan) {
        self.record("begin_step", json!({}));
        self.inner.begin_step(plan);
    }

    fn end_step(&mut self) {
        self.record("end_step", json!({}));
        self.inner.end_step();
    }

    fn take_report(&mut self) -> Result<WorkerReport, WorkerLost> {
        let report = self.inner.take_report()?;
        self.record("take_report", json!({ "answer": report }));
        Ok(report)
    }

    fn shutdown(&mut self, within: Duration) {
        self.record("shutdown", json!({"within_ms": within.as_millis() as u64}));
        self.inner.shutdown(within);
    }
}

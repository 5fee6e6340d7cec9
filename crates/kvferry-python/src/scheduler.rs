//! The scheduler half, for Python.

use std::collections::HashMap;
use std::sync::Arc;

use kvferry_connector::contract::{
    Aggregator, Allocation, Finish, Finished, FinishedRequest, GroupBlocks, Matched, Params,
    RequestView, Scheduled, SchedulerConnector, StepView, WorkerReport,
};
use kvferry_connector::directory::DirectoryServer;
use kvferry_wire::{Rank, RequestId};
use pyo3::prelude::*;
use pyo3::pybacked::{PyBackedBytes, PyBackedStr};
use pyo3::types::PyBytes;

use crate::figures::{Changed, Changes};
use crate::half::Half;
use crate::setup::Setup;
use crate::{configuration, engine};

/// A request of a step: id, its new blocks per group (`None` for none), whether it is new or resumed, tokens computed
/// before, tokens of this step, token ids that became known since the last call.
type OfStep = (
    PyBackedStr,
    Option<Vec<Vec<u32>>>,
    bool,
    u32,
    u32,
    Option<Vec<u32>>,
);

struct Known {
    id: RequestId,
    tokens: Vec<u32>,
    prompt: u32,
    params: Option<Params>,
    extra_key: String,
}

impl Known {
    fn view(&self) -> RequestView<'_> {
        RequestView {
            id: &self.id,
            tokens: &self.tokens,
            prompt: self.prompt,
            params: self.params.as_ref(),
            extra_key: &self.extra_key,
        }
    }
}

struct Inner {
    half: Box<dyn SchedulerConnector>,
    directory: Option<Arc<DirectoryServer>>,
    ranks: Aggregator,
    requests: HashMap<String, Known>,
    step: u64,
    changes: Changes,
}

/// The scheduler half of an engine's connector. Calls come from one thread at a time.
#[pyclass(frozen, module = "kvferry._native")]
pub(crate) struct SchedulerHalf {
    inner: Half<Inner>,
    #[pyo3(get)]
    address: Option<String>,
    #[pyo3(get)]
    reads_tokens: bool,
    #[pyo3(get)]
    best_effort: bool,
    #[pyo3(get)]
    requires_delivery: bool,
}

#[pymethods]
impl SchedulerHalf {
    #[new]
    fn new(py: Python<'_>, setup: &str) -> PyResult<Self> {
        let setup = Setup::parse(setup)?;
        let made = py.detach(|| setup.scheduler())?;
        let capabilities = made.half.capabilities();
        Ok(Self {
            address: made.address.map(|address| address.to_string()),
            reads_tokens: made.reads_tokens,
            best_effort: capabilities.best_effort,
            requires_delivery: capabilities.requires_delivery,
            inner: Half::new(
                "scheduler half",
                Inner {
                    half: made.half,
                    directory: made.directory,
                    ranks: Aggregator::new(setup.ranks),
                    requests: HashMap::new(),
                    step: 0,
                    changes: Changes::default(),
                },
            ),
        })
    }

    /// Makes a rank known to consumers.
    fn publish(&self, rank: u16, description: Vec<u8>) -> PyResult<()> {
        self.inner.with(|inner| match &inner.directory {
            Some(directory) => directory
                .publish(Rank { pp: 0, tp: rank }, description)
                .map_err(configuration),
            None => Ok(()),
        })?
    }

    /// A request has come in; `tokens` may be shorter than `prompt` where they are not known. `params` are JSON. Returns
    /// why the connector leaves the request alone, if it does.
    fn new_request(
        &self,
        id: String,
        tokens: Vec<u32>,
        prompt: u32,
        params: Option<&str>,
        extra_key: String,
    ) -> PyResult<Option<String>> {
        let known = match RequestId::new(&*id) {
            Ok(known) => known,
            Err(error) => return Ok(Some(format!("its id cannot be used: {error}"))),
        };
        let (params, wrong) = match params.map(serde_json::from_str::<Params>) {
            None => (None, None),
            Some(Ok(params)) => (Some(params), None),
            Some(Err(error)) => (None, Some(format!("its kv_transfer_params: {error}"))),
        };
        self.inner.with(|inner| {
            let known = Known {
                id: known,
                tokens,
                prompt: prompt.max(1),
                params,
                extra_key,
            };
            inner.half.on_new_request(&known.view());
            inner.requests.insert(id, known);
            wrong
        })
    }

    /// What can be loaded beyond `computed` tokens, and whether it comes while the request waits; `None` for "not known
    /// yet". Changes nothing.
    fn matched_tokens(&self, id: &str, computed: u32) -> PyResult<(Option<u32>, bool)> {
        self.inner.with(|inner| {
            let Some(known) = inner.requests.get(id) else {
                return (Some(0), false);
            };
            match inner.half.matched_tokens(&known.view(), computed) {
                Matched::None => (Some(0), false),
                Matched::Later(_) => (None, false),
                Matched::Sync(offer) => (Some(offer.tokens()), false),
                Matched::Async(offer) => (Some(offer.tokens()), true),
            }
        })
    }

    /// The request has these blocks per group, `local` tokens of its own and `external` ones to be loaded.
    fn after_alloc(
        &self,
        id: &str,
        blocks: Vec<Vec<u32>>,
        local: u32,
        external: u32,
    ) -> PyResult<()> {
        self.inner.with(|inner| {
            if let Some(known) = inner.requests.get(id) {
                let allocation = Allocation {
                    blocks: GroupBlocks(&blocks),
                    local_computed: local,
                    external,
                };
                inner.half.after_alloc(&known.view(), &allocation);
            }
        })
    }

    /// A step's plan.
    fn build_step<'py>(
        &self,
        py: Python<'py>,
        preempted: Vec<PyBackedStr>,
        scheduled: Vec<OfStep>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let plan = self
            .inner
            .with(|inner| inner.build_step(&preempted, scheduled))??;
        Ok(PyBytes::new(py, &plan))
    }

    /// A request ends. Whether its blocks are held, and the parameters for whoever reads them, as JSON.
    fn request_finished(
        &self,
        id: &str,
        blocks: Vec<Vec<u32>>,
        computed: u32,
        in_flight: u32,
        how: &str,
    ) -> PyResult<(bool, Option<String>)> {
        let how = match how {
            "stopped" => Finish::Stopped,
            "length" => Finish::Length,
            "aborted" => Finish::Aborted,
            _ => Finish::Failed,
        };
        self.inner.with(|inner| {
            let Some(known) = inner.requests.remove(id) else {
                return (false, None);
            };
            let finished = FinishedRequest {
                request: known.view(),
                blocks: GroupBlocks(&blocks),
                computed,
                in_flight,
                how,
            };
            match inner.half.request_finished(&finished) {
                Finished::Free => (false, None),
                Finished::Hold { params } => {
                    let text = params.map(|params| serde_json::Value::Object(params).to_string());
                    (true, text)
                }
            }
        })
    }

    /// What ranks have reported in a step.
    fn on_reports(&self, reports: Vec<(u32, PyBackedBytes)>) -> PyResult<()> {
        let reports = reports.iter().map(|(rank, report)| {
            let report: WorkerReport = rmp_serde::from_slice(report)
                .map_err(|error| engine(format!("the report of rank {rank}: {error}")))?;
            Ok((*rank, report))
        });
        let reports: Vec<_> = reports.collect::<PyResult<_>>()?;
        self.inner.with(|inner| {
            let all = inner.ranks.take(reports);
            if !all.is_empty() {
                inner.half.on_report(&all);
            }
        })
    }

    /// Whether steps are needed although no request computes.
    fn has_pending_work(&self) -> PyResult<bool> {
        self.inner.with(|inner| inner.half.has_pending_work())
    }

    /// What was counted since the last call: counters, gauges, histograms.
    fn figures(&self) -> PyResult<Changed> {
        self.inner
            .with(|inner| inner.changes.take(|figures| inner.half.figures(figures)))
    }

    /// Ends it; the port is free afterwards.
    fn shutdown(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.inner.take()?;
        py.detach(|| {
            if let Some(mut inner) = inner {
                inner.half.begin_shutdown();
            }
        });
        Ok(())
    }
}

impl Inner {
    fn build_step(
        &mut self,
        preempted: &[PyBackedStr],
        mut scheduled: Vec<OfStep>,
    ) -> PyResult<Vec<u8>> {
        if !preempted.is_empty() {
            let requests = &self.requests;
            let known = preempted.iter().filter_map(|id| requests.get(&**id));
            let ids: Vec<RequestId> = known.map(|known| known.id.clone()).collect();
            self.half.preempted(&ids);
        }
        for (id, _, _, _, _, tokens) in &mut scheduled {
            if let (Some(tokens), Some(known)) = (tokens.take(), self.requests.get_mut(&**id)) {
                known.tokens.extend(tokens);
            }
        }
        let views = scheduled.iter().filter_map(|of_step| {
            let (id, blocks, renewed, computed, tokens, _) = of_step;
            Some(Scheduled {
                request: self.requests.get(&**id)?.view(),
                new_blocks: GroupBlocks(blocks.as_deref().unwrap_or(&[])),
                renewed: *renewed,
                computed: *computed,
                tokens: *tokens,
            })
        });
        let views: Vec<Scheduled<'_>> = views.collect();
        self.step += 1;
        let plan = self.half.build_step(&StepView {
            number: self.step,
            scheduled: &views,
        });
        rmp_serde::to_vec(&plan).map_err(engine)
    }
}

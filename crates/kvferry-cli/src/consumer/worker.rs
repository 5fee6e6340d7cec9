//! The consumer's worker half, watched: what its loads have come to, and what is done wrong on request.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvferry_connector::contract::{
    CacheLayout, Received, RegisterCacheError, StepPlan, WorkerConnector, WorkerLost, WorkerReport,
};
use kvferry_connector::remote::{LoaderStats, RemoteWorker};
use kvferry_engine::MemoryError;
use kvferry_wire::RequestId;

use crate::fault::Fault;

/// Shared with the run.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen(Arc<Mutex<LoaderStats>>);

impl Seen {
    pub(super) fn stats(&self) -> LoaderStats {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// `RemotePrefill`'s worker half, with an ear at its reports.
pub(super) struct Watched {
    inner: RemoteWorker,
    seen: Seen,
    fault: Option<Fault>,
    layout: Option<CacheLayout>,
    /// Loads that were kept from the connector and are said to have succeeded.
    skipped: Vec<Received>,
    /// The last block of each load.
    last_blocks: HashMap<RequestId, u32>,
}

impl Watched {
    pub(super) fn new(inner: RemoteWorker, seen: Seen, fault: Option<Fault>) -> Self {
        Self {
            inner,
            seen,
            fault,
            layout: None,
            skipped: Vec::new(),
            last_blocks: HashMap::new(),
        }
    }

    /// Flips a bit in the middle of a block of the first layer.
    fn damage(&self, block: u32) -> Result<(), MemoryError> {
        let Some(layer) = self.layout.as_ref().and_then(|it| it.layers.first()) else {
            return Ok(());
        };
        let at = layer.offset + u64::from(block) * layer.block_stride + layer.block_bytes / 2;
        let mut byte = [0];
        layer.memory.read_at(at, &mut byte)?;
        layer.memory.write_at(at, &[byte[0] ^ 0x10])
    }
}

impl WorkerConnector for Watched {
    fn register(&mut self, layout: &CacheLayout) -> Result<(), RegisterCacheError> {
        self.layout = Some(layout.clone());
        self.inner.register(layout)
    }

    fn release_blocks(&mut self, plan: &StepPlan) {
        self.inner.release_blocks(plan);
    }

    fn begin_step(&mut self, mut plan: StepPlan) {
        if let StepPlan::Remote(plan) = &mut plan {
            match self.fault {
                Some(Fault::SkipRead) => {
                    for load in plan.load.drain(..) {
                        plan.release.push(load.request.clone());
                        self.skipped.push(Received {
                            request: load.request,
                            failure: None,
                            failed: Vec::new(),
                        });
                    }
                }
                Some(Fault::Damage) => {
                    for load in &plan.load {
                        let last = load.blocks.iter().find_map(|group| group.local.last());
                        let last = last.map(|&block| (load.request.clone(), block));
                        self.last_blocks.extend(last);
                    }
                }
                Some(Fault::LoseRequest) | None => {}
            }
        }
        self.inner.begin_step(plan);
    }

    fn end_step(&mut self) {
        self.inner.end_step();
    }

    fn take_report(&mut self) -> Result<WorkerReport, WorkerLost> {
        let mut report = self.inner.take_report()?;
        report.received.append(&mut self.skipped);
        let good = report.received.iter().find(|it| it.failure.is_none());
        if let Some(block) = good.and_then(|load| self.last_blocks.remove(&load.request)) {
            self.fault = None;
            self.last_blocks.clear();
            if let Err(error) = self.damage(block) {
                tracing::error!(%error, "no byte was damaged");
            }
        }
        *self.seen.0.lock().unwrap_or_else(PoisonError::into_inner) = self.inner.loader_stats();
        Ok(report)
    }

    fn shutdown(&mut self, within: Duration) {
        self.inner.shutdown(within);
    }
}

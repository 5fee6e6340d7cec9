//! The worker half of a rank, for Python.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::time::Duration;

use kvferry_connector::contract::{CacheGroup, CacheLayer, CacheLayout, StepPlan, WorkerConnector};
use kvferry_connector::discovery::{CacheGroupSpec, Discovered, TensorView, discover};
use kvferry_engine::wire::MemoryKind;
use kvferry_engine::{Engine, MemoryRegion};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::figures::{Changed, Changes};
use crate::half::Half;
use crate::halves::Worker;
use crate::setup::Setup;
use crate::{configuration, engine};

/// A tensor: layer, address and bytes of its storage, its offset in there in bytes, shape, strides in elements, bytes of
/// an element, CUDA device or `None` for host memory.
type Tensor = (String, u64, u64, u64, Vec<u64>, Vec<i64>, u64, Option<u16>);
/// Loads that ended, those of them that failed, held requests that ended, and the report as bytes if there is one.
type Report<'py> = (
    Vec<String>,
    Vec<String>,
    Vec<String>,
    Option<Bound<'py, PyBytes>>,
);

struct Inner {
    half: Box<dyn WorkerConnector>,
    engine: Option<Engine>,
    shutdown: Duration,
    changes: Changes,
    /// The bytes of the last plan that was read, and what it says: an empty step's is like the one before.
    last: Option<(Vec<u8>, StepPlan)>,
}

/// The worker half of one rank. Calls come from one thread at a time.
#[pyclass(frozen, module = "kvferry._native")]
pub(crate) struct WorkerHalf {
    inner: Half<Inner>,
    /// What was found out about the tensors and is worth a line in the log.
    #[pyo3(get)]
    notes: Vec<String>,
}

#[pymethods]
impl WorkerHalf {
    /// Starts the rank's engine and registers the tensors. `groups` are layer names and tokens of a block per cache
    /// group.
    ///
    /// Whoever calls this keeps the tensors alive until `shutdown` has returned, or the process ends.
    #[new]
    fn new(
        py: Python<'_>,
        setup: &str,
        rank: u32,
        tensors: Vec<Tensor>,
        groups: Vec<(Vec<String>, u32)>,
        blocks: u32,
    ) -> PyResult<Self> {
        let setup = Setup::parse(setup)?;
        py.detach(|| {
            let found = found(&tensors, &groups, blocks)?;
            let Worker {
                mut half,
                engine: started,
                shutdown,
            } = setup.worker(rank, found.fingerprint())?;
            let layout = layout(&found, &groups)?;
            half.register(&layout).map_err(|error| {
                let table = found.tables.iter().find(|table| table.layer == error.layer);
                let name = table.map_or("?", |table| &table.name);
                configuration(format!("{name}: {}", error.reason))
            })?;
            Ok(Self {
                notes: found.notes.iter().map(ToString::to_string).collect(),
                inner: Half::new(
                    "worker half",
                    Inner {
                        half,
                        engine: started,
                        shutdown,
                        changes: Changes::default(),
                        last: None,
                    },
                ),
            })
        })
    }

    /// What consumers are told of this rank; `None` if nobody connects.
    fn describe<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let started = self.inner.with(|inner| inner.engine.clone())?;
        let Some(started) = started else {
            return Ok(None);
        };
        let description =
            py.detach(|| started.describe().map_err(engine)?.encode().map_err(engine))?;
        Ok(Some(PyBytes::new(py, &description)))
    }

    /// Lets go of blocks that have new owners.
    fn release_blocks(&self, plan: &[u8]) -> PyResult<()> {
        self.inner.with(|inner| {
            let plan = inner.plan(plan)?;
            inner.half.release_blocks(&plan);
            Ok(())
        })?
    }

    /// A step begins.
    fn begin_step(&self, plan: &[u8]) -> PyResult<()> {
        self.inner.with(|inner| {
            let plan = inner.plan(plan)?;
            inner.half.begin_step(plan);
            Ok(())
        })?
    }

    /// The step's forward is over.
    fn end_step(&self) -> PyResult<()> {
        self.inner.with(|inner| inner.half.end_step())
    }

    /// What has ended since the last call. Raises `EngineError` once a thread of the rank has ended by itself.
    fn take_report<'py>(&self, py: Python<'py>) -> PyResult<Report<'py>> {
        let report = self.inner.with(|inner| inner.half.take_report())?;
        let report = report.map_err(engine)?;
        if report.is_empty() {
            return Ok((Vec::new(), Vec::new(), Vec::new(), None));
        }
        let name = |id: &kvferry_wire::RequestId| id.as_str().to_owned();
        let received = report.received.iter().map(|it| name(&it.request)).collect();
        let failed = report.received.iter().filter(|it| it.failure.is_some());
        let failed = failed.map(|it| name(&it.request)).collect();
        let sent = report.sent.iter().map(name).collect();
        let bytes = rmp_serde::to_vec(&report).map_err(engine)?;
        Ok((received, failed, sent, Some(PyBytes::new(py, &bytes))))
    }

    /// What was counted since the last call: counters, gauges, histograms.
    fn figures(&self) -> PyResult<Changed> {
        self.inner
            .with(|inner| inner.changes.take(|figures| inner.half.figures(figures)))
    }

    /// Ends everything; leases may end by themselves for as long as is set. Nothing touches the tensors afterwards.
    fn shutdown(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.inner.take()?;
        py.detach(|| {
            if let Some(mut inner) = inner {
                inner.half.shutdown(inner.shutdown);
            }
        });
        Ok(())
    }
}

impl Inner {
    fn plan(&mut self, bytes: &[u8]) -> PyResult<StepPlan> {
        if let Some((last, plan)) = &self.last
            && last == bytes
        {
            return Ok(plan.clone());
        }
        let plan: StepPlan = rmp_serde::from_slice(bytes)
            .map_err(|error| engine(format!("a step's plan of {} bytes: {error}", bytes.len())))?;
        self.last = Some((bytes.to_vec(), plan.clone()));
        Ok(plan)
    }
}

fn found(tensors: &[Tensor], groups: &[(Vec<String>, u32)], blocks: u32) -> PyResult<Discovered> {
    let views: Vec<TensorView<'_>> = tensors
        .iter()
        .map(|tensor| {
            let (layer, storage, storage_bytes, offset, shape, strides, item_bytes, device) =
                tensor;
            TensorView {
                layer,
                storage: *storage,
                storage_bytes: *storage_bytes,
                offset: *offset,
                shape,
                strides,
                item_bytes: *item_bytes,
                device: device.map_or(MemoryKind::Host, |device| MemoryKind::Cuda { device }),
            }
        })
        .collect();
    let groups: Vec<CacheGroupSpec<'_>> = groups
        .iter()
        .map(|(layers, block_tokens)| CacheGroupSpec {
            layers,
            block_tokens: *block_tokens,
        })
        .collect();
    discover(&views, &groups, blocks).map_err(configuration)
}

fn layout(found: &Discovered, groups: &[(Vec<String>, u32)]) -> PyResult<CacheLayout> {
    let regions = found.regions.iter().map(|region| {
        let base = NonNull::new(std::ptr::with_exposed_provenance_mut::<u8>(
            region.address as usize,
        ));
        let base = base.ok_or_else(|| configuration("a tensor without memory"))?;
        // SAFETY: the range lies inside of storages of tensors that Python keeps until this half is shut down
        // (the constructor's contract), and nobody has Rust references to them.
        let memory =
            unsafe { MemoryRegion::borrowed_kind(base, region.bytes as usize, region.kind) };
        memory.map_err(configuration)
    });
    let regions: Vec<MemoryRegion> = regions.collect::<PyResult<_>>()?;
    let layers = found.tables.iter().map(|table| {
        let memory = regions.get(table.region).cloned();
        Ok(CacheLayer {
            layer: table.layer,
            group: table.group,
            memory: memory.ok_or_else(|| configuration("a table outside of every region"))?,
            offset: table.offset,
            block_bytes: table.block_bytes,
            block_stride: table.block_stride,
            blocks: table.blocks,
        })
    });
    Ok(CacheLayout {
        groups: groups
            .iter()
            .map(|(_, block_tokens)| CacheGroup {
                block_tokens: *block_tokens,
            })
            .collect(),
        layers: layers.collect::<PyResult<_>>()?,
    })
}

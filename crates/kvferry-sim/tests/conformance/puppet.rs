//! A connector that does what a script says, by the rules of `recording_connector.py`.
//!
//! Beside those rules it brings the bytes that a load is to bring: the simulator looks.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use kvferry_connector::contract::{
    Aggregated, Allocation, CacheLayout, Capabilities, FailedBlock, Finished, FinishedRequest,
    LoadFailure, Matched, Received, RegisterCacheError, RequestView, SchedulerConnector, StepPlan,
    StepView, WorkerConnector, WorkerLost, WorkerReport,
};
use kvferry_sim::{Halves, Model};
use kvferry_wire::RequestId;

use crate::script::{Failed, Offer, Request, Script};

/// A load that was begun.
struct Load {
    request: RequestId,
    /// The step it is reported in; a sync load is there when its step begins.
    due: u32,
    sync: bool,
    positions: std::ops::Range<u32>,
    table: Vec<u32>,
    failed: Option<Failed>,
}

#[derive(Default)]
struct Play {
    requests: BTreeMap<RequestId, Request>,
    /// The script's step, from 1.
    step: u32,
    /// Loads that were begun, per request: the next offer is the one with that index.
    begun: BTreeMap<RequestId, usize>,
    loads: Vec<Load>,
    /// Requests that are held, until the workers are told that they are finished.
    held: BTreeSet<RequestId>,
    sending: Vec<(u32, RequestId)>,
    layout: Option<CacheLayout>,
}

/// Both halves.
#[derive(Clone)]
pub(crate) struct Puppet(Arc<Mutex<Play>>);

impl Puppet {
    pub(crate) fn new(script: &Script) -> Self {
        let requests = script.requests.iter();
        Self(Arc::new(Mutex::new(Play {
            requests: requests.map(|one| (one.id.clone(), one.clone())).collect(),
            ..Play::default()
        })))
    }

    pub(crate) fn halves(&self) -> Halves {
        Halves {
            scheduler: Box::new(self.clone()),
            workers: vec![Box::new(self.clone())],
        }
    }

    pub(crate) fn begin(&self, step: u32) {
        self.play().step = step;
    }

    fn play(&self) -> MutexGuard<'_, Play> {
        self.0.lock().unwrap()
    }
}

impl Play {
    fn offer(&self, id: &RequestId) -> Option<&Offer> {
        let begun = self.begun.get(id).copied().unwrap_or(0);
        self.requests[id].offers.get(begun)
    }

    /// Takes out the loads that `is` holds for.
    fn take(&mut self, is: impl Fn(&Load) -> bool) -> Vec<Load> {
        let (taken, left) = std::mem::take(&mut self.loads)
            .into_iter()
            .partition(|load| is(load));
        self.loads = left;
        taken
    }

    /// Writes what a load brings: all but the blocks that fail.
    fn bring(&self, load: &Load) {
        let failed: &[usize] = match &load.failed {
            None => &[],
            Some(Failed::Blocks(places)) => places,
            Some(Failed::Request(_)) => return,
        };
        let model = crate::model();
        let chain = Model::chain("", &self.requests[&load.request].prompt());
        let layout = self.layout.as_ref().unwrap();
        let block_tokens = layout.groups[0].block_tokens;
        let mut cell = vec![0; model.head_bytes as usize];
        for layer in &layout.layers {
            for position in load.positions.clone() {
                let place = (position / block_tokens) as usize;
                if failed.contains(&place) {
                    continue;
                }
                for head in 0..model.heads {
                    Model::cell(chain[position as usize], layer.layer, head, &mut cell);
                    let token = u64::from(head * block_tokens + position % block_tokens);
                    let at = layer.offset
                        + u64::from(load.table[place]) * layer.block_stride
                        + token * u64::from(model.head_bytes);
                    layer.memory.write_at(at, &cell).unwrap();
                }
            }
        }
    }
}

impl SchedulerConnector for Puppet {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            requires_delivery: true,
            best_effort: false,
            loaded_groups: None,
            layout: None,
            reads_freed: false,
        }
    }

    fn on_new_request(&mut self, _: &RequestView<'_>) {}

    fn matched_tokens(&self, request: &RequestView<'_>, computed: u32) -> Matched {
        let play = self.play();
        play.offer(request.id).map_or(Matched::None, |offer| {
            offer.answer(play.step, request.prompt, computed)
        })
    }

    fn after_alloc(&mut self, request: &RequestView<'_>, allocation: &Allocation<'_>) {
        if allocation.external == 0 {
            return;
        }
        let mut play = self.play();
        let offer = play.offer(request.id).unwrap().clone();
        *play.begun.entry(request.id.clone()).or_default() += 1;
        let local = allocation.local_computed;
        let load = Load {
            request: request.id.clone(),
            due: play.step + offer.takes,
            sync: offer.sync,
            positions: local..local + allocation.external,
            table: allocation.blocks.0[0].clone(),
            failed: offer.failed,
        };
        play.loads.push(load);
    }

    fn build_step(&mut self, _: &StepView<'_>) -> StepPlan {
        let mut play = self.play();
        for id in std::mem::take(&mut play.held) {
            let due = play.step + play.requests[&id].hold.unwrap();
            play.sending.push((due, id));
        }
        StepPlan::Multi(kvferry_connector::multi::Plan::default())
    }

    fn preempted(&mut self, _: &[RequestId]) {}

    fn request_finished(&mut self, finished: &FinishedRequest<'_>) -> Finished {
        let mut play = self.play();
        let id = finished.request.id;
        if play.requests[id].hold.is_none() {
            return Finished::Free;
        }
        play.held.insert(id.clone());
        Finished::Hold { params: None }
    }

    fn on_report(&mut self, _: &Aggregated) {}

    fn has_pending_work(&self) -> bool {
        false
    }

    fn begin_shutdown(&mut self) {}
}

impl WorkerConnector for Puppet {
    fn register(&mut self, layout: &CacheLayout) -> Result<(), RegisterCacheError> {
        self.play().layout = Some(layout.clone());
        Ok(())
    }

    fn release_blocks(&mut self, _: &StepPlan) {}

    fn begin_step(&mut self, _: StepPlan) {
        let mut play = self.play();
        for load in play.take(|load| load.sync) {
            play.bring(&load);
        }
    }

    fn end_step(&mut self) {}

    fn take_report(&mut self) -> Result<WorkerReport, WorkerLost> {
        let mut play = self.play();
        let step = play.step;
        let mut report = WorkerReport::default();
        for load in play.take(|load| load.due <= step) {
            play.bring(&load);
            let places = match &load.failed {
                Some(Failed::Blocks(places)) => places.as_slice(),
                _ => &[],
            };
            report.received.push(Received {
                failure: load.failed.as_ref().map(|_| LoadFailure::Peer),
                failed: places
                    .iter()
                    .map(|&place| FailedBlock {
                        group: 0,
                        block: load.table[place],
                    })
                    .collect(),
                request: load.request,
            });
        }
        let (due, left): (Vec<_>, _) = std::mem::take(&mut play.sending)
            .into_iter()
            .partition(|(due, _)| *due <= step);
        play.sending = left;
        report.sent = due.into_iter().map(|(_, id)| id).collect();
        Ok(report)
    }

    fn shutdown(&mut self, _: Duration) {}
}

//! A connector that says what a test wants.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvferry_connector::contract::{
    Aggregated, Allocation, CacheLayout, Capabilities, FailedBlock, Finish, Finished,
    FinishedRequest, LoadFailure, Matched, Received, RegisterCacheError, RequestView,
    SchedulerConnector, StepPlan, StepView, WorkerConnector, WorkerLost, WorkerReport,
};
use kvferry_sim::{
    EngineConfig, GroupKind, Halves, Model, NewRequest, Output, SimEngine, Tables, Trace, Violation,
};
use kvferry_wire::RequestId;

type AtBegin = Box<dyn FnOnce(&Puppet) + Send>;
type Lookup = Box<dyn Fn(&RequestView<'_>, u32) -> Matched + Send>;

/// What a test says and sees.
#[derive(Default)]
pub(crate) struct State {
    /// What is offered; nothing by default.
    pub(crate) lookup: Option<Lookup>,
    /// Whether blocks of requests that end are held.
    pub(crate) hold: bool,
    /// Per rank, what it reports next.
    pub(crate) reports: Vec<WorkerReport>,
    pub(crate) layouts: Vec<CacheLayout>,
    pub(crate) pending: bool,
    /// Calls as a test reads them.
    pub(crate) calls: Vec<String>,
    /// The last allocation's blocks, of any request.
    pub(crate) allocated: Tables,
    /// Whether it may read blocks that are free.
    pub(crate) reads_freed: bool,
    /// What a worker does when its next step begins.
    pub(crate) at_begin: Option<AtBegin>,
    /// A block (group, id), and what was in it at the beginning of each hook of rank 0.
    pub(crate) watched: Option<(u32, u32)>,
    pub(crate) seen: Vec<(&'static str, Vec<u8>)>,
}

/// A test's end of both halves.
#[derive(Clone, Default)]
pub(crate) struct Puppet(pub(crate) Arc<Mutex<State>>);

struct Worker(Puppet, usize);

impl SchedulerConnector for Puppet {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            requires_delivery: true,
            best_effort: false,
            loaded_groups: None,
            layout: None,
            reads_freed: self.0.lock().unwrap().reads_freed,
        }
    }

    fn on_new_request(&mut self, request: &RequestView<'_>) {
        let first = request.tokens[0];
        self.call(format!(
            "new {} {}x{first}",
            request.id.as_str(),
            request.prompt
        ));
    }

    fn matched_tokens(&self, request: &RequestView<'_>, computed: u32) -> Matched {
        self.call(format!("lookup {} {computed}", request.id.as_str()));
        let state = self.0.lock().unwrap();
        state
            .lookup
            .as_ref()
            .map_or(Matched::None, |lookup| lookup(request, computed))
    }

    fn after_alloc(&mut self, request: &RequestView<'_>, allocation: &Allocation<'_>) {
        let (local, external) = (allocation.local_computed, allocation.external);
        self.call(format!("alloc {} {local}+{external}", request.id.as_str()));
        self.0.lock().unwrap().allocated = allocation.blocks.0.to_vec();
    }

    fn build_step(&mut self, step: &StepView<'_>) -> StepPlan {
        for one in step.scheduled {
            let blocks: usize = one.new_blocks.0.iter().map(Vec::len).sum();
            let renewed = if one.renewed { " renewed" } else { "" };
            self.call(format!(
                "step {} {}+{} blocks {blocks}{renewed}",
                one.request.id.as_str(),
                one.computed,
                one.tokens
            ));
        }
        StepPlan::Multi(kvferry_connector::multi::Plan::default())
    }

    fn preempted(&mut self, requests: &[RequestId]) {
        let ids: Vec<_> = requests.iter().map(RequestId::as_str).collect();
        self.call(format!("preempted {}", ids.join(" ")));
    }

    fn request_finished(&mut self, finished: &FinishedRequest<'_>) -> Finished {
        let blocks: usize = finished.blocks.0.iter().map(Vec::len).sum();
        self.call(format!(
            "finished {} {:?} computed {}-{} blocks {blocks}",
            finished.request.id.as_str(),
            finished.how,
            finished.computed,
            finished.in_flight
        ));
        match self.0.lock().unwrap().hold {
            true => Finished::Hold { params: None },
            false => Finished::Free,
        }
    }

    fn on_report(&mut self, report: &Aggregated) {
        self.call(format!(
            "report {}+{}",
            report.received.len(),
            report.sent.len()
        ));
    }

    fn has_pending_work(&self) -> bool {
        self.0.lock().unwrap().pending
    }

    fn begin_shutdown(&mut self) {}
}

impl WorkerConnector for Worker {
    fn register(&mut self, layout: &CacheLayout) -> Result<(), RegisterCacheError> {
        self.0.0.lock().unwrap().layouts.push(layout.clone());
        Ok(())
    }

    fn release_blocks(&mut self, _: &StepPlan) {
        self.0.look("release_blocks");
    }

    fn begin_step(&mut self, _: StepPlan) {
        self.0.look("begin_step");
        let at_begin = self.0.0.lock().unwrap().at_begin.take();
        if let Some(at_begin) = at_begin {
            at_begin(&self.0);
        }
    }

    fn end_step(&mut self) {}

    fn take_report(&mut self) -> Result<WorkerReport, WorkerLost> {
        Ok(std::mem::take(
            &mut self.0.0.lock().unwrap().reports[self.1],
        ))
    }

    fn shutdown(&mut self, _: Duration) {}
}

impl Puppet {
    fn call(&self, call: String) {
        self.0.lock().unwrap().calls.push(call);
    }

    /// An engine around a new puppet.
    pub(crate) fn engine(config: EngineConfig, model: &Model) -> (Self, SimEngine) {
        Self::default().engine_around(config, model)
    }

    /// An engine around this puppet.
    pub(crate) fn engine_around(self, config: EngineConfig, model: &Model) -> (Self, SimEngine) {
        let puppet = self;
        let ranks = config.ranks as usize;
        puppet
            .0
            .lock()
            .unwrap()
            .reports
            .resize_with(ranks, WorkerReport::default);
        let worker = |rank| -> Box<dyn WorkerConnector> { Box::new(Worker(puppet.clone(), rank)) };
        let halves = Halves {
            scheduler: Box::new(puppet.clone()),
            workers: (0..ranks).map(worker).collect(),
        };
        let halves = halves.traced(&config.name, &Trace::new());
        let engine = SimEngine::new(config, model, halves).unwrap();
        (puppet, engine)
    }

    pub(crate) fn offer(&self, lookup: impl Fn(&RequestView<'_>, u32) -> Matched + Send + 'static) {
        self.0.lock().unwrap().lookup = Some(Box::new(lookup));
    }

    /// An async offer of the first so many tokens, to whoever has less.
    pub(crate) fn offer_async(&self, tokens: u32) {
        self.offer(move |request, computed| Matched::load_async(request.prompt, computed, tokens));
    }

    pub(crate) fn hold(&self, hold: bool) {
        self.0.lock().unwrap().hold = hold;
    }

    /// Every rank reports a load.
    pub(crate) fn received(&self, id: &RequestId, failed: Option<&[(u32, u32)]>) {
        let ranks = self.0.lock().unwrap().reports.len();
        for rank in 0..ranks {
            self.rank_received(rank, id, failed);
        }
    }

    pub(crate) fn rank_received(&self, rank: usize, id: &RequestId, failed: Option<&[(u32, u32)]>) {
        let received = Received {
            request: id.clone(),
            failure: failed.map(|_| LoadFailure::Peer),
            failed: failed
                .unwrap_or_default()
                .iter()
                .map(|&(group, block)| FailedBlock { group, block })
                .collect(),
        };
        self.0.lock().unwrap().reports[rank].received.push(received);
    }

    /// Every rank reports a finished request as sent.
    pub(crate) fn sent(&self, id: &RequestId) {
        for report in &mut self.0.lock().unwrap().reports {
            report.sent.push(id.clone());
        }
    }

    /// Writes what a load of the first `tokens` tokens of `prompt` would bring to the blocks that were
    /// allocated last, on a single rank.
    pub(crate) fn bring(&self, model: &Model, prompt: &[u32], tokens: std::ops::Range<u32>) {
        let state = self.0.lock().unwrap();
        let chain = Model::chain("", prompt);
        let layout = &state.layouts[0];
        let mut cell = vec![0; model.head_bytes as usize];
        for layer in &layout.layers {
            let block_tokens = layout.groups[layer.group as usize].block_tokens;
            for position in tokens.clone() {
                let table = &state.allocated[layer.group as usize];
                let block = table[(position / block_tokens) as usize];
                for head in 0..model.heads {
                    if block == 0 {
                        continue;
                    }
                    Model::cell(chain[position as usize], layer.layer, head, &mut cell);
                    let token = u64::from(head * block_tokens + position % block_tokens);
                    let at = layer.offset
                        + u64::from(block) * layer.block_stride
                        + token * u64::from(model.head_bytes);
                    layer.memory.write_at(at, &cell).unwrap();
                }
            }
        }
    }

    fn look(&self, hook: &'static str) {
        let watched = self.0.lock().unwrap().watched;
        if let Some((group, block)) = watched {
            let bytes = self.bytes(group, block);
            self.0.lock().unwrap().seen.push((hook, bytes));
        }
    }

    /// What is in a block of rank 0.
    pub(crate) fn bytes(&self, group: u32, block: u32) -> Vec<u8> {
        let state = self.0.lock().unwrap();
        let layers = state.layouts[0].layers.iter();
        let mut all = Vec::new();
        for layer in layers.filter(|layer| layer.group == group) {
            let mut bytes = vec![0; layer.block_bytes as usize];
            let at = layer.offset + u64::from(block) * layer.block_stride;
            layer.memory.read_at(at, &mut bytes).unwrap();
            all.extend(bytes);
        }
        all
    }

    /// The calls since the last look.
    pub(crate) fn calls(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap().calls)
    }
}

pub(crate) fn id(text: &str) -> RequestId {
    RequestId::new(text).unwrap()
}

pub(crate) fn request(name: &str, prompt: u32, max_tokens: u32) -> NewRequest {
    NewRequest {
        id: id(name),
        prompt: tokens(prompt),
        max_tokens,
        params: None,
        extra_key: String::new(),
    }
}

/// A prompt of so many tokens.
pub(crate) fn tokens(length: u32) -> Vec<u32> {
    (1..=length).collect()
}

/// A model whose requests stop only at their length.
pub(crate) fn model() -> Model {
    Model {
        stop_every: 0,
        ..Model::default()
    }
}

pub(crate) fn windowed() -> Model {
    Model {
        groups: vec![GroupKind::Full, GroupKind::Window { tokens: 5 }],
        layers: vec![0, 1],
        ..model()
    }
}

/// Steps until the request has ended, at most so many times.
pub(crate) fn until_output(engine: &mut SimEngine, name: &str) -> Output {
    for _ in 0..1000 {
        engine.step().unwrap();
        if let Some(output) = engine
            .take_outputs()
            .into_iter()
            .find(|out| out.id == id(name))
        {
            return output;
        }
    }
    panic!("{name} does not end: {}", engine.stuck());
}

/// Steps until a rule is broken.
pub(crate) fn until_broken(engine: &mut SimEngine) -> Violation {
    for _ in 0..100 {
        if let Err(breach) = engine.step() {
            return breach.violation;
        }
    }
    panic!("no rule was broken");
}

/// Right tokens, whatever was loaded from where.
pub(crate) fn assert_right(model: &Model, output: &Output, prompt: u32, max_tokens: u32) {
    assert_eq!(
        output.generated,
        model.reference(&tokens(prompt), "", max_tokens)
    );
    assert!(matches!(output.how, Finish::Length | Finish::Stopped));
}

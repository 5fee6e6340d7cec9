//! Children that do what a test says, and remember what they were asked.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use kvferry_wire::RequestId;

use super::super::*;
use crate::contract::*;
use crate::storage;

pub(super) fn id(text: &str) -> RequestId {
    RequestId::new(text).unwrap()
}

#[derive(Debug)]
pub(super) struct Script {
    pub(super) capabilities: Capabilities,
    pub(super) answer: Matched,
    pub(super) finish: Finished,
    pub(super) pending: bool,
    /// How often it was asked for tokens.
    pub(super) asked: u32,
    /// The rest of the calls, in words.
    pub(super) calls: Vec<String>,
    pub(super) reports: Vec<Aggregated>,
    plan: storage::Plan,
    steps: u64,
    loading: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Scripted(Arc<Mutex<Script>>);

impl Scripted {
    pub(super) fn new(answer: Matched) -> Self {
        Self(Arc::new(Mutex::new(Script {
            capabilities: Capabilities {
                requires_delivery: false,
                best_effort: true,
                loaded_groups: None,
                layout: None,
                reads_freed: false,
            },
            answer,
            finish: Finished::Free,
            pending: false,
            asked: 0,
            calls: Vec::new(),
            reports: Vec::new(),
            plan: storage::Plan::default(),
            steps: 0,
            loading: false,
        })))
    }

    pub(super) fn get(&self) -> MutexGuard<'_, Script> {
        self.0.lock().unwrap()
    }

    /// What it was called with since the last time.
    pub(super) fn calls(&self) -> Vec<String> {
        std::mem::take(&mut self.get().calls)
    }

    fn note(&self, call: String) {
        self.get().calls.push(call);
    }
}

pub(super) fn offer(tokens: u32) -> Matched {
    Matched::load_async(1_000, 0, tokens)
}

fn params(request: &RequestView<'_>) -> String {
    request.params.map_or("none".to_owned(), |params| {
        serde_json::to_string(params).unwrap()
    })
}

impl SchedulerConnector for Scripted {
    fn capabilities(&self) -> Capabilities {
        self.get().capabilities.clone()
    }

    fn on_new_request(&mut self, request: &RequestView<'_>) {
        self.note(format!("new {} {}", request.id, params(request)));
    }

    fn matched_tokens(&self, _: &RequestView<'_>, _: u32) -> Matched {
        let mut script = self.get();
        script.asked += 1;
        script.answer
    }

    fn after_alloc(&mut self, request: &RequestView<'_>, allocation: &Allocation<'_>) {
        let Allocation {
            blocks,
            local_computed,
            external,
        } = *allocation;
        self.note(format!(
            "alloc {} {:?} {local_computed} {external}",
            request.id, blocks.0
        ));
        if external > 0 {
            let mut script = self.get();
            script.loading = true;
            script.plan.load.push(storage::Load {
                request: request.id.clone(),
                blocks: Vec::new(),
                unknown: Vec::new(),
            });
        }
    }

    fn build_step(&mut self, step: &StepView<'_>) -> StepPlan {
        let mut script = self.get();
        script.steps += 1;
        assert_eq!(step.number, script.steps, "a step without a plan");
        for scheduled in step.scheduled {
            script.calls.push(format!(
                "step {} {}",
                scheduled.request.id,
                params(&scheduled.request)
            ));
        }
        StepPlan::Storage(std::mem::take(&mut script.plan))
    }

    fn preempted(&mut self, requests: &[RequestId]) {
        self.note(format!("preempted {requests:?}"));
    }

    fn request_finished(&mut self, finished: &FinishedRequest<'_>) -> Finished {
        self.note(format!(
            "finished {} {}",
            finished.request.id,
            params(&finished.request)
        ));
        let mut script = self.get();
        let answer = script.finish.clone();
        if matches!(answer, Finished::Hold { .. }) {
            script.plan.finished.push(finished.request.id.clone());
        }
        answer
    }

    fn on_report(&mut self, report: &Aggregated) {
        self.get().reports.push(report.clone());
    }

    fn has_pending_work(&self) -> bool {
        self.get().pending
    }

    fn begin_shutdown(&mut self) {
        self.note("shutdown".to_owned());
    }
}

/// The worker half, which reports what it is told to.
#[derive(Clone, Debug, Default)]
pub(super) struct Hand(Arc<Mutex<(VecDeque<WorkerReport>, Vec<String>)>>);

impl Hand {
    pub(super) fn received(&self, request: &str, failure: Option<LoadFailure>) {
        let failed = failure
            .map(|_| FailedBlock { group: 0, block: 7 })
            .into_iter()
            .collect();
        self.report(WorkerReport {
            received: vec![Received {
                request: id(request),
                failure,
                failed,
            }],
            ..WorkerReport::default()
        });
    }

    pub(super) fn sent(&self, request: &str) {
        self.report(WorkerReport {
            sent: vec![id(request)],
            ..WorkerReport::default()
        });
    }

    pub(super) fn report(&self, report: WorkerReport) {
        self.0.lock().unwrap().0.push_back(report);
    }

    pub(super) fn calls(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap().1)
    }

    fn note(&self, call: String) {
        self.0.lock().unwrap().1.push(call);
    }
}

impl WorkerConnector for Hand {
    fn register(&mut self, _: &CacheLayout) -> Result<(), RegisterCacheError> {
        self.note("register".to_owned());
        Ok(())
    }

    fn release_blocks(&mut self, _: &StepPlan) {
        self.note("release".to_owned());
    }

    fn begin_step(&mut self, plan: StepPlan) {
        let StepPlan::Storage(plan) = plan else {
            panic!("{plan:?}");
        };
        self.note(format!(
            "begin {} loads {} finished",
            plan.load.len(),
            plan.finished.len()
        ));
    }

    fn end_step(&mut self) {
        self.note("end".to_owned());
    }

    fn take_report(&mut self) -> Result<WorkerReport, WorkerLost> {
        Ok(self.0.lock().unwrap().0.pop_front().unwrap_or_default())
    }

    fn shutdown(&mut self, within: Duration) {
        assert!(within <= Duration::from_secs(9));
        self.note("shutdown".to_owned());
    }
}

/// A scheduler half, the worker halves of some ranks, and the way between them.
pub(super) struct Machine {
    pub(super) scheduler: MultiScheduler,
    pub(super) workers: Vec<MultiWorker>,
    aggregator: Aggregator,
    step: u64,
    pub(super) received: Vec<Received>,
    pub(super) sent: Vec<RequestId>,
}

pub(super) fn through<T: serde::Serialize + serde::de::DeserializeOwned>(value: &T) -> T {
    rmp_serde::from_slice(&rmp_serde::to_vec(value).unwrap()).unwrap()
}

impl Machine {
    pub(super) fn new(
        children: Vec<Box<dyn SchedulerConnector>>,
        workers: Vec<Vec<Box<dyn WorkerConnector>>>,
    ) -> Self {
        let ranks = workers.len() as u32;
        Self {
            scheduler: MultiScheduler::new(children, ranks).unwrap(),
            workers: workers.into_iter().map(MultiWorker::new).collect(),
            aggregator: Aggregator::new(ranks),
            step: 0,
            received: Vec::new(),
            sent: Vec::new(),
        }
    }

    /// Of scripted children, with hands by rank and child.
    pub(super) fn scripted(children: &[&Scripted], ranks: usize) -> (Self, Vec<Vec<Hand>>) {
        let hands: Vec<Vec<Hand>> = (0..ranks)
            .map(|_| children.iter().map(|_| Hand::default()).collect())
            .collect();
        let boxed = |hand: &Hand| Box::new(hand.clone()) as Box<dyn WorkerConnector>;
        let workers = hands
            .iter()
            .map(|hands| hands.iter().map(boxed).collect())
            .collect();
        let boxed = |child: &&Scripted| Box::new((*child).clone()) as Box<dyn SchedulerConnector>;
        (
            Self::new(children.iter().map(boxed).collect(), workers),
            hands,
        )
    }

    pub(super) fn plan(&mut self, scheduled: &[Scheduled<'_>]) -> StepPlan {
        self.step += 1;
        let step = StepView {
            number: self.step,
            scheduled,
        };
        through(&self.scheduler.build_step(&step))
    }

    pub(super) fn report(&mut self) {
        let take = |(worker, rank): (&mut MultiWorker, u32)| {
            (rank, through(&worker.take_report().unwrap()))
        };
        let reports: Vec<_> = self.workers.iter_mut().zip(0..).map(take).collect();
        let all = self.aggregator.take(reports);
        self.scheduler.on_report(&all);
        self.received.extend(all.received);
        self.sent.extend(all.sent);
    }

    pub(super) fn step(&mut self, scheduled: &[Scheduled<'_>]) {
        let plan = self.plan(scheduled);
        for worker in &mut self.workers {
            worker.begin_step(plan.clone());
            worker.end_step();
        }
        self.report();
    }

    pub(super) fn alloc(
        &mut self,
        request: &RequestView<'_>,
        blocks: &[Vec<u32>],
        local: u32,
        external: u32,
    ) {
        let blocks = GroupBlocks(blocks);
        let allocation = Allocation {
            blocks,
            local_computed: local,
            external,
        };
        self.scheduler.after_alloc(request, &allocation);
    }

    pub(super) fn finish(&mut self, request: RequestView<'_>) -> Finished {
        self.scheduler.request_finished(&FinishedRequest {
            request,
            blocks: GroupBlocks(&[]),
            computed: request.tokens.len() as u32,
            in_flight: 0,
            how: Finish::Length,
        })
    }
}

pub(super) const TOKENS: [u32; 12] = [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12];

pub(super) fn view<'a>(id: &'a RequestId, params: Option<&'a Params>) -> RequestView<'a> {
    RequestView {
        id,
        tokens: &TOKENS,
        prompt: 12,
        params,
        extra_key: "",
    }
}

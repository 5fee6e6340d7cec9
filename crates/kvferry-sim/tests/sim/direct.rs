//! An obedient connector for several engines in one process: blocks are copied between the engines'
//! memories, under a lease, at once or some ticks later. Not a transport and no protocol: its halves
//! share a world.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use kvferry_connector::contract::{
    Aggregated, Allocation, CacheLayout, Capabilities, FailedBlock, Finish, Finished,
    FinishedRequest, LoadFailure, Matched, NULL_BLOCK, Received, RegisterCacheError, RequestView,
    SchedulerConnector, StepPlan, StepView, WorkerConnector, WorkerReport,
};
use kvferry_connector::remote::{GroupPairs, Load, Plan};
use kvferry_engine::MemoryRegion;
use kvferry_sim::{ConnectorFactory, EngineSpec, FactoryError, Halves, Rng, Tables, Trace};
use kvferry_wire::RequestId;
use serde_json::{Value, json};

/// How the connector behaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Behaviour {
    /// Loads are done before the forward of their step. Not with leases that may end.
    pub(crate) sync: bool,
    /// The ticks that a load takes, at least and at most.
    pub(crate) ticks: (u32, u32),
    /// In so many of 100 loads a rank gets wrong bytes, and says so.
    pub(crate) fail_percent: u32,
    /// The first lookups say "later", for so many ticks.
    pub(crate) later_ticks: u32,
    /// How it misbehaves, if at all.
    pub(crate) sin: Option<Sin>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sin {
    /// Loads are reported before their bytes are there.
    ReportsEarly,
    /// Loads are never reported.
    NeverReports,
    /// Bytes are written again after the report.
    WritesLate,
    /// A failed load is reported as success.
    HidesFailures,
    /// Leases end while they are read, and the reader does not notice.
    IgnoresLeases,
}

/// Ticks that a lease lives that nobody keeps.
const LEASE_TICKS: u64 = 200;

struct Lease {
    engine: (String, u32),
    request: RequestId,
    tables: Tables,
    ends_at: u64,
    /// The engine that renews it.
    keeper: Option<(String, u32)>,
    ended: bool,
    /// Every rank has reported its end.
    done: bool,
    reported: BTreeSet<u32>,
    read_by: u32,
}

#[derive(Default)]
pub(crate) struct World {
    pub(crate) behaviour: Behaviour,
    tick: u64,
    layouts: BTreeMap<(String, u32), Vec<CacheLayout>>,
    leases: BTreeMap<u64, Lease>,
    /// Which lease a load reads under.
    reads: BTreeMap<((String, u32), RequestId), u64>,
    next: u64,
    draws: u64,
}

impl World {
    fn draw(&mut self) -> Rng {
        self.draws += 1;
        Rng::part(self.draws, "direct")
    }

    fn release(&mut self, lease: u64) {
        if let Some(lease) = self.leases.get_mut(&lease) {
            lease.ended = true;
        }
    }
}

type Shared = Arc<Mutex<World>>;

/// Makes connectors that share a world.
#[derive(Clone, Default)]
pub(crate) struct Direct {
    pub(crate) world: Shared,
    pub(crate) trace: Option<Trace>,
}

impl Direct {
    pub(crate) fn new(behaviour: Behaviour) -> Self {
        let direct = Self::default();
        direct.world.lock().unwrap().behaviour = behaviour;
        direct
    }
}

impl ConnectorFactory for Direct {
    fn build(&mut self, spec: &EngineSpec<'_>) -> Result<Halves, FactoryError> {
        let engine = (spec.config.name.clone(), spec.life);
        let worker = |rank| -> Box<dyn WorkerConnector> {
            Box::new(Worker {
                world: self.world.clone(),
                engine: engine.clone(),
                rank,
                ranks: spec.config.ranks,
                loads: Vec::new(),
                late: Vec::new(),
            })
        };
        let halves = Halves {
            workers: (0..spec.config.ranks).map(worker).collect(),
            scheduler: Box::new(Scheduler {
                world: self.world.clone(),
                engine: engine.clone(),
                remote: BTreeMap::new(),
                plan: Plan::default(),
                loading: BTreeSet::new(),
            }),
        };
        Ok(match &self.trace {
            Some(trace) => halves.traced(&spec.config.name, trace),
            None => halves,
        })
    }

    fn stopping(&mut self, spec: &EngineSpec<'_>) {
        let engine = (spec.config.name.clone(), spec.life);
        let mut world = self.world.lock().unwrap();
        world.layouts.remove(&engine);
        world.leases.retain(|_, lease| lease.engine != engine);
        let ends_at = world.tick + LEASE_TICKS;
        for lease in world
            .leases
            .values_mut()
            .filter(|lease| lease.keeper == Some(engine.clone()))
        {
            (lease.keeper, lease.ends_at) = (None, ends_at);
        }
    }

    fn tick(&mut self, tick: u64) {
        let mut world = self.world.lock().unwrap();
        world.tick = tick;
        let unkept = world.behaviour.sin == Some(Sin::IgnoresLeases);
        for lease in world.leases.values_mut() {
            lease.ended |= (unkept || lease.keeper.is_none()) && tick >= lease.ends_at;
        }
    }
}

struct Remote {
    lease: u64,
    tokens: u32,
    tables: Tables,
    since: u64,
    consumed: bool,
}

struct Scheduler {
    world: Shared,
    engine: (String, u32),
    remote: BTreeMap<RequestId, Remote>,
    plan: Plan,
    loading: BTreeSet<RequestId>,
}

impl Scheduler {
    fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap()
    }
}

fn remote_of(params: &serde_json::Map<String, Value>, since: u64) -> Option<Remote> {
    (params.get("do_remote_prefill")? == &Value::Bool(true)).then_some(())?;
    Some(Remote {
        lease: params.get("kvferry")?.get("lease")?.as_u64()?,
        tokens: params.get("remote_num_tokens")?.as_u64()? as u32,
        tables: serde_json::from_value(params.get("remote_block_ids")?.clone()).ok()?,
        since,
        consumed: false,
    })
}

impl SchedulerConnector for Scheduler {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            requires_delivery: true,
            best_effort: false,
            loaded_groups: None,
            layout: None,
        }
    }

    fn on_new_request(&mut self, request: &RequestView<'_>) {
        let since = self.world().tick;
        let Some(remote) = request.params.and_then(|params| remote_of(params, since)) else {
            return;
        };
        if let Some(lease) = self.world().leases.get_mut(&remote.lease) {
            lease.keeper = Some(self.engine.clone());
        }
        self.remote.insert(request.id.clone(), remote);
    }

    fn matched_tokens(&self, request: &RequestView<'_>, computed: u32) -> Matched {
        let Some(remote) = self
            .remote
            .get(request.id)
            .filter(|remote| !remote.consumed)
        else {
            return Matched::None;
        };
        let world = self.world();
        if world.tick < remote.since + u64::from(world.behaviour.later_ticks) {
            return Matched::Later(Duration::from_secs(60));
        }
        match world.behaviour.sync {
            true => Matched::load_sync(request.prompt, computed, remote.tokens),
            false => Matched::load_async(request.prompt, computed, remote.tokens),
        }
    }

    fn after_alloc(&mut self, request: &RequestView<'_>, allocation: &Allocation<'_>) {
        let mut world = self.world.lock().unwrap();
        let Some(remote) = self
            .remote
            .get_mut(request.id)
            .filter(|remote| !remote.consumed)
        else {
            return;
        };
        remote.consumed = true;
        if allocation.external == 0 {
            world.release(remote.lease);
            return;
        }
        let groups = &world.layouts[&self.engine][0].groups;
        let total = allocation.local_computed + allocation.external;
        let pairs = |(group, local): (u32, &Vec<u32>)| {
            let tokens = groups[group as usize].block_tokens;
            let range =
                (allocation.local_computed / tokens) as usize..total.div_ceil(tokens) as usize;
            let both = range.map(|place| (remote.tables[group as usize][place], local[place]));
            let (remote, local) = both.filter(|&(_, local)| local != NULL_BLOCK).unzip();
            GroupPairs {
                group,
                remote,
                local,
            }
        };
        let blocks = (0..).zip(allocation.blocks.0).map(pairs).collect();
        world
            .reads
            .insert((self.engine.clone(), request.id.clone()), remote.lease);
        if !world.behaviour.sync {
            self.loading.insert(request.id.clone());
        }
        self.plan.load.push(Load {
            request: request.id.clone(),
            blocks,
        });
    }

    fn build_step(&mut self, _: &StepView<'_>) -> StepPlan {
        StepPlan::Remote(std::mem::take(&mut self.plan))
    }

    fn preempted(&mut self, _: &[RequestId]) {}

    fn request_finished(&mut self, finished: &FinishedRequest<'_>) -> Finished {
        let id = finished.request.id;
        let mut world = self.world.lock().unwrap();
        if let Some(remote) = self.remote.remove(id).filter(|remote| !remote.consumed) {
            world.release(remote.lease);
        }
        let asked = finished
            .request
            .params
            .is_some_and(|params| params.get("do_remote_decode") == Some(&Value::Bool(true)));
        let tokens = (finished.computed - finished.in_flight).min(finished.request.prompt);
        let ended_well = matches!(finished.how, Finish::Length | Finish::Stopped);
        if !asked || !ended_well || tokens == 0 || finished.blocks.0.iter().all(Vec::is_empty) {
            return Finished::Free;
        }
        world.next += 1;
        let number = world.next;
        let ends_at = match world.behaviour.sin {
            Some(Sin::IgnoresLeases) => world.tick + 4,
            _ => world.tick + LEASE_TICKS,
        };
        world.leases.insert(
            number,
            Lease {
                engine: self.engine.clone(),
                request: id.clone(),
                tables: finished.blocks.0.to_vec(),
                ends_at,
                keeper: None,
                ended: false,
                done: false,
                reported: BTreeSet::new(),
                read_by: 0,
            },
        );
        let params = json!({
            "do_remote_prefill": true, "do_remote_decode": false,
            "remote_engine_id": self.engine.0, "remote_request_id": id.as_str(),
            "remote_block_ids": finished.blocks.0, "remote_num_tokens": tokens,
            "kvferry": {"lease": number},
        });
        Finished::Hold {
            params: params.as_object().cloned(),
        }
    }

    fn on_report(&mut self, report: &Aggregated) {
        for received in &report.received {
            self.loading.remove(&received.request);
        }
    }

    fn has_pending_work(&self) -> bool {
        let world = self.world();
        !self.loading.is_empty()
            || world
                .leases
                .values()
                .any(|lease| lease.engine == self.engine && !lease.done)
    }

    fn begin_shutdown(&mut self) {
        let mut world = self.world.lock().unwrap();
        for lease in world
            .leases
            .values_mut()
            .filter(|lease| lease.engine == self.engine)
        {
            lease.ended = true;
        }
    }
}

struct Loading {
    load: Load,
    lease: u64,
    due: u64,
}

struct Worker {
    world: Shared,
    engine: (String, u32),
    rank: u32,
    ranks: u32,
    loads: Vec<Loading>,
    late: Vec<(u64, Load)>,
}

impl Worker {
    /// Overwrites a load's blocks, as a transfer that is not over may.
    fn scribble(&self, world: &World, load: &Load) {
        let layout = &world.layouts[&self.engine][self.rank as usize];
        for pairs in &load.blocks {
            for layer in layout
                .layers
                .iter()
                .filter(|layer| layer.group == pairs.group)
            {
                for &block in &pairs.local {
                    let at = layer.offset + u64::from(block) * layer.block_stride;
                    layer.memory.fill(at, layer.block_bytes, 0x11).unwrap();
                }
            }
        }
    }

    /// Copies a load's blocks; the reason if the lease has ended.
    fn copy(&self, world: &mut World, load: &Load, lease: u64) -> Option<LoadFailure> {
        let ranks = self.ranks;
        let here = world.layouts[&self.engine][self.rank as usize].clone();
        let ignored = world.behaviour.sin == Some(Sin::IgnoresLeases);
        let Some(lease) = world
            .leases
            .get_mut(&lease)
            .filter(|lease| ignored || !lease.ended)
        else {
            return Some(LoadFailure::Lease);
        };
        for pairs in &load.blocks {
            let known = &lease.tables[pairs.group as usize];
            assert!(
                pairs.remote.iter().all(|block| known.contains(block)),
                "not the lease's blocks"
            );
        }
        lease.read_by += 1;
        lease.ended |= lease.read_by == ranks;
        let there = world.layouts[&lease.engine][self.rank as usize].clone();
        for pairs in &load.blocks {
            for (from, to) in there.layers.iter().zip(&here.layers) {
                if from.group != pairs.group {
                    continue;
                }
                for (&remote, &local) in pairs.remote.iter().zip(&pairs.local) {
                    assert_ne!(
                        remote, NULL_BLOCK,
                        "a block that the producer does not have"
                    );
                    let source = from.offset + u64::from(remote) * from.block_stride;
                    let target = to.offset + u64::from(local) * to.block_stride;
                    let bytes = from.block_bytes;
                    MemoryRegion::copy(&from.memory, source, &to.memory, target, bytes).unwrap();
                }
            }
        }
        None
    }

    fn finish(&mut self, world: &mut World, loading: Loading) -> Received {
        let Loading { load, lease, .. } = loading;
        self.scribble(world, &load);
        let mut failure = self.copy(world, &load, lease);
        let mut failed: Vec<FailedBlock> = Vec::new();
        let all = load.blocks.iter().flat_map(|pairs| {
            pairs.local.iter().map(|&block| FailedBlock {
                group: pairs.group,
                block,
            })
        });
        let mut rng = world.draw();
        if failure.is_none() && rng.chance(world.behaviour.fail_percent) {
            // Some block and all behind it, of the first group.
            let from = rng.below(load.blocks[0].local.len() as u32) as usize;
            let mut lost = load.clone();
            lost.blocks.truncate(1);
            lost.blocks[0].local.drain(..from);
            self.scribble(world, &lost);
            failure = Some(LoadFailure::Peer);
            failed = all.skip(from).take(lost.blocks[0].local.len()).collect();
        } else if failure.is_some() {
            failed = all.collect();
        }
        match world.behaviour.sin {
            Some(Sin::HidesFailures) => (failure, failed) = (None, Vec::new()),
            Some(Sin::WritesLate) => self.late.push((world.tick + 3, load.clone())),
            _ => {}
        }
        Received {
            request: load.request,
            failure,
            failed,
        }
    }
}

impl WorkerConnector for Worker {
    fn register(&mut self, layout: &CacheLayout) -> Result<(), RegisterCacheError> {
        let mut world = self.world.lock().unwrap();
        world
            .layouts
            .entry(self.engine.clone())
            .or_default()
            .push(layout.clone());
        Ok(())
    }

    fn begin_step(&mut self, plan: StepPlan) {
        let StepPlan::Remote(plan) = plan else {
            panic!("not our plan: {plan:?}")
        };
        let shared = self.world.clone();
        let mut world = shared.lock().unwrap();
        for load in plan.load {
            let lease = world.reads[&(self.engine.clone(), load.request.clone())];
            self.scribble(&world, &load);
            if world.behaviour.sync {
                assert_eq!(self.copy(&mut world, &load, lease), None);
                continue;
            }
            let (least, most) = world.behaviour.ticks;
            let due = world.tick + u64::from(world.draw().between(least, most));
            self.loads.push(Loading { load, lease, due });
        }
    }

    fn end_step(&mut self) {}

    fn take_report(&mut self) -> WorkerReport {
        let shared = self.world.clone();
        let mut world = shared.lock().unwrap();
        let now = world.tick;
        for (_, load) in self
            .late
            .extract_if(.., |late| late.0 <= now)
            .collect::<Vec<_>>()
        {
            self.scribble(&world, &load);
        }
        let mut report = WorkerReport::default();
        let due: Vec<_> = match world.behaviour.sin {
            Some(Sin::NeverReports) => Vec::new(),
            _ => self.loads.extract_if(.., |load| load.due <= now).collect(),
        };
        if world.behaviour.sin == Some(Sin::ReportsEarly) {
            for early in self.loads.drain(..) {
                world.release(early.lease);
                report.received.push(Received {
                    request: early.load.request,
                    failure: None,
                    failed: Vec::new(),
                });
            }
        }
        for loading in due {
            report.received.push(self.finish(&mut world, loading));
        }
        let ranks = self.ranks;
        for lease in world.leases.values_mut() {
            if lease.ended && lease.engine == self.engine && lease.reported.insert(self.rank) {
                report.sent.push(lease.request.clone());
            }
        }
        for lease in world.leases.values_mut() {
            lease.done |= lease.engine == self.engine && lease.reported.len() as u32 == ranks;
        }
        if world.behaviour.sin != Some(Sin::IgnoresLeases) {
            world.leases.retain(|_, lease| !lease.done);
        }
        report
    }

    fn shutdown(&mut self, _: Duration) {}
}

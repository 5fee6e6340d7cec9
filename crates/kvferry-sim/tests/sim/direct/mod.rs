//! An obedient connector for several engines in one process: blocks are copied between the engines'
//! memories, under a lease, at once or some ticks later. Not a transport and no protocol: its halves
//! share a world.

mod scheduler;
mod worker;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use kvferry_connector::contract::{CacheLayout, WorkerConnector};
use kvferry_sim::{ConnectorFactory, EngineSpec, FactoryError, Halves, Rng, Tables, Trace};
use kvferry_wire::RequestId;

use scheduler::Scheduler;
use worker::Worker;

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

pub(crate) struct Lease {
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
            let ranks = spec.config.ranks;
            Box::new(Worker::new(&self.world, &engine, rank, ranks))
        };
        let halves = Halves {
            workers: (0..spec.config.ranks).map(worker).collect(),
            scheduler: Box::new(Scheduler::new(&self.world, &engine)),
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

//! The worker half: copies blocks when their time has come.

use std::time::Duration;

use kvferry_connector::contract::{
    CacheLayout, FailedBlock, LoadFailure, NULL_BLOCK, Received, RegisterCacheError, StepPlan,
    WorkerConnector, WorkerLost, WorkerReport,
};
use kvferry_connector::remote::Load;
use kvferry_engine::MemoryRegion;

use super::{Shared, Sin, World};

struct Loading {
    load: Load,
    lease: u64,
    due: u64,
}

pub(super) struct Worker {
    world: Shared,
    engine: (String, u32),
    rank: u32,
    ranks: u32,
    loads: Vec<Loading>,
    late: Vec<(u64, Load)>,
}

impl Worker {
    pub(super) fn new(world: &Shared, engine: &(String, u32), rank: u32, ranks: u32) -> Self {
        Self {
            world: world.clone(),
            engine: engine.clone(),
            rank,
            ranks,
            loads: Vec::new(),
            late: Vec::new(),
        }
    }

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

    fn take_report(&mut self) -> Result<WorkerReport, WorkerLost> {
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
        Ok(report)
    }

    fn shutdown(&mut self, _: Duration) {}
}

//! The scheduler half: what is read under which lease.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::MutexGuard;
use std::time::Duration;

use kvferry_connector::contract::{
    Aggregated, Allocation, Capabilities, Finish, Finished, FinishedRequest, Matched, NULL_BLOCK,
    RequestView, SchedulerConnector, StepPlan, StepView,
};
use kvferry_connector::remote::{GroupPairs, Load, Plan};
use kvferry_sim::Tables;
use kvferry_wire::RequestId;
use serde_json::{Value, json};

use super::{LEASE_TICKS, Lease, Shared, Sin, World};

struct Remote {
    lease: u64,
    tokens: u32,
    tables: Tables,
    since: u64,
    consumed: bool,
}

pub(super) struct Scheduler {
    world: Shared,
    engine: (String, u32),
    remote: BTreeMap<RequestId, Remote>,
    plan: Plan,
    loading: BTreeSet<RequestId>,
}

impl Scheduler {
    pub(super) fn new(world: &Shared, engine: &(String, u32)) -> Self {
        Self {
            world: world.clone(),
            engine: engine.clone(),
            remote: BTreeMap::new(),
            plan: Plan::default(),
            loading: BTreeSet::new(),
        }
    }

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
            reads_freed: false,
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

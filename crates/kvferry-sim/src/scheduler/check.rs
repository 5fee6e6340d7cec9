//! What holds of a scheduler after every step, and at the end.

use kvferry_connector::contract::NULL_BLOCK;

use super::Scheduler;
use crate::request::State;
use crate::violation::Violation;

impl Scheduler {
    /// Compares pools, requests and queues.
    ///
    /// # Errors
    /// The first thing that does not hold.
    pub fn check(&self) -> Result<(), Violation> {
        let requests = self.requests.values().map(|request| &request.tables);
        let endings = self.endings.values().map(|ending| &ending.tables);
        self.kv.check(requests.chain(endings))?;
        for request in self.requests.values() {
            match request.state {
                State::Waiting if request.has_blocks() => {
                    let blocks = request.tables.iter().map(Vec::len).sum();
                    let request = request.id.clone();
                    return Err(Violation::BlocksWhileWaiting { request, blocks });
                }
                State::Parked => self.check_loading(request)?,
                _ => {}
            }
        }
        let queued = self.holding.len() + self.waiting.len() + self.running.len();
        match queued == self.requests.len() {
            true => Ok(()),
            false => Err(Violation::Simulator("a request is in no queue, or in two")),
        }
    }

    /// Blocks that a load writes to are nobody else's, and not findable.
    fn check_loading(&self, request: &crate::request::Request) -> Result<(), Violation> {
        let Some(load) = request.load else {
            return Err(Violation::Simulator("a parked request has no load"));
        };
        let first = (load.from / self.config.block_tokens) as usize;
        let end = load.to.div_ceil(self.config.block_tokens) as usize;
        for ((group, pool), table) in (0..).zip(self.kv.pools()).zip(&request.tables) {
            let loading = table.iter().take(end).skip(first);
            for &block in loading.filter(|&&block| block != NULL_BLOCK) {
                if pool.references(block) != 1 || pool.content(block).is_some() {
                    let request = request.id.clone();
                    return Err(Violation::SharedDuringLoad {
                        request,
                        group,
                        block,
                    });
                }
            }
        }
        Ok(())
    }

    /// Whether everything is back where it was at the start.
    ///
    /// # Errors
    /// [`Violation::Leftover`] with what is not, and what [`check`](Self::check) finds.
    pub fn check_end(&self) -> Result<(), Violation> {
        self.check()?;
        let mut left = Vec::new();
        for (count, what) in [
            (self.requests.len(), "requests have not ended"),
            (self.endings.len(), "ended requests hold blocks"),
        ] {
            if count > 0 {
                left.push(format!("{count} {what}"));
            }
        }
        for (group, pool) in self.kv.pools().iter().enumerate() {
            let (free, all) = (pool.free_blocks(), pool.usable());
            if free != all {
                left.push(format!("{free} of {all} blocks of group {group} are free"));
            }
        }
        match left.is_empty() {
            true => Ok(()),
            false => Err(Violation::Leftover {
                left: left.join(", "),
            }),
        }
    }
}

/// No connector can bring these about, so the state is damaged by hand.
#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kvferry_connector::contract::{
        Aggregated, Allocation, Capabilities, Finished, FinishedRequest, Matched, RequestView,
        SchedulerConnector, StepPlan, StepView,
    };
    use kvferry_wire::RequestId;

    use super::*;
    use crate::config::EngineConfig;
    use crate::model::Model;
    use crate::request::NewRequest;

    /// Offers 8 tokens to whoever has none.
    struct Offers;

    impl SchedulerConnector for Offers {
        fn capabilities(&self) -> Capabilities {
            Capabilities {
                requires_delivery: false,
                best_effort: false,
                loaded_groups: None,
                layout: None,
                reads_freed: false,
            }
        }
        fn on_new_request(&mut self, _: &RequestView<'_>) {}
        fn matched_tokens(&self, request: &RequestView<'_>, computed: u32) -> Matched {
            match request.prompt {
                1 => Matched::Later(Duration::from_secs(60)),
                prompt => Matched::load_async(prompt, computed, 8),
            }
        }
        fn after_alloc(&mut self, _: &RequestView<'_>, _: &Allocation<'_>) {}
        fn build_step(&mut self, _: &StepView<'_>) -> StepPlan {
            StepPlan::Multi(kvferry_connector::multi::Plan::default())
        }
        fn preempted(&mut self, _: &[RequestId]) {}
        fn request_finished(&mut self, _: &FinishedRequest<'_>) -> Finished {
            Finished::Free
        }
        fn on_report(&mut self, _: &Aggregated) {}
        fn has_pending_work(&self) -> bool {
            false
        }
        fn begin_shutdown(&mut self) {}
    }

    /// `a` is parked with blocks 1 and 2, `b` with 3 and 4, `c` is put off.
    fn scheduler() -> (Scheduler, [RequestId; 3]) {
        let mut scheduler = Scheduler::new(&EngineConfig::default(), &Model::default());
        let ids = ["a", "b", "c"].map(|id| RequestId::new(id).unwrap());
        for (id, prompt) in ids.iter().zip([vec![1; 10], vec![2; 10], vec![3]]) {
            let new = NewRequest {
                id: id.clone(),
                prompt,
                max_tokens: 1,
                params: None,
                extra_key: String::new(),
            };
            scheduler.add(&mut Offers, new).unwrap();
        }
        scheduler.schedule(&mut Offers).unwrap();
        scheduler.check().unwrap();
        assert_eq!(scheduler.requests[&ids[1]].tables, [[3, 4]]);
        (scheduler, ids)
    }

    #[test]
    fn blocks_that_are_loaded_are_neither_findable_nor_shared() {
        let (mut scheduler, [a, _, _]) = scheduler();
        let request = &scheduler.requests[&a];
        scheduler.kv.cache(&request.tables, &request.chain, 4);
        let found = scheduler.check();
        assert!(
            matches!(found, Err(Violation::SharedDuringLoad { block: 1, .. })),
            "{found:?}"
        );
    }

    #[test]
    fn a_block_has_one_owner() {
        let (mut scheduler, [a, b, _]) = scheduler();
        // The pool knows of the second owner, so the counts are right.
        let hits = crate::kv::Hits {
            tokens: 4,
            tables: vec![vec![1]],
        };
        let mut tables = vec![vec![]];
        let room = crate::kv::Room::default();
        assert!(scheduler.kv.allocate(&mut tables, &hits, (4, 4), 4, &room));
        if let Some(request) = scheduler.requests.get_mut(&b) {
            request.tables[0].extend(&tables[0]);
        }
        let found = scheduler.check();
        assert!(
            matches!(
                found,
                Err(Violation::OwnedTwice {
                    block: 1,
                    owners: 2,
                    ..
                })
            ),
            "{found:?}"
        );
        // And without that they are not.
        if let Some(request) = scheduler.requests.get_mut(&a) {
            request.tables[0].clear();
        }
        assert!(matches!(
            scheduler.check(),
            Err(Violation::References { .. })
        ));
    }

    #[test]
    fn c9_who_only_waits_has_no_blocks_and_everybody_is_in_one_queue() {
        let (mut scheduler, [_, b, c]) = scheduler();
        let tables = scheduler
            .requests
            .get_mut(&b)
            .map(|b| std::mem::replace(&mut b.tables, vec![vec![]]));
        if let (Some(request), Some(tables)) = (scheduler.requests.get_mut(&c), tables) {
            request.tables = tables;
        }
        let found = scheduler.check();
        assert!(
            matches!(found, Err(Violation::BlocksWhileWaiting { blocks: 2, .. })),
            "{found:?}"
        );
        let (mut scheduler, [_, _, c]) = self::scheduler();
        scheduler.running.push(c);
        assert!(matches!(scheduler.check(), Err(Violation::Simulator(_))));
    }
}

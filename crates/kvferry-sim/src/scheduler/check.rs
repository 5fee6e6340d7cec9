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
        let queued = self.waiting.len() + self.running.len();
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

//! A scheduler with the contract of vLLM V1's (`v1/core/sched/scheduler.py`).
//!
//! Responsible for queues, steps, blocks and the hooks of a
//! [`SchedulerConnector`] in vLLM's order, and for vLLM's assertions. Plain state: it does no I/O,
//! moves no byte and reads the clock only to judge "later". Every request leaves by exactly one
//! [`Output`], and its blocks are freed exactly once, at its end or when what they are held for is
//! reported.

mod admit;
mod check;
mod output;
mod schedule;

use std::collections::{BTreeMap, VecDeque};

use kvferry_connector::contract::{
    Finish, Finished, FinishedRequest, GroupBlocks, SchedulerConnector,
};
use kvferry_wire::RequestId;
use serde::{Deserialize, Serialize};

use crate::config::{EngineConfig, SchedulerConfig};
use crate::kv::{Event, KvBlocks};
use crate::model::Model;
use crate::request::{NewRequest, Output, Request, State, Tables};
use crate::violation::Violation;

pub use schedule::{Step, Work};

/// What a request that ended still has blocks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Until {
    /// Its load, which is under way.
    Received,
    /// Whoever reads them.
    Sent,
}

#[derive(Debug)]
struct Ending {
    until: Until,
    tables: Tables,
}

/// Counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Steps that were scheduled, also empty ones.
    pub steps: u64,
    /// Tokens computed.
    pub computed_tokens: u64,
    /// Tokens that the own prefix cache had.
    pub local_tokens: u64,
    /// Tokens that loads brought; those of failed loads are not among them.
    pub loaded_tokens: u64,
    /// Loads that brought what they should, async and sync.
    pub loads: u64,
    /// Loads that failed.
    pub failed_loads: u64,
    /// Offers that were taken as nothing.
    pub zeroed_offers: u64,
    /// Answers of "later".
    pub put_off: u64,
    /// Requests that lost their blocks.
    pub preemptions: u64,
    /// Requests that were held for others after their end.
    pub held: u64,
    /// Requests that were aborted during their load.
    pub aborted_loads: u64,
}

/// The scheduler.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    model: Model,
    seed: u64,
    requests: BTreeMap<RequestId, Request>,
    /// Those that are parked or ready, in the order in which they are tried: before all others, so that
    /// whoever has blocks never stands behind one that finds none.
    holding: VecDeque<RequestId>,
    /// The others that wait, in the order in which they are tried.
    waiting: VecDeque<RequestId>,
    running: Vec<RequestId>,
    endings: BTreeMap<RequestId, Ending>,
    kv: KvBlocks,
    outputs: Vec<Output>,
    step: u64,
    counts: Counts,
}

impl Scheduler {
    /// A scheduler without requests.
    #[must_use]
    pub fn new(config: &EngineConfig, model: &Model) -> Self {
        Self {
            kv: KvBlocks::new(&model.groups, &config.scheduler),
            config: config.scheduler.clone(),
            model: model.clone(),
            seed: config.seed,
            requests: BTreeMap::new(),
            holding: VecDeque::new(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            endings: BTreeMap::new(),
            outputs: Vec::new(),
            step: 0,
            counts: Counts::default(),
        }
    }

    /// A request comes in. One that could never be scheduled, or whose id is in use, is refused as vLLM
    /// refuses it before admission: see [`reject`](Self::reject).
    ///
    /// # Errors
    /// A violation by the connector.
    pub fn add(
        &mut self,
        connector: &mut dyn SchedulerConnector,
        request: NewRequest,
    ) -> Result<(), Violation> {
        if self.has(&request.id) {
            // The connector never hears of it: the id is somebody else's.
            self.outputs.push(Output {
                id: request.id,
                generated: Vec::new(),
                how: Finish::Failed,
                params: None,
            });
            return Ok(());
        }
        let longest = request.prompt.len() as u64
            + u64::from(request.max_tokens)
            + u64::from(self.config.lookahead);
        let room = u64::from(self.config.blocks - 1) * u64::from(self.config.block_tokens);
        let too_long = !self.config.chunked
            && request.prompt.len() as u64 + u64::from(request.max_tokens)
                > self.config.token_budget.into();
        if request.prompt.is_empty() || request.max_tokens == 0 || longest > room || too_long {
            return self.reject(connector, request, Finish::Failed);
        }
        let request = Request::new(request, self.model.groups.len());
        connector.on_new_request(&request.view());
        self.waiting.push_back(request.id.clone());
        self.requests.insert(request.id.clone(), request);
        Ok(())
    }

    /// A request that is refused before it is admitted: the connector hears of it, with the prompt
    /// `[0]`, and at once of its end.
    ///
    /// # Errors
    /// A violation by the connector.
    pub fn reject(
        &mut self,
        connector: &mut dyn SchedulerConnector,
        mut request: NewRequest,
        how: Finish,
    ) -> Result<(), Violation> {
        request.prompt = vec![0];
        let request = Request::new(request, self.model.groups.len());
        connector.on_new_request(&request.view());
        self.end(connector, request, how)
    }

    /// A client goes away. Nothing for a request that is not there (any more).
    ///
    /// # Errors
    /// A violation by the connector.
    pub fn abort(
        &mut self,
        connector: &mut dyn SchedulerConnector,
        id: &RequestId,
    ) -> Result<(), Violation> {
        self.finish(connector, id, Finish::Aborted)
    }

    fn finish(
        &mut self,
        connector: &mut dyn SchedulerConnector,
        id: &RequestId,
        how: Finish,
    ) -> Result<(), Violation> {
        let Some(request) = self.requests.remove(id) else {
            return Ok(());
        };
        self.holding.retain(|holding| holding != id);
        self.waiting.retain(|waiting| waiting != id);
        self.running.retain(|running| running != id);
        self.end(connector, request, how)
    }

    fn end(
        &mut self,
        connector: &mut dyn SchedulerConnector,
        mut request: Request,
        how: Finish,
    ) -> Result<(), Violation> {
        // As in vLLM, blocks are said as far as something counts as computed: with a load under way
        // those that it is to fill.
        let said = request.computed.div_ceil(self.config.block_tokens) as usize;
        let blocks: Tables = request
            .tables
            .iter()
            .map(|table| table[..said.min(table.len())].to_vec())
            .collect();
        let answer = connector.request_finished(&FinishedRequest {
            request: request.view(),
            blocks: GroupBlocks(&blocks),
            computed: request.computed,
            in_flight: request.in_flight,
            how,
        });
        let id = request.id.clone();
        let mut params = None;
        let until = match (request.state, answer) {
            (State::Parked, Finished::Hold { .. }) => {
                return Err(Violation::HoldDuringLoad { request: id });
            }
            (State::Parked, Finished::Free) => {
                self.counts.aborted_loads += 1;
                Some(Until::Received)
            }
            (_, Finished::Hold { .. }) if !request.has_blocks() => {
                return Err(Violation::HoldWithoutBlocks { request: id });
            }
            (_, Finished::Hold { params: exported }) => {
                params = exported;
                self.counts.held += 1;
                let readable = request.computed.saturating_sub(request.in_flight) as usize;
                self.kv.tell(Event::Held {
                    request: id.clone(),
                    tables: request.tables.clone(),
                    chain: request.chain[..readable.min(request.chain.len())].to_vec(),
                });
                Some(Until::Sent)
            }
            (_, Finished::Free) => None,
        };
        self.outputs.push(Output {
            id: id.clone(),
            generated: request.generated().to_vec(),
            how,
            params,
        });
        match until {
            Some(until) => {
                let ending = Ending {
                    until,
                    tables: std::mem::take(&mut request.tables),
                };
                self.endings.insert(id, ending);
                Ok(())
            }
            None => self.kv.free(&mut request.tables, self.step),
        }
    }

    /// Requests that ended since the last call.
    pub fn take_outputs(&mut self) -> Vec<Output> {
        std::mem::take(&mut self.outputs)
    }

    /// What happened to blocks since the last call.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.kv.take_events()
    }

    /// Whether the id is in use: by a request, or by one that ended and whose blocks are held.
    #[must_use]
    pub fn has(&self, id: &RequestId) -> bool {
        self.requests.contains_key(id) || self.endings.contains_key(id)
    }

    /// Where a request is; `None` if it ended or never was.
    #[must_use]
    pub fn state(&self, id: &RequestId) -> Option<State> {
        self.requests.get(id).map(|request| request.state)
    }

    /// Blocks of a request per cache group, also of one that ended and whose blocks are held.
    #[must_use]
    pub fn blocks(&self, id: &RequestId) -> Option<&Tables> {
        let ending = || self.endings.get(id).map(|ending| &ending.tables);
        self.requests
            .get(id)
            .map(|request| &request.tables)
            .or_else(ending)
    }

    /// The blocks.
    #[must_use]
    pub fn kv(&self) -> &KvBlocks {
        &self.kv
    }

    /// Requests that have not ended.
    #[must_use]
    pub fn live(&self) -> usize {
        self.requests.len()
    }

    /// Requests that ended and whose blocks are held.
    #[must_use]
    pub fn held(&self) -> usize {
        self.endings.len()
    }

    /// Requests that wait for a load.
    pub fn parked(&self) -> impl Iterator<Item = &RequestId> {
        let parked = |request: &&Request| request.state == State::Parked;
        self.requests
            .values()
            .filter(parked)
            .map(|request| &request.id)
    }

    /// Counts since the start.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }
}

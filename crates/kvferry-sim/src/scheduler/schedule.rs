//! A step: who computes how much.

use kvferry_connector::contract::{GroupBlocks, Scheduled, SchedulerConnector, StepPlan, StepView};
use kvferry_wire::RequestId;

use super::Scheduler;
use super::admit::Admission;
use crate::request::{State, Tables};
use crate::violation::Violation;

/// A request in a step, while the step is made.
pub(super) struct Picked {
    pub(super) id: RequestId,
    pub(super) start: u32,
    pub(super) tokens: u32,
}

/// What a step computes of one request.
#[derive(Clone, Debug)]
pub struct Work {
    /// The request.
    pub id: RequestId,
    /// The first position.
    pub start: u32,
    /// How many.
    pub tokens: u32,
    /// All of its blocks.
    pub tables: Tables,
    /// Its tokens and extra key, if the workers do not know it (any more).
    pub known: Option<(Vec<u32>, String)>,
    /// Whether the step brings a token.
    pub(crate) samples: bool,
    pub(crate) epoch: u32,
}

/// A step that was scheduled.
#[derive(Clone, Debug)]
pub struct Step {
    /// Its number.
    pub number: u64,
    /// The connector's plan.
    pub plan: StepPlan,
    /// What is computed.
    pub work: Vec<Work>,
}

impl Scheduler {
    /// Schedules the next step, which may be empty.
    ///
    /// # Errors
    /// A violation by the connector.
    pub fn schedule(&mut self, connector: &mut dyn SchedulerConnector) -> Result<Step, Violation> {
        self.step += 1;
        self.counts.steps += 1;
        let mut picked = Vec::new();
        let mut budget = self.config.token_budget;
        let preempted = self.continue_running(&mut picked, &mut budget)?;
        if preempted.is_empty() {
            self.admit_waiting(connector, &mut picked, &mut budget)?;
        } else {
            connector.preempted(&preempted);
        }
        if picked.is_empty() && preempted.is_empty() {
            self.break_deadlock(connector)?;
        }
        let plan = self.plan(connector, &picked)?;
        let work = picked
            .iter()
            .map(|picked| self.advance(picked))
            .collect::<Result<_, _>>()?;
        Ok(Step {
            number: self.step,
            plan,
            work,
        })
    }

    fn continue_running(
        &mut self,
        picked: &mut Vec<Picked>,
        budget: &mut u32,
    ) -> Result<Vec<RequestId>, Violation> {
        let mut preempted = Vec::new();
        let mut place = 0;
        while place < self.running.len() && *budget > 0 {
            let id = self.running[place].clone();
            let tokens = self.requests[&id].wanted().min(*budget);
            if tokens == 0 {
                place += 1;
                continue;
            }
            while !self.grow(&id, tokens)? {
                let victim = self.give_way(&id)?;
                preempted.push(victim.clone());
                if victim == id {
                    return Ok(preempted);
                }
            }
            let start = self.requests[&id].computed;
            picked.push(Picked { id, start, tokens });
            *budget -= tokens;
            place += 1;
        }
        Ok(preempted)
    }

    /// Takes the blocks of somebody for a running request: of the running one that was admitted last,
    /// or, before it is the request itself, of one that has loaded blocks and waits. vLLM takes
    /// none from those, and leaves it to its users that pools are not full of them.
    fn give_way(&mut self, id: &RequestId) -> Result<RequestId, Violation> {
        if self.running.last() == Some(id)
            && let Some(waiting) = self.last_ready()
        {
            self.preempt(&waiting)?;
            self.holding.retain(|holding| *holding != waiting);
            self.waiting.push_front(waiting.clone());
            return Ok(waiting);
        }
        let victim = self
            .running
            .pop()
            .ok_or(Violation::Simulator("nobody runs"))?;
        self.preempt(&victim)?;
        self.waiting.push_front(victim.clone());
        Ok(victim)
    }

    fn last_ready(&self) -> Option<RequestId> {
        let is_ready = |id: &&RequestId| self.requests[*id].state == State::Ready;
        self.holding.iter().rfind(is_ready).cloned()
    }

    fn grow(&mut self, id: &RequestId, tokens: u32) -> Result<bool, Violation> {
        let Some(request) = self.requests.get_mut(id) else {
            return Err(Violation::Simulator("a running id is unknown"));
        };
        let computed = request.computed;
        self.kv.slide(&mut request.tables, computed, self.step)?;
        let slots = computed + tokens + self.config.lookahead;
        Ok(self.kv.allocate(
            &mut request.tables,
            &Default::default(),
            (computed, computed),
            slots,
            &Default::default(),
        ))
    }

    /// Takes a request's blocks: it is computed anew.
    fn preempt(&mut self, id: &RequestId) -> Result<(), Violation> {
        let Some(request) = self.requests.get_mut(id) else {
            return Err(Violation::Simulator("a preempted id is unknown"));
        };
        self.kv.free(&mut request.tables, self.step)?;
        request.state = State::Waiting;
        request.load = None;
        request.prefilling = false;
        request.computed = 0;
        request.in_flight = 0;
        request.epoch += 1;
        request.told = None;
        request.consumed = false;
        self.counts.preemptions += 1;
        Ok(())
    }

    fn admit_waiting(
        &mut self,
        connector: &mut dyn SchedulerConnector,
        picked: &mut Vec<Picked>,
        budget: &mut u32,
    ) -> Result<(), Violation> {
        // Whoever is passed over comes before those that were not reached, in the same order.
        let (mut holding, mut waiting) = (Vec::new(), Vec::new());
        while *budget > 0 && self.running.len() < self.config.max_running as usize {
            let from_holding = !self.holding.is_empty();
            let queue = match from_holding {
                true => &mut self.holding,
                false => &mut self.waiting,
            };
            let Some(id) = queue.pop_front() else { break };
            match self.admit(connector, &id, *budget)? {
                Admission::NoRoom => {
                    match from_holding {
                        true => self.holding.push_front(id),
                        false => self.waiting.push_front(id),
                    }
                    break;
                }
                Admission::NotYet if self.requests[&id].state == State::Waiting => waiting.push(id),
                Admission::NotYet | Admission::Parked => holding.push(id),
                Admission::Running(work) => {
                    self.running.push(id);
                    *budget -= work.tokens;
                    picked.push(work);
                }
            }
        }
        for id in waiting.into_iter().rev() {
            self.waiting.push_front(id);
        }
        for id in holding.into_iter().rev() {
            self.holding.push_front(id);
        }
        Ok(())
    }

    /// Nothing runs, nothing is loaded, and whoever could run waits for blocks that others have who
    /// wait as well: the last of them gives its blocks up.
    fn break_deadlock(&mut self, connector: &mut dyn SchedulerConnector) -> Result<(), Violation> {
        let busy = |state| matches!(state, State::Running | State::Parked);
        if self.requests.values().any(|request| busy(request.state)) || !self.endings.is_empty() {
            return Ok(());
        }
        let Some(last) = self.last_ready() else {
            return Ok(());
        };
        self.preempt(&last)?;
        self.holding.retain(|holding| *holding != last);
        self.waiting.push_front(last.clone());
        connector.preempted(std::slice::from_ref(&last));
        Ok(())
    }

    fn plan(
        &self,
        connector: &mut dyn SchedulerConnector,
        picked: &[Picked],
    ) -> Result<StepPlan, Violation> {
        let new_blocks: Vec<Tables> = picked
            .iter()
            .map(|picked| self.untold(&picked.id))
            .collect();
        let scheduled: Vec<Scheduled<'_>> = picked
            .iter()
            .zip(&new_blocks)
            .map(|(picked, new_blocks)| {
                let request = &self.requests[&picked.id];
                Scheduled {
                    request: request.view(),
                    new_blocks: GroupBlocks(new_blocks),
                    renewed: request.told.is_none(),
                    computed: picked.start,
                    tokens: picked.tokens,
                }
            })
            .collect();
        Ok(connector.build_step(&StepView {
            number: self.step,
            scheduled: &scheduled,
        }))
    }

    /// Blocks that workers were not told of.
    fn untold(&self, id: &RequestId) -> Tables {
        let request = &self.requests[id];
        let from = |group| {
            request
                .told
                .as_ref()
                .map_or(0, |told: &Vec<usize>| told[group])
        };
        let tables = request.tables.iter().enumerate();
        tables
            .map(|(group, table)| table[from(group).min(table.len())..].to_vec())
            .collect()
    }

    /// The step is on its way: positions count as computed.
    fn advance(&mut self, picked: &Picked) -> Result<Work, Violation> {
        let Some(request) = self.requests.get_mut(&picked.id) else {
            return Err(Violation::Simulator("a scheduled id is unknown"));
        };
        let known = request.told.is_none();
        request.told = Some(request.tables.iter().map(Vec::len).collect());
        request.computed += picked.tokens;
        request.in_flight += picked.tokens;
        let samples = request.computed == request.len() + request.placeholders;
        request.placeholders += u32::from(samples);
        request.prefilling &= !samples;
        self.counts.computed_tokens += u64::from(picked.tokens);
        Ok(Work {
            id: picked.id.clone(),
            start: picked.start,
            tokens: picked.tokens,
            tables: request.tables.clone(),
            known: known.then(|| (request.tokens.clone(), request.extra_key.clone())),
            samples,
            epoch: request.epoch,
        })
    }
}

//! A step's output: tokens, ends, and what the ranks report.

use kvferry_connector::contract::{Aggregated, Finish, Received, SchedulerConnector};
use kvferry_wire::RequestId;

use super::admit::loaded;
use super::{Scheduler, Until, Work};
use crate::config::FailurePolicy;
use crate::kv::Event;
use crate::model::GroupKind;
use crate::request::{Load, State};
use crate::violation::{Kind, Violation};

impl Scheduler {
    /// Takes a step's output: what it computed, with the token where it brings one, and what all
    /// ranks have reported meanwhile. In vLLM's order: failures, tokens and ends, ends by failures, the
    /// connector's own view of the report, completions.
    ///
    /// # Errors
    /// A violation by the connector, vLLM's assertions on completions among them.
    pub fn process(
        &mut self,
        connector: &mut dyn SchedulerConnector,
        work: &[(Work, Option<u32>)],
        report: &Aggregated,
    ) -> Result<(), Violation> {
        let mut failed = Vec::new();
        for received in &report.received {
            if received.failure.is_some() && self.failed(received)? {
                failed.push(&received.request);
            }
        }
        for (work, token) in work {
            self.computed(connector, work, *token)?;
        }
        for id in failed {
            self.finish(connector, id, Finish::Failed)?;
        }
        if !report.is_empty() {
            connector.on_report(report);
        }
        for received in &report.received {
            self.received(&received.request)?;
        }
        for id in &report.sent {
            self.sent(id)?;
        }
        Ok(())
    }

    fn computed(
        &mut self,
        connector: &mut dyn SchedulerConnector,
        work: &Work,
        token: Option<u32>,
    ) -> Result<(), Violation> {
        let Some(request) = self.requests.get_mut(&work.id) else {
            return Ok(());
        };
        if request.epoch == work.epoch {
            request.in_flight -= work.tokens;
            let computed = request.computed - request.in_flight;
            self.kv.cache(&request.tables, &request.chain, computed);
        }
        let Some(token) = token else { return Ok(()) };
        request.placeholders -= 1;
        request.push(token);
        let how = if self.model.stops(token) {
            Finish::Stopped
        } else if request.generated().len() as u32 >= request.max_tokens {
            Finish::Length
        } else {
            return Ok(());
        };
        self.finish(connector, &work.id, how)
    }

    /// A load failed: the request keeps what is before the first block that failed, or nothing where that
    /// is not said, not even what it had itself. True if it is to fail.
    fn failed(&mut self, received: &Received) -> Result<bool, Violation> {
        let id = &received.request;
        // Whether anybody waits for the report is judged with the completions.
        let Some(request) = self
            .requests
            .get(id)
            .filter(|request| request.state == State::Parked)
        else {
            return Ok(false);
        };
        let Some(load) = request.load else {
            return Ok(false);
        };
        self.counts.failed_loads += 1;
        let mut kept = load.to;
        for failed in &received.failed {
            let position = request
                .tables
                .get(failed.group as usize)
                .and_then(|table| table.iter().position(|&block| block == failed.block))
                .map(|place| place as u32 * self.config.block_tokens)
                .filter(|start| {
                    (load.from..load.to)
                        .contains(&(start + self.config.block_tokens - 1).min(load.to - 1))
                })
                .ok_or_else(|| Violation::FailedBlockNotLoaded {
                    request: id.clone(),
                    group: failed.group,
                    block: failed.block,
                })?;
            kept = kept.min(position);
        }
        // With several groups vLLM knows no failed blocks, only failed requests.
        let blocks_known = self.model.groups == [GroupKind::Full] && !received.failed.is_empty();
        let fails = self.config.failure_policy == FailurePolicy::Fail;
        if let Some(request) = self.requests.get_mut(id) {
            request.failed_loads += 1;
            if !blocks_known {
                kept = 0;
            }
            if blocks_known || !fails {
                request.computed = kept;
            }
            request.load = Some(Load {
                failed: Some(kept),
                ..load
            });
        }
        Ok(fails)
    }

    fn received(&mut self, id: &RequestId) -> Result<(), Violation> {
        let kind = Kind::Received;
        if let Some(ending) = self.endings.get(id) {
            return match ending.until {
                Until::Received => self.let_go(id),
                Until::Sent => Err(Violation::WrongCompletion {
                    request: id.clone(),
                    kind,
                }),
            };
        }
        let Some(request) = self.requests.get_mut(id) else {
            return Err(Violation::UnknownCompletion {
                request: id.clone(),
                kind,
            });
        };
        let Some(load) = request.load.filter(|_| request.state == State::Parked) else {
            return Err(Violation::ReceivedNotParked {
                request: id.clone(),
            });
        };
        let end = load.failed.unwrap_or(load.to);
        if end > load.from {
            // What a failed load brought before its first failed block is as good as computed; only a
            // whole one counts as a hit.
            self.kv.tell(loaded(request, load.from..end, None));
        }
        if load.failed.is_none() {
            self.counts.loads += 1;
            self.counts.loaded_tokens += u64::from(load.to - load.from);
            request.consumed = true;
        }
        request.state = State::Ready;
        Ok(())
    }

    fn sent(&mut self, id: &RequestId) -> Result<(), Violation> {
        let kind = Kind::Sent;
        match self.endings.get(id).map(|ending| ending.until) {
            Some(Until::Sent) => {
                self.kv.tell(Event::Released {
                    request: id.clone(),
                });
                self.let_go(id)
            }
            Some(Until::Received) => Err(Violation::WrongCompletion {
                request: id.clone(),
                kind,
            }),
            None if self.requests.contains_key(id) => Err(Violation::SentUnfinished {
                request: id.clone(),
            }),
            None => Err(Violation::UnknownCompletion {
                request: id.clone(),
                kind,
            }),
        }
    }

    fn let_go(&mut self, id: &RequestId) -> Result<(), Violation> {
        let Some(mut ending) = self.endings.remove(id) else {
            return Err(Violation::Simulator("an ending vanished"));
        };
        self.kv.free(&mut ending.tables, self.step)
    }
}

//! A request that waits: lookup, allocation, and what becomes of it.

use std::time::{Duration, Instant};

use kvferry_connector::contract::{Allocation, GroupBlocks, Matched, SchedulerConnector};
use kvferry_wire::RequestId;

use super::Scheduler;
use super::schedule::Picked;
use crate::kv::{Event, Hits, Room};
use crate::model::GroupKind;
use crate::request::{Load, Request, State};
use crate::rng::Rng;
use crate::violation::Violation;

/// How much longer than it said a connector may put a request off.
const LATER_GRACE: Duration = Duration::from_secs(10);

/// What became of a request that waited.
pub(super) enum Admission {
    /// It is in the step.
    Running(Picked),
    /// It waits for its load.
    Parked,
    /// It cannot be in this step; others may.
    NotYet,
    /// There is no room, so nobody behind it gets any.
    NoRoom,
}

/// A lookup's answer as vLLM has it: tokens (`None` for later), and whether they are loaded
/// asynchronously.
pub(super) type Answer = (Option<u32>, bool);

pub(super) fn answer(matched: Matched) -> Answer {
    match matched {
        Matched::None => (Some(0), false),
        Matched::Later(_) => (None, false),
        Matched::Sync(offer) => (Some(offer.tokens()), false),
        Matched::Async(offer) => (Some(offer.tokens()), true),
    }
}

/// vLLM's assertions on a lookup's answer.
pub(super) fn check_answer(
    id: &RequestId,
    prompt: u32,
    computed: u32,
    (tokens, asynchronous): Answer,
) -> Result<(), Violation> {
    let Some(offered) = tokens else { return Ok(()) };
    if offered == 0 {
        return match asynchronous {
            true => Err(Violation::EmptyAsyncOffer {
                request: id.clone(),
            }),
            false => Ok(()),
        };
    }
    let limit = if asynchronous {
        prompt
    } else {
        prompt.saturating_sub(1)
    };
    if u64::from(computed) + u64::from(offered) > limit.into() {
        let request = id.clone();
        return Err(Violation::OfferTooLong {
            request,
            computed,
            offered,
            prompt,
            asynchronous,
        });
    }
    Ok(())
}

impl Scheduler {
    /// Looks a waiting request up and gives it its blocks.
    pub(super) fn admit(
        &mut self,
        connector: &mut dyn SchedulerConnector,
        id: &RequestId,
        budget: u32,
    ) -> Result<Admission, Violation> {
        self.settle(id)?;
        let request = self
            .requests
            .get(id)
            .ok_or(Violation::Simulator("a waiting id is unknown"))?;
        let hits = match request.state {
            State::Waiting => self.kv.hits(&request.chain, request.len() - 1),
            State::Ready => Hits {
                tokens: request.computed,
                tables: Vec::new(),
            },
            State::Parked | State::Running => return Ok(Admission::NotYet),
        };
        let local = hits.tokens;
        // As in vLLM: where something is computed or loaded, nobody is asked again.
        let (offered, asynchronous) = match request.computed {
            0 => match self.look_up(connector, id, local)? {
                (Some(offered), asynchronous) => (offered, asynchronous),
                (None, _) => return Ok(Admission::NotYet),
            },
            _ => (0, false),
        };
        let external = self.taken(id, offered);
        let asynchronous = asynchronous && external > 0;
        let total = local + external;
        let request = &self.requests[id];
        let wanted = request.len() - total;
        let new = match asynchronous {
            true => 0,
            false if !self.config.chunked && wanted > budget => return Ok(Admission::NoRoom),
            false => wanted.min(budget),
        };
        // As in vLLM, no lookahead where nothing is computed in this step.
        let lookahead = match asynchronous {
            true => 0,
            false => self.config.lookahead,
        };
        let room = self.room(id, asynchronous);
        if !self.give_blocks(id, &hits, total, new + lookahead, &room)? {
            return Ok(Admission::NoRoom);
        }
        self.counts.zeroed_offers += u64::from(offered > 0 && external == 0);
        self.place(connector, id, (local, external), new, asynchronous)
    }

    /// A load that is over is settled when its request is next tried, as in vLLM: what it brought becomes
    /// findable, and at least one token is left to be computed, which brings the first new one. Where
    /// nothing is left the blocks are given back.
    fn settle(&mut self, id: &RequestId) -> Result<(), Violation> {
        let Some(request) = self
            .requests
            .get_mut(id)
            .filter(|request| request.state == State::Ready)
        else {
            return Ok(());
        };
        if request.load.take().is_none() {
            return Ok(());
        }
        if request.computed == 0 {
            request.state = State::Waiting;
            return self.kv.free(&mut request.tables, self.step);
        }
        self.kv
            .cache(&request.tables, &request.chain, request.computed);
        request.computed = request.computed.min(request.len() - 1);
        Ok(())
    }

    /// Asks the connector, and holds its answer against the rules.
    fn look_up(
        &mut self,
        connector: &mut dyn SchedulerConnector,
        id: &RequestId,
        local: u32,
    ) -> Result<Answer, Violation> {
        let request = &self.requests[id];
        let matched = connector.matched_tokens(&request.view(), local);
        let (tokens, asynchronous) = answer(matched);
        check_answer(id, request.prompt, local, (tokens, asynchronous))?;
        if request.consumed && tokens != Some(0) {
            let tokens = tokens.unwrap_or(0);
            return Err(Violation::OfferedAgain {
                request: id.clone(),
                tokens,
            });
        }
        if request.failed_loads >= self.config.max_tries && tokens != Some(0) {
            let failed = request.failed_loads;
            return Err(Violation::TooManyTries {
                request: id.clone(),
                failed,
            });
        }
        if tokens.is_none() {
            self.put_off(id, matched)?;
        }
        Ok((tokens, asynchronous))
    }

    fn put_off(&mut self, id: &RequestId, matched: Matched) -> Result<(), Violation> {
        self.counts.put_off += 1;
        let (Some(request), Matched::Later(within)) = (self.requests.get_mut(id), matched) else {
            return Ok(());
        };
        let now = Instant::now();
        let until = *request
            .later_until
            .get_or_insert(now + within + LATER_GRACE);
        match now > until {
            true => Err(Violation::LaterOverdue {
                request: id.clone(),
            }),
            false => Ok(()),
        }
    }

    /// How much of an offer is taken: the draw is a function of seed, request and how many offers it
    /// has had, not of how often it was asked.
    fn taken(&self, id: &RequestId, offered: u32) -> u32 {
        let request = &self.requests[id];
        let mut rng = Rng::part(self.seed ^ request.offers, id.as_str());
        if offered == 0 || rng.chance(self.config.zero_percent) {
            return 0;
        }
        // Of a window a peer has only what the whole offer needs.
        let divisible = self
            .model
            .groups
            .iter()
            .all(|kind| *kind == GroupKind::Full);
        match divisible && rng.chance(self.config.less_percent) {
            true => rng.between(1, offered),
            false => offered,
        }
    }

    /// What must be free for a request to be admitted.
    fn room(&self, id: &RequestId, asynchronous: bool) -> Room {
        if !self.config.reserve {
            return Room::default();
        }
        let mut reserved = Vec::new();
        if asynchronous {
            reserved = vec![0; self.model.groups.len()];
            // Not what it needs itself: vLLM counts that too where a second load follows a failed one.
            let others = self.requests.values().filter(|other| other.id != *id);
            for other in others.filter(|other| other.prefilling) {
                let missing = self.kv.missing(&other.tables, other.computed, other.len());
                for (reserved, missing) in reserved.iter_mut().zip(missing) {
                    *reserved += missing;
                }
            }
        }
        Room {
            whole: self.requests[id].len(),
            reserved,
        }
    }

    fn give_blocks(
        &mut self,
        id: &RequestId,
        hits: &Hits,
        total: u32,
        more: u32,
        room: &Room,
    ) -> Result<bool, Violation> {
        let mut request = self
            .requests
            .remove(id)
            .ok_or(Violation::Simulator("id is unknown"))?;
        let last = match self.config.keeps_last {
            true => request.len() - 1,
            false => total,
        };
        let given = self
            .kv
            .allocate(&mut request.tables, hits, (total, last), total + more, room);
        self.requests.insert(id.clone(), request);
        Ok(given)
    }

    /// The request has its blocks: the connector hears of it, and it runs or waits for its load.
    fn place(
        &mut self,
        connector: &mut dyn SchedulerConnector,
        id: &RequestId,
        (local, external): (u32, u32),
        new: u32,
        asynchronous: bool,
    ) -> Result<Admission, Violation> {
        let Some(request) = self.requests.get_mut(id) else {
            return Err(Violation::Simulator("a request vanished"));
        };
        let allocation = Allocation {
            blocks: GroupBlocks(&request.tables),
            local_computed: local,
            external,
        };
        connector.after_alloc(&request.view(), &allocation);
        request.offers += 1;
        request.later_until = None;
        if request.state == State::Waiting {
            self.counts.local_tokens += u64::from(local);
        }
        let total = local + external;
        request.prefilling |= asynchronous || total + new < request.len();
        if asynchronous {
            request.state = State::Parked;
            // As in vLLM, what is loaded counts from the start.
            request.computed = total;
            request.load = Some(Load {
                from: local,
                to: total,
                failed: None,
            });
            return Ok(Admission::Parked);
        }
        if external > 0 {
            request.consumed = true;
            self.counts.loads += 1;
            self.counts.loaded_tokens += u64::from(external);
            let event = loaded(request, local..total, Some(self.step));
            self.kv.tell(event);
        }
        request.state = State::Running;
        request.computed = total;
        Ok(Admission::Running(Picked {
            id: id.clone(),
            start: total,
            tokens: new,
        }))
    }
}

/// The event that positions of a request count as loaded.
pub(super) fn loaded(
    request: &Request,
    positions: std::ops::Range<u32>,
    before_step: Option<u64>,
) -> Event {
    Event::Loaded {
        request: request.id.clone(),
        tables: request.tables.clone(),
        chain: request.chain.clone(),
        positions,
        before_step,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The types of the contract cannot say all of this, so vLLM's own form is checked here.
    #[test]
    fn vllm_asserts_on_empty_async_offers_and_on_offers_that_are_too_long() {
        let id = RequestId::new("a").unwrap();
        let check = |computed, answer| check_answer(&id, 320, computed, answer);
        for fine in [
            (None, false),
            (Some(0), false),
            (Some(256), true),
            (Some(255), false),
        ] {
            check(64, fine).unwrap();
        }
        assert!(matches!(
            check(0, (Some(0), true)),
            Err(Violation::EmptyAsyncOffer { .. })
        ));
        for long in [
            (Some(257), true),
            (Some(256), false),
            (Some(u32::MAX), true),
        ] {
            assert!(matches!(
                check(64, long),
                Err(Violation::OfferTooLong { computed: 64, .. })
            ));
        }
    }
}

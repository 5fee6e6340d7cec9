//! The model runner: what a forward does.
//!
//! Responsible for the tokens that workers know (ahead of the scheduler with async scheduling), for
//! writing the computed positions on every rank, and for the next token out of the bytes in the
//! blocks. Everything is written at the end of the forward: the latest that it can be.

use std::collections::BTreeMap;

use kvferry_wire::RequestId;

use crate::memory::RankMemory;
use crate::model::Model;
use crate::scheduler::Work;
use crate::violation::Violation;

#[derive(Debug)]
struct Known {
    chain: Vec<u64>,
    extra_key: String,
}

/// What the workers know of requests.
#[derive(Debug, Default)]
pub(crate) struct Runner {
    requests: BTreeMap<RequestId, Known>,
}

impl Runner {
    /// Computes a step: for each request the token that it brings.
    pub(crate) fn compute(
        &mut self,
        model: &Model,
        ranks: &[RankMemory],
        work: &[Work],
    ) -> Result<Vec<Option<u32>>, Violation> {
        work.iter()
            .map(|work| self.one(model, ranks, work))
            .collect()
    }

    fn one(
        &mut self,
        model: &Model,
        ranks: &[RankMemory],
        work: &Work,
    ) -> Result<Option<u32>, Violation> {
        if let Some((tokens, extra_key)) = &work.known {
            let known = Known {
                chain: Model::chain(extra_key, tokens),
                extra_key: extra_key.clone(),
            };
            self.requests.insert(work.id.clone(), known);
        }
        let Some(known) = self.requests.get_mut(&work.id) else {
            return Err(Violation::Simulator(
                "a step computes what workers do not know",
            ));
        };
        let end = work.start + work.tokens;
        for rank in ranks {
            for (group, table) in (0..).zip(&work.tables) {
                for position in work.start..end {
                    let Some(place) = rank.place(group, table, position) else {
                        continue;
                    };
                    let chain = known.chain.get(position as usize).copied();
                    let chain = chain.ok_or(Violation::Simulator("a token is not known yet"))?;
                    rank.write(place, chain)?;
                }
            }
        }
        if !work.samples {
            return Ok(None);
        }
        let token = model.next_token(end, |layer, position, head, cell| {
            let group = model.layers[layer as usize];
            let rank = ranks.iter().find(|rank| rank.has_head(head));
            let place = rank.and_then(|rank| {
                Some((
                    rank,
                    rank.place(group, &work.tables[group as usize], position)?,
                ))
            });
            let Some((rank, place)) = place else {
                return Err(Violation::NoBlock { position, group });
            };
            rank.read(layer, place, head, cell)
        })?;
        Model::extend(&mut known.chain, &known.extra_key, &[token]);
        Ok(Some(token))
    }

    /// Forgets requests that nobody computes any more.
    pub(crate) fn keep(&mut self, is_live: impl Fn(&RequestId) -> bool) {
        self.requests.retain(|id, _| is_live(id));
    }
}

//! The saves that are under way, by number, block, content and request.
//!
//! Responsible for: no content saved twice at a time, how many saves a request still has, and which
//! saves are void, or must not begin, because their block has a new owner. Counts ends over ranks.

use std::collections::{HashMap, HashSet};

use kvferry_wire::RequestId;

use super::BlockKey;
use super::plan::{KeyedBlock, Save};

/// A block of a request's table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Listed {
    pub(super) block: u32,
    /// When the request got it. It may lose it without a word, to a window that moves on.
    since: u64,
}

#[derive(Debug)]
struct UnderWay {
    block: KeyedBlock,
    /// Whose block it is; nobody's once that request lost or gave up its blocks.
    owner: Option<RequestId>,
    /// Ranks that have not reported its end.
    ranks: u32,
}

#[derive(Debug)]
pub(super) struct Saves {
    world: u32,
    limit: usize,
    /// An id means the same memory in every group.
    one_pool: bool,
    next: u64,
    under_way: HashMap<u64, UnderWay>,
    by_block: HashMap<(u32, u32), u64>,
    /// Counts up whenever blocks are given to somebody.
    clock: u64,
    /// When each block was last given to somebody who writes it.
    given: HashMap<(u32, u32), u64>,
    contents: HashSet<BlockKey>,
    owned: HashMap<RequestId, usize>,
    pub(super) planned: u64,
    pub(super) skipped: u64,
    pub(super) revoked: u64,
}

impl Saves {
    pub(super) fn new(world: u32, limit: usize, one_pool: bool) -> Self {
        Self {
            world,
            limit,
            one_pool,
            next: 0,
            under_way: HashMap::new(),
            by_block: HashMap::new(),
            clock: 0,
            given: HashMap::new(),
            contents: HashSet::new(),
            owned: HashMap::new(),
            planned: 0,
            skipped: 0,
            revoked: 0,
        }
    }

    pub(super) fn pending(&self) -> usize {
        self.under_way.len()
    }

    /// How many saves read blocks of this request.
    pub(super) fn owned_by(&self, request: &RequestId) -> usize {
        self.owned.get(request).copied().unwrap_or(0)
    }

    /// What a block's memory is known by.
    const fn place(&self, group: u32, block: u32) -> (u32, u32) {
        (if self.one_pool { 0 } else { group }, block)
    }

    /// A block of somebody who has it now.
    pub(super) const fn listed(&self, block: u32) -> Listed {
        Listed {
            block,
            since: self.clock,
        }
    }

    /// Whether nobody was given the block after whoever has it in this list.
    pub(super) fn is_still(&self, group: u32, listed: Listed) -> bool {
        self.given
            .get(&self.place(group, listed.block))
            .is_none_or(|&given| given <= listed.since)
    }

    /// A save of a block, unless its content or the block is being saved already, or too many wait.
    pub(super) fn plan(&mut self, request: &RequestId, block: KeyedBlock) -> Option<Save> {
        let place = self.place(block.group, block.block);
        if self.contents.contains(&block.key) || self.by_block.contains_key(&place) {
            return None;
        }
        if self.under_way.len() >= self.limit {
            self.skipped += 1;
            return None;
        }
        let number = self.next;
        self.next += 1;
        self.planned += 1;
        self.contents.insert(block.key);
        self.by_block.insert(place, number);
        *self.owned.entry(request.clone()).or_default() += 1;
        let under_way = UnderWay {
            block,
            owner: Some(request.clone()),
            ranks: self.world,
        };
        self.under_way.insert(number, under_way);
        Some(Save {
            number,
            request: request.clone(),
            block,
        })
    }

    /// These blocks were given to somebody, maybe to the same request, who writes them from now on:
    /// saves that read them are void, and are added to `revoke`.
    pub(super) fn given_anew(&mut self, group: u32, blocks: &[u32], revoke: &mut Vec<u64>) {
        self.clock += 1;
        for &block in blocks {
            let place = self.place(group, block);
            self.given.insert(place, self.clock);
            let Some(&number) = self.by_block.get(&place) else {
                continue;
            };
            self.revoked += 1;
            self.let_go(number);
            revoke.push(number);
        }
    }

    /// The request has its blocks no more. Saves of them go on until somebody else gets the block.
    pub(super) fn disown(&mut self, request: &RequestId) {
        if self.owned.remove(request).is_some() {
            for save in self.under_way.values_mut() {
                if save.owner.as_ref() == Some(request) {
                    save.owner = None;
                }
            }
        }
    }

    /// A rank has ended a save. False if there is none of this number.
    pub(super) fn ended(&mut self, number: u64) -> bool {
        let Some(save) = self.under_way.get_mut(&number) else {
            return false;
        };
        save.ranks -= 1;
        if save.ranks == 0 {
            self.let_go(number);
            self.under_way.remove(&number);
        }
        true
    }

    /// Block, content and request are free of it.
    fn let_go(&mut self, number: u64) {
        let Some(KeyedBlock { group, block, .. }) =
            self.under_way.get(&number).map(|save| save.block)
        else {
            return;
        };
        let place = self.place(group, block);
        let Some(save) = self.under_way.get_mut(&number) else {
            return;
        };
        if self.by_block.get(&place) == Some(&number) {
            self.by_block.remove(&place);
            self.contents.remove(&save.block.key);
        }
        if let Some(owner) = save.owner.take()
            && let Some(count) = self.owned.get_mut(&owner)
        {
            *count -= 1;
            if *count == 0 {
                self.owned.remove(&owner);
            }
        }
    }
}

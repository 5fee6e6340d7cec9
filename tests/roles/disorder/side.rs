//! An engine with the memory that it was lent: what is registered, what waits to be given back.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::time::Duration;

use kvferry_engine::{BlockPair, Engine, HostPool, MemoryRegion, Region, Table, TableSpec};

use super::super::{assert_generation, config};
use crate::harness::PATIENCE;
use crate::pattern::fill;
use crate::random::Random;

/// Memory from the heap, so that valgrind knows when it is gone.
pub(super) struct Heap {
    base: NonNull<u8>,
    layout: Layout,
}

impl Heap {
    #[allow(unsafe_code)]
    fn new(bytes: usize) -> Self {
        let layout = Layout::from_size_align(bytes, 64).unwrap();
        // SAFETY: the layout's size is not zero.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) });
        let base = base.unwrap_or_else(|| handle_alloc_error(layout));
        Self { base, layout }
    }
}

impl Drop for Heap {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and freed once.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}

/// A range of memory, registered, and what is known of its blocks.
pub(super) struct Piece {
    pub(super) number: u32,
    pub(super) memory: MemoryRegion,
    pub(super) tables: Vec<Table>,
    regions: Vec<Region>,
    heap: Option<Heap>,
    /// Per block, how many reads may write it.
    writers: Vec<u32>,
    /// Per block, whether more than one read wrote it since nobody did.
    mixed: Vec<bool>,
}

impl Piece {
    /// Up to 40 pairs. No local block twice; mostly those that no other read writes.
    pub(super) fn pairs(&self, random: &mut Random, remote_blocks: usize) -> Vec<BlockPair> {
        let any = random.once_in(4);
        let wanted = 1 + random.below(40);
        let (start, blocks) = (random.below(self.writers.len()), self.writers.len());
        let step = if random.once_in(2) { 1 } else { 2 };
        (0..blocks)
            .step_by(step)
            .map(|block| (start + block) % blocks)
            .filter(|&block| any || self.writers[block] == 0)
            .take(wanted)
            .map(|block| BlockPair::new(block as u32, random.below(remote_blocks) as u32))
            .collect()
    }

    pub(super) fn begin(&mut self, pairs: &[BlockPair]) {
        for pair in pairs {
            let block = pair.local as usize;
            self.writers[block] += 1;
            self.mixed[block] |= self.writers[block] > 1;
        }
    }

    /// The read of these pairs is quiesced.
    pub(super) fn end(&mut self, pairs: &[BlockPair]) {
        for pair in pairs {
            let block = pair.local as usize;
            self.writers[block] -= 1;
            self.mixed[block] &= self.writers[block] > 0;
        }
    }

    /// Whether the only read that writes the block had it for itself all the time.
    pub(super) fn is_alone(&self, block: u32) -> bool {
        !self.mixed[block as usize]
    }
}

pub(super) struct Side {
    pub(super) engine: Engine,
    pub(super) pieces: Vec<Piece>,
    /// Memory of regions that were busy, freed when nothing is in quarantine.
    waiting: Vec<Heap>,
    /// Memory of regions that were dropped without a word; freed when the engine has stopped.
    kept: Vec<Heap>,
    next: u32,
}

impl Side {
    pub(super) fn start(name: &str) -> Self {
        let mut config = config(name);
        // Under valgrind everything takes long.
        config.suspect_after = Duration::from_secs(60);
        config.connect_timeout = Duration::from_secs(60);
        config.command_timeout = Duration::from_secs(60);
        let engine = Engine::builder(config).start().unwrap();
        assert_generation(&engine);
        Self {
            engine,
            pieces: Vec::new(),
            waiting: Vec::new(),
            kept: Vec::new(),
            next: 0,
        }
    }

    pub(super) fn find(&mut self, number: u32) -> Option<&mut Piece> {
        self.pieces.iter_mut().find(|piece| piece.number == number)
    }

    /// Registers memory, a pool or not, sometimes twice, with one to three tables; with the pattern, if
    /// asked.
    pub(super) fn add(&mut self, random: &mut Random, filled: bool, pool: bool) {
        let number = self.next;
        self.next += 1;
        let block_bytes = [64, 1 << 10, 32 << 10][random.below(3)];
        let block_stride = block_bytes + [0, 32][random.below(2)];
        let blocks = 16 + random.below(48) as u32;
        let layers = 1 + random.below(3) as u32;
        let span = u64::from(blocks) * block_stride;
        let bytes = (span * u64::from(layers)) as usize;
        let (heap, memory) = if random.once_in(3) || pool {
            (None, HostPool::new(bytes).unwrap().region().unwrap())
        } else {
            let heap = Heap::new(bytes);
            #[allow(unsafe_code)]
            // SAFETY: freed only when the engine has given it up (`give_up`) or has stopped; no
            // reference to it is ever made.
            let memory = unsafe { MemoryRegion::borrowed(heap.base, bytes) };
            (Some(heap), memory.unwrap())
        };
        let mut regions = vec![self.engine.register(&memory).unwrap()];
        if random.once_in(3) {
            regions.push(self.engine.register(&memory).unwrap());
        }
        let tables: Vec<Table> = (0..layers)
            .map(|layer| {
                let spec = TableSpec {
                    offset: span * u64::from(layer),
                    block_stride,
                    // A number that only this table has.
                    layer: number * 3 + layer,
                    ..TableSpec::dense(block_bytes, blocks)
                };
                self.engine.add_table(&regions[0], spec).unwrap()
            })
            .collect();
        if filled {
            for table in &tables {
                fill(table, &memory);
            }
        }
        self.pieces.push(Piece {
            number,
            memory,
            tables,
            regions,
            heap,
            writers: vec![0; blocks as usize],
            mixed: vec![false; blocks as usize],
        });
    }

    /// Gives a piece up: deregistered with little patience, or dropped. True if it was busy.
    pub(super) fn give_up(&mut self, piece: Piece, random: &mut Random) -> bool {
        let Piece {
            heap,
            mut regions,
            tables,
            ..
        } = piece;
        if random.once_in(2) {
            drop(tables);
        }
        let mut busy = false;
        let mut unheard = false;
        while let Some(region) = random.take(&mut regions) {
            if random.once_in(3) {
                drop(region);
                unheard = true;
            } else {
                let patience = [Duration::ZERO, Duration::from_millis(5), PATIENCE];
                busy |= region.deregister(patience[random.below(3)]).is_err();
            }
        }
        match heap {
            Some(heap) if unheard => self.kept.push(heap),
            Some(heap) if busy => self.waiting.push(heap),
            // Nothing may touch it from here on.
            heap => drop(heap),
        }
        busy
    }

    /// Gives back the memory of regions that were busy and are not any more.
    pub(super) fn free_what_is_quiet(&mut self) {
        if self.engine.counters().quarantined_regions == 0 {
            self.waiting.clear();
        }
    }
}

//! Checksums of a rank's blocks: the thread that computes them, and the service that answers consumers.
//!
//! Not responsible for comparing: that is the loader's. Computing takes about as long as copying, so it is not for
//! the progress thread, nor for the loader, on which other loads wait.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Instant;

use crossbeam::channel::{Receiver, Sender, unbounded};
use kvferry_engine::{
    ChecksumError, Checksums, Engine, LogLimit, PeerId, Replies, Sender as Origin, Service, Table,
};
use kvferry_wire::checksum::{
    CHECKSUM_CHANNEL, ChecksumMessage, GroupBlock, NoChecksums, encode_refused, encode_sums,
};

use super::links::LOG_PERIOD;
use super::loader::Event;
use super::stats::LoaderCounters;

/// Most blocks that wait to be computed; further questions are refused.
const MAX_WAITING: usize = 4 << 20;

/// What comes of a question.
pub(super) type Sums = Result<Vec<u64>, NoChecksums>;

struct Question {
    blocks: Vec<GroupBlock>,
    then: Box<dyn FnOnce(Sums) + Send>,
}

enum Work {
    Question(Question),
    Stop,
}

/// Access to the thread that computes checksums of this rank's blocks. Cheap to clone.
#[derive(Clone)]
pub(super) struct Hashing {
    work: Sender<Work>,
    engine: Engine,
    /// Blocks of questions that are not answered.
    waiting: Arc<AtomicUsize>,
    is_stopping: Arc<AtomicBool>,
}

impl fmt::Debug for Hashing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hashing")
            .field("waiting", &self.waiting)
            .finish_non_exhaustive()
    }
}

impl Hashing {
    /// Starts the thread. `tables` are the rank's, by cache group.
    pub(super) fn start(
        engine: Engine,
        mut tables: Vec<Vec<Table>>,
    ) -> std::io::Result<(Self, JoinHandle<()>)> {
        for group in &mut tables {
            group.sort_by_key(|table| table.description().layer);
        }
        let (work, inbox) = unbounded();
        let hashing = Self {
            work,
            engine,
            waiting: Arc::default(),
            is_stopping: Arc::default(),
        };
        let its = hashing.clone();
        let thread = std::thread::Builder::new()
            .name("kvferry-checksum".into())
            .spawn(move || its.run(&inbox, &tables))?;
        Ok((hashing, thread))
    }

    /// Has the checksums of these blocks computed, after those that were asked for before. `then` is called once,
    /// on any thread, and must return at once.
    pub(super) fn ask(&self, blocks: Vec<GroupBlock>, then: impl FnOnce(Sums) + Send + 'static) {
        let count = blocks.len();
        let waiting = self.waiting.fetch_add(count, Ordering::Relaxed);
        if waiting.saturating_add(count) > MAX_WAITING {
            self.waiting.fetch_sub(count, Ordering::Relaxed);
            return then(Err(NoChecksums::Busy));
        }
        let then = Box::new(then);
        if let Err(refused) = self.work.send(Work::Question(Question { blocks, then }))
            && let Work::Question(question) = refused.into_inner()
        {
            (question.then)(Err(NoChecksums::Ending));
        }
    }

    /// Ends the thread; what it has not computed is refused.
    pub(super) fn stop(&self) {
        self.is_stopping.store(true, Ordering::Relaxed);
        // It may have ended.
        let _ = self.work.send(Work::Stop);
    }

    fn run(&self, inbox: &Receiver<Work>, tables: &[Vec<Table>]) {
        while let Ok(Work::Question(question)) = inbox.recv() {
            let sums = self.compute(tables, &question.blocks);
            self.waiting
                .fetch_sub(question.blocks.len(), Ordering::Relaxed);
            (question.then)(sums);
        }
        // Nothing is accepted any more once the inbox is gone.
        while let Ok(Work::Question(question)) = inbox.try_recv() {
            (question.then)(Err(NoChecksums::Ending));
        }
    }

    fn compute(&self, tables: &[Vec<Table>], blocks: &[GroupBlock]) -> Sums {
        let mut groups: HashMap<u32, Checksums> = HashMap::new();
        let mut sums = Vec::with_capacity(blocks.len());
        for block in blocks {
            if self.is_stopping.load(Ordering::Relaxed) {
                return Err(NoChecksums::Ending);
            }
            let group = match groups.entry(block.group) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(place) => {
                    let tables = tables.get(block.group as usize);
                    let tables = tables.ok_or(NoChecksums::UnknownBlock)?;
                    place.insert(self.engine.checksums(tables).map_err(refusal_of)?)
                }
            };
            sums.push(group.of(block.block).map_err(refusal_of)?);
        }
        Ok(sums)
    }
}

#[allow(clippy::needless_pass_by_value, reason = "for map_err")]
fn refusal_of(error: ChecksumError) -> NoChecksums {
    match error {
        ChecksumError::Block { .. } => NoChecksums::UnknownBlock,
        ChecksumError::NotHost { .. } => NoChecksums::NotHost,
        _ => NoChecksums::Ending,
    }
}

/// Where the service finds the thread, once blocks are registered.
pub(super) type Place = Arc<OnceLock<Hashing>>;

/// Answers consumers that ask, and hands answers of producers to the loader.
pub(super) struct ChecksumService {
    hashing: Place,
    events: Sender<Event>,
    counters: Arc<LoaderCounters>,
    log: LogLimit,
}

impl ChecksumService {
    pub(super) fn new(
        hashing: Place,
        events: Sender<Event>,
        counters: Arc<LoaderCounters>,
    ) -> Self {
        Self {
            hashing,
            events,
            counters,
            log: LogLimit::new(LOG_PERIOD),
        }
    }

    fn answer(&self, peer: PeerId, token: u64, blocks: Vec<GroupBlock>, replies: &mut Replies) {
        let Some(hashing) = self.hashing.get() else {
            self.counters.checksums_refused();
            let refused = encode_refused(token, NoChecksums::NotReady);
            return replies.send(peer, CHECKSUM_CHANNEL, refused);
        };
        let (engine, counters) = (hashing.engine.clone(), Arc::clone(&self.counters));
        hashing.ask(blocks, move |sums| {
            let count = sums.as_ref().map_or(0, Vec::len);
            let encoded = sums.and_then(|sums| {
                // As many as were asked for, which the question's parser has limited.
                encode_sums(token, sums).map_err(|_| NoChecksums::UnknownBlock)
            });
            let payload = match encoded {
                Ok(payload) => {
                    counters.checksums_sent(count);
                    payload
                }
                Err(why) => {
                    counters.checksums_refused();
                    encode_refused(token, why)
                }
            };
            // A stopped engine has no peers.
            let _ = engine.send(peer, CHECKSUM_CHANNEL, payload);
        });
    }

    fn tell(&self, peer: PeerId, load: u64, sums: Sums) {
        // The loader may have ended.
        let _ = self.events.send(Event::Theirs { peer, load, sums });
    }
}

impl Service for ChecksumService {
    fn on_message(&mut self, from: Origin, payload: &[u8], replies: &mut Replies) {
        match ChecksumMessage::parse(payload) {
            Ok(ChecksumMessage::Ask { token, blocks }) => {
                self.answer(from.peer, token, blocks.iter().collect(), replies);
            }
            Ok(ChecksumMessage::Sums { token, sums }) => {
                self.tell(from.peer, token, Ok(sums.iter().collect()));
            }
            Ok(ChecksumMessage::Refused { token, why }) => self.tell(from.peer, token, Err(why)),
            Err(error) => {
                self.counters.checksums_refused();
                if let Some(held_back) = self.log.admit(Instant::now()) {
                    let peer = from.peer;
                    tracing::warn!(%peer, %error, held_back, "dropped a message about checksums");
                }
            }
        }
    }

    fn on_tick(&mut self, _now: Instant, _replies: &mut Replies) -> Option<Instant> {
        None
    }
}

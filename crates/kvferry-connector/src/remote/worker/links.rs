//! Connections to producers' ranks: found through their directory, greeted, and kept.
//!
//! Responsible for one attempt at a time per rank, each on a thread of its own, so that neither the
//! engine's step nor another load waits for a peer that does not answer. Not responsible for what is done
//! over a connection.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam::channel::Sender;
use kvferry_engine::{
    ConnectError, Engine, LaneChoice, LogLimit, Peer, PeerId, RemoteTable, Table,
};
use kvferry_wire::Instance;
use thiserror::Error;

use super::loader::Event;
use super::stats::LoaderCounters;
use crate::contract::LoadFailure;
use crate::directory::{DirectoryError, fetch};
use crate::remote::{Source, rank_of};

/// Attempts that run at the same time; more wait.
const MAX_ATTEMPTS: usize = 64;

/// A line of one kind is written at most this often (C119).
pub(super) const LOG_PERIOD: Duration = Duration::from_secs(10);

/// How long a failed attempt is not repeated.
const PAUSE: Duration = Duration::from_millis(250);

/// Why there is no connection.
#[derive(Clone, Debug, Error)]
pub(crate) enum LinkError {
    #[error("{error}")]
    Directory {
        error: std::sync::Arc<DirectoryError>,
    },
    #[error(
        "the directory at {address} is of engine {found}, not of {wanted}; the request names another engine, or the address was taken over"
    )]
    OtherEngine {
        address: String,
        found: String,
        wanted: String,
    },
    #[error("{0}")]
    Connect(Box<ConnectError>),
    #[error("its blocks do not fit ours: {0}")]
    Layout(String),
    #[error("no thread for the attempt: {0}")]
    Thread(String),
    #[error("too many peers are being connected at once")]
    Busy,
}

impl LinkError {
    /// What a load that needs the connection fails with.
    pub(crate) fn failure(&self) -> LoadFailure {
        match self {
            Self::OtherEngine { .. } | Self::Layout(_) => LoadFailure::Rejected,
            Self::Thread(_) => LoadFailure::Local,
            Self::Connect(error) => match &**error {
                ConnectError::BadDescription { .. }
                | ConnectError::LaneUnavailable { .. }
                | ConnectError::NoRdma { .. } => LoadFailure::Rejected,
                _ => LoadFailure::Peer,
            },
            Self::Directory { .. } | Self::Busy => LoadFailure::Peer,
        }
    }

    /// Whether the producer's scheduler half is not there any more, and so none of its leases is: nobody
    /// listens at its address, or somebody else does.
    pub(crate) fn is_gone(&self) -> bool {
        match self {
            Self::Directory { error } => {
                matches!(**error, DirectoryError::ConnectionRefused { .. })
            }
            Self::OtherEngine { .. } => true,
            _ => false,
        }
    }
}

/// A connection to one rank.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    pub(crate) peer: Peer,
    /// The scheduler half whose leases the rank holds.
    pub(crate) instance: Option<Instance>,
    /// Per cache group, our tables with the rank's tables of the same layers.
    pub(crate) tables: Vec<Vec<(Table, RemoteTable)>>,
}

#[derive(Debug)]
enum State {
    Connecting,
    Ready(Box<Link>),
    Failed { error: LinkError, at: Instant },
}

/// What is known of a connection.
#[derive(Debug)]
pub(crate) enum Known<'a> {
    /// It is there.
    Ready(&'a Link),
    /// It is being made; an event will tell.
    Connecting,
    /// The last attempt failed, a moment ago.
    Failed(&'a LinkError),
}

/// A rank of a producer.
pub(crate) type RankOf = (Source, u32);

/// All connections of a worker.
pub(crate) struct Links {
    engine: Engine,
    lane: LaneChoice,
    timeout: Duration,
    tables: Vec<Vec<Table>>,
    events: Sender<Event>,
    counters: Arc<LoaderCounters>,
    states: HashMap<RankOf, State>,
    attempts: usize,
    log: LogLimit,
}

impl Links {
    pub(crate) fn new(
        engine: Engine,
        lane: LaneChoice,
        timeout: Duration,
        tables: Vec<Vec<Table>>,
        events: Sender<Event>,
        counters: Arc<LoaderCounters>,
    ) -> Self {
        Self {
            engine,
            lane,
            timeout,
            tables,
            events,
            counters,
            states: HashMap::new(),
            attempts: 0,
            log: LogLimit::new(LOG_PERIOD),
        }
    }

    /// The connection to a rank, which is asked for if there is none.
    pub(crate) fn get(&mut self, rank: &RankOf, now: Instant) -> Known<'_> {
        let is_stale = match self.states.get(rank) {
            None => true,
            Some(State::Connecting) => false,
            Some(State::Ready(link)) => link.peer.gone().is_some(),
            Some(State::Failed { at, .. }) => now.saturating_duration_since(*at) >= PAUSE,
        };
        if is_stale {
            let state = match self.attempt(rank) {
                Ok(()) => State::Connecting,
                Err(error) => State::Failed { error, at: now },
            };
            self.states.insert(rank.clone(), state);
        }
        match self.states.get(rank) {
            Some(State::Ready(link)) => Known::Ready(link),
            Some(State::Failed { error, .. }) => Known::Failed(error),
            Some(State::Connecting) | None => Known::Connecting,
        }
    }

    fn attempt(&mut self, (source, rank): &RankOf) -> Result<(), LinkError> {
        if self.attempts >= MAX_ATTEMPTS {
            return Err(LinkError::Busy);
        }
        let attempt = Attempt {
            engine: self.engine.clone(),
            lane: self.lane,
            timeout: self.timeout,
            tables: self.tables.clone(),
            source: source.clone(),
            rank: *rank,
        };
        let (events, counters) = (self.events.clone(), Arc::clone(&self.counters));
        let since = Instant::now();
        let spawned = std::thread::Builder::new()
            .name("kvferry-connect".into())
            .spawn(move || {
                let result = attempt.run();
                if result.is_ok() {
                    counters.connected(since.elapsed());
                }
                let rank = (attempt.source, attempt.rank);
                // The worker may have ended meanwhile.
                let _ = events.send(Event::Connected { rank, result });
            });
        match spawned {
            Ok(_) => {
                self.attempts += 1;
                Ok(())
            }
            Err(error) => Err(LinkError::Thread(error.to_string())),
        }
    }

    /// An attempt has ended.
    pub(crate) fn connected(
        &mut self,
        rank: RankOf,
        result: Result<Box<Link>, LinkError>,
        now: Instant,
    ) {
        self.attempts = self.attempts.saturating_sub(1);
        let state = match result {
            Ok(link) => State::Ready(link),
            Err(error) => {
                if let Some(held_back) = self.log.admit(now) {
                    let (engine, rank) = (&rank.0.engine, rank.1);
                    tracing::warn!(engine, rank, %error, held_back, "producer not connected");
                }
                State::Failed { error, at: now }
            }
        };
        self.states.insert(rank, state);
    }

    /// A peer is gone: who needs its ranks asks again.
    pub(crate) fn peer_gone(&mut self, peer: PeerId) {
        self.states
            .retain(|_, state| !matches!(state, State::Ready(link) if link.peer.id() == peer));
    }

    /// Forgets connections that nobody uses, but for those that are there.
    pub(crate) fn tidy(&mut self, now: Instant) {
        self.states.retain(|_, state| match state {
            State::Ready(link) => link.peer.gone().is_none(),
            State::Connecting => true,
            State::Failed { at, .. } => now.saturating_duration_since(*at) < PAUSE,
        });
    }
}

struct Attempt {
    engine: Engine,
    lane: LaneChoice,
    timeout: Duration,
    tables: Vec<Vec<Table>>,
    source: Source,
    rank: u32,
}

impl Attempt {
    fn run(&self) -> Result<Box<Link>, LinkError> {
        let rank = rank_of(self.rank);
        let address = &self.source.directory;
        let listing =
            fetch(address, Some(&[rank]), self.timeout).map_err(|error| LinkError::Directory {
                error: std::sync::Arc::new(error),
            })?;
        if listing.engine.as_str() != self.source.engine {
            return Err(LinkError::OtherEngine {
                address: address.clone(),
                found: listing.engine.as_str().to_owned(),
                wanted: self.source.engine.clone(),
            });
        }
        let mut entries = listing.entries;
        let description = entries
            .remove(&rank)
            .ok_or_else(|| LinkError::Layout(format!("rank {rank} is not published")))?;
        let peer = self
            .engine
            .connect(description, self.lane)
            .map_err(|error| LinkError::Connect(Box::new(error)))?;
        let tables = pair_tables(&self.tables, &peer).map_err(LinkError::Layout)?;
        Ok(Box::new(Link {
            instance: listing.instance,
            peer,
            tables,
        }))
    }
}

/// Our tables with the peer's tables of the same group and layer.
fn pair_tables(ours: &[Vec<Table>], peer: &Peer) -> Result<Vec<Vec<(Table, RemoteTable)>>, String> {
    let theirs: HashMap<(u32, u32), RemoteTable> = peer
        .tables()
        .map(|table| {
            let description = table.description();
            ((description.group, description.layer), table.clone())
        })
        .collect();
    let pair = |table: &Table| {
        let ours = table.description();
        let (group, layer) = (ours.group, ours.layer);
        let remote = theirs
            .get(&(group, layer))
            .ok_or_else(|| format!("no blocks of group {group}, layer {layer}"))?;
        let (here, there) = (ours.block_bytes, remote.description().block_bytes);
        if here != there {
            return Err(format!(
                "blocks of group {group}, layer {layer} have {here} bytes here and {there} there"
            ));
        }
        Ok((table.clone(), remote.clone()))
    };
    ours.iter()
        .map(|group| group.iter().map(pair).collect())
        .collect()
}

//! A connected peer, as callers see it.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use kvferry_wire::regions::MAX_REGION_RANGES;
use kvferry_wire::{
    Description, Incarnation, MAX_MESSAGE_BYTES, MAX_READ_TABLES, MemoryKind, RegionSet,
};

use crate::command::Command;
use crate::completion::CompletionCell;
use crate::error::{ReadError, SendError};
use crate::fabric::NativeReads;
use crate::lane::Lane;
use crate::plan::{BlockPair, PairRuns, check_pairs};
use crate::same_host::SameHost;
use crate::service::PeerId;
use crate::shared::{Shared, deadline_in};
use crate::table::{RemoteTable, Table};
use crate::transfer::{ReadCommand, TablePair, Transfer, TransferReport};

/// Runs of block ids that fit one read request beside its tables (a run takes 8 bytes).
const MAX_READ_RUNS: usize = (MAX_MESSAGE_BYTES - (1 << 20)) / 8;

/// What the handle and the progress thread share of a peer.
pub(crate) struct PeerShared {
    pub(crate) id: PeerId,
    pub(crate) description: Arc<Description>,
    pub(crate) lane: Lane,
    pub(crate) transports: String,
    pub(crate) gone: Arc<OnceLock<String>>,
    /// What the peer shares on this host, for the lanes that need it.
    pub(crate) same_host: Option<Arc<SameHost>>,
    pub(crate) life: Arc<Life>,
}

/// A peer that has answered the greeting, as the progress thread tells of it.
pub(crate) struct Greeted {
    pub(crate) id: PeerId,
    pub(crate) description: Arc<Description>,
    pub(crate) transports: String,
    /// What one-sided reads there are on its endpoint.
    pub(crate) native: NativeReads,
    pub(crate) gone: Arc<OnceLock<String>>,
    pub(crate) life: Arc<Life>,
}

/// What the progress thread finds out about a peer and reads look at.
#[derive(Default)]
pub(crate) struct Life {
    withdrawn: Mutex<RegionSet>,
    suspect: AtomicBool,
}

impl Life {
    fn withdrawn(&self) -> MutexGuard<'_, RegionSet> {
        self.withdrawn
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns what it was before.
    pub(crate) fn set_suspect(&self, suspect: bool) -> bool {
        // Written only where it changes: this is asked for every segment that arrives.
        let before = self.is_suspect();
        if before != suspect {
            self.suspect.store(suspect, Ordering::Relaxed);
        }
        before
    }

    pub(crate) fn is_suspect(&self) -> bool {
        self.suspect.load(Ordering::Relaxed)
    }

    /// Adds regions that the peer has given up; false if no engine has given up so many.
    pub(crate) fn withdraw(&self, regions: &RegionSet) -> bool {
        let mut withdrawn = self.withdrawn();
        withdrawn.extend(regions);
        // Twice as many: those of its regions that are gone and not announced lie between.
        withdrawn.ranges().len() <= 2 * MAX_REGION_RANGES
    }

    pub(crate) fn is_withdrawn(&self, region: u32) -> bool {
        self.withdrawn().contains(region)
    }
}

/// A peer that answered the greeting. Cheap to clone.
///
/// A `Peer` is one life of one engine: when it ends, the handle says so for ever, and the restarted
/// engine is connected anew.
#[derive(Clone)]
pub struct Peer {
    pub(crate) peer: Arc<PeerShared>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) next_transfer: Arc<AtomicU64>,
}

impl Peer {
    /// The peer's number in this engine.
    #[must_use]
    pub fn id(&self) -> PeerId {
        self.peer.id
    }

    /// What the peer said of itself.
    #[must_use]
    pub fn description(&self) -> &Description {
        &self.peer.description
    }

    /// The peer's life.
    #[must_use]
    pub fn incarnation(&self) -> Incarnation {
        self.peer.description.incarnation
    }

    /// How bytes move from this peer.
    #[must_use]
    pub fn lane(&self) -> Lane {
        self.peer.lane
    }

    /// What carries messages and data, in the fabric's words.
    #[must_use]
    pub fn transports(&self) -> &str {
        &self.peer.transports
    }

    /// Why the peer is gone, if it is.
    #[must_use]
    pub fn gone(&self) -> Option<&str> {
        self.peer.gone.get().map(String::as_str)
    }

    /// True while the peer has been silent for `suspect_after` of the configuration and is not given
    /// up yet: its transfers fail as [`Stalled`](crate::TransferError::Stalled), new ones at once.
    #[must_use]
    pub fn is_suspect(&self) -> bool {
        self.peer.life.is_suspect()
    }

    /// The peer's tables.
    pub fn tables(&self) -> impl ExactSizeIterator<Item = RemoteTable> + '_ {
        let owner = self.incarnation();
        self.peer
            .description
            .tables
            .iter()
            .map(move |table| RemoteTable {
                owner,
                description: Arc::new(table.clone()),
            })
    }

    /// Reads blocks: for each pair of tables, the peer's block `remote` of each pair of ids into our
    /// block `local`. Destinations of one read must not repeat; what a repeated one holds afterwards
    /// is one of its sources, unspecified which. The default deadline is the configuration's.
    ///
    /// Nothing to read is a transfer that has already succeeded.
    ///
    /// # Errors
    /// [`ReadError`] naming the table, field or block id that is wrong; nothing was started.
    pub fn read(
        &self,
        tables: &[(Table, RemoteTable)],
        pairs: &[BlockPair],
    ) -> Result<Transfer, ReadError> {
        self.read_within(tables, pairs, self.shared.config.transfer_timeout)
    }

    /// [`read`](Self::read) with a deadline of its own.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_within(
        &self,
        tables: &[(Table, RemoteTable)],
        pairs: &[BlockPair],
        timeout: Duration,
    ) -> Result<Transfer, ReadError> {
        self.shared
            .check()
            .map_err(|error| ReadError::Engine(error.to_string()))?;
        if let Some(reason) = self.gone() {
            return Err(ReadError::PeerGone(reason.into()));
        }
        self.check_tables(tables, pairs)?;
        let holds = self
            .shared
            .hold(tables.iter().map(|(local, _)| local))
            .map_err(|table| ReadError::LocalTable { table })?;
        let number = self.next_transfer.fetch_add(1, Ordering::Relaxed);
        let cell = Arc::new(CompletionCell::new());
        let transfer = Transfer {
            number,
            cell: Arc::clone(&cell),
            shared: Arc::clone(&self.shared),
        };
        if tables.is_empty() || pairs.is_empty() {
            cell.complete(Ok(TransferReport {
                bytes: 0,
                operations: 0,
                lane: None,
                elapsed: Duration::ZERO,
            }));
            cell.quiesce();
            return Ok(transfer);
        }
        let command = ReadCommand {
            number,
            peer: self.peer.id,
            lane: self.peer.lane,
            same_host: self.peer.same_host.clone(),
            tables: tables
                .iter()
                .map(|(local, remote)| TablePair {
                    local: local.clone(),
                    remote: Arc::clone(&remote.description),
                })
                .collect(),
            pairs: pairs.to_vec(),
            holds,
            timeout,
            deadline: deadline_in(timeout),
            cell,
        };
        self.shared
            .submit(Command::Read(Box::new(command)))
            .map_err(|error| ReadError::Engine(error.to_string()))?;
        Ok(transfer)
    }

    fn check_tables(
        &self,
        tables: &[(Table, RemoteTable)],
        pairs: &[BlockPair],
    ) -> Result<(), ReadError> {
        for (local, remote) in tables {
            if remote.owner != self.incarnation() {
                return Err(ReadError::StaleTable {
                    table: remote.owner,
                    peer: self.incarnation(),
                });
            }
            let region = remote.description.region;
            if self.peer.life.is_withdrawn(region) {
                return Err(ReadError::Withdrawn {
                    region,
                    table: remote.id(),
                });
            }
            let kind = local.region().memory.kind();
            if self.peer.lane != Lane::Native && kind != MemoryKind::Host {
                return Err(ReadError::Kind {
                    lane: self.peer.lane,
                    kind,
                });
            }
            check_pairs(local.description(), &remote.description, pairs)?;
        }
        let too_large = tables.len() > MAX_READ_TABLES
            || (pairs.len() > MAX_READ_RUNS && PairRuns::new(pairs).count() > MAX_READ_RUNS);
        if too_large {
            return Err(ReadError::TooLarge {
                blocks: PairRuns::new(pairs).count(),
                tables: tables.len(),
            });
        }
        Ok(())
    }

    /// Sends a message to the peer's service on `channel`. Messages arrive whole and in order, or
    /// the peer is lost.
    ///
    /// # Errors
    /// [`SendError`] if the message is empty or larger than 16 MiB less a header, if the peer is
    /// gone, or if the engine was shut down.
    pub fn send(&self, channel: u16, payload: Vec<u8>) -> Result<(), SendError> {
        if let Some(reason) = self.gone() {
            return Err(SendError::PeerGone(reason.into()));
        }
        self.shared.send(self.peer.id, channel, payload)
    }

    /// Says goodbye and closes the connection. Transfers in flight fail.
    pub fn disconnect(&self) {
        // A stopped engine has closed everything already.
        let _ = self
            .shared
            .submit(Command::Disconnect { peer: self.peer.id });
    }
}

/// Largest payload of a service message, in bytes.
pub const MAX_PAYLOAD_BYTES: usize = MAX_MESSAGE_BYTES - 64;

pub(crate) fn check_payload(bytes: usize) -> Result<(), SendError> {
    if (1..=MAX_PAYLOAD_BYTES).contains(&bytes) {
        Ok(())
    } else {
        Err(SendError::Size {
            bytes,
            max: MAX_PAYLOAD_BYTES,
        })
    }
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Peer")
            .field("id", &self.peer.id)
            .field("engine", &self.peer.description.engine)
            .field("incarnation", &self.incarnation())
            .field("lane", &self.peer.lane)
            .field("gone", &self.gone())
            .finish_non_exhaustive()
    }
}

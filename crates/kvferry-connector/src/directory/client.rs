//! Asking a directory.
//!
//! Responsible for one call with one deadline, and for an error that says what to do. Not
//! responsible for trying again: [`DirectoryError::is_transient`] says when that makes sense.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use kvferry_wire::directory::{
    DirectoryReply, DirectoryRequest, FRAME_HEADER_BYTES, FrameHeader, MAX_DIRECTORY_REPLY_BYTES,
};
use kvferry_wire::{Description, EngineId, Instance, Rank, WireError};

use super::{DirectoryError, MAX_TIMEOUT, Stage};

/// Memory for a reply grows in steps of this size, as bytes arrive.
const READ_STEP_BYTES: usize = 1 << 20;

/// What a directory serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectoryListing {
    /// The scheduler half that issues the engine's leases, where there is one.
    pub instance: Option<Instance>,
    /// The engine that the directory belongs to. The caller judges whether it is the one meant.
    pub engine: EngineId,
    /// The descriptions by rank. Each names its rank and the engine above.
    pub entries: BTreeMap<Rank, Description>,
}

/// Asks the directory at `address` (a `SocketAddr` or `host:port`) for the descriptions of
/// `ranks`, or for all that are published. Looking up the name, connecting, the exchange and
/// decoding take at most `deadline` together (at most [`MAX_TIMEOUT`]).
///
/// Blocks the calling thread, so a scheduler's or an engine's thread must not call it.
///
/// # Errors
/// See [`DirectoryError`]. If ranks were given and one of them is not published, the call fails
/// with [`DirectoryError::MissingRanks`].
pub fn fetch<A: ToString>(
    address: A,
    ranks: Option<&[Rank]>,
    deadline: Duration,
) -> Result<DirectoryListing, DirectoryError> {
    let call = Call::new(address.to_string(), deadline);
    let request = DirectoryRequest {
        ranks: ranks.map(<[Rank]>::to_vec),
    };
    let request = request
        .encode_frame()
        .map_err(|source| DirectoryError::Request {
            address: call.address.clone(),
            source,
        })?;
    let mut stream = call.connect()?;
    call.send(&mut stream, &request)?;
    let body = call.receive(&mut stream)?;
    let listing = call.listing(&body)?;
    call.check_ranks(&listing, ranks)?;
    Ok(listing)
}

/// One call: whom it asks and until when.
struct Call {
    address: String,
    deadline: Duration,
    until: Instant,
}

impl Call {
    fn new(address: String, deadline: Duration) -> Self {
        Self {
            address,
            deadline,
            until: Instant::now() + deadline.min(MAX_TIMEOUT),
        }
    }

    /// The time left, more than zero.
    fn left(&self, stage: Stage) -> Result<Duration, DirectoryError> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            Err(self.timed_out(stage))
        } else {
            Ok(left)
        }
    }

    fn connect(&self) -> Result<TcpStream, DirectoryError> {
        let addresses = self.resolve()?;
        let mut failure = None;
        for (index, address) in addresses.iter().enumerate() {
            // A silent address leaves the ones behind it their share of the time.
            let share = u32::try_from(addresses.len() - index).unwrap_or(u32::MAX);
            let left = self.left(Stage::Connecting)?;
            let time = (left / share).max(Duration::from_micros(1));
            match TcpStream::connect_timeout(address, time) {
                // Where nobody listens on an ephemeral port of this host, the kernel may give us
                // that very port and connect us to ourselves.
                Ok(stream) if stream.local_addr().ok() == stream.peer_addr().ok() => {
                    failure = Some(ErrorKind::ConnectionRefused.into());
                }
                Ok(stream) => {
                    stream
                        .set_nodelay(true)
                        .map_err(|error| self.failed(Stage::Connecting, error))?;
                    return Ok(stream);
                }
                Err(error) => failure = Some(error),
            }
        }
        Err(match failure {
            Some(error) if error.kind() == ErrorKind::ConnectionRefused => {
                DirectoryError::ConnectionRefused {
                    address: self.address.clone(),
                }
            }
            Some(error) => self.failed(Stage::Connecting, error),
            None => self.unresolved("the name has no addresses"),
        })
    }

    fn resolve(&self) -> Result<Vec<SocketAddr>, DirectoryError> {
        if let Ok(address) = self.address.parse() {
            return Ok(vec![address]);
        }
        // The system's resolver takes no deadline and may wait for many seconds, so it gets a thread
        // of its own, which is left behind if it is late.
        let (sender, receiver) = mpsc::sync_channel(1);
        let name = self.address.clone();
        std::thread::Builder::new()
            .name("kvf-resolve".to_owned())
            .spawn(move || {
                let found = name.to_socket_addrs().map(Iterator::collect::<Vec<_>>);
                // Nobody listens any more when the call is over.
                let _ = sender.send(found);
            })
            .map_err(|error| self.failed(Stage::Resolving, error))?;
        match receiver.recv_timeout(self.left(Stage::Resolving)?) {
            Ok(Ok(addresses)) => Ok(addresses),
            Ok(Err(error)) => Err(self.unresolved(&error.to_string())),
            Err(mpsc::RecvTimeoutError::Timeout) => Err(self.timed_out(Stage::Resolving)),
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                Err(self.unresolved("the resolver ended without an answer"))
            }
        }
    }

    fn send(&self, stream: &mut TcpStream, mut bytes: &[u8]) -> Result<(), DirectoryError> {
        while !bytes.is_empty() {
            let left = self.left(Stage::Sending)?;
            let written = stream
                .set_write_timeout(Some(left))
                .and_then(|()| stream.write(bytes));
            match written {
                Ok(count @ 1..) => bytes = bytes.get(count..).unwrap_or_default(),
                Ok(0) => return Err(self.closed()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(self.failed(Stage::Sending, error)),
            }
        }
        Ok(())
    }

    /// Receives a reply's frame and returns its body.
    fn receive(&self, stream: &mut TcpStream) -> Result<Vec<u8>, DirectoryError> {
        let mut header = [0; FRAME_HEADER_BYTES];
        self.fill(stream, &mut header)?;
        let length = FrameHeader::parse(&header, MAX_DIRECTORY_REPLY_BYTES).map_err(|source| {
            DirectoryError::NotADirectory {
                address: self.address.clone(),
                source,
            }
        })?;
        let mut body = Vec::new();
        while body.len() < length {
            let have = body.len();
            body.resize(length.min(have + READ_STEP_BYTES), 0);
            self.fill(stream, body.get_mut(have..).unwrap_or_default())?;
        }
        Ok(body)
    }

    fn fill(&self, stream: &mut TcpStream, mut bytes: &mut [u8]) -> Result<(), DirectoryError> {
        while !bytes.is_empty() {
            let left = self.left(Stage::Receiving)?;
            let read = stream
                .set_read_timeout(Some(left))
                .and_then(|()| stream.read(bytes));
            match read {
                Ok(count @ 1..) => bytes = bytes.get_mut(count..).unwrap_or_default(),
                Ok(0) => return Err(self.closed()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(self.failed(Stage::Receiving, error)),
            }
        }
        Ok(())
    }

    fn listing(&self, body: &[u8]) -> Result<DirectoryListing, DirectoryError> {
        let reply = DirectoryReply::decode_body(body)
            .map_err(|source| self.undecodable("the reply", source))?;
        let (instance, engine, encoded) = match reply {
            DirectoryReply::Entries {
                instance,
                engine,
                entries,
            } => (instance, engine, entries),
            DirectoryReply::Refused { reason } => {
                return Err(DirectoryError::Refused {
                    address: self.address.clone(),
                    reason,
                });
            }
        };
        let mut entries = BTreeMap::new();
        for (rank, bytes) in encoded {
            self.left(Stage::Decoding)?;
            let description = Description::decode(&bytes)
                .map_err(|source| self.undecodable(&format!("the entry of {rank}"), source))?;
            if description.rank != rank {
                let described = description.rank;
                return Err(self.malformed(format!("the entry of {rank} describes {described}")));
            }
            if description.engine != engine {
                let described = description.engine;
                return Err(self.malformed(format!(
                    "the entry of {rank} is of engine {described}, the directory's is {engine}"
                )));
            }
            entries.insert(rank, description);
        }
        Ok(DirectoryListing {
            instance,
            engine,
            entries,
        })
    }

    /// Checks that the listing has the ranks asked for and no others.
    fn check_ranks(
        &self,
        listing: &DirectoryListing,
        ranks: Option<&[Rank]>,
    ) -> Result<(), DirectoryError> {
        let Some(ranks) = ranks else {
            return Ok(());
        };
        let wanted: BTreeSet<Rank> = ranks.iter().copied().collect();
        if let Some(extra) = listing.entries.keys().find(|rank| !wanted.contains(rank)) {
            return Err(self.malformed(format!("it has {extra}, which was not asked for")));
        }
        let (present, missing) = wanted
            .into_iter()
            .partition::<Vec<_>, _>(|rank| listing.entries.contains_key(rank));
        if missing.is_empty() {
            return Ok(());
        }
        Err(DirectoryError::MissingRanks {
            address: self.address.clone(),
            missing,
            present,
        })
    }

    fn failed(&self, stage: Stage, source: std::io::Error) -> DirectoryError {
        match source.kind() {
            ErrorKind::TimedOut | ErrorKind::WouldBlock => self.timed_out(stage),
            ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::ConnectionAborted => {
                self.closed()
            }
            _ => DirectoryError::Io {
                address: self.address.clone(),
                stage,
                source,
            },
        }
    }

    fn timed_out(&self, stage: Stage) -> DirectoryError {
        DirectoryError::TimedOut {
            address: self.address.clone(),
            stage,
            deadline: self.deadline,
        }
    }

    fn closed(&self) -> DirectoryError {
        DirectoryError::Closed {
            address: self.address.clone(),
        }
    }

    fn unresolved(&self, reason: &str) -> DirectoryError {
        DirectoryError::Resolve {
            address: self.address.clone(),
            reason: reason.to_owned(),
        }
    }

    fn malformed(&self, reason: String) -> DirectoryError {
        DirectoryError::Malformed {
            address: self.address.clone(),
            reason,
        }
    }

    fn undecodable(&self, what: &str, source: WireError) -> DirectoryError {
        match source {
            WireError::Version { .. } => DirectoryError::Version {
                address: self.address.clone(),
                source,
            },
            source => self.malformed(format!("{what}: {source}")),
        }
    }
}

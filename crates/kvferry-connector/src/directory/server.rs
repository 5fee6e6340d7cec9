//! The directory's listener and its thread.
//!
//! Responsible for accepting, for giving every connection its turn, for the limits on their number
//! and time, and for counting and logging what went wrong. What a connection does with bytes is
//! [`connection`](super::connection)'s business.
//!
//! One thread waits in `poll` for the listener, the connections and a wake-up, until the next
//! deadline. Nothing it does blocks on a client.

use std::fmt::Display;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvferry_wire::directory::{DirectoryReply, DirectoryRequest};
use kvferry_wire::{Rank, WireError};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::connection::{After, Connection, End, Step};
use super::log::Log;
use super::published::{self, Published};
use super::stats::{Counters, DirectoryStats, count};
use super::{BindError, DirectoryConfig, EVICTION_GRACE, MAX_TIMEOUT, PublishError};

/// How long accepting pauses when the process has no descriptor left, unless a connection ends
/// before.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Replies being sent hold at most this many times a reply's largest size.
const REPLIES_IN_FLIGHT: usize = 4;

/// What the thread and the handle share.
#[derive(Debug)]
struct Shared {
    config: DirectoryConfig,
    published: Mutex<Published>,
    /// When the thread ends at the latest, once it has been told to.
    stop: Mutex<Option<Instant>>,
    wake: OwnedFd,
    counters: Counters,
}

impl Shared {
    fn published(&self) -> MutexGuard<'_, Published> {
        // The map is whole at every step, so a panic elsewhere does not spoil it.
        self.published
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn stop(&self) -> MutexGuard<'_, Option<Instant>> {
        self.stop.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A directory that serves what was published, until it is dropped or shut down.
///
/// See the [module](super) for an example and the limits.
#[derive(Debug)]
pub struct DirectoryServer {
    shared: Arc<Shared>,
    address: SocketAddr,
    thread: Option<JoinHandle<usize>>,
}

impl DirectoryServer {
    /// Listens on `address` and starts the directory's thread. Port 0 takes any free port;
    /// [`local_addr`](Self::local_addr) tells which. A name is looked up, and the first of its
    /// addresses that can be listened on is taken.
    ///
    /// # Errors
    /// [`BindError::InUse`] if somebody listens there, and otherwise what failed; each names the
    /// address.
    pub fn bind<A: ToSocketAddrs + Display>(
        address: A,
        config: DirectoryConfig,
    ) -> Result<Self, BindError> {
        config.check()?;
        let name = address.to_string();
        let listener = TcpListener::bind(address).map_err(|source| match source.kind() {
            ErrorKind::AddrInUse => BindError::InUse {
                address: name.clone(),
            },
            _ => BindError::Listen {
                address: name.clone(),
                source,
            },
        })?;
        let failed = |step| {
            let address = name.clone();
            move |source| BindError::System {
                address,
                step,
                source,
            }
        };
        listener
            .set_nonblocking(true)
            .map_err(failed("making the listener non-blocking"))?;
        let address = listener
            .local_addr()
            .map_err(failed("asking for the listener's address"))?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| failed("creating an eventfd")(errno.into()))?;
        let shared = Arc::new(Shared {
            config,
            published: Mutex::default(),
            stop: Mutex::new(None),
            wake,
            counters: Counters::default(),
        });
        let worker = Worker::new(Arc::clone(&shared), listener);
        let thread = std::thread::Builder::new()
            .name("kvf-directory".to_owned())
            .spawn(move || worker.run())
            .map_err(failed("starting its thread"))?;
        tracing::info!(%address, engine = %shared.config.engine, "the directory is listening");
        Ok(Self {
            shared,
            address,
            thread: Some(thread),
        })
    }

    /// The address that the directory listens on, with its real port.
    #[must_use]
    pub const fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Serves `description`, an encoded [`Description`](kvferry_wire::Description), as `rank`'s
    /// from now on, in place of its previous one. Replies that are being sent are not changed.
    ///
    /// # Errors
    /// If the bytes are no valid description, or one of another rank, engine or instance, or if
    /// the directory is full. The rank's previous entry stays.
    pub fn publish(&self, rank: Rank, description: Vec<u8>) -> Result<(), PublishError> {
        let config = &self.shared.config;
        published::check(rank, &description, &config.engine, config.instance)?;
        self.shared.published().insert(rank, description)
    }

    /// Stops serving `rank`. Returns whether it was published.
    pub fn withdraw(&self, rank: Rank) -> bool {
        self.shared.published().remove(rank)
    }

    /// What the directory has done so far.
    #[must_use]
    pub fn stats(&self) -> DirectoryStats {
        self.shared.counters.snapshot()
    }

    /// Stops listening, gives replies that are being sent up to `timeout` (at most
    /// [`MAX_TIMEOUT`]) to finish, and ends the thread. Returns the number of replies that were
    /// cut off. Dropping the server does the same with a timeout of zero.
    pub fn shutdown(mut self, timeout: Duration) -> usize {
        self.stop(timeout)
    }

    fn stop(&mut self, timeout: Duration) -> usize {
        let Some(thread) = self.thread.take() else {
            return 0;
        };
        *self.shared.stop() = Some(Instant::now() + timeout.min(MAX_TIMEOUT));
        // The only failure is a full counter, and then the thread wakes anyway.
        let _ = rustix::io::write(&self.shared.wake, &1_u64.to_ne_bytes());
        thread.join().unwrap_or_else(|_| {
            tracing::error!(address = %self.address, "the directory's thread had panicked");
            0
        })
    }
}

impl Drop for DirectoryServer {
    fn drop(&mut self) {
        self.stop(Duration::ZERO);
    }
}

/// A client: its connection and where it calls from.
type Client = (SocketAddr, Connection<TcpStream>);

/// Which descriptors `poll` reported.
struct Ready {
    listener: bool,
    /// One per client, in order.
    clients: Vec<bool>,
}

/// The thread's state.
struct Worker {
    shared: Arc<Shared>,
    /// `None` once the directory stops.
    listener: Option<TcpListener>,
    clients: Vec<Client>,
    /// Accepting pauses until then: all places are taken, or the process is out of descriptors.
    accept_from: Option<Instant>,
    log: Log,
}

impl Worker {
    fn new(shared: Arc<Shared>, listener: TcpListener) -> Self {
        Self {
            shared,
            listener: Some(listener),
            clients: Vec::new(),
            accept_from: None,
            log: Log::default(),
        }
    }

    /// Serves until told to stop. Returns the number of replies that were cut off.
    fn run(mut self) -> usize {
        loop {
            let now = Instant::now();
            self.expire(now);
            let stop = *self.shared.stop();
            if let Some(stop) = stop {
                self.listener = None;
                self.clients.retain(|(_, client)| client.is_replying());
                if self.clients.is_empty() || stop <= now {
                    return self.clients.len();
                }
            }
            let ready = match self.wait(now, stop) {
                Ok(ready) => ready,
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => {
                    tracing::error!(%error, "the directory cannot wait for its clients and ends");
                    return self.clients.len();
                }
            };
            let now = Instant::now();
            // Clients come before the listener: a request that has arrived is taken before anybody
            // is judged to be without progress.
            self.serve_ready(&ready.clients, now);
            if ready.listener {
                self.accept(now);
            }
        }
    }

    /// Waits until a descriptor is ready or a deadline has passed.
    fn wait(&self, now: Instant, stop: Option<Instant>) -> rustix::io::Result<Ready> {
        let paused = self.accept_from.filter(|until| *until > now);
        let listener = self.listener.as_ref().filter(|_| paused.is_none());
        let deadline = self
            .clients
            .iter()
            .map(|(_, client)| client.deadline())
            .chain(stop)
            .chain(paused)
            .min();
        let timeout =
            deadline.and_then(|at| Timespec::try_from(at.saturating_duration_since(now)).ok());

        let mut fds = Vec::with_capacity(2 + self.clients.len());
        fds.push(PollFd::new(&self.shared.wake, PollFlags::IN));
        fds.extend(self.clients.iter().map(|(_, client)| {
            let awaited = if client.is_replying() {
                PollFlags::OUT
            } else {
                PollFlags::IN
            };
            PollFd::new(client.stream(), awaited)
        }));
        fds.extend(listener.map(|listener| PollFd::new(listener, PollFlags::IN)));
        poll(&mut fds, timeout.as_ref())?;

        let mut ready = fds.iter().map(|fd| !fd.revents().is_empty());
        if ready.next() == Some(true) {
            // Takes the event, or the next wait would end at once.
            let _ = rustix::io::read(&self.shared.wake, &mut [0_u8; 8]);
        }
        Ok(Ready {
            clients: ready.by_ref().take(self.clients.len()).collect(),
            listener: ready.next() == Some(true),
        })
    }

    /// Ends the connections whose time is over.
    fn expire(&mut self, now: Instant) {
        let (over, alive) = std::mem::take(&mut self.clients)
            .into_iter()
            .partition::<Vec<_>, _>(|(_, client)| client.deadline() <= now);
        self.clients = alive;
        for (peer, client) in over {
            self.ended(peer, client.expire(), now);
        }
    }

    /// Gives each client that is ready its turn.
    fn serve_ready(&mut self, ready: &[bool], now: Instant) {
        let clients = std::mem::take(&mut self.clients);
        let mut in_flight = clients.iter().map(|(_, client)| client.reply_bytes()).sum();
        for ((peer, mut client), ready) in clients.into_iter().zip(ready) {
            match ready.then(|| self.turn(peer, &mut client, &mut in_flight, now)) {
                Some(Some(end)) => self.ended(peer, end, now),
                Some(None) | None => self.clients.push((peer, client)),
            }
        }
    }

    /// One client's turn: at most one request and one step of its reply.
    fn turn(
        &mut self,
        peer: SocketAddr,
        client: &mut Connection<TcpStream>,
        in_flight: &mut usize,
        now: Instant,
    ) -> Option<End> {
        let mut step = client.advance(now);
        if let Step::Request(body) = step {
            let (frame, after) = match self.answer(peer, &body, *in_flight, now) {
                Ok(answer) => answer,
                Err(error) => return Some(End::Garbage(error)),
            };
            *in_flight += frame.len();
            client.reply(frame, after);
            step = client.advance(now);
        }
        match step {
            Step::End(end) => Some(end),
            Step::Wait | Step::Request(_) => None,
        }
    }

    /// The frame that answers a request's body.
    fn answer(
        &mut self,
        peer: SocketAddr,
        body: &[u8],
        in_flight: usize,
        now: Instant,
    ) -> Result<(Vec<u8>, After), WireError> {
        let config = &self.shared.config;
        let (answer, after) = match DirectoryRequest::decode_body(body) {
            Ok(request) => {
                let selected = self.shared.published().select(request.ranks.as_deref());
                let memory = config.max_reply_bytes.saturating_mul(REPLIES_IN_FLIGHT);
                let answer = published::reply(
                    &config.engine,
                    config.instance,
                    &selected,
                    config.max_reply_bytes,
                    memory.saturating_sub(in_flight),
                );
                (answer, After::Next)
            }
            // Another version of kvferry deserves to be told.
            Err(error @ WireError::Version { .. }) => (Err(error.to_string()), After::Close),
            Err(error) => return Err(error),
        };
        match answer {
            Ok(frame) => {
                count(&self.shared.counters.served);
                tracing::debug!(%peer, bytes = frame.len(), "answering a directory request");
                Ok((frame, after))
            }
            Err(reason) => {
                count(&self.shared.counters.refused);
                self.log.refused(peer, &reason, now);
                Ok((DirectoryReply::Refused { reason }.encode_frame()?, after))
            }
        }
    }

    /// Accepts who is waiting, as far as there is room.
    fn accept(&mut self, now: Instant) {
        let mut places = self
            .shared
            .config
            .max_connections
            .saturating_sub(self.clients.len());
        if places == 0 {
            if let Err(room_at) = self.make_room(now) {
                self.accept_from = Some(room_at);
                return;
            }
            places = 1;
        }
        for _ in 0..places {
            let accepted = match &self.listener {
                Some(listener) => listener.accept(),
                None => return,
            };
            match accepted {
                Ok((stream, peer)) => self.add(stream, peer, now),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) => {
                    count(&self.shared.counters.accept_failed);
                    self.log.accept_failed(&error, now);
                    // A client that left before it was accepted costs nobody a pause.
                    if error.kind() != ErrorKind::ConnectionAborted {
                        self.accept_from = Some(now + ACCEPT_PAUSE);
                        return;
                    }
                }
            }
        }
    }

    fn add(&mut self, stream: TcpStream, peer: SocketAddr, now: Instant) {
        let prepared = stream
            .set_nonblocking(true)
            .and_then(|()| stream.set_nodelay(true));
        if let Err(error) = prepared {
            count(&self.shared.counters.accept_failed);
            self.log.accept_failed(&error, now);
            return;
        }
        count(&self.shared.counters.connections);
        let config = &self.shared.config;
        let connection = Connection::new(
            stream,
            now,
            config.request_timeout,
            config.connection_timeout,
        );
        self.clients.push((peer, connection));
    }

    /// Closes the connection that has been without progress for longest, or says when one may be.
    fn make_room(&mut self, now: Instant) -> Result<(), Instant> {
        let longest = self
            .clients
            .iter()
            .enumerate()
            .min_by_key(|(_, (_, client))| client.last_progress())
            .map(|(index, (_, client))| (index, client.last_progress() + EVICTION_GRACE));
        match longest {
            Some((_, room_at)) if room_at > now => Err(room_at),
            Some((index, _)) => {
                // Counted while the connection is open: a client that sees its end finds it counted.
                let (peer, _open) = self.clients.swap_remove(index);
                count(&self.shared.counters.evicted);
                self.log.evicted(peer, self.clients.len(), now);
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Accounts for a connection that is over. Its place is free, so accepting goes on.
    ///
    /// Call it while the stream is open: a client that sees its end finds it counted.
    fn ended(&mut self, peer: SocketAddr, end: End, now: Instant) {
        self.accept_from = None;
        match end {
            End::Closed => {}
            End::Garbage(error) => {
                count(&self.shared.counters.garbage);
                self.log.garbage(peer, &error, now);
            }
            End::TimedOut(awaited) => {
                count(&self.shared.counters.timed_out);
                self.log.timed_out(peer, awaited, now);
            }
            End::Failed(error) => tracing::debug!(%peer, %error, "a directory client is gone"),
        }
    }
}

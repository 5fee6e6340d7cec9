//! The side that shares: a thread that answers on the engine's unix socket.
//!
//! It answers engines of the same user and nobody else, one packet per request. It sleeps until
//! somebody connects; a connection that says nothing is dropped at its deadline.

use std::fmt;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_wire::{MAX_POOLS_PER_PACKET, MAX_SHARE_BYTES, ShareReply, ShareRequest, SharedPool};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags,
    SocketType, accept_with, bind, listen, recv, sendmsg, socket_with, sockopt,
};

use super::{PACKET_TIMEOUT, check_user, socket_address};
use crate::error::EngineError;
use crate::limit::{LOG_PERIOD, LogLimit};
use crate::memory::{HostPool, credentials};
use crate::shared::Shared;

/// Connections that may wait for their request; the oldest makes room.
const MAX_CONNECTIONS: usize = 64;

/// An engine's unix socket. The thread ends with the engine, and the socket's file with the thread.
pub(crate) struct ShareServer {
    name: String,
    /// Written to when the engine ends.
    stop: OwnedFd,
}

impl ShareServer {
    /// Opens the socket that the configuration names and starts the thread; `None` if it is off.
    ///
    /// # Errors
    /// [`EngineError::System`] with the step that failed.
    pub(crate) fn start(shared: &Arc<Shared>) -> Result<(), EngineError> {
        let Some(name) = shared.config.share_socket.name(shared.incarnation) else {
            return Ok(());
        };
        let failed = |step| {
            move |error: rustix::io::Errno| EngineError::System {
                step,
                source: error.into(),
            }
        };
        let address = socket_address(&name).map_err(failed("naming the share socket"))?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .map_err(failed("the share socket"))?;
        bind(&listener, &address).map_err(failed("binding the share socket"))?;
        let file = (!name.starts_with('@')).then(|| SocketFile(PathBuf::from(&name)));
        listen(&listener, 128).map_err(failed("listening on the share socket"))?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(failed("eventfd"))?;
        // Set once, here.
        let _ = shared.share.set(Self { name, stop });
        let thread = Thread {
            shared: Arc::clone(shared),
            listener,
            connections: Vec::new(),
            log: LogLimit::new(LOG_PERIOD),
            _file: file,
        };
        std::thread::Builder::new()
            .name("kvferry-share".into())
            .spawn(move || thread.run())
            .map_err(|source| EngineError::System {
                step: "starting the share thread",
                source,
            })?;
        Ok(())
    }

    /// The socket's name, for the description.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Has the thread end.
    pub(crate) fn stop(&self) {
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
    }
}

impl fmt::Debug for ShareServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "share socket {}", self.name)
    }
}

/// Removed when it is dropped.
struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

struct Thread {
    shared: Arc<Shared>,
    listener: OwnedFd,
    connections: Vec<(OwnedFd, Instant)>,
    log: LogLimit,
    _file: Option<SocketFile>,
}

impl Thread {
    fn run(mut self) {
        while !self.shared.is_stopped() {
            let Some(share) = self.shared.share.get() else {
                return;
            };
            let fds = [share.stop.as_fd(), self.listener.as_fd()];
            let sockets = self.connections.iter().map(|(socket, _)| socket.as_fd());
            let mut fds: Vec<PollFd<'_>> = fds
                .into_iter()
                .chain(sockets)
                .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
                .collect();
            let timeout = self.connections.first().map(|&(_, until)| {
                let left = until.saturating_duration_since(Instant::now());
                // Rounded up, so that the deadline has passed when this ends.
                let left = left + Duration::from_millis(1);
                Timespec {
                    tv_sec: left.as_secs() as i64,
                    tv_nsec: i64::from(left.subsec_nanos()),
                }
            });
            // An interrupted wait finds nothing ready.
            if poll(&mut fds, timeout.as_ref()).is_err() {
                continue;
            }
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            if ready[0] {
                return;
            }
            let now = Instant::now();
            let mut asked = ready[2..].iter();
            let connections = std::mem::take(&mut self.connections);
            for (socket, until) in connections {
                if asked.next() == Some(&true) {
                    self.answer(socket.as_fd());
                } else if until > now {
                    self.connections.push((socket, until));
                }
            }
            if ready[1] {
                self.accept(now + PACKET_TIMEOUT);
            }
        }
    }

    fn accept(&mut self, until: Instant) {
        while let Ok(socket) = accept_with(&self.listener, SocketFlags::CLOEXEC) {
            let allowed = credentials(socket.as_fd())
                .map_err(|error| error.to_string())
                .and_then(|theirs| check_user(theirs.uid));
            if let Err(reason) = allowed {
                if let Some(held_back) = self.log.admit(Instant::now()) {
                    tracing::info!(
                        reason,
                        held_back,
                        "nothing is shared with a process that connected"
                    );
                }
                refuse(socket.as_fd(), reason);
                continue;
            }
            if self.connections.len() == MAX_CONNECTIONS {
                self.connections.remove(0);
            }
            self.connections.push((socket, until));
        }
    }

    /// Answers the request that has arrived.
    fn answer(&self, socket: BorrowedFd<'_>) {
        let mut buffer = [0; MAX_SHARE_BYTES];
        let request = match recv(socket, buffer.as_mut_slice(), RecvFlags::DONTWAIT) {
            Ok((_, 0)) | Err(_) => return,
            // The bytes that are there; a longer packet was cut, and does not parse.
            Ok((_, length)) => ShareRequest::decode(&buffer[..length.min(MAX_SHARE_BYTES)]),
        };
        let ours = self.shared.incarnation;
        match request {
            Ok(request) if request.expects == ours => {
                let pools = self.pools();
                tracing::debug!(from = %request.from, pools = pools.len(), "pools are shared");
                if let Err(error) = self.offer(socket, &pools) {
                    tracing::debug!(%error, "pools could not be shared");
                }
            }
            Ok(request) => {
                let expects = request.expects;
                refuse(socket, format!("this is incarnation {ours}, not {expects}"));
            }
            Err(error) => refuse(socket, error.to_string()),
        }
    }

    fn pools(&self) -> Vec<(SharedPool, Arc<HostPool>)> {
        let catalog = self.shared.catalog();
        let shared = catalog.regions.iter().filter_map(|region| {
            let pool = region.memory.pool()?;
            let offer = SharedPool {
                region: region.id,
                bytes: region.memory.bytes(),
            };
            Some((offer, Arc::clone(pool)))
        });
        shared.collect()
    }

    fn offer(
        &self,
        socket: BorrowedFd<'_>,
        pools: &[(SharedPool, Arc<HostPool>)],
    ) -> Result<(), String> {
        let mut rest = pools;
        loop {
            let (now, later) = rest.split_at(rest.len().min(MAX_POOLS_PER_PACKET));
            let reply = ShareReply::Pools {
                incarnation: self.shared.incarnation,
                word: self.shared.word.address(),
                pools: now.iter().map(|(pool, _)| *pool).collect(),
                more: !later.is_empty(),
            };
            let fds: Vec<BorrowedFd<'_>> = now.iter().map(|(_, pool)| pool.fd()).collect();
            send(socket, &reply, &fds)?;
            if later.is_empty() {
                return Ok(());
            }
            rest = later;
        }
    }
}

fn refuse(socket: BorrowedFd<'_>, reason: String) {
    // Whoever does not listen does not learn why.
    let _ = send(socket, &ShareReply::Refused { reason }, &[]);
}

fn send(socket: BorrowedFd<'_>, reply: &ShareReply, fds: &[BorrowedFd<'_>]) -> Result<(), String> {
    let text = |error: rustix::io::Errno| error.to_string();
    let bytes = reply.encode().map_err(|error| error.to_string())?;
    sockopt::set_socket_timeout(socket, sockopt::Timeout::Send, Some(PACKET_TIMEOUT))
        .map_err(text)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_POOLS_PER_PACKET))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    sendmsg(
        socket,
        &[IoSlice::new(&bytes)],
        &mut control,
        SendFlags::NOSIGNAL,
    )
    .map_err(text)?;
    Ok(())
}

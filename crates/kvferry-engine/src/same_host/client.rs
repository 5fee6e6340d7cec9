//! The side that asks: fetches a peer's pools, and finds out whether its memory can be read.

use std::collections::HashMap;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvferry_wire::{
    Incarnation, MAX_POOLS_PER_PACKET, MAX_SHARE_BYTES, ShareReply, ShareRequest, SharedPool,
    description::MAX_REGIONS,
};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags,
    SocketFlags, SocketType, connect, recvmsg, send, socket_with, sockopt,
};

use super::{PACKET_TIMEOUT, SameHost, check_user, socket_address};
use crate::memory::{CopyError, Credentials, RemotePool, RemoteProcess, credentials, probe};

/// Asks the engine behind a unix socket for its pools, and maps them.
///
/// # Errors
/// Why nothing of it can be used, in words for the refusal of a lane.
pub(crate) fn fetch(
    name: &str,
    request: &ShareRequest,
    deadline: Instant,
) -> Result<SameHost, String> {
    let failed = |step: &'static str| {
        move |error: rustix::io::Errno| format!("{step} its unix socket {name:?}: {error}")
    };
    let address = socket_address(name).map_err(failed("naming"))?;
    let socket = socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(failed("making a socket for"))?;
    // Also bounds the wait for room in a full backlog.
    let patience = left(deadline).ok_or("no time was left to ask its unix socket")?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(patience))
        .map_err(failed("setting a deadline for"))?;
    connect(&socket, &address).map_err(failed("connecting to"))?;
    let theirs = credentials(socket.as_fd()).map_err(|error| error.to_string())?;
    check_user(theirs.uid)?;
    let bytes = request.encode().map_err(|error| error.to_string())?;
    send(&socket, &bytes, SendFlags::NOSIGNAL).map_err(failed("writing to"))?;
    let (word, pools) = receive(socket.as_fd(), request.expects, deadline)?;
    Ok(SameHost {
        pools: Mutex::new(pools),
        process: process(theirs, word, request.expects),
    })
}

/// What is left until the deadline, but no more than one packet may take.
fn left(deadline: Instant) -> Option<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    (!left.is_zero()).then(|| left.min(PACKET_TIMEOUT))
}

type Pools = HashMap<u32, Result<Arc<RemotePool>, String>>;

fn receive(
    socket: BorrowedFd<'_>,
    expects: Incarnation,
    deadline: Instant,
) -> Result<(u64, Pools), String> {
    let mut mapped = Pools::new();
    loop {
        let (reply, fds) = packet(socket, deadline)?;
        let (incarnation, word, pools, more) = match reply {
            ShareReply::Refused { reason } => return Err(format!("it shares nothing: {reason}")),
            ShareReply::Pools {
                incarnation,
                word,
                pools,
                more,
            } => (incarnation, word, pools, more),
        };
        if incarnation != expects {
            return Err(format!("incarnation {incarnation} answers in its place"));
        }
        if pools.len() != fds.len() {
            let (pools, fds) = (pools.len(), fds.len());
            return Err(format!(
                "it names {pools} pools and sends {fds} descriptors"
            ));
        }
        for (SharedPool { region, bytes }, fd) in pools.into_iter().zip(fds) {
            let pool = RemotePool::map(fd, bytes).map(Arc::new);
            let pool = pool.map_err(|reason| format!("its region {region}: {reason}"));
            mapped.insert(region, pool);
        }
        if !more {
            return Ok((word, mapped));
        }
        if mapped.len() >= MAX_REGIONS {
            return Err(format!("it shares more than {MAX_REGIONS} pools"));
        }
    }
}

fn packet(socket: BorrowedFd<'_>, deadline: Instant) -> Result<(ShareReply, Vec<OwnedFd>), String> {
    let patience = left(deadline).ok_or("its share socket did not answer in time")?;
    sockopt::set_socket_timeout(socket, sockopt::Timeout::Recv, Some(patience))
        .map_err(|error| error.to_string())?;
    let mut bytes = vec![0; MAX_SHARE_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_POOLS_PER_PACKET))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )
    .map_err(|error| match error {
        rustix::io::Errno::AGAIN => format!("its share socket did not answer within {patience:?}"),
        other => format!("reading its share socket: {other}"),
    })?;
    let fds: Vec<OwnedFd> = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        })
        .flatten()
        .collect();
    if received.bytes == 0 {
        return Err("its share socket was closed without an answer".into());
    }
    if received
        .flags
        .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC)
    {
        return Err(
            "its share socket sent more than a packet holds, or more descriptors than this \
             process may open"
                .into(),
        );
    }
    let reply = ShareReply::decode(&bytes[..received.bytes]).map_err(|error| error.to_string())?;
    Ok((reply, fds))
}

/// The process behind the socket, if its memory can be read.
fn process(
    theirs: Credentials,
    word: u64,
    incarnation: Incarnation,
) -> Result<RemoteProcess, String> {
    let pid = theirs
        .pid
        .ok_or("its process is in a pid namespace that is not visible here")?;
    let process = RemoteProcess {
        pid,
        word,
        incarnation,
    };
    match probe(&process) {
        Ok(()) => Ok(process),
        Err(error @ CopyError::Denied { .. }) => Err(format!(
            "{error}; it takes the same user without changed privileges, or CAP_SYS_PTRACE, and a \
             kernel.yama.ptrace_scope of 0"
        )),
        Err(error) => Err(error.to_string()),
    }
}

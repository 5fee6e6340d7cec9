//! Who is at the other end of a unix socket, as the kernel says.

use std::os::fd::{AsRawFd, BorrowedFd};

/// The process that made the other end, or listened on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Credentials {
    /// As this process numbers it; `None` if its pid namespace is not visible here.
    pub(crate) pid: Option<i32>,
    /// Its effective user, as this user namespace names it.
    pub(crate) uid: u32,
}

/// Asks for the other end's credentials.
///
/// # Errors
/// The operating system's answer.
pub(crate) fn credentials(socket: BorrowedFd<'_>) -> std::io::Result<Credentials> {
    let mut found = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the socket is open; the result fits the place that is named, whose length is said.
    let status = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut length,
        )
    };
    if status != 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(Credentials {
        pid: (found.pid > 0).then_some(found.pid),
        uid: found.uid,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixDatagram;

    #[test]
    fn the_other_end_of_a_pair_is_this_process() {
        let (one, _other) = UnixDatagram::pair().unwrap();
        let found = credentials(one.as_fd()).unwrap();
        assert_eq!(found.pid, i32::try_from(std::process::id()).ok());
        assert_eq!(found.uid, rustix::process::geteuid().as_raw());
    }
}

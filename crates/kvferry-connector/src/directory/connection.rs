//! One client's connection: reading requests, writing replies, never blocking.
//!
//! A state machine over a non-blocking stream. It knows frames, deadlines and progress; what a
//! request is answered with, and which connections live, is the server's business.
//!
//! Invariant: memory is only reserved for lengths that passed the cap.

use std::io::{ErrorKind, Read, Write};
use std::time::{Duration, Instant};

use kvferry_wire::WireError;
use kvferry_wire::directory::{FRAME_HEADER_BYTES, FrameHeader, MAX_DIRECTORY_REQUEST_BYTES};

/// Most bytes written to one client before the others have their turn.
const WRITE_TURN_BYTES: usize = 1 << 20;

/// Why a connection is over, apart from being closed for lack of room.
#[derive(Debug)]
pub(super) enum End {
    /// The client left, or was told to, between two frames.
    Closed,
    /// The client sent what no client of a directory sends.
    Garbage(WireError),
    /// A limit on time has passed while the named thing was awaited.
    TimedOut(&'static str),
    /// The network failed.
    Failed(std::io::Error),
}

/// What came out of giving a connection its turn.
#[derive(Debug)]
pub(super) enum Step {
    /// It waits for its client.
    Wait,
    /// A request's body is complete; [`Connection::reply`] is due.
    Request(Vec<u8>),
    /// It is over.
    End(End),
}

/// What follows a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum After {
    /// The next request.
    Next,
    /// The end of the connection.
    Close,
}

#[derive(Debug)]
enum State {
    /// Collecting a header, `have` bytes of it are there.
    Header {
        bytes: [u8; FRAME_HEADER_BYTES],
        have: usize,
    },
    /// Collecting a body.
    Body { bytes: Vec<u8>, have: usize },
    /// Writing a reply.
    Reply {
        bytes: Vec<u8>,
        sent: usize,
        after: After,
    },
}

impl State {
    const START: Self = Self::Header {
        bytes: [0; FRAME_HEADER_BYTES],
        have: 0,
    };
}

/// One connection over the stream `S`.
#[derive(Debug)]
pub(super) struct Connection<S> {
    stream: S,
    state: State,
    request_timeout: Duration,
    /// End of the connection's life.
    expires: Instant,
    /// Limit on the current request and its reply.
    request_deadline: Instant,
    /// When a byte last moved.
    progress: Instant,
    /// Whether a reply has been sent in full.
    answered: bool,
}

impl<S> Connection<S> {
    pub(super) fn new(
        stream: S,
        now: Instant,
        request_timeout: Duration,
        connection_timeout: Duration,
    ) -> Self {
        Self {
            stream,
            state: State::START,
            request_timeout,
            expires: now + connection_timeout,
            request_deadline: now + request_timeout,
            progress: now,
            answered: false,
        }
    }

    pub(super) const fn stream(&self) -> &S {
        &self.stream
    }

    /// When the connection is over unless something happens.
    pub(super) fn deadline(&self) -> Instant {
        self.request_deadline.min(self.expires)
    }

    /// When a byte last moved, or when the connection began.
    pub(super) const fn last_progress(&self) -> Instant {
        self.progress
    }

    /// Bytes of the reply being written; 0 while the client's request is awaited.
    pub(super) const fn reply_bytes(&self) -> usize {
        match &self.state {
            State::Reply { bytes, .. } => bytes.len(),
            _ => 0,
        }
    }

    /// Whether a reply is being written.
    pub(super) const fn is_replying(&self) -> bool {
        matches!(self.state, State::Reply { .. })
    }

    /// How the connection ends when its deadline has passed. A client that got an answer and asks
    /// nothing more has done nothing wrong.
    pub(super) const fn expire(&self) -> End {
        match &self.state {
            State::Header { have: 0, .. } if self.answered => End::Closed,
            State::Header { .. } | State::Body { .. } => End::TimedOut("a complete request"),
            State::Reply { .. } => End::TimedOut("the client to take its reply"),
        }
    }

    /// Takes the frame to be sent. [`advance`](Self::advance) sends it.
    pub(super) fn reply(&mut self, frame: Vec<u8>, after: After) {
        self.state = State::Reply {
            bytes: frame,
            sent: 0,
            after,
        };
    }
}

impl<S: Read + Write> Connection<S> {
    /// Moves what can be moved without waiting.
    pub(super) fn advance(&mut self, now: Instant) -> Step {
        loop {
            let moved = match &mut self.state {
                State::Header { bytes, have } => fill(&mut self.stream, bytes, have),
                State::Body { bytes, have } => fill(&mut self.stream, bytes, have),
                State::Reply { .. } => return self.write(now),
            };
            match moved {
                Ok(Moved::Some) => self.progress = now,
                Ok(Moved::Blocked) => return Step::Wait,
                Ok(Moved::End) => return Step::End(self.cut_off()),
                Err(error) => return Step::End(End::Failed(error)),
            }
            match self.complete() {
                Ok(None) => {}
                Ok(Some(body)) => return Step::Request(body),
                Err(error) => return Step::End(End::Garbage(error)),
            }
        }
    }

    /// Goes from a complete header to the body, and takes a complete body.
    fn complete(&mut self) -> Result<Option<Vec<u8>>, WireError> {
        match &mut self.state {
            State::Header { bytes, have } if *have == bytes.len() => {
                let length = FrameHeader::parse(bytes, MAX_DIRECTORY_REQUEST_BYTES)?;
                self.state = State::Body {
                    bytes: vec![0; length],
                    have: 0,
                };
                Ok(None)
            }
            State::Body { bytes, have } if *have == bytes.len() => {
                let body = std::mem::take(bytes);
                self.state = State::START;
                Ok(Some(body))
            }
            _ => Ok(None),
        }
    }

    /// What the end of the client's bytes means.
    fn cut_off(&self) -> End {
        let short = |what, need, got| End::Garbage(WireError::TooShort { what, need, got });
        match &self.state {
            State::Header { have: 0, .. } | State::Reply { .. } => End::Closed,
            State::Header { bytes, have } => short("directory frame header", bytes.len(), *have),
            State::Body { bytes, have } => short("directory request", bytes.len(), *have),
        }
    }

    fn write(&mut self, now: Instant) -> Step {
        let State::Reply { bytes, sent, after } = &mut self.state else {
            return Step::Wait;
        };
        let turn = sent.saturating_add(WRITE_TURN_BYTES).min(bytes.len());
        while let Some(rest @ [_, ..]) = bytes.get(*sent..turn) {
            match self.stream.write(rest) {
                Ok(0) => return Step::End(End::Failed(ErrorKind::WriteZero.into())),
                Ok(count) => {
                    *sent += count;
                    self.progress = now;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Step::Wait,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Step::End(End::Failed(error)),
            }
        }
        if *sent < bytes.len() {
            return Step::Wait;
        }
        if *after == After::Close {
            return Step::End(End::Closed);
        }
        self.answered = true;
        self.state = State::START;
        self.request_deadline = now + self.request_timeout;
        Step::Wait
    }
}

enum Moved {
    Some,
    Blocked,
    End,
}

/// Reads what is missing of `bytes`, once.
fn fill(stream: &mut impl Read, bytes: &mut [u8], have: &mut usize) -> std::io::Result<Moved> {
    let Some(rest @ [_, ..]) = bytes.get_mut(*have..) else {
        return Ok(Moved::Some);
    };
    loop {
        match stream.read(rest) {
            Ok(0) => return Ok(Moved::End),
            Ok(count) => {
                *have += count;
                return Ok(Moved::Some);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(Moved::Blocked),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

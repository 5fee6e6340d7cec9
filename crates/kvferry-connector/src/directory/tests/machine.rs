//! The connection's state machine over a scripted stream and a clock of our own.

use std::collections::VecDeque;
use std::io;
use std::time::Instant;

use kvferry_wire::WireError;
use proptest::prelude::*;

use super::super::connection::{After, Connection, End, Step};
use super::*;

const REQUEST: Duration = Duration::from_secs(5);
const LIFE: Duration = Duration::from_secs(12);

/// Gives its chunks one by one and then blocks; takes `room` bytes and then blocks.
#[derive(Debug, Default)]
struct Script {
    chunks: VecDeque<Vec<u8>>,
    written: Vec<u8>,
    room: usize,
}

impl Read for Script {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let Some(chunk) = self.chunks.front_mut() else {
            return Err(ErrorKind::WouldBlock.into());
        };
        let count = chunk.len().min(out.len());
        out[..count].copy_from_slice(&chunk[..count]);
        chunk.drain(..count);
        if chunk.is_empty() {
            self.chunks.pop_front();
        }
        Ok(count)
    }
}

impl Write for Script {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = bytes.len().min(self.room);
        if count == 0 {
            return Err(ErrorKind::WouldBlock.into());
        }
        self.room -= count;
        self.written.extend_from_slice(&bytes[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn connection(script: Script, now: Instant) -> Connection<Script> {
    Connection::new(script, now, REQUEST, LIFE)
}

fn pieces(bytes: &[u8], size: usize) -> Script {
    Script {
        chunks: bytes.chunks(size).map(<[u8]>::to_vec).collect(),
        ..Script::default()
    }
}

#[test]
fn progress_is_noted_and_does_not_move_the_deadline() {
    let start = Instant::now();
    let mut connection = connection(pieces(b"kf", 1), start);
    let later = start + Duration::from_secs(3);
    assert!(matches!(connection.advance(later), Step::Wait));
    assert_eq!(connection.last_progress(), later);
    assert_eq!(connection.deadline(), start + REQUEST);
    assert!(matches!(connection.expire(), End::TimedOut(_)));
    // Nothing came: no progress.
    assert!(matches!(connection.advance(later + REQUEST), Step::Wait));
    assert_eq!(connection.last_progress(), later);
}

#[test]
fn each_reply_starts_a_new_deadline_within_the_connections_life() {
    let start = Instant::now();
    let mut script = pieces(&request(None).repeat(2), usize::MAX);
    script.room = usize::MAX;
    let mut connection = connection(script, start);
    for (seconds, deadline) in [(4, 9), (8, 12)] {
        let now = start + Duration::from_secs(seconds);
        assert!(matches!(connection.advance(now), Step::Request(_)));
        connection.reply(b"a reply".to_vec(), After::Next);
        assert!(connection.is_replying());
        assert!(matches!(connection.advance(now), Step::Wait));
        assert!(!connection.is_replying());
        assert_eq!(connection.deadline(), start + Duration::from_secs(deadline));
    }
    assert!(matches!(connection.expire(), End::Closed));
    assert_eq!(connection.stream().written, b"a replya reply");
}

#[test]
fn a_large_reply_takes_turns_and_a_blocked_one_waits() {
    const BYTES: usize = 5 << 19;
    let start = Instant::now();
    let mut script = pieces(&request(None), usize::MAX);
    script.room = 2 << 20;
    let mut connection = connection(script, start);
    assert!(matches!(connection.advance(start), Step::Request(_)));
    connection.reply(vec![7; BYTES], After::Close);
    assert_eq!(connection.reply_bytes(), BYTES);
    for written in [1 << 20, 2 << 20, 2 << 20] {
        assert!(matches!(connection.advance(start), Step::Wait));
        assert_eq!(connection.stream().written.len(), written);
    }
    assert!(matches!(connection.expire(), End::TimedOut(_)));
}

#[test]
fn the_last_reply_ends_the_connection() {
    let start = Instant::now();
    let mut script = pieces(&request(None), usize::MAX);
    script.room = usize::MAX;
    let mut connection = connection(script, start);
    assert!(matches!(connection.advance(start), Step::Request(_)));
    connection.reply(vec![7; 10], After::Close);
    assert!(matches!(connection.advance(start), Step::End(End::Closed)));
}

#[test]
fn a_header_is_judged_before_a_body_is_awaited() {
    let start = Instant::now();
    let header = [&b"kfd1"[..], &(64_u32 << 10 | 1).to_le_bytes()].concat();
    let end = connection(pieces(&header, 3), start).advance(start);
    let Step::End(End::Garbage(WireError::TooLong {
        got: 65_537,
        max: 65_536,
        ..
    })) = end
    else {
        panic!("{end:?}");
    };
}

proptest! {
    #[test]
    fn a_request_is_the_same_however_it_is_cut(
        ranks in prop::collection::vec((0_u16..9, 0_u16..9), 0..40),
        size in 1_usize..64,
    ) {
        let ranks: Vec<_> = ranks.into_iter().map(|(pp, tp)| rank(pp, tp)).collect();
        let sent = request(Some(&ranks));
        let start = Instant::now();
        let mut connection = connection(pieces(&sent, size), start);
        let Step::Request(body) = connection.advance(start) else {
            return Err(TestCaseError::fail("no request"));
        };
        prop_assert_eq!(DirectoryRequest::decode_body(&body).unwrap().ranks, Some(ranks));
    }

    #[test]
    fn any_bytes_end_in_waiting_a_body_or_garbage(
        bytes in prop::collection::vec(any::<u8>(), 0..64),
        ours in any::<bool>(),
        size in 1_usize..16,
    ) {
        let bytes = if ours { frame(&bytes) } else { bytes };
        let start = Instant::now();
        let mut connection = connection(pieces(&bytes, size), start);
        match connection.advance(start) {
            Step::Wait => prop_assert!(bytes.len() < FRAME_HEADER_BYTES),
            Step::Request(body) => prop_assert_eq!(frame(&body), bytes),
            Step::End(end) => prop_assert!(matches!(end, End::Garbage(_))),
        }
    }
}

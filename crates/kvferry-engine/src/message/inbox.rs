//! The receiving side of one peer's segments.
//!
//! Invariant: every sequence number is used at most once, and messages are delivered whole and in
//! the order in which the peer sent them.

use std::collections::BTreeMap;

use kvferry_wire::{Segment, SegmentBody, TransferId};
use thiserror::Error;

/// How far ahead of the next expected sequence number a segment may be.
const WINDOW: u64 = 4096;
/// Bytes of message pieces that may wait for their turn.
const MAX_HELD_BYTES: usize = 32 << 20;

/// What a segment turned out to be.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Arrival<'a> {
    /// A whole message, in its turn.
    Message(&'a [u8]),
    /// Bytes of a transfer's stream, whenever they come.
    Data {
        transfer: TransferId,
        offset: u64,
        bytes: &'a [u8],
    },
}

/// Why a segment breaks the protocol; the connection is of no more use.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(crate) enum InboxError {
    #[error("segment {got} is more than {WINDOW} ahead of segment {next}, which is missing")]
    TooFar { next: u64, got: u64 },
    #[error("a piece at offset {got} of a message of {total} bytes, expected offset {expected}")]
    Piece {
        expected: usize,
        got: u32,
        total: u32,
    },
    #[error("{bytes} bytes of messages wait for segment {next}, which is missing")]
    TooMuch { next: u64, bytes: usize },
}

struct Held {
    message_bytes: u32,
    offset: u32,
    payload: Box<[u8]>,
}

/// See the module's text.
pub(crate) struct Inbox {
    next: u64,
    /// Which of the `WINDOW` numbers from `next` on have arrived, as a ring of bits.
    ahead: Box<[u64; (WINDOW / 64) as usize]>,
    held: BTreeMap<u64, Held>,
    held_bytes: usize,
    assembling: Vec<u8>,
    assembling_total: u32,
}

impl Inbox {
    pub(crate) fn new() -> Self {
        Self {
            next: 0,
            ahead: Box::new([0; (WINDOW / 64) as usize]),
            held: BTreeMap::new(),
            held_bytes: 0,
            assembling: Vec::new(),
            assembling_total: 0,
        }
    }

    /// Takes a segment; `deliver` gets what is ready, which can be several messages at once.
    /// Returns false for a duplicate.
    pub(crate) fn accept(
        &mut self,
        segment: &Segment<'_>,
        deliver: &mut dyn FnMut(Arrival<'_>),
    ) -> Result<bool, InboxError> {
        let sequence = segment.header.sequence;
        if sequence < self.next || (sequence - self.next < WINDOW && self.bit(sequence)) {
            return Ok(false);
        }
        if sequence - self.next >= WINDOW {
            return Err(InboxError::TooFar {
                next: self.next,
                got: sequence,
            });
        }
        match segment.header.body {
            SegmentBody::Data { transfer, offset } => {
                self.set_bit(sequence);
                deliver(Arrival::Data {
                    transfer,
                    offset,
                    bytes: segment.payload,
                });
            }
            SegmentBody::Message {
                message_bytes,
                offset,
            } => {
                self.set_bit(sequence);
                if sequence == self.next {
                    self.piece(message_bytes, offset, segment.payload, deliver)?;
                } else {
                    self.hold(sequence, message_bytes, offset, segment.payload)?;
                }
            }
        }
        self.advance(deliver)?;
        Ok(true)
    }

    /// The segment that is missing while later ones have arrived, if there is one.
    pub(crate) fn missing(&self) -> Option<u64> {
        let later = self.ahead.iter().any(|&word| word != 0);
        later.then_some(self.next)
    }

    fn hold(
        &mut self,
        sequence: u64,
        message_bytes: u32,
        offset: u32,
        payload: &[u8],
    ) -> Result<(), InboxError> {
        self.held_bytes += payload.len();
        if self.held_bytes > MAX_HELD_BYTES {
            return Err(InboxError::TooMuch {
                next: self.next,
                bytes: self.held_bytes,
            });
        }
        self.held.insert(
            sequence,
            Held {
                message_bytes,
                offset,
                payload: payload.into(),
            },
        );
        Ok(())
    }

    fn advance(&mut self, deliver: &mut dyn FnMut(Arrival<'_>)) -> Result<(), InboxError> {
        while self.bit(self.next) {
            if let Some(held) = self.held.remove(&self.next) {
                self.held_bytes -= held.payload.len();
                self.piece(held.message_bytes, held.offset, &held.payload, deliver)?;
            }
            self.clear_bit(self.next);
            self.next += 1;
        }
        Ok(())
    }

    /// A piece in its turn.
    fn piece(
        &mut self,
        message_bytes: u32,
        offset: u32,
        payload: &[u8],
        deliver: &mut dyn FnMut(Arrival<'_>),
    ) -> Result<(), InboxError> {
        let expected = self.assembling.len();
        let first = expected == 0;
        if offset as usize != expected || (!first && message_bytes != self.assembling_total) {
            return Err(InboxError::Piece {
                expected,
                got: offset,
                total: message_bytes,
            });
        }
        if first && payload.len() == message_bytes as usize {
            deliver(Arrival::Message(payload));
            return Ok(());
        }
        self.assembling_total = message_bytes;
        self.assembling.extend_from_slice(payload);
        if self.assembling.len() == message_bytes as usize {
            let whole = std::mem::take(&mut self.assembling);
            deliver(Arrival::Message(&whole));
        }
        Ok(())
    }

    fn bit(&self, sequence: u64) -> bool {
        let place = sequence % WINDOW;
        self.ahead[(place / 64) as usize] & (1 << (place % 64)) != 0
    }

    fn set_bit(&mut self, sequence: u64) {
        let place = sequence % WINDOW;
        self.ahead[(place / 64) as usize] |= 1 << (place % 64);
    }

    fn clear_bit(&mut self, sequence: u64) {
        let place = sequence % WINDOW;
        self.ahead[(place / 64) as usize] &= !(1 << (place % 64));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{Outbox, Piece};
    use kvferry_wire::{Incarnation, SegmentHeader};
    use proptest::prelude::*;

    fn segment(sequence: u64, body: SegmentBody, payload: &[u8]) -> Segment<'_> {
        let id = Incarnation::from_bytes([1; 16]).unwrap();
        let header = SegmentHeader {
            source: id,
            destination: id,
            connection: 1,
            sequence,
            body,
        };
        Segment { header, payload }
    }

    fn message(total: u32, offset: u32) -> SegmentBody {
        SegmentBody::Message {
            message_bytes: total,
            offset,
        }
    }

    fn take(inbox: &mut Inbox, segment: &Segment<'_>) -> (bool, Vec<Vec<u8>>) {
        let mut out = Vec::new();
        let fresh = inbox.accept(segment, &mut |arrival| match arrival {
            Arrival::Message(bytes) | Arrival::Data { bytes, .. } => out.push(bytes.to_vec()),
        });
        (fresh.unwrap(), out)
    }

    #[test]
    fn messages_wait_for_their_turn_and_data_does_not() {
        let mut inbox = Inbox::new();
        let transfer = TransferId {
            slot: 1,
            generation: 1,
        };
        assert_eq!(
            take(&mut inbox, &segment(2, message(1, 0), b"c")),
            (true, vec![])
        );
        let data = SegmentBody::Data {
            transfer,
            offset: 0,
        };
        assert_eq!(
            take(&mut inbox, &segment(1, data, b"d")),
            (true, vec![b"d".to_vec()])
        );
        assert_eq!(inbox.missing(), Some(0));
        let both = vec![b"a".to_vec(), b"c".to_vec()];
        assert_eq!(
            take(&mut inbox, &segment(0, message(1, 0), b"a")),
            (true, both)
        );
        assert_eq!(inbox.missing(), None);
        assert_eq!(take(&mut inbox, &segment(1, data, b"d")), (false, vec![]));
        assert_eq!(
            take(&mut inbox, &segment(2, message(1, 0), b"c")),
            (false, vec![])
        );
    }

    #[test]
    fn a_gap_beyond_the_window_is_an_error() {
        let mut inbox = Inbox::new();
        let far = segment(WINDOW, message(1, 0), b"x");
        assert_eq!(
            inbox.accept(&far, &mut |_| panic!("nothing to deliver")),
            Err(InboxError::TooFar {
                next: 0,
                got: WINDOW
            })
        );
        assert!(
            inbox
                .accept(&segment(WINDOW - 1, message(1, 0), b"x"), &mut |_| {})
                .unwrap()
        );
    }

    #[test]
    fn pieces_that_do_not_fit_together_are_errors() {
        let mut inbox = Inbox::new();
        take(&mut inbox, &segment(0, message(4, 0), b"ab"));
        let wrong_offset = inbox.accept(&segment(1, message(4, 3), b"d"), &mut |_| {});
        assert_eq!(
            wrong_offset,
            Err(InboxError::Piece {
                expected: 2,
                got: 3,
                total: 4
            })
        );
        let mut inbox = Inbox::new();
        take(&mut inbox, &segment(0, message(4, 0), b"ab"));
        assert!(
            inbox
                .accept(&segment(1, message(5, 2), b"cd"), &mut |_| {})
                .is_err()
        );
    }

    proptest! {
        /// Any order and any duplicates: the same messages in the same order.
        #[test]
        fn order_and_duplicates_do_not_matter(
            messages in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..40), 1..12),
            cut in 1_usize..16,
            order in prop::collection::vec(any::<prop::sample::Index>(), 0..200),
        ) {
            let mut outbox = Outbox::default();
            for bytes in &messages {
                outbox.push(bytes.clone());
            }
            let mut pieces = Vec::new();
            while let Some(Piece { message_bytes, offset, payload }) = outbox.next_piece(cut) {
                pieces.push((message(message_bytes, offset), payload.to_vec()));
            }
            let count = pieces.len();
            let shuffled = order.iter().map(|index| index.index(count)).chain(0..count);
            let mut inbox = Inbox::new();
            let mut got = Vec::new();
            let mut fresh = 0;
            for n in shuffled {
                let (body, payload) = &pieces[n];
                let (new, mut out) = take(&mut inbox, &segment(n as u64, *body, payload));
                fresh += usize::from(new);
                got.append(&mut out);
            }
            prop_assert_eq!(got, messages);
            prop_assert_eq!(fresh, count);
            prop_assert_eq!(inbox.missing(), None);
        }
    }
}

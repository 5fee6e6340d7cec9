//! The sending side: messages that wait, cut into pieces that fit a segment.

use std::collections::VecDeque;

/// A piece of a message, ready to be put behind a segment header.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Piece<'a> {
    pub(crate) message_bytes: u32,
    pub(crate) offset: u32,
    pub(crate) payload: &'a [u8],
}

/// Messages to one peer, in order.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    queue: VecDeque<Vec<u8>>,
    /// Bytes of the front message that have been taken.
    taken: usize,
}

impl Outbox {
    /// Adds an encoded message: 1 byte to [`kvferry_wire::MAX_MESSAGE_BYTES`].
    pub(crate) fn push(&mut self, message: Vec<u8>) {
        debug_assert!((1..=kvferry_wire::MAX_MESSAGE_BYTES).contains(&message.len()));
        self.queue.push_back(message);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Takes the next piece of at most `max` bytes.
    pub(crate) fn next_piece(&mut self, max: usize) -> Option<Piece<'_>> {
        self.settle();
        let front = self.queue.front()?;
        let start = self.taken;
        let end = front.len().min(start + max);
        self.taken = end;
        // Both fit 32 bits: a message is at most 16 MiB.
        Some(Piece {
            message_bytes: front.len() as u32,
            offset: start as u32,
            payload: &front[start..end],
        })
    }

    /// Drops the front message if all of it has been taken.
    pub(crate) fn settle(&mut self) {
        if self
            .queue
            .front()
            .is_some_and(|front| front.len() == self.taken)
        {
            self.queue.pop_front();
            self.taken = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_cut_and_never_joined() {
        let mut outbox = Outbox::default();
        outbox.push(b"abcde".to_vec());
        outbox.push(b"f".to_vec());
        let mut cuts = Vec::new();
        while let Some(piece) = outbox.next_piece(2) {
            cuts.push((piece.message_bytes, piece.offset, piece.payload.to_vec()));
        }
        assert_eq!(
            cuts,
            [
                (5, 0, b"ab".to_vec()),
                (5, 2, b"cd".to_vec()),
                (5, 4, b"e".to_vec()),
                (1, 0, b"f".to_vec())
            ]
        );
        assert!(outbox.is_empty());
    }
}

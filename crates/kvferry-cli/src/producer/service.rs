//! The demo's channel on the producer's progress thread.
//!
//! Responsible for reading questions and sending answers. Requests are computed elsewhere, by the
//! producer's thread; the two talk over channels, and neither waits for the other here.

use std::time::Instant;

use crossbeam::channel::{Receiver, Sender};
use kvferry_engine::{PeerId, Replies, Sender as From, Service};
use kvferry_wire::{DEMO_CHANNEL, DemoReply, DemoRequest};

use super::core::Ask;

/// Most questions that wait for the producer's thread.
const MOST_WAITING: usize = 65_536;

/// An encoded answer and whom it is for.
pub(super) type Outgoing = (PeerId, Vec<u8>);

pub(super) struct DemoService {
    asks: Sender<Ask>,
    answers: Receiver<Outgoing>,
}

impl DemoService {
    pub(super) const fn new(asks: Sender<Ask>, answers: Receiver<Outgoing>) -> Self {
        Self { asks, answers }
    }

    fn refuse(peer: PeerId, reason: String, replies: &mut Replies) {
        tracing::warn!(%peer, reason, "refused a question");
        // A refusal always encodes.
        if let Ok(payload) = (DemoReply::Refused { reason }).encode() {
            replies.send(peer, DEMO_CHANNEL, payload);
        }
    }
}

impl Service for DemoService {
    fn on_message(&mut self, from: From, payload: &[u8], replies: &mut Replies) {
        let request = match DemoRequest::decode(payload) {
            Ok(request) => request,
            Err(error) => return Self::refuse(from.peer, error.to_string(), replies),
        };
        if self.asks.len() >= MOST_WAITING {
            let reason = format!("{MOST_WAITING} questions are waiting already");
            return Self::refuse(from.peer, reason, replies);
        }
        let ask = Ask::Request {
            from: from.peer,
            request,
        };
        if self.asks.send(ask).is_err() {
            Self::refuse(
                from.peer,
                "the producer is shutting down".to_owned(),
                replies,
            );
        }
    }

    fn on_tick(&mut self, _now: Instant, replies: &mut Replies) -> Option<Instant> {
        for (peer, payload) in self.answers.try_iter() {
            replies.send(peer, DEMO_CHANNEL, payload);
        }
        None
    }

    fn on_peer_gone(&mut self, peer: PeerId) {
        // Without a listener there is nothing to forget either.
        let _ = self.asks.send(Ask::Gone(peer));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crossbeam::channel::unbounded;
    use kvferry_wire::Incarnation;

    fn from() -> From {
        From {
            peer: PeerId::for_tests(4),
            incarnation: Incarnation::random().unwrap(),
        }
    }

    #[test]
    fn garbage_is_refused_and_a_question_is_handed_on() {
        let (asks, asked) = unbounded();
        let (answers, answered) = unbounded();
        let mut service = DemoService::new(asks, answered);
        let mut replies = Replies::new();
        service.on_message(from(), b"garbage", &mut replies);
        let refusal = replies.take();
        assert_eq!(refusal.len(), 1);
        let reply = DemoReply::decode(&refusal[0].2).unwrap();
        assert!(matches!(reply, DemoReply::Refused { .. }), "{reply:?}");
        assert!(asked.is_empty());

        let question = DemoRequest::Prefill { request: 3 };
        service.on_message(from(), &question.encode().unwrap(), &mut replies);
        assert!(replies.take().is_empty(), "the answer takes its time");
        match asked.try_recv().unwrap() {
            Ask::Request { from, request } => {
                assert_eq!((from, request), (PeerId::for_tests(4), question));
            }
            other => panic!("{other:?}"),
        }
        answers.send((PeerId::for_tests(4), vec![1, 2])).unwrap();
        assert_eq!(service.on_tick(Instant::now(), &mut replies), None);
        assert_eq!(
            replies.take(),
            [(PeerId::for_tests(4), DEMO_CHANNEL, vec![1, 2])]
        );
    }

    #[test]
    fn a_question_to_a_producer_that_ends_is_refused() {
        let (asks, asked) = unbounded();
        let mut service = DemoService::new(asks, unbounded().1);
        drop(asked);
        let mut replies = Replies::new();
        service.on_message(from(), &DemoRequest::Finish.encode().unwrap(), &mut replies);
        let refusal = replies.take();
        match DemoReply::decode(&refusal[0].2).unwrap() {
            DemoReply::Refused { reason } => assert!(reason.contains("shutting down")),
            other => panic!("{other:?}"),
        }
    }
}

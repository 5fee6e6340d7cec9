//! The producer's answers on the demo's channel, on their way to the run.

use std::time::Instant;

use crossbeam::channel::Sender;
use kvferry_engine::{PeerId, Replies, Sender as From, Service};
use kvferry_wire::DemoReply;

/// Something that the run may be waiting for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Reply(DemoReply),
    /// Something came that is no answer.
    Unreadable(String),
    /// The producer is gone for good.
    Gone,
}

/// Reads the demo's channel on the progress thread. Never waits.
pub(super) struct Answers(pub(super) Sender<Answer>);

impl Answers {
    fn tell(&self, answer: Answer) {
        // A run that has ended asks nothing more.
        let _ = self.0.send(answer);
    }
}

impl Service for Answers {
    fn on_message(&mut self, _from: From, payload: &[u8], _replies: &mut Replies) {
        self.tell(match DemoReply::decode(payload) {
            Ok(reply) => Answer::Reply(reply),
            Err(error) => Answer::Unreadable(error.to_string()),
        });
    }

    fn on_tick(&mut self, _now: Instant, _replies: &mut Replies) -> Option<Instant> {
        None
    }

    fn on_peer_gone(&mut self, _peer: PeerId) {
        self.tell(Answer::Gone);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_wire::Incarnation;

    #[test]
    fn answers_garbage_and_the_end_are_told_in_their_order() {
        let (told, hear) = crossbeam::channel::unbounded();
        let mut answers = Answers(told);
        let from = From {
            peer: PeerId::for_tests(1),
            incarnation: Incarnation::random().unwrap(),
        };
        let mut replies = Replies::new();
        let reply = DemoReply::Failed {
            request: 7,
            reason: "no".to_owned(),
        };
        answers.on_message(from, &reply.encode().unwrap(), &mut replies);
        answers.on_message(from, b"garbage", &mut replies);
        answers.on_peer_gone(PeerId::for_tests(1));
        assert_eq!(hear.try_recv(), Ok(Answer::Reply(reply)));
        assert!(matches!(hear.try_recv(), Ok(Answer::Unreadable(_))));
        assert_eq!(hear.try_recv(), Ok(Answer::Gone));
        assert!(hear.is_empty() && replies.take().is_empty());
    }
}

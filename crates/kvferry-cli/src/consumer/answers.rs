//! The producer's answers, sorted by who asked.
//!
//! Two services on the progress thread read what arrives and put it into the queue of the slot that
//! asked, or of the run as a whole. They never wait.

use std::sync::Arc;
use std::time::Instant;

use crossbeam::channel::{Receiver, Sender, unbounded};
use kvferry_engine::{PeerId, Replies, Sender as From, Service};
use kvferry_wire::{DemoReply, Epoch, LeaseMessage, Verdict};

/// Something that a slot or the run may be waiting for.
#[derive(Clone, Debug)]
pub(super) enum Answer {
    Demo(DemoReply),
    /// The judgement of a release.
    Released {
        epoch: Epoch,
        load: u64,
        verdict: Verdict,
    },
    /// Something came that is no answer.
    Unreadable(String),
    /// The producer is gone for good.
    Gone,
}

/// Knows whose an answer is: slot *n* of *m* uses the tickets and loads that leave the rest *n* when
/// divided by *m*.
pub(super) struct Router {
    to_slots: Vec<Sender<Answer>>,
    slots: Vec<Receiver<Answer>>,
    to_control: Sender<Answer>,
}

impl Router {
    /// A router for so many slots, and the queue of answers to the run as a whole.
    pub(super) fn new(slots: u32) -> (Arc<Self>, Receiver<Answer>) {
        let (to_control, control) = unbounded();
        let (to_slots, slots) = (0..slots).map(|_| unbounded()).unzip();
        let router = Self {
            to_slots,
            slots,
            to_control,
        };
        (Arc::new(router), control)
    }

    /// Each slot's queue.
    pub(super) fn slots(&self) -> &[Receiver<Answer>] {
        &self.slots
    }

    fn to_slot(&self, number: u64, answer: Answer) {
        let slot = (number % self.to_slots.len().max(1) as u64) as usize;
        if let Some(slot) = self.to_slots.get(slot) {
            // The router holds the other end too.
            let _ = slot.send(answer);
        }
    }

    fn to_control(&self, answer: Answer) {
        // A run that has ended asks nothing more.
        let _ = self.to_control.send(answer);
    }

    fn to_all(&self, answer: &Answer) {
        for slot in &self.to_slots {
            let _ = slot.send(answer.clone());
        }
        self.to_control(answer.clone());
    }
}

/// Reads the demo's channel.
pub(super) struct DemoAnswers(Arc<Router>);

impl DemoAnswers {
    pub(super) const fn new(router: Arc<Router>) -> Self {
        Self(router)
    }
}

impl Service for DemoAnswers {
    fn on_message(&mut self, _from: From, payload: &[u8], _replies: &mut Replies) {
        match DemoReply::decode(payload) {
            Ok(reply) => match &reply {
                DemoReply::Offer { ticket, .. } | DemoReply::NoMore { ticket } => {
                    self.0.to_slot(*ticket, Answer::Demo(reply));
                }
                DemoReply::Welcome(_) | DemoReply::Summary(_) => {
                    self.0.to_control(Answer::Demo(reply));
                }
                // It does not say which question.
                DemoReply::Refused { .. } => self.0.to_all(&Answer::Demo(reply)),
            },
            Err(error) => self.0.to_all(&Answer::Unreadable(error.to_string())),
        }
    }

    fn on_tick(&mut self, _now: Instant, _replies: &mut Replies) -> Option<Instant> {
        None
    }

    fn on_peer_gone(&mut self, _peer: PeerId) {
        self.0.to_all(&Answer::Gone);
    }
}

/// Reads the lease channel.
pub(super) struct LeaseAnswers(Arc<Router>);

impl LeaseAnswers {
    pub(super) const fn new(router: Arc<Router>) -> Self {
        Self(router)
    }
}

impl Service for LeaseAnswers {
    fn on_message(&mut self, _from: From, payload: &[u8], _replies: &mut Replies) {
        match LeaseMessage::parse(payload) {
            Ok(LeaseMessage::Released {
                epoch,
                reader,
                verdict,
                ..
            }) => {
                let answer = Answer::Released {
                    epoch,
                    load: reader.load,
                    verdict,
                };
                self.0.to_slot(reader.load, answer);
            }
            Ok(other) => {
                tracing::warn!(?other, "dropped a lease message that answers nothing");
            }
            Err(error) => self.0.to_all(&Answer::Unreadable(error.to_string())),
        }
    }

    fn on_tick(&mut self, _now: Instant, _replies: &mut Replies) -> Option<Instant> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_wire::{Incarnation, Instance, ReaderId, encode_released};

    fn from() -> From {
        From {
            peer: PeerId::for_tests(1),
            incarnation: Incarnation::random().unwrap(),
        }
    }

    #[test]
    fn answers_reach_whoever_asked() {
        let (router, control) = Router::new(3);
        let mut demo = DemoAnswers::new(Arc::clone(&router));
        let mut leases = LeaseAnswers::new(Arc::clone(&router));
        let mut replies = Replies::new();
        let none = DemoReply::NoMore { ticket: 7 }.encode().unwrap();
        demo.on_message(from(), &none, &mut replies);
        let reader = ReaderId {
            incarnation: Incarnation::random().unwrap(),
            load: 5,
        };
        let (instance, epoch) = (Instance::random().unwrap(), Epoch::new(9).unwrap());
        let released = encode_released(instance, epoch, reader, Verdict::Ended);
        leases.on_message(from(), &released, &mut replies);
        let [zero, one, two] = router.slots() else {
            panic!("three slots")
        };
        assert!(zero.is_empty() && control.is_empty());
        let got = one.try_recv().unwrap();
        assert!(
            matches!(got, Answer::Demo(DemoReply::NoMore { ticket: 7 })),
            "{got:?}"
        );
        match two.try_recv().unwrap() {
            Answer::Released {
                epoch,
                load,
                verdict,
            } => {
                assert_eq!((epoch.get(), load, verdict), (9, 5, Verdict::Ended));
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_concerns_everybody_reaches_everybody() {
        let (router, control) = Router::new(2);
        let mut demo = DemoAnswers::new(Arc::clone(&router));
        let mut replies = Replies::new();
        let reason = "no".to_owned();
        let refused = DemoReply::Refused { reason }.encode().unwrap();
        demo.on_message(from(), &refused, &mut replies);
        demo.on_message(from(), b"garbage", &mut replies);
        demo.on_peer_gone(PeerId::for_tests(1));
        for queue in router.slots().iter().chain([&control]) {
            let kinds: Vec<Answer> = queue.try_iter().collect();
            assert!(
                matches!(
                    kinds[..],
                    [Answer::Demo(_), Answer::Unreadable(_), Answer::Gone]
                ),
                "{kinds:?}"
            );
        }
        assert!(replies.take().is_empty());
    }
}

//! Children that send messages: renewals of many leases, and very many small ones.

use std::time::Instant;

use crossbeam::channel::{Sender as Channel, unbounded};
use kvferry_engine::wire::lease::{LEASE_CHANNEL, LeaseMessage, encode_renew};
use kvferry_engine::wire::{Epoch, Instance};
use kvferry_engine::{Engine, Replies, Sender, Service};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::producer::COUNT_CHANNEL;
use super::{Packed, SHUTDOWN, assert_generation, config, connect};
use crate::harness::{PATIENCE, requests, say};

/// Hands every message to the main thread.
struct Forward(Channel<Vec<u8>>);

impl Service for Forward {
    fn on_message(&mut self, _from: Sender, payload: &[u8], _replies: &mut Replies) {
        let _ = self.0.send(payload.to_vec());
    }

    fn on_tick(&mut self, _now: Instant, _replies: &mut Replies) -> Option<Instant> {
        None
    }
}

/// Which leases to renew.
#[derive(Debug, Serialize, Deserialize)]
pub struct Renewal {
    /// At which producer.
    pub from: Packed,
    /// The instance.
    pub instance: [u8; 16],
    /// The epochs, first and last.
    pub epochs: (u64, u64),
}

/// What the producer answered.
#[derive(Debug, PartialEq, Eq, Deserialize)]
pub struct RenewalResult {
    /// Bytes of the message.
    pub bytes: u64,
    /// Leases that are gone: epoch and reason.
    pub gone: Vec<(u64, String)>,
    /// Leases that have not been issued.
    pub unknown: Vec<u64>,
}

pub(super) fn renew(renewal: &Renewal) {
    let (sender, answers) = unbounded();
    let engine = Engine::builder(config("renewer"))
        .service(LEASE_CHANNEL, Box::new(Forward(sender)))
        .start()
        .unwrap();
    assert_generation(&engine);
    let peer = connect(&engine, &renewal.from, "served");
    let instance = Instance::from_bytes(renewal.instance).unwrap();
    let (first, last) = renewal.epochs;
    let epochs: Vec<Epoch> = (first..=last)
        .map(|epoch| Epoch::new(epoch).unwrap())
        .collect();
    let message = encode_renew(instance, 77, &epochs).unwrap();
    let bytes = message.len();
    peer.send(LEASE_CHANNEL, message).unwrap();
    let answer = answers.recv_timeout(PATIENCE).unwrap();
    let LeaseMessage::Renewed {
        instance: of,
        token: 77,
        gone,
        unknown,
    } = LeaseMessage::parse(&answer).unwrap()
    else {
        panic!("not the answer to a renewal");
    };
    assert_eq!(of, instance);
    let gone: Vec<_> = gone
        .iter()
        .map(|(epoch, why)| (epoch.get(), why.to_string()))
        .collect();
    let unknown: Vec<_> = unknown.iter().map(Epoch::get).collect();
    say(&json!({ "bytes": bytes, "gone": gone, "unknown": unknown }));
    for _ in requests() {}
    engine.shutdown(SHUTDOWN).unwrap();
}

/// How a flood ended.
#[derive(Debug, PartialEq, Eq, Deserialize)]
pub struct FloodResult {
    /// The last number that the producer confirmed.
    pub confirmed: u64,
}

/// Sends numbered messages, at most 10,000 ahead of what was confirmed.
pub(super) fn flood((to, count): &(Packed, u64)) {
    let (sender, answers) = unbounded();
    let engine = Engine::builder(config("flood"))
        .service(COUNT_CHANNEL, Box::new(Forward(sender)))
        .start()
        .unwrap();
    assert_generation(&engine);
    let peer = connect(&engine, to, "served");
    let mut confirmed = 0;
    let hear = || {
        let answer = answers.recv_timeout(PATIENCE).unwrap();
        u64::from_le_bytes(answer.as_slice().try_into().unwrap())
    };
    for number in 0..*count {
        while number >= confirmed + 10_000 {
            confirmed = hear();
        }
        peer.send(COUNT_CHANNEL, number.to_le_bytes().to_vec())
            .unwrap();
    }
    while confirmed < *count {
        confirmed = hear();
    }
    say(&json!({ "confirmed": confirmed }));
    for _ in requests() {}
    engine.shutdown(SHUTDOWN).unwrap();
}

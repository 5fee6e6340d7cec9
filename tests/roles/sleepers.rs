//! Engines that sleep: many that are connected and quiet, and two that wake one another for each
//! single message.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender as Channel, unbounded};
use kvferry_engine::{BlockPair, Engine, Replies, Sender, Service};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{Layout, Packed, SHUTDOWN, assert_generation, config, connect};
use crate::harness::{PATIENCE, requests, say};
use crate::pattern::{POISON, wrong_bytes};

/// The channel of the echo.
const ECHO_CHANNEL: u16 = 101;

/// Many engines in one process, all connected to one producer.
#[derive(Debug, Serialize, Deserialize)]
pub struct Many {
    /// The producer.
    pub from: Packed,
    /// Over which lane.
    pub lane: String,
    /// The producer's blocks, and each engine's.
    pub layout: Layout,
    /// How many engines.
    pub engines: u32,
}

/// What they read.
#[derive(Debug, PartialEq, Eq, Deserialize)]
pub struct ReadByAll {
    /// Bytes, of all together.
    pub bytes: u64,
    /// Bytes that are not what they should be.
    pub wrong_bytes: u64,
}

/// Connects, then reads everything once for each request, one engine after the other.
pub(super) fn many(many: &Many) {
    let engines: Vec<_> = (0..many.engines)
        .map(|number| {
            let name = format!("consumer-{number}");
            let engine = Engine::builder(config(&name)).start().unwrap();
            assert_generation(&engine);
            let (memory, region, tables) = many.layout.make(&engine);
            let peer = connect(&engine, &many.from, &many.lane);
            (engine, memory, region, tables, peer)
        })
        .collect();
    say(&json!({ "connected": engines.len() }));
    let pairs: Vec<_> = (0..many.layout.blocks)
        .map(|block| BlockPair::new(block, block))
        .collect();
    for _ in requests() {
        let (mut bytes, mut wrong) = (0, 0);
        for (_, memory, _, tables, peer) in &engines {
            memory.fill(0, memory.bytes(), POISON).unwrap();
            let both: Vec<_> = tables.iter().cloned().zip(peer.tables()).collect();
            let report = peer.read(&both, &pairs).unwrap().wait(PATIENCE);
            bytes += report.unwrap().unwrap().bytes;
            for table in tables {
                wrong += (0..many.layout.blocks)
                    .map(|block| wrong_bytes(table, memory, block, Some(block)))
                    .sum::<u64>();
            }
        }
        say(&json!({ "bytes": bytes, "wrong_bytes": wrong }));
    }
    for (engine, ..) in &engines {
        engine.shutdown(SHUTDOWN).unwrap();
    }
}

/// An engine whose thread sleeps as soon as there is nothing to do. No timer wakes it within the
/// test, so that one wake-up that is lost holds it up for good.
fn sleepy(name: &str, service: impl Service + 'static) -> Engine {
    let mut config = config(name);
    config.spin = Duration::ZERO;
    config.ping_interval = Duration::from_secs(3600);
    config.suspect_after = Duration::from_secs(7200);
    let builder = Engine::builder(config).service(ECHO_CHANNEL, Box::new(service));
    let engine = builder.start().unwrap();
    assert_generation(&engine);
    engine
}

/// What an echo has done.
#[derive(Debug, Deserialize)]
pub struct Echoed {
    /// Messages that came and were sent back.
    pub echoed: u64,
    /// Times its progress thread went to sleep.
    pub sleeps: u64,
}

/// Sends every message back.
struct Echo(Arc<AtomicU64>);

impl Service for Echo {
    fn on_message(&mut self, from: Sender, payload: &[u8], replies: &mut Replies) {
        self.0.fetch_add(1, Ordering::Relaxed);
        replies.send(from.peer, ECHO_CHANNEL, payload.to_vec());
    }

    fn on_tick(&mut self, _now: Instant, _replies: &mut Replies) -> Option<Instant> {
        None
    }
}

pub(super) fn echo() {
    let echoed = Arc::<AtomicU64>::default();
    let engine = sleepy("echo", Echo(Arc::clone(&echoed)));
    say(&json!(Packed::of(&engine)));
    for _ in requests() {
        say(&json!({
            "echoed": echoed.load(Ordering::Relaxed),
            "sleeps": engine.counters().sleeps,
        }));
    }
    engine.shutdown(SHUTDOWN).unwrap();
}

/// How far the round trips have come.
#[derive(Debug, Deserialize)]
pub struct Answered {
    /// Messages whose echo came back, each before the next was sent.
    pub answered: u64,
    /// Times the progress thread went to sleep.
    pub sleeps: u64,
}

struct Hear(Channel<Vec<u8>>);

impl Service for Hear {
    fn on_message(&mut self, _from: Sender, payload: &[u8], _replies: &mut Replies) {
        let _ = self.0.send(payload.to_vec());
    }

    fn on_tick(&mut self, _now: Instant, _replies: &mut Replies) -> Option<Instant> {
        None
    }
}

/// For each request, sends as many messages as were asked for, each when the one before has come
/// back, so that both threads sleep before every message.
pub(super) fn round_trips((to, count): &(Packed, u64)) {
    let (sender, answers) = unbounded();
    let engine = sleepy("round-trips", Hear(sender));
    let peer = connect(&engine, to, "served");
    let mut answered = 0_u64;
    for _ in requests() {
        for _ in 0..*count {
            // Its thread falls asleep now: hit every moment of that.
            for _ in 0..answered * 7 % 1000 {
                std::hint::spin_loop();
            }
            let number = answered.to_le_bytes();
            peer.send(ECHO_CHANNEL, number.to_vec()).unwrap();
            assert_eq!(hear(&answers), number);
            answered += 1;
        }
        say(&json!({ "answered": answered, "sleeps": engine.counters().sleeps }));
    }
    assert!(answers.is_empty(), "an answer that nobody asked for");
    engine.shutdown(SHUTDOWN).unwrap();
}

/// The next answer; at once, if it comes soon.
fn hear(answers: &Receiver<Vec<u8>>) -> Vec<u8> {
    let soon = Instant::now() + Duration::from_micros(200);
    while Instant::now() < soon {
        if let Ok(answer) = answers.try_recv() {
            return answer;
        }
    }
    answers.recv_timeout(PATIENCE).unwrap()
}

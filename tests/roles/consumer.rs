//! A consumer that reads scattered blocks once and verifies them.

use std::time::Duration;

use kvferry_engine::{BlockPair, Engine, plan};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{Layout, Packed, SHUTDOWN, assert_generation, config, connect, warnings};
use crate::harness::{PATIENCE, requests, say};
use crate::pattern::{POISON, wrong_bytes};

/// What to read.
#[derive(Debug, Serialize, Deserialize)]
pub struct Read {
    /// From whom.
    pub from: Packed,
    /// Which lane.
    pub lane: String,
    /// The consumer's blocks; layers and block length are the producer's too.
    pub layout: Layout,
    /// Local and remote ids.
    pub pairs: Vec<(u32, u32)>,
    /// The transfer's deadline in milliseconds; 0 for the default.
    pub timeout_ms: u64,
    /// Wait for a line before the read starts, so that the parent can do something to the producer.
    pub wait: bool,
}

/// How it went.
#[derive(Debug, PartialEq, Eq, Deserialize)]
pub struct ReadResult {
    /// Why it failed; empty for success.
    pub error: String,
    /// Bytes read.
    pub bytes: u64,
    /// Block operations.
    pub operations: u64,
    /// Runs that an independent count finds.
    pub runs: u64,
    /// The lane that was used.
    pub lane: String,
    /// What carries it.
    pub transports: String,
    /// Bytes over the served lane.
    pub served_bytes: u64,
    /// Bytes over the native lane.
    pub native_bytes: u64,
    /// UCX operations that the consumer posted.
    pub ucx_operations: u64,
    /// Messages that the consumer sent.
    pub messages_sent: u64,
    /// Bytes that are not what they should be, of all destinations, read or not.
    pub wrong_bytes: u64,
    /// Bytes in quarantine at the end.
    pub quarantined_bytes: u64,
    /// What its engine warns of.
    pub warnings: Vec<String>,
}

pub(super) fn run(read: &Read) {
    let engine = Engine::builder(config("consumer")).start().unwrap();
    assert_generation(&engine);
    let (memory, _region, tables) = read.layout.make(&engine);
    memory.fill(0, memory.bytes(), POISON).unwrap();
    let peer = connect(&engine, &read.from, &read.lane);
    let pairs: Vec<BlockPair> = read
        .pairs
        .iter()
        .map(|&(l, r)| BlockPair::new(l, r))
        .collect();
    let both: Vec<_> = tables.iter().cloned().zip(peer.tables()).collect();
    if read.wait {
        say(&json!({ "connected": true }));
        requests().next().unwrap();
    }
    let timeout = match read.timeout_ms {
        0 => engine.config().transfer_timeout,
        ms => Duration::from_millis(ms),
    };
    let outcome = peer
        .read_within(&both, &pairs, timeout)
        .map_err(|error| error.to_string())
        .and_then(|transfer| {
            let outcome = transfer.wait(PATIENCE).unwrap();
            assert!(transfer.is_quiesced());
            outcome.map_err(|error| error.to_string())
        });
    let (bytes, operations, error) = match outcome {
        Ok(report) => (report.bytes, report.operations, String::new()),
        Err(error) => (0, 0, error),
    };
    let runs: usize = both
        .iter()
        .map(|(local, remote)| plan(local.description(), remote.description(), &pairs).count())
        .sum();
    let mut sources = vec![None; read.layout.blocks as usize];
    if error.is_empty() {
        for pair in &pairs {
            sources[pair.local as usize] = Some(pair.remote);
        }
    }
    let wrong: u64 = tables
        .iter()
        .flat_map(|table| {
            sources
                .iter()
                .enumerate()
                .map(move |(block, source)| (table, block, source))
        })
        .map(|(table, block, &source)| wrong_bytes(table, &memory, block as u32, source))
        .sum();
    let counters = engine.counters();
    say(&json!({
        "error": error,
        "bytes": bytes,
        "operations": operations,
        "runs": runs,
        "lane": peer.lane().name(),
        "transports": peer.transports(),
        "served_bytes": counters.served_bytes,
        "native_bytes": counters.native_bytes,
        "ucx_operations": counters.ucx_operations,
        "messages_sent": counters.messages_sent,
        "wrong_bytes": wrong,
        "quarantined_bytes": counters.quarantined_bytes,
        "warnings": warnings(&engine),
    }));
    for _ in requests() {}
    engine.shutdown(SHUTDOWN).unwrap();
}

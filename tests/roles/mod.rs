//! What a child process can be.

mod consumer;
mod messenger;
mod pinned;
mod producer;

use std::time::Duration;

use kvferry_engine::wire::{Description, EngineId};
use kvferry_engine::{BlockPair, Engine, EngineConfig, Peer};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::harness::{requests, say};

pub use consumer::{Read, ReadResult};
pub use messenger::{FloodResult, Renewal, RenewalResult};
pub use pinned::{Pinned, PinnedResult};
pub use producer::{Counted, Layout, Started};

/// Time for the end of an engine in a child.
const SHUTDOWN: Duration = Duration::from_secs(10);

/// A description on its way through JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Packed(Vec<u8>);

impl Packed {
    fn of(engine: &Engine) -> Self {
        Self(engine.describe().unwrap().encode().unwrap())
    }

    /// The description.
    ///
    /// # Panics
    /// If it is none.
    #[must_use]
    pub fn unpack(&self) -> Description {
        Description::decode(&self.0).unwrap()
    }
}

/// Runs a role; its arguments are JSON.
///
/// # Panics
/// If anything goes wrong: the parent sees it by the exit status.
pub fn run(role: &str, arguments: &str) {
    let _ = tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_env("KVFERRY_LOG"))
        .with_writer(std::io::stderr)
        .try_init();
    match role {
        "producer" => producer::run(&serde_json::from_str(arguments).unwrap()),
        "read" => consumer::run(&serde_json::from_str(arguments).unwrap()),
        "renew" => messenger::renew(&serde_json::from_str(arguments).unwrap()),
        "flood" => messenger::flood(&serde_json::from_str(arguments).unwrap()),
        "start" => start(),
        "pinned" => pinned::run(&serde_json::from_str(arguments).unwrap()),
        "leave" => leave(),
        other => panic!("no role {other:?}"),
    }
}

/// A child's environment: `max_registration_bytes` of its engine, in bytes.
pub const MAX_REGISTRATION: &str = "KVFERRY_TEST_MAX_REGISTRATION";

/// A child's environment: the length of the huge pages that its pools must have, in bytes.
pub const HUGE_PAGES: &str = "KVFERRY_TEST_HUGE_PAGES";

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap())
}

fn warnings(engine: &Engine) -> Vec<String> {
    let warnings = engine.warnings();
    warnings.iter().map(ToString::to_string).collect()
}

fn config(name: &str) -> EngineConfig {
    let mut config = EngineConfig::new(EngineId::new(name).unwrap());
    config.allow_emulation = true;
    config.max_registration_bytes = number(MAX_REGISTRATION);
    config
}

/// Checks that the UCX that was loaded is of the generation that the run is for.
fn assert_generation(engine: &Engine) {
    let version = engine.ucx_version().unwrap();
    if let Ok(expected) = std::env::var("KVFERRY_EXPECT_UCX") {
        let loaded = format!("{}.{}", version.major, version.minor);
        assert_eq!(
            loaded, expected,
            "another UCX was loaded than this run is for"
        );
    }
}

fn connect(engine: &Engine, to: &Packed, lane: &str) -> Peer {
    engine.connect(to.unpack(), lane.parse().unwrap()).unwrap()
}

/// Starts an engine and says whether that worked.
fn start() {
    match Engine::builder(config("start")).start() {
        Ok(engine) => {
            assert_generation(&engine);
            say(&json!({ "started": true, "error": "", "warnings": warnings(&engine) }));
        }
        Err(error) => say(&json!({ "started": false, "error": error.to_string() })),
    }
    for _ in requests() {}
}

/// Ends the process while two of its engines are in the middle of a read.
fn leave() {
    let layout = Layout {
        layers: 1,
        blocks: 4096,
        block_bytes: 16 << 10,
    };
    let producer = Engine::builder(config("producer")).start().unwrap();
    let consumer = Engine::builder(config("consumer")).start().unwrap();
    assert_generation(&producer);
    let (_, source, _) = layout.make(&producer);
    let (_, target, tables) = layout.make(&consumer);
    let peer = connect(&consumer, &Packed::of(&producer), "served");
    let both: Vec<_> = tables.into_iter().zip(peer.tables()).collect();
    let pairs: Vec<_> = (0..layout.blocks)
        .map(|id| BlockPair::new(id, id))
        .collect();
    let transfer = peer.read(&both, &pairs).unwrap();
    say(&json!({ "started": true }));
    // Dropped and not waited for: the end of the process finds the progress threads at work, at
    // taking their fabrics down if at nothing else.
    drop((producer, consumer, peer, source, target, transfer));
}

//! What a child process can be.

mod churn;
mod consumer;
mod disorder;
mod messenger;
mod producer;
mod resources;
mod sleepers;

use std::time::Duration;

use kvferry_engine::wire::{Description, EngineId};
use kvferry_engine::{BlockPair, Engine, EngineConfig, Peer};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::harness::{requests, say};

pub use churn::{Churn, Stage, Work};
pub use consumer::{Read, ReadResult};
pub use disorder::{Disorder, Disordered};
pub use messenger::{FloodResult, Renewal, RenewalResult};
pub use producer::{Counted, Layout, Started};
pub use resources::Resources;
pub use sleepers::{Answered, Echoed, Many, ReadByAll};

/// Time for the end of an engine in a child.
const SHUTDOWN: Duration = Duration::from_secs(10);

/// A description on its way through JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Packed(Vec<u8>);

impl Packed {
    fn of(engine: &Engine) -> Self {
        Self(engine.describe().unwrap().encode().unwrap())
    }

    fn unpack(&self) -> Description {
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
        "disorder" => disorder::run(&serde_json::from_str(arguments).unwrap()),
        "churn" => churn::run(&serde_json::from_str(arguments).unwrap()),
        "many" => sleepers::many(&serde_json::from_str(arguments).unwrap()),
        "echo" => sleepers::echo(),
        "round_trips" => sleepers::round_trips(&serde_json::from_str(arguments).unwrap()),
        "start" => start(),
        "leave" => leave(),
        other => panic!("no role {other:?}"),
    }
}

fn config(name: &str) -> EngineConfig {
    let mut config = EngineConfig::new(EngineId::new(name).unwrap());
    config.allow_emulation = true;
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
            say(&json!({ "started": true, "error": "" }));
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

//! What a child process can be.

mod churn;
mod consumer;
mod disorder;
mod engine;
mod messenger;
pub mod native;
mod pinned;
mod producer;
mod publisher;
mod reader;
mod resources;
mod side;
mod simulated;
mod sleepers;

use std::time::Duration;

use kvferry_engine::wire::{Description, EngineId};
use kvferry_engine::{BlockPair, Engine, EngineConfig, Peer, ShareSocket};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::harness::{requests, say};

pub use churn::{Churn, Stage, Work};
pub use consumer::{Read, ReadResult};
pub use disorder::{Disorder, Disordered};
pub use engine::{Connected, Ended, EngineChild, EngineSpec, Memory};
pub use messenger::{FloodResult, Renewal, RenewalResult};
pub use pinned::{Pinned, PinnedResult};
pub use producer::{Counted, Endured, Layout, Started};
pub use publisher::{
    GivenUp, NEW_OWNERS, OVERWRITE_CHANNEL, Published, Publisher, PublisherCounters, descriptors,
};
pub use reader::{Done, Order, Reader};
pub use resources::Resources;
pub use side::{Loaded, SideChild, SideSpec, SideStats, Stepped, TERMINATION, Terminated};
pub use simulated::{Processes, SimulatedChild};
pub use sleepers::{Answered, Echoed, Many, ReadByAll};

/// Time for the end of an engine in a child.
const SHUTDOWN: Duration = Duration::from_secs(10);

/// A description on its way through JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Packed(Vec<u8>);

impl Packed {
    /// An engine's description.
    ///
    /// # Panics
    /// If it has stopped.
    #[must_use]
    pub fn of(engine: &Engine) -> Self {
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
    if role == "engine" {
        engine::keep_log();
    }
    let _ = tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_env("KVFERRY_LOG"))
        .with_writer(std::io::stderr)
        .try_init();
    match role {
        "producer" => producer::run(&serde_json::from_str(arguments).unwrap()),
        "publisher" => publisher::run(&serde_json::from_str(arguments).unwrap()),
        "reader" => reader::run(&serde_json::from_str(arguments).unwrap()),
        "read" => consumer::run(&serde_json::from_str(arguments).unwrap()),
        "engine" => engine::run(&serde_json::from_str(arguments).unwrap()),
        "native-reader" => native::run(&serde_json::from_str(arguments).unwrap()),
        "register" => native::register(&serde_json::from_str(arguments).unwrap()),
        "simulated" => simulated::run(&serde_json::from_str(arguments).unwrap()),
        "side" => side::run(&serde_json::from_str(arguments).unwrap()),
        "renew" => messenger::renew(&serde_json::from_str(arguments).unwrap()),
        "flood" => messenger::flood(&serde_json::from_str(arguments).unwrap()),
        "disorder" => disorder::run(&serde_json::from_str(arguments).unwrap()),
        "churn" => churn::run(&serde_json::from_str(arguments).unwrap()),
        "many" => sleepers::many(&serde_json::from_str(arguments).unwrap()),
        "echo" => sleepers::echo(),
        "round_trips" => sleepers::round_trips(&serde_json::from_str(arguments).unwrap()),
        "start" => start(),
        "pinned" => pinned::run(&serde_json::from_str(arguments).unwrap()),
        "leave" => leave(),
        other => panic!("no role {other:?}"),
    }
}

/// How a child's engine is configured, where it is not as usual. Travels in the environment, so that
/// every role has it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EngineSettings {
    /// See `EngineConfig`.
    pub allow_emulation: bool,
    /// See `EngineConfig`.
    pub require_rdma: bool,
    /// See `EngineConfig`.
    pub transports: Option<String>,
    /// See `EngineConfig`.
    pub net_devices: Option<String>,
    /// Shares nothing on this host, as if its peers were on others.
    pub alone: bool,
    /// Time after which a silent peer is suspect, in milliseconds; 0 for the default.
    pub suspect_ms: u64,
    /// Time for a greeting to be answered, in milliseconds; 0 for the default.
    pub connect_ms: u64,
}

impl Default for EngineSettings {
    fn default() -> Self {
        Self {
            allow_emulation: true,
            require_rdma: false,
            transports: None,
            net_devices: None,
            alone: false,
            suspect_ms: 0,
            connect_ms: 0,
        }
    }
}

impl EngineSettings {
    /// The name of the variable that carries them.
    pub const VARIABLE: &'static str = "KVFERRY_TEST_SETTINGS";

    /// The value of [`VARIABLE`](Self::VARIABLE).
    #[must_use]
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap()
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

/// What of a configuration is not as [`config`] makes it. Times in milliseconds.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Settings {
    /// `ping_interval`.
    pub ping: Option<u64>,
    /// `suspect_after`.
    pub suspect: Option<u64>,
    /// `dead_after`.
    pub dead: Option<u64>,
    /// `connect_timeout`.
    pub connect: Option<u64>,
    /// `withdraw_timeout`.
    pub withdraw: Option<u64>,
    /// `escalation_step`.
    pub escalation: Option<u64>,
    /// The longest `reconnect_backoff`; also the shortest, if it is shorter than that.
    pub backoff: Option<u64>,
    /// `read_window`.
    pub read_window: Option<usize>,
    /// Whether to do without emulated reads.
    pub no_emulation: bool,
}

impl Settings {
    /// Changes a configuration.
    pub fn apply(&self, config: &mut EngineConfig) {
        let set = |place: &mut Duration, value: Option<u64>| {
            if let Some(ms) = value {
                *place = Duration::from_millis(ms);
            }
        };
        set(&mut config.ping_interval, self.ping);
        set(&mut config.suspect_after, self.suspect);
        set(&mut config.dead_after, self.dead);
        set(&mut config.connect_timeout, self.connect);
        set(&mut config.escalation_step, self.escalation);
        set(&mut config.withdraw_timeout, self.withdraw);
        set(&mut config.reconnect_backoff_max, self.backoff);
        config.reconnect_backoff_min = config
            .reconnect_backoff_min
            .min(config.reconnect_backoff_max);
        if let Some(window) = self.read_window {
            config.read_window = window;
        }
        config.allow_emulation &= !self.no_emulation;
    }
}

/// A configuration for tests.
///
/// # Panics
/// If the environment has settings that cannot be read.
#[must_use]
pub fn config(name: &str) -> EngineConfig {
    let settings: EngineSettings = match std::env::var(EngineSettings::VARIABLE) {
        Ok(text) => serde_json::from_str(&text).unwrap(),
        Err(_) => EngineSettings::default(),
    };
    let mut config = EngineConfig::new(EngineId::new(name).unwrap());
    config.allow_emulation = settings.allow_emulation;
    config.require_rdma = settings.require_rdma;
    if settings.alone {
        config.share_socket = ShareSocket::Off;
    }
    config.transports = settings.transports;
    config.net_devices = settings.net_devices;
    if settings.suspect_ms > 0 {
        config.suspect_after = Duration::from_millis(settings.suspect_ms);
    }
    if settings.connect_ms > 0 {
        config.connect_timeout = Duration::from_millis(settings.connect_ms);
    }
    config.max_registration_bytes = number(MAX_REGISTRATION);
    config
}

/// Checks that the UCX that was loaded is of the generation that the run is for.
pub fn assert_generation(engine: &Engine) {
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

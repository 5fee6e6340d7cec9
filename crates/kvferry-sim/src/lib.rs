//! A reference scheduler with the connector contract of vLLM V1.
//!
//! It drives the two halves of any connector ([`kvferry_connector::contract`]) as vLLM would,
//! against real memory, and checks after every step what must hold: vLLM's own assertions, the
//! contract, and what became of every block and byte.
//!
//! [`SimEngine`] is one engine; [`Cluster`] is several with a router between them, on a [`Scenario`];
//! [`run`] makes the scenario from a seed. All are deterministic as long as the connectors are.

mod audit;
mod cluster;
mod config;
mod connectors;
mod engine;
mod kv;
mod memory;
mod model;
mod pool;
mod report;
mod request;
mod rng;
mod run;
mod runner;
mod scheduler;
mod shrink;
mod trace;
mod violation;
mod workload;

pub use cluster::{
    Cluster, ClusterEngine, ConnectorFactory, EngineSpec, Engines, FactoryError, Outcome, Patience,
};
pub use config::{EngineConfig, FailurePolicy, Role, SchedulerConfig};
pub use connectors::{Carrier, Connectors, RealFactory};
pub use engine::{Halves, SimEngine};
pub use kv::{Event, KvBlocks};
pub use memory::RankMemory;
pub use model::{GroupKind, MAX_HEAD_BYTES, Model};
pub use pool::{BlockPool, Reuse, Taken};
pub use report::Report;
pub use request::{NewRequest, Output, State, Tables};
pub use rng::Rng;
pub use run::{Faults, Options, run};
pub use scheduler::{Counts, Scheduler, Step, Work};
pub use shrink::fewest_requests;
pub use trace::{Call, Trace};
pub use violation::{Breach, Kind, SimError, Violation};
pub use workload::{Abort, ClientRequest, Prompt, Restart, Route, Scenario};

//! Memory regions, peers, lanes and one-sided block reads over UCX.
//!
//! The low-level crate of kvferry. An [`Engine`] registers memory, describes it to peers as strided
//! tables of blocks, and reads a peer's blocks into its own. One progress thread owns UCX; handles
//! are cheap, `Send` and `Sync`.
//!
//! ```no_run
//! use std::time::Duration;
//! use kvferry_engine::{BlockPair, Engine, EngineConfig, HostPool, LaneChoice, TableSpec};
//! use kvferry_wire::{Description, EngineId};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let engine = Engine::builder(EngineConfig::new(EngineId::new("decode-0")?)).start()?;
//! let pool = HostPool::new(64 << 20)?;
//! let region = engine.register(&pool.region()?)?;
//! let blocks = engine.add_table(&region, TableSpec::dense(32 << 10, 2048))?;
//!
//! # let received: Vec<u8> = Vec::new();
//! let producer = Description::decode(&received)?; // from the producer's directory
//! let peer = engine.connect(producer, LaneChoice::Auto)?;
//! let theirs = peer.tables().next().ok_or("the producer has no tables")?;
//! let transfer = peer.read(&[(blocks, theirs)], &[BlockPair::new(0, 17), BlockPair::new(1, 4)])?;
//! let report = transfer.wait(Duration::from_secs(30)).ok_or("still running")??;
//! assert_eq!(report.bytes, 64 << 10);
//! engine.shutdown(Duration::from_secs(2))?;
//! # Ok(())
//! # }
//! ```

mod checksum;
mod chunks;
mod command;
mod completion;
mod config;
mod counters;
mod engine;
mod error;
mod exit;
pub mod fabric;
mod generations;
mod lane;
mod limit;
mod memory;
mod message;
mod peer;
mod plan;
mod progress;
mod region;
mod same_host;
mod service;
mod shared;
mod sync;
mod table;
mod transfer;
mod ucx;
mod wake;
mod warning;

pub use checksum::Checksums;
pub use config::EngineConfig;
pub use counters::CounterSnapshot;
pub use engine::{Engine, EngineBuilder};
pub use error::{
    ChecksumError, ChunkOfRegion, ConnectError, DeregisterError, EngineError, ErrorClass,
    ReadError, RegisterError, SendError, TableError, TransferError, panic_message,
};
pub use fabric::{
    Fabric, FabricError, Fault, FaultControl, FaultFabric, FaultRates, LoopbackFabric,
    LoopbackNetwork,
};
pub use kvferry_wire as wire;
pub use lane::{Lane, LaneChoice};
pub use limit::{LogLimit, LogLimits};
pub use memory::memlock::PinnedMemory;
pub use memory::{
    HostPool, HostPoolOptions, HugePages, MemoryError, MemoryRegion, available_memory,
};
pub use peer::{MAX_PAYLOAD_BYTES, Peer};
pub use plan::{BlockPair, Plan, Run, check_pairs, plan};
pub use region::Region;
pub use same_host::ShareSocket;
pub use service::{PeerId, Replies, Sender, Service};
pub use table::{RemoteTable, Table, TableSpec};
pub use transfer::{Transfer, TransferReport};
pub use ucx::{UcxFabric, UcxOptions, ucx_copies};
pub use warning::StartWarning;

//! An engine whose fabric claims to pin memory, in a process that may pin little.

use kvferry_engine::{
    Engine, Fault, FaultControl, FaultFabric, FaultRates, HostPool, LoopbackFabric,
    LoopbackNetwork, Region,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{SHUTDOWN, config};
use crate::harness::{requests, say};

/// What to register, and under which limit.
#[derive(Debug, Serialize, Deserialize)]
pub struct Pinned {
    /// The soft limit `RLIMIT_MEMLOCK`, in bytes; `None` leaves the limit alone.
    pub limit: Option<u64>,
    /// Keep `CAP_IPC_LOCK`, if it is there.
    pub privileged: bool,
    /// The fabric says that it pins.
    pub pins: bool,
    /// The fabric refuses every registration.
    pub refuses: bool,
    /// The fabric's limit for one registration.
    pub max_registration: Option<u64>,
    /// Lengths of the regions, one after the other.
    pub regions: Vec<usize>,
}

/// How it went.
#[derive(Debug, Deserialize)]
pub struct PinnedResult {
    /// For each region the error; empty for success.
    pub errors: Vec<String>,
    /// Registrations that the fabric holds at the end.
    pub registrations: usize,
}

pub(super) fn run(pinned: &Pinned) {
    if let Some(limit) = pinned.limit {
        let maximum = getrlimit(Resource::Memlock).maximum;
        let current = Some(limit);
        setrlimit(Resource::Memlock, Rlimit { current, maximum }).unwrap();
    }
    if !pinned.privileged {
        // Of this thread, from which the engine's inherits.
        let mut sets = capabilities(None).unwrap();
        sets.effective.remove(CapabilitySet::IPC_LOCK);
        set_capabilities(None, sets).unwrap();
    }
    let network = LoopbackNetwork::new();
    let (for_fabric, pins, limit) = (network.clone(), pinned.pins, pinned.max_registration);
    let refusals = if pinned.refuses { 1000 } else { 0 };
    let rates = FaultRates::none().with(Fault::RegisterRefused, refusals);
    let control = FaultControl::new(1, rates).unwrap();
    let engine = Engine::builder(config("pinned"))
        .start_on(move || {
            let mut fabric = LoopbackFabric::new(&for_fabric, 4096)?;
            if pins {
                fabric = fabric.claim_pinning();
            }
            if let Some(limit) = limit {
                fabric = fabric.limit_registrations(limit);
            }
            FaultFabric::new(fabric, &control)
        })
        .unwrap();
    let mut kept: Vec<Region> = Vec::new();
    let mut errors = Vec::new();
    for &bytes in &pinned.regions {
        let memory = HostPool::new(bytes).unwrap().region().unwrap();
        match engine.register(&memory) {
            Ok(region) => {
                kept.push(region);
                errors.push(String::new());
            }
            Err(error) => errors.push(error.to_string()),
        }
    }
    say(&json!({ "errors": errors, "registrations": network.registrations() }));
    for _ in requests() {}
    drop(kept);
    engine.shutdown(SHUTDOWN).unwrap();
}

//! The producer: an engine whose requests are asked for over the demo's channel and held for whoever
//! asked.
//!
//! Invariant: a block goes back to the free ones only when the connector reports that its request is
//! sent.

mod core;
mod scheduler;
mod service;

use std::net::SocketAddr;
use std::time::Duration;

use crossbeam::channel::{self, Receiver, RecvTimeoutError, Sender};
use kvferry_engine::fabric::NativeReads;
use kvferry_engine::{Engine, LaneChoice};
use kvferry_sim::Role;
use kvferry_wire::{DemoPlan, EngineId, Rank, UcxVersion};

use self::core::Core;
use self::scheduler::Watched;
use self::service::DemoService;
use crate::error::CliError;
use crate::half::{Half, Setup};

pub(crate) use self::core::CoreEnd;

/// Requests that the pool has blocks for. Further ones wait until a lease ends.
const REQUESTS_AT_ONCE: u32 = 6;

/// Time that the engine or the directory gets to end.
const PATIENCE: Duration = Duration::from_secs(10);

/// Blocks of a producer's pool: those of its requests, the null block, and one for the token that would
/// follow a prompt.
pub(crate) const fn blocks(plan: &DemoPlan) -> u32 {
    // At most 65,536 times 6, and 2.
    plan.blocks.saturating_mul(REQUESTS_AT_ONCE) + 2
}

/// A producer that serves until it is stopped.
pub(crate) struct Producer {
    engine: Engine,
    address: SocketAddr,
    stop: Sender<Duration>,
    end: Receiver<CoreEnd>,
}

impl Producer {
    /// Starts everything and publishes it at `listen`.
    pub(crate) fn start(
        plan: &DemoPlan,
        listen: &str,
        allow_emulation: bool,
    ) -> Result<Self, CliError> {
        let (asks, asked) = channel::unbounded();
        let (answers, answered) = channel::unbounded();
        let half = Half::start(Setup {
            id: EngineId::new(format!("serve-{}", std::process::id()))?,
            role: Role::Prefill,
            lane: LaneChoice::Auto,
            allow_emulation,
            listen: host_and_port(listen)?,
            service: Box::new(DemoService::new(asks, answered)),
        })?;
        let engine = half.engine().clone();
        let scheduler = half.scheduler()?;
        let Some(directory) = scheduler.directory() else {
            return Err(CliError::Producer("has no directory".to_owned()));
        };
        let (ends, ended) = channel::unbounded();
        let sim = half.with_blocks(
            plan,
            blocks(plan),
            Box::new(Watched::new(scheduler, ends)),
            |worker| Box::new(worker),
        )?;
        directory.publish(Rank::default(), engine.describe()?.encode()?)?;

        let (stop, stopped) = channel::bounded(1);
        let core = Core::new(plan.clone(), sim, engine.clone(), asked, answers, ended);
        let (over, end) = channel::bounded(1);
        std::thread::Builder::new()
            .name("kvf-producer".to_owned())
            .spawn(move || {
                // Nobody listens if the producer was dropped; then the process ends anyway.
                let _ = over.send(core.run(&stopped));
            })
            .map_err(CliError::system("starting the producer's thread"))?;
        Ok(Self {
            engine,
            address: directory.local_addr(),
            stop,
            end,
        })
    }

    /// Where consumers find it.
    pub(crate) const fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn ucx_version(&self) -> Option<UcxVersion> {
        self.engine.ucx_version()
    }

    /// Whether its one-sided reads are emulated.
    pub(crate) fn emulates(&self) -> bool {
        self.engine.native_reads() == Some(NativeReads::Emulated)
    }

    /// Reports the end of the producer's thread, should that come before it was told to.
    pub(crate) const fn end(&self) -> &Receiver<CoreEnd> {
        &self.end
    }

    /// Shuts down in order: no new requests; leases that are held may end `within` this time and are
    /// revoked then; memory, engine and directory are given up.
    pub(crate) fn stop(self, within: Duration) -> Result<CoreEnd, CliError> {
        // If the thread has ended already, its end is waiting.
        let _ = self.stop.send(within);
        let patience = within + PATIENCE;
        let end = self.end.recv_timeout(patience);
        end.map_err(|error| match error {
            RecvTimeoutError::Timeout => CliError::Late {
                what: "the producer's thread did not end".to_owned(),
                waited: patience,
            },
            RecvTimeoutError::Disconnected => {
                CliError::Producer("has ended without saying why".to_owned())
            }
        })
    }
}

/// Splits an address to listen at.
fn host_and_port(listen: &str) -> Result<(String, u16), CliError> {
    let parts = listen.rsplit_once(':').and_then(|(host, port)| {
        let host = host.strip_prefix('[').unwrap_or(host);
        let host = host.strip_suffix(']').unwrap_or(host);
        Some((host.to_owned(), port.parse().ok()?))
    });
    parts.ok_or_else(|| {
        CliError::Usage(format!(
            "--listen is {listen}: give HOST:PORT with a port of 0 to 65535"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_a_host_and_a_port() {
        let parts = |listen| host_and_port(listen).map_err(|error| error.to_string());
        assert_eq!(parts("127.0.0.1:80"), Ok(("127.0.0.1".to_owned(), 80)));
        assert_eq!(parts("[::1]:0"), Ok(("::1".to_owned(), 0)));
        for wrong in ["127.0.0.1", "localhost:", "localhost:65536"] {
            let told = parts(wrong).unwrap_err();
            assert!(told.contains(wrong) && told.contains("HOST:PORT"), "{told}");
        }
    }
}

//! Threads that have ended by themselves.
//!
//! Responsible for noticing that the rank's progress thread or loader is gone although nobody has shut it down. Nothing can be
//! saved then: whoever is gone knew which operations still write into blocks, and is the only one who could have
//! reported them.

use kvferry_engine::EngineError;

use super::RemoteWorker;
use crate::contract::WorkerLost;

impl RemoteWorker {
    /// # Errors
    /// Which thread has ended by itself, and why; always the first that was found.
    pub(super) fn check_threads(&mut self) -> Result<(), WorkerLost> {
        if self.is_shut_down {
            return Ok(());
        }
        if self.lost.is_none() {
            self.lost = self.find_ended();
        }
        self.lost.clone().map_or(Ok(()), Err)
    }

    fn find_ended(&mut self) -> Option<WorkerLost> {
        if let Err(error) = self.engine.check() {
            let reason = match error {
                EngineError::Panicked { reason } => format!("it panicked: {reason}"),
                other => other.to_string(),
            };
            return Some(WorkerLost::found(self.rank, "progress thread", reason));
        }
        let ended = self.loader.take_if(|loader| loader.is_finished())?;
        Some(WorkerLost::of(self.rank, "loader", ended))
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use kvferry_engine::{EngineConfig, HostPool, LoopbackFabric, LoopbackNetwork};
    use kvferry_wire::params::Source;
    use kvferry_wire::{EngineId, Epoch, Instance, LeaseId, RequestId};

    use super::super::loader::Event;
    use super::*;
    use crate::contract::{CacheGroup, CacheLayer, CacheLayout, Role, StepPlan, WorkerConnector};
    use crate::multi::MultiWorker;
    use crate::remote::{GroupPairs, Load, Plan, RemoteConfig, RemoteLease};

    fn worker() -> RemoteWorker {
        let network = LoopbackNetwork::new();
        let mut config = RemoteConfig::new(EngineId::new("decode").unwrap(), vec![16]);
        config.role = Role::Consumer;
        // Nothing fails by itself while a test runs.
        config.connect_timeout = Duration::from_secs(600);
        let engine = EngineConfig::new(config.engine.clone());
        let mut worker = RemoteWorker::start_with(config, None, 0, engine, |builder| {
            builder.start_on(move || LoopbackFabric::new(&network, 4096))
        })
        .unwrap();
        let layer = CacheLayer {
            layer: 0,
            group: 0,
            memory: HostPool::new(4096).unwrap().region().unwrap(),
            offset: 0,
            block_bytes: 64,
            block_stride: 64,
            blocks: 16,
        };
        let groups = vec![CacheGroup { block_tokens: 16 }];
        worker
            .register(&CacheLayout {
                groups,
                layers: vec![layer],
            })
            .unwrap();
        worker
    }

    /// A load from somebody who accepts the connection and says nothing.
    fn load(port: u16) -> StepPlan {
        let request = RequestId::new("r").unwrap();
        let lease = RemoteLease {
            request: request.clone(),
            lease: LeaseId {
                instance: Instance::random().unwrap(),
                epoch: Epoch::new(1).unwrap(),
                request: RequestId::new("p").unwrap(),
            },
            source: Source {
                engine: "prefill".to_owned(),
                directory: format!("127.0.0.1:{port}"),
                ranks: 1,
            },
            consumers: 1,
            duration_ms: 600_000,
        };
        let blocks = vec![GroupPairs {
            group: 0,
            remote: vec![1],
            local: vec![2],
        }];
        StepPlan::Remote(Plan {
            hold: vec![lease],
            load: vec![Load { request, blocks }],
            ..Plan::default()
        })
    }

    fn until_lost(worker: &mut dyn WorkerConnector) -> WorkerLost {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            match worker.take_report() {
                Ok(report) => assert!(report.is_empty(), "{report:?}"),
                Err(lost) => return lost,
            }
            assert!(
                Instant::now() < deadline,
                "nobody says that a thread is gone"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn c92_a_loader_that_panicked_ends_the_engine_and_its_loads_are_never_reported() {
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut worker = worker();
        worker.begin_step(load(silent.local_addr().unwrap().port()));
        worker.end_step();
        assert!(worker.take_report().unwrap().is_empty());
        worker.events.send(Event::Panic("a bug")).unwrap();
        let lost = until_lost(&mut worker);
        let expected = WorkerLost {
            rank: 0,
            thread: "loader",
            reason: "it panicked: a bug".to_owned(),
        };
        assert_eq!(lost, expected);
        assert_eq!(
            lost.to_string(),
            "the loader of rank 0 has ended by itself: it panicked: a bug; its loads and held blocks are never reported, \
             so that requests would wait for ever: restart the server"
        );
        // For good, and also as a child of others.
        let mut multi = MultiWorker::new(vec![Box::new(worker)]);
        assert_eq!(multi.take_report(), Err(expected));
        multi.shutdown(Duration::ZERO);
    }

    #[test]
    fn an_engine_that_somebody_else_has_ended_is_lost_too_but_not_after_the_shutdown() {
        let mut worker = worker();
        worker.engine.shutdown(Duration::from_secs(60)).unwrap();
        let lost = worker.take_report().unwrap_err();
        assert_eq!(
            (lost.thread, &*lost.reason),
            ("progress thread", "the engine has been shut down")
        );
        let mut ended = self::worker();
        ended.shutdown(Duration::ZERO);
        assert!(ended.take_report().unwrap().is_empty());
    }
}

//! One engine with both halves of `RemotePrefill`, which does one thing at a time as it is told.

#[path = "../../crates/kvferry-connector/tests/remote_prefill/bench.rs"]
#[allow(dead_code, reason = "each user of the bench needs a part of it")]
mod bench;

use std::time::{Duration, Instant};

use kvferry_connector::contract::{
    Aggregated, Finish, Finished, Params, SchedulerConnector, WorkerConnector,
};
use kvferry_connector::lease::LeaseConfig;
use kvferry_connector::remote::{RemoteConfig, Role};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use self::bench::{Fabric, Request, Side, config};
use super::assert_generation;
use crate::harness::{Child, Environment, PATIENCE, requests, say};

/// The side to start.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SideSpec {
    /// Its engine id.
    pub name: String,
    /// Whether it reads; else it is read.
    pub reads: bool,
    /// The lane.
    pub lane: String,
    /// How long its leases live, in milliseconds.
    pub lease_ms: u64,
}

#[derive(Debug, Serialize, Deserialize)]
enum Order {
    Prefill {
        request: String,
        prompt: u32,
        blocks: Vec<u32>,
        byte: u8,
    },
    Admit {
        request: String,
        prompt: u32,
        params: Params,
        blocks: Vec<u32>,
    },
    Queue {
        request: String,
        prompt: u32,
        params: Params,
    },
    Finish {
        request: String,
        aborted: bool,
    },
    Step,
    Received {
        request: String,
    },
    Write {
        blocks: Vec<u32>,
        byte: u8,
    },
    Wrong {
        blocks: Vec<u32>,
        byte: u8,
    },
    Stats,
    Connected,
}

/// What a step brought.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Stepped {
    /// Loads that are over, with why they failed; empty for success.
    pub received: Vec<(String, String)>,
    /// Requests that are sent.
    pub sent: Vec<String>,
}

/// A load's end.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Loaded {
    /// Why it failed; empty for success.
    pub failure: String,
    /// How long it was waited for, in milliseconds.
    pub after_ms: u64,
    /// The longest time from a last byte to its confirmation so far, in microseconds.
    pub confirm_us_max: u64,
}

/// What a side has counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct SideStats {
    /// Steps it has taken.
    pub steps: u64,
    /// Ends of its leases, on its only rank.
    pub released: u64,
    /// Likewise.
    pub expired: u64,
    /// Likewise.
    pub revoked: u64,
    /// Leases that have not ended.
    pub held: u64,
    /// Loads that run, or wait.
    pub loads: u64,
    /// Bytes in quarantine.
    pub quarantined: u64,
}

/// A side in a child process, seen from the test.
pub struct SideChild {
    /// The process.
    pub child: Child,
}

impl SideChild {
    /// Starts one.
    #[must_use]
    pub fn start(spec: &SideSpec, environment: Environment<'_>) -> Self {
        let child = Child::start("side", spec, environment);
        let ready: Value = child.hear();
        assert_eq!(ready, json!({ "ready": true }));
        Self { child }
    }

    fn order<T: serde::de::DeserializeOwned>(&mut self, order: &Order) -> T {
        self.child.ask(&serde_json::to_string(order).unwrap())
    }

    /// Computes a request into blocks and holds them: the parameters. Takes the steps that needs.
    pub fn prefill(&mut self, request: &str, prompt: u32, blocks: &[u32], byte: u8) -> Params {
        self.order(&Order::Prefill {
            request: request.into(),
            prompt,
            blocks: blocks.into(),
            byte,
        })
    }

    /// Takes a request in and gives it blocks: the tokens that are loaded. Takes a step.
    pub fn admit(&mut self, request: &str, prompt: u32, params: &Params, blocks: &[u32]) -> u32 {
        self.order(&Order::Admit {
            request: request.into(),
            prompt,
            params: params.clone(),
            blocks: blocks.into(),
        })
    }

    /// Takes a request in and leaves it waiting. Takes a step.
    pub fn queue(&mut self, request: &str, prompt: u32, params: &Params) {
        let (): () = self.order(&Order::Queue {
            request: request.into(),
            prompt,
            params: params.clone(),
        });
    }

    /// Ends a request. Takes a step.
    pub fn finish(&mut self, request: &str, aborted: bool) {
        let (): () = self.order(&Order::Finish {
            request: request.into(),
            aborted,
        });
    }

    /// Takes a step.
    pub fn step(&mut self) -> Stepped {
        self.order(&Order::Step)
    }

    /// Steps until a load is reported.
    pub fn received(&mut self, request: &str) -> Loaded {
        self.order(&Order::Received {
            request: request.into(),
        })
    }

    /// Writes blocks: the byte, one more per block.
    pub fn write(&mut self, blocks: &[u32], byte: u8) {
        let (): () = self.order(&Order::Write {
            blocks: blocks.into(),
            byte,
        });
    }

    /// Bytes of blocks that are not as written.
    pub fn wrong(&mut self, blocks: &[u32], byte: u8) -> usize {
        self.order(&Order::Wrong {
            blocks: blocks.into(),
            byte,
        })
    }

    /// What it has counted. Takes no step.
    pub fn stats(&mut self) -> SideStats {
        self.order(&Order::Stats)
    }

    /// Peers that are connected. Takes no step.
    pub fn connected(&mut self) -> u64 {
        self.order(&Order::Connected)
    }
}

struct Host {
    side: Side,
    known: Vec<Request>,
    blocks: Vec<(String, Vec<u32>)>,
    steps: u64,
}

pub(super) fn run(spec: &SideSpec) {
    let role = if spec.reads {
        Role::Consumer
    } else {
        Role::Producer
    };
    let settings = RemoteConfig {
        lane: spec.lane.parse().unwrap(),
        lease: LeaseConfig {
            duration: Duration::from_millis(spec.lease_ms),
            ..LeaseConfig::default()
        },
        ..config(&spec.name, role)
    };
    let side = Side::new(&settings, &Fabric::Ucx);
    assert_generation(side.workers[0].engine());
    let mut host = Host {
        side,
        known: Vec::new(),
        blocks: Vec::new(),
        steps: 0,
    };
    say(&json!({ "ready": true }));
    for order in requests() {
        let answer = host.obey(serde_json::from_str(&order).unwrap());
        say(&answer);
    }
    for worker in &mut host.side.workers {
        worker.shutdown(Duration::from_millis(100));
    }
}

fn stepped(report: &Aggregated) -> Value {
    let received: Vec<(String, String)> = report
        .received
        .iter()
        .map(|it| (it.request.to_string(), failure(it.failure)))
        .collect();
    let sent: Vec<String> = report.sent.iter().map(ToString::to_string).collect();
    json!({ "received": received, "sent": sent })
}

fn failure(failure: Option<kvferry_connector::contract::LoadFailure>) -> String {
    failure.map_or(String::new(), |failure| failure.to_string())
}

impl Host {
    fn step(&mut self, scheduled: &[&Request]) -> Aggregated {
        self.steps += 1;
        self.side.step(scheduled)
    }

    fn obey(&mut self, order: Order) -> Value {
        match order {
            Order::Prefill {
                request,
                prompt,
                blocks,
                byte,
            } => {
                let request = Request::export(&request, prompt);
                let params = self.side.prefill(&request, &blocks, byte);
                self.step(&[]);
                json!(params)
            }
            Order::Admit {
                request,
                prompt,
                params,
                blocks,
            } => {
                let id = request.clone();
                let request = Request::new(&request, prompt, Some(params));
                let tokens = self.side.admit(&request, &blocks, 0);
                self.known.push(request);
                self.blocks.push((id, blocks));
                self.step(&[]);
                json!(tokens)
            }
            Order::Queue {
                request,
                prompt,
                params,
            } => {
                let request = Request::new(&request, prompt, Some(params));
                self.side.scheduler.on_new_request(&request.view());
                self.known.push(request);
                self.step(&[]);
                json!(null)
            }
            Order::Finish { request, aborted } => {
                let how = if aborted {
                    Finish::Aborted
                } else {
                    Finish::Stopped
                };
                let known = self.request(&request);
                let blocks = self.blocks.iter().find(|(id, _)| *id == request);
                let blocks = blocks.map(|(_, blocks)| blocks.clone()).unwrap_or_default();
                assert_eq!(self.side.finish(&known, &blocks, how), Finished::Free);
                self.step(&[]);
                json!(null)
            }
            Order::Step => stepped(&self.step(&[])),
            Order::Received { request } => {
                let known = self.request(&request);
                let started = Instant::now();
                let received = self.side.received(&known);
                let stats = self.side.workers[0].loader_stats();
                json!({
                    "failure": failure(received.failure),
                    "after_ms": started.elapsed().as_millis() as u64,
                    "confirm_us_max": stats.confirmation.max_us,
                })
            }
            Order::Write { blocks, byte } => {
                self.side.write(&blocks, byte);
                json!(null)
            }
            Order::Wrong { blocks, byte } => json!(self.side.wrong(&blocks, byte)),
            Order::Stats => {
                let worker = &self.side.workers[0];
                let leases = worker.lease_snapshot(PATIENCE).unwrap();
                let stats = self.side.scheduler.stats();
                json!({
                    "steps": self.steps,
                    "released": leases.counters.released,
                    "expired": leases.counters.expired,
                    "revoked": leases.counters.revoked,
                    "held": leases.gauges.reserved + leases.gauges.activated,
                    "loads": stats.loads_running + stats.loads_waiting,
                    "quarantined": worker.engine().counters().quarantined_bytes,
                })
            }
            Order::Connected => {
                json!(self.side.workers[0].engine().counters().peers_connected)
            }
        }
    }

    fn request(&self, name: &str) -> Request {
        let known = self.known.iter().find(|it| it.id.as_str() == name);
        known.unwrap().clone()
    }
}

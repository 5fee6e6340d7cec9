//! One engine with both halves of `RemotePrefill`, which does one thing at a time as it is told.

#[path = "../../crates/kvferry-connector/tests/remote_prefill/bench.rs"]
#[allow(dead_code, reason = "each user of the bench needs a part of it")]
mod bench;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, unbounded};
use kvferry_connector::contract::{
    Finish, Finished, LoadFailure, Params, Received, SchedulerConnector, WorkerConnector,
};
use kvferry_connector::directory::{DirectoryConfig, DirectoryServer};
use kvferry_connector::lease::LeaseConfig;
use kvferry_connector::remote::{RemoteConfig, Role};
use kvferry_wire::RequestId;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use signal_hook::consts::SIGTERM;
use signal_hook::iterator::Signals;

use self::bench::{Fabric, Request, Setup, Side, config};
use super::assert_generation;
use crate::counting::{allocations, live_bytes};
use crate::harness::{Child, Environment, PATIENCE, requests, say, until};

/// How long a side that is told to end waits for its leases.
pub const TERMINATION: Duration = Duration::from_secs(3);

/// Time for a load to begin to be copied, if it is copied.
const SOON: Duration = Duration::from_millis(50);

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
    /// Bytes of a block in one of two layers.
    pub block_bytes: u64,
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
    AdmitAndAbort {
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
    Figures,
    Directory {
        open: bool,
    },
}

/// What a step brought.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Stepped {
    /// Loads that were over by then, also in steps of other orders, with why they failed; empty for success.
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

/// The end of a side that was terminated.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Terminated {
    /// Requests that were sent by then.
    pub sent: Vec<String>,
    /// Ends of its leases.
    pub released: u64,
    /// Likewise.
    pub revoked: u64,
    /// How long it took, in milliseconds.
    pub took_ms: u64,
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
    /// Renewals of them.
    pub renewed: u64,
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

    /// Takes a request in, gives it blocks, and ends it as soon as some of them are handed to be copied, or at
    /// once where nothing is copied. Takes two steps.
    pub fn admit_and_abort(&mut self, request: &str, prompt: u32, params: &Params, blocks: &[u32]) {
        let (): () = self.order(&Order::AdmitAndAbort {
            request: request.into(),
            prompt,
            params: params.clone(),
            blocks: blocks.into(),
        });
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

    /// Steps until an aborted load is reported: why it failed, once per report.
    pub fn reports_of(&mut self, request: &str) -> Vec<String> {
        let mut reports = Vec::new();
        until("the report of an aborted load", || {
            let received = self.step().received.into_iter();
            let of_it = received.filter(|(id, _)| id == request);
            reports.extend(of_it.map(|(_, failure)| failure));
            !reports.is_empty()
        });
        reports
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

    /// Peers that were connected. Takes no step.
    pub fn connected(&mut self) -> u64 {
        self.order(&Order::Connected)
    }

    /// What it has cost so far and what it holds, by name. Takes no step.
    pub fn figures(&mut self) -> BTreeMap<String, u64> {
        self.order(&Order::Figures)
    }

    /// Tells it to end, as a service manager does.
    pub fn terminate(&self) {
        self.child.signal(rustix::process::Signal::TERM);
    }

    /// What it says at its end.
    #[must_use]
    pub fn terminated(&self) -> Terminated {
        self.child.hear()
    }

    /// Opens a second directory of this engine, or closes it: its port, which stays the same.
    pub fn directory(&mut self, open: bool) -> u16 {
        self.order(&Order::Directory { open })
    }
}

struct Host {
    side: Side,
    known: Vec<Request>,
    blocks: Vec<(String, Vec<u32>)>,
    /// Loads that are over and that the test was not told of.
    over: Vec<Received>,
    directory: Option<DirectoryServer>,
    directory_port: u16,
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
    let setup = Setup {
        fabric: &|_| Fabric::Ucx,
        block_bytes: spec.block_bytes,
        tune: |_| {},
    };
    let side = Side::with(&settings, &setup);
    assert_generation(side.workers[0].engine());
    let mut host = Host {
        side,
        known: Vec::new(),
        blocks: Vec::new(),
        over: Vec::new(),
        directory: None,
        directory_port: 0,
    };
    let inputs = inputs();
    say(&json!({ "ready": true }));
    for input in &inputs {
        match input {
            Input::Order(order) => say(&host.obey(serde_json::from_str(&order).unwrap())),
            Input::Terminate => {
                say(&host.terminate());
                return;
            }
            Input::End => break,
        }
    }
    host.side.workers[0].shutdown(Duration::from_millis(100));
}

enum Input {
    Order(String),
    Terminate,
    End,
}

/// Orders and SIGTERM, whichever comes.
fn inputs() -> Receiver<Input> {
    let (sender, inputs) = unbounded();
    let mut signals = Signals::new([SIGTERM]).unwrap();
    let terminate = sender.clone();
    std::thread::spawn(move || {
        if signals.forever().next().is_some() {
            let _ = terminate.send(Input::Terminate);
        }
    });
    std::thread::spawn(move || {
        for order in requests() {
            let _ = sender.send(Input::Order(order));
        }
        let _ = sender.send(Input::End);
    });
    inputs
}

fn failure(failure: Option<LoadFailure>) -> String {
    failure.map_or(String::new(), |failure| failure.to_string())
}

impl Host {
    /// A step; its sent requests. A load may be over in any.
    fn step(&mut self) -> Vec<RequestId> {
        let report = self.side.step(&[]);
        self.over.extend(report.received);
        report.sent
    }

    /// Steps until a load is over.
    fn received(&mut self, request: &str) -> Received {
        let of_it = |it: &Received| it.request.as_str() == request;
        until("a load's report", || {
            let is_over = self.over.iter().any(of_it);
            if !is_over {
                self.step();
            }
            is_over
        });
        let place = self.over.iter().position(of_it).unwrap();
        self.over.remove(place)
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
                self.step();
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
                self.step();
                json!(tokens)
            }
            Order::AdmitAndAbort {
                request,
                prompt,
                params,
                blocks,
            } => {
                let request = Request::new(&request, prompt, Some(params));
                let batches = |host: &Self| {
                    let engine = host.side.workers[0].engine();
                    engine.counters().copy_batches
                };
                let before = batches(self);
                assert!(self.side.admit(&request, &blocks, 0) > 0);
                self.step();
                let until = Instant::now() + SOON;
                while batches(self) == before && Instant::now() < until {
                    std::hint::spin_loop();
                }
                let finished = self.side.finish(&request, &blocks, Finish::Aborted);
                assert_eq!(finished, Finished::Free);
                self.step();
                json!(null)
            }
            Order::Queue {
                request,
                prompt,
                params,
            } => {
                let request = Request::new(&request, prompt, Some(params));
                self.side.scheduler.on_new_request(&request.view());
                self.known.push(request);
                self.step();
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
                self.known.retain(|known| known.id.as_str() != request);
                self.blocks.retain(|(id, _)| *id != request);
                self.step();
                json!(null)
            }
            Order::Step => {
                let sent = self.step();
                let sent: Vec<String> = sent.iter().map(ToString::to_string).collect();
                let over = self.over.drain(..);
                let received: Vec<(String, String)> = over
                    .map(|it| (it.request.to_string(), failure(it.failure)))
                    .collect();
                json!({ "received": received, "sent": sent })
            }
            Order::Received { request } => {
                let started = Instant::now();
                let received = self.received(&request);
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
                    "steps": self.side.steps,
                    "released": leases.counters.released,
                    "expired": leases.counters.expired,
                    "revoked": leases.counters.revoked,
                    "renewed": leases.counters.renewed,
                    "held": leases.gauges.reserved + leases.gauges.activated,
                    "loads": stats.loads_running + stats.loads_waiting,
                    "quarantined": worker.engine().counters().quarantined_bytes,
                })
            }
            Order::Connected => {
                json!(self.side.workers[0].engine().counters().peers_connected)
            }
            Order::Figures => self.figures(),
            Order::Directory { open } => {
                self.directory = open.then(|| self.open_directory());
                json!(self.directory_port)
            }
        }
    }

    /// No new leases; those that are held may be released for a while, and are then taken back.
    fn terminate(&mut self) -> Value {
        let started = Instant::now();
        self.side.scheduler.begin_shutdown();
        self.side.workers[0].shutdown(TERMINATION);
        let took_ms = started.elapsed().as_millis() as u64;
        let sent: Vec<String> = self.step().iter().map(ToString::to_string).collect();
        let stats = self.side.scheduler.stats();
        json!({
            "sent": sent,
            "released": stats.parts_released,
            "revoked": stats.parts_revoked,
            "took_ms": took_ms,
        })
    }

    fn figures(&self) -> Value {
        let worker = &self.side.workers[0];
        let engine = worker.engine().counters();
        let leases = worker.lease_snapshot(PATIENCE).unwrap();
        let stats = self.side.scheduler.stats();
        let entries = |path| std::fs::read_dir(path).unwrap().count();
        json!({
            "allocations": allocations(),
            "live_bytes": live_bytes(),
            "messages": engine.messages_sent,
            "ucx_operations": engine.ucx_operations,
            "block_operations": engine.block_operations,
            "batches": engine.copy_batches,
            "bytes": worker.loader_stats().bytes,
            "loaded": worker.loader_stats().loaded,
            "failed": worker.loader_stats().failed,
            "lost": stats.lost,
            "tombstones": leases.gauges.tombstones,
            "leases": leases.gauges.reserved + leases.gauges.activated + leases.gauges.early,
            "requests": stats.loads_waiting + stats.loads_running + stats.leases_held,
            "connections": engine.connections_held,
            "threads": entries("/proc/self/task"),
            "descriptors": entries("/proc/self/fd"),
        })
    }

    fn open_directory(&mut self) -> DirectoryServer {
        let scheduler = &self.side.scheduler;
        let worker = &self.side.workers[0];
        let directory = DirectoryConfig::new(scheduler.engine().clone());
        let address = format!("127.0.0.1:{}", self.directory_port);
        let server = DirectoryServer::bind(address, directory).unwrap();
        let description = worker.describe().unwrap();
        server.publish(worker.rank(), description).unwrap();
        self.directory_port = server.local_addr().port();
        server
    }

    fn request(&self, name: &str) -> Request {
        let known = self.known.iter().find(|it| it.id.as_str() == name);
        known.unwrap().clone()
    }
}

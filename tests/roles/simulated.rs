//! Engines of the simulator in processes of their own, with the real `RemotePrefill` over UCX: what a
//! [`Cluster`](kvferry_sim::Cluster) drives instead of engines in its own process.

use kvferry_sim::{
    Carrier, ClusterEngine, ConnectorFactory, Connectors, Counts, EngineConfig, EngineSpec,
    Engines, Faults, Model, NewRequest, Output, RealFactory, SimEngine, SimError,
};
use kvferry_wire::RequestId;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::harness::{Child, requests, say};

/// The engine to start.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Simulated {
    config: EngineConfig,
    model: Model,
    life: u32,
}

#[derive(Debug, Serialize, Deserialize)]
enum Order {
    Add(NewRequest),
    Reject(NewRequest),
    Abort(RequestId),
    Step,
    End,
}

/// What came of an order: the rule that was broken, or nothing.
type Done = Result<(), String>;

/// What came of a step.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Stepped {
    progress: Result<bool, String>,
    outputs: Vec<Output>,
    parked: Vec<RequestId>,
    idle: bool,
    stuck: String,
    counts: Counts,
}

/// An engine in a child process.
pub struct SimulatedChild {
    name: String,
    child: Child,
    last: Stepped,
}

impl SimulatedChild {
    fn order<T: DeserializeOwned>(&mut self, order: &Order) -> T {
        self.child.ask(&serde_json::to_string(order).unwrap())
    }

    fn broken(&self, reason: String) -> SimError {
        SimError::Factory {
            engine: self.name.clone(),
            source: reason.into(),
        }
    }

    fn done(&mut self, order: &Order) -> Result<(), SimError> {
        self.last.idle = false;
        let done: Done = self.order(order);
        done.map_err(|reason| self.broken(reason))
    }
}

impl ClusterEngine for SimulatedChild {
    fn add(&mut self, request: NewRequest) -> Result<(), SimError> {
        self.done(&Order::Add(request))
    }

    fn reject(&mut self, request: NewRequest) -> Result<(), SimError> {
        self.done(&Order::Reject(request))
    }

    fn abort(&mut self, id: &RequestId) -> Result<(), SimError> {
        self.done(&Order::Abort(id.clone()))
    }

    fn step(&mut self) -> Result<bool, SimError> {
        let mut stepped: Stepped = self.order(&Order::Step);
        // Those of the step before that nobody has taken yet come first.
        stepped.outputs.splice(..0, self.last.outputs.drain(..));
        self.last = stepped;
        let progress = self.last.progress.clone();
        progress.map_err(|reason| self.broken(reason))
    }

    fn take_outputs(&mut self) -> Vec<Output> {
        std::mem::take(&mut self.last.outputs)
    }

    fn is_parked(&self, id: &RequestId) -> bool {
        self.last.parked.contains(id)
    }

    fn is_idle(&self) -> bool {
        self.last.idle
    }

    fn counts(&self) -> Counts {
        self.last.counts
    }

    fn stuck(&self) -> SimError {
        self.broken(self.last.stuck.clone())
    }

    fn check_end(&mut self) -> Result<(), SimError> {
        self.done(&Order::End)?;
        self.child.finish_well();
        Ok(())
    }
}

/// Starts each engine as a process of its own, and ends it by killing that.
#[derive(Debug, Default)]
pub struct Processes;

impl Engines for Processes {
    type Engine = SimulatedChild;

    fn start(&mut self, spec: &EngineSpec<'_>) -> Result<SimulatedChild, SimError> {
        let engine = Simulated {
            config: spec.config.clone(),
            model: spec.model.clone(),
            life: spec.life,
        };
        let child = Child::start("simulated", &engine, &[("UCX_NET_DEVICES", Some("lo"))]);
        let child = SimulatedChild {
            name: spec.config.name.clone(),
            last: Stepped {
                progress: Ok(false),
                outputs: Vec::new(),
                parked: Vec::new(),
                idle: true,
                stuck: String::new(),
                counts: Counts::default(),
            },
            child,
        };
        let ready: Done = child.child.hear();
        ready.map_err(|reason| child.broken(reason))?;
        Ok(child)
    }

    fn stop(&mut self, _spec: &EngineSpec<'_>, mut engine: SimulatedChild) {
        engine.child.kill();
    }

    fn turn(&mut self, _tick: u64) {}

    fn after_turn(&mut self, progress: bool) {
        if !progress {
            // Loads and leases end on threads of other processes.
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}

pub(super) fn run(simulated: &Simulated) {
    let mut factory = RealFactory::new(
        Connectors::Remote,
        Carrier::Ucx,
        Faults::None,
        simulated.config.seed,
    );
    let spec = EngineSpec {
        config: &simulated.config,
        model: &simulated.model,
        life: simulated.life,
    };
    let halves = factory.build(&spec).unwrap();
    let mut engine = SimEngine::new(simulated.config.clone(), &simulated.model, halves).unwrap();
    factory.registered(&spec).unwrap();
    say(&json!(Done::Ok(())));
    for order in requests() {
        let done = match serde_json::from_str(&order).unwrap() {
            Order::Add(request) => engine.add(request),
            Order::Reject(request) => engine.reject(request),
            Order::Abort(id) => engine.abort(&id),
            Order::End => engine.check_end(),
            Order::Step => {
                say(&json!(step(&mut engine)));
                continue;
            }
        };
        say(&json!(done.map_err(|breach| breach.to_string())));
    }
}

fn step(engine: &mut SimEngine) -> Stepped {
    let progress = engine.step().map_err(|breach| breach.to_string());
    Stepped {
        progress,
        outputs: engine.take_outputs(),
        parked: engine.scheduler().parked().cloned().collect(),
        idle: engine.is_idle(),
        stuck: engine.stuck().to_string(),
        counts: engine.scheduler().counts(),
    }
}

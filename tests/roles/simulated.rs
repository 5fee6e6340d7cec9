//! One engine of the simulator, with the real `RemotePrefill` over UCX, which takes the steps it is told to.

use kvferry_connector::contract::{Finish, Params};
use kvferry_sim::{
    Carrier, ConnectorFactory, Connectors, EngineConfig, EngineSpec, Faults, Model, NewRequest,
    RealFactory, SimEngine,
};
use kvferry_wire::RequestId;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::harness::{Child, Environment, requests, say};

/// The engine to start.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Simulated {
    /// The engine.
    pub config: EngineConfig,
    /// What it computes.
    pub model: Model,
}

/// A leg of a request.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Leg {
    /// Its id.
    pub id: String,
    /// Its prompt.
    pub prompt: Vec<u32>,
    /// How many tokens it may generate.
    pub max_tokens: u32,
    /// Its transfer parameters.
    pub params: Option<Params>,
    /// What else its content depends on.
    pub extra_key: String,
    /// Whether it is refused before it is admitted.
    pub rejected: bool,
}

#[derive(Debug, Serialize, Deserialize)]
enum Order {
    Add(Leg),
    Abort(String),
    Step(u32),
    End,
}

/// What came of some steps.
#[derive(Clone, Debug, Deserialize)]
pub struct Ticked {
    /// The rule that was broken; empty for none.
    pub breach: String,
    /// Legs that ended.
    pub ended: Vec<LegEnd>,
    /// Whether nothing is left to be done.
    pub idle: bool,
    /// Tokens loaded from others so far.
    pub loaded: u64,
}

/// The end of a leg.
#[derive(Clone, Debug, Deserialize)]
pub struct LegEnd {
    /// Its id.
    pub id: String,
    /// What it generated.
    pub generated: Vec<u32>,
    /// Whether it ended well.
    pub well: bool,
    /// For whoever reads its blocks.
    pub params: Option<Params>,
}

/// The engine in a child process, seen from the test.
pub struct SimulatedChild {
    /// The process.
    pub child: Child,
}

impl SimulatedChild {
    /// Starts one.
    #[must_use]
    pub fn start(engine: &Simulated, environment: Environment<'_>) -> Self {
        let child = Child::start("simulated", engine, environment);
        let ready: Value = child.hear();
        assert_eq!(ready, json!({ "ready": true }));
        Self { child }
    }

    fn order<T: serde::de::DeserializeOwned>(&mut self, order: &Order) -> T {
        self.child.ask(&serde_json::to_string(order).unwrap())
    }

    /// A leg comes in; the rule that was broken, or nothing.
    pub fn add(&mut self, leg: Leg) -> String {
        self.order(&Order::Add(leg))
    }

    /// Its client goes away; the rule that was broken, or nothing.
    pub fn abort(&mut self, id: &str) -> String {
        self.order(&Order::Abort(id.into()))
    }

    /// Takes steps.
    pub fn step(&mut self, count: u32) -> Ticked {
        self.order(&Order::Step(count))
    }

    /// Compares the end with the start; the rule that was broken, or nothing.
    pub fn end(&mut self) -> String {
        self.order(&Order::End)
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
        life: 0,
    };
    let halves = factory.build(&spec).unwrap();
    let mut engine = SimEngine::new(simulated.config.clone(), &simulated.model, halves).unwrap();
    factory.registered(&spec).unwrap();
    say(&json!({ "ready": true }));
    for order in requests() {
        let answer = match serde_json::from_str(&order).unwrap() {
            Order::Add(leg) => {
                let new = NewRequest {
                    id: RequestId::new(leg.id).unwrap(),
                    prompt: leg.prompt,
                    max_tokens: leg.max_tokens,
                    params: leg.params,
                    extra_key: leg.extra_key,
                };
                let done = if leg.rejected {
                    engine.reject(new)
                } else {
                    engine.add(new)
                };
                json!(words(done))
            }
            Order::Abort(id) => json!(words(engine.abort(&RequestId::new(id).unwrap()))),
            Order::Step(count) => step(&mut engine, count),
            Order::End => json!(words(engine.check_end())),
        };
        say(&answer);
    }
}

fn words(done: Result<(), kvferry_sim::Breach>) -> String {
    done.err()
        .map_or(String::new(), |breach| breach.to_string())
}

fn step(engine: &mut SimEngine, count: u32) -> Value {
    let mut breach = String::new();
    for _ in 0..count {
        if let Err(broken) = engine.step() {
            breach = broken.to_string();
            break;
        }
    }
    let ended: Vec<Value> = engine
        .take_outputs()
        .into_iter()
        .map(|output| {
            json!({
                "id": output.id.as_str(),
                "generated": output.generated,
                "well": matches!(output.how, Finish::Stopped | Finish::Length),
                "params": output.params,
            })
        })
        .collect();
    json!({
        "breach": breach,
        "ended": ended,
        "idle": engine.is_idle(),
        "loaded": engine.scheduler().counts().loaded_tokens,
    })
}

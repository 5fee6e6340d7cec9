//! The router, and clients that go away.

use kvferry_connector::contract::{Finish, Params};
use kvferry_wire::RequestId;
use serde_json::{Value, json};

use super::{Client, Cluster, ClusterEngine, Engines, Outcome, Stage};
use crate::request::{NewRequest, Output};
use crate::violation::{SimError, Violation};
use crate::workload::{Abort, Route};

impl<F: Engines + ?Sized> Cluster<'_, F> {
    pub(super) fn arrive(&mut self) -> Result<bool, SimError> {
        let mut came = false;
        for place in 0..self.clients.len() {
            let client = &self.clients[place];
            if client.stage != Stage::Coming {
                continue;
            }
            // Somebody is still to come: that is not being stuck.
            came = true;
            if client.request.arrival > self.tick {
                continue;
            }
            match client.request.route {
                Route::Local { engine } => self.leg(place, engine, "", None, true)?,
                Route::Split { prefill, .. } => {
                    let params = first_leg_params();
                    self.leg(place, prefill, "-p", Some(params), false)?;
                }
            }
        }
        Ok(came)
    }

    /// Sends a client's request to an engine.
    fn leg(
        &mut self,
        place: usize,
        engine: usize,
        suffix: &str,
        params: Option<Params>,
        last: bool,
    ) -> Result<(), SimError> {
        let client = &mut self.clients[place];
        let request = &client.request;
        let id = RequestId::new(format!("{}{suffix}", request.name)).map_err(|error| {
            SimError::Config {
                field: "requests.name",
                reason: error.to_string(),
            }
        })?;
        let new = NewRequest {
            id: id.clone(),
            prompt: client.prompt.clone(),
            max_tokens: if last { request.max_tokens } else { 1 },
            params,
            extra_key: request.extra_key.clone(),
        };
        let rejected = last && !suffix.is_empty() && request.abort == Some(Abort::Rejected);
        client.stage = Stage::Leg {
            engine,
            id: id.clone(),
            last,
            parked_since: None,
        };
        let Some(engine) = &mut self.slots[engine].engine else {
            return Ok(());
        };
        if rejected {
            client.stage = Stage::Ended(Outcome::Aborted);
            return engine.reject(new);
        }
        engine.add(new)?;
        if request.abort == Some(Abort::After(0)) {
            client.stage = Stage::Ended(Outcome::Aborted);
            engine.abort(&id)?;
        }
        Ok(())
    }

    /// Clients whose time has come go away.
    pub(super) fn go_away(&mut self) -> Result<bool, SimError> {
        let mut went = false;
        for client in &mut self.clients {
            let Stage::Leg {
                engine,
                id,
                parked_since,
                ..
            } = &mut client.stage
            else {
                continue;
            };
            let Some(engine) = &mut self.slots[*engine].engine else {
                continue;
            };
            let due = match client.request.abort {
                Some(Abort::After(ticks)) => self.tick >= client.request.arrival + u64::from(ticks),
                Some(Abort::WhileLoading(ticks)) => {
                    if engine.is_parked(id) {
                        parked_since.get_or_insert(self.tick);
                    }
                    parked_since.is_some_and(|since| self.tick >= since + u64::from(ticks))
                }
                _ => false,
            };
            if due {
                went = true;
                engine.abort(id)?;
                client.stage = Stage::Ended(Outcome::Aborted);
            }
        }
        Ok(went)
    }

    /// A leg ended.
    pub(super) fn output(&mut self, engine: usize, output: Output) -> Result<(), SimError> {
        let ended = |client: &Client| matches!(&client.stage, Stage::Leg { engine: at, id, .. } if *at == engine && *id == output.id);
        let Some(place) = self.clients.iter().position(ended) else {
            // The client had gone away.
            return Ok(());
        };
        let client = &self.clients[place];
        let last = matches!(client.stage, Stage::Leg { last: true, .. });
        if !matches!(output.how, Finish::Stopped | Finish::Length) {
            if !self.scenario.failures_allowed {
                let request = client.request.name.clone();
                let why = format!("its leg {} ended as {:?}", output.id.as_str(), output.how);
                return Err(self.breach(Violation::NoResult { request, why }).into());
            }
            self.clients[place].stage = Stage::Ended(Outcome::Failed("an engine failed it"));
            return Ok(());
        }
        self.judge(
            place,
            if last { client.request.max_tokens } else { 1 },
            &output,
        )?;
        match (last, self.clients[place].request.route) {
            (false, Route::Split { decode, .. }) => self.second_leg(place, decode, output.params),
            _ => {
                self.clients[place].stage = Stage::Ended(Outcome::Tokens(output.generated));
                Ok(())
            }
        }
    }

    fn second_leg(
        &mut self,
        place: usize,
        decode: usize,
        mut params: Option<Params>,
    ) -> Result<(), SimError> {
        let request = &self.clients[place].request;
        if request.abort == Some(Abort::Abandoned) {
            self.clients[place].stage = Stage::Ended(Outcome::Aborted);
            return Ok(());
        }
        if let Some(params) = params.as_mut().filter(|_| request.typed_router) {
            params.remove("kvferry");
        }
        self.leg(place, decode, "-d", params, true)
    }

    /// Compares what a leg generated with what the model gives.
    fn judge(&self, place: usize, max_tokens: u32, output: &Output) -> Result<(), SimError> {
        let client = &self.clients[place];
        let model = &self.scenario.model;
        let expected = model.reference(&client.prompt, &client.request.extra_key, max_tokens);
        if output.generated == expected {
            return Ok(());
        }
        let request = output.id.as_str().to_owned();
        let got = output.generated.clone();
        Err(self
            .breach(Violation::WrongTokens {
                request,
                got,
                expected,
            })
            .into())
    }
}

/// What vLLM's toy proxy sends with the first leg.
fn first_leg_params() -> Params {
    let params = json!({
        "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
        "remote_block_ids": null, "remote_host": null, "remote_port": null,
    });
    match params {
        Value::Object(params) => params,
        _ => Params::new(),
    }
}

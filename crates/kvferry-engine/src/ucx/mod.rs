//! The fabric over UCX.
//!
//! Responsible for every UCX call of kvferry and for the life of every UCX object. Not responsible
//! for peers, sequence or retries: it carries segments and reads between endpoints, and says what
//! became of each.
//!
//! There are two contexts. The *message context* has active messages only. The *data context* has
//! RMA; it exists where a transport with a real GET was found (see `native`), or if emulated reads were
//! allowed.
//!
//! Invariants: UCX objects are used on the thread that made the fabric only (the type is not
//! `Send`), none after its worker is destroyed, and every operation that UCX took is reported once.
#![allow(unsafe_code)]

mod callbacks;
mod endpoint;
mod exit_hook;
mod fabric;
mod library;
mod lingering;
mod log;
mod memlock;
mod memory;
mod native;
mod opening;
mod operations;
mod report;
mod sealed;
mod sending;
mod settings;
mod shared_memory;
mod status;
mod transports;
mod worker;
mod workers;

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::rc::Rc;

use kvferry_wire::{Addresses, UcxVersion};
use ucx_sys::ucs_status_t;

use self::callbacks::{Event, Mailbox};
use self::endpoint::{Endpoint, Phase, Side};
pub use self::library::ucx_copies;
use self::lingering::Lingering;
use self::memory::Memory;
use self::native::DataPlan;
use self::opening::Opening;
use self::operations::{Operation, Operations};
use self::report::report;
use self::sealed::Sealed;
use self::settings::TcpSegments;
pub use self::settings::UcxOptions;
pub(crate) use self::settings::{
    DEVICES_EXPECTED, TRANSPORTS_EXPECTED, is_device_list, is_transport_list,
};
use self::shared_memory::SharedMemory;
use self::worker::Worker;
use self::workers::Workers;
use crate::fabric::{
    Capabilities, Copiers, EndpointId, FabricError, NativeReads, SendBuffer, Sink,
};

/// The fabric over UCX.
pub struct UcxFabric {
    capabilities: Capabilities,
    plan: DataPlan,
    addresses: Addresses,
    /// `None` once shut down.
    workers: Option<Workers>,
    endpoints: HashMap<EndpointId, Endpoint>,
    /// Endpoints that may have become closed without an event.
    closing: Vec<EndpointId>,
    memory: Memory,
    operations: Operations,
    copiers: Copiers,
    /// Sends that wait for a connection.
    opening: Opening,
    /// Those of them whose endpoint was closed, and that were not reported.
    unsent: Vec<(EndpointId, SendBuffer)>,
    /// Message sides of closed endpoints.
    lingering: Lingering,
    /// Sends that went with them and were not reported.
    orphaned: Vec<(EndpointId, usize)>,
    /// Endpoints that UCX has closed and copies have not left.
    copying: Vec<EndpointId>,
    mailbox: Rc<Mailbox>,
}

impl UcxFabric {
    /// Makes the contexts and their workers, on the thread that will progress them.
    ///
    /// There is a data context if UCX finds a transport with a real GET among those that the user
    /// allows; it gets no other. With `allow_emulation` there always is one, over all that the user
    /// allows.
    ///
    /// # Errors
    /// What UCX refuses, with the transports and devices in force: among others a list of transports
    /// over which no other process could be reached, and a typed list with a device that is not here.
    pub fn new(options: &UcxOptions) -> Result<Self, FabricError> {
        Self::planned(options, DataPlan::new)
    }

    /// `plan` decides on the data context, from what was found, the list in force and whether emulation
    /// is allowed.
    fn planned(
        options: &UcxOptions,
        plan: impl FnOnce(&[transports::Resource], &str, bool) -> DataPlan,
    ) -> Result<Self, FabricError> {
        let version = library::load(options.library.as_deref())?;
        log::take_over();
        exit_hook::install();
        let chosen = options.transports.is_some() || std::env::var_os("UCX_TLS").is_some();
        let workers = 1 + u64::from(options.allow_emulation);
        let room = SharedMemory::look(&worker::transports_in_force(options)?, chosen, workers);
        let without_posix = UcxOptions {
            transports: Some("^posix".to_owned()),
            ..options.clone()
        };
        let options = if room.avoid { &without_posix } else { options };
        let mailbox = Rc::new(Mailbox::default());
        let workers = Workers::new(options, plan, &mailbox).map_err(|error| room.explain(error))?;
        let capabilities = Capabilities {
            name: "ucx",
            ucx: Some(UcxVersion {
                major: version.major,
                minor: version.minor,
                release: version.release,
            }),
            max_segment_bytes: TcpSegments::from_environment().payload(),
            native: workers.reads(),
            transports: native::summary(workers.message.context().found()),
            loopback: workers
                .message
                .context()
                .found()
                .iter()
                .any(transports::Resource::is_loopback),
            // UCX has no way to ask its devices.
            max_registration_bytes: None,
            pins_memory: workers
                .data
                .as_ref()
                .is_some_and(|data| data.context().found().iter().any(native::is_rdma)),
            warnings: room
                .warning
                .iter()
                .cloned()
                .chain(library::warning())
                .collect(),
        };
        Ok(Self {
            capabilities,
            plan: workers.plan.clone(),
            addresses: workers.addresses(),
            workers: Some(workers),
            endpoints: HashMap::new(),
            closing: Vec::new(),
            memory: Memory::default(),
            operations: Operations::new(Rc::clone(&mailbox)),
            copiers: Copiers::new()?,
            lingering: Lingering::default(),
            opening: Opening::default(),
            unsent: Vec::new(),
            orphaned: Vec::new(),
            copying: Vec::new(),
            mailbox,
        })
    }

    /// An endpoint on which something can be posted.
    fn open(
        &mut self,
        call: &'static str,
        endpoint: EndpointId,
    ) -> Result<(&mut Endpoint, &mut Operations, &mut Memory), FabricError> {
        let found = self.endpoints.get_mut(&endpoint);
        let reason = match found.as_ref().map(|endpoint| endpoint.phase) {
            Some(Phase::Open) => "",
            Some(Phase::Failed) => "the endpoint has failed",
            Some(Phase::Closing) => "the endpoint is being closed",
            None => "there is no such endpoint",
        };
        match found {
            Some(found) if reason.is_empty() => Ok((found, &mut self.operations, &mut self.memory)),
            _ => Err(FabricError::new(
                call,
                format!("{reason} (number {})", endpoint.0),
            )),
        }
    }

    /// Refuses a key over which UCX would emulate reads against our will.
    fn check_key(&self, call: &'static str, key: &[u8]) -> Result<(), FabricError> {
        let packed = Sealed::Key.open(key);
        let packed = packed.map_err(|reason| FabricError::new(call, reason))?;
        if matches!(self.plan, DataPlan::Real(_)) && native::is_for_no_device(packed) {
            let reason = "no device knows the memory, so UCX would emulate reads from it";
            return Err(FabricError::new(call, reason));
        }
        Ok(())
    }

    /// What an open endpoint can read by itself.
    fn reads(&self, endpoint: &Endpoint) -> NativeReads {
        match &endpoint.data {
            Ok(data) => {
                // SAFETY: the endpoint is open, so its links were not closed and no failure was
                // reported; they belong to workers of this thread.
                let lanes = unsafe { transports::of(data.handle()) };
                native::endpoint_reads(&self.plan, &lanes)
            }
            Err(reason) => NativeReads::Unavailable(reason.clone()),
        }
    }

    fn handle(&mut self, event: Event, sink: &mut dyn Sink) {
        match event {
            Event::Ended { operation, status } => {
                if let Some(operation) = self.operations.take(operation) {
                    self.ended(operation, status, sink);
                }
            }
            Event::Failed {
                endpoint,
                side,
                status,
            } => {
                // Both sides fail with their peer; the first is news.
                if let Some(found) = self.endpoints.get_mut(&endpoint)
                    && found.phase == Phase::Open
                {
                    found.phase = Phase::Failed;
                    sink.endpoint_failed(endpoint, status::error(side.name(), status));
                }
            }
            Event::Protocol(what) => sink.protocol_error(what),
            Event::Segment(bytes) => sink.segment(&bytes),
        }
    }

    fn ended(&mut self, operation: Operation, status: ucs_status_t, sink: &mut dyn Sink) {
        self.one_less(&operation);
        report(operation, |call| status::check(call, status), sink);
    }

    /// An operation of an endpoint has ended.
    fn one_less(&mut self, operation: &Operation) {
        let endpoint = operation.endpoint();
        match operation {
            Operation::Orphan { .. } => {
                self.lingering.send_ended(endpoint, &mut self.operations);
                return;
            }
            Operation::Close {
                side: Side::Message,
                ..
            } if self.lingering.closed(endpoint) => return,
            _ => {}
        }
        if let Some(found) = self.endpoints.get_mut(&endpoint) {
            found.pending = found.pending.saturating_sub(1);
            if let Operation::Send { .. } = operation {
                found.sends = found.sends.saturating_sub(1);
            }
            if found.is_closed() {
                self.closing.push(endpoint);
            }
        }
    }

    /// Reports endpoints whose last operation has ended.
    fn report_closed(&mut self, sink: &mut dyn Sink) -> bool {
        let mut any = false;
        for (endpoint, sends) in std::mem::take(&mut self.orphaned) {
            for _ in 0..sends {
                any = true;
                let error = FabricError::new("ucp_am_send_nbx", "the endpoint was closed");
                let buffer = SendBuffer::new(self.capabilities.max_segment_bytes);
                sink.sent(endpoint, buffer, Err(error));
            }
        }
        for endpoint in std::mem::take(&mut self.closing) {
            if self
                .endpoints
                .get(&endpoint)
                .is_some_and(Endpoint::is_closed)
            {
                if self.copiers.in_flight(endpoint) > 0 {
                    // The end of the last copy wakes us.
                    self.copying.push(endpoint);
                    continue;
                }
                any = true;
                self.endpoints.remove(&endpoint);
                self.memory.forget_keys(endpoint);
                sink.closed(endpoint);
            }
        }
        any
    }

    /// Closes everything, by force where sends are under way: the workers are about to be destroyed.
    fn close_all(&mut self) {
        let endpoints: Vec<EndpointId> = self.endpoints.keys().copied().collect();
        for endpoint in endpoints {
            self.close_by_force(endpoint);
        }
        self.lingering.close_all(&mut self.operations);
    }

    fn close_by_force(&mut self, endpoint: EndpointId) {
        self.give_up_opening(endpoint);
        let Some(found) = self.endpoints.get_mut(&endpoint) else {
            return;
        };
        found.close(endpoint, &mut self.operations);
        if found.is_closed() {
            self.closing.push(endpoint);
        }
    }

    /// Destroys the workers, and reports what they had not ended by then.
    ///
    /// Every endpoint is closed first: 1.13 aborts if a worker is destroyed while an operation is
    /// under way on an open endpoint.
    fn end(&mut self, sink: &mut dyn Sink) {
        self.close_all();
        let Some(workers) = self.workers.take() else {
            return;
        };
        let open = self.operations.len();
        if open > 0 {
            tracing::warn!(
                open,
                "operations were still under way; their worker is destroyed"
            );
        }
        // With operations under way the memory would still be written: rather an abort than that.
        let is_kept = |worker: &Worker| open == 0 && worker.cannot_be_destroyed();
        let kept = workers.iter().filter(|worker| is_kept(worker)).count();
        if kept > 0 {
            tracing::warn!(kept, "UCX workers are kept until the process ends");
        }
        match workers.message {
            message if is_kept(&message) => message.leave(),
            message => drop(message),
        }
        match workers.data {
            Some(data) if is_kept(&data) => {
                self.memory.end(data.context());
                data.leave();
            }
            Some(data) => self.memory.end(&data.end()),
            None => {}
        }
        while let Some(event) = self.mailbox.pop() {
            self.handle(event, sink);
        }
        self.lingering.clear();
        for operation in self.operations.take_all() {
            let ended = |call| Err(FabricError::new(call, "the fabric was shut down"));
            report(operation, ended, sink);
        }
        self.report_closed(sink);
        for (endpoint, _) in self.endpoints.drain() {
            sink.closed(endpoint);
        }
    }
}

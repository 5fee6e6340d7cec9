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
mod lingering;
mod log;
mod memlock;
mod memory;
mod native;
mod operations;
mod report;
mod sealed;
mod settings;
mod shared_memory;
mod status;
mod transports;
mod worker;
mod workers;

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fmt;
use std::num::NonZeroUsize;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use kvferry_wire::{Addresses, MemoryKind, UcxVersion};
use ucx_sys::{
    UCP_AM_SEND_FLAG_EAGER, UCS_MEMORY_TYPE_HOST, UCS_OK, features, ucp_am_send_nbx, ucp_get_nbx,
    ucs_status_t,
};

use self::callbacks::{Event, Mailbox};
use self::endpoint::{Endpoint, Link, Phase, Side};
use self::lingering::Lingering;
use self::memory::{Memory, memory_type};
use self::native::DataPlan;
use self::operations::{Operation, Operations, Submitted};
use self::report::{Nobody, no_native_reads, report, shut_down};
use self::sealed::Sealed;
use self::settings::TcpSegments;
pub use self::settings::UcxOptions;
pub(crate) use self::settings::{
    DEVICES_EXPECTED, TRANSPORTS_EXPECTED, is_device_list, is_transport_list,
};
use self::shared_memory::SharedMemory;
use self::worker::{MESSAGE_ID, Worker};
use self::workers::Workers;
use crate::fabric::{
    Armed, Capabilities, Copiers, EndpointId, Fabric, FabricError, KeyId, NativeReads, Posted,
    ReadOperation, ReadToken, RegionHandle, Registered, SendBuffer, Sink,
};
use crate::memory::{CopyBatch, MemoryRegion};

/// How long dropping a fabric that was not shut down waits for its operations.
const DROP_LIMIT: Duration = Duration::from_millis(500);

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
        let version = features().version;
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
            // UCX has no way to ask its devices.
            max_registration_bytes: None,
            pins_memory: workers
                .data
                .as_ref()
                .is_some_and(|data| data.context().found().iter().any(native::is_rdma)),
            warnings: room.warning.iter().cloned().collect(),
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

impl Fabric for UcxFabric {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn addresses(&self) -> Addresses {
        self.addresses.clone()
    }

    fn register(&mut self, memory: &MemoryRegion) -> Result<Registered, FabricError> {
        let workers = self.workers.as_ref().ok_or_else(|| shut_down("register"))?;
        let registered = self
            .memory
            .register(memory, workers.data.as_ref().map(Worker::context))
            .map_err(|error| match memory.kind() {
                MemoryKind::Host => memlock::explain(error, memory.bytes()),
                MemoryKind::Cuda { .. } | MemoryKind::Rocm { .. } => error,
            })?;
        let check = registered
            .key
            .as_ref()
            .map(|key| self.check_key("ucp_mem_map", key));
        if let Some(Err(error)) = check {
            self.deregister(registered.handle);
            return Err(error);
        }
        Ok(registered)
    }

    fn deregister(&mut self, region: RegionHandle) {
        if let Some(workers) = &self.workers {
            self.memory
                .deregister(region, workers.data.as_ref().map(Worker::context));
        }
    }

    fn connect(&mut self, endpoint: EndpointId, to: &Addresses) -> Result<(), FabricError> {
        let workers = self.workers.as_ref().ok_or_else(|| shut_down("connect"))?;
        if self.endpoints.contains_key(&endpoint) {
            let reason = format!("endpoint number {} is in use already", endpoint.0);
            return Err(FabricError::new("connect", reason));
        }
        let link =
            |worker, side, address| Link::create(worker, endpoint, side, address, &self.mailbox);
        let message = link(&workers.message, Side::Message, &to.message)?;
        let data = match workers.data.as_ref().zip(to.data.as_ref()) {
            Some((worker, address)) => link(worker, Side::Data, address)
                .map_err(|error| format!("no endpoint to the peer's data context: {error}")),
            None => Err("there is no data context on both sides".to_owned()),
        };
        self.endpoints
            .insert(endpoint, Endpoint::new(message, data));
        Ok(())
    }

    fn native_reads(&self, endpoint: EndpointId) -> NativeReads {
        let open = self.endpoints.get(&endpoint);
        match open.filter(|it| it.phase == Phase::Open) {
            Some(found) => self.reads(found),
            None => NativeReads::Unavailable("the endpoint has failed or is closed".to_owned()),
        }
    }

    fn transports(&self, endpoint: EndpointId) -> String {
        let Some(found) = self
            .endpoints
            .get(&endpoint)
            .filter(|it| it.phase == Phase::Open)
        else {
            return "none: the endpoint has failed or is closed".to_owned();
        };
        // SAFETY: the endpoint is open, so neither link was closed and no failure was reported;
        // both belong to workers of this thread.
        let of = |link: &Link| transports::names(&unsafe { transports::of(link.handle()) });
        // Given away only when it is closed.
        let message = found.message.as_ref().map_or_else(String::new, of);
        match &found.data {
            Ok(data) => format!("messages over {message}, data over {}", of(data)),
            Err(_) => format!("messages over {message}"),
        }
    }

    fn send(
        &mut self,
        endpoint: EndpointId,
        buffer: SendBuffer,
    ) -> Result<Posted<SendBuffer>, (SendBuffer, FabricError)> {
        const CALL: &str = "ucp_am_send_nbx";
        let (found, operations, _) = match self.open(CALL, endpoint) {
            Ok(open) => open,
            Err(error) => return Err((buffer, error)),
        };
        let Some(link) = found.message.as_ref().map(Link::handle) else {
            return Err((
                buffer,
                FabricError::new(CALL, "the endpoint is being closed"),
            ));
        };
        let send = Operation::Send { endpoint, buffer };
        let submitted = operations.submit(
            send,
            UCP_AM_SEND_FLAG_EAGER,
            UCS_MEMORY_TYPE_HOST,
            |send, param| {
                let segment = match send {
                    Operation::Send { buffer, .. } => buffer.segment(),
                    Operation::Orphan { .. } | Operation::Read { .. } | Operation::Close { .. } => {
                        &[]
                    }
                };
                let (bytes, count) = (segment.as_ptr().cast(), segment.len());
                // SAFETY: the endpoint is open. The bytes are in their place and are not moved,
                // changed or dropped before the operation has ended. There is no header.
                unsafe {
                    ucp_am_send_nbx(link, MESSAGE_ID, std::ptr::null(), 0, bytes, count, param)
                }
            },
        );
        match submitted {
            Submitted::Ended(Operation::Send { buffer, .. }, UCS_OK) => Ok(Posted::Done(buffer)),
            Submitted::Ended(Operation::Send { buffer, .. }, failed) => {
                Err((buffer, status::error(CALL, failed)))
            }
            Submitted::Ended(..) | Submitted::Pending => {
                found.pending += 1;
                found.sends += 1;
                Ok(Posted::Pending)
            }
        }
    }

    fn import_key(&mut self, endpoint: EndpointId, key: &[u8]) -> Result<KeyId, FabricError> {
        const CALL: &str = "ucp_ep_rkey_unpack";
        self.open(CALL, endpoint)?;
        // Reads need a key, so this is where one that UCX would emulate against our will is stopped.
        if let NativeReads::Unavailable(reason) = self.native_reads(endpoint) {
            return Err(no_native_reads(CALL, endpoint, &reason));
        }
        self.check_key(CALL, key)?;
        let (found, _, memory) = self.open(CALL, endpoint)?;
        let link = found.data.as_ref();
        let link = link.map_err(|reason| no_native_reads(CALL, endpoint, reason))?;
        memory.import_key(endpoint, link, key)
    }

    fn forget_key(&mut self, endpoint: EndpointId, key: KeyId) {
        self.memory.forget_key(endpoint, key);
    }

    fn read(
        &mut self,
        endpoint: EndpointId,
        token: ReadToken,
        operation: &ReadOperation<'_>,
    ) -> Result<Posted<()>, FabricError> {
        const CALL: &str = "ucp_get_nbx";
        let (found, operations, memory) = self.open(CALL, endpoint)?;
        let link = found.data.as_ref();
        let link = link
            .map_err(|reason| no_native_reads(CALL, endpoint, reason))?
            .handle();
        let key = memory.key(CALL, operation.key, endpoint)?;
        memory.check_registered(CALL, operation.local_handle)?;
        let local = operation
            .local
            .pointer(operation.local_offset, operation.bytes)
            .map_err(|error| FabricError::new(CALL, error.to_string()))?;
        let kind = memory_type(operation.local.kind());
        let bytes = operation.bytes as usize;
        let read = Operation::Read { endpoint, token };
        let submitted = operations.submit(read, 0, kind, |_, param| {
            // SAFETY: the endpoint is open and the key is one of its own. The local bytes are inside
            // their region (checked), which the caller keeps until the report.
            unsafe {
                ucp_get_nbx(
                    link,
                    local.as_ptr().cast(),
                    bytes,
                    operation.remote_address,
                    key,
                    param,
                )
            }
        });
        match submitted {
            Submitted::Pending => {
                found.pending += 1;
                Ok(Posted::Pending)
            }
            Submitted::Ended(_, UCS_OK) => Ok(Posted::Done(())),
            Submitted::Ended(_, failed) => Err(status::error(CALL, failed)),
        }
    }

    fn copy(
        &mut self,
        endpoint: EndpointId,
        token: ReadToken,
        batch: Box<CopyBatch>,
    ) -> Result<(), (Box<CopyBatch>, FabricError)> {
        match self.open("copy", endpoint) {
            Ok(_) => self.copiers.submit(endpoint, token, batch),
            Err(error) => Err((batch, error)),
        }
    }

    fn set_copy_threads(&mut self, threads: NonZeroUsize) {
        self.copiers.set_threads(threads);
    }

    fn reset(&mut self, sink: &mut dyn Sink) -> Result<(), FabricError> {
        let Some(workers) = &mut self.workers else {
            return Err(shut_down("reset"));
        };
        let Some(mut data) = workers.data.take() else {
            return Ok(());
        };
        // Closed first: 1.13 aborts if a worker is destroyed while an operation is under way on an
        // open endpoint.
        for (&id, endpoint) in &mut self.endpoints {
            endpoint.close_data(id, &mut self.operations);
        }
        let renewed = data.renew();
        self.memory.drop_keys();
        self.addresses.data = None;
        match &renewed {
            Ok(()) => {
                self.addresses.data = Some(data.sealed_address());
                workers.data = Some(data);
            }
            Err(_) => self.memory.end(&data.end()),
        }
        while let Some(event) = self.mailbox.pop() {
            self.handle(event, sink);
        }
        for operation in self.operations.take_data() {
            self.one_less(&operation);
            let ended = |call| Err(FabricError::new(call, "its worker was destroyed"));
            report(operation, ended, sink);
        }
        for (&id, endpoint) in &mut self.endpoints {
            let gone = Err("its worker was destroyed".to_owned());
            let had = std::mem::replace(&mut endpoint.data, gone).is_ok();
            if had && endpoint.phase == Phase::Open {
                endpoint.phase = Phase::Failed;
                let reason = "its worker was destroyed to end reads";
                sink.endpoint_failed(id, FabricError::new("the data endpoint", reason));
            }
        }
        renewed
    }

    fn close(&mut self, endpoint: EndpointId) {
        if let Some(found) = self.endpoints.get_mut(&endpoint)
            && found.phase != Phase::Closing
            && found.sends > 0
            && let Some((link, sends)) = found.take_message()
        {
            self.operations.orphan(endpoint);
            self.lingering.insert(endpoint, link, sends);
            self.orphaned.push((endpoint, sends));
        }
        self.close_by_force(endpoint);
    }

    fn progress(&mut self, sink: &mut dyn Sink) -> bool {
        let Some(workers) = &self.workers else {
            return false;
        };
        let mut busy = self.mailbox.listening(&mut *sink, || {
            // Both, whatever the first says.
            workers
                .iter()
                .fold(false, |busy, worker| worker.progress() | busy)
        });
        while let Some(event) = self.mailbox.pop() {
            busy = true;
            self.handle(event, sink);
        }
        if self.copiers.progress(sink) {
            busy = true;
            self.closing.append(&mut self.copying);
        }
        self.report_closed(sink) || busy
    }

    fn arm(&mut self) -> Armed {
        let Some(workers) = &self.workers else {
            return Armed::Idle;
        };
        let idle = self.mailbox.is_empty()
            && self.closing.is_empty()
            && self.orphaned.is_empty()
            && workers.iter().all(Worker::arm)
            && self.mailbox.is_empty()
            && self.copiers.arm() == Armed::Idle;
        if idle { Armed::Idle } else { Armed::Busy }
    }

    fn event_fds(&self) -> [Option<BorrowedFd<'_>>; 3] {
        let Some(workers) = &self.workers else {
            return [None, None, None];
        };
        let data = workers.data.as_ref().map(Worker::event_fd);
        let copies = self.copiers.event_fd();
        [Some(workers.message.event_fd()), data, Some(copies)]
    }

    fn shutdown(&mut self, sink: &mut dyn Sink, deadline: Instant) -> bool {
        self.close_all();
        // At least once, as even a forced close ends operations only while UCX progresses.
        while !self.endpoints.is_empty() {
            self.progress(sink);
            if Instant::now() >= deadline {
                break;
            }
            std::thread::yield_now();
        }
        let quiet = self.copiers.finish(sink, deadline);
        self.closing.append(&mut self.copying);
        // What UCX has queued by itself must leave too: answers to peers' emulated reads, and its
        // own messages about connections that are being made. 1.13 aborts if a worker is destroyed
        // with either in a queue.
        for worker in self.workers.iter().flat_map(Workers::iter) {
            if !worker.flush(deadline) {
                tracing::warn!("UCX still has something queued for a peer that does not take it");
            }
        }
        self.end(sink);
        quiet
    }
}

impl Drop for UcxFabric {
    fn drop(&mut self) {
        if self.workers.is_some() {
            self.shutdown(&mut Nobody, Instant::now() + DROP_LIMIT);
        }
    }
}

impl fmt::Debug for UcxFabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UcxFabric")
            .field("capabilities", &self.capabilities)
            .field("endpoints", &self.endpoints.len())
            .field("operations", &self.operations.len())
            .finish_non_exhaustive()
    }
}

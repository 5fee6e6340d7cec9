//! [`UcxFabric`] as the progress thread uses it: the [`Fabric`] contract over UCX's calls.
//!
//! Responsible for what is asked for. What comes of it, and the order in which everything ends, is in
//! the module above.

use std::fmt;
use std::num::NonZeroUsize;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use kvferry_wire::Addresses;
use ucx_sys::{UCS_OK, ucp_get_nbx};

use super::UcxFabric;
use super::endpoint::{Endpoint, Link, Phase, Side};
use super::memory::memory_type;
use super::operations::{How, Operation, Submitted};
use super::report::{Nobody, no_native_reads, report, shut_down};
use super::worker::Worker;
use super::workers::Workers;
use super::{opening, status, transports};
use crate::fabric::{
    Armed, Capabilities, EndpointId, Fabric, FabricError, KeyId, NativeReads, Posted,
    ReadOperation, ReadToken, RegionHandle, Registered, SendBuffer, Sink,
};
use crate::memory::{CopyBatch, MemoryRegion};

/// How long dropping a fabric that was not shut down waits for its operations.
const DROP_LIMIT: Duration = Duration::from_millis(500);

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
            .register(memory, workers.data.as_ref().map(Worker::context))?;
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
        if opening::is_needed(&message) {
            self.opening.begin(endpoint);
        }
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
        self.send_segment(endpoint, buffer)
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
        let how = How {
            memory: kind,
            ..How::host(0)
        };
        let submitted = operations.submit(read, how, |_, param| {
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
        busy |= self.try_opening(sink);
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
            && self.unsent.is_empty()
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

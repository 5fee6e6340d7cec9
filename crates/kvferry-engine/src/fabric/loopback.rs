//! A fabric within one process: segments are copied into the other engine's inbox, reads are
//! copies between regions. For unit tests of everything above the seam.
//!
//! Sends complete at once; reads complete at the next progress, so that both kinds of completion
//! that UCX has are met.

use std::collections::{HashMap, HashSet, VecDeque};
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use kvferry_wire::Addresses;
use rustix::event::{EventfdFlags, eventfd};

use super::{
    Armed, Capabilities, Copiers, EndpointId, Fabric, FabricError, KeyId, NativeReads, Posted,
    ReadOperation, ReadToken, RegionHandle, Registered, SendBuffer, Sink,
};
use crate::memory::{CopyBatch, MemoryRegion};

/// The wire that loopback fabrics share.
#[derive(Clone, Debug, Default)]
pub struct LoopbackNetwork {
    nodes: Arc<Mutex<Nodes>>,
}

#[derive(Debug, Default)]
struct Nodes {
    next: u64,
    alive: HashMap<u64, Arc<Node>>,
}

#[derive(Debug)]
struct Node {
    inbox: Mutex<VecDeque<Box<[u8]>>>,
    regions: Mutex<HashMap<u64, MemoryRegion>>,
    event: OwnedFd,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl LoopbackNetwork {
    /// A wire with nobody on it.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Ranges that are registered now, by all who are on it.
    #[must_use]
    pub fn registrations(&self) -> usize {
        let nodes = lock(&self.nodes);
        let of = |node: &Arc<Node>| lock(&node.regions).len();
        nodes.alive.values().map(of).sum()
    }

    fn node(&self, id: u64) -> Option<Arc<Node>> {
        lock(&self.nodes).alive.get(&id).cloned()
    }
}

struct PendingRead {
    endpoint: EndpointId,
    token: ReadToken,
    from: MemoryRegion,
    from_offset: u64,
    to: MemoryRegion,
    to_offset: u64,
    bytes: u64,
}

/// An in-process fabric on a [`LoopbackNetwork`].
pub struct LoopbackFabric {
    network: LoopbackNetwork,
    id: u64,
    node: Arc<Node>,
    capabilities: Capabilities,
    next: u64,
    endpoints: HashMap<EndpointId, u64>,
    keys: HashMap<KeyId, (EndpointId, u64)>,
    reads: VecDeque<PendingRead>,
    copiers: Copiers,
    closing: Vec<EndpointId>,
    broken: HashSet<EndpointId>,
}

impl LoopbackFabric {
    /// Joins a network. Segments are cut at `max_segment_bytes`.
    ///
    /// # Errors
    /// If the operating system gives no descriptor.
    pub fn new(network: &LoopbackNetwork, max_segment_bytes: usize) -> Result<Self, FabricError> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| FabricError::new("eventfd", error.to_string()))?;
        let node = Arc::new(Node {
            inbox: Mutex::default(),
            regions: Mutex::default(),
            event,
        });
        let mut nodes = lock(&network.nodes);
        nodes.next += 1;
        let id = nodes.next;
        nodes.alive.insert(id, Arc::clone(&node));
        drop(nodes);
        Ok(Self {
            network: network.clone(),
            id,
            node,
            capabilities: Capabilities {
                name: "loopback",
                ucx: None,
                max_segment_bytes,
                native: NativeReads::Real,
                transports: "loopback".into(),
                loopback: false,
                max_registration_bytes: None,
                pins_memory: false,
                warnings: Vec::new(),
            },
            next: 0,
            endpoints: HashMap::new(),
            keys: HashMap::new(),
            reads: VecDeque::new(),
            copiers: Copiers::new()?,
            closing: Vec::new(),
            broken: HashSet::new(),
        })
    }

    /// Refuses to register more than this many bytes at once, as some devices do.
    #[must_use]
    pub fn limit_registrations(mut self, bytes: u64) -> Self {
        self.capabilities.max_registration_bytes = Some(bytes);
        self
    }

    /// Claims that registered memory is pinned. It is not.
    #[must_use]
    pub fn claim_pinning(mut self) -> Self {
        self.capabilities.pins_memory = true;
        self
    }

    fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn finish(read: &PendingRead) -> Result<(), FabricError> {
        MemoryRegion::copy(
            &read.from,
            read.from_offset,
            &read.to,
            read.to_offset,
            read.bytes,
        )
        .map_err(|error| FabricError::new("loopback read", error.to_string()))
    }
}

/// A device writes to what it has registered and to nothing else.
fn check_local(node: &Node, operation: &ReadOperation<'_>) -> Result<(), FabricError> {
    let regions = lock(&node.regions);
    let registered = regions.get(&operation.local_handle.0);
    let first = operation.local.address() + operation.local_offset;
    let is_inside = registered.is_some_and(|memory| {
        let offset = first.checked_sub(memory.address());
        offset.is_some_and(|offset| memory.pointer(offset, operation.bytes).is_ok())
    });
    if is_inside {
        return Ok(());
    }
    let reason = format!(
        "{} bytes at {first:#x} are not inside registration {}",
        operation.bytes, operation.local_handle.0
    );
    Err(FabricError::new("read", reason))
}

fn gone(call: &'static str) -> FabricError {
    FabricError::new(call, "no such engine on the loopback network")
}

impl Fabric for LoopbackFabric {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn addresses(&self) -> Addresses {
        let id = self.id.to_le_bytes().to_vec();
        Addresses {
            message: id.clone(),
            data: Some(id),
        }
    }

    fn register(&mut self, memory: &MemoryRegion) -> Result<Registered, FabricError> {
        let (bytes, max) = (memory.bytes(), self.capabilities.max_registration_bytes);
        if let Some(max) = max.filter(|&max| bytes > max) {
            let reason = format!("{bytes} bytes are more than the {max} that fit a registration");
            return Err(FabricError::new("register", reason));
        }
        let handle = self.fresh();
        lock(&self.node.regions).insert(handle, memory.clone());
        let mut key = self.id.to_le_bytes().to_vec();
        key.extend_from_slice(&handle.to_le_bytes());
        Ok(Registered {
            handle: RegionHandle(handle),
            key: Some(key),
        })
    }

    fn deregister(&mut self, region: RegionHandle) {
        lock(&self.node.regions).remove(&region.0);
    }

    fn connect(&mut self, endpoint: EndpointId, to: &Addresses) -> Result<(), FabricError> {
        let id = <[u8; 8]>::try_from(to.message.as_slice())
            .map_err(|_| FabricError::new("connect", "a loopback address has 8 bytes"))?;
        let id = u64::from_le_bytes(id);
        self.network.node(id).ok_or_else(|| gone("connect"))?;
        self.endpoints.insert(endpoint, id);
        Ok(())
    }

    fn native_reads(&self, endpoint: EndpointId) -> NativeReads {
        if self.endpoints.contains_key(&endpoint) {
            NativeReads::Real
        } else {
            NativeReads::Unavailable("there is no such endpoint".into())
        }
    }

    fn transports(&self, _endpoint: EndpointId) -> String {
        "loopback".into()
    }

    fn send(
        &mut self,
        endpoint: EndpointId,
        buffer: SendBuffer,
    ) -> Result<Posted<SendBuffer>, (SendBuffer, FabricError)> {
        let node = self
            .endpoints
            .get(&endpoint)
            .and_then(|&id| self.network.node(id));
        let Some(node) = node else {
            self.broken.insert(endpoint);
            return Err((buffer, gone("send")));
        };
        lock(&node.inbox).push_back(buffer.segment().into());
        let _ = rustix::io::write(&node.event, &1_u64.to_ne_bytes());
        Ok(Posted::Done(buffer))
    }

    fn import_key(&mut self, endpoint: EndpointId, key: &[u8]) -> Result<KeyId, FabricError> {
        let bytes = <[u8; 16]>::try_from(key)
            .map_err(|_| FabricError::new("import_key", "a loopback key has 16 bytes"))?;
        let (node, region) = bytes.split_at(8);
        let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |n, &b| n << 8 | u64::from(b));
        if self.endpoints.get(&endpoint) != Some(&number(node)) {
            return Err(FabricError::new(
                "import_key",
                "the key belongs to another engine",
            ));
        }
        let id = KeyId(self.fresh());
        self.keys.insert(id, (endpoint, number(region)));
        Ok(id)
    }

    fn forget_key(&mut self, endpoint: EndpointId, key: KeyId) {
        if self
            .keys
            .get(&key)
            .is_some_and(|&(owner, _)| owner == endpoint)
        {
            self.keys.remove(&key);
        }
    }

    fn read(
        &mut self,
        endpoint: EndpointId,
        token: ReadToken,
        operation: &ReadOperation<'_>,
    ) -> Result<Posted<()>, FabricError> {
        let region = match self.keys.get(&operation.key) {
            Some(&(owner, region)) if owner == endpoint => region,
            Some(&(owner, _)) => {
                let reason = format!(
                    "key number {} belongs to endpoint {}, not to endpoint {}; import it for each",
                    operation.key.0, owner.0, endpoint.0
                );
                return Err(FabricError::new("read", reason));
            }
            None => {
                let reason = format!("there is no key number {}", operation.key.0);
                return Err(FabricError::new("read", reason));
            }
        };
        let node = self
            .endpoints
            .get(&endpoint)
            .and_then(|&id| self.network.node(id));
        let node = node.ok_or_else(|| gone("read"))?;
        check_local(&self.node, operation)?;
        let from = lock(&node.regions).get(&region).cloned();
        let from = from.ok_or_else(|| FabricError::new("read", "no such region"))?;
        let from_offset = operation
            .remote_address
            .checked_sub(from.address())
            .ok_or_else(|| FabricError::new("read", "address before the region"))?;
        self.reads.push_back(PendingRead {
            endpoint,
            token,
            from,
            from_offset,
            to: operation.local.clone(),
            to_offset: operation.local_offset,
            bytes: operation.bytes,
        });
        Ok(Posted::Pending)
    }

    fn copy(
        &mut self,
        endpoint: EndpointId,
        token: ReadToken,
        batch: Box<CopyBatch>,
    ) -> Result<(), (Box<CopyBatch>, FabricError)> {
        if !self.endpoints.contains_key(&endpoint) {
            return Err((batch, FabricError::new("copy", "the endpoint was closed")));
        }
        self.copiers.submit(endpoint, token, batch)
    }

    fn set_copy_threads(&mut self, threads: NonZeroUsize) {
        self.copiers.set_threads(threads);
    }

    fn reset(&mut self, sink: &mut dyn Sink) -> Result<(), FabricError> {
        let error = || FabricError::new("reset", "one-sided reads were given up");
        for read in std::mem::take(&mut self.reads) {
            sink.read_done(read.token, Err(error()));
        }
        self.broken.extend(self.endpoints.keys());
        Ok(())
    }

    fn close(&mut self, endpoint: EndpointId) {
        if self.endpoints.remove(&endpoint).is_some() {
            self.closing.push(endpoint);
        }
    }

    fn progress(&mut self, sink: &mut dyn Sink) -> bool {
        let mut busy = false;
        for endpoint in std::mem::take(&mut self.broken) {
            busy = true;
            sink.endpoint_failed(endpoint, gone("send"));
        }
        for _ in 0..self.reads.len() {
            let Some(read) = self.reads.pop_front() else {
                break;
            };
            busy = true;
            let result = if self.endpoints.contains_key(&read.endpoint) {
                Self::finish(&read)
            } else {
                Err(FabricError::new("read", "the endpoint was closed"))
            };
            sink.read_done(read.token, result);
        }
        busy |= self.copiers.progress(sink);
        let copiers = &self.copiers;
        let ended = self
            .closing
            .extract_if(.., |it| copiers.in_flight(*it) == 0);
        for endpoint in ended.collect::<Vec<_>>() {
            busy = true;
            self.keys.retain(|_, &mut (owner, _)| owner != endpoint);
            sink.closed(endpoint);
        }
        let arrived = std::mem::take(&mut *lock(&self.node.inbox));
        for segment in arrived {
            busy = true;
            sink.segment(&segment);
        }
        busy
    }

    fn arm(&mut self) -> Armed {
        let _ = rustix::io::read(&self.node.event, &mut [0_u8; 8]);
        let copiers = &self.copiers;
        let idle = self.reads.is_empty()
            && self.closing.iter().all(|it| copiers.in_flight(*it) > 0)
            && self.broken.is_empty()
            && lock(&self.node.inbox).is_empty();
        if idle {
            self.copiers.arm()
        } else {
            Armed::Busy
        }
    }

    fn event_fds(&self) -> [Option<BorrowedFd<'_>>; 3] {
        let copies = Some(self.copiers.event_fd());
        [Some(self.node.event.as_fd()), copies, None]
    }

    fn shutdown(&mut self, sink: &mut dyn Sink, deadline: Instant) -> bool {
        lock(&self.network.nodes).alive.remove(&self.id);
        for endpoint in self.endpoints.keys().copied().collect::<Vec<_>>() {
            self.close(endpoint);
        }
        let quiet = self.copiers.finish(sink, deadline);
        self.progress(sink);
        quiet
    }
}

impl Drop for LoopbackFabric {
    fn drop(&mut self) {
        lock(&self.network.nodes).alive.remove(&self.id);
    }
}

#[cfg(test)]
mod tests;

//! A fabric within one process: segments are copied into the other engine's inbox, reads are
//! copies between regions. For unit tests of everything above the seam.
//!
//! Sends complete at once; reads complete at the next progress, so that both kinds of completion
//! that UCX has are met.

use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use kvferry_wire::Addresses;
use rustix::event::{EventfdFlags, eventfd};

use super::{
    Armed, Capabilities, EndpointId, Fabric, FabricError, KeyId, NativeReads, Posted,
    ReadOperation, ReadToken, RegionHandle, Registered, SendBuffer, Sink,
};
use crate::memory::MemoryRegion;

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
            },
            next: 0,
            endpoints: HashMap::new(),
            keys: HashMap::new(),
            reads: VecDeque::new(),
            closing: Vec::new(),
            broken: HashSet::new(),
        })
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

    fn has_data_endpoint(&self, endpoint: EndpointId) -> bool {
        self.endpoints.contains_key(&endpoint)
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
            _ => {
                return Err(FabricError::new(
                    "read",
                    "the key belongs to another endpoint",
                ));
            }
        };
        let node = self
            .endpoints
            .get(&endpoint)
            .and_then(|&id| self.network.node(id));
        let node = node.ok_or_else(|| gone("read"))?;
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
        for endpoint in std::mem::take(&mut self.closing) {
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
        let idle = self.reads.is_empty()
            && self.closing.is_empty()
            && self.broken.is_empty()
            && lock(&self.node.inbox).is_empty();
        if idle { Armed::Idle } else { Armed::Busy }
    }

    fn event_fds(&self) -> [Option<BorrowedFd<'_>>; 2] {
        [Some(self.node.event.as_fd()), None]
    }

    fn shutdown(&mut self, sink: &mut dyn Sink, _deadline: Instant) {
        lock(&self.network.nodes).alive.remove(&self.id);
        for endpoint in self.endpoints.keys().copied().collect::<Vec<_>>() {
            self.close(endpoint);
        }
        self.progress(sink);
    }
}

impl Drop for LoopbackFabric {
    fn drop(&mut self) {
        lock(&self.network.nodes).alive.remove(&self.id);
    }
}

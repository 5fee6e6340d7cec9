//! Fabrics in one thread, with sinks that record.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::*;
use crate::fabric::CopyEnd;
use crate::memory::HostPool;

/// No wait of any test is longer.
pub(super) const LIMIT: Duration = Duration::from_secs(30);

/// What a sink was told.
#[derive(Default)]
pub(super) struct Recorder {
    pub(super) segments: Vec<Vec<u8>>,
    pub(super) sent: Vec<(EndpointId, Vec<u8>, Result<(), FabricError>)>,
    pub(super) reads: Vec<(ReadToken, Result<(), FabricError>)>,
    pub(super) failed: Vec<(EndpointId, FabricError)>,
    pub(super) closed: Vec<EndpointId>,
    pub(super) protocol_errors: Vec<&'static str>,
    /// Panic when the next segment arrives.
    pub(super) panic: bool,
}

impl Sink for Recorder {
    fn segment(&mut self, bytes: &[u8]) {
        assert!(!std::mem::take(&mut self.panic), "as asked");
        self.segments.push(bytes.to_vec());
    }

    fn sent(&mut self, endpoint: EndpointId, buffer: SendBuffer, result: Result<(), FabricError>) {
        self.sent
            .push((endpoint, buffer.segment().to_vec(), result));
    }

    fn read_done(&mut self, token: ReadToken, result: Result<(), FabricError>) {
        self.reads.push((token, result));
    }

    fn copy_done(&mut self, _: ReadToken, _: CopyEnd) {}

    fn endpoint_failed(&mut self, endpoint: EndpointId, error: FabricError) {
        self.failed.push((endpoint, error));
    }

    fn closed(&mut self, endpoint: EndpointId) {
        self.closed.push(endpoint);
    }

    fn protocol_error(&mut self, what: &'static str) {
        self.protocol_errors.push(what);
    }
}

/// A fabric and its sink.
pub(super) struct Node {
    pub(super) fabric: UcxFabric,
    pub(super) sink: Recorder,
    sends: usize,
}

impl Node {
    pub(super) fn new(allow_emulation: bool) -> Self {
        let options = UcxOptions {
            allow_emulation,
            ..UcxOptions::default()
        };
        Self::of(UcxFabric::new(&options).unwrap())
    }

    pub(super) fn of(fabric: UcxFabric) -> Self {
        the_expected_ucx_is_loaded();
        Self {
            fabric,
            sink: Recorder::default(),
            sends: 0,
        }
    }

    pub(super) fn connect(&mut self, endpoint: u64, to: &Self) -> EndpointId {
        let endpoint = EndpointId(endpoint);
        self.fabric
            .connect(endpoint, &to.fabric.addresses())
            .unwrap();
        endpoint
    }

    pub(super) fn progress(&mut self) -> bool {
        self.fabric.progress(&mut self.sink)
    }

    /// Sends, and says whether the send is pending.
    pub(super) fn send(&mut self, endpoint: EndpointId, bytes: &[u8]) -> bool {
        match self.fabric.send(endpoint, buffer(bytes)).unwrap() {
            Posted::Done(buffer) => {
                assert_eq!(buffer.segment(), bytes);
                false
            }
            Posted::Pending => {
                self.sends += 1;
                true
            }
        }
    }

    /// Every pending send was reported, and none twice.
    pub(super) fn all_sends_are_reported(&self) -> bool {
        assert!(
            self.sink.sent.len() <= self.sends,
            "a send was reported twice"
        );
        self.sink.sent.len() == self.sends
    }

    pub(super) fn read(
        &mut self,
        endpoint: EndpointId,
        token: u64,
        operation: &ReadOperation<'_>,
    ) -> Result<(), FabricError> {
        let token = ReadToken(token);
        if let Posted::Done(()) = self.fabric.read(endpoint, token, operation)? {
            self.sink.reads.push((token, Ok(())));
        }
        Ok(())
    }
}

/// The version that the run is meant for, such as `1.22`, if it says so.
fn the_expected_ucx_is_loaded() {
    if let Ok(expected) = std::env::var("KVFERRY_EXPECT_UCX") {
        let loaded = ucx_sys::features();
        let found = format!("{}.{}", loaded.version.major, loaded.version.minor);
        assert_eq!(
            found, expected,
            "the wrong UCX was loaded, from {:?}",
            loaded.library
        );
    }
}

pub(super) fn buffer(bytes: &[u8]) -> SendBuffer {
    let mut buffer = SendBuffer::new(bytes.len());
    buffer.bytes.copy_from_slice(bytes);
    buffer.filled = bytes.len();
    buffer
}

/// Bytes that differ with the seed and the position.
pub(super) fn pattern(seed: usize, length: usize) -> Vec<u8> {
    let byte = |at: usize| (at.wrapping_mul(31) ^ (at >> 8) ^ seed.wrapping_mul(97)) as u8;
    (0..length).map(byte).collect()
}

pub(super) fn region(bytes: usize) -> MemoryRegion {
    HostPool::new(bytes).unwrap().region().unwrap()
}

pub(super) fn bytes_of(region: &MemoryRegion) -> Vec<u8> {
    let mut bytes = vec![0; region.bytes() as usize];
    region.read_at(0, &mut bytes).unwrap();
    bytes
}

/// Progresses the nodes until `done`, asleep where they have nothing to do.
pub(super) fn until(nodes: &mut [&mut Node], what: &str, done: impl Fn(&[&mut Node]) -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !done(nodes) {
        assert!(Instant::now() < deadline, "{what}: not within {LIMIT:?}");
        let busy = nodes
            .iter_mut()
            .fold(false, |busy, node| node.progress() | busy);
        if !busy
            && nodes
                .iter_mut()
                .all(|node| node.fabric.arm() == Armed::Idle)
            && !done(nodes)
        {
            sleep(nodes, deadline, what);
        }
    }
}

fn sleep(nodes: &[&mut Node], deadline: Instant, what: &str) {
    let fds = nodes.iter().flat_map(|node| node.fabric.event_fds());
    let mut fds: Vec<PollFd<'_>> = fds
        .flatten()
        .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
        .collect();
    let left = deadline.saturating_duration_since(Instant::now());
    let ready = poll(&mut fds, Some(&Timespec::try_from(left).unwrap())).unwrap();
    assert_ne!(ready, 0, "{what}: asleep for {left:?}, and nobody woke us");
}

//! How engines end: in order, twice at once, by a panic.

use std::num::NonZeroUsize;
use std::os::fd::BorrowedFd;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use kvferry_engine::fabric::{
    Armed, Capabilities, CopyBatch, EndpointId, KeyId, NativeReads, Posted, ReadOperation,
    ReadToken, RegionHandle, Registered, SendBuffer, Sink,
};
use kvferry_engine::wire::Addresses;
use kvferry_engine::{
    BlockPair, Engine, EngineError, Fabric, FabricError, Lane, LoopbackFabric, LoopbackNetwork,
    MemoryRegion, Replies, Sender, Service, TransferError,
};

use crate::support::*;

struct Panics;

impl Service for Panics {
    fn on_message(&mut self, _: Sender, _: &[u8], _: &mut Replies) {
        panic!("a service with a bug");
    }

    fn on_tick(&mut self, _: Instant, _: &mut Replies) -> Option<Instant> {
        None
    }
}

#[test]
fn a_panic_of_a_service_ends_the_engine_and_every_transfer() {
    for kind in kinds() {
        let producer = side(engine(&kind, "producer"), 1, 4, 64, 0);
        let builder = Engine::builder(config("consumer")).service(7, Box::new(Panics));
        let consumer = side(start(&kind, builder), 1, 4, 64, 0);
        let peer = connect(&consumer.engine, &producer.engine, Lane::Served);
        let back = connect(&producer.engine, &consumer.engine, Lane::Served);
        let tables = with_tables(&consumer, &peer);
        back.send(7, vec![1]).unwrap();
        until("the loss of the peer", || {
            match peer.read(&tables, &[BlockPair::new(0, 0)]) {
                // Before the panic it succeeds, after it there is still one outcome.
                Ok(transfer) => drop(transfer.wait(PATIENCE).unwrap()),
                Err(_) => return true,
            }
            false
        });
        // Its peers are gone a moment before it is.
        let reason =
            "the engine's progress thread panicked: a service with a bug; start the process anew";
        assert_eq!(consumer.engine.check().unwrap_err().to_string(), reason);
        until("the stop", || consumer.engine.describe().is_err());
        let error = consumer.engine.describe().unwrap_err();
        assert!(matches!(error, EngineError::Panicked { .. }), "{error}");
        let error = consumer.engine.shutdown(PATIENCE).unwrap_err();
        assert!(matches!(error, EngineError::Panicked { .. }), "{error}");
        producer.engine.check().unwrap();
        assert_eq!(consumer.engine.counters().quarantined_bytes, 0);
        // The other engine lives and has been told.
        until("the goodbye", || back.gone().is_some());
    }
}

/// A loopback fabric whose shutdown waits to be told.
struct SlowEnd {
    fabric: LoopbackFabric,
    ending: mpsc::Sender<()>,
    go: mpsc::Receiver<()>,
}

impl Fabric for SlowEnd {
    fn capabilities(&self) -> &Capabilities {
        self.fabric.capabilities()
    }
    fn addresses(&self) -> Addresses {
        self.fabric.addresses()
    }
    fn register(&mut self, memory: &MemoryRegion) -> Result<Registered, FabricError> {
        self.fabric.register(memory)
    }
    fn deregister(&mut self, region: RegionHandle) {
        self.fabric.deregister(region);
    }
    fn connect(&mut self, endpoint: EndpointId, to: &Addresses) -> Result<(), FabricError> {
        self.fabric.connect(endpoint, to)
    }
    fn native_reads(&self, endpoint: EndpointId) -> NativeReads {
        self.fabric.native_reads(endpoint)
    }
    fn transports(&self, endpoint: EndpointId) -> String {
        self.fabric.transports(endpoint)
    }
    fn send(
        &mut self,
        endpoint: EndpointId,
        buffer: SendBuffer,
    ) -> Result<Posted<SendBuffer>, (SendBuffer, FabricError)> {
        self.fabric.send(endpoint, buffer)
    }
    fn import_key(&mut self, endpoint: EndpointId, key: &[u8]) -> Result<KeyId, FabricError> {
        self.fabric.import_key(endpoint, key)
    }
    fn forget_key(&mut self, endpoint: EndpointId, key: KeyId) {
        self.fabric.forget_key(endpoint, key);
    }
    fn read(
        &mut self,
        endpoint: EndpointId,
        token: ReadToken,
        operation: &ReadOperation<'_>,
    ) -> Result<Posted<()>, FabricError> {
        self.fabric.read(endpoint, token, operation)
    }
    fn close(&mut self, endpoint: EndpointId) {
        self.fabric.close(endpoint);
    }
    fn progress(&mut self, sink: &mut dyn Sink) -> bool {
        self.fabric.progress(sink)
    }
    fn arm(&mut self) -> Armed {
        self.fabric.arm()
    }
    fn copy(
        &mut self,
        endpoint: EndpointId,
        token: ReadToken,
        batch: Box<CopyBatch>,
    ) -> Result<(), (Box<CopyBatch>, FabricError)> {
        self.fabric.copy(endpoint, token, batch)
    }
    fn set_copy_threads(&mut self, threads: NonZeroUsize) {
        self.fabric.set_copy_threads(threads);
    }
    fn event_fds(&self) -> [Option<BorrowedFd<'_>>; 3] {
        self.fabric.event_fds()
    }
    fn reset(&mut self, sink: &mut dyn Sink) -> Result<(), FabricError> {
        self.fabric.reset(sink)
    }
    fn shutdown(&mut self, sink: &mut dyn Sink, deadline: Instant) -> bool {
        let _ = self.ending.send(());
        let _ = self.go.recv_timeout(PATIENCE);
        self.fabric.shutdown(sink, deadline)
    }
}

#[test]
fn nobody_hears_of_the_end_before_the_fabric_is_gone() {
    let network = LoopbackNetwork::new();
    let (service, parked) = park();
    let (ending, is_ending) = mpsc::channel();
    let (go, told) = mpsc::channel();
    let engine = Engine::builder(config("e"))
        .service(7, service)
        .start_on(move || {
            Ok(SlowEnd {
                fabric: LoopbackFabric::new(&network, 4096)?,
                ending,
                go: told,
            })
        })
        .unwrap();
    parked.park(&engine);
    let (ended, heard) = mpsc::channel();
    for _ in 0..2 {
        let (engine, ended) = (engine.clone(), ended.clone());
        std::thread::spawn(move || ended.send(engine.shutdown(PATIENCE)).unwrap());
    }
    // Time for both to submit; one that is later is told "stopped", at the end like the other.
    let _ = heard.recv_timeout(Duration::from_millis(100));
    parked.go();
    is_ending.recv_timeout(PATIENCE).unwrap();
    let early = heard.recv_timeout(Duration::from_millis(100));
    assert!(early.is_err(), "told {early:?} while the fabric was there");
    go.send(()).unwrap();
    for _ in 0..2 {
        let told = heard.recv_timeout(PATIENCE).unwrap();
        assert!(
            matches!(told, Ok(()) | Err(EngineError::Stopped)),
            "{told:?}"
        );
    }
}

#[test]
fn a_transfer_that_the_shutdown_ends_says_so() {
    let kind = loopback();
    let (service, parked) = park();
    let builder = Engine::builder(config("producer")).service(7, service);
    let producer = side(start(&kind, builder), 1, 4, 64, 0);
    let consumer = side(engine(&kind, "consumer"), 1, 4, 64, 0);
    let peer = connect(&consumer.engine, &producer.engine, Lane::Served);
    let tables = with_tables(&consumer, &peer);
    parked.park(&producer.engine);
    let transfer = peer.read(&tables, &[BlockPair::new(0, 0)]).unwrap();
    consumer.engine.shutdown(PATIENCE).unwrap();
    let error = transfer.wait(PATIENCE).unwrap().unwrap_err();
    assert!(matches!(error, TransferError::Stopped), "{error}");
    assert_eq!(peer.gone(), Some("the engine was shut down"));
    assert_eq!(consumer.engine.counters().peers_lost, 1);
    parked.go();
}

#[test]
fn timeouts_longer_than_any_clock_are_taken_for_a_day() {
    let kind = loopback();
    let producer = side(engine(&kind, "producer"), 1, 4, 64, 0);
    let consumer = side(engine(&kind, "consumer"), 1, 4, 64, 0);
    let peer = connect(&consumer.engine, &producer.engine, Lane::Served);
    let tables = with_tables(&consumer, &peer);
    let pairs = [BlockPair::new(0, 0)];
    let transfer = peer.read_within(&tables, &pairs, Duration::MAX).unwrap();
    assert_eq!(transfer.wait(Duration::MAX).unwrap().unwrap().bytes, 64);
    let Side {
        engine, _region, ..
    } = consumer;
    _region.deregister(Duration::MAX).unwrap();
    engine.shutdown(Duration::MAX).unwrap();
}

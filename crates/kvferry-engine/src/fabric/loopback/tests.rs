//! What the in-process fabric refuses, as a device would.

use super::*;
use crate::fabric::CopyEnd;
use crate::memory::HostPool;

fn region(bytes: usize) -> MemoryRegion {
    HostPool::new(bytes).unwrap().region().unwrap()
}

/// C73: a key belongs to one endpoint; on another, or after it, it is an error that says so.
#[test]
fn c73_a_key_is_refused_on_another_endpoint() {
    let network = LoopbackNetwork::new();
    let mut a = LoopbackFabric::new(&network, 4096).unwrap();
    let mut b = LoopbackFabric::new(&network, 4096).unwrap();
    let c = LoopbackFabric::new(&network, 4096).unwrap();
    let (source, target) = (region(4096), region(4096));
    let packed = b.register(&source).unwrap().key.unwrap();
    let local_handle = a.register(&target).unwrap().handle;
    let [first, second, other] = [1, 2, 3].map(EndpointId);
    a.connect(first, &b.addresses()).unwrap();
    a.connect(second, &b.addresses()).unwrap();
    a.connect(other, &c.addresses()).unwrap();
    let key = a.import_key(first, &packed).unwrap();
    let error = a.import_key(other, &packed).unwrap_err();
    assert!(error.status.contains("another engine"), "{error}");
    let operation = ReadOperation {
        key,
        remote_address: source.address(),
        local: &target,
        local_handle,
        local_offset: 0,
        bytes: 4096,
    };
    let error = a.read(second, ReadToken(1), &operation).unwrap_err();
    let number = key.0;
    assert_eq!(
        error.to_string(),
        format!(
            "read failed: key number {number} belongs to endpoint 1, not to endpoint 2; import it \
             for each"
        )
    );
    a.close(first);
    a.progress(&mut Outcomes::default());
    let error = a.read(second, ReadToken(2), &operation).unwrap_err();
    assert!(
        error.status.contains(&format!("no key number {number}")),
        "{error}"
    );
    assert!(a.reads.is_empty() && c.reads.is_empty());
}

/// C79: a registration has a limit, and an operation stays within one on either side.
#[test]
fn c79_an_operation_across_two_registrations_is_refused() {
    let network = LoopbackNetwork::new();
    let mut a = LoopbackFabric::new(&network, 4096).unwrap();
    let mut b = LoopbackFabric::new(&network, 4096)
        .unwrap()
        .limit_registrations(4096);
    let (source, target) = (region(8192), region(8192));
    let error = b.register(&source).unwrap_err();
    assert!(
        error.status.contains("8192 bytes are more than the 4096"),
        "{error}"
    );
    assert_eq!(network.registrations(), 0);
    let half = |memory: &MemoryRegion, at| memory.part(at, 4096).unwrap();
    let packed = b.register(&half(&source, 0)).unwrap().key.unwrap();
    let local_handle = a.register(&half(&target, 4096)).unwrap().handle;
    let endpoint = EndpointId(1);
    a.connect(endpoint, &b.addresses()).unwrap();
    let key = a.import_key(endpoint, &packed).unwrap();
    let operation = |remote, local_offset, bytes| ReadOperation {
        key,
        remote_address: source.address() + remote,
        local: &target,
        local_handle,
        local_offset,
        bytes,
    };
    let mut sink = Outcomes::default();
    // Whole, then one byte over on our side, before it, and one over on the peer's.
    assert!(
        a.read(endpoint, ReadToken(1), &operation(0, 4096, 4096))
            .is_ok()
    );
    for (local_offset, bytes) in [(4097, 4096), (4095, 2)] {
        let over = operation(0, local_offset, bytes);
        let error = a.read(endpoint, ReadToken(2), &over).unwrap_err();
        assert!(error.status.contains("not inside registration"), "{error}");
    }
    assert!(
        a.read(endpoint, ReadToken(3), &operation(1, 4096, 4096))
            .is_ok()
    );
    a.progress(&mut sink);
    assert_eq!(sink.0, [(1, true), (3, false)]);
}

/// How each read ended.
#[derive(Default)]
struct Outcomes(Vec<(u64, bool)>);

impl Sink for Outcomes {
    fn segment(&mut self, _: &[u8]) {}
    fn sent(&mut self, _: EndpointId, _: SendBuffer, _: Result<(), FabricError>) {}
    fn read_done(&mut self, token: ReadToken, result: Result<(), FabricError>) {
        self.0.push((token.0, result.is_ok()));
    }
    fn copy_done(&mut self, _: ReadToken, _: CopyEnd) {}
    fn endpoint_failed(&mut self, _: EndpointId, _: FabricError) {}
    fn closed(&mut self, _: EndpointId) {}
    fn protocol_error(&mut self, _: &'static str) {}
}

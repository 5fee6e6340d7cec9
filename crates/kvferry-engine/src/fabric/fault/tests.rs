//! The decorator against the contract, over the loopback fabric.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use kvferry_wire::{
    Incarnation, SEGMENT_HEADER_BYTES, Segment, SegmentBody, SegmentHeader, TransferId,
};
use proptest::prelude::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::*;
use crate::fabric::{CopyEnd, LoopbackFabric, LoopbackNetwork};
use crate::memory::{HostPool, RemotePool};

const SEGMENT: usize = 256;
const READ: u64 = 64;
const READS: u64 = 64;

/// A sink that knows what is open, and finds whatever the contract forbids.
#[derive(Default)]
struct Recorder {
    segments: Vec<Vec<u8>>,
    sends: HashMap<EndpointId, usize>,
    reads: HashMap<ReadToken, EndpointId>,
    sent: Vec<Result<(), FabricError>>,
    ended: Vec<(ReadToken, Result<(), FabricError>)>,
    failed: HashSet<EndpointId>,
    closed: HashSet<EndpointId>,
    reports: usize,
}

impl Recorder {
    fn is_quiet(&self, endpoint: EndpointId) -> bool {
        self.sends.get(&endpoint).is_none_or(|&open| open == 0)
            && self.reads.values().all(|&owner| owner != endpoint)
    }
}

impl Sink for Recorder {
    fn segment(&mut self, bytes: &[u8]) {
        self.reports += 1;
        self.segments.push(bytes.to_vec());
    }

    fn sent(&mut self, endpoint: EndpointId, buffer: SendBuffer, result: Result<(), FabricError>) {
        self.reports += 1;
        assert!(!self.closed.contains(&endpoint), "sent after closed");
        assert_eq!(buffer.bytes.len(), SEGMENT, "a buffer comes back whole");
        let open = self.sends.get_mut(&endpoint).unwrap();
        *open = open.checked_sub(1).expect("one report per pending send");
        self.sent.push(result);
    }

    fn read_done(&mut self, token: ReadToken, result: Result<(), FabricError>) {
        self.reports += 1;
        let endpoint = self.reads.remove(&token).expect("one report per read");
        assert!(!self.closed.contains(&endpoint), "read_done after closed");
        self.ended.push((token, result));
    }

    fn copy_done(&mut self, token: ReadToken, end: CopyEnd) {
        let result = end.result.map(|_| ());
        self.read_done(
            token,
            result.map_err(|error| FabricError::new("copy", error.to_string())),
        );
    }

    fn endpoint_failed(&mut self, endpoint: EndpointId, _: FabricError) {
        self.reports += 1;
        assert!(!self.closed.contains(&endpoint), "failed after closed");
        assert!(self.failed.insert(endpoint), "failed twice");
    }

    fn closed(&mut self, endpoint: EndpointId) {
        self.reports += 1;
        assert!(self.closed.insert(endpoint), "closed twice");
        assert!(self.is_quiet(endpoint), "closed before its operations");
    }

    fn protocol_error(&mut self, what: &'static str) {
        panic!("{what}");
    }
}

/// A fabric with faults, and a plain one that it talks to.
struct Bench {
    fabric: FaultFabric<LoopbackFabric>,
    control: FaultControl,
    sink: Recorder,
    other: LoopbackFabric,
    other_sink: Recorder,
    ours: MemoryRegion,
    handle: RegionHandle,
    theirs: MemoryRegion,
    their_key: Vec<u8>,
    keys: HashMap<EndpointId, KeyId>,
    next_read: u64,
    /// The other's memory as it is mapped here, and copies out of it so far.
    mapped: Arc<RemotePool>,
    copies: u64,
}

fn memory() -> MemoryRegion {
    let pool = HostPool::new((READ * READS) as usize).unwrap();
    pool.region().unwrap()
}

impl Bench {
    fn new(seed: u64, rates: FaultRates) -> Self {
        let network = LoopbackNetwork::new();
        let control = FaultControl::new(seed, FaultRates::none()).unwrap();
        let inner = LoopbackFabric::new(&network, SEGMENT).unwrap();
        let mut fabric = FaultFabric::new(inner, &control).unwrap();
        let mut other = LoopbackFabric::new(&network, SEGMENT).unwrap();
        let (ours, theirs) = (memory(), memory());
        theirs.fill(0, READ * READS, 0x11).unwrap();
        let pool = theirs.pool().unwrap();
        let mapped =
            RemotePool::map(pool.fd().try_clone_to_owned().unwrap(), READ * READS).unwrap();
        let handle = fabric.register(&ours).unwrap().handle;
        let their_key = other.register(&theirs).unwrap().key.unwrap();
        let back = fabric.addresses();
        other.connect(EndpointId(99), &back).unwrap();
        let mut bench = Self {
            fabric,
            control,
            sink: Recorder::default(),
            other,
            other_sink: Recorder::default(),
            ours,
            handle,
            theirs,
            their_key,
            keys: HashMap::new(),
            next_read: 0,
            mapped: Arc::new(mapped),
            copies: 0,
        };
        for endpoint in [1, 2] {
            bench.open(EndpointId(endpoint));
        }
        bench.control.set_rates(rates);
        bench
    }

    fn open(&mut self, endpoint: EndpointId) {
        let to = self.other.addresses();
        self.fabric.connect(endpoint, &to).unwrap();
        let key = self.fabric.import_key(endpoint, &self.their_key).unwrap();
        self.keys.insert(endpoint, key);
    }

    /// What became of the send: done, pending, refused.
    fn send(&mut self, endpoint: EndpointId, byte: u8) -> &'static str {
        let mut buffer = SendBuffer::new(SEGMENT);
        buffer.bytes[..4].fill(byte);
        buffer.filled = 4;
        match self.fabric.send(endpoint, buffer) {
            Ok(Posted::Done(_)) => "done",
            Ok(Posted::Pending) => {
                *self.sink.sends.entry(endpoint).or_default() += 1;
                "pending"
            }
            Err((buffer, _)) => {
                assert_eq!(buffer.segment(), [byte; 4]);
                "refused"
            }
        }
    }

    /// A read to a place of its own; `Some` with its number if it was taken.
    fn read(&mut self, endpoint: EndpointId) -> (Option<u64>, &'static str) {
        let number = self.next_read % READS;
        self.next_read += 1;
        let operation = ReadOperation {
            key: self.keys[&endpoint],
            remote_address: self.theirs.address() + number * READ,
            local: &self.ours,
            local_handle: self.handle,
            local_offset: number * READ,
            bytes: READ,
        };
        let token = ReadToken(number);
        match self.fabric.read(endpoint, token, &operation) {
            Ok(Posted::Done(())) => (Some(number), "done"),
            Ok(Posted::Pending) => {
                self.sink.reads.insert(token, endpoint);
                (Some(number), "pending")
            }
            Err(_) => (None, "refused"),
        }
    }

    /// Copies to a place of its own out of the other's pool, which is mapped; false if it was refused.
    fn copy(&mut self, endpoint: EndpointId) -> bool {
        let number = self.next_read % READS;
        self.next_read += 1;
        let mut batch = CopyBatch::default();
        let (at, to) = (number * READ, (&self.ours, number * READ));
        batch.add_from_pool(&self.mapped, at, to, READ).unwrap();
        let token = ReadToken(number);
        let taken = self.fabric.copy(endpoint, token, Box::new(batch)).is_ok();
        if taken {
            self.sink.reads.insert(token, endpoint);
            self.copies += 1;
        }
        taken
    }

    fn turn(&mut self) -> usize {
        let before = self.sink.reports;
        self.fabric.progress(&mut self.sink);
        self.other.progress(&mut self.other_sink);
        self.sink.reports - before
    }

    fn turns(&mut self, count: usize) {
        for _ in 0..count {
            self.turn();
        }
    }

    /// As a progress thread: until the fabric lets it sleep, and copy threads have nothing to do.
    fn settle(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while Instant::now() < deadline {
            let any = self.turn() > 0;
            if !any && self.fabric.arm() == Armed::Idle {
                if self.copies == 0 || self.sink.closed.len() == 2 {
                    return;
                }
                let fds = self.fabric.event_fds();
                let mut fds: Vec<PollFd<'_>> = fds
                    .iter()
                    .flatten()
                    .map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN))
                    .collect();
                let moment = Timespec {
                    tv_sec: 0,
                    tv_nsec: 10_000_000,
                };
                // Nothing comes if what is left outlasts the close.
                if poll(&mut fds, Some(&moment)).unwrap() == 0 {
                    return;
                }
            }
        }
        panic!("busy for ever");
    }

    /// Until both endpoints are closed: nothing outlasts what was done for that. However long copy threads
    /// wait for a processor.
    fn settle_for_good(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while self.sink.closed.len() < 2 {
            assert!(Instant::now() < deadline, "closed: {:?}", self.sink.closed);
            self.settle();
        }
    }

    fn arrive(&mut self, bytes: &[u8]) {
        let mut buffer = SendBuffer::new(SEGMENT);
        buffer.bytes[..bytes.len()].copy_from_slice(bytes);
        buffer.filled = bytes.len();
        let posted = self.other.send(EndpointId(99), buffer);
        assert!(matches!(posted, Ok(Posted::Done(_))));
    }

    fn bytes(&self, number: u64) -> Vec<u8> {
        let mut out = vec![0; READ as usize];
        self.ours.read_at(number * READ, &mut out).unwrap();
        out
    }
}

fn always(fault: Fault) -> FaultRates {
    FaultRates::none().with(fault, 1000)
}

const E: EndpointId = EndpointId(1);

#[test]
fn without_faults_it_is_the_fabric_inside() {
    let mut bench = Bench::new(1, FaultRates::none());
    assert_eq!(bench.send(E, 7), "done");
    let (number, posted) = bench.read(E);
    assert_eq!(posted, "pending");
    bench.arrive(b"segment");
    bench.settle();
    assert_eq!(bench.other_sink.segments, [[7; 4]]);
    assert_eq!(bench.sink.segments, [b"segment"]);
    assert_eq!(bench.sink.ended, [(ReadToken(0), Ok(()))]);
    assert_eq!(bench.bytes(number.unwrap()), [0x11; READ as usize]);
    bench.fabric.close(E);
    bench.settle();
    assert!(bench.sink.closed.contains(&E));
    assert_eq!(bench.control.all_injected(), []);
}

#[test]
fn what_is_refused_reports_nothing() {
    let mut bench = Bench::new(2, always(Fault::SendRefused).with(Fault::ReadRefused, 1000));
    assert_eq!(bench.send(E, 7), "refused");
    assert_eq!(bench.read(E).1, "refused");
    bench.control.set_rates(
        always(Fault::ConnectRefused)
            .with(Fault::KeyRefused, 1000)
            .with(Fault::RegisterRefused, 1000),
    );
    let to = bench.other.addresses();
    assert!(bench.fabric.connect(EndpointId(5), &to).is_err());
    assert!(bench.fabric.import_key(E, &bench.their_key).is_err());
    assert!(bench.fabric.register(&memory()).is_err());
    bench.settle();
    assert_eq!(bench.sink.reports, 0);
}

#[test]
fn what_is_stuck_ends_with_its_endpoint() {
    let rates = always(Fault::SendStuck).with(Fault::ReadStuck, 1000);
    let mut bench = Bench::new(3, rates);
    for byte in 0..8 {
        assert_eq!(bench.send(E, byte), "pending");
        assert_eq!(bench.read(E).1, "pending");
    }
    bench.settle();
    assert_eq!(bench.sink.reports, 0);
    let arrived = bench.other_sink.segments.len();
    assert!((1..8).contains(&arrived), "{arrived} of 8 arrived");
    bench.fabric.close(E);
    bench.settle();
    assert_eq!((bench.sink.sent.len(), bench.sink.ended.len()), (8, 8));
    assert!(bench.sink.sent.iter().all(Result::is_err));
    assert!(bench.sink.ended.iter().all(|(_, result)| result.is_err()));
    assert!(bench.sink.closed.contains(&E));
}

#[test]
fn the_end_of_the_fabric_ends_everything() {
    let rates = always(Fault::SendStuck)
        .with(Fault::ReadStuck, 1000)
        .with(Fault::CloseDelayed, 1000);
    let mut bench = Bench::new(4, rates);
    for endpoint in [EndpointId(1), EndpointId(2)] {
        bench.send(endpoint, 1);
        bench.read(endpoint);
    }
    bench.control.stall();
    bench.read(E);
    bench.fabric.close(E);
    bench.fabric.shutdown(&mut bench.sink, Instant::now());
    assert_eq!(bench.sink.closed.len(), 2);
    assert_eq!((bench.sink.sent.len(), bench.sink.ended.len()), (2, 3));
}

#[test]
fn lost_and_failed_sends_and_reads() {
    let mut bench = Bench::new(5, always(Fault::SendLost));
    let posted: HashSet<_> = (0..16).map(|byte| bench.send(E, byte)).collect();
    assert_eq!(posted, HashSet::from(["done", "pending"]));
    bench.settle();
    assert!(bench.sink.sent.iter().all(Result::is_ok));
    assert_eq!(bench.other_sink.segments.len(), 0);
    let rates = always(Fault::SendFailed).with(Fault::ReadFailed, 1000);
    bench.control.set_rates(rates);
    bench.sink.sent.clear();
    for byte in 0..16 {
        bench.send(E, byte);
        bench.read(E);
    }
    bench.settle();
    assert_eq!((bench.sink.sent.len(), bench.sink.ended.len()), (16, 16));
    assert!(bench.sink.sent.iter().all(Result::is_err));
    assert!(bench.sink.ended.iter().all(|(_, result)| result.is_err()));
    let arrived = bench.other_sink.segments.len();
    assert!((1..16).contains(&arrived), "{arrived} of 16 arrived");
    let written = (0..16).filter(|&n| bench.bytes(n)[0] == 0x11).count();
    assert!((1..16).contains(&written), "{written} of 16 written");
}

#[test]
fn an_empty_read_succeeds_and_writes_nothing() {
    let mut bench = Bench::new(6, always(Fault::ReadEmpty));
    let posted: HashSet<_> = (0..16).map(|_| bench.read(E).1).collect();
    assert_eq!(posted, HashSet::from(["done", "pending"]));
    bench.settle();
    assert!(bench.sink.ended.iter().all(|(_, result)| result.is_ok()));
    assert!((0..16).all(|number| bench.bytes(number) == [0; READ as usize]));
    assert_eq!(bench.control.injected(Fault::ReadEmpty), 16);
}

#[test]
fn what_is_delayed_keeps_the_thread_awake_and_comes() {
    let rates = always(Fault::SendDelayed)
        .with(Fault::ReadDelayed, 1000)
        .with(Fault::SegmentDelayed, 1000);
    let mut bench = Bench::new(7, rates);
    for byte in 0..8 {
        assert_eq!(bench.send(E, byte), "pending");
        assert_eq!(bench.read(E).1, "pending");
        bench.arrive(&[byte]);
    }
    bench.turn();
    assert_eq!(bench.fabric.arm(), Armed::Busy);
    bench.settle();
    assert_eq!(bench.other_sink.segments.len(), 8);
    assert!(bench.sink.sent.iter().all(Result::is_ok));
    assert!((0..8).all(|number| bench.bytes(number) == [0x11; READ as usize]));
    let arrived: Vec<_> = bench.sink.segments.concat();
    assert_eq!(arrived, [0, 1, 2, 3, 4, 5, 6, 7], "late, and in order");
}

#[test]
fn segments_are_lost_repeated_and_overtaken() {
    let mut bench = Bench::new(8, always(Fault::SegmentLost));
    bench.arrive(b"lost");
    bench.settle();
    assert_eq!(bench.sink.segments.len(), 0);
    bench.control.set_rates(always(Fault::SegmentDuplicated));
    bench.arrive(b"twice");
    bench.settle();
    assert_eq!(bench.sink.segments, [b"twice", b"twice"]);
    bench.sink.segments.clear();
    bench
        .control
        .set_rates(FaultRates::none().with(Fault::SegmentReordered, 500));
    for byte in 0..64 {
        bench.arrive(&[byte]);
    }
    bench.settle();
    let mut arrived: Vec<u8> = bench.sink.segments.concat();
    assert!(!arrived.is_sorted());
    arrived.sort_unstable();
    assert!(arrived.into_iter().eq(0..64));
}

fn a_segment(body: SegmentBody) -> Vec<u8> {
    let id = Incarnation::from_bytes([1; 16]).unwrap();
    let header = SegmentHeader {
        source: id,
        destination: id,
        connection: 1,
        sequence: 5,
        body,
    };
    let mut bytes = vec![0; SEGMENT_HEADER_BYTES + 32];
    header.write(bytes.first_chunk_mut().unwrap());
    Segment::parse(&bytes).unwrap();
    bytes
}

#[test]
fn garbling_spares_the_payload_and_corruption_spares_everything_else() {
    let transfer = TransferId {
        slot: 1,
        generation: 1,
    };
    let data = a_segment(SegmentBody::Data {
        transfer,
        offset: 0,
    });
    let message = a_segment(SegmentBody::Message {
        message_bytes: 32,
        offset: 0,
    });
    let mut bench = Bench::new(9, always(Fault::SegmentGarbled));
    for _ in 0..64 {
        bench.arrive(&data);
    }
    bench.settle();
    for garbled in std::mem::take(&mut bench.sink.segments) {
        if garbled.len() == data.len() {
            assert_eq!(
                garbled[SEGMENT_HEADER_BYTES..],
                data[SEGMENT_HEADER_BYTES..]
            );
        } else {
            assert_eq!(garbled, data[..garbled.len()]);
        }
    }
    bench.control.set_rates(always(Fault::SegmentCorrupted));
    bench.arrive(&message);
    bench.arrive(&data);
    bench.settle();
    assert_eq!(bench.sink.segments[0], message);
    assert_eq!(bench.control.injected(Fault::SegmentCorrupted), 1);
    let changed = bench.sink.segments[1].iter().zip(&data);
    let bits: Vec<u32> = changed.map(|(a, b)| (a ^ b).count_ones()).collect();
    assert_eq!(bits.iter().sum::<u32>(), 1);
    assert_eq!(bits[..SEGMENT_HEADER_BYTES].iter().sum::<u32>(), 0);
}

#[test]
fn endpoints_fail_once_and_are_closed_afterwards() {
    let mut bench = Bench::new(10, always(Fault::EndpointFailed));
    for byte in 0..4 {
        bench.send(E, byte);
    }
    bench.control.fail_endpoint(EndpointId(2));
    bench.control.fail_endpoint(EndpointId(77));
    bench.settle();
    let both = HashSet::from([EndpointId(1), EndpointId(2)]);
    assert_eq!(bench.sink.failed, both);
    bench.fabric.close(E);
    bench.control.fail_endpoint(E);
    bench.settle();
    assert_eq!(bench.sink.closed, HashSet::from([E]));
}

#[test]
fn a_stall_lets_the_thread_sleep_and_its_end_wakes_it() {
    let mut bench = Bench::new(11, FaultRates::none());
    bench.control.stall();
    assert_eq!(bench.send(E, 1), "pending");
    assert_eq!(bench.read(E).1, "pending");
    bench.arrive(b"held");
    bench.settle();
    assert_eq!(bench.sink.reports + bench.other_sink.reports, 0);
    let readable = |bench: &Bench| {
        let [Some(events), None, None] = bench.fabric.event_fds() else {
            panic!("one descriptor");
        };
        let mut fds = [PollFd::from_borrowed_fd(events, PollFlags::IN)];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        poll(&mut fds, Some(&now)).unwrap() == 1
    };
    assert!(!readable(&bench));
    bench.control.release();
    assert!(readable(&bench));
    bench.settle();
    assert!(!readable(&bench));
    assert_eq!(bench.sink.segments, [b"held"]);
    assert_eq!((bench.sink.sent.len(), bench.sink.ended.len()), (1, 1));
    assert_eq!(bench.other_sink.segments.len(), 1);
    bench.arrive(b"wakes too");
    assert!(readable(&bench));
}

#[test]
fn the_stall_of_an_endpoint_leaves_the_others_alone_and_ends_with_it() {
    let mut bench = Bench::new(12, FaultRates::none());
    bench.control.stall_endpoint(E);
    assert_eq!(bench.send(E, 1), "pending");
    assert_eq!(bench.send(EndpointId(2), 2), "done");
    let (number, _) = bench.read(E);
    bench.arrive(b"segment");
    bench.settle();
    assert_eq!(bench.sink.segments, [b"segment"]);
    bench.fabric.close(E);
    bench.settle();
    assert!(bench.sink.closed.contains(&E));
    assert_eq!(bench.bytes(number.unwrap()), [0; READ as usize]);
    assert_eq!(bench.other_sink.segments, [[2; 4]]);
}

#[test]
fn progress_in_parts_reports_one_thing_per_call() {
    let mut rates = FaultRates::none();
    rates.one_report = true;
    let mut bench = Bench::new(13, rates);
    for byte in 0..8 {
        bench.arrive(&[byte]);
        bench.read(E);
    }
    let mut total = 0;
    while bench.fabric.arm() == Armed::Busy {
        let reports = bench.turn();
        assert!(reports <= 1);
        total += reports;
    }
    assert_eq!(total, 16);
}

/// The fate of an operation depends on the seed and its number, whatever happens around it.
#[test]
fn a_seed_is_a_schedule() {
    let rates = FaultRates::none()
        .with(Fault::SendRefused, 300)
        .with(Fault::SendStuck, 300);
    let fates = |seed, others: bool| {
        let mut bench = Bench::new(seed, rates.with(Fault::SegmentLost, 500));
        (0..100)
            .map(|byte| {
                if others {
                    bench.read(E);
                    bench.arrive(b"segment");
                    bench.turn();
                }
                bench.send(E, byte)
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(fates(1, false), fates(1, true));
    assert_ne!(fates(1, false), fates(2, false));
    // A rate that changes on the way leaves what comes later alone.
    let mut bench = Bench::new(1, FaultRates::none());
    let first: Vec<_> = (0..50).map(|byte| bench.send(E, byte)).collect();
    assert_eq!(first, ["done"; 50]);
    bench.control.set_rates(rates);
    let later: Vec<_> = (50..100).map(|byte| bench.send(E, byte)).collect();
    assert_eq!(later, fates(1, false)[50..]);
}

#[derive(Clone, Debug)]
enum Step {
    Send(u64, u8),
    Read(u64),
    Copy(u64),
    Arrive,
    Turn,
    Close(u64),
    Stall,
    StallEndpoint(u64),
    Release,
    Fail(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let endpoint = 1..=2_u64;
    prop_oneof![
        6 => (endpoint.clone(), any::<u8>()).prop_map(|(e, byte)| Step::Send(e, byte)),
        6 => endpoint.clone().prop_map(Step::Read),
        6 => endpoint.clone().prop_map(Step::Copy),
        3 => Just(Step::Arrive),
        6 => Just(Step::Turn),
        1 => endpoint.clone().prop_map(Step::Close),
        1 => Just(Step::Stall),
        1 => endpoint.clone().prop_map(Step::StallEndpoint),
        2 => Just(Step::Release),
        1 => endpoint.prop_map(Step::Fail),
    ]
}

fn rates() -> impl Strategy<Value = FaultRates> {
    let some = (0..Fault::ALL.len(), 1..400_u16);
    let faults = prop::collection::vec(some, 0..8);
    (faults, 1..40_u32, any::<bool>()).prop_map(|(faults, max_delay, one_report)| {
        let mut rates = FaultRates::none();
        for (fault, rate) in faults {
            rates = rates.with(Fault::ALL[fault], rate);
        }
        rates.max_delay = max_delay;
        rates.one_report = one_report;
        rates
    })
}

proptest! {
    /// The recorder asserts on every report; what is left is that everything ends, that success
    /// means bytes, and that memory is quiet after its report.
    #[test]
    fn the_contract_holds_under_any_schedule(
        seed: u64,
        rates in rates(),
        steps in prop::collection::vec(step(), 1..60),
        by_shutdown: bool,
    ) {
        let mut bench = Bench::new(seed, rates);
        let mut closed = HashSet::new();
        let mut seen = 0;
        for step in steps {
            let open = |endpoint| (!closed.contains(&endpoint)).then_some(EndpointId(endpoint));
            match step {
                Step::Send(e, byte) => if let Some(e) = open(e) { bench.send(e, byte); },
                Step::Read(e) => if let Some(e) = open(e) {
                    let (number, posted) = bench.read(e);
                    if let (Some(number), "done") = (number, posted) {
                        bench.ours.fill(number * READ, READ, 0x77).unwrap();
                    }
                },
                Step::Copy(e) => if let Some(e) = open(e) { bench.copy(e); },
                Step::Arrive => bench.arrive(b"some segment"),
                Step::Turn => { bench.turn(); }
                Step::Close(e) => if open(e).is_some() {
                    closed.insert(e);
                    bench.fabric.close(EndpointId(e));
                },
                Step::Stall => bench.control.stall(),
                Step::StallEndpoint(e) => bench.control.stall_endpoint(EndpointId(e)),
                Step::Release => bench.control.release(),
                Step::Fail(e) => bench.control.fail_endpoint(EndpointId(e)),
            }
            let empty = rates.rate(Fault::ReadEmpty) + rates.rate(Fault::CopyEmpty) > 0;
            for (token, result) in &bench.sink.ended[seen..] {
                let bytes = bench.bytes(token.0);
                prop_assert!(result.is_err() || empty || bytes == [0x11; READ as usize]);
                // The memory has a new owner.
                bench.ours.fill(token.0 * READ, READ, 0x77).unwrap();
            }
            seen = bench.sink.ended.len();
        }
        if by_shutdown {
            // Copies end by themselves; there is time for that.
            let deadline = Instant::now() + Duration::from_secs(30);
            prop_assert!(bench.fabric.shutdown(&mut bench.sink, deadline));
        } else {
            for endpoint in [1, 2] {
                if closed.insert(endpoint) {
                    bench.fabric.close(EndpointId(endpoint));
                }
            }
            // Whatever is stalled: a close ends it, or else a reset does, at the second try at the latest.
            bench.settle();
            bench.control.set_rates(FaultRates::none());
            bench.fabric.reset(&mut bench.sink).unwrap();
            bench.settle_for_good();
        }
        prop_assert_eq!(bench.sink.closed.len(), 2);
        for (token, _) in &bench.sink.ended[..seen] {
            prop_assert_eq!(bench.bytes(token.0), [0x77; READ as usize]);
        }
        bench.turns(3);
    }
}

//! A peer that says what it likes: a bare fabric, without an engine.

use std::collections::VecDeque;
use std::time::Instant;

use kvferry_engine::fabric::{CopyEnd, EndpointId, Posted, ReadToken, SendBuffer, Sink};
use kvferry_engine::wire::{
    Description, EngineId, Hello, HelloReply, Incarnation, Message, Rank, RegionSet,
    SEGMENT_HEADER_BYTES, Segment, SegmentBody, SegmentHeader, encode_ping,
};
use kvferry_engine::{Fabric, FabricError, UcxFabric, UcxOptions};
use kvferry_tests::harness::PATIENCE;

/// Segments that may be on their way at once.
const WINDOW: usize = 64;
/// Bytes of a message in one segment.
const PIECE: usize = 4000;

#[derive(Default)]
struct Heard {
    segments: Vec<Vec<u8>>,
    ended: usize,
    failed: Vec<EndpointId>,
}

impl Sink for Heard {
    fn segment(&mut self, bytes: &[u8]) {
        self.segments.push(bytes.to_vec());
    }
    fn sent(&mut self, _: EndpointId, _: SendBuffer, _: Result<(), FabricError>) {
        self.ended += 1;
    }
    fn read_done(&mut self, _: ReadToken, _: Result<(), FabricError>) {}
    fn copy_done(&mut self, _: ReadToken, _: CopyEnd) {}
    fn endpoint_failed(&mut self, endpoint: EndpointId, _: FabricError) {
        self.failed.push(endpoint);
    }
    fn closed(&mut self, _: EndpointId) {}
    fn protocol_error(&mut self, what: &'static str) {
        panic!("{what}");
    }
}

pub(crate) struct Intruder {
    fabric: UcxFabric,
    pub(crate) me: Incarnation,
    /// Who is bothered.
    target: Description,
    /// Whether the endpoint of this number is open.
    endpoint: (EndpointId, bool),
    in_flight: usize,
    /// The connection that segments belong to, and the next of them.
    connection: u32,
    sequence: u64,
    heard: VecDeque<Vec<u8>>,
}

impl Intruder {
    pub(crate) fn new(target: Description) -> Self {
        let options = UcxOptions {
            allow_emulation: true,
            ..UcxOptions::default()
        };
        Self {
            fabric: UcxFabric::new(&options).unwrap(),
            me: Incarnation::random().unwrap(),
            target,
            endpoint: (EndpointId(0), false),
            in_flight: 0,
            connection: 0,
            sequence: 0,
            heard: VecDeque::new(),
        }
    }

    pub(crate) fn progress(&mut self) {
        let mut heard = Heard::default();
        if !self.fabric.progress(&mut heard) {
            std::thread::yield_now();
        }
        self.in_flight -= heard.ended;
        self.heard.extend(heard.segments);
        for failed in heard.failed {
            self.fabric.close(failed);
            self.endpoint.1 &= failed != self.endpoint.0;
        }
    }

    /// Sends a segment that is nothing but these bytes. The endpoint is made anew if it has failed.
    pub(crate) fn raw(&mut self, bytes: &[u8]) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            assert!(Instant::now() < deadline, "nothing can be sent");
            while self.in_flight >= WINDOW {
                assert!(Instant::now() < deadline, "nothing is taken");
                self.progress();
            }
            if !self.endpoint.1 {
                self.endpoint = (EndpointId(self.endpoint.0.0 + 1), true);
                let to = &self.target.addresses;
                self.fabric.connect(self.endpoint.0, to).unwrap();
            }
            match self
                .fabric
                .send(self.endpoint.0, SendBuffer::holding(bytes))
            {
                Ok(Posted::Done(_)) => return,
                Ok(Posted::Pending) => {
                    self.in_flight += 1;
                    return;
                }
                // Its failure is reported, or its end.
                Err(_) => self.progress(),
            }
        }
    }

    /// Waits until everything has been sent.
    pub(crate) fn flush(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        while self.in_flight > 0 {
            assert!(Instant::now() < deadline, "nothing is taken");
            self.progress();
        }
        self.heard.clear();
    }

    /// Goes on as another connection, on which nothing has been said.
    pub(crate) fn begin(&mut self) {
        self.connection += 1;
        self.sequence = 0;
    }

    /// Leaves out this many segments.
    pub(crate) fn skip(&mut self, segments: u64) {
        self.sequence = self.sequence.wrapping_add(segments);
    }

    /// Sends the next segment of the connection.
    pub(crate) fn segment(&mut self, body: SegmentBody, payload: &[u8]) {
        let header = SegmentHeader {
            source: self.me,
            destination: self.target.incarnation,
            connection: self.connection,
            sequence: self.sequence,
            body,
        };
        let mut head = [0; SEGMENT_HEADER_BYTES];
        header.write(&mut head);
        // Nobody counts a segment of nothing.
        let counts = u64::from(!payload.is_empty());
        self.sequence = self.sequence.wrapping_add(counts);
        self.raw(&[&head, payload].concat());
    }

    /// Sends a message, whole if it is short.
    pub(crate) fn message(&mut self, message: &[u8]) {
        let total = message.len() as u32;
        if message.is_empty() {
            self.piece(total, 0, message);
        }
        for (n, payload) in message.chunks(PIECE).enumerate() {
            self.piece(total, (n * PIECE) as u32, payload);
        }
    }

    /// Sends a message that fits one segment, after a change to the segment.
    pub(crate) fn changed(&mut self, message: &[u8], change: impl FnOnce(&mut [u8])) {
        let header = SegmentHeader {
            source: self.me,
            destination: self.target.incarnation,
            connection: self.connection,
            sequence: self.sequence,
            body: SegmentBody::Message {
                message_bytes: message.len() as u32,
                offset: 0,
            },
        };
        let mut head = [0; SEGMENT_HEADER_BYTES];
        header.write(&mut head);
        let mut segment = [&head, message].concat();
        change(&mut segment);
        self.raw(&segment);
    }

    /// Sends what it says is a piece of a message.
    pub(crate) fn piece(&mut self, message_bytes: u32, offset: u32, payload: &[u8]) {
        let body = SegmentBody::Message {
            message_bytes,
            offset,
        };
        self.segment(body, payload);
    }

    /// A right greeting.
    pub(crate) fn hello(&self) -> Hello {
        let from = Description {
            engine: EngineId::new("intruder").unwrap(),
            incarnation: self.me,
            rank: Rank::default(),
            addresses: self.fabric.addresses(),
            regions: Vec::new(),
            tables: Vec::new(),
            unix_socket: None,
            ..self.target.clone()
        };
        Hello {
            expects: self.target.incarnation,
            from,
            withdrawn: RegionSet::default(),
        }
    }

    /// Becomes a peer, on another connection: also of UCX, which keeps a socket on both sides until both
    /// have closed it.
    pub(crate) fn greet(&mut self) {
        let hello = kvferry_engine::wire::encode_hello(&self.hello()).unwrap();
        let deadline = Instant::now() + PATIENCE;
        loop {
            if std::mem::take(&mut self.endpoint.1) {
                self.fabric.close(self.endpoint.0);
            }
            self.begin();
            self.message(&hello);
            let (endpoint, ours) = (self.endpoint, self.connection);
            loop {
                assert!(
                    Instant::now() < deadline,
                    "a right greeting is not answered"
                );
                let accepted = |message: Message<'_>| {
                    matches!(message, Message::HelloReply(HelloReply::Accepted { connection, .. })
                        if connection == ours)
                };
                if self.hears(accepted) {
                    return;
                }
                // The greeting may have gone with it.
                if self.endpoint != endpoint {
                    break;
                }
            }
        }
    }

    /// Waits until a peer's question is answered.
    pub(crate) fn is_answered(&mut self) {
        let token = u64::from(self.connection) << 32 | self.sequence;
        self.message(&encode_ping(token));
        let deadline = Instant::now() + PATIENCE;
        while !self.hears(|message| matches!(message, Message::Pong { token: got } if got == token))
        {
            assert!(Instant::now() < deadline, "the connection is gone");
        }
    }

    /// Waits until a greeting on this connection is refused.
    pub(crate) fn is_refused(&mut self) {
        let ours = self.connection;
        let deadline = Instant::now() + PATIENCE;
        let refused = |message: Message<'_>| {
            matches!(message, Message::HelloReply(HelloReply::Rejected { connection, .. })
                if connection == ours)
        };
        while !self.hears(refused) {
            assert!(Instant::now() < deadline, "a greeting is not refused");
        }
    }

    /// Takes what has arrived, up to a message of interest.
    fn hears(&mut self, interest: impl Fn(Message<'_>) -> bool) -> bool {
        self.progress();
        while let Some(bytes) = self.heard.pop_front() {
            let segment = Segment::parse(&bytes).unwrap();
            let whole = matches!(segment.header.body, SegmentBody::Message { .. });
            if whole && Message::parse(segment.payload).is_ok_and(&interest) {
                return true;
            }
        }
        false
    }
}

//! A peer that speaks the protocol and means harm, made of a bare fabric.

use std::collections::VecDeque;
use std::time::Instant;

use kvferry_engine::fabric::{CopyEnd, EndpointId, ReadToken, SendBuffer, Sink};
use kvferry_engine::wire::{
    Description, HelloReply, Incarnation, Message, RegionRange, RegionSet, SEGMENT_HEADER_BYTES,
    Segment, SegmentBody, SegmentHeader, TransferId, encode_hello_reply, encode_withdraw,
    encode_withdrawn,
};
use kvferry_engine::{
    BlockPair, Engine, Fabric, FabricError, LaneChoice, LoopbackFabric, LoopbackNetwork, Peer,
    Transfer, TransferError,
};

use crate::support::*;

#[derive(Default)]
struct Heard(Vec<Vec<u8>>);

impl Sink for Heard {
    fn segment(&mut self, bytes: &[u8]) {
        self.0.push(bytes.to_vec());
    }
    fn sent(&mut self, _: EndpointId, _: SendBuffer, _: Result<(), FabricError>) {}
    fn read_done(&mut self, _: ReadToken, _: Result<(), FabricError>) {}
    fn copy_done(&mut self, _: ReadToken, _: CopyEnd) {}
    fn endpoint_failed(&mut self, _: EndpointId, _: FabricError) {}
    fn closed(&mut self, _: EndpointId) {}
    fn protocol_error(&mut self, what: &'static str) {
        panic!("{what}");
    }
}

const TO_ENGINE: EndpointId = EndpointId(1);

/// The peer's side of one connection.
struct Hostile {
    fabric: LoopbackFabric,
    me: Incarnation,
    engine: Incarnation,
    sequence: u64,
    /// Segments that nobody was interested in yet.
    heard: VecDeque<Vec<u8>>,
}

impl Hostile {
    /// The next segment from the engine that carries a whole message of interest.
    fn hear<T>(&mut self, interest: impl Fn(&SegmentHeader, Message<'_>) -> Option<T>) -> T {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let mut heard = Heard::default();
            self.fabric.progress(&mut heard);
            self.heard.extend(heard.0);
            while let Some(bytes) = self.heard.pop_front() {
                let segment = Segment::parse(&bytes).unwrap();
                let message = Message::parse(segment.payload).unwrap();
                if let Some(found) = interest(&segment.header, message) {
                    return found;
                }
            }
            assert!(Instant::now() < deadline, "the engine says nothing");
            std::thread::yield_now();
        }
    }

    fn say(&mut self, body: SegmentBody, payload: &[u8]) {
        let header = SegmentHeader {
            source: self.me,
            destination: self.engine,
            connection: 1,
            sequence: self.sequence,
            body,
        };
        let mut head = [0; SEGMENT_HEADER_BYTES];
        header.write(&mut head);
        self.sequence += 1;
        let buffer = SendBuffer::holding(&[&head[..], payload].concat());
        self.fabric.send(TO_ENGINE, buffer).unwrap();
    }

    fn message(&mut self, message: &[u8]) {
        const PIECE: usize = 4000;
        for (n, piece) in message.chunks(PIECE).enumerate() {
            let body = SegmentBody::Message {
                message_bytes: message.len() as u32,
                offset: (n * PIECE) as u32,
            };
            self.say(body, piece);
        }
    }

    fn data(&mut self, transfer: TransferId, offset: u64, payload: &[u8]) {
        self.say(SegmentBody::Data { transfer, offset }, payload);
    }
}

/// An engine that reads 4 blocks of 64 bytes from a hostile peer, and the peer.
fn reading() -> (Side, Peer, Transfer, Hostile, TransferId) {
    let network = LoopbackNetwork::new();
    let kind = Kind::Loopback(network.clone());
    let consumer = side(engine(&kind, "consumer"), 1, 8, 64, 0);
    consumer.memory.fill(0, 512, 0xEE).unwrap();
    let mut hostile = Hostile {
        fabric: LoopbackFabric::new(&network, 4096).unwrap(),
        me: Incarnation::random().unwrap(),
        engine: consumer.engine.incarnation(),
        sequence: 0,
        heard: VecDeque::new(),
    };
    let description = Description {
        incarnation: hostile.me,
        engine: kvferry_engine::wire::EngineId::new("hostile").unwrap(),
        addresses: hostile.fabric.addresses(),
        ..consumer.engine.describe().unwrap()
    };
    let to_engine = consumer.engine.describe().unwrap().addresses;
    hostile.fabric.connect(TO_ENGINE, &to_engine).unwrap();
    let connecting = {
        let engine = consumer.engine.clone();
        std::thread::spawn(move || engine.connect(description, LaneChoice::Auto).unwrap())
    };
    let connection = hostile
        .hear(|header, message| matches!(message, Message::Hello(_)).then_some(header.connection));
    let accepted = encode_hello_reply(&HelloReply::Accepted {
        incarnation: hostile.me,
        connection,
        withdrawn: RegionSet::default(),
    })
    .unwrap();
    let whole = SegmentBody::Message {
        message_bytes: accepted.len() as u32,
        offset: 0,
    };
    hostile.say(whole, &accepted);
    let peer = connecting.join().unwrap();
    // It describes a native lane; the reads here are served ones.
    let engine: &Engine = &consumer.engine;
    let served = LaneChoice::Pinned(kvferry_engine::Lane::Served);
    let peer = engine.connect(peer.description().clone(), served).unwrap();
    let pairs: Vec<BlockPair> = (0..4).map(|n| BlockPair::new(n, n)).collect();
    let transfer = peer.read(&with_tables(&consumer, &peer), &pairs).unwrap();
    let id = hostile.hear(|_, message| match message {
        Message::Read(request) => Some(request.transfer()),
        _ => None,
    });
    (consumer, peer, transfer, hostile, id)
}

fn is_broken_off(consumer: &Side, peer: &Peer, transfer: &Transfer, why: &str) {
    let error = transfer.wait(PATIENCE).unwrap().unwrap_err();
    assert!(
        matches!(&error, TransferError::Protocol(what) if what.contains(why)),
        "{error}"
    );
    // The transfer ends a moment before its peer.
    until("the loss", || peer.gone().is_some());
    assert!(peer.gone().unwrap().contains(why), "{:?}", peer.gone());
    assert_eq!(consumer.engine.counters().transfers_succeeded, 0);
    assert!(consumer.engine.describe().is_ok(), "the engine lives");
}

#[test]
fn the_same_part_twice_is_not_the_whole() {
    let (consumer, peer, transfer, mut hostile, id) = reading();
    hostile.data(id, 0, &[1; 128]);
    hostile.data(id, 0, &[1; 128]);
    is_broken_off(&consumer, &peer, &transfer, "twice");
}

#[test]
fn bytes_behind_the_end_go_nowhere() {
    let (consumer, peer, transfer, mut hostile, id) = reading();
    hostile.data(id, 200, &[1; 64]);
    is_broken_off(&consumer, &peer, &transfer, "offset 200");
    for block in 0..8 {
        assert_eq!(consumer.block(0, block), [0xEE; 64]);
    }
}

#[test]
fn bytes_for_a_transfer_that_is_not_there_are_dropped() {
    let (consumer, _peer, transfer, mut hostile, id) = reading();
    let later = TransferId {
        generation: id.generation + 1,
        ..id
    };
    let elsewhere = TransferId {
        slot: id.slot + 9,
        ..id
    };
    hostile.data(later, 0, &[1; 256]);
    hostile.data(elsewhere, 0, &[1; 256]);
    // In any order and in pieces that keep to no block, the right ones make the whole.
    hostile.data(id, 100, &[3; 156]);
    hostile.data(id, 0, &[2; 100]);
    let report = transfer.wait(PATIENCE).unwrap().unwrap();
    assert_eq!((report.bytes, report.operations), (256, 1));
    let mut bytes = [0; 512];
    consumer.memory.read_at(0, &mut bytes).unwrap();
    let expected = [vec![2; 100], vec![3; 156], vec![0xEE; 256]].concat();
    assert_eq!(bytes.as_slice(), expected);
    assert_eq!(consumer.engine.counters().segments_dropped, 2);
}

#[test]
fn a_segment_that_never_comes_costs_the_connection() {
    let (consumer, peer, transfer, mut hostile, id) = reading();
    hostile.sequence += 1;
    hostile.data(id, 0, &[1; 128]);
    until("the loss", || peer.gone().is_some());
    assert_eq!(peer.gone(), Some("a segment of it is missing"));
    transfer.wait(PATIENCE).unwrap().unwrap_err();
    assert!(consumer.engine.describe().is_ok(), "the engine lives");
}

/// Withdrawals that name everything, again and again, and answers to questions that nobody asked.
#[test]
fn withdrawals_without_sense_cost_nothing() {
    let (consumer, peer, transfer, mut hostile, id) = reading();
    let all = RegionSet::from_ranges(vec![RegionRange {
        first: 0,
        last: u32::MAX,
    }])
    .unwrap();
    for _ in 0..200 {
        hostile.message(&encode_withdraw(&all).unwrap());
        hostile.message(&encode_withdrawn(&all).unwrap());
    }
    let answered = hostile.hear(|_, message| match message {
        Message::Withdrawn(regions) => Some(regions),
        _ => None,
    });
    assert_eq!(answered, all);
    // The stream that was asked for before goes on: the peer itself reads for it.
    hostile.data(id, 0, &[1; 256]);
    assert_eq!(transfer.wait(PATIENCE).unwrap().unwrap().bytes, 256);
    let error = peer
        .read(&with_tables(&consumer, &peer), &[BlockPair::new(0, 0)])
        .unwrap_err();
    assert!(error.to_string().contains("withdrawn region 0"), "{error}");
    let Side {
        engine, _region, ..
    } = consumer;
    // Our own is still asked for, and answered by who was asked.
    let giving_up = std::thread::spawn(move || _region.deregister(PATIENCE));
    let asked = hostile.hear(|_, message| match message {
        Message::Withdraw(regions) => Some(regions),
        _ => None,
    });
    hostile.message(&encode_withdrawn(&asked).unwrap());
    giving_up.join().unwrap().unwrap();
    assert_eq!(engine.counters().peers_lost, 0);
}

/// No engine leaves so many gaps; remembering them would cost memory without end.
#[test]
fn a_peer_that_withdraws_in_too_many_pieces_is_lost() {
    let (consumer, peer, _transfer, mut hostile, _) = reading();
    for part in 0..4_u32 {
        let ids = (0..4000).map(|n| 2 * (part * 4000 + n));
        hostile.message(&encode_withdraw(&ids.collect()).unwrap());
    }
    until("the loss", || peer.gone().is_some());
    assert!(peer.gone().unwrap().contains("ranges"), "{:?}", peer.gone());
    assert!(consumer.engine.describe().is_ok(), "the engine lives");
}

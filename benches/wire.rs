//! What a read request and a segment header cost on the wire's side.
#![allow(missing_docs, clippy::unwrap_used)]

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kvferry_wire::{
    BlockRun, Incarnation, Message, SEGMENT_HEADER_BYTES, Segment, SegmentBody, SegmentHeader,
    TransferId, encode_read,
};
use std::hint::black_box;

const RUNS: u32 = 100_000;

fn requests(c: &mut Criterion) {
    let transfer = TransferId {
        slot: 1,
        generation: 1,
    };
    let runs = || {
        (0..RUNS).map(|n| BlockRun {
            first: n * 3,
            count: 1,
        })
    };
    let message = encode_read(
        transfer,
        &[0, 1, 2, 3],
        runs().collect::<Vec<_>>().into_iter(),
    );
    let message = message.unwrap();
    let mut group = c.benchmark_group("read request of 100,000 runs");
    group.throughput(Throughput::Elements(u64::from(RUNS)));
    let list: Vec<BlockRun> = runs().collect();
    group.bench_function("encode", |b| {
        b.iter(|| encode_read(transfer, &[0, 1, 2, 3], black_box(&list).iter().copied()).unwrap());
    });
    group.bench_function("parse", |b| {
        b.iter(|| Message::parse(black_box(&message)).is_ok());
    });
    group.finish();
}

fn segments(c: &mut Criterion) {
    let id = Incarnation::from_bytes([7; 16]).unwrap();
    let header = SegmentHeader {
        source: id,
        destination: id,
        connection: 1,
        sequence: 5,
        body: SegmentBody::Message {
            message_bytes: 64,
            offset: 0,
        },
    };
    let mut bytes = vec![0; SEGMENT_HEADER_BYTES + 64];
    c.bench_function("segment header, written and parsed", |b| {
        b.iter(|| {
            let (head, _) = bytes
                .split_first_chunk_mut::<SEGMENT_HEADER_BYTES>()
                .unwrap();
            black_box(&header).write(head);
            Segment::parse(&bytes).unwrap().header.sequence
        });
    });
}

criterion_group!(benches, requests, segments);
criterion_main!(benches);

//! Every value survives the way, and no bytes make a parser panic.

use std::collections::BTreeMap;

use crate::samples::demo_params;
use kvferry_wire::checksum::{encode_ask, encode_refused, encode_sums};
use kvferry_wire::demo::DEMO_BLOCK_UNIT;
use kvferry_wire::{
    Addresses, BlockRun, ChecksumMessage, DemoPlan, DemoReply, DemoRequest, DemoSummary,
    Description, DirectoryReply, DirectoryRequest, EngineId, Epoch, Gone, GroupBlock, Hello,
    HelloRejectCode, HelloReply, Incarnation, Instance, Interior, LeaseId, LeaseMessage,
    MemoryKind, Message, NoChecksums, Rank, ReadRejected, ReaderId, RegionDescription, RegionSet,
    RejectCode, RequestId, SEGMENT_HEADER_BYTES, Segment, SegmentBody, SegmentHeader,
    TableDescription, TransferId, UcxVersion, Verdict, directory::FRAME_HEADER_BYTES, encode_hello,
    encode_hello_reply, encode_read, encode_read_cancel, encode_read_rejected, encode_release,
    encode_released, encode_renew, encode_renewed, encode_service, encode_withdraw,
    encode_withdrawn,
};
use proptest::{collection::vec, option, prelude::*, sample::select};

use crate::{golden::check_of, roundtrip::CHECKS, samples};

fn incarnation() -> impl Strategy<Value = Incarnation> {
    (1..u128::MAX).prop_map(|id| Incarnation::from_bytes(id.to_le_bytes()).unwrap())
}

fn instance() -> impl Strategy<Value = Instance> {
    (1..u128::MAX).prop_map(|id| Instance::from_bytes(id.to_le_bytes()).unwrap())
}

fn epoch() -> impl Strategy<Value = Epoch> {
    (1..u64::MAX).prop_map(|epoch| Epoch::new(epoch).unwrap())
}

fn text() -> impl Strategy<Value = String> {
    "[^\\p{Cc}]{0,24}"
}

fn name() -> impl Strategy<Value = String> {
    "[^\\p{Cc}]{1,24}"
}

fn rank() -> impl Strategy<Value = Rank> {
    any::<(u16, u16)>().prop_map(|(pp, tp)| Rank { pp, tp })
}

fn lease() -> impl Strategy<Value = LeaseId> {
    (instance(), epoch(), name()).prop_map(|(instance, epoch, request)| LeaseId {
        instance,
        epoch,
        request: RequestId::new(request).unwrap(),
    })
}

fn reader() -> impl Strategy<Value = ReaderId> {
    (incarnation(), any::<u64>()).prop_map(|(incarnation, load)| ReaderId { incarnation, load })
}

fn transfer() -> impl Strategy<Value = TransferId> {
    (any::<u32>(), 1..=u32::MAX).prop_map(|(slot, generation)| TransferId { slot, generation })
}

fn run() -> impl Strategy<Value = BlockRun> {
    (0..u32::MAX)
        .prop_flat_map(|first| (Just(first), 1..=u32::MAX - first))
        .prop_map(|(first, count)| BlockRun { first, count })
}

fn kind() -> impl Strategy<Value = MemoryKind> {
    prop_oneof![
        Just(MemoryKind::Host),
        any::<u16>().prop_map(|device| MemoryKind::Cuda { device }),
        any::<u16>().prop_map(|device| MemoryKind::Rocm { device }),
    ]
}

fn interior() -> impl Strategy<Value = Interior> {
    (name(), 1..9_u32, 1..17_u32, 1..3_u32, option::of(text())).prop_map(
        |(layout, heads, tokens, planes, packing)| Interior {
            layout,
            heads,
            head_stride: 8,
            tokens,
            token_stride: u64::from(heads) * 8,
            planes,
            packing,
        },
    )
}

/// A table at the offset and region that are given, with the bytes that it needs from the offset.
fn table() -> impl Strategy<Value = TableDescription> {
    (
        interior(),
        0..1_000_u64,
        0..100_u64,
        0..5_000_u64,
        1..50_u32,
        any::<(u32, u32)>(),
    )
        .prop_map(
            |(interior, more, gap, offset, block_count, (group, layer))| {
                let block_bytes = interior.token_stride * u64::from(interior.tokens) + more;
                TableDescription {
                    id: 0,
                    region: 0,
                    offset,
                    block_bytes,
                    block_stride: block_bytes + gap,
                    block_count,
                    group,
                    layer,
                    interior,
                }
            },
        )
}

type Memory = (Vec<RegionDescription>, Vec<TableDescription>);

/// Regions one after the other, each large enough for its tables.
fn memory() -> impl Strategy<Value = Memory> {
    let region = (
        kind(),
        0..9_u64,
        // Chunks, and the bytes of their keys if they have any.
        (1..5_u64, option::of(vec(any::<u8>(), 1..40))),
        vec(table(), 0..4),
    );
    vec(region, 0..5).prop_map(|regions| {
        let mut memory = Memory::default();
        let mut base = 4_096;
        for (number, (kind, gap, (chunks, key), mut tables)) in (1_000_u32..).zip(regions) {
            base += gap;
            let end = |t: &TableDescription| {
                t.offset + u64::from(t.block_count - 1) * t.block_stride + t.block_bytes
            };
            let bytes = tables.iter().map(end).max().unwrap_or(1);
            for table in &mut tables {
                table.region = number;
                table.id = memory.1.len() as u32;
                memory.1.push(table.clone());
            }
            let chunk_bytes = bytes.div_ceil(chunks);
            let chunks = bytes.div_ceil(chunk_bytes) as usize;
            memory.0.push(RegionDescription {
                id: number,
                base,
                bytes,
                kind,
                chunk_bytes,
                keys: key.map_or_else(Vec::new, |key| vec![key; chunks]),
            });
            base += bytes;
        }
        memory
    })
}

fn addresses() -> impl Strategy<Value = Addresses> {
    (
        vec(any::<u8>(), 1..100),
        option::of(vec(any::<u8>(), 1..100)),
    )
        .prop_map(|(message, data)| Addresses { message, data })
}

fn ucx() -> impl Strategy<Value = UcxVersion> {
    any::<(u32, u32, u32)>().prop_map(|(major, minor, release)| UcxVersion {
        major,
        minor,
        release,
    })
}

fn compatibility() -> impl Strategy<Value = BTreeMap<String, String>> {
    proptest::collection::btree_map(name(), text(), 0..6)
}

prop_compose! {
    fn description()(
        engine in name(),
        incarnation in incarnation(),
        rank in rank(),
        instance in option::of(instance()),
        (kvferry_version, host) in (text(), text()),
        ucx in option::of(ucx()),
        addresses in addresses(),
        compatibility in compatibility(),
        (regions, tables) in memory(),
        unix_socket in option::of(name()),
    ) -> Description {
        Description {
            engine: EngineId::new(engine).unwrap(),
            incarnation, rank, instance, kvferry_version, ucx, host, addresses, compatibility,
            regions, tables, unix_socket,
        }
    }
}

fn regions() -> impl Strategy<Value = RegionSet> {
    let ids = prop_oneof![0..50_u32, any::<u32>(), Just(u32::MAX)];
    vec(ids, 0..20).prop_map(RegionSet::from_iter)
}

fn hello_reply() -> impl Strategy<Value = HelloReply> {
    let code = select(vec![
        HelloRejectCode::WrongIncarnation,
        HelloRejectCode::Version,
        HelloRejectCode::Incompatible,
        HelloRejectCode::ShuttingDown,
    ]);
    prop_oneof![
        (incarnation(), any::<u32>(), regions()).prop_map(
            |(incarnation, connection, withdrawn)| HelloReply::Accepted {
                incarnation,
                connection,
                withdrawn,
            }
        ),
        (any::<u32>(), code, text()).prop_map(|(connection, code, reason)| HelloReply::Rejected {
            connection,
            code,
            reason
        }),
    ]
}

fn segment() -> impl Strategy<Value = (SegmentHeader, Vec<u8>)> {
    let body = |bytes: u32| {
        prop_oneof![
            (0..1_000_u32, 0..1_000_u32).prop_map(move |(offset, after)| {
                SegmentBody::Message {
                    message_bytes: offset + bytes + after,
                    offset,
                }
            }),
            (transfer(), 0..=u64::MAX - u64::from(bytes))
                .prop_map(|(transfer, offset)| SegmentBody::Data { transfer, offset }),
        ]
    };
    vec(any::<u8>(), 1..300)
        .prop_flat_map(move |payload| {
            (
                incarnation(),
                incarnation(),
                any::<(u64, u32)>(),
                body(payload.len() as u32),
                Just(payload),
            )
        })
        .prop_map(
            |(source, destination, (sequence, connection), body, payload)| {
                (
                    SegmentHeader {
                        source,
                        destination,
                        connection,
                        sequence,
                        body,
                    },
                    payload,
                )
            },
        )
}

fn plan() -> impl Strategy<Value = DemoPlan> {
    (
        1..1_u64 << 16,
        1..=65_536_u32,
        1..1_u64 << 17,
        1..64_u32,
        any::<u64>(),
    )
        .prop_map(|(requests, blocks, units, layers, seed)| DemoPlan {
            requests,
            blocks,
            block_bytes: units * DEMO_BLOCK_UNIT,
            layers,
            seed,
        })
}

fn summary() -> impl Strategy<Value = DemoSummary> {
    any::<[u64; 6]>().prop_map(|[held, released, expired, revoked, blocks, quarantined]| {
        DemoSummary {
            leases_held: held,
            leases_released: released,
            leases_expired: expired,
            leases_revoked: revoked,
            blocks_in_use: blocks,
            quarantined_bytes: quarantined,
        }
    })
}

fn demo_reply() -> impl Strategy<Value = DemoReply> {
    prop_oneof![
        plan().prop_map(DemoReply::Welcome),
        (any::<u64>(), 0..50_u32).prop_map(|(request, blocks)| DemoReply::Prefilled {
            request,
            params: demo_params(blocks),
        }),
        (any::<u64>(), text()).prop_map(|(request, reason)| DemoReply::Failed { request, reason }),
        summary().prop_map(DemoReply::Summary),
        text().prop_map(|reason| DemoReply::Refused { reason }),
    ]
}

fn directory_reply() -> impl Strategy<Value = DirectoryReply> {
    let entries = proptest::collection::btree_map(rank(), vec(any::<u8>(), 0..50), 0..8);
    prop_oneof![
        (option::of(instance()), name(), entries).prop_map(|(instance, engine, entries)| {
            DirectoryReply::Entries {
                instance,
                engine: EngineId::new(engine).unwrap(),
                entries: entries.into_iter().collect(),
            }
        }),
        text().prop_map(|reason| DirectoryReply::Refused { reason }),
    ]
}

proptest! {
    #[test]
    fn segments_survive((header, payload) in segment()) {
        let mut bytes = [0; SEGMENT_HEADER_BYTES];
        header.write(&mut bytes);
        let bytes = [&bytes[..], &payload].concat();
        prop_assert_eq!(Segment::parse(&bytes), Ok(Segment { header, payload: &payload }));
    }

    #[test]
    fn reads_survive(
        transfer in transfer(), tables in vec(any::<u32>(), 1..40), runs in vec(run(), 1..40),
    ) {
        let bytes = encode_read(transfer, &tables, runs.iter().copied()).unwrap();
        prop_assert_eq!(bytes.len(), bytes.capacity());
        let Ok(Message::Read(read)) = Message::parse(&bytes) else { panic!("no read") };
        prop_assert_eq!(read.transfer(), transfer);
        prop_assert_eq!((read.table_count(), read.run_count()), (tables.len(), runs.len()));
        prop_assert!(read.tables().eq(tables));
        prop_assert_eq!(read.block_count(), runs.iter().map(|run| u64::from(run.count)).sum::<u64>());
        prop_assert!(read.runs().eq(runs));
    }

    #[test]
    fn short_messages_survive(
        transfer in transfer(),
        code in select(vec![
            RejectCode::UnknownTable, RejectCode::BlockOutOfRange, RejectCode::Busy,
            RejectCode::Withdrawn,
        ]),
        detail in any::<u64>(), channel in any::<u16>(), payload in vec(any::<u8>(), 0..100),
    ) {
        let rejected = ReadRejected { transfer, code, detail };
        let bytes = encode_read_rejected(&rejected);
        prop_assert_eq!(Message::parse(&bytes), Ok(Message::ReadRejected(rejected)));
        let bytes = encode_read_cancel(transfer);
        prop_assert_eq!(Message::parse(&bytes), Ok(Message::ReadCancel { transfer }));
        let bytes = encode_service(channel, &payload).unwrap();
        let service = Message::Service { channel, payload: &payload };
        prop_assert_eq!(Message::parse(&bytes), Ok(service));
    }

    #[test]
    fn greetings_and_descriptions_survive(
        expects in incarnation(), from in description(), reply in hello_reply(),
        withdrawn in regions(),
    ) {
        prop_assert_eq!(Description::decode(&from.encode().unwrap()), Ok(from.clone()));
        let hello = Hello { expects, from, withdrawn };
        let bytes = encode_hello(&hello).unwrap();
        prop_assert_eq!(Message::parse(&bytes), Ok(Message::Hello(hello)));
        let bytes = encode_hello_reply(&reply).unwrap();
        prop_assert_eq!(Message::parse(&bytes), Ok(Message::HelloReply(reply)));
    }

    #[test]
    fn withdrawals_survive(regions in regions()) {
        prop_assume!(!regions.is_empty());
        let bytes = encode_withdraw(&regions).unwrap();
        prop_assert_eq!(Message::parse(&bytes), Ok(Message::Withdraw(regions.clone())));
        let bytes = encode_withdrawn(&regions).unwrap();
        prop_assert_eq!(Message::parse(&bytes), Ok(Message::Withdrawn(regions)));
    }

    #[test]
    fn releases_survive(
        lease in lease(), reader in reader(), consumers in 1..=u32::MAX,
        verdict in select(Verdict::ALL),
    ) {
        let bytes = encode_release(&lease, reader, consumers).unwrap();
        let (instance, epoch) = (lease.instance, lease.epoch);
        let release = LeaseMessage::Release { lease, reader, consumers };
        prop_assert_eq!(LeaseMessage::parse(&bytes), Ok(release));
        let bytes = encode_released(instance, epoch, reader, verdict);
        let released = LeaseMessage::Released { instance, epoch, reader, verdict };
        prop_assert_eq!(LeaseMessage::parse(&bytes), Ok(released));
    }

    #[test]
    fn renewals_survive(
        id in instance(), number in any::<u64>(), batch in vec(epoch(), 1..50),
        lost in vec((epoch(), select(Gone::ALL)), 0..20), later in vec(epoch(), 0..20),
    ) {
        let bytes = encode_renew(id, number, &batch).unwrap();
        let Ok(LeaseMessage::Renew { instance, token, epochs }) = LeaseMessage::parse(&bytes) else {
            panic!("no renewal")
        };
        prop_assert_eq!((instance, token, epochs.len()), (id, number, batch.len()));
        prop_assert!(epochs.iter().eq(batch));
        let bytes = encode_renewed(id, number, &lost, &later).unwrap();
        let parsed = LeaseMessage::parse(&bytes);
        let Ok(LeaseMessage::Renewed { instance, token, gone, unknown }) = parsed else {
            panic!("no answer")
        };
        prop_assert_eq!((instance, token), (id, number));
        prop_assert_eq!((gone.len(), unknown.len()), (lost.len(), later.len()));
        prop_assert_eq!((gone.is_empty(), unknown.is_empty()), (lost.is_empty(), later.is_empty()));
        prop_assert!(gone.iter().eq(lost));
        prop_assert!(unknown.iter().eq(later));
    }

    #[test]
    fn checksums_survive(
        number in any::<u64>(), asked in vec(any::<(u32, u32)>(), 1..50),
        answer in vec(any::<u64>(), 1..50), why in select(NoChecksums::ALL),
    ) {
        let asked: Vec<GroupBlock> =
            asked.into_iter().map(|(group, block)| GroupBlock { group, block }).collect();
        let bytes = encode_ask(number, &asked).unwrap();
        let Ok(ChecksumMessage::Ask { token, blocks }) = ChecksumMessage::parse(&bytes) else {
            panic!("no question")
        };
        prop_assert_eq!((token, blocks.iter().len()), (number, asked.len()));
        prop_assert!(blocks.iter().eq(asked));
        let bytes = encode_sums(number, answer.clone()).unwrap();
        let Ok(ChecksumMessage::Sums { token, sums }) = ChecksumMessage::parse(&bytes) else {
            panic!("no answer")
        };
        prop_assert_eq!((token, sums.iter().len()), (number, answer.len()));
        prop_assert!(sums.iter().eq(answer));
        let bytes = encode_refused(number, why);
        let refused = ChecksumMessage::Refused { token: number, why };
        prop_assert_eq!(ChecksumMessage::parse(&bytes), Ok(refused));
    }

    #[test]
    fn directory_frames_survive(
        ranks in option::of(vec(rank(), 0..20)), reply in directory_reply(),
    ) {
        let request = DirectoryRequest { ranks };
        let frame = request.encode_frame().unwrap();
        let body = &frame[FRAME_HEADER_BYTES..];
        prop_assert_eq!(DirectoryRequest::decode_body(body), Ok(request));
        let frame = reply.encode_frame().unwrap();
        prop_assert_eq!(DirectoryReply::decode_body(&frame[FRAME_HEADER_BYTES..]), Ok(reply));
    }

    #[test]
    fn demo_payloads_survive(in_flight in 1..=65_536_u32, number in any::<u64>(), reply in demo_reply()) {
        for request in [DemoRequest::Begin { in_flight }, DemoRequest::Prefill { request: number }] {
            prop_assert_eq!(DemoRequest::decode(&request.encode().unwrap()), Ok(request));
        }
        prop_assert_eq!(DemoReply::decode(&reply.encode().unwrap()), Ok(reply));
    }

    #[test]
    fn no_bytes_make_a_parser_panic(bytes in vec(any::<u8>(), 0..300)) {
        for (_, check) in CHECKS {
            let _ = check(&bytes);
            // The same behind a version that is read.
            let _ = check(&[&[1, 0], &bytes[..]].concat());
        }
        let _ = kvferry_wire::ReadRequest::view(&bytes).map(|read| {
            (read.tables().count(), read.runs().count(), read.block_count())
        });
    }

    #[test]
    fn damaged_values_are_refused_or_are_other_values(
        sample in select(samples::all().into_iter().map(|s| (s.target, s.bytes)).collect::<Vec<_>>()),
        damage in vec((any::<proptest::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let (target, mut bytes) = sample;
        for (at, value) in damage {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        let _ = check_of(target)(&bytes);
        if target == "message" {
            let _ = kvferry_wire::ReadRequest::view(&bytes).map(|read| read.block_count());
        }
    }
}

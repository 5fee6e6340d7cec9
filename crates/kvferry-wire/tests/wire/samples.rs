//! One value of everything, the source of the fixtures.

use kvferry_wire::checksum::{encode_ask, encode_refused, encode_sums};
use kvferry_wire::params::{Params, RemoteOffer, Source};
use kvferry_wire::{
    Addresses, BlockRun, DemoPlan, DemoReply, DemoRequest, DemoSummary, Description,
    DirectoryReply, DirectoryRequest, EngineId, Epoch, Gone, GroupBlock, Hello, HelloRejectCode,
    HelloReply, Incarnation, Instance, Interior, LeaseId, MemoryKind, NoChecksums, Rank,
    ReadRejected, ReaderId, RegionDescription, RegionSet, RejectCode, RequestId,
    SEGMENT_HEADER_BYTES, SegmentBody, SegmentHeader, ShareReply, ShareRequest, SharedPool,
    TableDescription, TransferId, UcxVersion, Verdict, encode_goodbye, encode_hello,
    encode_hello_reply, encode_ping, encode_pong, encode_read, encode_read_cancel,
    encode_read_rejected, encode_release, encode_released, encode_renew, encode_renewed,
    encode_service, encode_withdraw, encode_withdrawn,
};

/// An encoded value.
pub(crate) struct Sample {
    /// The fuzz target that parses it.
    pub(crate) target: &'static str,
    /// What it is.
    pub(crate) name: &'static str,
    /// The encoded value.
    pub(crate) bytes: Vec<u8>,
    /// From this length on the value may end anywhere: it carries bytes that mean nothing here.
    pub(crate) open_from: Option<usize>,
}

pub(crate) fn all() -> Vec<Sample> {
    let mut all = Vec::new();
    let mut add = |target, name, bytes| {
        all.push(Sample {
            target,
            name,
            bytes,
            open_from: None,
        });
    };
    add(
        "segment",
        "message",
        segment(SegmentBody::Message {
            message_bytes: 9,
            offset: 4,
        }),
    );
    add(
        "segment",
        "data",
        segment(SegmentBody::Data {
            transfer: transfer(),
            offset: 1 << 40,
        }),
    );
    messages(&mut add);
    leases(&mut add);
    checksums(&mut add);
    packed(&mut add);
    for sample in &mut all {
        sample.open_from = match (sample.target, sample.name) {
            ("segment", "data") => Some(SEGMENT_HEADER_BYTES + 1),
            ("message", "service") => Some(4),
            _ => None,
        };
    }
    all
}

pub(crate) fn get(target: &str, name: &str) -> Sample {
    all()
        .into_iter()
        .find(|sample| (sample.target, sample.name) == (target, name))
        .unwrap()
}

fn messages(add: &mut impl FnMut(&'static str, &'static str, Vec<u8>)) {
    let runs = [
        BlockRun { first: 5, count: 2 },
        BlockRun {
            first: 900,
            count: 1,
        },
    ];
    let rejected = ReadRejected {
        transfer: transfer(),
        code: RejectCode::BlockOutOfRange,
        detail: 0x0123_4567_89ab_cdef,
    };
    let hello = Hello {
        expects: incarnation(2),
        from: description(),
        withdrawn: RegionSet::default(),
    };
    add("message", "hello", encode_hello(&hello).unwrap());
    add(
        "message",
        "hello-reply",
        encode_hello_reply(&rejection()).unwrap(),
    );
    add("message", "ping", encode_ping(0x1122_3344_5566_7788));
    add("message", "pong", encode_pong(0x1122_3344_5566_7788));
    add(
        "message",
        "read",
        encode_read(transfer(), &[3, 4], runs.into_iter()).unwrap(),
    );
    add("message", "read-rejected", encode_read_rejected(&rejected));
    add("message", "read-cancel", encode_read_cancel(transfer()));
    add(
        "message",
        "service",
        encode_service(0x0102, b"payload").unwrap(),
    );
    add("message", "goodbye", encode_goodbye());
    add("message", "withdraw", encode_withdraw(&regions()).unwrap());
    add(
        "message",
        "withdrawn",
        encode_withdrawn(&regions()).unwrap(),
    );
}

fn leases(add: &mut impl FnMut(&'static str, &'static str, Vec<u8>)) {
    let gone = [(epoch(3), Gone::Released), (epoch(9), Gone::LeaseMax)];
    let (renewed, unknown) = ([epoch(3), epoch(7), epoch(9)], [epoch(1 << 33)]);
    add(
        "lease",
        "release",
        encode_release(&lease(), reader(), 2).unwrap(),
    );
    add(
        "lease",
        "released",
        encode_released(instance(), epoch(7), reader(), Verdict::Ended),
    );
    add(
        "lease",
        "renew",
        encode_renew(instance(), 0xfeed, renewed).unwrap(),
    );
    add(
        "lease",
        "renewed",
        encode_renewed(instance(), 0xfeed, gone, unknown).unwrap(),
    );
}

fn checksums(add: &mut impl FnMut(&'static str, &'static str, Vec<u8>)) {
    let blocks = [(0, 7), (3, 0x0102_0304)].map(|(group, block)| GroupBlock { group, block });
    add("checksum", "ask", encode_ask(0xfeed, blocks).unwrap());
    let sums = [0x1122_3344_5566_7788, 1];
    add("checksum", "sums", encode_sums(0xfeed, sums).unwrap());
    add(
        "checksum",
        "refused",
        encode_refused(0xfeed, NoChecksums::Busy),
    );
}

fn packed(add: &mut impl FnMut(&'static str, &'static str, Vec<u8>)) {
    let hello = Hello {
        expects: incarnation(2),
        from: description(),
        withdrawn: RegionSet::default(),
    };
    add("description", "full", description().encode().unwrap());
    add("description", "bare", bare_description().encode().unwrap());
    add("hello", "hello", hello.encode().unwrap());
    let accepted = |withdrawn| HelloReply::Accepted {
        incarnation: incarnation(2),
        connection: 9,
        withdrawn,
    };
    let nothing = accepted(RegionSet::default());
    add("hello", "accepted", nothing.encode().unwrap());
    let withdrawn = accepted(regions());
    add("hello", "accepted-withdrawn", withdrawn.encode().unwrap());
    let withdrawn = Hello {
        withdrawn: regions(),
        ..hello
    };
    add("hello", "hello-withdrawn", withdrawn.encode().unwrap());
    add("hello", "rejected", rejection().encode().unwrap());

    let request = ShareRequest {
        from: incarnation(1),
        expects: incarnation(2),
    };
    add("share", "request", request.encode().unwrap());
    let pool = |region, bytes| SharedPool { region, bytes };
    let pools = ShareReply::Pools {
        incarnation: incarnation(2),
        word: 0x7f12_3456_7890,
        pools: vec![pool(0, 1 << 40), pool(7, 1)],
        more: true,
    };
    add("share", "pools", pools.encode().unwrap());
    let refused = ShareReply::Refused {
        reason: "another user".into(),
    };
    add("share", "refused", refused.encode().unwrap());

    let offer = RemoteOffer {
        lease: lease(),
        source: Source {
            engine: "prefill-0".into(),
            directory: String::new(),
            ranks: 2,
        },
        tokens: 33,
        blocks: vec![vec![4, 9], vec![0, 3]],
        block_tokens: vec![32, 32],
        duration_ms: 30_000,
    };
    let offer = offer.to_params("10.0.0.1", 5600);
    add("params", "offer", serde_json::to_vec(&offer).unwrap());
    let wanted = serde_json::json!({"do_remote_decode": true, "remote_host": null});
    add("params", "wanted", serde_json::to_vec(&wanted).unwrap());

    let some = DirectoryRequest {
        ranks: Some(vec![Rank { pp: 0, tp: 0 }, Rank { pp: 1, tp: 300 }]),
    };
    add("directory", "request-some", some.encode_frame().unwrap());
    add(
        "directory",
        "request-all",
        DirectoryRequest { ranks: None }.encode_frame().unwrap(),
    );
    add(
        "directory",
        "entries",
        directory_entries().encode_frame().unwrap(),
    );
    let refused = DirectoryReply::Refused {
        reason: "not ready".to_owned(),
    };
    add("directory", "refused", refused.encode_frame().unwrap());

    add(
        "demo",
        "begin",
        DemoRequest::Begin { in_flight: 8 }.encode().unwrap(),
    );
    add(
        "demo",
        "prefill",
        DemoRequest::Prefill { request: 70_000 }.encode().unwrap(),
    );
    add("demo", "finish", DemoRequest::Finish.encode().unwrap());
    add(
        "demo",
        "welcome",
        DemoReply::Welcome(demo_plan()).encode().unwrap(),
    );
    let prefilled = DemoReply::Prefilled {
        request: 70_000,
        params: demo_params(3),
    };
    add("demo", "prefilled", prefilled.encode().unwrap());
    let failed = DemoReply::Failed {
        request: 70_001,
        reason: "aborted".to_owned(),
    };
    add("demo", "failed", failed.encode().unwrap());
    add(
        "demo",
        "summary",
        DemoReply::Summary(demo_summary()).encode().unwrap(),
    );
    let refused = DemoReply::Refused {
        reason: "a run is in progress".to_owned(),
    };
    add("demo", "refused", refused.encode().unwrap());
}

fn segment(body: SegmentBody) -> Vec<u8> {
    let header = SegmentHeader {
        source: incarnation(1),
        destination: incarnation(2),
        connection: 0x7172_7374,
        sequence: 0x0102_0304_0506_0708,
        body,
    };
    let mut bytes = [0xff; SEGMENT_HEADER_BYTES];
    header.write(&mut bytes);
    [&bytes[..], b"ferry"].concat()
}

pub(crate) fn incarnation(seed: u8) -> Incarnation {
    Incarnation::from_bytes(std::array::from_fn(|at| {
        seed.wrapping_mul(16).wrapping_add(at as u8)
    }))
    .unwrap()
}

pub(crate) fn instance() -> Instance {
    Instance::from_bytes(std::array::from_fn(|at| 0xf0 - at as u8)).unwrap()
}

pub(crate) fn epoch(number: u64) -> Epoch {
    Epoch::new(number).unwrap()
}

fn transfer() -> TransferId {
    TransferId {
        slot: 0x0a0b_0c0d,
        generation: 6,
    }
}

pub(crate) fn lease() -> LeaseId {
    LeaseId {
        instance: instance(),
        epoch: epoch(7),
        request: RequestId::new("cmpl-7d\u{e9}ad-0").unwrap(),
    }
}

pub(crate) fn reader() -> ReaderId {
    ReaderId {
        incarnation: incarnation(3),
        load: 41,
    }
}

fn regions() -> RegionSet {
    [7, 8, 9, 0x0102_0304].into_iter().collect()
}

fn rejection() -> HelloReply {
    HelloReply::Rejected {
        connection: 9,
        code: HelloRejectCode::Incompatible,
        reason: "block_bytes is 8192 here and 4096 there".to_owned(),
    }
}

/// A description in which every optional field is absent.
pub(crate) fn bare_description() -> Description {
    Description {
        engine: EngineId::new("decode-0").unwrap(),
        incarnation: incarnation(4),
        rank: Rank::default(),
        instance: None,
        kvferry_version: "0.1.0".to_owned(),
        ucx: None,
        host: "host-a".to_owned(),
        addresses: Addresses {
            message: vec![0],
            data: None,
        },
        compatibility: [].into(),
        regions: Vec::new(),
        tables: Vec::new(),
        unix_socket: None,
    }
}

/// A description in which every optional field is present.
pub(crate) fn description() -> Description {
    Description {
        engine: EngineId::new("prefill-0").unwrap(),
        incarnation: incarnation(1),
        rank: Rank { pp: 1, tp: 3 },
        instance: Some(instance()),
        kvferry_version: "0.1.0".to_owned(),
        ucx: Some(UcxVersion {
            major: 1,
            minor: 22,
            release: 0,
        }),
        host: "7f6a3c1e-0000-4000-8000-000000000001".to_owned(),
        addresses: Addresses {
            message: vec![1, 2, 3, 0xff],
            data: Some(vec![9; 40]),
        },
        compatibility: [("dtype", "bfloat16"), ("model", "toy")]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into(),
        regions: vec![
            region(1, 0x7f00_0000_0000, MemoryKind::Host),
            RegionDescription {
                // The last chunk is shorter.
                chunk_bytes: 0x6000,
                keys: vec![vec![5; 12], vec![6; 12], vec![7; 13]],
                ..region(2, 0x7f00_0000_1000, MemoryKind::Cuda { device: 1 })
            },
        ],
        tables: vec![table(10, 1, 0), table(11, 2, 1)],
        unix_socket: Some("@kvferry-prefill-0".to_owned()),
    }
}

pub(crate) fn region(id: u32, base: u64, kind: MemoryKind) -> RegionDescription {
    RegionDescription {
        id,
        base,
        bytes: 0x1_0000,
        kind,
        chunk_bytes: 0x1_0000,
        keys: Vec::new(),
    }
}

/// A table of 15 blocks of 4,000 bytes that ends 1,632 bytes before its region.
pub(crate) fn table(id: u32, region: u32, layer: u32) -> TableDescription {
    TableDescription {
        id,
        region,
        offset: 2_560,
        block_bytes: 4_000,
        block_stride: 4_096,
        block_count: 15,
        group: 0,
        layer,
        interior: Interior {
            layout: "NHD".to_owned(),
            heads: 5,
            head_stride: 100,
            tokens: 8,
            token_stride: 500,
            planes: 2,
            packing: Some("fp8-e4m3".to_owned()),
        },
    }
}

pub(crate) fn directory_entries() -> DirectoryReply {
    DirectoryReply::Entries {
        instance: Some(instance()),
        engine: EngineId::new("prefill-0").unwrap(),
        entries: vec![
            (Rank { pp: 0, tp: 0 }, bare_description().encode().unwrap()),
            (Rank { pp: 1, tp: 3 }, vec![1, 0, 0xc0]),
        ],
    }
}

pub(crate) fn demo_plan() -> DemoPlan {
    DemoPlan {
        requests: 64,
        blocks: 32,
        block_bytes: 131_072,
        layers: 4,
        seed: u64::MAX,
    }
}

/// Transfer parameters with so many blocks.
pub(crate) fn demo_params(blocks: u32) -> Params {
    let params = serde_json::json!({
        "do_remote_prefill": true, "remote_engine_id": "prefill-0", "remote_port": 5600,
        "remote_host": null, "remote_block_ids": [(0..blocks).rev().collect::<Vec<u32>>()],
    });
    params.as_object().unwrap().clone()
}

fn demo_summary() -> DemoSummary {
    DemoSummary {
        leases_held: 0,
        leases_released: 60,
        leases_expired: 3,
        leases_revoked: 1,
        blocks_in_use: 0,
        quarantined_bytes: 1 << 32,
    }
}

//! What the msgpack bodies must satisfy: each rule broken once, refused when written and when read.

use kvferry_wire::{
    DemoReply, DemoRequest, Description, DirectoryReply, DirectoryRequest, EngineId, HelloReply,
    Interior, MemoryKind, Rank, RegionDescription, TableDescription, WireError, check_table,
    demo::{DEMO_BLOCK_UNIT, DEMO_VERSION, MAX_DEMO_BLOCKS},
    description::{
        MAX_ADDRESS_BYTES, MAX_COMPATIBILITY_FIELDS, MAX_DESCRIPTION_BYTES, MAX_FIELD_NAME_BYTES,
        MAX_FIELD_VALUE_BYTES, MAX_HOST_BYTES, MAX_KEY_BYTES, MAX_KEYS, MAX_REGIONS, MAX_TABLES,
        MAX_TAG_BYTES, MAX_UNIX_SOCKET_BYTES,
    },
    directory::{FRAME_HEADER_BYTES, MAX_DIRECTORY_RANKS},
};
use serde::Serialize;

use crate::{mutations::name_in, samples};

/// A value as a peer might send it who does not check.
fn unchecked(value: &impl Serialize) -> Vec<u8> {
    unchecked_of(1, value)
}

fn unchecked_of(version: u16, value: &impl Serialize) -> Vec<u8> {
    let body = rmp_serde::to_vec_named(value).unwrap();
    [&version.to_le_bytes()[..], &body].concat()
}

fn refused(change: impl FnOnce(&mut Description)) -> String {
    let mut description = samples::description();
    change(&mut description);
    let written = description.encode().unwrap_err();
    let read = Description::decode(&unchecked(&description)).unwrap_err();
    match &read {
        // Counts are already refused while they are read.
        WireError::Msgpack { .. } => assert!(matches!(written, WireError::TooLong { .. })),
        _ => assert_eq!(read, written),
    }
    assert!(written.to_string().len() < 400, "{written}");
    name_in(&written).to_owned()
}

#[test]
fn every_rule_on_texts_and_addresses_is_kept() {
    let long = |max: usize| "x".repeat(max + 1);
    assert_eq!(
        refused(|d| d.kvferry_version = long(MAX_TAG_BYTES)),
        "description.kvferry_version"
    );
    assert_eq!(
        refused(|d| d.kvferry_version = "\u{1b}[2J".into()),
        "description.kvferry_version"
    );
    assert_eq!(
        refused(|d| d.host = long(MAX_HOST_BYTES)),
        "description.host"
    );
    assert_eq!(refused(|d| d.host = "a\nb".into()), "description.host");
    assert_eq!(
        refused(|d| d.unix_socket = Some(long(MAX_UNIX_SOCKET_BYTES))),
        "description.unix_socket"
    );
    assert_eq!(
        refused(|d| d.unix_socket = Some(String::new())),
        "description.unix_socket"
    );
    assert_eq!(
        refused(|d| d.unix_socket = Some("a\0b".into())),
        "description.unix_socket"
    );
    assert_eq!(
        refused(|d| d.addresses.message.clear()),
        "addresses.message"
    );
    assert_eq!(
        refused(|d| d.addresses.message = vec![1; MAX_ADDRESS_BYTES + 1]),
        "addresses.message"
    );
    assert_eq!(
        refused(|d| d.addresses.data = Some(Vec::new())),
        "addresses.data"
    );
    assert_eq!(
        refused(|d| d.addresses.data = Some(vec![1; MAX_ADDRESS_BYTES + 1])),
        "addresses.data"
    );
}

#[test]
fn every_rule_on_compatibility_fields_is_kept() {
    let set = |name: &str, value: &str| {
        let (name, value) = (name.to_owned(), value.to_owned());
        move |d: &mut Description| {
            d.compatibility.insert(name, value);
        }
    };
    let long = |max: usize| "x".repeat(max + 1);
    assert_eq!(refused(set("", "value")), "compatibility field name");
    assert_eq!(refused(set("a\tb", "value")), "compatibility field name");
    assert_eq!(
        refused(set(&long(MAX_FIELD_NAME_BYTES), "value")),
        "compatibility field name"
    );
    assert_eq!(refused(set("name", "\u{7f}")), "compatibility field value");
    assert_eq!(
        refused(set("name", &long(MAX_FIELD_VALUE_BYTES))),
        "compatibility field value"
    );
    let many = refused(|d| {
        d.compatibility = (0..=MAX_COMPATIBILITY_FIELDS)
            .map(|n| (n.to_string(), String::new()))
            .collect();
    });
    assert_eq!(many, "description.compatibility");
}

#[test]
fn every_rule_on_regions_is_kept() {
    assert_eq!(refused(|d| d.regions[0].bytes = 0), "region.bytes");
    assert_eq!(
        refused(|d| d.regions[0].base = u64::MAX - 0xffff),
        "region.base"
    );
    assert_eq!(refused(|d| d.regions[0].bytes = u64::MAX), "region.base");
    assert_eq!(refused(|d| d.regions[1].id = 1), "region.id");
    let many = refused(|d| {
        d.tables.clear();
        d.regions = regions(MAX_REGIONS + 1);
    });
    assert_eq!(many, "description.regions");
}

/// C79: a region is whole chunks and one that may be shorter, and has a key for each or none.
#[test]
fn c79_every_rule_on_chunks_and_keys_is_kept() {
    let change = |change: fn(&mut RegionDescription)| refused(|d| change(&mut d.regions[1]));
    assert_eq!(change(|r| r.chunk_bytes = 0), "region.chunk_bytes");
    assert_eq!(change(|r| r.chunk_bytes = 0x1_0001), "region.chunk_bytes");
    assert_eq!(change(|r| r.chunk_bytes = 0x8000), "region.keys");
    assert_eq!(change(|r| r.chunk_bytes = 1), "region.keys");
    assert_eq!(change(|r| drop(r.keys.pop())), "region.keys");
    assert_eq!(change(|r| r.keys.push(vec![1])), "region.keys");
    assert_eq!(change(|r| r.keys[1].clear()), "region.keys");
    let long = change(|r| r.keys[2] = vec![1; MAX_KEY_BYTES + 1]);
    assert_eq!(long, "region.keys");
    // The others' keys count, too.
    let many = refused(|d| {
        let region = &mut d.regions[1];
        (region.bytes, region.chunk_bytes) = (MAX_KEYS as u64 - 2, 1);
        region.keys = vec![vec![1]; MAX_KEYS - 2];
        let mut other = samples::region(3, 0, MemoryKind::Host);
        (other.bytes, other.chunk_bytes) = (3, 1);
        other.keys = vec![vec![1]; 3];
        d.regions.push(other);
        d.tables.clear();
    });
    assert_eq!(many, "region.keys");

    let accepted = |change: fn(&mut RegionDescription)| {
        let mut description = samples::description();
        change(&mut description.regions[1]);
        let bytes = description.encode().unwrap();
        assert_eq!(Description::decode(&bytes), Ok(description));
    };
    accepted(|r| (r.chunk_bytes, r.keys) = (0x1_0000, vec![vec![1; MAX_KEY_BYTES]]));
    accepted(|r| (r.chunk_bytes, r.keys) = (0xffff, vec![vec![1], vec![2, 3]]));
    accepted(|r| (r.chunk_bytes, r.keys) = (1, Vec::new()));
    accepted(|r| (r.chunk_bytes, r.keys) = (1, vec![vec![1]; 0x1_0000]));
}

fn regions(count: usize) -> Vec<RegionDescription> {
    let host = |n: u32| samples::region(n, u64::from(n) << 16, MemoryKind::Host);
    (0..u32::try_from(count).unwrap()).map(host).collect()
}

#[test]
fn regions_of_one_kind_do_not_overlap() {
    for base in [0x7f00_0000_0000, 0x7f00_0000_ffff, 0x7eff_ffff_0001] {
        let name = refused(|d| d.regions.push(samples::region(3, base, MemoryKind::Host)));
        assert_eq!(name, "region.base");
    }
    for base in [0x7f00_0001_0000, 0x7eff_ffff_0000] {
        let mut description = samples::description();
        description
            .regions
            .push(samples::region(3, base, MemoryKind::Host));
        description.encode().unwrap();
    }
    // A region inside a larger one, with another in between in the order of addresses.
    let name = refused(|d| {
        let large = RegionDescription {
            bytes: 1 << 20,
            ..samples::region(3, 0, MemoryKind::Host)
        };
        let far = samples::region(5, 0x8_0000, MemoryKind::Host);
        d.regions.extend([
            large,
            samples::region(4, 0, MemoryKind::Cuda { device: 0 }),
            far,
        ]);
    });
    assert_eq!(name, "region.base");
}

#[test]
fn every_rule_on_tables_is_kept() {
    let change = |change: fn(&mut TableDescription)| refused(|d| change(&mut d.tables[0]));
    assert_eq!(change(|t| t.id = 11), "table.id");
    assert_eq!(change(|t| t.region = 3), "table.region");
    assert_eq!(change(|t| t.block_bytes = 0), "table.block_bytes");
    assert_eq!(change(|t| t.block_bytes = 4_097), "table.block_stride");
    assert_eq!(change(|t| t.block_stride = 3_999), "table.block_stride");
    assert_eq!(change(|t| t.block_stride = u64::MAX), "table.offset");
    assert_eq!(change(|t| t.block_count = 0), "table.block_count");
    assert_eq!(change(|t| t.block_count = 16), "table.offset");
    assert_eq!(change(|t| t.block_count = u32::MAX), "table.offset");
    assert_eq!(change(|t| t.offset = u64::MAX), "table.offset");
    assert_eq!(change(|t| t.interior.layout.clear()), "interior.layout");
    assert_eq!(
        change(|t| t.interior.layout = "x".repeat(MAX_TAG_BYTES + 1)),
        "interior.layout"
    );
    assert_eq!(
        change(|t| t.interior.packing = Some("\r".into())),
        "interior.packing"
    );
    assert_eq!(change(|t| t.interior.heads = 0), "interior.heads");
    assert_eq!(
        change(|t| t.interior.heads = u32::MAX),
        "interior.head_stride"
    );
    assert_eq!(
        change(|t| t.interior.head_stride = 1_000),
        "interior.head_stride"
    );
    assert_eq!(
        change(|t| t.interior.head_stride = u64::MAX),
        "interior.head_stride"
    );
    assert_eq!(change(|t| t.interior.tokens = 0), "interior.tokens");
    assert_eq!(change(|t| t.interior.tokens = 9), "interior.token_stride");
    assert_eq!(
        change(|t| t.interior.token_stride = u64::MAX),
        "interior.token_stride"
    );
    assert_eq!(change(|t| t.interior.planes = 0), "interior.planes");
    let many = refused(|d| d.tables = tables(MAX_TABLES + 1));
    assert_eq!(many, "description.tables");
}

fn tables(count: usize) -> Vec<TableDescription> {
    (0..u32::try_from(count).unwrap())
        .map(|id| TableDescription {
            interior: Interior::opaque(),
            ..samples::table(id, 1, id)
        })
        .collect()
}

#[test]
fn a_table_may_end_where_its_region_ends() {
    let table = samples::table(0, 0, 0);
    let end = table.offset + 14 * 4_096 + 4_000;
    assert_eq!(check_table(&table, end), Ok(()));
    assert_eq!(
        check_table(&table, end - 1).unwrap_err().to_string(),
        "table.offset is 2560 with 15 blocks of 4000 bytes every 4096 in a region of 63903, \
         expected blocks that lie within the region"
    );
}

#[test]
fn a_description_of_the_largest_counts_is_accepted() {
    let mut description = samples::bare_description();
    description.regions = regions(MAX_REGIONS);
    description.tables = tables(MAX_TABLES);
    let bytes = description.encode().unwrap();
    assert!(Description::decode(&bytes).is_ok_and(|read| read == description));
}

#[test]
fn a_description_that_is_too_large_is_refused() {
    let mut description = samples::bare_description();
    description.regions = regions(MAX_REGIONS);
    for region in &mut description.regions {
        region.keys = vec![vec![7; MAX_KEY_BYTES]];
    }
    let bytes = unchecked(&description);
    let (max, got) = (MAX_DESCRIPTION_BYTES, bytes.len());
    let error = WireError::TooLong {
        what: "description",
        max,
        got,
    };
    assert_eq!(description.encode().map(|_| ()), Err(error.clone()));
    assert_eq!(Description::decode(&bytes).map(|_| ()), Err(error));
}

/// The handshake grows with regions and tables, not with blocks (C125).
#[test]
fn c125_description_bytes_do_not_depend_on_the_number_of_blocks() {
    let length = |blocks: u32| {
        let mut description = samples::description();
        for region in &mut description.regions {
            region.base = u64::from(region.id) << 40;
            region.bytes = 1 << 39;
            region.chunk_bytes = 1 << 39;
            region.keys.truncate(1);
        }
        for table in &mut description.tables {
            table.block_count = blocks;
        }
        description.encode().unwrap().len()
    };
    assert_eq!(length(70_000), length(70_000_000));
}

#[test]
fn fields_that_a_newer_build_added_are_skipped() {
    let mut bytes = samples::description().encode().unwrap();
    let map = bytes.get_mut(2).unwrap();
    assert_eq!(*map, 0x8c, "a map of twelve");
    *map += 1;
    bytes.extend(rmp_serde::to_vec("tomorrow").unwrap());
    bytes.extend(rmp_serde::to_vec(&[("a", vec![1_u8, 2])]).unwrap());
    assert_eq!(Description::decode(&bytes), Ok(samples::description()));
}

#[test]
fn a_compatibility_field_does_not_appear_twice() {
    let bytes = samples::description().encode().unwrap();
    let at = bytes
        .windows(5)
        .position(|window| window == b"dtype")
        .unwrap();
    let mut twice = bytes;
    twice.splice(at..at + 5, *b"model");
    let error = Description::decode(&twice).unwrap_err();
    assert_eq!(
        error.to_string(),
        "description is not the msgpack that was expected: compatibility field \"model\" appears \
         twice"
    );
}

#[test]
fn another_version_is_named_whatever_follows_it() {
    let of = |what, ours| WireError::Version {
        what,
        got: 258,
        min: ours,
        max: ours,
    };
    let version = |what| of(what, 1);
    let demo = |what| of(what, DEMO_VERSION.into());
    for rest in [&[][..], &[0xc1, 0xff, 0x00]] {
        let body = [&[2, 1], rest].concat();
        assert_eq!(Description::decode(&body), Err(version("description")));
        assert_eq!(kvferry_wire::Hello::decode(&body), Err(version("hello")));
        assert_eq!(HelloReply::decode(&body), Err(version("hello reply")));
        assert_eq!(
            DirectoryRequest::decode_body(&body),
            Err(version("directory request"))
        );
        assert_eq!(
            DirectoryReply::decode_body(&body),
            Err(version("directory reply"))
        );
        assert_eq!(DemoRequest::decode(&body), Err(demo("demo request")));
        assert_eq!(DemoReply::decode(&body), Err(demo("demo reply")));
    }
}

/// A greeting of this version that carries a description of another one can still be answered.
#[test]
fn a_greeting_with_another_descriptions_version_says_so() {
    let hello = samples::get("hello", "hello").bytes;
    let description = samples::description().encode().unwrap();
    let at = hello
        .windows(description.len())
        .position(|window| window == description)
        .unwrap();
    let mut changed = hello;
    *changed.get_mut(at).unwrap() = 9;
    assert_eq!(
        kvferry_wire::Hello::decode(&changed),
        Err(WireError::Version {
            what: "description",
            got: 9,
            min: 1,
            max: 1
        })
    );
}

#[test]
fn deep_nesting_is_refused_and_not_followed() {
    let mut bytes = samples::description().encode().unwrap();
    *bytes.get_mut(2).unwrap() += 1;
    bytes.extend(rmp_serde::to_vec("deep").unwrap());
    bytes.extend(vec![0x91; 1 << 20]);
    bytes.push(0xc0);
    let error = Description::decode(&bytes).unwrap_err();
    assert!(matches!(error, WireError::Msgpack { .. }), "{error}");
}

#[test]
fn a_size_that_is_only_announced_reserves_nothing() {
    // A map whose first key is announced with 4 GiB - 1.
    let error = Description::decode(&[1, 0, 0x81, 0xdb, 0xff, 0xff, 0xff, 0xff, b'a']).unwrap_err();
    assert!(
        matches!(
            error,
            WireError::Msgpack {
                what: "description",
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn reasons_are_cut_and_cleaned_when_they_are_sent() {
    let reason = format!("a\nb\u{1b}[31m{}", "\u{e9}".repeat(2_000));
    let reply = HelloReply::Rejected {
        connection: 9,
        code: kvferry_wire::HelloRejectCode::Version,
        reason,
    };
    let read = HelloReply::decode(&reply.encode().unwrap()).unwrap();
    let HelloReply::Rejected { reason, .. } = read else {
        panic!("{read:?}")
    };
    assert!(reason.starts_with("a b [31m\u{e9}"));
    assert_eq!(reason.len(), 1_024);
    let refused = DirectoryReply::Refused {
        reason: "x\r".to_owned(),
    }
    .encode_frame()
    .unwrap();
    let expected = DirectoryReply::Refused {
        reason: "x ".to_owned(),
    };
    assert_eq!(
        DirectoryReply::decode_body(&refused[FRAME_HEADER_BYTES..]),
        Ok(expected)
    );
}

#[test]
fn reasons_that_were_not_cleaned_are_refused() {
    for reason in ["\u{7}".to_owned(), "x".repeat(1_025)] {
        let code = kvferry_wire::HelloRejectCode::Version;
        let rejected = unchecked(&HelloReply::Rejected {
            connection: 9,
            code,
            reason: reason.clone(),
        });
        assert_eq!(
            name_in(&HelloReply::decode(&rejected).unwrap_err()),
            "hello reply.reason"
        );
        let refused = unchecked_of(DEMO_VERSION, &DemoReply::Refused { reason });
        assert_eq!(
            name_in(&DemoReply::decode(&refused).unwrap_err()),
            "demo reply.reason"
        );
    }
}

#[test]
fn directory_limits() {
    let request = |count| DirectoryRequest {
        ranks: Some(vec![Rank::default(); count]),
    };
    let encoded = request(MAX_DIRECTORY_RANKS).encode_frame().unwrap();
    let body = &encoded[FRAME_HEADER_BYTES..];
    assert_eq!(
        DirectoryRequest::decode_body(body),
        Ok(request(MAX_DIRECTORY_RANKS))
    );
    let many = request(MAX_DIRECTORY_RANKS + 1);
    assert_eq!(
        name_in(&many.encode_frame().unwrap_err()),
        "directory request.ranks"
    );
    let error = DirectoryRequest::decode_body(&unchecked(&many)).unwrap_err();
    assert!(
        error.to_string().ends_with("more than 4096 items in ranks"),
        "{error}"
    );

    let reply = |entries| DirectoryReply::Entries {
        instance: None,
        engine: EngineId::new("e").unwrap(),
        entries,
    };
    let twice = reply(vec![(Rank::default(), vec![1]), (Rank::default(), vec![2])]);
    assert_eq!(
        name_in(&twice.encode_frame().unwrap_err()),
        "directory reply.rank"
    );
    let large = reply(vec![(Rank::default(), vec![0; MAX_DESCRIPTION_BYTES + 1])]);
    assert_eq!(
        name_in(&large.encode_frame().unwrap_err()),
        "directory reply.description"
    );
    let rank = |tp| Rank { pp: 0, tp };
    let whole = |tp| (rank(tp), vec![0; MAX_DESCRIPTION_BYTES]);
    let total = reply((0..4).map(whole).collect());
    assert_eq!(
        name_in(&total.encode_frame().unwrap_err()),
        "directory reply"
    );
}

#[test]
fn demo_limits() {
    let begin = |in_flight| {
        let request = DemoRequest::Begin { in_flight };
        let read = DemoRequest::decode(&unchecked_of(DEMO_VERSION, &request)).map(|_| ());
        assert_eq!(request.encode().map(|_| ()), read);
        read.map_err(|error| name_in(&error))
    };
    assert_eq!(begin(0), Err("demo request.in_flight"));
    assert_eq!(begin(65_537), Err("demo request.in_flight"));
    assert_eq!(begin(65_536), Ok(()));

    let reply = |reply: DemoReply| {
        let written = reply.encode().unwrap_err();
        let read = DemoReply::decode(&unchecked_of(DEMO_VERSION, &reply)).unwrap_err();
        assert!(
            read == written || matches!(read, WireError::Msgpack { .. }),
            "{read}"
        );
        name_in(&written)
    };
    let plan = |change: fn(&mut kvferry_wire::DemoPlan)| {
        let mut plan = samples::demo_plan();
        change(&mut plan);
        reply(DemoReply::Welcome(plan))
    };
    assert_eq!(plan(|p| p.requests = 0), "demo plan.requests");
    assert_eq!(plan(|p| p.requests = u64::MAX), "demo plan.requests");
    assert_eq!(plan(|p| p.blocks = 0), "demo plan.blocks");
    assert_eq!(plan(|p| p.blocks = 65_537), "demo plan.blocks");
    assert_eq!(plan(|p| p.block_bytes = 0), "demo plan.block_bytes");
    assert_eq!(plan(|p| p.block_bytes += 8), "demo plan.block_bytes");
    assert_eq!(
        plan(|p| p.block_bytes = DEMO_BLOCK_UNIT << 56),
        "demo plan.requests"
    );
    assert_eq!(plan(|p| p.layers = 0), "demo plan.layers");
}

#[test]
fn the_parameters_of_the_longest_demo_request_fit() {
    let reply = DemoReply::Prefilled {
        request: u64::MAX,
        params: samples::demo_params(MAX_DEMO_BLOCKS as u32),
    };
    assert_eq!(DemoReply::decode(&reply.encode().unwrap()), Ok(reply));
}

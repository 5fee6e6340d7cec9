//! Lanes between engines of one host: bytes, counts, refusals, what is shared and with whom.
#![allow(unsafe_code, reason = "foreign memory is borrowed")]

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::ptr::NonNull;

use kvferry_engine::wire::{MemoryKind, ShareReply, ShareRequest};
use kvferry_engine::{
    BlockPair, ConnectError, Engine, FaultControl, FaultFabric, FaultRates, Lane, LaneChoice,
    LoopbackFabric, LoopbackNetwork, MemoryRegion, ShareSocket, TableSpec,
};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect as dial,
    recv, send, socket_with,
};

use crate::support::*;

const COPIES: [Lane; 2] = [Lane::Mapped, Lane::Attached];

/// Memory that nobody shares, as an engine's own cache would be. Leaked: no test has much.
fn foreign(bytes: usize) -> MemoryRegion {
    let memory = Box::leak(vec![0_u8; bytes].into_boxed_slice());
    // SAFETY: never freed, and used through the region only.
    unsafe { MemoryRegion::borrowed(NonNull::from(memory).cast(), bytes) }.unwrap()
}

#[test]
fn scattered_blocks_are_copied_and_nothing_else_is_touched() {
    for kind in kinds() {
        for lane in COPIES {
            for gap in [0, 32] {
                let producer = side(engine(&kind, "producer"), 3, 64, 1000, gap);
                producer.fill();
                let consumer = side(engine(&kind, "consumer"), 3, 32, 1000, 0);
                consumer
                    .memory
                    .fill(0, consumer.memory.bytes(), 0xEE)
                    .unwrap();
                let peer = connect(&consumer.engine, &producer.engine, lane);
                assert_eq!(peer.lane(), lane);
                let ids = [
                    (0, 10),
                    (1, 11),
                    (2, 12),
                    (5, 40),
                    (4, 41),
                    (9, 63),
                    (30, 0),
                ];
                let pairs: Vec<BlockPair> = ids.map(|(l, r)| BlockPair::new(l, r)).into();
                let tables = with_tables(&consumer, &peer);
                let transfer = peer.read(&tables, &pairs).unwrap();
                let report = transfer.wait(PATIENCE).unwrap().unwrap();
                assert_eq!(report.lane, Some(lane));
                assert_eq!(report.bytes, 3 * 7 * 1000);
                assert_eq!(report.operations, if gap == 0 { 3 * 5 } else { 3 * 7 });
                for layer in 0..3 {
                    for block in 0..32 {
                        let got = consumer.block(layer, block);
                        match ids.iter().find(|&&(local, _)| local == block) {
                            Some(&(_, remote)) => assert_eq!(got, producer.block(layer, remote)),
                            None => assert!(got.iter().all(|&byte| byte == 0xEE)),
                        }
                    }
                }
                let counters = consumer.engine.counters();
                let attached = lane == Lane::Attached;
                assert_eq!(counters.copy_batches, 1, "one for all");
                assert_eq!(counters.attached_calls, u64::from(attached));
                assert_eq!(counters.attached_short_calls, 0);
                let (mapped, read) = (counters.mapped_bytes, counters.attached_bytes);
                let expected = if attached {
                    (0, report.bytes)
                } else {
                    (report.bytes, 0)
                };
                assert_eq!((mapped, read), expected);
                assert_eq!((counters.served_bytes, counters.native_bytes), (0, 0));
                assert_eq!(
                    counters.ucx_operations, counters.messages_sent,
                    "no byte over UCX"
                );
                assert_eq!(producer.engine.counters().bytes_served_to_peers, 0);
            }
        }
    }
}

/// One run of 9 MiB and 3,000 single blocks: cut into batches of at most 4 MiB and 1,023 pieces.
#[test]
fn large_reads_are_cut_into_batches() {
    for lane in COPIES {
        let kind = loopback();
        let producer = side(engine(&kind, "producer"), 1, 9216, 1024, 0);
        producer.fill();
        let consumer = side(engine(&kind, "consumer"), 1, 9216, 1024, 0);
        let peer = connect(&consumer.engine, &producer.engine, lane);
        let tables = with_tables(&consumer, &peer);
        let read =
            |pairs: Vec<BlockPair>| {
                let transfer = peer.read(&tables, &pairs).unwrap();
                let report = transfer.wait(PATIENCE).unwrap().unwrap();
                assert!(pairs.iter().all(|pair| {
                    consumer.block(0, pair.local) == producer.block(0, pair.remote)
                }));
                (report.operations, consumer.engine.counters().copy_batches)
            };
        assert_eq!(
            read((0..9216).map(|n| BlockPair::new(n, n)).collect()),
            (1, 3)
        );
        let apart = (0..3000).map(|n| BlockPair::new(n, 9215 - n)).collect();
        assert_eq!(read(apart), (3000, 3 + 3));
        if lane == Lane::Attached {
            let counters = consumer.engine.counters();
            assert_eq!(counters.attached_calls, 6, "calls are full");
        }
    }
}

/// Our pools are mapped, somebody else's memory is read, and without either there are messages.
#[test]
fn the_lane_follows_the_memory() {
    let kind = Kind::Ucx;
    let plain = |name: &str, socket: ShareSocket| {
        let mut config = config(name);
        config.allow_emulation = false;
        config.share_socket = socket;
        start(&kind, Engine::builder(config))
    };
    let consumer = plain("consumer", ShareSocket::Off);
    let auto = |producer: &Engine| {
        let peer = consumer.connect(producer.describe().unwrap(), LaneChoice::Auto);
        peer.unwrap().lane()
    };
    let producer = side(plain("pool", ShareSocket::Abstract), 1, 4, 64, 0);
    assert_eq!(auto(&producer.engine), Lane::Mapped);
    // One region among others that is not a pool: the lane must do for all.
    let memory = foreign(4096);
    let region = producer.engine.register(&memory).unwrap();
    assert_eq!(auto(&producer.engine), Lane::Mapped, "no table lies in it");
    let _table = producer
        .engine
        .add_table(&region, TableSpec::dense(64, 4))
        .unwrap();
    assert_eq!(auto(&producer.engine), Lane::Attached);
    let pinned = consumer.connect(
        producer.engine.describe().unwrap(),
        LaneChoice::Pinned(Lane::Mapped),
    );
    let text = pinned.unwrap_err().to_string();
    assert!(text.contains("region 1 is not a host pool"), "{text}");
    let alone = side(plain("alone", ShareSocket::Off), 1, 4, 64, 0);
    assert_eq!(auto(&alone.engine), Lane::Served);
    // Another host's description, as far as anybody can tell.
    let mut elsewhere = producer.engine.describe().unwrap();
    elsewhere.host = "elsewhere".into();
    let pinned = consumer.connect(elsewhere, LaneChoice::Pinned(Lane::Attached));
    let text = pinned.unwrap_err().to_string();
    assert!(text.contains("on another host"), "{text}");
}

#[test]
fn device_memory_is_no_place_for_copies() {
    let kind = loopback();
    let producer = engine(&kind, "producer");
    let cuda = MemoryKind::Cuda { device: 0 };
    // SAFETY: loopback registers without touching it, and nobody reads it.
    let memory = unsafe { MemoryRegion::borrowed_kind(NonNull::dangling(), 64, cuda) }.unwrap();
    let region = producer.register(&memory).unwrap();
    let _table = producer
        .add_table(&region, TableSpec::dense(64, 1))
        .unwrap();
    let consumer = engine(&kind, "consumer");
    for (lane, reason) in [
        (Lane::Mapped, "region 0 is not a host pool"),
        (Lane::Attached, "region 0 is cuda:0 memory"),
    ] {
        let error = consumer.connect(producer.describe().unwrap(), LaneChoice::Pinned(lane));
        let text = error.unwrap_err().to_string();
        assert!(text.contains(reason), "{text}");
    }
}

/// Tables that are added later are found by connecting again; a region that was not shared when the
/// peer was first asked is asked for.
#[test]
fn pools_that_come_later_are_fetched() {
    for lane in COPIES {
        let kind = loopback();
        let producer = engine(&kind, "producer");
        let consumer = side(engine(&kind, "consumer"), 1, 8, 64, 0);
        let peer = connect(&consumer.engine, &producer, lane);
        assert_eq!(peer.tables().count(), 0);
        let producer = side(producer, 1, 8, 64, 0);
        producer.fill();
        let peer = connect(&consumer.engine, &producer.engine, lane);
        let tables = with_tables(&consumer, &peer);
        let transfer = peer.read(&tables, &[BlockPair::new(3, 5)]).unwrap();
        transfer.wait(PATIENCE).unwrap().unwrap();
        assert_eq!(consumer.block(0, 3), producer.block(0, 5));
    }
}

/// The bytes of an engine that has ended are nobody's: its peer is lost, and a transfer that comes too
/// late is refused or fails.
#[test]
fn an_engine_that_has_ended_is_not_read() {
    for lane in COPIES {
        let kind = loopback();
        let producer = side(engine(&kind, "producer"), 1, 8, 64, 0);
        let consumer = side(engine(&kind, "consumer"), 1, 8, 64, 0);
        let peer = connect(&consumer.engine, &producer.engine, lane);
        let tables = with_tables(&consumer, &peer);
        producer.engine.shutdown(PATIENCE).unwrap();
        until("the goodbye has come", || peer.gone().is_some());
        assert!(peer.read(&tables, &[BlockPair::new(0, 0)]).is_err());
        assert_eq!(consumer.engine.counters().copy_batches, 0);
    }
}

#[test]
fn a_socket_in_a_directory_lives_as_long_as_its_engine() {
    let directory = std::env::temp_dir().join(format!("kvferry-test-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let kind = loopback();
    let mut shared = config("producer");
    shared.share_socket = ShareSocket::Directory(directory.clone());
    let producer = side(start(&kind, Engine::builder(shared)), 1, 4, 64, 0);
    producer.fill();
    let name = producer.engine.describe().unwrap().unix_socket.unwrap();
    assert!(name.starts_with(directory.to_str().unwrap()), "{name}");
    let consumer = side(engine(&kind, "consumer"), 1, 4, 64, 0);
    let peer = connect(&consumer.engine, &producer.engine, Lane::Mapped);
    let tables = with_tables(&consumer, &peer);
    let transfer = peer.read(&tables, &[BlockPair::new(0, 2)]).unwrap();
    transfer.wait(PATIENCE).unwrap().unwrap();
    assert_eq!(consumer.block(0, 0), producer.block(0, 2));
    producer.engine.shutdown(PATIENCE).unwrap();
    until("the socket is removed", || {
        !std::path::Path::new(&name).exists()
    });
    std::fs::remove_dir_all(&directory).unwrap();

    let mut bad = config("producer");
    bad.share_socket = ShareSocket::Directory("relative".into());
    let text = bad.validate().unwrap_err().to_string();
    assert!(
        text.contains("share_socket is relative, expected an absolute path"),
        "{text}"
    );
}

/// The abstract name of an engine's share socket.
fn share_socket(engine: &Engine) -> SocketAddrUnix {
    let name = engine.describe().unwrap().unix_socket.unwrap();
    SocketAddrUnix::new_abstract_name(name.strip_prefix('@').unwrap().as_bytes()).unwrap()
}

/// Whatever comes over the share socket, the engine goes on, and the next peer is answered.
#[test]
fn garbage_on_the_share_socket_disturbs_nobody() {
    let kind = loopback();
    let producer = side(engine(&kind, "producer"), 1, 4, 64, 0);
    let address = share_socket(&producer.engine);
    let dial_in = || {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        dial(&socket, &address).unwrap();
        socket
    };
    let answer = |request: &[u8]| {
        let socket = dial_in();
        send(&socket, request, SendFlags::NOSIGNAL).unwrap();
        let mut bytes = vec![0; 1 << 16];
        let (_, length) = recv(&socket, &mut bytes, RecvFlags::empty()).unwrap();
        ShareReply::decode(&bytes[..length]).unwrap()
    };
    let incarnation = producer.engine.incarnation();
    let right = ShareRequest {
        from: incarnation,
        expects: incarnation,
    }
    .encode()
    .unwrap();
    // Silent ones, more than are remembered.
    let silent: Vec<_> = (0..80).map(|_| dial_in()).collect();
    for length in 1..right.len() {
        assert!(matches!(
            answer(&right[..length]),
            ShareReply::Refused { .. }
        ));
    }
    let long = vec![0x81; 1 << 15];
    assert!(matches!(answer(&long), ShareReply::Refused { .. }));
    let mut stranger = ShareRequest {
        from: incarnation,
        expects: incarnation,
    };
    stranger.expects = kvferry_engine::wire::Incarnation::random().unwrap();
    let refused = answer(&stranger.encode().unwrap());
    assert!(matches!(refused, ShareReply::Refused { reason } if reason.contains("not")));
    let ShareReply::Pools { pools, more, .. } = answer(&right) else {
        panic!("the right request is answered");
    };
    assert_eq!((pools.len(), pools[0].bytes, more), (1, 4 * 64, false));
    drop(silent);
    let consumer = side(engine(&kind, "consumer"), 1, 4, 64, 0);
    assert_eq!(
        connect(&consumer.engine, &producer.engine, Lane::Mapped).lane(),
        Lane::Mapped
    );
}

/// A share socket that says nonsense, or nothing, refuses the lane in time and says why.
#[test]
fn a_share_socket_that_is_not_the_engines_is_refused() {
    let kind = loopback();
    let producer = side(engine(&kind, "producer"), 1, 4, 64, 0);
    let consumer = engine(&kind, "consumer");
    let name = format!("kvferry-test-stranger-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(name.as_bytes()).unwrap();
    // Of the wrong type: nobody listens there, as far as packets go.
    let _listener = UnixListener::bind_addr(&address).unwrap();
    let mut description = producer.engine.describe().unwrap();
    description.unix_socket = Some(format!("@{name}"));
    let refused = |description| {
        let error = consumer
            .connect(description, LaneChoice::Pinned(Lane::Mapped))
            .unwrap_err();
        assert!(matches!(error, ConnectError::LaneUnavailable { .. }));
        error.to_string()
    };
    let text = refused(description.clone());
    assert!(text.contains("connecting to its unix socket"), "{text}");
    // Another engine's socket.
    let other = engine(&kind, "other");
    description.unix_socket = other.describe().unwrap().unix_socket;
    let text = refused(description);
    assert!(
        text.contains("it shares nothing: this is incarnation"),
        "{text}"
    );
}

/// Operations and bytes in flight are bounded, and a transfer does not wait for another one's end.
#[test]
fn windows_bound_what_is_in_flight() {
    for lane in COPIES {
        let control = FaultControl::new(1, FaultRates::none()).unwrap();
        let network = LoopbackNetwork::new();
        let kind = Kind::Loopback(network.clone());
        let producer = side(engine(&kind, "producer"), 1, 32, 1 << 20, 0);
        let mut narrow = config("consumer");
        narrow.read_window_bytes = 9 << 20;
        let held = control.clone();
        let (service, parked) = park();
        let consumer = Engine::builder(narrow)
            .service(7, service)
            .start_on(move || FaultFabric::new(LoopbackFabric::new(&network, 4096)?, &held))
            .unwrap();
        let consumer = side(consumer, 1, 40, 1 << 20, 0);
        let peer = connect(&consumer.engine, &producer.engine, lane);
        let tables = with_tables(&consumer, &peer);
        control.stall();
        parked.park(&consumer.engine);
        let all: Vec<BlockPair> = (0..32).map(|n| BlockPair::new(n, n)).collect();
        let large = peer.read(&tables, &all).unwrap();
        let small = peer.read(&tables, &[BlockPair::new(39, 7)]).unwrap();
        parked.go();
        // 4 MiB of one, 1 MiB of the other, which does not wait behind it, and 4 MiB more.
        until("the window is full", || {
            consumer.engine.counters().copy_batches == 3
        });
        parked.park(&consumer.engine);
        assert_eq!(consumer.engine.counters().copy_batches, 3);
        parked.go();
        assert!(large.poll_outcome().is_none() && small.poll_outcome().is_none());
        control.release();
        assert_eq!(large.wait(PATIENCE).unwrap().unwrap().bytes, 32 << 20);
        assert_eq!(small.wait(PATIENCE).unwrap().unwrap().bytes, 1 << 20);
        assert_eq!(consumer.engine.counters().copy_batches, 8 + 1);
    }
}

//! The fabric over whatever UCX is loaded: several fabrics, real sockets.
//!
//! Run with each generation; `KVFERRY_EXPECT_UCX` (such as `1.22`) says which one is meant. Set
//! `UCX_NET_DEVICES=lo`.

mod endings;
mod harness;

use self::harness::{LIMIT, Node, buffer, bytes_of, pattern, region, until};
use super::operations::{How, Submitted};
use super::worker::MESSAGE_ID;
use super::*;
use crate::fabric::{Armed, Fabric, KeyId, Posted, ReadOperation, ReadToken};
use crate::memory::MemoryRegion;
use ucx_sys::{UCP_AM_SEND_FLAG_EAGER, UCP_AM_SEND_FLAG_RNDV, kvf_ep_text, ucp_am_send_nbx};

#[test]
fn segments_of_every_size_arrive_whole() {
    let (mut a, mut b) = (Node::new(false), Node::new(false));
    let (to_b, to_a) = (a.connect(1, &b), b.connect(7, &a));
    let max = a.fabric.capabilities().max_segment_bytes;
    let sizes = [1, 2, 63, 64, 4096, 8185, 8186, 65_536, max - 1, max];
    let expected: Vec<Vec<u8>> = (0..)
        .zip(sizes)
        .map(|(seed, size)| pattern(seed, size))
        .collect();
    for segment in &expected {
        a.send(to_b, segment);
        b.send(to_a, segment);
    }
    until(&mut [&mut a, &mut b], "segments both ways", |nodes| {
        nodes
            .iter()
            .all(|node| node.sink.segments.len() == sizes.len() && node.all_sends_are_reported())
    });
    for node in [&a, &b] {
        let mut arrived = node.sink.segments.clone();
        arrived.sort_by_key(Vec::len);
        assert!(arrived == expected, "segments were altered");
        assert!(node.sink.sent.iter().all(|(_, _, result)| result.is_ok()));
        assert!(node.sink.failed.is_empty() && node.sink.protocol_errors.is_empty());
    }
}

#[test]
fn a_thousand_segments_in_a_row_arrive_once_each() {
    let (mut a, mut b) = (Node::new(false), Node::new(false));
    let to_b = a.connect(1, &b);
    let segment = |number: usize| {
        let mut bytes = pattern(number, 8 + number * 37 % 20_000);
        bytes[..8].copy_from_slice(&(number as u64).to_le_bytes());
        bytes
    };
    for number in 0..1000 {
        a.send(to_b, &segment(number));
    }
    until(&mut [&mut a, &mut b], "1,000 segments", |nodes| {
        nodes[1].sink.segments.len() == 1000 && nodes[0].all_sends_are_reported()
    });
    let number = |bytes: &Vec<u8>| u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    b.sink.segments.sort_by_key(number);
    for (expected, found) in b.sink.segments.iter().enumerate() {
        assert!(
            found == &segment(expected),
            "segment {expected} was altered"
        );
    }
    assert_eq!(a.fabric.operations.len(), 0);
}

/// The longest segment is one eager fragment over tcp, in the words of either generation.
#[test]
fn the_longest_segment_is_one_fragment() {
    let (mut a, b) = (Node::new(false), Node::new(false));
    let to_b = a.connect(1, &b);
    assert_eq!(a.fabric.transports(to_b), "messages over tcp/lo");
    let max = a.fabric.capabilities().max_segment_bytes;
    let chosen = std::env::vars().find(|(name, _)| name.ends_with("_SEG_SIZE"));
    assert_eq!(chosen, None, "unset it: the default is tested here");
    assert_eq!(max, 261_888);
    let link = a.fabric.endpoints[&to_b].message.as_ref().unwrap().handle();
    // SAFETY: the endpoint is open; the result is a string of malloc's.
    let text = unsafe { worker::owned(kvf_ep_text(link)) };
    let limits = [
        ("<egr/short>..262137", 262_137),
        ("1..262136 | zero-copy", 262_136),
    ];
    let limit = limits.into_iter().find(|(words, _)| text.contains(words));
    assert!(
        limit.is_some_and(|(_, bytes)| max <= bytes),
        "{max} bytes are not eager in {text}"
    );
}

#[test]
fn sleepers_in_two_threads_wake_one_another() {
    const ROUNDS: usize = 200;
    let (address, addresses) = std::sync::mpsc::channel();
    let (answer, answers) = std::sync::mpsc::channel();
    let echo = std::thread::spawn(move || {
        let mut b = Node::new(false);
        address.send(b.fabric.addresses()).unwrap();
        b.fabric
            .connect(EndpointId(1), &answers.recv_timeout(LIMIT).unwrap())
            .unwrap();
        for round in 0..ROUNDS {
            until(&mut [&mut b], "a question", |nodes| {
                nodes[0].sink.segments.len() > round
            });
            let question = b.sink.segments[round].clone();
            b.send(EndpointId(1), &question);
        }
        // Stays until the other side has gone.
        until(&mut [&mut b], "the end", |nodes| {
            !nodes[0].sink.failed.is_empty()
        });
    });
    let mut a = Node::new(false);
    answer.send(a.fabric.addresses()).unwrap();
    a.fabric
        .connect(EndpointId(1), &addresses.recv_timeout(LIMIT).unwrap())
        .unwrap();
    for round in 0..ROUNDS {
        a.send(EndpointId(1), &pattern(round, 100 + round));
        until(&mut [&mut a], "an answer", |nodes| {
            nodes[0].sink.segments.len() > round
        });
        assert_eq!(a.sink.segments[round], pattern(round, 100 + round));
    }
    drop(a);
    echo.join().unwrap();
}

/// A consumer and a producer with a data context, and the producer's region of `bytes` bytes.
fn reader_and_source(bytes: usize) -> (Node, Node, MemoryRegion, EndpointId, KeyId) {
    let (mut a, mut b) = (Node::new(true), Node::new(true));
    assert_eq!(a.fabric.capabilities().native, NativeReads::Emulated);
    let source = region(bytes);
    source.write_at(0, &pattern(5, bytes)).unwrap();
    let key = b.fabric.register(&source).unwrap().key.unwrap();
    let to_b = a.connect(1, &b);
    assert_eq!(a.fabric.native_reads(to_b), NativeReads::Emulated);
    assert_eq!(
        a.fabric.transports(to_b),
        "messages over tcp/lo, data over tcp/lo"
    );
    let key = a.fabric.import_key(to_b, &key).unwrap();
    // 1.13 aborts a process that ends, or whose peer does, while it answers the peer's first read.
    let target = region(1);
    let local_handle = a.fabric.register(&target).unwrap().handle;
    let first = ReadOperation {
        key,
        remote_address: source.address(),
        local: &target,
        local_handle,
        local_offset: 0,
        bytes: 1,
    };
    a.read(to_b, 0, &first).unwrap();
    until(&mut [&mut a, &mut b], "the first byte", |nodes| {
        nodes[0].sink.reads.len() == 1
    });
    a.fabric.deregister(local_handle);
    a.sink.reads.clear();
    (a, b, source, to_b, key)
}

#[test]
fn scattered_reads_put_every_byte_where_it_belongs() {
    const BLOCK: usize = 4096;
    let (mut a, mut b, source, to_b, key) = reader_and_source(64 * BLOCK);
    let target = region(64 * BLOCK);
    target.fill(0, target.bytes(), 0xee).unwrap();
    let local = a.fabric.register(&target).unwrap();
    let mut expected = bytes_of(&target);
    // Every third block, to another place, with odd ends.
    for (token, block) in (0..64).step_by(3).enumerate() {
        let (from, to, bytes) = (
            block * BLOCK + 1,
            (63 - block) * BLOCK + 3,
            BLOCK - 7 - token,
        );
        expected[to..to + bytes].copy_from_slice(&pattern(5, 64 * BLOCK)[from..from + bytes]);
        let operation = ReadOperation {
            key,
            remote_address: source.address() + from as u64,
            local: &target,
            local_handle: local.handle,
            local_offset: to as u64,
            bytes: bytes as u64,
        };
        a.read(to_b, token as u64, &operation).unwrap();
    }
    until(&mut [&mut a, &mut b], "22 reads", |nodes| {
        nodes[0].sink.reads.len() == 22
    });
    assert!(
        a.sink.reads.iter().all(|(_, result)| result.is_ok()),
        "{:?}",
        a.sink.reads
    );
    let mut tokens: Vec<u64> = a.sink.reads.iter().map(|(token, _)| token.0).collect();
    tokens.sort_unstable();
    assert_eq!(tokens, (0..22).collect::<Vec<_>>());
    assert!(bytes_of(&target) == expected, "bytes went astray");
    a.fabric.deregister(local.handle);
    let operation = ReadOperation {
        key,
        remote_address: source.address(),
        local: &target,
        local_handle: local.handle,
        local_offset: 0,
        bytes: 1,
    };
    let error = a.read(to_b, 99, &operation).unwrap_err();
    assert!(error.status.ends_with("is not registered"), "{error}");
}

/// C73: a key belongs to one endpoint; on another, or after it, it is an error that says so.
#[test]
fn c73_a_key_is_refused_on_another_endpoint() {
    let (mut a, mut b, source, to_b, key) = reader_and_source(4096);
    let again = a.connect(2, &b);
    let target = region(4096);
    let local_handle = a.fabric.register(&target).unwrap().handle;
    let operation = ReadOperation {
        key,
        remote_address: source.address(),
        local: &target,
        local_handle,
        local_offset: 0,
        bytes: 4096,
    };
    let error = a.read(again, 1, &operation).unwrap_err();
    assert_eq!(
        error.to_string(),
        "ucp_get_nbx failed: key number 1 belongs to endpoint 1, not to endpoint 2; import it for \
         each"
    );
    a.fabric.close(to_b);
    assert!(
        a.read(to_b, 2, &operation)
            .unwrap_err()
            .status
            .contains("being closed")
    );
    until(&mut [&mut a, &mut b], "closing", |nodes| {
        !nodes[0].sink.closed.is_empty()
    });
    let error = a.read(again, 3, &operation).unwrap_err();
    assert!(error.status.contains("there is no key number 1"), "{error}");
    assert!(
        a.read(to_b, 4, &operation)
            .unwrap_err()
            .status
            .contains("no such endpoint")
    );
    // The other endpoint is none the worse.
    a.send(again, b"alive");
    until(&mut [&mut a, &mut b], "a segment", |nodes| {
        nodes[1].sink.segments.len() == 1
    });
    assert!(a.sink.reads.is_empty());
}

/// A key ends alone: the endpoint and its other keys go on, and the key's number is refused.
#[test]
fn a_key_can_be_given_up_before_its_endpoint() {
    let (mut a, mut b, source, to_b, key) = reader_and_source(4096);
    let packed = b.fabric.register(&region(64)).unwrap().key.unwrap();
    let other = a.fabric.import_key(to_b, &packed).unwrap();
    let again = a.connect(2, &b);
    let target = region(4096);
    let local_handle = a.fabric.register(&target).unwrap().handle;
    let operation = ReadOperation {
        key,
        remote_address: source.address(),
        local: &target,
        local_handle,
        local_offset: 0,
        bytes: 4096,
    };
    // Another endpoint's is left alone; so is what is not there.
    a.fabric.forget_key(again, key);
    a.fabric.forget_key(to_b, other);
    a.fabric.forget_key(to_b, other);
    a.read(to_b, 1, &operation).unwrap();
    until(&mut [&mut a, &mut b], "the read", |nodes| {
        nodes[0].sink.reads.len() == 1
    });
    assert_eq!(bytes_of(&target), pattern(5, 4096));
    a.fabric.forget_key(to_b, key);
    let error = a.read(to_b, 2, &operation).unwrap_err();
    assert!(error.status.contains("there is no key number"), "{error}");
    assert_eq!(a.fabric.memory.keys(), 0);
}

#[test]
fn without_a_data_context_there_is_nothing_to_read_with() {
    let (mut a, b) = (Node::new(false), Node::new(true));
    let NativeReads::Unavailable(reason) = &a.fabric.capabilities().native else {
        panic!()
    };
    assert!(reason.contains(",tcp/lo,"), "{reason}");
    assert!(reason.contains("allow_emulation"), "{reason}");
    assert_eq!(a.fabric.addresses().data, None);
    let registered = a.fabric.register(&region(4096)).unwrap();
    assert_eq!(registered.key, None);
    let to_b = a.connect(1, &b);
    assert!(matches!(
        a.fabric.native_reads(to_b),
        NativeReads::Unavailable(_)
    ));
    let error = a.fabric.import_key(to_b, &[0; 9]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "ucp_ep_rkey_unpack failed: endpoint number 1 has no one-sided reads: there is no data \
         context on both sides"
    );
    a.fabric.deregister(registered.handle);
}

#[test]
fn addresses_and_keys_that_are_no_such_thing_do_no_harm() {
    let (mut a, mut b, _source, to_b, _) = reader_and_source(4096);
    let real = b.fabric.addresses();
    let mut next = 100;
    let mut attempt = |a: &mut Node, message: Vec<u8>| {
        next += 1;
        let to = Addresses {
            data: Some(message.clone()),
            message,
        };
        let error = a.fabric.connect(EndpointId(next), &to).unwrap_err();
        assert!(error.status.contains("a UCX worker address"), "{error}");
    };
    for length in 0..real.message.len() {
        attempt(&mut a, real.message[..length].to_vec());
    }
    for seed in 0..300 {
        attempt(&mut a, pattern(seed, 1 + seed % 97));
    }
    for at in 0..real.message.len() {
        let mut bytes = real.message.clone();
        bytes[at] ^= 0xff;
        attempt(&mut a, bytes);
    }
    for length in 0..64 {
        for seed in 0..8 {
            let error = a
                .fabric
                .import_key(to_b, &pattern(seed, length))
                .unwrap_err();
            assert!(error.status.contains("a UCX remote key"), "{error}");
        }
    }
    // The other kind, a data side that is damaged, and a data address for messages.
    assert!(a.fabric.import_key(to_b, &real.message).is_err());
    let to = Addresses {
        data: Some(real.message[1..].to_vec()),
        message: real.message,
    };
    a.fabric.connect(EndpointId(2), &to).unwrap();
    let NativeReads::Unavailable(reason) = a.fabric.native_reads(EndpointId(2)) else {
        panic!("a damaged address makes a data endpoint");
    };
    assert!(reason.contains("a UCX worker address"), "{reason}");
    a.fabric.close(EndpointId(2));
    a.send(to_b, b"unharmed");
    until(&mut [&mut a, &mut b], "a segment", |nodes| {
        nodes[1]
            .sink
            .segments
            .iter()
            .any(|segment| segment == b"unharmed")
            && nodes[0].fabric.endpoints.len() == 1
    });
}

/// A rendezvous and a header are things that no kvferry sends.
#[test]
fn foreign_messages_are_protocol_errors() {
    let (mut a, mut b) = (Node::new(false), Node::new(false));
    let to_b = a.connect(1, &b);
    let link = a.fabric.endpoints[&to_b].message.as_ref().unwrap().handle();
    let (bytes, header) = (pattern(3, 100_000), [1_u8; 4]);
    let foreign = [
        (UCP_AM_SEND_FLAG_RNDV, &header[..0]),
        (UCP_AM_SEND_FLAG_EAGER, &header[..]),
    ];
    for (flags, header) in foreign {
        let send = Operation::Send {
            endpoint: to_b,
            buffer: buffer(&bytes),
        };
        let submitted = a
            .fabric
            .operations
            .submit(send, How::host(flags), |_, param| {
                let (start, count) = (bytes.as_ptr().cast(), bytes.len());
                let (header, length) = (header.as_ptr().cast(), header.len());
                // SAFETY: the endpoint is open; bytes and header outlive the test's waiting below.
                unsafe { ucp_am_send_nbx(link, MESSAGE_ID, header, length, start, count, param) }
            });
        if let Submitted::Pending = submitted {
            a.fabric.endpoints.get_mut(&to_b).unwrap().pending += 1;
        }
    }
    until(&mut [&mut a, &mut b], "two errors", |nodes| {
        nodes[1].sink.protocol_errors.len() == 2 && nodes[0].fabric.operations.len() == 0
    });
    let mut errors = b.sink.protocol_errors.clone();
    errors.sort_unstable();
    assert_eq!(
        errors,
        [
            "a rendezvous active message",
            "an active message with a header"
        ]
    );
    assert!(b.sink.segments.is_empty());
}

#[test]
fn a_panic_of_the_sink_goes_on_after_ucx_has_returned() {
    let (mut a, mut b) = (Node::new(false), Node::new(false));
    let to_b = a.connect(1, &b);
    for segment in [b"one", b"two", b"six"] {
        a.send(to_b, segment);
    }
    b.sink.panic = true;
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        until(&mut [&mut a, &mut b], "a panic", |nodes| {
            !nodes[1].sink.segments.is_empty()
        });
    }));
    assert!(panicked.is_err());
    assert!(b.sink.segments.is_empty());
    until(&mut [&mut a, &mut b], "the others", |nodes| {
        nodes[1].sink.segments.len() == 2
    });
    assert_eq!(b.sink.segments, [b"two", b"six"]);
}

/// C72 and C49: a transport list over which nobody could be reached is refused, with the reason.
#[test]
fn transport_lists_that_cannot_carry_messages_are_refused() {
    for list in ["cma", "posix,cma,self", "self", "posix,sysv"] {
        let error = UcxFabric::new(&over(list)).unwrap_err();
        let text = error.to_string();
        assert_eq!(error.call, "ucp_ep_create (self-check)", "{text}");
        assert!(
            text.contains(&format!("(UCX_TLS={list}, UCX_NET_DEVICES=")),
            "{text}"
        );
        assert!(text.contains("no active messages transport"), "{text}");
        assert_eq!(
            text.contains("no peer failure handler"),
            list != "cma",
            "{text}"
        );
    }
    let error = UcxFabric::new(&over("nosuch")).unwrap_err();
    assert_eq!(error.call, "ucp_init");
    assert!(
        error.status.contains("no usable transports/devices"),
        "{error}"
    );
    for list in ["tcp", "self,tcp", "posix,sysv,cma,tcp", "all", "^sm"] {
        UcxFabric::new(&over(list)).unwrap();
    }
}

/// C71: a device that is not here is refused, with those that are.
#[test]
fn devices_that_are_not_here_are_refused() {
    let options = UcxOptions {
        net_devices: Some("lo,nosuch0".into()),
        ..UcxOptions::default()
    };
    let error = UcxFabric::new(&options).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("no network device \"nosuch0\""), "{text}");
    assert!(text.contains("UCX_NET_DEVICES=lo,nosuch0"), "{text}");
    let options = UcxOptions {
        net_devices: Some("lo".into()),
        ..UcxOptions::default()
    };
    UcxFabric::new(&options).unwrap();
}

/// The data context never gets a transport that can emulate. Should UCX find a way all the same, it shows
/// in the endpoint: no key is imported, and the reason is given.
#[test]
fn a_data_endpoint_that_would_be_emulated_is_not_used() {
    let plan = || {
        UcxFabric::planned(&UcxOptions::default(), |_, _, _| {
            DataPlan::Real("tcp".into())
        })
    };
    let (mut a, mut b) = (Node::of(plan().unwrap()), Node::of(plan().unwrap()));
    let error = b.fabric.register(&region(4096)).unwrap_err();
    assert!(
        error.status.contains("no device knows the memory"),
        "{error}"
    );
    let mut emulating = Node::new(true);
    let key = emulating
        .fabric
        .register(&region(4096))
        .unwrap()
        .key
        .unwrap();
    let to_b = a.connect(1, &b);
    let NativeReads::Unavailable(reason) = a.fabric.native_reads(to_b) else {
        panic!("tcp is taken for a real GET");
    };
    assert_eq!(
        reason,
        "UCX would emulate reads from this peer: its data endpoint is over tcp/lo, which has no real GET"
    );
    let error = a.fabric.import_key(to_b, &key).unwrap_err();
    assert!(error.status.ends_with(&reason), "{error}");
    // Messages are none the worse.
    a.send(to_b, b"alive");
    until(&mut [&mut a, &mut b], "a segment", |nodes| {
        nodes[1].sink.segments.len() == 1
    });
}

/// Options with a list of transports.
fn over(transports: &str) -> UcxOptions {
    UcxOptions {
        transports: Some(transports.to_owned()),
        ..UcxOptions::default()
    }
}

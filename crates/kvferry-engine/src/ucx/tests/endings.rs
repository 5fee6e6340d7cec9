//! How endpoints, workers and fabrics end, and what is reported of what was under way.

use std::time::Instant;

use super::*;

/// Fills the way to a peer that does not progress, until some sends are pending.
fn clog(a: &mut Node, to: EndpointId) -> usize {
    let segment = pattern(1, a.fabric.capabilities().max_segment_bytes);
    let deadline = Instant::now() + LIMIT;
    let mut pending = 0;
    while pending < 16 {
        assert!(Instant::now() < deadline, "the peer's buffers never fill");
        a.send(to, &segment);
        a.progress();
        pending = a.fabric.operations.len();
    }
    pending
}

/// The caller is told at once; the message side goes when the peer has taken what was sent, or dies.
#[test]
fn closing_reports_every_pending_send_and_then_the_end() {
    for dies in [false, true] {
        let (mut a, mut b) = (Node::new(false), Node::new(false));
        let to_b = a.connect(1, &b);
        a.send(to_b, b"first");
        until(&mut [&mut a, &mut b], "the first", |nodes| {
            nodes[1].sink.segments.len() == 1
        });
        assert!(clog(&mut a, to_b) >= 16);
        a.fabric.close(to_b);
        a.fabric.close(to_b);
        while a.progress() {}
        assert_eq!(a.sink.closed, [to_b], "although its sends are under way");
        assert!(a.all_sends_are_reported());
        assert!(a.sink.sent.iter().any(|(_, _, result)| result.is_err()));
        assert!(a.fabric.operations.len() >= 16);
        // A new endpoint to somebody else works, also when the old one's peer dies now.
        if dies {
            end_unanswered(&mut b);
            b = Node::new(false);
        }
        let again = a.connect(2, &b);
        a.send(again, b"again");
        until(&mut [&mut a, &mut b], "both", |nodes| {
            let segments = &nodes[1].sink.segments;
            nodes[0].fabric.operations.len() == 0 && segments.iter().any(|it| it == b"again")
        });
        assert!(a.all_sends_are_reported());
        assert_eq!(a.sink.closed, [to_b]);
        assert!(a.sink.failed.is_empty(), "our own closing is no failure");
        assert_eq!(a.fabric.operations.len(), 0);
        let (_, error) = a.fabric.send(to_b, buffer(b"late")).unwrap_err();
        assert!(error.status.contains("no such endpoint"), "{error}");
    }
}

/// C51 and its kind: a dead peer is reported once, and what is posted afterwards is an error.
#[test]
fn a_peer_that_goes_away_fails_the_endpoint_once() {
    let (mut a, mut b, source, to_b, key) = reader_and_source(1 << 20);
    let target = region(1 << 20);
    let local_handle = a.fabric.register(&target).unwrap().handle;
    a.send(to_b, b"hello");
    until(&mut [&mut a, &mut b], "hello", |nodes| {
        nodes[1].sink.segments.len() == 1
    });
    let operation = ReadOperation {
        key,
        remote_address: source.address(),
        local: &target,
        local_handle,
        local_offset: 0,
        bytes: 1 << 20,
    };
    // The peer's thread answers nothing any more, so these stay.
    for token in 0..8 {
        a.read(to_b, token, &operation).unwrap();
    }
    clog(&mut a, to_b);
    assert!(a.sink.reads.is_empty());
    end_unanswered(&mut b);
    until(&mut [&mut a], "failure", |nodes| {
        !nodes[0].sink.failed.is_empty()
    });
    assert_eq!(a.sink.failed[0].0, to_b);
    assert!(matches!(
        a.fabric.native_reads(to_b),
        NativeReads::Unavailable(_)
    ));
    assert!(a.fabric.transports(to_b).starts_with("none"));
    // By us: UCX is not asked.
    let (_, error) = a.fabric.send(to_b, buffer(b"late")).unwrap_err();
    assert!(error.to_string().contains("has failed"), "{error}");
    let error = a.read(to_b, 9, &operation).unwrap_err();
    assert!(error.to_string().contains("has failed"), "{error}");
    a.fabric.close(to_b);
    until(&mut [&mut a], "closing", |nodes| {
        !nodes[0].sink.closed.is_empty()
    });
    assert_eq!(a.sink.failed.len(), 1, "{:?}", a.sink.failed);
    assert!(a.all_sends_are_reported());
    assert_eq!(a.sink.reads.len(), 8);
    assert!(
        a.sink.reads.iter().all(|(_, result)| result.is_err()),
        "{:?}",
        a.sink.reads
    );
    assert_eq!(a.fabric.operations.len(), 0);
}

#[test]
fn nobody_at_the_address_is_an_error_at_once_or_a_failure() {
    let mut a = Node::new(true);
    let gone = Node::new(true).fabric.addresses();
    match a.fabric.connect(EndpointId(1), &gone) {
        Err(error) => assert_eq!(error.call, "ucp_ep_create"),
        Ok(()) => {
            until(&mut [&mut a], "failure", |nodes| {
                !nodes[0].sink.failed.is_empty()
            });
            a.fabric.close(EndpointId(1));
            until(&mut [&mut a], "closing", |nodes| {
                !nodes[0].sink.closed.is_empty()
            });
        }
    }
}

/// A consumer with reads and sends that its peer does not answer.
fn with_work_under_way() -> ([MemoryRegion; 2], Node, Node, EndpointId) {
    let (mut a, mut b, source, to_b, key) = reader_and_source(1 << 20);
    let target = region(1 << 20);
    let local_handle = a.fabric.register(&target).unwrap().handle;
    a.send(to_b, b"hello");
    until(&mut [&mut a, &mut b], "hello", |nodes| {
        nodes[1].sink.segments.len() == 1
    });
    let operation = ReadOperation {
        key,
        remote_address: source.address(),
        local: &target,
        local_handle,
        local_offset: 0,
        bytes: 1 << 20,
    };
    for token in 0..4 {
        a.read(to_b, token, &operation).unwrap();
    }
    clog(&mut a, to_b);
    assert!(a.fabric.operations.len() >= 16 && a.sink.reads.is_empty());
    ([source, target], a, b, to_b)
}

fn everything_was_reported(a: &mut Node, endpoint: EndpointId) {
    assert!(a.all_sends_are_reported());
    assert_eq!(a.sink.reads.len(), 4);
    assert!(
        a.sink.reads.iter().all(|(_, result)| result.is_err()),
        "{:?}",
        a.sink.reads
    );
    assert_eq!(a.sink.closed, [endpoint]);
    assert_eq!(a.fabric.operations.len(), 0);
    assert!(a.fabric.event_fds().iter().all(Option::is_none));
    assert!(!a.progress());
    assert_eq!(a.fabric.arm(), Armed::Idle);
}

#[test]
fn shutdown_without_time_reports_everything() {
    let (_memory, mut a, mut b, to_b) = with_work_under_way();
    let Node { fabric, sink, .. } = &mut a;
    fabric.shutdown(sink, Instant::now());
    everything_was_reported(&mut a, to_b);
    let error = a
        .fabric
        .connect(EndpointId(2), &b.fabric.addresses())
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "connect failed: the fabric was shut down"
    );
    assert!(a.fabric.register(&region(4096)).is_err());
    assert!(a.fabric.send(to_b, buffer(b"late")).is_err());
    let Node { fabric, sink, .. } = &mut a;
    fabric.shutdown(sink, Instant::now() + LIMIT);
    assert_eq!(a.sink.closed, [to_b]);
    end_unanswered(&mut b);
}

/// Ends a node without progress, as a kill would: 1.13 aborts when it answers an emulated read of a
/// consumer that is gone, and may crash when it is destroyed with answers in its queue.
fn end_unanswered(node: &mut Node) {
    node.fabric.end(&mut node.sink);
    assert!(node.sink.closed.is_empty());
}

/// What shutting down comes to when operations do not end by its deadline.
#[test]
fn destroying_the_workers_ends_what_is_left() {
    let (_memory, mut a, mut b, to_b) = with_work_under_way();
    a.fabric.end(&mut a.sink);
    everything_was_reported(&mut a, to_b);
    end_unanswered(&mut b);
}

/// Closing is local: tcp keeps the connection while the other side sends on it, and UCX tells nobody.
#[test]
fn a_side_that_closes_does_not_disturb_the_other() {
    const ROUNDS: usize = 10;
    let (mut a, mut b) = (Node::new(true), Node::new(true));
    let mut to_a = b.connect(0, &a);
    for round in 0..ROUNDS {
        let to_b = a.connect(round as u64, &b);
        a.send(to_b, &pattern(round, 5000));
        b.send(to_a, &pattern(round, 6000));
        until(&mut [&mut a, &mut b], "both ways", |nodes| {
            nodes
                .iter()
                .all(|node| node.sink.segments.len() == 2 * round + 1)
        });
        a.fabric.close(to_b);
        until(&mut [&mut a, &mut b], "closing", |nodes| {
            nodes[0].sink.closed.len() == round + 1
        });
        b.send(to_a, &pattern(round, 7000));
        let once_more = a.connect((ROUNDS + round) as u64, &b);
        a.send(once_more, &pattern(round, 8000));
        until(&mut [&mut a, &mut b], "both ways again", |nodes| {
            nodes
                .iter()
                .all(|node| node.sink.segments.len() == 2 * round + 2)
        });
        if round % 2 == 1 {
            b.fabric.close(to_a);
            to_a = b.connect(round as u64, &a);
        }
    }
    for round in 0..ROUNDS {
        assert!(
            b.sink.segments[2 * round] == pattern(round, 5000),
            "round {round}"
        );
        assert!(
            a.sink.segments[2 * round] == pattern(round, 6000),
            "round {round}"
        );
        assert!(
            a.sink.segments[2 * round + 1] == pattern(round, 7000),
            "round {round}"
        );
        assert!(
            b.sink.segments[2 * round + 1] == pattern(round, 8000),
            "round {round}"
        );
    }
    assert!(a.sink.failed.is_empty() && b.sink.failed.is_empty());
}

/// The data worker is destroyed and made anew: what was under way is reported, its endpoint fails, and
/// a new one reads.
#[test]
fn a_reset_ends_the_reads_and_new_endpoints_read_again() {
    let (memory, mut a, mut b, to_b) = with_work_under_way();
    let before = a.fabric.addresses();
    let Node { fabric, sink, .. } = &mut a;
    fabric.reset(sink).unwrap();
    assert_eq!(a.sink.reads.len(), 4);
    assert!(a.sink.reads.iter().all(|(_, result)| result.is_err()));
    assert_eq!(a.sink.failed.len(), 1);
    assert_eq!(a.sink.failed[0].0, to_b);
    assert!(a.sink.closed.is_empty());
    let after = a.fabric.addresses();
    assert_eq!(before.message, after.message);
    assert_ne!(before.data, after.data);
    a.fabric.close(to_b);
    // Without progress of b, which would answer reads of a worker that is gone: 1.13 aborts then.
    end_unanswered(&mut b);
    until(&mut [&mut a], "closed", |nodes| {
        !nodes[0].sink.closed.is_empty()
    });
    assert!(a.all_sends_are_reported());
    let mut c = Node::new(true);
    let to_c = a.connect(2, &c);
    let [source, target] = &memory;
    let registered = c.fabric.register(source).unwrap();
    let key = a.fabric.import_key(to_c, &registered.key.unwrap()).unwrap();
    let local_handle = a.fabric.register(target).unwrap().handle;
    target.fill(0, target.bytes(), 0).unwrap();
    let operation = ReadOperation {
        key,
        remote_address: source.address(),
        local: target,
        local_handle,
        local_offset: 0,
        bytes: source.bytes(),
    };
    a.read(to_c, 9, &operation).unwrap();
    until(&mut [&mut a, &mut c], "the read", |nodes| {
        nodes[0].sink.reads.len() == 5
    });
    assert_eq!(a.sink.reads[4], (ReadToken(9), Ok(())));
    assert!(bytes_of(target) == bytes_of(source));
}

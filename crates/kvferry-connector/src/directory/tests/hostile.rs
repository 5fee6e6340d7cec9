//! Clients that send garbage, nothing, or too slowly, and who else notices.

use std::net::Shutdown;

use super::*;

/// Bytes that no client of a directory sends; each must end its connection by itself.
fn garbage() -> Vec<(&'static str, Vec<u8>)> {
    let tls_hello = [0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3, 0, 0, 0, 0, 0];
    let oversized = [&b"kfd1"[..], &(65_537_u32).to_le_bytes()].concat();
    let huge = [&b"kfd1"[..], &u32::MAX.to_le_bytes()].concat();
    vec![
        (
            "an HTTP request",
            b"GET / HTTP/1.1\r\nHost: a\r\n\r\n".to_vec(),
        ),
        ("a TLS hello", tls_hello.to_vec()),
        (
            "random bytes",
            (0..4_096_u32).map(|n| (n * 131 + 17) as u8).collect(),
        ),
        ("a length over the cap", oversized),
        ("the largest length", huge),
        ("a body of no bytes", frame(b"")),
        ("a body of one byte", frame(&[1])),
        ("a body that is not msgpack", frame(&[1, 0, 0xc1, 0xc1])),
    ]
}

/// Half frames after which the client is silent.
fn halves() -> Vec<Vec<u8>> {
    let whole = request(Some(&[rank(0, 0)]));
    vec![
        Vec::new(),
        whole[..3].to_vec(),
        whole[..FRAME_HEADER_BYTES].to_vec(),
        whole[..whole.len() - 1].to_vec(),
    ]
}

#[test]
fn garbage_ends_its_own_connection_and_nobody_elses() {
    let server = serve(config(), &[rank(0, 0)]);
    let mut bystander = connect(server.local_addr());
    let mut silent: Vec<_> = halves()
        .into_iter()
        .map(|half| {
            let mut stream = connect(server.local_addr());
            stream.write_all(&half).unwrap();
            (half, stream)
        })
        .collect();

    for (index, (what, bytes)) in garbage().into_iter().enumerate() {
        let mut stream = connect(server.local_addr());
        // The directory may close before it has taken everything.
        let _ = stream.write_all(&bytes);
        assert_eq!(read_to_close(&mut stream), 0, "{what}");
        assert_eq!(server.stats().garbage, index as u64 + 1, "{what}");
        let listing = fetch(server.local_addr(), None, LONG).unwrap();
        assert_eq!(listing.entries.len(), 1, "after {what}");
    }
    assert_eq!(ask(&mut bystander, None), [rank(0, 0)]);

    // The silent ones are still connected: they finish their requests and are served.
    for (half, stream) in &mut silent {
        let whole = request(Some(&[rank(0, 0)]));
        stream.write_all(&whole[half.len()..]).unwrap();
        assert_eq!(ranks_of(receive(stream)), [rank(0, 0)]);
    }
    assert_eq!(server.stats().timed_out, 0);
}

#[test]
fn half_a_frame_and_the_end_is_garbage_and_the_end_alone_is_not() {
    let server = serve(config(), &[]);
    for (half, expected) in halves().into_iter().zip([0, 1, 2, 3]) {
        let mut stream = connect(server.local_addr());
        stream.write_all(&half).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        assert_eq!(read_to_close(&mut stream), 0);
        assert_eq!(server.stats().garbage, expected);
    }
}

#[test]
fn a_client_that_has_no_more_to_send_still_gets_its_reply() {
    let server = serve(config(), &[rank(0, 0)]);
    let mut stream = connect(server.local_addr());
    stream.write_all(&request(None)).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    assert_eq!(ranks_of(receive(&mut stream)), [rank(0, 0)]);
    assert_eq!(read_to_close(&mut stream), 0);
}

#[test]
fn silent_clients_are_closed_at_the_deadline_and_counted() {
    let config = DirectoryConfig {
        request_timeout: Duration::from_millis(200),
        ..config()
    };
    let server = serve(config, &[rank(0, 0)]);
    let streams: Vec<_> = halves()
        .into_iter()
        .map(|half| {
            let mut stream = connect(server.local_addr());
            stream.write_all(&half).unwrap();
            stream
        })
        .collect();
    for mut stream in streams {
        assert_eq!(read_to_close(&mut stream), 0);
    }
    let stats = server.stats();
    assert_eq!((stats.timed_out, stats.garbage, stats.evicted), (4, 0, 0));
}

#[test]
fn a_client_that_was_answered_and_asks_no_more_is_closed_without_blame() {
    let config = DirectoryConfig {
        request_timeout: Duration::from_millis(200),
        ..config()
    };
    let server = serve(config, &[rank(0, 0)]);
    let mut stream = connect(server.local_addr());
    assert_eq!(ask(&mut stream, None), [rank(0, 0)]);
    assert_eq!(read_to_close(&mut stream), 0);
    assert_eq!(server.stats().timed_out, 0);
}

#[test]
fn a_client_that_takes_no_reply_is_closed_at_the_deadline_and_delays_nobody() {
    let ranks: Vec<_> = (0..16).map(|tp| rank(0, tp)).collect();
    let config = DirectoryConfig {
        request_timeout: Duration::from_secs(2),
        ..config()
    };
    let server = serve_all(config, ranks.iter().copied().map(large_description));
    let mut stuck = connect_stuck(server.local_addr());

    let listing = fetch(server.local_addr(), Some(&ranks[..1]), LONG).unwrap();
    assert_eq!(listing.entries.len(), 1);

    // The next client notices the end of the stuck one by the count: its own silence ends later.
    let mut later = connect(server.local_addr());
    assert_eq!(read_to_close(&mut later), 0);
    assert_eq!(server.stats().timed_out, 2);
    assert!(read_to_close(&mut stuck) < 16 << 20);
}

#[test]
fn silent_clients_on_all_places_make_room_for_a_good_one() {
    let config = DirectoryConfig {
        max_connections: 4,
        ..config()
    };
    let server = serve(config, &[rank(0, 0)]);
    let mut silent: Vec<_> = (0..4).map(|_| connect(server.local_addr())).collect();

    let listing = fetch(server.local_addr(), Some(&[rank(0, 0)]), LONG).unwrap();
    assert_eq!(listing.entries.len(), 1);
    // The one that was without progress for longest had to go, and only that one.
    assert_eq!(read_to_close(&mut silent[0]), 0);
    let stats = server.stats();
    assert_eq!(
        (stats.evicted, stats.timed_out, stats.connections),
        (1, 0, 5)
    );
    for stream in &mut silent[1..] {
        assert_eq!(ask(stream, None), [rank(0, 0)]);
    }
}

#[test]
fn garbage_and_silence_at_four_times_the_places_do_not_keep_a_good_client_out() {
    let config = DirectoryConfig {
        max_connections: 4,
        ..config()
    };
    let server = serve(config, &[rank(0, 0)]);
    let hostile: Vec<_> = (0..16)
        .map(|index| {
            let mut stream = connect(server.local_addr());
            let bytes = if index % 2 == 0 {
                &b"GET / HTTP/1.1\r\n\r\n"[..]
            } else {
                &b"kf"[..]
            };
            stream.write_all(bytes).unwrap();
            stream
        })
        .collect();
    let listing = fetch(server.local_addr(), None, LONG).unwrap();
    assert_eq!(listing.entries.len(), 1);
    assert_eq!(server.stats().garbage, 8);
    drop(hostile);
}

#[test]
fn more_good_clients_than_places_are_all_served() {
    let config = DirectoryConfig {
        max_connections: 2,
        ..config()
    };
    let server = serve(config, &[rank(0, 0)]);
    let address = server.local_addr();
    let clients: Vec<_> = (0..32)
        .map(|_| std::thread::spawn(move || fetch(address, None, LONG).unwrap()))
        .collect();
    for client in clients {
        assert_eq!(client.join().unwrap().entries.len(), 1);
    }
    // One that was answered and whose thread does not get to run may lose its place; it has what it wanted.
    assert_eq!(server.stats().served, 32);
}

#[test]
fn another_version_of_kvferry_is_told_so() {
    let server = serve(config(), &[rank(0, 0)]);
    let mut stream = connect(server.local_addr());
    stream.write_all(&frame(&[2, 0, 0xc1])).unwrap();
    let DirectoryReply::Refused { reason } = receive(&mut stream) else {
        panic!("not refused");
    };
    assert!(reason.contains("version 2"), "{reason}");
    assert_eq!(read_to_close(&mut stream), 0);
    assert_eq!((server.stats().refused, server.stats().garbage), (1, 0));
}

//! What a directory serves to clients that behave.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::sync::{Arc, Barrier};

use super::*;

#[test]
fn every_rank_is_served_as_it_was_published() {
    let ranks = [rank(0, 0), rank(0, 1), rank(1, 0), rank(1, 1)];
    let server = serve(config(), &ranks);

    let all = fetch(server.local_addr(), None, LONG).unwrap();
    assert_eq!(all.engine, engine());
    assert_eq!(all.instance, Some(instance()));
    let expected: BTreeMap<_, _> = ranks
        .iter()
        .map(|rank| (*rank, description(*rank)))
        .collect();
    assert_eq!(all.entries, expected);

    let two = [rank(1, 1), rank(0, 1)];
    let some = fetch(server.local_addr().to_string(), Some(&two), LONG).unwrap();
    assert_eq!(
        some.entries.into_keys().collect::<Vec<_>>(),
        [rank(0, 1), rank(1, 1)]
    );

    let stats = server.stats();
    assert_eq!((stats.connections, stats.served), (2, 2));
    assert_eq!((stats.refused, stats.garbage, stats.timed_out), (0, 0, 0));
}

#[test]
fn a_name_is_looked_up() {
    let server = serve(config(), &[rank(0, 0)]);
    let address = format!("localhost:{}", server.local_addr().port());
    let listing = fetch(address, Some(&[rank(0, 0)]), LONG).unwrap();
    assert_eq!(listing.entries.len(), 1);
}

#[test]
fn an_empty_directory_answers_with_no_entries() {
    let server = serve(config(), &[]);
    let listing = fetch(server.local_addr(), None, LONG).unwrap();
    assert_eq!(listing.entries, BTreeMap::new());
    let listing = fetch(server.local_addr(), Some(&[]), LONG).unwrap();
    assert_eq!(listing.entries, BTreeMap::new());
}

#[test]
fn ranks_that_are_unknown_are_missing_and_repeated_ones_come_once() {
    let server = serve(config(), &[rank(0, 0), rank(0, 1)]);
    let mut stream = connect(server.local_addr());
    let wanted = [rank(9, 9), rank(0, 1), rank(0, 1)];
    assert_eq!(ask(&mut stream, Some(&wanted)), [rank(0, 1)]);

    let error = fetch(server.local_addr(), Some(&wanted), LONG).unwrap_err();
    let DirectoryError::MissingRanks {
        missing, present, ..
    } = &error
    else {
        panic!("{error}");
    };
    assert_eq!(
        (&missing[..], &present[..]),
        (&[rank(9, 9)][..], &[rank(0, 1)][..])
    );
    assert!(error.is_transient());
    let text = error.to_string();
    assert!(text.contains(&server.local_addr().to_string()), "{text}");
    assert!(text.contains("no entry for pp9tp9"), "{text}");
}

#[test]
fn a_republished_rank_is_served_anew_and_a_withdrawn_one_no_more() {
    let server = serve(config(), &[rank(0, 0), rank(0, 1)]);
    let mut restarted = description(rank(0, 0));
    restarted.incarnation = Incarnation::from_bytes([200; 16]).unwrap();
    server
        .publish(rank(0, 0), restarted.encode().unwrap())
        .unwrap();

    let listing = fetch(server.local_addr(), None, LONG).unwrap();
    assert_eq!(listing.entries[&rank(0, 0)], restarted);
    assert_eq!(listing.entries[&rank(0, 1)], description(rank(0, 1)));

    assert!(server.withdraw(rank(0, 0)));
    assert!(!server.withdraw(rank(0, 0)));
    let listing = fetch(server.local_addr(), None, LONG).unwrap();
    assert_eq!(
        listing.entries.into_keys().collect::<Vec<_>>(),
        [rank(0, 1)]
    );
}

#[test]
fn what_is_not_this_ranks_description_is_refused_and_the_old_entry_stays() {
    let server = serve(config(), &[rank(0, 0)]);
    let publish = |description: &Description| {
        server
            .publish(rank(0, 0), description.encode().unwrap())
            .unwrap_err()
    };
    let with = |change: fn(&mut Description)| {
        let mut changed = description(rank(0, 0));
        change(&mut changed);
        publish(&changed)
    };

    let error = server
        .publish(rank(0, 0), b"no description".to_vec())
        .unwrap_err();
    assert!(matches!(error, PublishError::Invalid { .. }), "{error}");
    let error = with(|description| description.rank = rank(0, 3));
    assert!(matches!(error, PublishError::OtherRank { .. }), "{error}");
    let error = with(|description| description.engine = EngineId::new("decode-5").unwrap());
    assert!(error.to_string().contains("decode-5"), "{error}");
    assert!(error.to_string().contains("prefill-0"), "{error}");
    let error =
        with(|description| description.instance = Some(Instance::from_bytes([9; 16]).unwrap()));
    assert!(
        matches!(error, PublishError::OtherInstance { .. }),
        "{error}"
    );

    let listing = fetch(server.local_addr(), None, LONG).unwrap();
    assert_eq!(listing.entries[&rank(0, 0)], description(rank(0, 0)));
}

#[test]
fn one_connection_carries_several_requests_also_when_they_come_at_once() {
    let server = serve(config(), &[rank(0, 0), rank(0, 1)]);
    let mut stream = connect(server.local_addr());
    assert_eq!(ask(&mut stream, Some(&[rank(0, 1)])), [rank(0, 1)]);
    assert_eq!(ask(&mut stream, None), [rank(0, 0), rank(0, 1)]);

    let both = [request(Some(&[rank(0, 0)])), request(Some(&[rank(0, 1)]))].concat();
    stream.write_all(&both).unwrap();
    assert_eq!(ranks_of(receive(&mut stream)), [rank(0, 0)]);
    assert_eq!(ranks_of(receive(&mut stream)), [rank(0, 1)]);
    let stats = server.stats();
    assert_eq!((stats.connections, stats.served), (1, 4));
}

#[test]
fn clients_at_once_get_their_own_ranks() {
    const CLIENTS: u16 = 8;
    let ranks: Vec<_> = (0..CLIENTS).map(|tp| rank(0, tp)).collect();
    let server = serve(config(), &ranks);
    let address = server.local_addr();
    let start = Arc::new(Barrier::new(CLIENTS.into()));
    let clients: Vec<_> = ranks
        .into_iter()
        .map(|rank| {
            let start = Arc::clone(&start);
            std::thread::spawn(move || {
                start.wait();
                (rank, fetch(address, Some(&[rank]), LONG).unwrap())
            })
        })
        .collect();
    for client in clients {
        let (rank, listing) = client.join().unwrap();
        assert_eq!(listing.entries, [(rank, description(rank))].into());
    }
    assert_eq!(server.stats().served, u64::from(CLIENTS));
}

#[test]
fn a_reply_larger_than_socket_buffers_arrives_whole() {
    let ranks: Vec<_> = (0..16).map(|tp| rank(0, tp)).collect();
    let server = serve_all(config(), ranks.iter().copied().map(large_description));
    let listing = fetch(server.local_addr(), Some(&ranks), LONG).unwrap();
    assert_eq!(listing.entries.len(), 16);
    for (rank, entry) in listing.entries {
        assert_eq!(entry, large_description(rank));
    }
}

#[test]
fn a_reply_over_the_cap_is_refused_with_advice_and_fewer_ranks_are_served() {
    let bytes = description(rank(0, 0)).encode().unwrap().len();
    let config = DirectoryConfig {
        max_reply_bytes: bytes * 2,
        ..config()
    };
    let server = serve(config, &[rank(0, 0), rank(0, 1), rank(0, 2)]);

    let error = fetch(server.local_addr(), None, LONG).unwrap_err();
    let DirectoryError::Refused { reason, .. } = &error else {
        panic!("{error}");
    };
    assert!(reason.contains(&format!("{} bytes", bytes * 3)), "{reason}");
    assert!(reason.contains("ask for fewer ranks"), "{reason}");
    let two = fetch(server.local_addr(), Some(&[rank(0, 0), rank(0, 2)]), LONG).unwrap();
    assert_eq!(two.entries.len(), 2);
    assert_eq!((server.stats().refused, server.stats().served), (1, 1));
}

#[test]
fn a_reply_for_which_other_replies_leave_no_room_is_refused() {
    let bytes = description(rank(0, 0)).encode().unwrap();
    let selected = [(rank(0, 0), Arc::from(&bytes[..]))].into();
    let reply = |room| published::reply(&engine(), None, &selected, 1 << 20, room);
    assert!(reply(bytes.len()).is_ok());
    let reason = reply(bytes.len() - 1).unwrap_err();
    assert!(reason.contains("busy"), "{reason}");
}

#[test]
fn c112_a_port_clash_names_the_address_and_eight_directories_on_port_0_do_not_clash() {
    let servers: Vec<_> = (0..8).map(|_| serve(config(), &[])).collect();
    let ports: std::collections::BTreeSet<_> = servers
        .iter()
        .map(|server| server.local_addr().port())
        .collect();
    assert_eq!(ports.len(), 8);

    let taken = servers[0].local_addr();
    let error = DirectoryServer::bind(taken, config()).unwrap_err();
    assert!(matches!(error, BindError::InUse { .. }), "{error}");
    let text = error.to_string();
    assert!(
        text.contains(&taken.to_string()) && text.contains("port 0"),
        "{text}"
    );
    // The one that was there first is not disturbed.
    assert!(fetch(taken, None, LONG).is_ok());
}

#[test]
fn an_address_of_another_host_is_an_error_that_names_it() {
    // 192.0.2.0/24 is for documentation and belongs to nobody.
    let error = DirectoryServer::bind("192.0.2.1:0", config()).unwrap_err();
    assert!(error.to_string().contains("192.0.2.1:0"), "{error}");
}

#[test]
fn limits_outside_their_range_are_refused_by_name() {
    let zero = Duration::ZERO;
    let day = MAX_TIMEOUT + Duration::from_secs(1);
    for (field, config) in [
        (
            "max_connections",
            DirectoryConfig {
                max_connections: 0,
                ..config()
            },
        ),
        (
            "max_connections",
            DirectoryConfig {
                max_connections: usize::MAX,
                ..config()
            },
        ),
        (
            "request_timeout",
            DirectoryConfig {
                request_timeout: zero,
                ..config()
            },
        ),
        (
            "request_timeout",
            DirectoryConfig {
                request_timeout: day,
                ..config()
            },
        ),
        (
            "connection_timeout",
            DirectoryConfig {
                connection_timeout: zero,
                ..config()
            },
        ),
        (
            "connection_timeout",
            DirectoryConfig {
                connection_timeout: Duration::MAX,
                ..config()
            },
        ),
        (
            "max_reply_bytes",
            DirectoryConfig {
                max_reply_bytes: 0,
                ..config()
            },
        ),
        (
            "max_reply_bytes",
            DirectoryConfig {
                max_reply_bytes: usize::MAX,
                ..config()
            },
        ),
    ] {
        let error = DirectoryServer::bind("127.0.0.1:0", config).unwrap_err();
        assert!(error.to_string().contains(field), "{error}");
    }
}

#[test]
fn after_shutdown_clients_are_gone_and_the_port_is_free() {
    let server = serve(config(), &[rank(0, 0)]);
    let address = server.local_addr();
    let mut idle = connect(address);
    assert_eq!(ask(&mut idle, None), [rank(0, 0)]);
    assert_eq!(server.shutdown(LONG), 0);
    assert_eq!(read_to_close(&mut idle), 0);
    let error = fetch(address, None, LONG).unwrap_err();
    assert!(
        matches!(error, DirectoryError::ConnectionRefused { .. }),
        "{error}"
    );
    drop(TcpListener::bind(address).unwrap());
}

#[test]
fn shutdown_lets_a_reply_finish_and_says_how_many_it_cut_off() {
    let ranks: Vec<_> = (0..16).map(|tp| rank(0, tp)).collect();
    let large = || serve_all(config(), ranks.iter().copied().map(large_description));

    let server = large();
    let mut stream = connect_stuck(server.local_addr());
    let shutdown = std::thread::spawn(move || server.shutdown(LONG));
    assert_eq!(ranks_of(receive(&mut stream)).len(), 16);
    assert_eq!(shutdown.join().unwrap(), 0);

    let server = large();
    let mut stream = connect_stuck(server.local_addr());
    assert_eq!(server.shutdown(Duration::ZERO), 1);
    assert!(read_to_close(&mut stream) < 16 << 20);
}

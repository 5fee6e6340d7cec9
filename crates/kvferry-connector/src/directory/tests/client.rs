//! What a client says about servers that do not answer as a directory does.

use std::net::TcpListener;
use std::thread::JoinHandle;
use std::time::Instant;

use kvferry_wire::directory::MAX_DIRECTORY_RANKS;

use super::*;

const SHORT: Duration = Duration::from_millis(300);

/// Takes one request, sends `answer`, and then closes or waits for the client to close.
fn impostor(answer: Vec<u8>, hold: bool) -> (SocketAddr, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let thread = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        receive_body(&mut stream);
        stream.write_all(&answer).unwrap();
        if hold {
            read_to_close(&mut stream);
        }
    });
    (address, thread)
}

/// The error of a call to an impostor; it names the address in every case.
fn failure(
    answer: Vec<u8>,
    hold: bool,
    ranks: Option<&[Rank]>,
    deadline: Duration,
) -> DirectoryError {
    let (address, thread) = impostor(answer, hold);
    let error = fetch(address, ranks, deadline).unwrap_err();
    thread.join().unwrap();
    assert!(error.to_string().contains(&address.to_string()), "{error}");
    error
}

fn entries(descriptions: &[(Rank, Vec<u8>)]) -> Vec<u8> {
    let reply = DirectoryReply::Entries {
        instance: None,
        engine: engine(),
        entries: descriptions.to_vec(),
    };
    reply.encode_frame().unwrap()
}

#[test]
fn a_refused_connection_says_what_to_start() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let error = fetch(address, None, LONG).unwrap_err();
    assert!(
        matches!(error, DirectoryError::ConnectionRefused { .. }),
        "{error}"
    );
    assert!(error.is_transient());
    let text = error.to_string();
    assert!(
        text.contains(&address.to_string()) && text.contains("is the producer running"),
        "{text}"
    );
}

#[test]
fn a_silent_listener_ends_the_call_at_its_deadline() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let start = Instant::now();
    let error = fetch(address, None, SHORT).unwrap_err();
    assert!(start.elapsed() >= SHORT);
    assert!(start.elapsed() < SHORT + LONG / 4);
    assert!(
        matches!(
            error,
            DirectoryError::TimedOut {
                stage: Stage::Receiving,
                deadline: SHORT,
                ..
            }
        ),
        "{error}"
    );
    assert!(error.is_transient());
}

#[test]
fn half_a_reply_ends_the_call_at_its_deadline() {
    let whole = entries(&[(rank(0, 0), description(rank(0, 0)).encode().unwrap())]);
    for length in [3, FRAME_HEADER_BYTES, whole.len() - 1] {
        let error = failure(whole[..length].to_vec(), true, None, SHORT);
        assert!(
            matches!(
                error,
                DirectoryError::TimedOut {
                    stage: Stage::Receiving,
                    ..
                }
            ),
            "{error}"
        );
        let error = failure(whole[..length].to_vec(), false, None, LONG);
        assert!(matches!(error, DirectoryError::Closed { .. }), "{error}");
    }
}

#[test]
fn no_time_is_an_error_and_not_a_panic() {
    let server = serve(config(), &[]);
    let error = fetch(server.local_addr(), None, Duration::ZERO).unwrap_err();
    assert!(matches!(error, DirectoryError::TimedOut { .. }), "{error}");
    assert!(fetch(server.local_addr(), None, Duration::MAX).is_ok());
}

#[test]
fn an_http_server_is_told_from_a_directory() {
    let answer = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n".to_vec();
    for hold in [true, false] {
        let error = failure(answer.clone(), hold, None, LONG);
        assert!(
            matches!(error, DirectoryError::NotADirectory { .. }),
            "{error}"
        );
        assert!(
            error.to_string().contains("not a kvferry directory"),
            "{error}"
        );
        assert!(!error.is_transient());
    }
}

#[test]
fn a_server_that_only_closes_is_an_error_that_says_so() {
    let error = failure(Vec::new(), false, None, LONG);
    assert!(matches!(error, DirectoryError::Closed { .. }), "{error}");
}

#[test]
fn a_length_over_the_cap_is_refused_before_memory_is_reserved() {
    let answer = [&b"kfd1"[..], &u32::MAX.to_le_bytes()].concat();
    let error = failure(answer, true, None, LONG);
    assert!(
        matches!(error, DirectoryError::NotADirectory { .. }),
        "{error}"
    );
}

#[test]
fn other_versions_of_reply_and_description_are_named() {
    let error = failure(frame(&[9, 0, 0xc1]), true, None, LONG);
    assert!(matches!(error, DirectoryError::Version { .. }), "{error}");
    let mut newer = description(rank(0, 0)).encode().unwrap();
    newer[0] = 9;
    let error = failure(entries(&[(rank(0, 0), newer)]), true, None, LONG);
    assert!(matches!(error, DirectoryError::Version { .. }), "{error}");
    assert!(error.to_string().contains("version 9"), "{error}");
}

#[test]
fn a_refusal_carries_the_directorys_words() {
    let reason = "not today".to_owned();
    let answer = DirectoryReply::Refused { reason }.encode_frame().unwrap();
    let error = failure(answer, true, None, LONG);
    assert!(matches!(error, DirectoryError::Refused { .. }), "{error}");
    assert!(error.to_string().contains("not today"), "{error}");
}

#[test]
fn entries_that_contradict_themselves_or_the_request_are_refused() {
    let one = description(rank(0, 0)).encode().unwrap();
    let mut foreign = description(rank(0, 0));
    foreign.engine = EngineId::new("decode-5").unwrap();
    let cases = [
        ("body", frame(&[1, 0, 0xc1]), "the reply"),
        (
            "bytes",
            entries(&[(rank(0, 0), vec![1, 0, 0xc1])]),
            "the entry of pp0tp0",
        ),
        (
            "rank",
            entries(&[(rank(0, 1), one.clone())]),
            "describes pp0tp0",
        ),
        (
            "engine",
            entries(&[(rank(0, 0), foreign.encode().unwrap())]),
            "decode-5",
        ),
        ("extra", entries(&[(rank(0, 0), one)]), "not asked for"),
    ];
    for (case, answer, words) in cases {
        let wanted = [rank(7, 7)];
        let error = failure(answer, true, Some(&wanted), LONG);
        assert!(
            matches!(error, DirectoryError::Malformed { .. }),
            "{case}: {error}"
        );
        assert!(error.to_string().contains(words), "{case}: {error}");
    }
}

#[test]
fn addresses_that_are_none_are_named() {
    for address in ["nonsense", "127.0.0.1", "127.0.0.1:99999", ""] {
        let error = fetch(address, None, LONG).unwrap_err();
        assert!(matches!(error, DirectoryError::Resolve { .. }), "{error}");
        assert!(error.to_string().contains("host:port"), "{error}");
    }
}

#[test]
fn more_ranks_than_a_request_holds_are_refused_before_anybody_is_asked() {
    let ranks: Vec<_> = (0..=MAX_DIRECTORY_RANKS)
        .map(|tp| rank(0, tp as u16))
        .collect();
    let error = fetch("127.0.0.1:1", Some(&ranks), LONG).unwrap_err();
    assert!(matches!(error, DirectoryError::Request { .. }), "{error}");
}

#[test]
fn an_error_about_many_ranks_stays_short() {
    let server = serve(config(), &[]);
    let ranks: Vec<_> = (0..100).map(|tp| rank(0, tp)).collect();
    let text = fetch(server.local_addr(), Some(&ranks), LONG)
        .unwrap_err()
        .to_string();
    assert!(text.contains("pp0tp7 and 92 more"), "{text}");
}

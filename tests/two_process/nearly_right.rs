//! What is wrong by one thing only, over real endpoints: what it costs, one by one, with nobody else about.

use kvferry_engine::wire::{Incarnation, Message, encode_hello, encode_ping};
use kvferry_tests::corpus::{Garbage, corpus};
use kvferry_tests::harness::{Case, until};

use crate::corpus::{Target, data, dropped};
use crate::intruder::Intruder;

/// Greetings that are right but for one thing, with nobody else about: each is dropped or refused, and
/// none makes a peer.
fn a_greeting_that_is_nearly_right_makes_no_peer() {
    let mut target = Target::start(0);
    let mut intruder = Intruder::new(target.description.clone());
    intruder.greet();
    intruder.is_answered();
    let before = target.endured();
    let mut wrong = 0;
    let right = encode_hello(&intruder.hello()).unwrap();
    // Magic, version and kind of the segment.
    for at in 0..4 {
        intruder.begin();
        intruder.changed(&right, |segment| segment[at] ^= 0x80);
        wrong += 1;
    }
    // More bytes than it says.
    intruder.begin();
    intruder.piece(right.len() as u32 - 1, 0, &right);
    // In the name of somebody else.
    let mut other = intruder.hello();
    other.from.incarnation = Incarnation::random().unwrap();
    intruder.begin();
    intruder.message(&encode_hello(&other).unwrap());
    // With a text that is none, in a description that can be read.
    let mut other = intruder.hello();
    other.from.kvferry_version = "a version".into();
    let mut bytes = encode_hello(&other).unwrap();
    let mark = other.from.kvferry_version.as_bytes();
    let at = bytes.windows(mark.len()).position(|bytes| bytes == mark);
    bytes[at.unwrap()] = 7;
    intruder.begin();
    intruder.message(&bytes);
    dropped(&mut target, before, wrong + 3);
    // For somebody else.
    let mut other = intruder.hello();
    other.expects = Incarnation::random().unwrap();
    intruder.begin();
    intruder.message(&encode_hello(&other).unwrap());
    intruder.is_refused();
    let now = target.endured();
    assert_eq!(
        now.segments_dropped,
        before.segments_dropped + wrong as u64 + 3
    );
    assert_eq!(
        (now.peers_connected, now.peers_lost),
        (before.peers_connected, before.peers_lost)
    );
    intruder.greet();
    intruder.is_answered();
    target.child.finish_well();
}

/// What a peer in good standing does wrong, with nobody else about: it costs the connection at once, or
/// it is dropped and the connection goes on.
fn a_wrong_segment_or_message_ends_its_connection() {
    // At once, and not because something is missing.
    let mut target = Target::start(3_600_000);
    let mut intruder = Intruder::new(target.description.clone());
    type Shape = Box<dyn Fn(&mut Intruder)>;
    let mut ending: Vec<Shape> = vec![
        Box::new(|it| it.piece(9, 4, b"ferry")),
        Box::new(|it| {
            it.piece(9, 0, b"ferr");
            it.piece(10, 4, b"ferry");
        }),
        Box::new(|it| {
            it.skip(5000);
            it.piece(5, 0, b"ferry");
        }),
        Box::new(|it| {
            it.skip(u64::MAX - 1000);
            it.piece(5, 0, b"ferry");
        }),
    ];
    let unreadable =
        |garbage: &Garbage| !garbage.bytes.is_empty() && Message::parse(&garbage.bytes).is_err();
    let all = corpus().into_iter().filter(unreadable);
    for garbage in all.step_by(401) {
        ending.push(Box::new(move |it| it.message(&garbage.bytes)));
    }
    assert!(ending.len() > 20);
    for shape in ending {
        intruder.greet();
        intruder.is_answered();
        let before = target.endured();
        shape(&mut intruder);
        until("the end of the connection", || {
            intruder.progress();
            target.endured().peers_lost == before.peers_lost + 1
        });
    }
    let harmless: [Shape; 5] = [
        Box::new(|it| it.segment(data(0, u64::MAX - 5), b"ferry")),
        Box::new(|it| it.segment(data(u32::MAX, 0), b"ferry")),
        // What cannot be read has no number.
        Box::new(|it| {
            it.segment(data(0, u64::MAX), b"ferry");
            it.skip(u64::MAX);
        }),
        Box::new(|it| {
            it.piece(3, 0, b"ferry");
            it.skip(u64::MAX);
        }),
        Box::new(|it| it.changed(&encode_ping(1), |segment| segment[0] ^= 1)),
    ];
    intruder.greet();
    for shape in harmless {
        intruder.is_answered();
        let before = target.endured();
        shape(&mut intruder);
        dropped(&mut target, before, 1);
        intruder.is_answered();
        let now = target.endured();
        assert_eq!(now.segments_dropped, before.segments_dropped + 1);
        assert_eq!(now.peers_lost, before.peers_lost);
    }
    target.child.finish_well();
}

pub(crate) fn cases() -> Vec<Case> {
    vec![
        Case::new(
            "a_greeting_that_is_nearly_right_makes_no_peer",
            a_greeting_that_is_nearly_right_makes_no_peer,
        ),
        Case::new(
            "a_wrong_segment_or_message_ends_its_connection",
            a_wrong_segment_or_message_ends_its_connection,
        ),
    ]
}

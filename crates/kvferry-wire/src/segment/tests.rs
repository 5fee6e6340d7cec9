use super::*;

fn bytes(body: SegmentBody, payload: &[u8]) -> Vec<u8> {
    let mut header = [0xff; SEGMENT_HEADER_BYTES];
    let end = |byte| Incarnation::from_bytes([byte; 16]).unwrap();
    SegmentHeader {
        source: end(1),
        destination: end(2),
        connection: u32::MAX,
        sequence: u64::MAX,
        body,
    }
    .write(&mut header);
    [&header[..], payload].concat()
}

#[test]
fn the_header_has_the_documented_length() {
    assert_eq!(SEGMENT_HEADER_BYTES, 64);
}

#[test]
fn a_message_has_at_most_16_mib_and_at_least_a_byte() {
    let max = MAX_MESSAGE_BYTES as u32;
    let last = bytes(
        SegmentBody::Message {
            message_bytes: max,
            offset: max - 1,
        },
        b"x",
    );
    assert!(Segment::parse(&last).is_ok());
    for (message_bytes, offset) in [(0, 0), (max + 1, 0), (max, max), (max, u32::MAX)] {
        let wrong = bytes(
            SegmentBody::Message {
                message_bytes,
                offset,
            },
            b"x",
        );
        assert!(Segment::parse(&wrong).is_err(), "{message_bytes} {offset}");
    }
}

#[test]
fn a_stream_ends_below_the_end_of_numbers() {
    let data = |offset| {
        let transfer = TransferId {
            slot: 0,
            generation: u32::MAX,
        };
        bytes(SegmentBody::Data { transfer, offset }, b"xy")
    };
    assert!(Segment::parse(&data(u64::MAX - 2)).is_ok());
    assert!(Segment::parse(&data(u64::MAX - 1)).is_err());
}

#[test]
fn errors_say_what_came_and_what_would_be_right() {
    let piece = bytes(
        SegmentBody::Message {
            message_bytes: 6,
            offset: 4,
        },
        b"xyz",
    );
    assert_eq!(
        Segment::parse(&piece).unwrap_err().to_string(),
        "segment.offset is 4 with 3 bytes of a message of 6, expected a piece within the message"
    );
    assert_eq!(
        Segment::parse(b"HTTP/1.1 200 OK").unwrap_err().to_string(),
        "segment needs 64 bytes, got 15"
    );
    let mut stranger = piece;
    stranger[..2].copy_from_slice(b"GE");
    assert_eq!(
        Segment::parse(&stranger).unwrap_err().to_string(),
        "segment.magic is 4745, expected 6b66 (\"kf\")"
    );
}

#[test]
fn a_transfer_prints_as_slot_and_generation() {
    assert_eq!(
        TransferId {
            slot: 3,
            generation: 9
        }
        .to_string(),
        "3.9"
    );
}

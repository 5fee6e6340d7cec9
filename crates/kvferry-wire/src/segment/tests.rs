use super::*;

fn incarnation(byte: u8) -> Incarnation {
    Incarnation::from_bytes([byte; 16]).unwrap()
}

fn bytes(body: SegmentBody, payload: &[u8]) -> Vec<u8> {
    let mut header = [0xff; SEGMENT_HEADER_BYTES];
    SegmentHeader {
        source: incarnation(1),
        destination: incarnation(2),
        sequence: 3,
        body,
    }
    .write(&mut header);
    [&header[..], payload].concat()
}

#[test]
fn a_segment_survives_the_way() {
    let body = SegmentBody::Message {
        message_bytes: 9,
        offset: 4,
    };
    let bytes = bytes(body, b"hello");
    let segment = Segment::parse(&bytes).unwrap();
    assert_eq!(segment.header.body, body);
    assert_eq!(segment.header.sequence, 3);
    assert_eq!(segment.payload, b"hello");
    assert_eq!(SEGMENT_HEADER_BYTES, 60);
}

//! Parses bytes, writes the value again and compares. Shared with the fuzz targets.
//!
//! A fixed layout has one way to write a value, so the bytes must be the same. msgpack has several
//! ways, and readers skip fields that they do not know: there the value must be the same.

use kvferry_wire::checksum::{encode_ask, encode_refused, encode_sums};
use kvferry_wire::params::{Asked, Params};
use kvferry_wire::{
    ChecksumMessage, DemoReply, DemoRequest, Description, DirectoryReply, DirectoryRequest,
    FrameHeader, Hello, HelloReply, LeaseMessage, Message, ReadRequest, SEGMENT_HEADER_BYTES,
    Segment, ShareReply, ShareRequest, WireError,
    directory::{FRAME_HEADER_BYTES, MAX_DIRECTORY_REPLY_BYTES, MAX_DIRECTORY_REQUEST_BYTES},
    encode_goodbye, encode_hello, encode_hello_reply, encode_ping, encode_pong, encode_read,
    encode_read_cancel, encode_read_rejected, encode_release, encode_released, encode_renew,
    encode_renewed, encode_service, encode_withdraw, encode_withdrawn,
};

/// Says whether the bytes are a value of some format, after checking that it survives.
pub(crate) type Check = fn(&[u8]) -> Result<(), WireError>;

/// Every format by the name of its fuzz target.
pub(crate) const CHECKS: [(&str, Check); 10] = [
    ("segment", segment),
    ("message", message),
    ("description", description),
    ("hello", hello),
    ("lease", lease),
    ("checksum", checksum),
    ("directory", directory),
    ("demo", demo),
    ("share", share),
    ("params", params),
];

pub(crate) fn segment(bytes: &[u8]) -> Result<(), WireError> {
    let segment = Segment::parse(bytes)?;
    let mut header = [0xaa; SEGMENT_HEADER_BYTES];
    segment.header.write(&mut header);
    assert_eq!([&header, segment.payload].concat(), bytes);
    Ok(())
}

pub(crate) fn message(bytes: &[u8]) -> Result<(), WireError> {
    let message = Message::parse(bytes)?;
    let again = match &message {
        Message::Hello(hello) => encode_hello(hello),
        Message::HelloReply(reply) => encode_hello_reply(reply),
        Message::Ping { token } => Ok(encode_ping(*token)),
        Message::Pong { token } => Ok(encode_pong(*token)),
        Message::Read(read) => {
            assert_eq!(ReadRequest::view(bytes), Ok(*read));
            assert!(read.block_count() >= read.run_count() as u64);
            let tables: Vec<u32> = read.tables().collect();
            encode_read(read.transfer(), &tables, read.runs())
        }
        Message::ReadRejected(rejected) => Ok(encode_read_rejected(rejected)),
        Message::ReadCancel { transfer } => Ok(encode_read_cancel(*transfer)),
        Message::Service { channel, payload } => encode_service(*channel, payload),
        Message::Goodbye => Ok(encode_goodbye()),
        Message::Withdraw(regions) => encode_withdraw(regions),
        Message::Withdrawn(regions) => encode_withdrawn(regions),
    };
    let again = again.expect("a parsed message can be written");
    match message {
        Message::Hello(_) | Message::HelloReply(_) => {
            assert_eq!(Message::parse(&again), Ok(message));
        }
        _ => assert_eq!(again, bytes),
    }
    Ok(())
}

pub(crate) fn description(bytes: &[u8]) -> Result<(), WireError> {
    let value = Description::decode(bytes)?;
    let again = value.encode().expect("a parsed description can be written");
    assert_eq!(Description::decode(&again), Ok(value));
    Ok(())
}

pub(crate) fn share(bytes: &[u8]) -> Result<(), WireError> {
    let request = ShareRequest::decode(bytes).map(|value| {
        let again = value.encode().expect("a parsed request can be written");
        assert_eq!(ShareRequest::decode(&again), Ok(value));
    });
    let reply = ShareReply::decode(bytes).map(|value| {
        let again = value.encode().expect("a parsed answer can be written");
        assert_eq!(ShareReply::decode(&again), Ok(value));
    });
    either(request, reply)
}

pub(crate) fn hello(bytes: &[u8]) -> Result<(), WireError> {
    let hello = Hello::decode(bytes).map(|value| {
        let again = value.encode().expect("a parsed greeting can be written");
        assert_eq!(Hello::decode(&again), Ok(value));
    });
    let reply = HelloReply::decode(bytes).map(|value| {
        let again = value.encode().expect("a parsed answer can be written");
        assert_eq!(HelloReply::decode(&again), Ok(value));
    });
    either(hello, reply)
}

/// Of two formats that share a place, the one that the bytes are, or nearly are.
fn either(one: Result<(), WireError>, other: Result<(), WireError>) -> Result<(), WireError> {
    match (one, other) {
        (Ok(()), _) | (_, Ok(())) => Ok(()),
        (Err(WireError::Msgpack { .. }), other) => other,
        (one, _) => one,
    }
}

pub(crate) fn lease(bytes: &[u8]) -> Result<(), WireError> {
    let message = LeaseMessage::parse(bytes)?;
    let again = match message {
        LeaseMessage::Release {
            lease,
            reader,
            consumers,
        } => encode_release(&lease, reader, consumers),
        LeaseMessage::Released {
            instance,
            epoch,
            reader,
            verdict,
        } => Ok(encode_released(instance, epoch, reader, verdict)),
        LeaseMessage::Renew {
            instance,
            token,
            epochs,
        } => {
            assert_eq!(epochs.iter().count(), epochs.len());
            encode_renew(instance, token, epochs.iter())
        }
        LeaseMessage::Renewed {
            instance,
            token,
            gone,
            unknown,
        } => {
            assert_eq!(gone.iter().count(), gone.len());
            assert_eq!(unknown.iter().count(), unknown.len());
            encode_renewed(instance, token, gone.iter(), unknown.iter())
        }
    };
    assert_eq!(again.expect("a parsed lease message can be written"), bytes);
    Ok(())
}

pub(crate) fn checksum(bytes: &[u8]) -> Result<(), WireError> {
    let again = match ChecksumMessage::parse(bytes)? {
        ChecksumMessage::Ask { token, blocks } => encode_ask(token, blocks.iter()),
        ChecksumMessage::Sums { token, sums } => encode_sums(token, sums.iter()),
        ChecksumMessage::Refused { token, why } => Ok(encode_refused(token, why)),
    };
    assert_eq!(
        again.expect("a parsed checksum message can be written"),
        bytes
    );
    Ok(())
}

/// Takes a frame: header and body.
pub(crate) fn directory(bytes: &[u8]) -> Result<(), WireError> {
    let Some((header, body)) = bytes.split_first_chunk::<FRAME_HEADER_BYTES>() else {
        let (need, got) = (FRAME_HEADER_BYTES, bytes.len());
        return Err(WireError::TooShort {
            what: "frame",
            need,
            got,
        });
    };
    let length = FrameHeader::parse(header, MAX_DIRECTORY_REPLY_BYTES)?;
    if body.len() > length {
        return Err(WireError::Trailing {
            what: "frame",
            extra: body.len() - length,
        });
    }
    if body.len() < length {
        return Err(WireError::TooShort {
            what: "frame",
            need: length,
            got: body.len(),
        });
    }
    let body_of = |frame: &[u8], cap| {
        let (header, body) = frame.split_first_chunk().expect("a frame has a header");
        assert_eq!(FrameHeader::parse(header, cap), Ok(body.len()));
        body.to_vec()
    };
    let request = DirectoryRequest::decode_body(body).map(|value| {
        let again = value
            .encode_frame()
            .expect("a parsed request can be written");
        let again = body_of(&again, MAX_DIRECTORY_REQUEST_BYTES);
        assert_eq!(DirectoryRequest::decode_body(&again), Ok(value));
    });
    let reply = DirectoryReply::decode_body(body).map(|value| {
        let again = value.encode_frame().expect("a parsed reply can be written");
        let again = body_of(&again, MAX_DIRECTORY_REPLY_BYTES);
        assert_eq!(DirectoryReply::decode_body(&again), Ok(value));
    });
    either(request, reply)
}

pub(crate) fn demo(bytes: &[u8]) -> Result<(), WireError> {
    let request = DemoRequest::decode(bytes).map(|value| {
        let again = value.encode().expect("a parsed request can be written");
        assert_eq!(DemoRequest::decode(&again), Ok(value));
    });
    let reply = DemoReply::decode(bytes).map(|value| {
        let again = value.encode().expect("a parsed reply can be written");
        assert_eq!(DemoReply::decode(&again), Ok(value));
    });
    either(request, reply)
}

/// JSON: an offer says the same when it is written again, at another address.
pub(crate) fn params(bytes: &[u8]) -> Result<(), WireError> {
    let wrong = |reason: String| WireError::BadValue {
        field: "kv_transfer_params",
        value: reason,
        expected: "transfer parameters",
    };
    let params: Params = serde_json::from_slice(bytes).map_err(|error| wrong(error.to_string()))?;
    if let Asked::Import(mut offer) =
        Asked::parse(&params).map_err(|error| wrong(error.to_string()))?
    {
        offer.source.directory = "[::1]:5600".to_owned();
        let again = offer.to_params("::1", 5600);
        assert_eq!(Asked::parse(&again), Ok(Asked::Import(offer)));
    }
    Ok(())
}

//! Fixed layouts, field by field: each bad value is refused under the field's name, and the fields
//! that may hold anything do.

use kvferry_wire::{FrameHeader, WireError, directory::FRAME_HEADER_BYTES};

use crate::{golden::check_of, samples};

/// A field of a fixed layout, in the order in which they lie.
struct Field {
    bytes: usize,
    /// Values that are refused, and the name under which. None: every value is allowed.
    bad: Vec<(Vec<u8>, &'static str)>,
}

fn free(bytes: usize) -> Field {
    Field {
        bytes,
        bad: Vec::new(),
    }
}

fn bad<const N: usize, const M: usize>(values: [[u8; N]; M], name: &'static str) -> Field {
    Field {
        bytes: N,
        bad: values
            .into_iter()
            .map(|value| (value.to_vec(), name))
            .collect(),
    }
}

fn or<const N: usize>(mut field: Field, value: [u8; N], name: &'static str) -> Field {
    assert_eq!(field.bytes, N);
    field.bad.push((value.to_vec(), name));
    field
}

fn segment(rest: Vec<Field>) -> Vec<Field> {
    let mut fields = vec![
        bad([*b"fk", [0; 2]], "segment.magic"),
        bad([[0], [2], [255]], "segment"),
        bad([[0], [3], [255]], "segment.kind"),
        bad([[0; 16]], "segment.source"),
        bad([[0; 16]], "segment.destination"),
        free(8),
        free(4),
    ];
    fields.extend(rest);
    fields
}

fn message(rest: Vec<Field>) -> Vec<Field> {
    let mut fields = vec![
        bad([[0], [1], [3], [255]], "message"),
        bad([[0], [12], [255]], "message.kind"),
        bad([[1, 0], [0, 1]], "message.channel"),
    ];
    fields.extend(rest);
    fields
}

fn checksum(rest: Vec<Field>) -> Vec<Field> {
    let mut fields = vec![
        bad([[0], [2], [255]], "checksum message"),
        bad([[0], [4], [255]], "checksum message.kind"),
    ];
    fields.extend(rest);
    fields
}

fn lease(rest: Vec<Field>) -> Vec<Field> {
    let mut fields = vec![
        bad([[0], [2], [255]], "lease message"),
        bad([[0], [5], [255]], "lease message.kind"),
    ];
    fields.extend(rest);
    fields
}

/// Two ranges of region ids: 7 to 9, and 0x01020304 alone.
fn regions(name: &'static str) -> Vec<Field> {
    vec![
        or(
            or(
                bad([[0; 4], [3, 0x10, 0, 0], [255; 4]], "regions"),
                [1, 0, 0, 0],
                name,
            ),
            [3, 0, 0, 0],
            name,
        ),
        bad([[10, 0, 0, 0], [255; 4]], "regions.last"),
        or(
            bad([[6, 0, 0, 0], [0; 4]], "regions.last"),
            [3, 3, 2, 1],
            "regions.first",
        ),
        or(
            bad([[7, 0, 0, 0], [10, 0, 0, 0]], "regions.first"),
            [5, 3, 2, 1],
            "regions.last",
        ),
        bad([[0; 4], [3, 3, 2, 1]], "regions.last"),
    ]
}

fn generation() -> Field {
    bad([[0; 4]], "transfer.generation")
}

fn layouts() -> Vec<(&'static str, &'static str, Vec<Field>)> {
    let full = [255; 4];
    let epoch = |name| bad([[0_u8; 8]], name);
    let instance = |name| bad([[0_u8; 16]], name);
    vec![
        (
            "segment",
            "message",
            segment(vec![
                or(
                    bad([[0; 4], [1, 0, 0, 1], full], "segment.message_bytes"),
                    [8, 0, 0, 0],
                    "segment.offset",
                ),
                bad([[5, 0, 0, 0], full], "segment.offset"),
                bad(
                    [[1, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 128]],
                    "segment.reserved",
                ),
                free(5),
            ]),
        ),
        (
            "segment",
            "data",
            segment(vec![
                free(4),
                generation(),
                bad(
                    [[255; 8], [251, 255, 255, 255, 255, 255, 255, 255]],
                    "segment.offset",
                ),
                free(5),
            ]),
        ),
        ("message", "ping", message(vec![free(8)])),
        ("message", "pong", message(vec![free(8)])),
        (
            "message",
            "read",
            message(vec![
                free(4),
                generation(),
                or(
                    or(
                        bad([[0; 4], [1, 0, 1, 0], full], "read.tables"),
                        [1, 0, 0, 0],
                        "read",
                    ),
                    [3, 0, 0, 0],
                    "read",
                ),
                or(bad([[0; 4]], "read.runs"), [1, 0, 0, 0], "read"),
                free(4),
                free(4),
                bad([[254, 255, 255, 255], full], "run.first"),
                or(bad([[0; 4]], "run.count"), full, "run.first"),
                bad([full], "run.first"),
                bad([[0; 4]], "run.count"),
            ]),
        ),
        (
            "message",
            "read-rejected",
            message(vec![
                free(4),
                generation(),
                free(8),
                bad([[0], [5], [255]], "read rejected.code"),
            ]),
        ),
        (
            "message",
            "read-cancel",
            message(vec![free(4), generation()]),
        ),
        (
            "message",
            "service",
            vec![
                bad([[0], [1], [3], [255]], "message"),
                bad([[0], [12], [255]], "message.kind"),
                free(2),
                free(7),
            ],
        ),
        ("message", "goodbye", message(vec![])),
        ("message", "withdraw", message(regions("withdraw"))),
        ("message", "withdrawn", message(regions("withdrawn"))),
        (
            "lease",
            "release",
            lease(vec![
                instance("release.instance"),
                epoch("release.epoch"),
                instance("release.reader"),
                free(8),
                bad([[0; 4]], "release.consumers"),
                or(bad([[12, 0], [255, 255]], "release"), [0, 0], "release"),
                or(
                    bad([[0xff; 13]], "release.request"),
                    [b'\n'; 13],
                    "RequestId",
                ),
            ]),
        ),
        (
            "lease",
            "released",
            lease(vec![
                instance("released.instance"),
                epoch("released.epoch"),
                instance("released.reader"),
                free(8),
                bad([[0], [9], [255]], "released.verdict"),
            ]),
        ),
        (
            "lease",
            "renew",
            lease(vec![
                instance("renew.instance"),
                free(8),
                or(
                    bad([[0; 4], [1, 0, 1, 0], full], "renew.epochs"),
                    [2, 0, 0, 0],
                    "renew",
                ),
                epoch("renew.epochs"),
                epoch("renew.epochs"),
                epoch("renew.epochs"),
            ]),
        ),
        (
            "lease",
            "renewed",
            lease(vec![
                instance("renewed.instance"),
                free(8),
                or(
                    bad([[1, 0, 1, 0], full], "renewed.gone"),
                    [3, 0, 0, 0],
                    "renewed",
                ),
                or(
                    bad([[1, 0, 1, 0], full], "renewed.unknown"),
                    [2, 0, 0, 0],
                    "renewed",
                ),
                epoch("renewed.gone"),
                bad([[0], [7], [255]], "renewed.why"),
                epoch("renewed.gone"),
                bad([[0], [7], [255]], "renewed.why"),
                epoch("renewed.unknown"),
            ]),
        ),
        (
            "checksum",
            "ask",
            checksum(vec![
                free(8),
                or(
                    bad([[0; 4], [1, 0, 16, 0], full], "ask.blocks"),
                    [3, 0, 0, 0],
                    "ask",
                ),
                free(4),
                free(4),
                free(4),
                free(4),
            ]),
        ),
        (
            "checksum",
            "sums",
            checksum(vec![
                free(8),
                or(
                    bad([[0; 4], [1, 0, 16, 0], full], "sums.sums"),
                    [1, 0, 0, 0],
                    "sums",
                ),
                free(8),
                free(8),
            ]),
        ),
        (
            "checksum",
            "refused",
            checksum(vec![free(8), bad([[0], [6], [255]], "refused.why")]),
        ),
    ]
}

/// The name that an error gives.
pub(crate) fn name_in(error: &WireError) -> &'static str {
    match error {
        WireError::BadValue { field, .. } => field,
        WireError::TooShort { what, .. }
        | WireError::TooLong { what, .. }
        | WireError::Trailing { what, .. }
        | WireError::Version { what, .. }
        | WireError::Msgpack { what, .. } => what,
        _ => "",
    }
}

#[test]
fn every_field_of_every_fixed_layout_is_checked() {
    for (target, name, fields) in layouts() {
        let sample = samples::get(target, name).bytes;
        let check = check_of(target);
        let mut at = 0;
        for (number, field) in fields.iter().enumerate() {
            let with = |value: &[u8]| {
                let mut bytes = sample.clone();
                bytes[at..at + value.len()].copy_from_slice(value);
                check(&bytes)
            };
            for (value, expected) in &field.bad {
                let place = format!("{target}/{name} field {number} with {value:02x?}");
                let error = with(value).expect_err(&place);
                assert_eq!(name_in(&error), *expected, "{place}: {error}");
            }
            if field.bad.is_empty() {
                for byte in [0, 1, 0x80, 255] {
                    assert_eq!(
                        with(&vec![byte; field.bytes]),
                        Ok(()),
                        "{target}/{name} {number}"
                    );
                }
            }
            at += field.bytes;
        }
        assert_eq!(
            at,
            sample.len(),
            "the fields of {target}/{name} cover the sample"
        );
    }
}

#[test]
fn every_fixed_layout_has_its_fields_listed() {
    let listed: Vec<_> = layouts()
        .into_iter()
        .map(|(target, name, _)| (target, name))
        .collect();
    for sample in samples::all() {
        let fixed = matches!(sample.target, "segment" | "message" | "lease" | "checksum")
            && !sample.name.starts_with("hello");
        assert_eq!(
            listed.contains(&(sample.target, sample.name)),
            fixed,
            "{}",
            sample.name
        );
    }
}

/// Garbage on the directory's port costs eight bytes of reading.
#[test]
fn strangers_are_refused_by_the_first_eight_bytes() {
    let strangers: [(&[u8; FRAME_HEADER_BYTES], &str); 6] = [
        (b"GET / HT", "frame.magic"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", "frame.magic"),
        (b"SSH-2.0-", "frame.magic"),
        (b"kfd2\x01\0\0\0", "frame.magic"),
        (b"kfd1\0\0\0\0", "frame.length"),
        (b"kfd1\x11\0\0\0", "frame.length"),
    ];
    for (header, expected) in strangers {
        let error = FrameHeader::parse(header, 16).unwrap_err();
        assert_eq!(name_in(&error), expected, "{error}");
    }
    assert_eq!(FrameHeader::parse(b"kfd1\x10\0\0\0", 16), Ok(16));
    assert_eq!(
        FrameHeader::parse(b"GET / HT", 16).unwrap_err().to_string(),
        "frame.magic is \"GET \", expected \"kfd1\", a kvferry directory frame"
    );
}

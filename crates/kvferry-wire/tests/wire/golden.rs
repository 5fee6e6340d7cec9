//! The fixtures: bytes that this and every later build must read and write in the same way.
//!
//! A fixture changes only together with its format's version. With `KVFERRY_WRITE_FIXTURES` set in
//! the environment, `cargo test -p kvferry-wire --test wire` writes them anew before it compares.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use kvferry_wire::{SEGMENT_HEADER_BYTES, WireError};

use crate::{
    roundtrip::{CHECKS, Check},
    samples::{self, Sample},
};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

fn path(sample: &Sample) -> PathBuf {
    folder()
        .join(sample.target)
        .join(format!("{}.bin", sample.name))
}

pub(crate) fn check_of(target: &str) -> Check {
    CHECKS.iter().find(|(name, _)| *name == target).unwrap().1
}

#[test]
fn values_are_written_as_the_fixtures_say() {
    for sample in samples::all() {
        let path = path(&sample);
        if std::env::var_os("KVFERRY_WRITE_FIXTURES").is_some() {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, &sample.bytes).unwrap();
        }
        let fixture = fs::read(path).unwrap();
        assert_eq!(sample.bytes, fixture, "{}/{}", sample.target, sample.name);
    }
}

#[test]
fn fixtures_are_read_and_written_again() {
    for sample in samples::all() {
        let fixture = fs::read(path(&sample)).unwrap();
        assert_eq!(
            check_of(sample.target)(&fixture),
            Ok(()),
            "{}/{}",
            sample.target,
            sample.name
        );
    }
}

#[test]
fn every_fixture_has_a_sample_and_every_format_a_fixture() {
    let samples: BTreeSet<PathBuf> = samples::all().iter().map(path).collect();
    let mut fixtures = BTreeSet::new();
    for (target, _) in CHECKS {
        for entry in fs::read_dir(folder().join(target)).unwrap() {
            fixtures.insert(entry.unwrap().path());
        }
    }
    assert_eq!(samples, fixtures);
    assert_eq!(fs::read_dir(folder()).unwrap().count(), CHECKS.len());
}

#[test]
fn a_value_that_ends_early_is_refused_at_every_length() {
    for sample in samples::all() {
        let check = check_of(sample.target);
        for length in 0..sample.bytes.len() {
            let refused = check(&sample.bytes[..length]).is_err();
            let open = sample.open_from.is_some_and(|from| length >= from);
            // A piece of a message may be shorter; it is then a piece with a later neighbour.
            let piece = sample.target == "segment"
                && sample.name == "message"
                && length > SEGMENT_HEADER_BYTES;
            assert_eq!(
                refused,
                !open && !piece,
                "{}/{} {length}",
                sample.target,
                sample.name
            );
        }
    }
}

#[test]
fn bytes_after_a_value_are_refused() {
    for sample in samples::all()
        .into_iter()
        .filter(|sample| sample.open_from.is_none())
    {
        let extended = [&sample.bytes[..], &[0xc0]].concat();
        let error = check_of(sample.target)(&extended).unwrap_err();
        let fits = match sample.target {
            "segment" => matches!(
                error,
                WireError::BadValue {
                    field: "segment.offset",
                    ..
                }
            ),
            // JSON has no length of its own.
            "params" => matches!(error, WireError::BadValue { .. }),
            _ => matches!(error, WireError::Trailing { extra: 1, .. }),
        };
        assert!(fits, "{}/{}: {error}", sample.target, sample.name);
    }
}

/// The layouts that the module docs state, spelled out once.
#[test]
fn fixed_layouts_are_as_documented() {
    let hex = |target, name| {
        let bytes: Vec<u8> = samples::get(target, name).bytes;
        bytes
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect::<String>()
    };
    let source = "101112131415161718191a1b1c1d1e1f";
    let destination = "202122232425262728292a2b2c2d2e2f";
    let reader = "303132333435363738393a3b3c3d3e3f2900000000000000";
    let instance = "f0efeeedecebeae9e8e7e6e5e4e3e2e1";
    let sequence = "0807060504030201";
    let connection = "74737271";
    assert_eq!(
        hex("segment", "message"),
        format!(
            "6b660101{source}{destination}{sequence}{connection}09000000040000000000000000000000"
        ) + "6665727279"
    );
    assert_eq!(
        hex("segment", "data"),
        format!(
            "6b660102{source}{destination}{sequence}{connection}0d0c0b0a060000000000000000010000"
        ) + "6665727279"
    );
    assert_eq!(hex("message", "ping"), "020300008877665544332211");
    assert_eq!(hex("message", "pong"), "020400008877665544332211");
    assert_eq!(
        hex("message", "read"),
        "020500000d0c0b0a06000000020000000200000003000000040000000500000002000000".to_owned()
            + "8403000001000000"
    );
    assert_eq!(
        hex("message", "read-rejected"),
        "020600000d0c0b0a06000000efcdab896745230102"
    );
    assert_eq!(hex("message", "read-cancel"), "020700000d0c0b0a06000000");
    assert_eq!(hex("message", "service"), "020802017061796c6f6164");
    assert_eq!(hex("message", "goodbye"), "02090000");
    let regions = "02000000070000000900000004030201".to_owned() + "04030201";
    assert_eq!(hex("message", "withdraw"), format!("020a0000{regions}"));
    assert_eq!(hex("message", "withdrawn"), format!("020b0000{regions}"));
    assert_eq!(
        hex("lease", "release"),
        format!("0101{instance}0700000000000000{reader}020000000d00")
            + "636d706c2d3764c3a961642d30"
    );
    assert_eq!(
        hex("lease", "released"),
        format!("0102{instance}0700000000000000{reader}02")
    );
    assert_eq!(
        hex("lease", "renew"),
        format!("0103{instance}edfe00000000000003000000")
            + "030000000000000007000000000000000900000000000000"
    );
    assert_eq!(
        hex("lease", "renewed"),
        format!("0104{instance}edfe0000000000000200000001000000")
            + "030000000000000001090000000000000006"
            + "0000000002000000"
    );
    assert_eq!(
        hex("checksum", "ask"),
        "0101edfe000000000000020000000000000007000000".to_owned() + "0300000004030201"
    );
    assert_eq!(
        hex("checksum", "sums"),
        "0102edfe0000000000000200000088776655443322110100000000000000"
    );
    assert_eq!(hex("checksum", "refused"), "0103edfe00000000000004");
    assert_eq!(
        hex("directory", "request-all"),
        "6b6664310a000000010081a572616e6b73c0"
    );
}

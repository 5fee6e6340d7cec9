use super::*;

#[test]
fn kinds_and_versions_print_as_people_write_them() {
    assert_eq!(MemoryKind::Host.to_string(), "host");
    assert_eq!(MemoryKind::Cuda { device: 3 }.to_string(), "cuda:3");
    assert_eq!(MemoryKind::Rocm { device: 0 }.to_string(), "rocm:0");
    assert_eq!(
        UcxVersion {
            major: 1,
            minor: 13,
            release: 1
        }
        .to_string(),
        "1.13.1"
    );
}

fn table() -> TableDescription {
    TableDescription {
        id: 1,
        region: 1,
        offset: 0,
        block_bytes: 8,
        block_stride: 8,
        block_count: 4,
        group: 0,
        layer: 0,
        interior: Interior::opaque(),
    }
}

#[test]
fn a_table_that_overflows_is_refused_whatever_the_region() {
    assert_eq!(check_table(&table(), 32), Ok(()));
    let table = |change: fn(&mut TableDescription)| {
        let mut table = table();
        change(&mut table);
        table
    };
    for wrong in [
        table(|t| t.block_count = 5),
        table(|t| t.offset = 1),
        table(|t| (t.block_count, t.block_stride) = (u32::MAX, u64::MAX / 2)),
        table(|t| (t.offset, t.block_count) = (u64::MAX - 7, 1)),
        table(|t| (t.offset, t.block_count) = (u64::MAX, 1)),
        table(|t| (t.block_bytes, t.block_stride) = (u64::MAX, u64::MAX)),
    ] {
        let bytes = if wrong.block_count == 5 || wrong.offset == 1 {
            32
        } else {
            u64::MAX
        };
        let error = check_table(&wrong, bytes).unwrap_err();
        assert!(error.to_string().starts_with("table.offset is "), "{error}");
    }
}

/// Layouts in which heads lie outside tokens, and tokens outside heads, both fit their block.
#[test]
fn heads_and_tokens_may_be_nested_either_way() {
    for (head_stride, token_stride) in [(64, 256), (1_024, 64)] {
        let interior = Interior {
            heads: 4,
            head_stride,
            tokens: 16,
            token_stride,
            planes: 1,
            ..Interior::opaque()
        };
        let fits = TableDescription {
            block_bytes: 4_096,
            block_stride: 4_096,
            interior,
            ..table()
        };
        assert_eq!(check_table(&fits, 16_384), Ok(()));
        let one_more = TableDescription {
            interior: Interior {
                tokens: 65,
                ..fits.interior.clone()
            },
            ..fits
        };
        assert!(check_table(&one_more, 16_384).is_err());
    }
}

//! The planner against a block-by-block model.

use super::*;
use kvferry_wire::Interior;
use proptest::prelude::*;

fn table(offset: u64, bytes: u64, gap: u64, count: u32) -> TableDescription {
    TableDescription {
        id: 0,
        region: 0,
        offset,
        block_bytes: bytes,
        block_stride: bytes + gap,
        block_count: count,
        group: 0,
        layer: 0,
        interior: Interior::opaque(),
    }
}

fn pairs(ids: &[(u32, u32)]) -> Vec<BlockPair> {
    ids.iter()
        .map(|&(local, remote)| BlockPair::new(local, remote))
        .collect()
}

/// Every byte that a plan moves, as (from, to), one block at a time.
fn model(
    local: &TableDescription,
    remote: &TableDescription,
    pairs: &[BlockPair],
) -> Vec<(u64, u64)> {
    let mut moved = Vec::new();
    for pair in pairs {
        for byte in 0..local.block_bytes {
            moved.push((
                remote.offset + u64::from(pair.remote) * remote.block_stride + byte,
                local.offset + u64::from(pair.local) * local.block_stride + byte,
            ));
        }
    }
    moved
}

#[test]
fn neighbours_on_both_sides_become_one_run() {
    let (dense, gappy) = (table(0, 64, 0, 100), table(0, 64, 64, 100));
    let ids = pairs(&[
        (0, 10),
        (1, 11),
        (2, 12),
        (4, 13),
        (5, 14),
        (6, 16),
        (5, 15),
    ]);
    assert_eq!(plan(&dense, &dense, &ids).count(), 4);
    assert_eq!(plan(&gappy, &dense, &ids).count(), 7);
    assert_eq!(plan(&dense, &gappy, &ids).count(), 7);
    assert_eq!(plan(&dense, &dense, &[]).count(), 0);
}

#[test]
fn the_last_ids_do_not_overflow() {
    let table = table(0, 1, 0, u32::MAX);
    let ids = pairs(&[
        (u32::MAX - 2, u32::MAX - 2),
        (u32::MAX - 1, u32::MAX - 1),
        (0, 0),
    ]);
    check_pairs(&table, &table, &ids).unwrap();
    let runs: Vec<Run> = plan(&table, &table, &ids).collect();
    assert_eq!(runs.len(), 2);
    assert_eq!(runs[0].bytes, 2);
}

#[test]
fn bad_pairs_and_tables_are_named() {
    let (a, b) = (table(0, 64, 0, 10), table(0, 64, 0, 20));
    let error = check_pairs(&a, &b, &pairs(&[(9, 19), (10, 0)])).unwrap_err();
    assert!(
        matches!(
            error,
            ReadError::LocalBlock {
                block: 10,
                count: 10
            }
        ),
        "{error}"
    );
    let error = check_pairs(&a, &b, &pairs(&[(0, 20)])).unwrap_err();
    assert!(
        matches!(
            error,
            ReadError::RemoteBlock {
                block: 20,
                count: 20
            }
        ),
        "{error}"
    );
    let error = check_pairs(&a, &table(0, 32, 0, 10), &[]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the tables differ in block_bytes: 64 here, 32 at the peer"
    );
    let mut other = b;
    other.interior.layout = "NHD".into();
    assert!(
        check_pairs(&a, &other, &[])
            .unwrap_err()
            .to_string()
            .contains("interior")
    );
}

/// C124: a request of 100,000 scattered blocks is planned in at most as many runs.
#[test]
fn c124_hundred_thousand_descriptors_plan_into_at_most_as_many_runs() {
    let local = table(0, 4096, 0, 100_000);
    let remote = table(0, 4096, 0, 1 << 20);
    let ids: Vec<BlockPair> = (0..100_000_u32)
        .map(|id| BlockPair::new(id, id.wrapping_mul(7919) % (1 << 20)))
        .collect();
    check_pairs(&local, &remote, &ids).unwrap();
    let (mut runs, mut bytes) = (0_u64, 0_u64);
    for run in plan(&local, &remote, &ids) {
        runs += 1;
        bytes += run.bytes;
    }
    assert_eq!(bytes, 100_000 * 4096);
    assert!(runs <= 100_000, "{runs} runs");
    let sorted: Vec<BlockPair> = (0..100_000).map(|id| BlockPair::new(id, id + 5)).collect();
    assert_eq!(plan(&local, &remote, &sorted).count(), 1);
}

proptest! {
    #[test]
    fn plans_move_the_bytes_of_the_model(
        ids in prop::collection::vec((0_u32..16, 0_u32..16), 0..40),
        bytes in 1_u64..5,
        gaps in (0_u64..2, 0_u64..2),
    ) {
        let local = table(3, bytes, gaps.0, 16);
        let remote = table(7, bytes, gaps.1, 16);
        let ids = pairs(&ids);
        let mut moved = Vec::new();
        let mut runs = 0;
        let mut last: Option<Run> = None;
        for run in plan(&local, &remote, &ids) {
            runs += 1;
            for byte in 0..run.bytes {
                moved.push((run.remote_offset + byte, run.local_offset + byte));
            }
            // No two neighbouring runs could have been one.
            if let Some(last) = last && gaps == (0, 0) {
                let adjacent = last.local_offset + last.bytes == run.local_offset
                    && last.remote_offset + last.bytes == run.remote_offset;
                prop_assert!(!adjacent);
            }
            last = Some(run);
        }
        prop_assert_eq!(moved, model(&local, &remote, &ids));
        prop_assert!(runs <= ids.len());
    }

    #[test]
    fn runs_of_ids_cover_the_pairs(ids in prop::collection::vec((0_u32..8, 0_u32..8), 0..40)) {
        let ids = pairs(&ids);
        let back: Vec<BlockPair> = PairRuns::new(&ids)
            .flat_map(|run| (0..run.count).map(move |n| {
                BlockPair::new(run.first.local + n, run.first.remote + n)
            }))
            .collect();
        prop_assert_eq!(back, ids);
    }
}

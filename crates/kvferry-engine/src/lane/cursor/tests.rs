//! Pieces: they cover what is read exactly, in order, and none crosses the end of a chunk.

use std::collections::BTreeSet;

use kvferry_wire::Interior;
use proptest::prelude::*;

use super::*;

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

fn region_bytes(table: &TableDescription) -> u64 {
    table.offset + u64::from(table.block_count) * table.block_stride
}

fn pieces_of(
    local: &TableDescription,
    remote: &TableDescription,
    pairs: &[BlockPair],
    chunks: (Chunks, Chunks),
    most: u64,
) -> Vec<Run> {
    let mut cursor = Cursor::default();
    let mut pieces = Vec::new();
    while cursor.table == 0
        && let Some(Step { run, after }) = cursor.step_in(local, remote, pairs, chunks, most)
    {
        pieces.push(run);
        assert_ne!(cursor, after, "it goes on");
        cursor = after;
    }
    assert_eq!(
        cursor,
        Cursor {
            table: 1,
            pair: 0,
            within: 0
        }
    );
    pieces
}

/// C79: a read across a boundary of either side is cut there.
#[test]
fn c79_a_run_is_cut_where_a_chunk_of_either_side_ends() {
    let (local, remote) = (table(0, 10, 0, 8), table(5, 10, 0, 8));
    let pairs: Vec<BlockPair> = (0..4).map(|n| BlockPair::new(n, n)).collect();
    let chunks = (Chunks::new(80, Some(16)), Chunks::new(85, Some(24)));
    let found: Vec<_> = pieces_of(&local, &remote, &pairs, chunks, u64::MAX)
        .iter()
        .map(|run| (run.local_offset, run.remote_offset, run.bytes))
        .collect();
    // Ours end at 16 and 32; the peer's at 24, which is our 19.
    assert_eq!(found, [(0, 5, 16), (16, 21, 3), (19, 24, 13), (32, 37, 8)]);
    let whole = (Chunks::new(80, None), Chunks::new(85, None));
    assert_eq!(pieces_of(&local, &remote, &pairs, whole, u64::MAX).len(), 1);
}

proptest! {
    #[test]
    fn c79_pieces_cover_every_run_exactly_and_none_crosses_a_boundary(
        (bytes, gaps, offsets) in (1..40_u64, (0..2_u64, 0..2_u64), (0..50_u64, 0..50_u64)),
        ids in prop::collection::vec((0..12_u32, 0..12_u32, 1..5_u32), 1..12),
        limits in (prop::option::of(1..200_u64), prop::option::of(1..200_u64)),
        most in 1..200_u64,
    ) {
        let local = table(offsets.0, bytes, gaps.0 * 3, 16);
        let remote = table(offsets.1, bytes, gaps.1 * 5, 16);
        let pairs: Vec<BlockPair> = ids
            .iter()
            .flat_map(|&(l, r, count)| (0..count).map(move |n| BlockPair::new(l + n, r + n)))
            .collect();
        let chunks = (
            Chunks::new(region_bytes(&local), limits.0),
            Chunks::new(region_bytes(&remote), limits.1),
        );
        let runs: Vec<Run> = plan(&local, &remote, &pairs).collect();
        let cut = pieces_of(&local, &remote, &pairs, chunks, most);
        prop_assert!(cut.iter().all(|piece| piece.bytes <= most));
        let pieces = pieces_of(&local, &remote, &pairs, chunks, u64::MAX);

        let bytes_of = |runs: &[Run]| -> Vec<(u64, u64)> {
            let of = |run: &Run| {
                let (l, r) = (run.local_offset, run.remote_offset);
                (0..run.bytes).map(move |n| (l + n, r + n))
            };
            runs.iter().flat_map(of).collect()
        };
        prop_assert_eq!(bytes_of(&pieces), bytes_of(&runs));
        prop_assert_eq!(bytes_of(&cut), bytes_of(&runs));
        for piece in &pieces {
            for (chunks, first) in [(chunks.0, piece.local_offset), (chunks.1, piece.remote_offset)] {
                prop_assert_eq!(chunks.index_of(first), chunks.index_of(first + piece.bytes - 1));
            }
        }
        // And no more of them than there are boundaries inside of runs.
        let expected: usize = runs
            .iter()
            .map(|run| {
                let cuts = |chunks: Chunks, first: u64| {
                    (1..run.bytes).filter(move |n| chunks.left(first + n) == chunks.chunk_bytes())
                };
                let cuts: BTreeSet<u64> = cuts(chunks.0, run.local_offset)
                    .chain(cuts(chunks.1, run.remote_offset))
                    .collect();
                cuts.len() + 1
            })
            .sum();
        prop_assert_eq!(pieces.len(), expected);
    }
}

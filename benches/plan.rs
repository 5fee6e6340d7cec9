//! What planning costs per block (C124, C127).
#![allow(missing_docs)]

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvferry_benches::{pairs, table};
use kvferry_engine::{check_pairs, plan};
use std::hint::black_box;

const BLOCKS: u32 = 100_000;

fn planning(c: &mut Criterion) {
    let mut group = c.benchmark_group("plan 100,000 blocks");
    group.throughput(Throughput::Elements(u64::from(BLOCKS)));
    for run in [1, 8, BLOCKS] {
        let (local, remote) = (table(4096, BLOCKS), table(4096, 1 << 19));
        let ids = pairs(BLOCKS, run);
        group.bench_with_input(BenchmarkId::new("in runs of", run), &ids, |b, ids| {
            b.iter(|| plan(&local, &remote, ids).map(|run| run.bytes).sum::<u64>());
        });
        group.bench_with_input(
            BenchmarkId::new("checked, in runs of", run),
            &ids,
            |b, ids| {
                b.iter(|| check_pairs(&local, &remote, black_box(ids)).is_ok());
            },
        );
    }
    group.finish();
}

criterion_group!(benches, planning);
criterion_main!(benches);

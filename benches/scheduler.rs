//! What a scheduler's step pays for `RemotePrefill`: the hooks of one request, and an empty step.
#![allow(missing_docs, clippy::unwrap_used)]

use std::hint::black_box;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use kvferry_connector::contract::{
    Allocation, Finish, FinishedRequest, GroupBlocks, Params, RequestView, Scheduled,
    SchedulerConnector, StepView,
};
use kvferry_connector::remote::{RemoteConfig, RemoteScheduler};
use kvferry_wire::params::{RemoteOffer, Source};
use kvferry_wire::{EngineId, Epoch, Instance, LeaseId, RequestId};

const BLOCKS: u32 = 4096;
const TOKENS: u32 = 16;

fn half() -> RemoteScheduler {
    let config = RemoteConfig::new(EngineId::new("bench").unwrap(), vec![TOKENS]);
    RemoteScheduler::new(config, Instance::random().unwrap()).unwrap()
}

fn offer(blocks: &[u32]) -> Params {
    let offer = RemoteOffer {
        lease: LeaseId {
            instance: Instance::random().unwrap(),
            epoch: Epoch::new(1).unwrap(),
            request: RequestId::new("there").unwrap(),
        },
        source: Source {
            engine: "prefill".into(),
            directory: String::new(),
            ranks: 1,
        },
        tokens: BLOCKS * TOKENS,
        blocks: vec![blocks.to_vec()],
        block_tokens: vec![TOKENS],
        duration_ms: 30_000,
    };
    offer.to_params("127.0.0.1", 1)
}

fn hooks(c: &mut Criterion) {
    let blocks: Vec<u32> = (1..=BLOCKS).map(|block| block * 7 % 65_521).collect();
    let tokens: Vec<u32> = (0..BLOCKS * TOKENS).collect();
    let (import, id) = (offer(&blocks), RequestId::new("here").unwrap());
    let export = serde_json::json!({"do_remote_decode": true});
    let export = export.as_object().unwrap().clone();
    let view = |params| RequestView {
        id: &id,
        tokens: &tokens,
        prompt: BLOCKS * TOKENS,
        params: Some(params),
        extra_key: "",
    };
    let lists = [blocks];
    let blocks = GroupBlocks(&lists);
    let empty = StepView {
        number: 1,
        scheduled: &[],
    };

    let mut group = c.benchmark_group("RemotePrefill, 4,096 blocks");
    group.throughput(Throughput::Elements(u64::from(BLOCKS)));
    group.bench_function("consumer: new, lookup, alloc, step", |b| {
        let request = view(&import);
        b.iter_batched_ref(
            half,
            |half| {
                half.on_new_request(&request);
                let matched = half.matched_tokens(&request, 0);
                let allocation = Allocation {
                    blocks,
                    local_computed: 0,
                    external: matched.tokens(),
                };
                half.after_alloc(&request, &allocation);
                black_box(half.build_step(&empty));
            },
            BatchSize::SmallInput,
        );
    });
    group.bench_function("producer: new, step, finish, step", |b| {
        let request = view(&export);
        let scheduled = [Scheduled {
            request,
            new_blocks: blocks,
            renewed: true,
            computed: 0,
            tokens: BLOCKS * TOKENS,
        }];
        let step = StepView {
            number: 1,
            scheduled: &scheduled,
        };
        b.iter_batched_ref(
            half,
            |half| {
                half.on_new_request(&request);
                black_box(half.build_step(&step));
                let finished = FinishedRequest {
                    request,
                    blocks,
                    computed: BLOCKS * TOKENS,
                    in_flight: 0,
                    how: Finish::Length,
                };
                black_box(half.request_finished(&finished));
                black_box(half.build_step(&empty));
            },
            BatchSize::SmallInput,
        );
    });
    group.finish();

    c.bench_function("RemotePrefill, an empty step", |b| {
        let mut half = half();
        b.iter(|| black_box(half.build_step(&empty)));
    });
}

criterion_group!(benches, hooks);
criterion_main!(benches);

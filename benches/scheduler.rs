//! What a scheduler's step pays for `RemotePrefill`: the hooks of one request, an empty step, and what is asked in
//! every step while many requests are held or wait.
#![allow(missing_docs, clippy::unwrap_used)]

use std::hint::black_box;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use kvferry_connector::contract::{
    Aggregated, Allocation, Finish, FinishedRequest, GroupBlocks, Params, ReportPart, RequestView,
    Scheduled, SchedulerConnector, StepPlan, StepView,
};
use kvferry_connector::lease::End;
use kvferry_connector::remote::{RemoteConfig, RemoteScheduler, Report};
use kvferry_wire::params::{RemoteOffer, Source};
use kvferry_wire::{EngineId, Epoch, Instance, LeaseId, RequestId};

const BLOCKS: u32 = 4096;
const TOKENS: u32 = 16;

fn half() -> RemoteScheduler {
    let config = RemoteConfig::new(EngineId::new("bench").unwrap(), vec![TOKENS]);
    RemoteScheduler::new(config, Instance::random().unwrap()).unwrap()
}

fn offer(blocks: &[u32]) -> Params {
    offer_of(blocks, BLOCKS)
}

/// An offer of so many blocks' tokens.
fn offer_of(blocks: &[u32], count: u32) -> Params {
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
        tokens: count * TOKENS,
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

const HELD: u32 = 10_000;

/// What is asked in every step, with this many requests held for others and as many that wait to be read.
fn many(c: &mut Criterion) {
    let tokens: Vec<u32> = (0..TOKENS).collect();
    let id = |kind: &str, n: u32| RequestId::new(format!("{kind}-{n}")).unwrap();
    let (import, export) = (
        offer_of(&[1], 1),
        serde_json::json!({"do_remote_decode": true}),
    );
    let export = export.as_object().unwrap().clone();
    let lists = [vec![1]];
    let held = |half: &mut RemoteScheduler, n: u32| {
        let id = id("held", n);
        let request = RequestView {
            id: &id,
            tokens: &tokens,
            prompt: TOKENS,
            params: Some(&export),
            extra_key: "",
        };
        half.on_new_request(&request);
        let scheduled = [Scheduled {
            request,
            new_blocks: GroupBlocks(&lists),
            renewed: true,
            computed: 0,
            tokens: TOKENS,
        }];
        let step = StepView {
            number: u64::from(n),
            scheduled: &scheduled,
        };
        half.build_step(&step);
        half.request_finished(&FinishedRequest {
            request,
            blocks: GroupBlocks(&lists),
            computed: TOKENS,
            in_flight: 0,
            how: Finish::Length,
        });
        let StepPlan::Remote(plan) = half.build_step(&StepView {
            number: u64::from(n),
            scheduled: &[],
        }) else {
            panic!("another connector's plan");
        };
        plan.leases.activate[0]
    };
    let ended = |epoch: Epoch| {
        let report = Report {
            ended: vec![(epoch, End::Released)],
            lost: Vec::new(),
        };
        Aggregated {
            parts: vec![(0, ReportPart::Remote(report))],
            ..Aggregated::default()
        }
    };

    let mut group = c.benchmark_group("RemotePrefill, many held");
    for count in [10, HELD] {
        let mut half = half();
        for n in 0..count {
            let id = id("waits", n);
            half.on_new_request(&RequestView {
                id: &id,
                tokens: &tokens,
                prompt: TOKENS,
                params: Some(&import),
                extra_key: "",
            });
        }
        half.build_step(&StepView {
            number: 0,
            scheduled: &[],
        });
        group.bench_function(format!("has_pending_work, {count} waiting"), |b| {
            b.iter(|| black_box(half.has_pending_work()));
        });
        for n in 0..count {
            held(&mut half, n);
        }
        group.bench_function(
            format!("has_pending_work, {count} waiting and as many held"),
            |b| b.iter(|| black_box(half.has_pending_work())),
        );
        let half = std::cell::RefCell::new(half);
        let mut next = count;
        group.bench_function(format!("on_report of one end, {count} held"), |b| {
            b.iter_batched(
                || {
                    next += 1;
                    ended(held(&mut half.borrow_mut(), next))
                },
                |report| half.borrow_mut().on_report(&report),
                BatchSize::PerIteration,
            );
        });
        let nothing = Aggregated::default();
        group.bench_function(format!("on_report of nothing, {count} held"), |b| {
            b.iter(|| half.borrow_mut().on_report(black_box(&nothing)));
        });
        group.bench_function(format!("stats, {count} held"), |b| {
            b.iter(|| black_box(half.borrow().stats()));
        });
    }
    group.finish();
}

criterion_group!(benches, hooks, many);
criterion_main!(benches);

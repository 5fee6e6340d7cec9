use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::contract::{FailedBlock, GroupBlocks, LoadFailure, Params, Received, Scheduled};
use crate::remote::Reach;

const BLOCK: u32 = 64;

fn id(text: &str) -> RequestId {
    RequestId::new(text).unwrap()
}

fn config(role: Role) -> RemoteConfig {
    RemoteConfig {
        role,
        ..RemoteConfig::new(EngineId::new("engine").unwrap(), vec![BLOCK])
    }
}

/// A scheduler half, driven by hand.
struct Bench {
    half: RemoteScheduler,
    steps: u64,
}

struct Request {
    id: RequestId,
    tokens: Vec<u32>,
    params: Option<Params>,
}

impl Request {
    fn new(name: &str, prompt: u32, params: Option<Params>) -> Self {
        Self {
            id: id(name),
            tokens: (0..prompt).collect(),
            params,
        }
    }

    fn view(&self) -> RequestView<'_> {
        RequestView {
            id: &self.id,
            tokens: &self.tokens,
            prompt: self.tokens.len() as u32,
            params: self.params.as_ref(),
            extra_key: "",
        }
    }
}

fn export() -> Option<Params> {
    let params =
        json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null});
    params.as_object().cloned()
}

/// An offer of `tokens` tokens in the blocks 101, 102 and so on.
fn offer(tokens: u32, block: u32) -> RemoteOffer {
    let count = tokens.div_ceil(block);
    RemoteOffer {
        lease: LeaseId {
            instance: Instance::from_bytes([8; 16]).unwrap(),
            epoch: Epoch::new(77).unwrap(),
            request: id("prefill-77"),
        },
        source: Source {
            engine: "prefill".into(),
            directory: "127.0.0.1:9".into(),
            ranks: 1,
        },
        tokens,
        blocks: vec![(101..101 + count).collect()],
        block_tokens: vec![block],
        duration_ms: 30_000,
    }
}

fn import(tokens: u32) -> Option<Params> {
    Some(offer(tokens, BLOCK).to_params("127.0.0.1", 9))
}

impl Bench {
    fn new(config: RemoteConfig) -> Self {
        let half = RemoteScheduler::new(config, Instance::from_bytes([5; 16]).unwrap()).unwrap();
        Self { half, steps: 0 }
    }

    fn step(&mut self, scheduled: &[&Request]) -> Plan {
        self.steps += 1;
        let scheduled: Vec<Scheduled<'_>> = scheduled
            .iter()
            .map(|request| Scheduled {
                request: request.view(),
                new_blocks: GroupBlocks(&[]),
                renewed: true,
                computed: 0,
                tokens: 1,
            })
            .collect();
        let step = StepView {
            number: self.steps,
            scheduled: &scheduled,
        };
        let StepPlan::Remote(plan) = self.half.build_step(&step) else {
            panic!("another connector's plan");
        };
        plan
    }

    fn alloc(&mut self, request: &Request, blocks: &[u32], local: u32, external: u32) {
        let allocation = Allocation {
            blocks: GroupBlocks(&[blocks.to_vec()]),
            local_computed: local,
            external,
        };
        self.half.after_alloc(&request.view(), &allocation);
    }

    fn finish(
        &mut self,
        request: &Request,
        blocks: &[u32],
        computed: u32,
        how: Finish,
    ) -> Finished {
        self.half.request_finished(&FinishedRequest {
            request: request.view(),
            blocks: GroupBlocks(&[blocks.to_vec()]),
            computed,
            in_flight: 0,
            how,
        })
    }

    fn report(&mut self, parts: Vec<Report>, received: Vec<Received>) {
        let parts = parts.into_iter().map(ReportPart::Remote);
        self.half.on_report(&Aggregated {
            received,
            sent: Vec::new(),
            parts: (0..).zip(parts).collect(),
        });
    }
}

fn loaded(name: &str, failure: Option<LoadFailure>) -> Received {
    let failed = failure.map(|_| FailedBlock { group: 0, block: 1 });
    Received {
        request: id(name),
        failure,
        failed: failed.into_iter().collect(),
    }
}

/// C1: blocks named, and no tokens asked for: one release, no read. Nothing named: nothing at all.
#[test]
fn c1_zero_external_tokens_release_once_and_read_nothing() {
    let mut bench = Bench::new(config(Role::Consumer));
    let request = Request::new("r", 320, import(320));
    let plain = Request::new("plain", 320, None);
    for request in [&request, &plain] {
        bench.half.on_new_request(&request.view());
        bench.alloc(request, &[1, 2, 3, 4, 5], 320, 0);
        bench.alloc(request, &[1, 2, 3, 4, 5], 320, 0);
    }
    let plan = bench.step(&[&request, &plain]);
    assert_eq!(plan.hold.len(), 1);
    assert_eq!(plan.hold[0].lease.request, id("prefill-77"));
    assert_eq!((plan.release, plan.load.len()), (vec![id("r")], 0));
    assert_eq!(
        bench.finish(&request, &[1], 320, Finish::Stopped),
        Finished::Free
    );
    assert!(bench.step(&[]).is_empty());
    assert!(!bench.half.has_pending_work());
}

/// C4: lookups change nothing; a load that was consumed, or failed, is not offered again.
#[test]
fn c4_lookups_are_pure_and_a_load_is_offered_until_it_is_consumed() {
    for failure in [None, Some(LoadFailure::Lease)] {
        let mut bench = Bench::new(config(Role::Consumer));
        let request = Request::new("r", 321, import(321));
        bench.half.on_new_request(&request.view());
        bench.step(&[]);
        for computed in [0, 64, 64, 0, 256] {
            let matched = bench.half.matched_tokens(&request.view(), computed);
            assert_eq!(matched, Matched::load_async(321, computed, 321));
            assert_eq!(matched.tokens(), 321 - computed);
        }
        assert!(bench.step(&[]).is_empty(), "a lookup planned something");
        bench.alloc(&request, &[1, 2, 3, 4, 5, 6], 64, 257);
        assert_eq!(
            bench.half.matched_tokens(&request.view(), 64),
            Matched::None
        );
        let plan = bench.step(&[]);
        let pairs = GroupPairs {
            group: 0,
            remote: vec![102, 103, 104, 105, 106],
            local: vec![2, 3, 4, 5, 6],
        };
        assert_eq!(plan.load.len(), 1);
        assert_eq!(plan.load[0].blocks, [pairs]);
        assert!(bench.half.has_pending_work());
        bench.report(Vec::new(), vec![loaded("r", failure)]);
        // Looked up, and given its blocks, once more after the load.
        assert_eq!(bench.half.matched_tokens(&request.view(), 0), Matched::None);
        bench.alloc(&request, &[1, 2, 3, 4, 5, 6], 321, 0);
        let plan = bench.step(&[&request]);
        assert!(plan.is_empty(), "{plan:?}");
        let stats = bench.half.stats();
        assert_eq!(
            (stats.loads, stats.loaded, stats.failed.total()),
            (
                1,
                u64::from(failure.is_none()),
                u64::from(failure.is_some())
            )
        );
    }
}

#[test]
fn nothing_is_offered_that_saves_no_more_than_a_token_or_less_than_the_threshold() {
    let mut bench = Bench::new(config(Role::Consumer));
    let request = Request::new("r", 321, import(321));
    bench.half.on_new_request(&request.view());
    assert_eq!(
        bench.half.matched_tokens(&request.view(), 320),
        Matched::None
    );
    assert_eq!(bench.half.matched_tokens(&request.view(), 319).tokens(), 2);
    for threshold in [0, 1] {
        let mut bench = Bench::new(RemoteConfig {
            recompute_threshold_tokens: threshold,
            ..config(Role::Consumer)
        });
        bench.half.on_new_request(&request.view());
        let matched = bench.half.matched_tokens(&request.view(), 320);
        assert_eq!(matched, Matched::None, "threshold {threshold}");
    }
    let mut bench = Bench::new(RemoteConfig {
        recompute_threshold_tokens: 100,
        ..config(Role::Consumer)
    });
    bench.half.on_new_request(&request.view());
    assert_eq!(
        bench.half.matched_tokens(&request.view(), 222),
        Matched::None
    );
    assert_eq!(
        bench.half.matched_tokens(&request.view(), 221).tokens(),
        100
    );
    // Under it, the request is computed here and the producer is told.
    bench.alloc(&request, &[1, 2, 3, 4, 5, 6], 256, 0);
    assert_eq!(bench.step(&[]).release, [id("r")]);
}

/// C22: refused before it was ever looked up: released with the next step.
#[test]
fn c22_a_request_that_ends_before_it_is_admitted_releases() {
    let mut bench = Bench::new(config(Role::Consumer));
    let mut request = Request::new("r", 320, import(320));
    bench.half.on_new_request(&request.view());
    request.tokens = vec![0];
    assert_eq!(
        bench.finish(&request, &[], 0, Finish::Failed),
        Finished::Free
    );
    // C11: and again.
    assert_eq!(
        bench.finish(&request, &[], 0, Finish::Failed),
        Finished::Free
    );
    let plan = bench.step(&[]);
    assert_eq!((plan.hold.len(), plan.release), (1, vec![id("r")]));
    assert!(bench.step(&[]).is_empty());
}

/// C23: an abort while the load runs breaks it off, and its late report changes nothing.
#[test]
fn c23_an_abort_while_loading_breaks_it_off_once() {
    let mut bench = Bench::new(config(Role::Consumer));
    let request = Request::new("r", 320, import(320));
    bench.half.on_new_request(&request.view());
    bench.alloc(&request, &[1, 2, 3, 4, 5], 0, 320);
    assert_eq!(bench.step(&[]).load.len(), 1);
    assert_eq!(
        bench.finish(&request, &[1], 0, Finish::Aborted),
        Finished::Free
    );
    assert_eq!(bench.step(&[]).abort, [id("r")]);
    // C10.
    bench.report(
        Vec::new(),
        vec![
            loaded("r", Some(LoadFailure::Aborted)),
            loaded("never", None),
        ],
    );
    let stats = bench.half.stats();
    assert_eq!((stats.failed.aborted, stats.late_reports), (1, 1));
    // Once: the ranks report it once.
    bench.report(Vec::new(), vec![loaded("r", None)]);
    assert_eq!(bench.half.stats().late_reports, 2);
    assert!(bench.step(&[]).is_empty() && !bench.half.has_pending_work());
}

/// C5, C21: chunked over three steps, one lease; the parameters have all blocks and the producer's id.
#[test]
fn c5_a_chunked_prefill_exports_the_blocks_of_all_chunks() {
    let mut bench = Bench::new(config(Role::Producer));
    let request = Request::new("cmpl-7", 150, export());
    bench.half.on_new_request(&request.view());
    let first = bench.step(&[&request]);
    assert_eq!(
        first.leases.reserve,
        [(Epoch::new(1).unwrap(), id("cmpl-7"))]
    );
    assert_eq!(first.leases.issued_up_to, 1);
    for _ in 0..2 {
        let next = bench.step(&[&request]);
        assert!(next.is_empty() && next.leases.issued_up_to == 1);
    }
    let finished = bench.finish(&request, &[7, 3, 9], 150, Finish::Length);
    let Finished::Hold {
        params: Some(params),
    } = finished
    else {
        panic!("not held: {finished:?}");
    };
    let Ok(Asked::Import(offer)) = Asked::parse(&params) else {
        panic!("unreadable: {params:?}");
    };
    assert_eq!((offer.blocks, offer.tokens), (vec![vec![7, 3, 9]], 150));
    assert_eq!(offer.lease.request, id("cmpl-7"));
    let port = bench.half.directory_address().unwrap().port();
    assert_eq!(offer.source.directory, format!("127.0.0.1:{port}"));
    assert_eq!(bench.step(&[]).leases.activate, [Epoch::new(1).unwrap()]);
    assert!(bench.half.has_pending_work());
    // C11.
    assert_eq!(
        bench.finish(&request, &[7, 3, 9], 150, Finish::Length),
        Finished::Free
    );
    let ended = vec![(Epoch::new(1).unwrap(), End::Released)];
    bench.report(
        vec![Report {
            ended,
            lost: Vec::new(),
        }],
        Vec::new(),
    );
    assert!(!bench.half.has_pending_work());
    assert_eq!(bench.half.stats().parts_released, 1);
}

/// Positions that a late step may still write are nobody's to read.
#[test]
fn only_computed_tokens_of_the_prompt_are_exported() {
    for (computed, in_flight, blocks, tokens) in [
        (151, 0, 3, 150),
        (150, 1, 3, 149),
        (150, 22, 2, 128),
        (64, 0, 1, 64),
    ] {
        let mut bench = Bench::new(config(Role::Producer));
        let request = Request::new("r", 150, export());
        bench.half.on_new_request(&request.view());
        bench.step(&[&request]);
        let finished = bench.half.request_finished(&FinishedRequest {
            request: request.view(),
            blocks: GroupBlocks(&[vec![7, 3, 9, 4]]),
            computed,
            in_flight,
            how: Finish::Length,
        });
        let Finished::Hold {
            params: Some(params),
        } = finished
        else {
            panic!("not held");
        };
        assert_eq!(
            params["remote_block_ids"][0].as_array().unwrap().len(),
            blocks
        );
        assert_eq!(params["remote_num_tokens"], tokens);
    }
}

/// C6: preempted in its last step: its lease is taken back, and it exports only what is scheduled anew.
#[test]
fn c6_a_preempted_request_exports_nothing_of_its_lost_blocks() {
    let mut bench = Bench::new(config(Role::Producer));
    let request = Request::new("r", 150, export());
    bench.half.on_new_request(&request.view());
    bench.step(&[&request]);
    bench.half.preempted(&[id("r"), id("unknown")]);
    assert_eq!(bench.step(&[]).leases.revoke, [Epoch::new(1).unwrap()]);
    let mut gone = Bench::new(config(Role::Producer));
    gone.half.on_new_request(&request.view());
    gone.step(&[&request]);
    gone.half.preempted(&[id("r")]);
    assert_eq!(
        gone.finish(&request, &[], 0, Finish::Length),
        Finished::Free
    );
    let plan = gone.step(&[]);
    assert_eq!(
        (plan.leases.revoke.len(), plan.leases.activate.len()),
        (1, 0)
    );
    // Scheduled again: another lease.
    assert_eq!(
        bench.step(&[&request]).leases.reserve,
        [(Epoch::new(2).unwrap(), id("r"))]
    );
    assert!(matches!(
        bench.finish(&request, &[4, 5, 6], 150, Finish::Length),
        Finished::Hold { .. }
    ));
    assert_eq!(bench.step(&[]).leases.activate, [Epoch::new(2).unwrap()]);
}

#[test]
fn whatever_ends_otherwise_exports_nothing_and_revokes() {
    for how in [Finish::Stopped, Finish::Aborted, Finish::Failed] {
        let mut bench = Bench::new(config(Role::Producer));
        let request = Request::new("r", 150, export());
        bench.half.on_new_request(&request.view());
        bench.step(&[&request]);
        assert_eq!(bench.finish(&request, &[1, 2, 3], 150, how), Finished::Free);
        assert_eq!(bench.step(&[]).leases.revoke.len(), 1);
    }
    // Never scheduled: no lease at all.
    let mut bench = Bench::new(config(Role::Producer));
    let request = Request::new("r", 150, export());
    bench.half.on_new_request(&request.view());
    assert_eq!(
        bench.finish(&request, &[], 0, Finish::Aborted),
        Finished::Free
    );
    assert!(bench.step(&[]).is_empty());
    // Its lease has ended by itself: nothing is exported under it.
    bench.half.on_new_request(&request.view());
    bench.step(&[&request]);
    let ended = vec![(Epoch::new(1).unwrap(), End::Expired)];
    bench.report(
        vec![Report {
            ended,
            lost: Vec::new(),
        }],
        Vec::new(),
    );
    assert_eq!(
        bench.finish(&request, &[1, 2, 3], 150, Finish::Length),
        Finished::Free
    );
}

#[test]
fn a_lost_lease_is_not_offered() {
    let mut bench = Bench::new(config(Role::Consumer));
    let request = Request::new("r", 320, import(320));
    bench.half.on_new_request(&request.view());
    let lost = vec![id("r"), id("r"), id("unknown")];
    bench.report(
        vec![Report {
            ended: Vec::new(),
            lost,
        }],
        Vec::new(),
    );
    assert_eq!(bench.half.matched_tokens(&request.view(), 0), Matched::None);
    assert_eq!(bench.half.stats().lost, 1);
}

/// C17: unreadable parameters cost the transfer, not the request.
#[test]
fn c17_unreadable_parameters_leave_the_request_local() {
    let mut bench = Bench::new(config(Role::Both));
    let mut params = import(320).unwrap();
    params["remote_port"] = json!("http");
    let mut unleased = import(320).unwrap();
    unleased.remove("kvferry");
    for (name, params) in [("bad", params), ("typed", unleased)] {
        let request = Request::new(name, 320, Some(params));
        bench.half.on_new_request(&request.view());
        assert_eq!(bench.half.matched_tokens(&request.view(), 0), Matched::None);
        bench.alloc(&request, &[1, 2, 3, 4, 5], 0, 0);
    }
    assert!(bench.step(&[]).is_empty());
    let stats = bench.half.stats();
    assert_eq!((stats.malformed, stats.unleased), (1, 1));
    // Blocks of another size: released, since nobody here will read them.
    let odd = Request::new("odd", 320, Some(offer(320, 32).to_params("127.0.0.1", 9)));
    bench.half.on_new_request(&odd.view());
    assert_eq!(bench.half.matched_tokens(&odd.view(), 0), Matched::None);
    assert_eq!(bench.step(&[]).release, [id("odd")]);
    assert_eq!(bench.half.stats().refused, 1);
}

#[test]
fn each_role_does_its_part_only() {
    let mut producer = Bench::new(config(Role::Producer));
    let reads = Request::new("r", 320, import(320));
    producer.half.on_new_request(&reads.view());
    assert_eq!(
        producer.half.matched_tokens(&reads.view(), 0),
        Matched::None
    );
    assert!(producer.step(&[&reads]).is_empty());
    let mut consumer = Bench::new(config(Role::Consumer));
    let holds = Request::new("h", 320, export());
    consumer.half.on_new_request(&holds.view());
    assert!(consumer.step(&[&holds]).is_empty());
    assert!(consumer.half.directory_address().is_none());
    assert_eq!(
        (producer.half.stats().ignored, consumer.half.stats().ignored),
        (1, 1)
    );
}

/// vLLM computes the last token of a loaded prompt again, and has then dropped what it looks back at: nothing is offered
/// where that would be a token of a dropped block.
#[test]
fn a_prompt_whose_last_token_reaches_into_a_dropped_block_is_computed() {
    let window = 96;
    let mut config = config(Role::Consumer);
    config.block_tokens = vec![32, 32];
    config.reach = vec![Reach::All, Reach::Window(window)];
    for prompt in 2_u32..400 {
        let mut offer = offer(prompt, 32);
        offer.blocks.push(offer.blocks[0].clone());
        offer.block_tokens.push(32);
        let params = offer.to_params("127.0.0.1", 1);
        let mut bench = Bench::new(config.clone());
        let request = Request::new("r", prompt, Some(params));
        bench.half.on_new_request(&request.view());
        // The first block that is kept with all tokens computed, and the one that the last token needs.
        let kept = (prompt + 1).saturating_sub(window) / 32;
        let needed = prompt.saturating_sub(window) / 32;
        let offered = bench.half.matched_tokens(&request.view(), 0).tokens();
        assert_eq!(offered, if needed < kept { 0 } else { prompt }, "{prompt}");
    }
    assert!(
        Reach::Chunk(64).misses_the_last(128, 32) && !Reach::Chunk(64).misses_the_last(127, 32)
    );
}

/// C43: where a window has moved on here, nothing is read; where it has moved on further there, what is needed here is
/// gone, and the load fails as a whole.
#[test]
fn c43_null_blocks_are_skipped_and_groups_kept_apart() {
    let mut offer = offer(256, 64);
    offer.blocks = vec![vec![11, 12, 13, 14], vec![0, 0, 23, 24]];
    offer.block_tokens = vec![64, 64];
    let local = [vec![1, 2, 3, 4], vec![0, 0, 7, 0]];
    let pairs = pair_blocks(&offer, &local, 64, 256).unwrap();
    let group = |group, remote: &[u32], local: &[u32]| GroupPairs {
        group,
        remote: remote.to_vec(),
        local: local.to_vec(),
    };
    assert_eq!(
        pairs,
        [group(0, &[12, 13, 14], &[2, 3, 4]), group(1, &[23], &[7])]
    );
    let needed = [vec![1, 2, 3, 4], vec![0, 6, 7, 0]];
    assert_eq!(pair_blocks(&offer, &needed, 64, 256), None);
    // Too few blocks here: nothing, which the workers report as failed.
    assert_eq!(pair_blocks(&offer, &local[..1], 64, 256), None);
}

proptest! {
    /// C12: blocks are matched by token position, whatever the consumer has cached.
    #[test]
    fn c12_blocks_are_matched_by_token_position(
        tokens in 1_u32..4096,
        cached_blocks in 0_u32..64,
        size in prop_oneof![Just(16_u32), Just(32), Just(64), 1_u32..80],
        extra in 0_u32..3,
    ) {
        check_positions(tokens, cached_blocks, size, extra)?;
    }
}

/// The case of the report: 2048 tokens, blocks of 64, 31 of them cached.
#[test]
fn c12_the_last_block_of_32() {
    check_positions(2048, 31, 64, 0).unwrap();
}

fn check_positions(tokens: u32, cached: u32, size: u32, extra: u32) -> Result<(), TestCaseError> {
    let offer = offer(tokens, size);
    let from = (cached * size).min(tokens.saturating_sub(1) / size * size);
    let count = tokens.div_ceil(size);
    let local: Vec<u32> = (501..501 + count + extra).collect();
    let pairs = pair_blocks(&offer, &[local], from, tokens).unwrap();
    prop_assert_eq!(pairs.len(), 1);
    let expected: Vec<u32> = (from / size..count).collect();
    prop_assert_eq!(pairs[0].remote.len(), expected.len());
    for ((remote, local), position) in pairs[0].remote.iter().zip(&pairs[0].local).zip(expected) {
        prop_assert_eq!((remote - 101, local - 501), (position, position));
    }
    Ok(())
}

//! One "received" and one "sent" per request and rank, whatever the children do and when.

use proptest::prelude::*;

use super::super::*;
use super::script::*;
use crate::contract::*;

fn hold() -> Finished {
    Finished::Hold { params: None }
}

#[test]
fn c106_blocks_are_freed_after_the_last_of_several_savers_on_every_rank() {
    let children = [Matched::None; 3].map(Scripted::new);
    children[0].get().finish = hold();
    children[2].get().finish = hold();
    let (mut machine, hands) = Machine::scripted(&[&children[0], &children[1], &children[2]], 2);
    let a = id("a");
    machine.scheduler.on_new_request(&view(&a, None));
    assert_eq!(machine.finish(view(&a, None)), hold());
    machine.step(&[]);
    hands[0][0].sent("a");
    hands[1][2].sent("a");
    machine.report();
    hands[1][0].sent("a");
    machine.report();
    assert!(machine.sent.is_empty(), "freed after the first saver");
    assert_eq!(machine.workers[0].stats().held, 1);
    hands[0][2].sent("a");
    machine.report();
    assert_eq!(machine.sent, [a]);
    // Each child hears of its own, once all ranks are through.
    let sent = |child: usize| {
        let script = children[child].get();
        script
            .reports
            .iter()
            .map(|report| report.sent.len())
            .sum::<usize>()
    };
    assert_eq!((sent(0), sent(1), sent(2)), (1, 0, 1));
    assert!(
        machine
            .workers
            .iter()
            .all(|worker| worker.stats() == MultiWorkerStats::default())
    );
}

#[test]
fn c102_one_completion_per_request_and_child() {
    let children = [offer(8), offer(8)].map(Scripted::new);
    children[0].get().finish = hold();
    let (mut machine, hands) = Machine::scripted(&[&children[0], &children[1]], 1);
    let a = id("a");
    let request = view(&a, None);
    machine.scheduler.on_new_request(&request);
    machine.scheduler.matched_tokens(&request, 0);
    machine.alloc(&request, &[vec![5, 6]], 0, 8);
    machine.step(&[]);
    // From a child that was not chosen, for a request that there is not, and twice.
    hands[0][1].received("a", None);
    hands[0][0].received("b", None);
    machine.report();
    assert!(machine.received.is_empty());
    hands[0][0].received("a", None);
    hands[0][0].received("a", None);
    machine.report();
    machine.report();
    assert_eq!(machine.received.len(), 1);
    machine.alloc(&request, &[vec![5, 6]], 8, 0);
    assert_eq!(machine.finish(request), hold());
    // Before the worker was told, from one that does not hold, and twice.
    hands[0][0].sent("a");
    machine.report();
    machine.step(&[]);
    hands[0][1].sent("a");
    machine.report();
    assert!(machine.sent.is_empty());
    hands[0][0].sent("a");
    hands[0][0].sent("a");
    machine.report();
    machine.report();
    assert_eq!(machine.sent, [a]);
    let stats = machine.workers[0].stats();
    assert_eq!((stats.stray_received, stats.stray_sent), (3, 3));
    let heard: usize = children.iter().map(|child| child.get().reports.len()).sum();
    assert_eq!(heard, 2, "children hear of what was dropped");
}

#[test]
fn a_finish_while_a_load_is_under_way_is_free_and_reported_as_received_only() {
    let children = [offer(8), Matched::None].map(Scripted::new);
    // Against the contract, but it must not cost the scheduler more than that.
    children[1].get().finish = hold();
    let (mut machine, hands) = Machine::scripted(&[&children[0], &children[1]], 1);
    let a = id("a");
    let request = view(&a, None);
    machine.scheduler.on_new_request(&request);
    machine.scheduler.matched_tokens(&request, 0);
    machine.alloc(&request, &[vec![5, 6]], 0, 8);
    machine.step(&[]);
    assert_eq!(machine.finish(request), Finished::Free);
    machine.step(&[]);
    hands[0][1].sent("a");
    machine.report();
    hands[0][0].received("a", Some(LoadFailure::Aborted));
    machine.report();
    assert_eq!((machine.received.len(), machine.sent.len()), (1, 0));
    assert_eq!(children[1].get().reports.last().unwrap().sent, [a]);
    assert!(!machine.scheduler.has_pending_work());
}

#[test]
fn an_empty_step_is_a_few_bytes_and_reports_nothing() {
    let children = [Matched::None; 3].map(Scripted::new);
    let (mut machine, _) = Machine::scripted(&[&children[0], &children[1], &children[2]], 1);
    let plan = machine.plan(&[]);
    assert!(rmp_serde::to_vec(&plan).unwrap().len() < 128);
    machine.workers[0].begin_step(plan);
    machine.workers[0].end_step();
    assert!(machine.workers[0].take_report().unwrap().is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    /// Requests load or not, finish held by any children, and children report in any order over the
    /// ranks: the scheduler gets each completion once, and "sent" with the last holder of the last
    /// rank, not before.
    #[test]
    fn completions_are_counted_right_in_any_order(
        ranks in 1_usize..4,
        requests in proptest::collection::vec((0_usize..4, 0_u8..8), 1..6),
        order in proptest::collection::vec(any::<u32>(), 64),
    ) {
        let children = [Matched::None; 3].map(Scripted::new);
        let (mut machine, hands) = Machine::scripted(&[&children[0], &children[1], &children[2]], ranks);
        let ids: Vec<_> = (0..requests.len()).map(|number| id(&format!("r{number}"))).collect();
        // What is left to report: rank, child, request, and whether it is a load.
        let mut events = Vec::new();
        for (request, &(loader, _)) in ids.iter().zip(&requests) {
            for (child, place) in children.iter().zip(0..) {
                child.get().answer = if place == loader { offer(8) } else { Matched::None };
            }
            let view = view(request, None);
            machine.scheduler.on_new_request(&view);
            let tokens = machine.scheduler.matched_tokens(&view, 0).tokens();
            prop_assert_eq!(tokens > 0, loader < 3);
            machine.alloc(&view, &[vec![5, 6]], 0, tokens);
            if tokens > 0 {
                events.extend((0..ranks).map(|rank| (rank, loader, request.clone(), true)));
            }
        }
        machine.step(&[]);
        let mut order = order.into_iter().cycle();
        let mut run = |machine: &mut Machine, events: &mut Vec<(usize, usize, kvferry_wire::RequestId, bool)>| {
            while !events.is_empty() {
                let pick = order.next().unwrap() as usize % events.len();
                let (rank, child, request, load) = events.swap_remove(pick);
                let before = (machine.received.len(), machine.sent.len());
                if load {
                    hands[rank][child].received(request.as_str(), None);
                } else {
                    hands[rank][child].sent(request.as_str());
                }
                machine.report();
                let last = !events.iter().any(|event| event.2 == request);
                let now = (machine.received.len(), machine.sent.len());
                let one = usize::from(last);
                let expected = if load { (before.0 + one, before.1) } else { (before.0, before.1 + one) };
                assert_eq!(now, expected);
            }
        };
        run(&mut machine, &mut events);
        for (request, &(_, holders)) in ids.iter().zip(&requests) {
            for (child, place) in children.iter().zip(0..3) {
                let holds = holders & (1 << place) != 0;
                child.get().finish = if holds { hold() } else { Finished::Free };
                if holds {
                    events.extend((0..ranks).map(|rank| (rank, place, request.clone(), false)));
                }
            }
            let expected = if holders == 0 { Finished::Free } else { hold() };
            prop_assert_eq!(machine.finish(view(request, None)), expected);
        }
        machine.step(&[]);
        run(&mut machine, &mut events);
        let held = requests.iter().filter(|request| request.1 != 0).count();
        prop_assert_eq!(machine.sent.len(), held);
        prop_assert!(!machine.scheduler.has_pending_work());
        prop_assert_eq!(machine.scheduler.stats().unknown, 0);
        for worker in &machine.workers {
            prop_assert_eq!(worker.stats(), MultiWorkerStats::default());
        }
    }
}

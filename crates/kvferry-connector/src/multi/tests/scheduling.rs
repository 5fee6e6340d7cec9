//! Who is asked, who loads, who sees what.

use std::time::Duration;

use serde_json::json;

use super::super::*;
use super::script::*;
use crate::contract::*;

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn every_child_is_asked_and_the_first_that_offers_or_waits_wins() {
    let cases = [
        ([Matched::None, offer(5), offer(9)], offer(5)),
        ([offer(4), Matched::Later(SECOND), offer(9)], offer(4)),
        (
            [Matched::None, Matched::Later(SECOND), offer(9)],
            Matched::Later(SECOND),
        ),
        (
            [Matched::Later(SECOND), offer(5), Matched::None],
            Matched::Later(SECOND),
        ),
        ([Matched::None; 3], Matched::None),
    ];
    let a = id("a");
    for (answers, expected) in cases {
        let children = answers.map(Scripted::new);
        let (mut machine, _) = Machine::scripted(&[&children[0], &children[1], &children[2]], 1);
        machine.scheduler.on_new_request(&view(&a, None));
        assert_eq!(
            machine.scheduler.matched_tokens(&view(&a, None), 0),
            expected
        );
        assert!(children.iter().all(|child| child.get().asked == 1));
    }
}

#[test]
fn c100_a_child_that_was_not_chosen_sees_the_real_blocks_and_no_tokens() {
    let children = [Matched::None, offer(8), offer(8)].map(Scripted::new);
    let (mut machine, hands) = Machine::scripted(&[&children[0], &children[1], &children[2]], 1);
    let a = id("a");
    let request = view(&a, None);
    machine.scheduler.on_new_request(&request);
    assert_eq!(machine.scheduler.matched_tokens(&request, 4).tokens(), 8);
    for child in &children {
        child.calls();
    }
    let blocks = [vec![5, 6, 7]];
    // Less than was offered; it is the scheduler's choice.
    machine.alloc(&request, &blocks, 4, 6);
    let seen = children.each_ref().map(|child| child.calls().concat());
    assert_eq!(
        seen,
        [
            "alloc a [[5, 6, 7]] 4 0",
            "alloc a [[5, 6, 7]] 4 6",
            "alloc a [[5, 6, 7]] 4 0"
        ]
    );
    machine.step(&[]);
    let begun = hands[0].each(|hand| hand.calls().join(", "));
    assert_eq!(begun[1], "release, begin 1 loads 0 finished, end");
    assert_eq!((&begun[0], &begun[2]), (&begun[0], &begun[0]));
    assert_eq!(begun[0], "release, begin 0 loads 0 finished, end");
    // The choice is that of the offer, whatever the others say by now.
    let b = id("b");
    let request = view(&b, None);
    machine.scheduler.on_new_request(&request);
    machine.scheduler.matched_tokens(&request, 0);
    children[0].get().answer = offer(3);
    for child in &children {
        child.calls();
    }
    machine.alloc(&request, &blocks, 0, 8);
    assert_eq!(children[1].calls().concat(), "alloc b [[5, 6, 7]] 0 8");
    assert_eq!(machine.scheduler.stats().loads, [0, 2, 0]);
}

trait Each {
    fn each<T>(&self, of: impl Fn(&Hand) -> T) -> Vec<T>;
}

impl Each for Vec<Hand> {
    fn each<T>(&self, of: impl Fn(&Hand) -> T) -> Vec<T> {
        self.iter().map(of).collect()
    }
}

#[test]
fn c4_a_finished_load_is_never_looked_up_again_by_any_child() {
    for failure in [None, Some(LoadFailure::Peer)] {
        let (first, second) = (Scripted::new(offer(8)), Scripted::new(offer(4)));
        let (mut machine, hands) = Machine::scripted(&[&first, &second], 1);
        let a = id("a");
        let request = view(&a, None);
        machine.scheduler.on_new_request(&request);
        for _ in 0..5 {
            assert_eq!(machine.scheduler.matched_tokens(&request, 0), offer(8));
        }
        machine.alloc(&request, &[vec![5, 6]], 0, 8);
        assert_eq!(machine.scheduler.matched_tokens(&request, 0), Matched::None);
        machine.step(&[]);
        hands[0][0].received("a", failure);
        machine.report();
        assert_eq!(machine.received.len(), 1);
        assert_eq!(machine.scheduler.matched_tokens(&request, 0), Matched::None);
        machine.alloc(&request, &[vec![5, 6]], 8, 0);
        assert_eq!(machine.scheduler.matched_tokens(&request, 0), Matched::None);
        assert_eq!((first.get().asked, second.get().asked), (5, 5));
        // Preempted, it starts anew, but not after a failure: C91, at most two tries.
        machine.scheduler.preempted(std::slice::from_ref(&a));
        let again = machine.scheduler.matched_tokens(&request, 0);
        assert_eq!(again == offer(8), failure.is_none());
        assert_eq!(first.get().asked, 5 + u32::from(failure.is_none()));
        assert!(second.calls().contains(&"preempted [\"a\"]".to_owned()));
    }
}

#[test]
fn c44_c92_c108_a_childs_failed_load_reaches_the_scheduler_and_that_child_alone() {
    let (first, second) = (Scripted::new(Matched::None), Scripted::new(offer(8)));
    let (mut machine, hands) = Machine::scripted(&[&first, &second], 2);
    let a = id("a");
    let request = view(&a, None);
    machine.scheduler.on_new_request(&request);
    machine.scheduler.matched_tokens(&request, 0);
    machine.alloc(&request, &[vec![5, 6]], 0, 8);
    machine.step(&[]);
    hands[0][1].received("a", None);
    machine.report();
    assert!(machine.received.is_empty(), "one rank is not all of them");
    hands[1][1].received("a", Some(LoadFailure::Storage));
    machine.report();
    let failed = vec![FailedBlock { group: 0, block: 7 }];
    let expected = Received {
        request: a.clone(),
        failure: Some(LoadFailure::Storage),
        failed,
    };
    assert_eq!(machine.received, std::slice::from_ref(&expected));
    assert_eq!(second.get().reports.last().unwrap().received, [expected]);
    assert!(first.get().reports.is_empty());
    assert_eq!(machine.scheduler.stats().loads_failed, [0, 1]);
    assert!(!machine.scheduler.has_pending_work());
}

#[test]
fn c9_loads_of_several_requests_end_in_any_order() {
    let child = Scripted::new(offer(8));
    let (mut machine, hands) = Machine::scripted(&[&child], 1);
    let ids: Vec<_> = ["a", "b", "c"].map(id).into();
    for request in &ids {
        machine.scheduler.on_new_request(&view(request, None));
        machine.scheduler.matched_tokens(&view(request, None), 0);
    }
    child.get().answer = Matched::None;
    for request in [&ids[2], &ids[0]] {
        machine.alloc(&view(request, None), &[vec![5, 6]], 0, 8);
    }
    machine.step(&[]);
    hands[0][0].received("a", None);
    machine.report();
    hands[0][0].received("c", None);
    machine.report();
    let order: Vec<_> = machine
        .received
        .iter()
        .map(|received| received.request.as_str())
        .collect();
    assert_eq!(order, ["a", "c"]);
    // The one that waits was given nothing and has nothing under way.
    assert!(!machine.scheduler.has_pending_work());
    assert_eq!(machine.scheduler.stats().loads, [2]);
}

#[test]
fn c103_parameters_of_several_children_go_out_together_and_come_back_to_each() {
    let params = |value: serde_json::Value| value.as_object().cloned();
    let children = [Matched::None; 3].map(Scripted::new);
    children[0].get().finish = Finished::Hold {
        params: params(json!({"remote_port": 1})),
    };
    children[1].get().finish = Finished::Hold { params: None };
    children[2].get().finish = Finished::Hold {
        params: params(json!({"remote_port": 3})),
    };
    let (mut machine, _) = Machine::scripted(&[&children[0], &children[1], &children[2]], 1);
    let a = id("a");
    machine.scheduler.on_new_request(&view(&a, None));
    let Finished::Hold { params: Some(out) } = machine.finish(view(&a, None)) else {
        panic!("no parameters");
    };
    let expected = json!({"remote_port": 1, "kvferry": {"children": {"2": {"remote_port": 3}}}});
    assert_eq!(serde_json::Value::Object(out.clone()), expected);
    // At the consumer.
    let children = [Matched::None; 3].map(Scripted::new);
    let (mut machine, _) = Machine::scripted(&[&children[0], &children[1], &children[2]], 1);
    let request = view(&a, Some(&out));
    machine.scheduler.on_new_request(&request);
    let blocks = [vec![5]];
    machine.step(&[Scheduled {
        request,
        new_blocks: GroupBlocks(&blocks),
        renewed: true,
        computed: 0,
        tokens: 1,
    }]);
    machine.finish(request);
    for (child, port) in [
        (0, "\"remote_port\":1"),
        (1, "\"remote_port\":1"),
        (2, "\"remote_port\":3"),
    ] {
        let calls = children[child].calls();
        assert_eq!(calls.len(), 3);
        assert!(calls.iter().all(|call| call.contains(port)), "{calls:?}");
        let nested = calls.iter().any(|call| call.contains("children"));
        assert_eq!(nested, child != 2);
    }
}

#[test]
fn what_children_are_is_combined_and_conflicts_are_named() {
    let with = |delivery, best_effort, groups: Option<&[u32]>, layout: Option<&str>| {
        let child = Scripted::new(Matched::None);
        child.get().capabilities = Capabilities {
            requires_delivery: delivery,
            best_effort,
            loaded_groups: groups.map(<[u32]>::to_vec),
            layout: layout.map(str::to_owned),
            reads_freed: best_effort,
        };
        Box::new(child) as Box<dyn SchedulerConnector>
    };
    let remote = || with(true, false, Some(&[2, 0]), Some("LBHNC"));
    let all = MultiScheduler::new(vec![remote(), with(false, true, Some(&[0, 1]), None)], 1);
    let expected = Capabilities {
        requires_delivery: true,
        best_effort: false,
        loaded_groups: Some(vec![0, 1, 2]),
        layout: Some("LBHNC".to_owned()),
        reads_freed: true,
    };
    assert_eq!(all.unwrap().capabilities(), expected);
    let all = MultiScheduler::new(vec![remote(), with(false, true, None, Some("LBHNC"))], 1);
    assert_eq!(all.unwrap().capabilities().loaded_groups, None);
    let error = MultiScheduler::new(
        vec![
            with(true, true, None, None),
            remote(),
            with(false, true, None, Some("BLHNC")),
        ],
        1,
    );
    assert_eq!(
        error.unwrap_err().to_string(),
        "child 1 needs block layout \"LBHNC\" and child 2 needs \"BLHNC\"; an engine has one layout, so \
         remove one of them"
    );
    assert_eq!(
        MultiScheduler::new(Vec::new(), 1).unwrap_err(),
        ComposeError::NoChildren
    );
}

#[test]
fn calls_reach_every_child_and_unknown_requests_are_counted() {
    let children = [Matched::None; 2].map(Scripted::new);
    let (mut machine, hands) = Machine::scripted(&[&children[0], &children[1]], 1);
    machine.scheduler.begin_shutdown();
    assert!(children.iter().all(|child| child.calls() == ["shutdown"]));
    children[1].get().pending = true;
    assert!(machine.scheduler.has_pending_work());
    children[1].get().pending = false;
    assert!(!machine.scheduler.has_pending_work());
    // C11: nothing happens.
    let a = id("a");
    assert_eq!(
        machine.scheduler.matched_tokens(&view(&a, None), 0),
        Matched::None
    );
    assert_eq!(machine.finish(view(&a, None)), Finished::Free);
    machine.scheduler.preempted(std::slice::from_ref(&a));
    machine.scheduler.on_report(&Aggregated {
        received: vec![Received {
            request: a.clone(),
            failure: None,
            failed: Vec::new(),
        }],
        sent: Vec::new(),
        parts: vec![(0, ReportPart::Multi(vec![WorkerReport::default()]))],
    });
    assert_eq!(machine.scheduler.stats().unknown, 4);
    // A load that was asked for is reported all the same, by the first child.
    machine.alloc(&view(&a, None), &[vec![1]], 0, 4);
    machine.step(&[]);
    hands[0][0].received("a", None);
    machine.report();
    assert_eq!(
        (machine.received.len(), machine.scheduler.stats().unknown),
        (1, 5)
    );
    // Plans of others are not begun.
    for hand in &hands[0] {
        hand.calls();
    }
    machine.workers[0].begin_step(StepPlan::Storage(crate::storage::Plan::default()));
    machine.workers[0].begin_step(StepPlan::Multi(Plan::default()));
    assert!(hands[0][0].calls().is_empty());
    assert_eq!(machine.workers[0].stats().foreign_plans, 2);
    machine.workers[0].shutdown(Duration::from_secs(9));
    machine.workers[0]
        .register(&CacheLayout {
            groups: Vec::new(),
            layers: Vec::new(),
        })
        .unwrap();
    assert!(
        hands[0]
            .iter()
            .all(|hand| hand.calls() == ["shutdown", "register"])
    );
}

#[test]
fn c7_every_child_lets_go_of_blocks_before_any_child_begins() {
    #[derive(Debug)]
    struct Ordered(
        usize,
        std::sync::Arc<std::sync::Mutex<Vec<(usize, &'static str)>>>,
    );
    impl WorkerConnector for Ordered {
        fn register(&mut self, _: &CacheLayout) -> Result<(), RegisterCacheError> {
            Ok(())
        }
        fn release_blocks(&mut self, _: &StepPlan) {
            self.1.lock().unwrap().push((self.0, "release"));
        }
        fn begin_step(&mut self, _: StepPlan) {
            self.1.lock().unwrap().push((self.0, "begin"));
        }
        fn end_step(&mut self) {}
        fn take_report(&mut self) -> Result<WorkerReport, WorkerLost> {
            Ok(WorkerReport::default())
        }
        fn shutdown(&mut self, _: Duration) {}
    }
    let order = std::sync::Arc::default();
    let child =
        |place| Box::new(Ordered(place, std::sync::Arc::clone(&order))) as Box<dyn WorkerConnector>;
    let mut worker = MultiWorker::new(vec![child(0), child(1)]);
    let empty = || StepPlan::Storage(crate::storage::Plan::default());
    worker.begin_step(StepPlan::Multi(Plan {
        children: vec![empty(), empty()],
        ..Plan::default()
    }));
    let order = order.lock().unwrap();
    assert_eq!(
        *order,
        [(0, "release"), (1, "release"), (0, "begin"), (1, "begin")]
    );
}

#[test]
fn children_are_made_by_a_factory_in_their_order_and_errors_name_the_child() {
    struct Factory;
    impl ChildFactory for Factory {
        type Error = String;
        fn scheduler(
            &self,
            index: usize,
            child: &ChildConfig,
        ) -> Result<Box<dyn SchedulerConnector>, String> {
            if child.extra.contains_key("bad") {
                return Err("`bad` is set".to_owned());
            }
            Ok(Box::new(Scripted::new(offer(index as u32 + 1))))
        }
        fn worker(&self, _: usize, _: &ChildConfig) -> Result<Box<dyn WorkerConnector>, String> {
            Ok(Box::new(Hand::default()))
        }
    }
    let mut json = json!({"connectors": [
        {"kv_connector": "RemotePrefill", "kv_role": "kv_both"},
        {"kv_connector": "SharedStorage", "kv_role": "kv_both"},
    ]});
    let config = MultiConfig::from_json(&json).unwrap();
    let mut scheduler = config.scheduler(&Factory, 1).unwrap();
    let a = id("a");
    scheduler.on_new_request(&view(&a, None));
    assert_eq!(scheduler.matched_tokens(&view(&a, None), 0), offer(1));
    assert!(config.worker(&Factory).is_ok());
    json["connectors"][1]["kv_connector_extra_config"] = json!({"bad": 1});
    let error = MultiConfig::from_json(&json)
        .unwrap()
        .scheduler(&Factory, 1)
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "connectors[1] (SharedStorage): `bad` is set"
    );
}

//! A producer saves and a consumer loads, and neither does the other's part.

use std::path::Path;

use super::machine::*;
use crate::contract::*;

const TOKENS: [u32; 12] = [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12];
const OTHERS: [u32; 8] = [20, 21, 22, 23, 24, 25, 26, 27];

fn machine(path: &Path, role: Role) -> Machine {
    let mut config = config(path);
    config.role = role;
    Machine::new(&config)
}

#[test]
fn a_producer_saves_and_asks_nothing_of_the_disk() {
    let directory = tempfile::tempdir().unwrap();
    let mut both = machine(directory.path(), Role::Both);
    both.run(&job("seed", &TOKENS), &[(5, 10), (6, 20), (7, 30)]);
    let mut producer = machine(directory.path(), Role::Producer);
    let known = job("known", &TOKENS);
    producer.scheduler.on_new_request(&known.view());
    // At once, and for good: not even "later".
    let answer = producer.scheduler.matched_tokens(&known.view(), 0);
    assert_eq!(answer, Matched::None);
    producer.run(&job("new", &OTHERS), &[(15, 40), (16, 50)]);
    // After a preemption neither.
    producer
        .scheduler
        .preempted(std::slice::from_ref(&known.id));
    assert_eq!(producer.matched(&known, 0), Matched::None);
    let stats = producer.scheduler.stats();
    assert_eq!((stats.lookups, stats.saves, stats.unknown), (0, 2, 0));
    assert_eq!(
        (producer.worker().blocks_saved, producer.worker().hits),
        (2, 0)
    );
    assert_eq!(files(directory.path()).len(), 5);
    // What it has saved is found by who loads.
    let received = both.load(&job("b", &OTHERS), &[21, 22]);
    assert_eq!(
        (received.failure, both.value(21), both.value(22)),
        (None, Some(40), Some(50))
    );
}

#[test]
fn a_consumer_loads_and_saves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let mut both = machine(directory.path(), Role::Both);
    both.run(&job("seed", &TOKENS), &[(5, 10), (6, 20), (7, 30)]);
    let mut consumer = machine(directory.path(), Role::Consumer);
    let known = job("known", &TOKENS);
    assert_eq!(consumer.load(&known, &[11, 12, 13]).failure, None);
    assert_eq!(consumer.value(12), Some(20));
    // A block of its own behind what it loaded, and a prompt that nobody has.
    let longer: Vec<u32> = TOKENS.iter().chain(&OTHERS).copied().collect();
    let longer = Job {
        id: known.id.clone(),
        ..job("longer", &longer)
    };
    consumer.compute(&longer, &[11, 12, 13, 14, 15], 11, 20);
    assert_eq!(
        consumer.finish(&longer, &[11, 12, 13, 14, 15]),
        Finished::Free
    );
    consumer.run(&job("new", &OTHERS), &[(21, 40), (22, 50)]);
    let stats = consumer.scheduler.stats();
    assert_eq!((stats.saves, stats.hits, stats.unknown), (0, 1, 0));
    assert!(consumer.plans.iter().all(|plan| plan.save.is_empty()));
    let stats = consumer.worker();
    assert_eq!((stats.blocks_saved, stats.already_stored), (0, 0));
    assert_eq!(files(directory.path()).len(), 3);
}

use kvferry_wire::Addresses;
use proptest::prelude::*;

use super::*;

const MIN: Duration = Duration::from_millis(100);
const MAX: Duration = Duration::from_secs(5);

fn worker(engine: u16, life: u8) -> Description {
    Description {
        engine: EngineId::new(format!("e-{engine}")).unwrap(),
        incarnation: Incarnation::from_bytes([life.max(1); 16]).unwrap(),
        rank: Rank::default(),
        instance: None,
        kvferry_version: String::new(),
        ucx: None,
        host: "h".into(),
        addresses: Addresses {
            message: vec![1],
            data: None,
        },
        compatibility: [].into(),
        regions: vec![],
        tables: vec![],
        unix_socket: None,
    }
}

fn why(number: u64) -> ConnectError {
    ConnectError::Lost {
        peer: "e".into(),
        tried: String::new(),
        reason: number.to_string(),
    }
}

fn backoff() -> Backoff {
    Backoff::new(MIN, MAX, 7)
}

#[test]
fn windows_double_to_the_longest_and_say_why() {
    let (mut backoff, mut now) = (backoff(), Instant::now());
    let to = worker(1, 1);
    let mut whole = MIN;
    for number in 0..20 {
        assert!(backoff.check(&to, now).is_ok());
        backoff.failed(&to, now, why(number));
        let early = backoff.check(&to, now).unwrap_err();
        assert!(early.last.to_string().ends_with(&number.to_string()));
        assert!(early.retry_in <= whole, "{:?}", early.retry_in);
        assert!(early.retry_in >= whole * 3 / 4, "{:?}", early.retry_in);
        // A moment before its end it is still closed, then open.
        let end = now + early.retry_in;
        assert!(backoff.check(&to, end - Duration::from_nanos(1)).is_err());
        now = end;
        whole = (whole * 2).min(MAX);
    }
    assert_eq!(whole, MAX);
}

#[test]
fn a_success_another_life_and_time_begin_anew() {
    let (mut backoff, now) = (backoff(), Instant::now());
    let to = worker(1, 1);
    for _ in 0..10 {
        backoff.failed(&to, now, why(0));
    }
    assert!(backoff.check(&worker(2, 1), now).is_ok(), "another worker");
    assert!(backoff.check(&worker(1, 2), now).is_ok(), "another life");
    assert!(
        backoff.check(&to, now).is_ok(),
        "and the old one is forgotten"
    );
    for forget in [true, false] {
        for _ in 0..10 {
            backoff.failed(&to, now, why(0));
        }
        let later = if forget { now + 3 * MAX + MAX } else { now };
        if !forget {
            backoff.reached(&to);
        }
        assert!(backoff.check(&to, later).is_ok());
        assert!(backoff.workers.is_empty());
        backoff.failed(&to, later, why(0));
        assert!(backoff.check(&to, later).unwrap_err().retry_in <= MIN);
        backoff.reached(&to);
    }
}

#[test]
fn a_window_of_zero_is_none() {
    let (mut backoff, now) = (Backoff::new(Duration::ZERO, MAX, 7), Instant::now());
    backoff.failed(&worker(1, 1), now, why(0));
    assert!(backoff.check(&worker(1, 1), now).is_ok());
}

#[test]
fn what_is_remembered_is_bounded_and_the_newest_stays() {
    let (mut backoff, now) = (backoff(), Instant::now());
    for engine in 0..(MAX_WORKERS as u16 + 50) {
        let at = now + Duration::from_micros(u64::from(engine));
        backoff.failed(&worker(engine, 1), at, why(0));
        assert!(backoff.workers.len() <= MAX_WORKERS);
        assert!(backoff.check(&worker(engine, 1), at).is_err());
    }
}

#[derive(Clone, Debug)]
enum Step {
    Try { engine: u16, life: u8, fails: bool },
    Wait(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let attempt =
        (0_u16..3, 1_u8..3, prop::bool::weighted(0.85)).prop_map(|(engine, life, fails)| {
            Step::Try {
                engine,
                life,
                fails,
            }
        });
    let wait = prop_oneof![0_u64..300, 0_u64..6_000, 10_000_u64..20_000].prop_map(Step::Wait);
    prop::collection::vec(prop_oneof![3 => attempt, 1 => wait], 1..80)
}

proptest! {
    /// Whatever is tried when: attempts on one life are at least three quarters of the window apart
    /// that its failures in a row ask for, nobody waits longer than the longest window, and one who
    /// asks when told to is let through.
    #[test]
    fn attempts_keep_their_distance(steps in steps(), seed in any::<u64>()) {
        let (mut backoff, mut now) = (Backoff::new(MIN, MAX, seed), Instant::now());
        // Per worker: life, failures in a row, time of the last.
        let mut model: HashMap<u16, (u8, u32, Instant)> = HashMap::new();
        for step in steps {
            let (engine, life, fails) = match step {
                Step::Wait(ms) => {
                    now += Duration::from_millis(ms);
                    continue;
                }
                Step::Try { engine, life, fails } => (engine, life, fails),
            };
            let to = worker(engine, life);
            match backoff.check(&to, now) {
                Err(early) => {
                    let (of, _, last) = model[&engine];
                    prop_assert_eq!(of, life, "the window is another life's");
                    prop_assert!(early.retry_in <= MAX);
                    prop_assert!(now + early.retry_in <= last + MAX);
                    prop_assert!(backoff.check(&to, now + early.retry_in).is_ok());
                    continue;
                }
                Ok(()) => {
                    if let Some(&(of, count, last)) = model.get(&engine)
                        && of == life
                    {
                        let whole = MIN.saturating_mul(1 << (count - 1).min(20)).min(MAX);
                        prop_assert!(now >= last + whole * 3 / 4 - Duration::from_millis(1));
                    }
                }
            }
            if fails {
                let count = match model.get(&engine) {
                    Some(&(of, count, last)) if of == life && now < last + 2 * MAX => count + 1,
                    _ => 1,
                };
                backoff.failed(&to, now, why(0));
                model.insert(engine, (life, count, now));
            } else {
                backoff.reached(&to);
                model.remove(&engine);
            }
        }
    }
}

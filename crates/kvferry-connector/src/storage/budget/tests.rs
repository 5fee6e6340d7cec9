use proptest::prelude::*;

use super::*;

const PATIENCE: Duration = Duration::from_secs(60);

fn open(root: &Path, max_bytes: u64) -> (Budget, Evicted) {
    Budget::open(root, max_bytes, PATIENCE, Incarnation::random().unwrap()).unwrap()
}

/// Where the file of block `number` goes.
fn place(root: &Path, number: u32) -> PathBuf {
    let directory = root.join("0".repeat(NAMESPACE_CHARS)).join("0-of-1/g0/ab");
    directory.join(format!("{number:064x}{SUFFIX}"))
}

/// Writes a file that was last used at second `used`.
fn put(budget: &Budget, number: u32, bytes: u64, used: u64) -> Result<Evicted, RoomError> {
    let path = place(&budget.root, number);
    let (reserved, evicted) = budget.reserve(path.parent().unwrap(), bytes)?;
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000 + used);
    reserved.file.set_modified(time).unwrap();
    budget.publish(reserved, &path)?;
    Ok(evicted)
}

fn there(root: &Path, numbers: impl IntoIterator<Item = u32>) -> Vec<u32> {
    numbers
        .into_iter()
        .filter(|&number| place(root, number).exists())
        .collect()
}

fn used(budget: &Budget) -> u64 {
    budget.get(&budget.lock().unwrap()).unwrap()
}

#[test]
fn what_was_not_used_for_longest_makes_room() {
    let root = tempfile::tempdir().unwrap();
    let (budget, _) = open(root.path(), 100);
    for (number, used) in [(1, 30), (2, 10), (3, 20), (4, 40)] {
        assert_eq!(put(&budget, number, 25, used).unwrap(), Evicted::default());
    }
    assert_eq!(used(&budget), 100);
    assert_eq!(
        put(&budget, 5, 25, 50).unwrap(),
        Evicted {
            files: 1,
            bytes: 25
        }
    );
    assert_eq!(there(root.path(), 1..=5), [1, 3, 4, 5]);
    // Reading keeps.
    touch(&File::open(place(root.path(), 3)).unwrap());
    assert_eq!(
        put(&budget, 6, 40, 60).unwrap(),
        Evicted {
            files: 2,
            bytes: 50
        }
    );
    assert_eq!(there(root.path(), 1..=6), [3, 5, 6]);
    assert_eq!(used(&budget), 90);
}

#[test]
fn what_is_too_large_is_refused_and_a_smaller_limit_applies_at_the_start() {
    let root = tempfile::tempdir().unwrap();
    let (budget, _) = open(root.path(), 100);
    put(&budget, 1, 50, 1).unwrap();
    put(&budget, 2, 50, 2).unwrap();
    let error = put(&budget, 3, 101, 3).unwrap_err();
    assert!(
        matches!(
            error,
            RoomError::Full {
                bytes: 101,
                max_bytes: 100,
                ..
            }
        ),
        "{error}"
    );
    let root = tempfile::tempdir().unwrap();
    let (budget, _) = open(root.path(), 100);
    put(&budget, 1, 50, 1).unwrap();
    put(&budget, 2, 50, 2).unwrap();
    let (budget, evicted) = open(root.path(), 60);
    assert_eq!(
        evicted,
        Evicted {
            files: 1,
            bytes: 50
        }
    );
    assert_eq!((there(root.path(), 1..=2), used(&budget)), (vec![2], 50));
}

#[test]
fn foreign_files_are_neither_counted_nor_removed() {
    let root = tempfile::tempdir().unwrap();
    let (budget, _) = open(root.path(), 100);
    put(&budget, 1, 90, 1).unwrap();
    let beside = place(root.path(), 1).with_file_name("notes.kv");
    let deep = root.path().join("notes/0-of-1/g0/ab");
    fs::create_dir_all(&deep).unwrap();
    let elsewhere = deep.join(place(root.path(), 1).file_name().unwrap());
    for path in [&beside, &elsewhere, &root.path().join("README")] {
        fs::write(path, [0; 500]).unwrap();
    }
    assert_eq!(
        put(&budget, 2, 90, 2).unwrap(),
        Evicted {
            files: 1,
            bytes: 90
        }
    );
    assert!(beside.exists() && elsewhere.exists() && root.path().join("README").exists());
    assert_eq!(used(&budget), 90);
}

#[test]
fn what_others_leave_behind_is_found_by_the_next_walk() {
    let root = tempfile::tempdir().unwrap();
    let (budget, _) = open(root.path(), 100);
    put(&budget, 1, 40, 1).unwrap();
    // A process that died while it wrote: its file counts, for as long as it may be alive.
    let directory = place(root.path(), 1).parent().unwrap().to_owned();
    let (reserved, _) = budget.reserve(&directory, 40).unwrap();
    let left = reserved.path.clone();
    drop(reserved);
    assert_eq!(
        put(&budget, 2, 50, 2).unwrap(),
        Evicted {
            files: 1,
            bytes: 40
        }
    );
    assert!(left.exists() && used(&budget) == 90);
    let old = SystemTime::UNIX_EPOCH + Duration::from_secs(1);
    OpenOptions::new()
        .write(true)
        .open(&left)
        .unwrap()
        .set_modified(old)
        .unwrap();
    put(&budget, 3, 40, u64::from(u32::MAX)).unwrap();
    assert!(!left.exists());
    // A usage file that says nothing.
    fs::write(root.path().join(USAGE), "lots").unwrap();
    put(&budget, 4, 10, u64::from(u32::MAX)).unwrap();
    assert_eq!(used(&budget), 100);
}

#[test]
fn only_the_file_that_was_meant_is_removed() {
    let root = tempfile::tempdir().unwrap();
    let (budget, _) = open(root.path(), 100);
    put(&budget, 1, 40, 1).unwrap();
    let path = place(root.path(), 1);
    let bad = File::open(&path).unwrap();
    // Somebody has replaced it meanwhile.
    put(&budget, 1, 40, 2).unwrap();
    assert!(!budget.remove(&path, &bad) && path.exists());
    let now = File::open(&path).unwrap();
    assert!(budget.remove(&path, &now) && !path.exists());
    assert!(!budget.remove(&path, &now));
}

#[test]
fn a_lock_that_another_process_keeps_is_waited_for_so_long_and_no_longer() {
    let root = tempfile::tempdir().unwrap();
    let (mut budget, _) = open(root.path(), 100);
    budget.patience = Duration::from_millis(20);
    let held = File::open(root.path().join(USAGE)).unwrap();
    held.lock().unwrap();
    let error = put(&budget, 1, 10, 1).unwrap_err();
    assert!(matches!(error, RoomError::Locked { .. }), "{error}");
    drop(held);
    budget.patience = PATIENCE;
    put(&budget, 1, 10, 1).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    /// Whatever is written, read and removed, the directory is within its bound, the sum is what is
    /// there, and what went was used before everything that stayed.
    #[test]
    fn the_bound_holds_and_the_least_recently_used_go(
        steps in proptest::collection::vec((0_u32..12, 1_u64..40, 0_u8..10), 1..60),
    ) {
        let root = tempfile::tempdir().unwrap();
        let (budget, _) = open(root.path(), 100);
        let mut model: std::collections::BTreeMap<u32, (u64, u64)> = Default::default();
        for (now, (number, bytes, what)) in (1_u64..).zip(steps) {
            let path = place(root.path(), number);
            match what {
                0 => {
                    if let Ok(file) = File::open(&path) {
                        prop_assert!(budget.remove(&path, &file));
                    }
                    model.remove(&number);
                }
                1 | 2 => {
                    if let Some((_, used)) = model.get_mut(&number) {
                        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000 + now);
                        OpenOptions::new().write(true).open(&path).unwrap().set_modified(time).unwrap();
                        *used = now;
                    }
                }
                _ if path.exists() => {}
                _ => {
                    put(&budget, number, bytes, now).unwrap();
                    let left = there(root.path(), model.keys().copied());
                    let last = model.iter().filter(|(number, _)| !left.contains(number));
                    let last = last.map(|(_, (_, used))| *used).max();
                    model.retain(|number, _| left.contains(number));
                    let first = model.values().map(|(_, used)| *used).min();
                    if let (Some(last), Some(first)) = (last, first) {
                        prop_assert!(last < first);
                    }
                    model.insert(number, (bytes, now));
                }
            }
            let sum: u64 = model.values().map(|(bytes, _)| bytes).sum();
            prop_assert_eq!(there(root.path(), 0..12), model.keys().copied().collect::<Vec<_>>());
            prop_assert_eq!(used(&budget), sum);
            prop_assert!(sum <= 100);
        }
    }
}

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, Key, KeyName, Metadata, Recorder, SharedString,
    Unit,
};

use super::*;
use crate::lease::LeaseSnapshot;
use crate::remote::{LoaderStats, RemoteStats};
use crate::storage::{StorageSchedulerStats, StorageWorkerStats};

type Seen = Arc<Mutex<BTreeMap<String, f64>>>;

/// Keeps the last value under each name with its labels.
struct Keeping(Seen);

struct Place(String, Seen);

impl CounterFn for Place {
    fn increment(&self, _: u64) {
        panic!("counters are published as they are");
    }

    fn absolute(&self, value: u64) {
        self.1.lock().unwrap().insert(self.0.clone(), value as f64);
    }
}

impl GaugeFn for Place {
    fn increment(&self, _: f64) {
        panic!("gauges are set");
    }

    fn decrement(&self, _: f64) {
        panic!("gauges are set");
    }

    fn set(&self, value: f64) {
        self.1.lock().unwrap().insert(self.0.clone(), value);
    }
}

impl Keeping {
    fn place(&self, key: &Key) -> Arc<Place> {
        let labels: Vec<String> = key
            .labels()
            .map(|label| format!("{}={}", label.key(), label.value()))
            .collect();
        let name = format!("{}{{{}}}", key.name(), labels.join(","));
        Arc::new(Place(name, Arc::clone(&self.0)))
    }
}

impl Recorder for Keeping {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.place(key))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.place(key))
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

fn kept<T>(table: &[Metric<T>], snapshot: &T) -> BTreeMap<String, f64> {
    let seen = Seen::default();
    let keeping = Keeping(Arc::clone(&seen));
    metrics::with_local_recorder(&keeping, || record(table, snapshot, &[("engine", "e")]));
    seen.lock().unwrap().clone()
}

/// C113, C115: expiry, failure and lateness have names of their own, and so have loads that wait, leases
/// that are held and bytes in quarantine.
#[test]
fn c113_c115_every_figure_has_its_own_name() {
    let mut stats = RemoteStats {
        loads_waiting: 3,
        leases_held: 4,
        parts_expired: 5,
        late_reports: 6,
        ..RemoteStats::default()
    };
    stats.failed.stalled = 7;
    let seen = kept(REMOTE, &stats);
    for (name, value) in [
        ("kvferry_loads_waiting{engine=e}", 3.0),
        ("kvferry_leases_held{engine=e}", 4.0),
        ("kvferry_lease_parts_total{engine=e,end=expired}", 5.0),
        ("kvferry_late_reports_total{engine=e}", 6.0),
        ("kvferry_loads_failed_total{engine=e,cause=stalled}", 7.0),
    ] {
        assert_eq!(seen.get(name), Some(&value), "{name}");
    }
    assert_eq!(seen.values().sum::<f64>(), 25.0, "a figure under two names");
    let loader = LoaderStats {
        bytes: 11,
        ..LoaderStats::default()
    };
    assert_eq!(
        kept(LOADER, &loader)["kvferry_read_bytes_total{engine=e}"],
        11.0
    );
    let mut leases = LeaseSnapshot::default();
    leases.counters.late = 12;
    assert_eq!(
        kept(LEASES, &leases)["kvferry_releases_late_total{engine=e}"],
        12.0
    );
}

/// C113: of a shared storage too; a figure that is added to a snapshot does not compile here without a name.
#[test]
fn c113_every_figure_of_a_shared_storage_has_its_own_name() {
    let stats = StorageSchedulerStats {
        pending_loads: 1,
        pending_saves: 2,
        held: 4,
        lookups: 8,
        misses: 16,
        lookups_late: 32,
        lookup_errors: 64,
        hits: 128,
        hit_tokens: 256,
        loads_failed: 512,
        saves: 1024,
        saves_skipped: 2048,
        saves_revoked: 4096,
        unknown: 8192,
    };
    let expected = [
        ("kvferry_storage_loads_running{engine=e}", 1.0),
        ("kvferry_storage_saves_running{engine=e}", 2.0),
        ("kvferry_storage_requests_held{engine=e}", 4.0),
        ("kvferry_storage_lookups_total{engine=e}", 8.0),
        ("kvferry_storage_lookups_empty_total{engine=e}", 16.0),
        ("kvferry_storage_lookups_late_total{engine=e}", 32.0),
        ("kvferry_storage_lookup_errors_total{engine=e}", 64.0),
        ("kvferry_storage_loads_succeeded_total{engine=e}", 128.0),
        ("kvferry_storage_loaded_tokens_total{engine=e}", 256.0),
        ("kvferry_storage_loads_failed_total{engine=e}", 512.0),
        ("kvferry_storage_saves_total{engine=e}", 1024.0),
        ("kvferry_storage_saves_skipped_total{engine=e}", 2048.0),
        ("kvferry_storage_saves_revoked_total{engine=e}", 4096.0),
        ("kvferry_storage_unknown_requests_total{engine=e}", 8192.0),
    ];
    let expected: BTreeMap<String, f64> = expected.map(|(name, it)| (name.to_owned(), it)).into();
    assert_eq!(kept(STORAGE, &stats), expected);
    let stats = StorageWorkerStats {
        pending_loads: 1,
        pending_saves: 2,
        hits: 4,
        bytes_loaded: 8,
        misses: 16,
        corrupt: 32,
        load_errors: 64,
        loads_cancelled: 128,
        blocks_saved: 256,
        bytes_saved: 512,
        already_stored: 1024,
        save_failures: 2048,
        saves_cancelled: 4096,
        evicted: 8192,
        evicted_bytes: 16384,
        saves_stalled: 32768,
    };
    let expected = [
        ("kvferry_storage_rank_loads_running{engine=e}", 1.0),
        ("kvferry_storage_rank_saves_running{engine=e}", 2.0),
        ("kvferry_storage_blocks_loaded_total{engine=e}", 4.0),
        ("kvferry_storage_loaded_bytes_total{engine=e}", 8.0),
        (
            "kvferry_storage_blocks_not_loaded_total{engine=e,cause=missing}",
            16.0,
        ),
        (
            "kvferry_storage_blocks_not_loaded_total{engine=e,cause=corrupt}",
            32.0,
        ),
        (
            "kvferry_storage_blocks_not_loaded_total{engine=e,cause=error}",
            64.0,
        ),
        (
            "kvferry_storage_blocks_not_loaded_total{engine=e,cause=cancelled}",
            128.0,
        ),
        ("kvferry_storage_blocks_saved_total{engine=e}", 256.0),
        ("kvferry_storage_saved_bytes_total{engine=e}", 512.0),
        (
            "kvferry_storage_blocks_not_saved_total{engine=e,cause=stored}",
            1024.0,
        ),
        (
            "kvferry_storage_blocks_not_saved_total{engine=e,cause=error}",
            2048.0,
        ),
        (
            "kvferry_storage_blocks_not_saved_total{engine=e,cause=cancelled}",
            4096.0,
        ),
        (
            "kvferry_storage_blocks_not_saved_total{engine=e,cause=stalled}",
            32768.0,
        ),
        ("kvferry_storage_evicted_files_total{engine=e}", 8192.0),
        ("kvferry_storage_evicted_bytes_total{engine=e}", 16384.0),
    ];
    let expected: BTreeMap<String, f64> = expected.map(|(name, it)| (name.to_owned(), it)).into();
    assert_eq!(kept(STORAGE_WORKER, &stats), expected);
}

#[test]
fn times_are_published_as_cumulative_buckets() {
    let mut stats = LoaderStats::default();
    stats.freeing.buckets[1] = 2;
    stats.freeing.buckets[16] = 1;
    stats.freeing.sum_us = 40_000_000;
    let seen = Seen::default();
    let keeping = Keeping(Arc::clone(&seen));
    metrics::with_local_recorder(&keeping, || {
        record_times(LOADER_TIMES, &stats, &[("rank", "0")]);
    });
    let seen = seen.lock().unwrap();
    let name = "kvferry_freeing_microseconds";
    for (figure, value) in [
        ("_bucket{rank=0,le=50}", 0.0),
        ("_bucket{rank=0,le=100}", 2.0),
        ("_bucket{rank=0,le=30000000}", 2.0),
        ("_bucket{rank=0,le=+Inf}", 3.0),
        ("_sum{rank=0}", 40_000_000.0),
        ("_count{rank=0}", 3.0),
    ] {
        assert_eq!(
            seen.get(&format!("{name}{figure}")),
            Some(&value),
            "{figure}"
        );
    }
    assert_eq!(seen.len(), LOADER_TIMES.len() * 19);
}

/// The page's tables, name by name with the label.
#[test]
fn the_page_lists_what_is_published() {
    fn rows<T>(table: &[Metric<T>]) -> Vec<String> {
        let row = |metric: &Metric<T>| {
            let kind = match metric.kind {
                Kind::Counter => "counter",
                Kind::Gauge => "gauge",
            };
            let label = metric
                .label
                .map_or(String::new(), |(key, value)| format!("`{key}={value}`"));
            format!(
                "| `{}` | {kind} | {} | {label} | {} |",
                metric.name, metric.unit, metric.help
            )
        };
        table.iter().map(row).collect()
    }
    let page = include_str!("../../../../docs/metrics.md");
    let written: Vec<&str> = page
        .lines()
        .filter(|line| line.starts_with("| `kvferry"))
        .collect();
    let mut published = rows(REMOTE);
    published.extend(rows(LOADER));
    published.extend(LOADER_TIMES.iter().map(|metric| {
        format!(
            "| `{}` | histogram | microseconds |  | {} |",
            metric.name, metric.help
        )
    }));
    published.extend(rows(LEASES));
    published.extend(rows(ENGINE));
    published.extend(rows(STORAGE));
    published.extend(rows(STORAGE_WORKER));
    assert_eq!(written, published);
    let names: BTreeSet<String> = written
        .iter()
        .map(|row| row.split('|').take(5).skip(1).map(str::trim).collect())
        .collect();
    assert_eq!(names.len(), written.len(), "a name with its label twice");
}

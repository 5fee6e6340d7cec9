//! Figures for Prometheus: what there is, and what a half has counted.

use std::collections::HashMap;

use kvferry_connector::distribution::BOUNDS_US;
use kvferry_connector::metrics::{
    ENGINE, Figures, Kind, LEASES, LOADER, LOADER_TIMES, Metric, Name, REMOTE, STORAGE,
    STORAGE_WORKER,
};
use pyo3::prelude::*;

/// A metric: name, kind, unit, its label's name if it has one, what it says, and the label's values.
type Described = (
    &'static str,
    &'static str,
    &'static str,
    Option<&'static str>,
    &'static str,
    Vec<&'static str>,
);

/// All metrics of a connector (`(name, kind, unit, label, help, values)`, kinds `counter`, `gauge` and `histogram`), and the
/// upper bounds of histograms' buckets, in the histograms' unit.
#[pyfunction]
pub(crate) fn metrics(connector: &str) -> (Vec<Described>, Vec<u64>) {
    fn add<T>(all: &mut Vec<Described>, table: &[Metric<T>]) {
        for metric in table {
            let kind = match metric.kind {
                Kind::Counter => "counter",
                Kind::Gauge => "gauge",
            };
            let (label, value) = metric.label.unzip();
            // A name with several figures is one metric.
            match all.iter_mut().find(|known| known.0 == metric.name) {
                Some(known) => known.5.extend(value),
                None => {
                    let values = value.into_iter().collect();
                    all.push((metric.name, kind, metric.unit, label, metric.help, values));
                }
            }
        }
    }
    let mut all = Vec::new();
    if connector == "KvferryConnector" {
        add(&mut all, REMOTE);
        add(&mut all, LOADER);
        add(&mut all, LEASES);
        add(&mut all, ENGINE);
        for times in LOADER_TIMES {
            let (kind, unit, values) = ("histogram", "microseconds", Vec::new());
            all.push((times.name, kind, unit, None, times.help, values));
        }
    }
    add(&mut all, STORAGE);
    add(&mut all, STORAGE_WORKER);
    (all, BOUNDS_US.to_vec())
}

/// What has changed since the last time: growth of counters and distributions, and all gauges if anything has.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    last: HashMap<Name, u64>,
    last_times: HashMap<Name, (Vec<u64>, u64)>,
}

/// Changes of counters, gauges and histograms by key, which is the name, or `name{label}` with the label's value.
/// A histogram's are its buckets and its sum.
pub(crate) type Changed = (
    HashMap<String, u64>,
    HashMap<String, u64>,
    HashMap<String, (Vec<u64>, u64)>,
);

impl Changes {
    /// Asks a half for its figures, and keeps them for the next time.
    pub(crate) fn take(&mut self, ask: impl FnOnce(&mut Figures)) -> Changed {
        let mut figures = Figures::default();
        ask(&mut figures);
        let (mut counters, mut gauges) = (HashMap::new(), HashMap::new());
        let mut sums: HashMap<Name, (Kind, u64)> = HashMap::new();
        for (name, kind, value) in figures.values {
            sums.entry(name).or_insert((kind, 0)).1 += value;
        }
        let mut is_news = false;
        for (name, (kind, value)) in sums {
            let last = self.last.insert(name, value).unwrap_or(0);
            is_news |= value != last;
            match kind {
                Kind::Counter if value > last => {
                    counters.insert(key(name), value - last);
                }
                Kind::Counter => {}
                Kind::Gauge => {
                    gauges.insert(key(name), value);
                }
            }
        }
        // All of them or none: who gets this need not have got the one before.
        if !is_news {
            gauges.clear();
        }
        let mut times = HashMap::new();
        for (name, distribution) in figures.times {
            let (buckets, sum) = (distribution.buckets.to_vec(), distribution.sum_us);
            let last = self.last_times.insert(name, (buckets.clone(), sum));
            let (last_buckets, last_sum) = last.unwrap_or_else(|| (vec![0; buckets.len()], 0));
            if buckets != last_buckets {
                let grown = buckets.iter().zip(&last_buckets);
                let grown = grown.map(|(now, then)| now.saturating_sub(*then)).collect();
                times.insert(key(name), (grown, sum.saturating_sub(last_sum)));
            }
        }
        (counters, gauges, times)
    }
}

fn key(name: Name) -> String {
    match name.label {
        None => name.name.to_owned(),
        Some((_, value)) => format!("{}{{{value}}}", name.name),
    }
}

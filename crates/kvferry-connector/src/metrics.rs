//! Figures for dashboards: snapshots of halves, leases and engines, through the `metrics` facade.
//!
//! Responsible for names, types and labels. Counting is done where things happen; what is here is read
//! from snapshots, so nothing on a hot path knows of it. `docs/metrics.md` lists what is published.

use metrics::{Label, counter, gauge};

use crate::distribution::{BOUNDS_US, Distribution};

mod storage_tables;
mod tables;

pub use storage_tables::{STORAGE, STORAGE_WORKER};
pub use tables::{ENGINE, LEASES, LOADER, LOADER_TIMES, REMOTE};

/// What a metric is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It grows from 0 on, over one life.
    Counter,
    /// It is what there is now.
    Gauge,
}

/// One figure of a snapshot.
#[derive(Clone, Copy, Debug)]
pub struct Metric<T: 'static> {
    /// Its name.
    pub name: &'static str,
    /// What it is.
    pub kind: Kind,
    /// Its unit: `bytes`, `microseconds`, or nothing for a number of things.
    pub unit: &'static str,
    /// Its own label, where a name has several figures.
    pub label: Option<(&'static str, &'static str)>,
    /// What it says.
    pub help: &'static str,
    /// The figure.
    pub read: fn(&T) -> u64,
}

/// What a figure is called, without the snapshot that it is read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Name {
    /// Its name.
    pub name: &'static str,
    /// Its own label, where a name has several figures.
    pub label: Option<(&'static str, &'static str)>,
}

/// The figures of a half at one moment, for whoever publishes them in a way of his own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Counters and gauges. A name that is there several times (children of the same kind) counts as the sum.
    pub values: Vec<(Name, Kind, u64)>,
    /// Distributions.
    pub times: Vec<(Name, Distribution)>,
}

impl Figures {
    /// Adds a snapshot's figures.
    pub fn add<T>(&mut self, table: &[Metric<T>], snapshot: &T) {
        let figures = table.iter().map(|metric| {
            let name = Name {
                name: metric.name,
                label: metric.label,
            };
            (name, metric.kind, (metric.read)(snapshot))
        });
        self.values.extend(figures);
    }

    /// Adds a snapshot's distributions.
    pub fn add_times<T>(&mut self, table: &[MetricTimes<T>], snapshot: &T) {
        let times = table.iter().map(|metric| {
            let name = Name {
                name: metric.name,
                label: None,
            };
            (name, *(metric.read)(snapshot))
        });
        self.times.extend(times);
    }
}

/// Publishes a snapshot. `labels` say whose it is, such as the engine's id and the rank.
///
/// ```
/// use kvferry_connector::metrics::{REMOTE, record};
/// use kvferry_connector::remote::RemoteStats;
///
/// // To whatever recorder the program has installed; to nobody without one.
/// record(REMOTE, &RemoteStats::default(), &[("engine", "prefill-0")]);
/// ```
pub fn record<T>(table: &[Metric<T>], snapshot: &T, labels: &[(&'static str, &str)]) {
    for metric in table {
        let whose = labels
            .iter()
            .map(|&(key, value)| Label::new(key, value.to_owned()));
        let own = metric
            .label
            .map(|(key, value)| Label::from_static_parts(key, value));
        let labels: Vec<Label> = whose.chain(own).collect();
        let value = (metric.read)(snapshot);
        match metric.kind {
            Kind::Counter => counter!(metric.name, labels).absolute(value),
            // Exact up to 2^53.
            Kind::Gauge => gauge!(metric.name, labels).set(value as f64),
        }
    }
}

/// A distribution of a snapshot.
#[derive(Clone, Copy, Debug)]
pub struct MetricTimes<T: 'static> {
    /// Its name; the figures have `_bucket`, `_sum` and `_count` behind it.
    pub name: &'static str,
    /// What it says.
    pub help: &'static str,
    /// The times.
    pub read: fn(&T) -> &Distribution,
}

/// Publishes a snapshot's distributions as Prometheus has histograms: counters of what took at most `le`
/// microseconds, of the sum and of the number.
pub fn record_times<T>(table: &[MetricTimes<T>], snapshot: &T, labels: &[(&'static str, &str)]) {
    for metric in table {
        let whose = |own: Option<String>| -> Vec<Label> {
            let labels = labels
                .iter()
                .map(|&(key, value)| Label::new(key, value.to_owned()));
            labels.chain(own.map(|le| Label::new("le", le))).collect()
        };
        let times = (metric.read)(snapshot);
        let bounds = BOUNDS_US.iter().map(u64::to_string);
        let mut so_far = 0;
        for (count, le) in times.buckets.iter().zip(bounds.chain(["+Inf".to_owned()])) {
            so_far += count;
            counter!(format!("{}_bucket", metric.name), whose(Some(le))).absolute(so_far);
        }
        counter!(format!("{}_sum", metric.name), whose(None)).absolute(times.sum_us);
        counter!(format!("{}_count", metric.name), whose(None)).absolute(so_far);
    }
}

#[cfg(test)]
mod tests;

//! What is reported: a row per contender and block size, for people and for programs.

use std::time::Duration;

use serde::Serialize;

use super::case::Case;
use super::contender::Turn;

/// A contender's turns of one case. Rates are 10^9 bytes per second.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Row {
    pub(crate) contender: String,
    pub(crate) lane: String,
    pub(crate) block_bytes: u64,
    pub(crate) blocks: u32,
    pub(crate) layers: u32,
    pub(crate) pattern: String,
    /// Threads that copy, and reads in flight.
    pub(crate) workers: u16,
    pub(crate) queue_depth: u16,
    pub(crate) repetitions: usize,
    pub(crate) gb_per_s_best: f64,
    pub(crate) gb_per_s_median: f64,
    pub(crate) gb_per_s_worst: f64,
    /// Of the best turn, per block of a layer.
    pub(crate) ns_per_block: f64,
    /// Of a turn.
    pub(crate) operations: u64,
    /// Blocks with wrong bytes, of all turns.
    pub(crate) wrong_blocks: u64,
    /// Of the best rates; none where the other was not measured.
    pub(crate) ratio_to_memcpy: Option<f64>,
    pub(crate) ratio_to_nixl: Option<f64>,
    pub(crate) ratio_to_socket: Option<f64>,
}

/// How it was measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Means {
    pub(crate) workers: u16,
    pub(crate) queue_depth: u16,
}

impl Row {
    /// Of at least one turn of so many bytes.
    pub(crate) fn of(
        (contender, lane): (&str, String),
        case: &Case,
        means: Means,
        bytes: u64,
        turns: &[Turn],
    ) -> Self {
        let mut times: Vec<Duration> = turns.iter().map(|turn| turn.time).collect();
        times.sort_unstable();
        let at = |place: usize| times.get(place).copied().unwrap_or_default();
        let rate = |time: Duration| bytes as f64 / time.as_secs_f64().max(1e-9) / 1e9;
        let blocks = bytes as f64 / case.block_bytes as f64;
        Self {
            contender: contender.to_owned(),
            lane,
            block_bytes: case.block_bytes,
            blocks: case.blocks,
            layers: case.layers,
            pattern: case.pattern.to_string(),
            workers: means.workers,
            queue_depth: means.queue_depth,
            repetitions: turns.len(),
            gb_per_s_best: rate(at(0)),
            gb_per_s_median: rate(at(times.len() / 2)),
            gb_per_s_worst: rate(at(times.len().saturating_sub(1))),
            ns_per_block: at(0).as_secs_f64() * 1e9 / blocks,
            operations: turns.iter().map(|turn| turn.operations).min().unwrap_or(0),
            wrong_blocks: turns.iter().map(|turn| turn.wrong).sum(),
            ratio_to_memcpy: None,
            ratio_to_nixl: None,
            ratio_to_socket: None,
        }
    }
}

/// Fills in the ratios between rows of one case.
pub(crate) fn compare(rows: &mut [Row]) {
    let best = |rows: &[Row], name: &str| {
        let row = rows.iter().find(|row| row.contender == name);
        row.map(|row| row.gb_per_s_best)
    };
    let (memcpy, nixl, socket) = (
        best(rows, "memcpy"),
        best(rows, "nixl"),
        best(rows, "socket"),
    );
    for row in rows {
        let to = |other: Option<f64>| other.map(|other| row.gb_per_s_best / other);
        (row.ratio_to_memcpy, row.ratio_to_nixl, row.ratio_to_socket) =
            (to(memcpy), to(nixl), to(socket));
    }
}

/// Sizes as people write them.
pub(crate) fn shown_bytes(bytes: u64) -> String {
    for (power, unit) in [(30, "GiB"), (20, "MiB"), (10, "KiB")] {
        if bytes >= 1 << power && bytes.is_multiple_of(1 << power) {
            return format!("{} {unit}", bytes >> power);
        }
    }
    format!("{bytes} B")
}

/// A table of rows.
pub(crate) fn table(rows: &[Row]) -> String {
    let ratio = |ratio: Option<f64>| ratio.map_or_else(String::new, |it| format!("{it:.2}"));
    let mut text = format!(
        "{:<10} {:<24} {:>9} {:>8} {:>8} {:>8} {:>8} {:>9} {:>8} {:>8} {:>8}\n",
        "contender",
        "lane",
        "block",
        "blocks",
        "best",
        "median",
        "worst",
        "ns/block",
        "/memcpy",
        "/socket",
        "/nixl"
    );
    for row in rows {
        text.push_str(&format!(
            "{:<10} {:<24} {:>9} {:>8} {:>8.2} {:>8.2} {:>8.2} {:>9.0} {:>8} {:>8} {:>8}\n",
            row.contender,
            row.lane,
            shown_bytes(row.block_bytes),
            u64::from(row.blocks) * u64::from(row.layers),
            row.gb_per_s_best,
            row.gb_per_s_median,
            row.gb_per_s_worst,
            row.ns_per_block,
            ratio(row.ratio_to_memcpy),
            ratio(row.ratio_to_socket),
            ratio(row.ratio_to_nixl),
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(ms: u64, wrong: u64) -> Turn {
        Turn {
            time: Duration::from_millis(ms),
            operations: 10 + ms,
            wrong,
        }
    }

    fn row(name: &str, turns: &[Turn]) -> Row {
        let case = Case {
            block_bytes: 1 << 20,
            blocks: 100,
            layers: 2,
            pattern: super::super::case::Pattern::Runs(4),
            seed: 1,
        };
        let means = Means {
            workers: 2,
            queue_depth: 3,
        };
        let turns_of = (name, "a lane".to_owned());
        Row::of(turns_of, &case, means, 200 << 20, turns)
    }

    #[test]
    fn best_median_and_worst_are_of_the_turns() {
        let row = row(
            "kvferry",
            &[
                turn(40, 1),
                turn(20, 0),
                turn(100, 2),
                turn(25, 0),
                turn(30, 0),
            ],
        );
        let bytes = f64::from(200 << 20) / 1e9;
        assert!((row.gb_per_s_best - bytes / 0.020).abs() < 1e-9);
        assert!((row.gb_per_s_median - bytes / 0.030).abs() < 1e-9);
        assert!((row.gb_per_s_worst - bytes / 0.100).abs() < 1e-9);
        assert!((row.ns_per_block - 100_000.0).abs() < 1e-6);
        assert_eq!(
            (row.operations, row.wrong_blocks, row.repetitions),
            (30, 3, 5)
        );
        assert_eq!(row.pattern, "runs:4");
    }

    #[test]
    fn ratios_are_of_the_best_and_only_to_what_was_measured() {
        let mut rows = [
            row("memcpy", &[turn(10, 0)]),
            row("kvferry", &[turn(20, 0), turn(12, 0)]),
            row("nixl", &[turn(100, 0)]),
        ];
        compare(&mut rows);
        let ratios: Vec<_> = rows
            .iter()
            .map(|row| (row.ratio_to_memcpy, row.ratio_to_nixl, row.ratio_to_socket))
            .collect();
        let near = |found: Option<f64>, wanted: f64| (found.unwrap() - wanted).abs() < 1e-9;
        assert!(near(ratios[1].0, 10.0 / 12.0) && near(ratios[1].1, 100.0 / 12.0));
        assert!(near(ratios[0].0, 1.0) && near(ratios[2].1, 1.0));
        assert_eq!(ratios[1].2, None);
        let text = table(&rows);
        assert_eq!(text.lines().count(), 4);
        assert!(text.contains("1 MiB"), "{text}");
    }
}

//! What a run has done: the verdict, the table for people and the object for programs.

use std::fmt;
use std::io::Write;

use kvferry_connector::remote::LoaderStats;
use kvferry_engine::{CounterSnapshot, Lane};
use kvferry_sim::Counts;
use kvferry_wire::demo::DEMO_BLOCK_TOKENS;
use kvferry_wire::{DemoPlan, DemoSummary, UcxVersion};
use serde::Serialize;

use crate::error::CliError;
use crate::prompts::{blocks_to_read, bytes_to_read};
use crate::say;

/// Failures that are listed; more are only counted.
const LISTED: usize = 20;

/// What came of a run's requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    /// Requests with the right tokens.
    pub(crate) requests: u64,
    /// Bytes that were loaded for those.
    pub(crate) verified_bytes: u64,
    /// The first failures.
    failures: Vec<String>,
    /// Failures beyond those.
    more_failures: u64,
}

impl Totals {
    pub(crate) fn fail(&mut self, failure: String) {
        if self.failures.contains(&failure) {
            // Such as the producer's end, which several questions meet.
        } else if self.failures.len() < LISTED {
            self.failures.push(failure);
        } else {
            self.more_failures += 1;
        }
    }
}

/// Everything that is known at the end of a run.
pub(crate) struct Facts<'a> {
    pub(crate) plan: &'a DemoPlan,
    pub(crate) lane: Lane,
    pub(crate) transports: String,
    /// Whether one-sided reads are emulated by UCX.
    pub(crate) emulated: bool,
    pub(crate) ucx: Option<UcxVersion>,
    pub(crate) producer_ucx: Option<UcxVersion>,
    /// What the connector has read.
    pub(crate) loads: LoaderStats,
    /// What the scheduler has counted.
    pub(crate) tokens: Counts,
    pub(crate) totals: Totals,
    /// The consumer's counters before the first request.
    pub(crate) before: CounterSnapshot,
    /// The same after the last one.
    pub(crate) after: CounterSnapshot,
    /// Bytes in quarantine when the memory had been given up.
    pub(crate) quarantined_bytes: u64,
    /// The producer's view, or why there is none.
    pub(crate) summary: Result<DemoSummary, CliError>,
}

/// Bytes that each lane carried, by the engine's own count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct BytesByLane {
    pub(crate) mapped: u64,
    pub(crate) native: u64,
    pub(crate) attached: u64,
    pub(crate) served: u64,
}

impl BytesByLane {
    fn of(self, lane: Lane) -> u64 {
        match lane {
            Lane::Mapped => self.mapped,
            Lane::Native => self.native,
            Lane::Attached => self.attached,
            Lane::Served => self.served,
        }
    }
}

/// A run's result. Its fields are those of the JSON object.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    /// Requests with the right tokens, of those that the producer had.
    pub(crate) requests: u64,
    pub(crate) requests_planned: u64,
    /// Blocks that were read, each over all layers.
    pub(crate) blocks: u64,
    pub(crate) block_bytes: u64,
    pub(crate) layers: u32,
    pub(crate) seed: u64,
    /// Bytes that were read.
    pub(crate) bytes: u64,
    pub(crate) verified_bytes: u64,
    /// Tokens that were read, found in the own prefix cache, and computed.
    pub(crate) loaded_tokens: u64,
    pub(crate) cached_tokens: u64,
    pub(crate) computed_tokens: u64,
    pub(crate) lane: &'static str,
    pub(crate) bytes_by_lane: BytesByLane,
    pub(crate) emulated: bool,
    pub(crate) transports: String,
    /// Contiguous runs that were read.
    pub(crate) operations: u64,
    /// Active messages and GETs that the consumer posted from its first request on.
    pub(crate) ucx_operations: u64,
    /// GETs among them.
    pub(crate) gets: u64,
    /// Time during which at least one read was in flight.
    pub(crate) read_seconds: f64,
    /// Bytes over that time, in 10^9 bytes per second.
    pub(crate) gb_per_s: f64,
    pub(crate) leases_held: u64,
    pub(crate) leases_released: u64,
    pub(crate) leases_expired: u64,
    pub(crate) leases_revoked: u64,
    /// Blocks of the producer that are not free.
    pub(crate) blocks_in_use: u64,
    /// Both sides' together.
    pub(crate) quarantined_bytes: u64,
    pub(crate) ucx_version: String,
    pub(crate) producer_ucx_version: String,
    /// What went wrong; empty after a good run.
    pub(crate) failures: Vec<String>,
}

impl Report {
    /// Judges a run.
    pub(crate) fn new(facts: Facts<'_>) -> Self {
        let Facts {
            plan,
            mut totals,
            before,
            after,
            loads,
            tokens,
            ..
        } = facts;
        let summary = match facts.summary {
            Ok(summary) => Some(summary),
            Err(error) => {
                totals.fail(format!("the run was not summed up: {error}"));
                None
            }
        };
        let held = summary.unwrap_or_default();
        let read_seconds = loads.reading_us as f64 / 1e6;
        let ucx_operations = after.ucx_operations - before.ucx_operations;
        let messages = after.messages_sent - before.messages_sent;
        let mut report = Self {
            requests: totals.requests,
            requests_planned: plan.requests,
            blocks: loads.blocks,
            block_bytes: plan.block_bytes,
            layers: plan.layers,
            seed: plan.seed,
            bytes: loads.bytes,
            verified_bytes: totals.verified_bytes,
            loaded_tokens: tokens.loaded_tokens,
            cached_tokens: tokens.local_tokens,
            computed_tokens: tokens.computed_tokens,
            lane: facts.lane.name(),
            bytes_by_lane: BytesByLane {
                mapped: after.mapped_bytes - before.mapped_bytes,
                native: after.native_bytes - before.native_bytes,
                attached: after.attached_bytes - before.attached_bytes,
                served: after.served_bytes - before.served_bytes,
            },
            emulated: facts.emulated && facts.lane == Lane::Native,
            transports: facts.transports,
            operations: loads.operations,
            ucx_operations,
            // With that lane everything that a consumer sends in a run fits one active message; with
            // the served lane the messages that ask for blocks may take several.
            gets: if facts.lane == Lane::Native {
                ucx_operations.saturating_sub(messages)
            } else {
                0
            },
            read_seconds,
            gb_per_s: if read_seconds > 0.0 {
                loads.bytes as f64 / read_seconds / 1e9
            } else {
                0.0
            },
            leases_held: held.leases_held,
            leases_released: held.leases_released,
            leases_expired: held.leases_expired,
            leases_revoked: held.leases_revoked,
            blocks_in_use: held.blocks_in_use,
            quarantined_bytes: facts.quarantined_bytes + held.quarantined_bytes,
            ucx_version: version(facts.ucx),
            producer_ucx_version: version(facts.producer_ucx),
            failures: Vec::new(),
        };
        report.judge(plan, facts.lane, summary.is_some(), &mut totals);
        report.failures = totals.failures;
        if totals.more_failures > 0 {
            report
                .failures
                .push(format!("and {} more failures", totals.more_failures));
        }
        report
    }

    /// Compares what was done with what was to be done.
    fn judge(&self, plan: &DemoPlan, lane: Lane, summed_up: bool, totals: &mut Totals) {
        let (blocks, bytes) = (blocks_to_read(plan), bytes_to_read(plan));
        let mut differ = |what: &str, is: u64, should: u64| {
            if is != should {
                totals.fail(format!("{what}: {is}, and should be {should}"));
            }
        };
        differ(
            "requests with the right tokens",
            self.requests,
            plan.requests,
        );
        differ("blocks read", self.blocks, blocks);
        differ("bytes read", self.bytes, bytes);
        differ("bytes verified", self.verified_bytes, bytes);
        let tokens = blocks * u64::from(DEMO_BLOCK_TOKENS);
        differ("tokens loaded", self.loaded_tokens, tokens);
        for other in Lane::ALL {
            differ(
                &format!("bytes carried over the {other} lane"),
                self.bytes_by_lane.of(other),
                if other == lane { bytes } else { 0 },
            );
        }
        if lane == Lane::Native {
            differ(
                "GETs posted for the runs that were read",
                self.gets,
                self.operations,
            );
        }
        differ("bytes in quarantine", self.quarantined_bytes, 0);
        if summed_up {
            differ("leases still held by the producer", self.leases_held, 0);
            differ("blocks still in use at the producer", self.blocks_in_use, 0);
            differ(
                "leases that ended as released",
                self.leases_released,
                plan.requests,
            );
            differ("leases that expired", self.leases_expired, 0);
            differ("leases that were revoked", self.leases_revoked, 0);
        }
        if self.ucx_operations == 0 {
            totals.fail("UCX carried nothing: no operation was posted".to_owned());
        }
    }

    /// Adds a failure that was found after the run.
    pub(crate) fn fail(&mut self, failure: String) {
        self.failures.push(failure);
    }

    /// Prints the result to standard output and failures to standard error; true after a good run.
    pub(crate) fn print(&self, json: bool) -> Result<bool, CliError> {
        let text = if json {
            serde_json::to_string(self)
                .map(|object| object + "\n")
                .map_err(|error| CliError::system("writing JSON")(error.into()))?
        } else {
            self.to_string()
        };
        let mut out = std::io::stdout();
        out.write_all(text.as_bytes())
            .and_then(|()| out.flush())
            .map_err(CliError::system("writing to standard output"))?;
        for failure in &self.failures {
            say(format_args!("failure: {failure}"));
        }
        Ok(self.failures.is_empty())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rows: Vec<(&str, String)> = vec![
            (
                "requests",
                format!("{} of {}", self.requests, self.requests_planned),
            ),
            (
                "blocks",
                format!(
                    "{} of {} in {} layers",
                    self.blocks,
                    size(self.block_bytes),
                    self.layers
                ),
            ),
            (
                "read",
                format!("{} ({} bytes)", size(self.bytes), self.bytes),
            ),
            (
                "verified",
                format!(
                    "{} ({} bytes)",
                    size(self.verified_bytes),
                    self.verified_bytes
                ),
            ),
            (
                "tokens",
                format!(
                    "{} loaded, {} cached, {} computed",
                    self.loaded_tokens, self.cached_tokens, self.computed_tokens
                ),
            ),
            ("lane", self.lane_text()),
            ("transports", self.transports.clone()),
            (
                "speed",
                format!(
                    "{:.2} GB/s while reading ({:.2} s)",
                    self.gb_per_s, self.read_seconds
                ),
            ),
            ("operations", format!("{} runs of blocks", self.operations)),
            (
                "UCX operations",
                format!("{}, {} of them GETs", self.ucx_operations, self.gets),
            ),
            (
                "leases",
                format!(
                    "{} released, {} held",
                    self.leases_released, self.leases_held
                ),
            ),
            ("quarantine", size(self.quarantined_bytes)),
            ("UCX", self.ucx_text()),
        ];
        if self.leases_expired + self.leases_revoked > 0 {
            let lost = format!(
                "{} expired, {} revoked",
                self.leases_expired, self.leases_revoked
            );
            rows.push(("leases lost", lost));
        }
        let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        for (name, value) in rows {
            writeln!(f, "{name:<width$}  {value}")?;
        }
        Ok(())
    }
}

impl Report {
    fn lane_text(&self) -> String {
        let emulated = if self.emulated { ", emulated" } else { "" };
        format!("{}{emulated}", self.lane)
    }

    fn ucx_text(&self) -> String {
        if self.ucx_version == self.producer_ucx_version {
            self.ucx_version.clone()
        } else {
            format!(
                "{}, the producer's {}",
                self.ucx_version, self.producer_ucx_version
            )
        }
    }
}

fn version(version: Option<UcxVersion>) -> String {
    version.map_or_else(|| "none".to_owned(), |version| version.to_string())
}

/// Bytes in the largest unit that leaves at least 1.
fn size(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["TiB", "GiB", "MiB", "KiB"];
    for (power, unit) in (1..=4).rev().zip(UNITS) {
        let one = 1024_u64.pow(power);
        if bytes >= one {
            let value = bytes as f64 / one as f64;
            return if bytes.is_multiple_of(one) {
                format!("{value} {unit}")
            } else {
                format!("{value:.2} {unit}")
            };
        }
    }
    format!("{bytes} bytes")
}

#[cfg(test)]
mod tests;

//! The command line: options, sizes with suffixes, and what is refused before anything starts.

use clap::{Args, Parser, Subcommand, ValueEnum};
use kvferry_engine::LaneChoice;
use kvferry_wire::demo::{DEMO_BLOCK_TOKENS, DEMO_BLOCK_UNIT, MAX_DEMO_BLOCKS};
use kvferry_wire::{DemoPlan, MAX_READ_TABLES};

use crate::bench::BenchArgs;
use crate::error::CliError;
use crate::fault::Fault;

/// Moves KV-cache blocks between inference engines over UCX.
///
/// The log goes to standard error; KVFERRY_LOG filters it (default warn; for example info, or
/// kvferry_engine=debug,ucx=info).
#[derive(Debug, Parser)]
#[command(name = "kvferry", version, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Move and verify blocks between two processes on this machine
    ///
    /// Starts a producer as a process of its own, has it compute prompts, loads their blocks, checks every
    /// byte, generates from them, and frees the producer's blocks by notification. The exit status is 0
    /// only if all of that worked.
    Demo(DemoArgs),
    /// Hold blocks for `kvferry pull`, until interrupted
    Serve(ServeArgs),
    /// Read and verify the blocks of a `kvferry serve`
    Pull(PullArgs),
    /// Run a reference scheduler over the connectors, with every rule checked after each step
    ///
    /// Engines with vLLM's scheduling, a router between them and clients that come and go, all from a
    /// seed; tokens come out right only if every byte was. The exit status is 1 if a rule was broken,
    /// with the rule and the command that shows it again.
    Sim(SimArgs),
    /// Measure how fast blocks move
    Bench(BenchArgs),
}

#[derive(Clone, Debug, Args)]
pub(crate) struct SimArgs {
    /// How many requests clients send
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub(crate) requests: u32,
    /// What everything is drawn from
    #[arg(long, value_name = "S", default_value_t = 1)]
    pub(crate) seed: u64,
    /// How much goes wrong, of requests, engines and the fabric between them
    #[arg(long, value_enum, default_value_t = SimFaults::None)]
    pub(crate) faults: SimFaults,
    /// Which connectors the engines have
    #[arg(long, value_enum, default_value_t = SimConnector::Remote)]
    pub(crate) connector: SimConnector,
    /// What carries their engines
    #[arg(long, value_enum, default_value_t = SimCarrier::Loopback)]
    pub(crate) carrier: SimCarrier,
    /// Print one JSON object instead of the table
    #[arg(long)]
    pub(crate) json: bool,
}

/// How much goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SimFaults {
    /// Nothing
    None,
    /// Some aborts, late reports, small pools, lost segments
    Mixed,
    /// Many of them, restarts too
    Harsh,
    /// Some, and reads that bring something else than they say; loads are verified
    Lying,
}

/// Connectors of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SimConnector {
    /// RemotePrefill
    Remote,
    /// SharedStorage
    Storage,
    /// Both under a MultiConnector
    Multi,
}

/// Fabrics of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SimCarrier {
    /// In this process, with faults
    Loopback,
    /// UCX over the loopback device
    Ucx,
}

impl From<SimFaults> for kvferry_sim::Faults {
    fn from(faults: SimFaults) -> Self {
        match faults {
            SimFaults::None => Self::None,
            SimFaults::Mixed => Self::Mixed,
            SimFaults::Harsh => Self::Harsh,
            SimFaults::Lying => Self::Lying,
        }
    }
}

impl SimConnector {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Remote => "remote",
            Self::Storage => "storage",
            Self::Multi => "multi",
        }
    }
}

impl From<SimCarrier> for kvferry_sim::Carrier {
    fn from(carrier: SimCarrier) -> Self {
        match carrier {
            SimCarrier::Loopback => Self::Loopback,
            SimCarrier::Ucx => Self::Ucx,
        }
    }
}

#[derive(Clone, Debug, Args)]
pub(crate) struct DemoArgs {
    #[command(flatten)]
    pub(crate) plan: PlanArgs,
    #[command(flatten)]
    pub(crate) read: ReadArgs,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct ServeArgs {
    /// Where the directory listens, which is the address to pull from; port 0 takes any free one
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:0")]
    pub(crate) listen: String,
    #[command(flatten)]
    pub(crate) plan: PlanArgs,
    /// Allow one-sided reads that UCX emulates, for `pull --lane native` without RDMA
    ///
    /// Whoever reaches UCX's ports can then make UCX read addresses of its choice in this process.
    #[arg(long)]
    pub(crate) allow_emulation: bool,
    /// Print the address as JSON, and end when standard input does
    #[arg(long, hide = true)]
    pub(crate) machine: bool,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct PullArgs {
    /// The address that `kvferry serve` printed
    #[arg(value_name = "HOST:PORT")]
    pub(crate) address: String,
    #[command(flatten)]
    pub(crate) read: ReadArgs,
}

/// What there is to read.
#[derive(Clone, Debug, Args)]
pub(crate) struct PlanArgs {
    /// How many requests; one of 16 is read by half, one of 16 not at all
    #[arg(long, value_name = "N", default_value_t = 72)]
    pub(crate) requests: u64,
    /// Blocks of a request
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub(crate) blocks: u32,
    /// Bytes of a block in one layer, as in 32768 or 32K; a block has 16 tokens
    #[arg(long, value_name = "SIZE", default_value = "32K", value_parser = parse_size)]
    pub(crate) block_bytes: u64,
    /// Layers; each block exists in every one of them
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub(crate) layers: u32,
    /// What the prompts and the order of the blocks' ids are made from
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,
}

/// How it is read.
#[derive(Clone, Debug, Args)]
pub(crate) struct ReadArgs {
    /// How bytes move: auto, mapped, native, attached or served
    #[arg(long, value_name = "LANE", default_value = "auto", value_parser = parse_lane)]
    pub(crate) lane: LaneChoice,
    /// Print one JSON object instead of the table
    #[arg(long)]
    pub(crate) json: bool,
    /// Do something wrong that must be noticed
    #[arg(long, value_name = "FAULT", hide = true)]
    pub(crate) fault: Option<Fault>,
}

impl PlanArgs {
    /// The plan, if its sizes make sense.
    pub(crate) fn plan(&self) -> Result<DemoPlan, CliError> {
        let refuse = |option: &str, value: u64, max: u64| {
            Err(CliError::Usage(format!(
                "--{option} is {value}: give 1 to {max}"
            )))
        };
        for (option, value, max) in [
            ("requests", self.requests, u64::MAX),
            ("blocks", self.blocks.into(), MAX_DEMO_BLOCKS as u64),
            ("block-bytes", self.block_bytes, u64::MAX),
            ("layers", self.layers.into(), MAX_READ_TABLES as u64),
        ] {
            if value == 0 || value > max {
                return refuse(option, value, max);
            }
        }
        if !self.block_bytes.is_multiple_of(DEMO_BLOCK_UNIT) {
            return Err(CliError::Usage(format!(
                "--block-bytes is {}: give a multiple of {DEMO_BLOCK_UNIT}, for {DEMO_BLOCK_TOKENS} tokens of \
                 8 bytes or more",
                self.block_bytes
            )));
        }
        let total = (u64::from(self.blocks) * u64::from(self.layers))
            .checked_mul(self.block_bytes)
            .and_then(|bytes| bytes.checked_mul(self.requests));
        if total.is_none() {
            return Err(CliError::Usage(format!(
                "{} requests of {} blocks of {} bytes in {} layers are more than 2^64 bytes: lower \
                 --requests, --blocks, --block-bytes or --layers",
                self.requests, self.blocks, self.block_bytes, self.layers
            )));
        }
        Ok(DemoPlan {
            requests: self.requests,
            blocks: self.blocks,
            block_bytes: self.block_bytes,
            layers: self.layers,
            seed: self.seed,
        })
    }

    /// The options that give the same plan to another process.
    pub(crate) fn as_options(&self) -> Vec<String> {
        [
            ("requests", self.requests),
            ("blocks", self.blocks.into()),
            ("block-bytes", self.block_bytes),
            ("layers", self.layers.into()),
            ("seed", self.seed),
        ]
        .into_iter()
        .map(|(option, value)| format!("--{option}={value}"))
        .collect()
    }
}

/// Reads a number of bytes: plain, or with K, M, G or T for powers of 1024.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|letter: char| !letter.is_ascii_digit());
    let suffix = &text[digits.len()..];
    let power = match suffix.to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KB" | "KIB" => 1,
        "M" | "MB" | "MIB" => 2,
        "G" | "GB" | "GIB" => 3,
        "T" | "TB" | "TIB" => 4,
        _ => {
            return Err(format!(
                "{text:?} is no size: give bytes, or a number with K, M, G or T for powers of 1024"
            ));
        }
    };
    let too_large = || format!("{text} is more than 2^64 bytes");
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(format!(
            "{text:?} is no size: give a whole number of bytes, or of K, M, G or T"
        ));
    }
    let number: u64 = digits.parse().map_err(|_| too_large())?;
    number
        .checked_mul(1024_u64.pow(power))
        .ok_or_else(too_large)
}

pub(crate) fn parse_lane(text: &str) -> Result<LaneChoice, String> {
    text.parse()
}

#[cfg(test)]
mod tests;

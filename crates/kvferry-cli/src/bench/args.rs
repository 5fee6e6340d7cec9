//! Options of `kvferry bench`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use kvferry_engine::LaneChoice;
use kvferry_wire::MAX_READ_TABLES;

use super::case::{Case, Pattern};
use crate::args::{parse_lane, parse_size};
use crate::error::CliError;

#[derive(Clone, Debug, Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) command: BenchCommand,
}

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Read blocks of another process on this machine, beside memcpy, a socket and other engines
    ///
    /// Every contender moves the same blocks, by turns, so that a slow moment hits all; every byte is checked after
    /// each time. Rates are 10^9 bytes per second. The exit status is 1 if a byte was wrong or a contender failed.
    Read(ReadArgs),
    /// The other process
    #[command(hide = true)]
    Hold(HoldArgs),
}

/// Who is measured beside kvferry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Peer {
    /// Copies within this process
    Memcpy,
    /// A TCP connection over loopback, 256 KiB at a time, in order
    Socket,
    /// UCX's own get benchmark (`ucx_perftest`)
    Ucx,
    /// NIXL (Python package nixl-cu12)
    Nixl,
    /// NIXL with `UCX_TLS=tcp`
    NixlTcp,
    /// Mooncake's transfer engine over tcp (Python package mooncake-transfer-engine-non-cuda)
    Mooncake,
}

impl Peer {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Memcpy => "memcpy",
            Self::Socket => "socket",
            Self::Ucx => "ucx",
            Self::Nixl => "nixl",
            Self::NixlTcp => "nixl-tcp",
            Self::Mooncake => "mooncake",
        }
    }
}

#[derive(Clone, Debug, Args)]
pub(crate) struct ReadArgs {
    /// Bytes of a block in one layer, a list
    #[arg(
        long,
        value_name = "SIZES",
        default_value = "4K,32K,256K",
        value_delimiter = ',',
        value_parser = parse_size
    )]
    pub(crate) block_bytes: Vec<u64>,
    /// Blocks of a read: one number for all sizes, or one for each; as many as make --bytes if left out
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',')]
    pub(crate) blocks: Vec<u32>,
    /// Bytes of a read where --blocks does not say
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = parse_size)]
    pub(crate) bytes: u64,
    /// Which blocks: random (each alone), runs:N (N neighbours at random places), or sequential
    #[arg(long, value_name = "PATTERN", default_value = "random")]
    pub(crate) pattern: Pattern,
    /// Layers; each block exists in every one of them, and its bytes are those of one
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) layers: u32,
    /// How bytes move: auto, mapped, native, attached or served; a list measures each
    #[arg(
        long,
        value_name = "LANES",
        default_value = "auto",
        value_delimiter = ',',
        value_parser = parse_lane
    )]
    pub(crate) lane: Vec<LaneChoice>,
    /// Copy threads of kvferry, and threads of memcpy
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) workers: u16,
    /// Reads in flight at a time, into which the blocks are shared out
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) queue_depth: u16,
    /// Who is measured beside kvferry
    #[arg(
        long,
        value_name = "PEERS",
        value_enum,
        value_delimiter = ',',
        default_value = "memcpy,socket"
    )]
    pub(crate) compare: Vec<Peer>,
    /// How often each is measured, after one that does not count
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(crate) repetitions: u16,
    /// What the order of blocks is drawn from
    #[arg(long, value_name = "S", default_value_t = 1)]
    pub(crate) seed: u64,
    /// Print a JSON array of rows instead of the table
    #[arg(long)]
    pub(crate) json: bool,
    /// Draw rates over block sizes, one line per contender
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,
    /// Where the drivers of other engines are, as scripts/bench leaves them
    #[arg(long, value_name = "DIRECTORY", default_value = "benches/peers")]
    pub(crate) peers: PathBuf,
    /// The Python that has their packages
    #[arg(
        long,
        value_name = "PROGRAM",
        default_value = "target/peers/bin/python"
    )]
    pub(crate) python: PathBuf,
}

impl ReadArgs {
    /// What is to be read, one case per block size.
    pub(crate) fn cases(&self) -> Result<Vec<Case>, CliError> {
        let sizes = self.block_bytes.len();
        if self.blocks.len() > 1 && self.blocks.len() != sizes {
            return Err(CliError::Usage(format!(
                "--blocks has {} numbers for {sizes} block sizes: give one, or one for each",
                self.blocks.len()
            )));
        }
        if !(1..=MAX_READ_TABLES).contains(&(self.layers as usize)) {
            let layers = self.layers;
            return Err(CliError::Usage(format!(
                "--layers is {layers}: give 1 to {MAX_READ_TABLES}"
            )));
        }
        let case = |(place, &block_bytes): (usize, &u64)| {
            if block_bytes == 0 || block_bytes % 8 != 0 {
                return Err(CliError::Usage(format!(
                    "--block-bytes is {block_bytes}: give a multiple of 8"
                )));
            }
            let listed = self.blocks.get(place).or(self.blocks.first()).copied();
            let whole = self.bytes / block_bytes / u64::from(self.layers);
            let blocks = listed.unwrap_or(u32::try_from(whole.max(1)).unwrap_or(u32::MAX));
            let case = Case {
                block_bytes,
                blocks,
                layers: self.layers,
                pattern: self.pattern,
                seed: self.seed,
            };
            case.check()?;
            Ok(case)
        };
        self.block_bytes.iter().enumerate().map(case).collect()
    }
}

/// What the other process holds.
#[derive(Clone, Debug, Args)]
pub(crate) struct HoldArgs {
    #[arg(long, value_parser = parse_size)]
    pub(crate) block_bytes: u64,
    #[arg(long)]
    pub(crate) blocks: u32,
    #[arg(long)]
    pub(crate) layers: u32,
    #[arg(long)]
    pub(crate) allow_emulation: bool,
}

//! Why a command ended without a result.
//!
//! Failures of a run that came to its end are listed in its report instead.

use std::time::Duration;

use kvferry_connector::directory::{DirectoryError, PublishError};
use kvferry_connector::remote::RemoteError;
use kvferry_engine::{
    ConnectError, EngineError, MemoryError, ReadError, RegisterError, SendError, TableError,
    TransferError,
};
use kvferry_sim::{Breach, SimError};
use kvferry_wire::WireError;
use thiserror::Error;

#[derive(Debug, Error)]
pub(crate) enum CliError {
    /// The command line or a variable makes no sense.
    #[error("{0}")]
    Usage(String),
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Send(#[from] SendError),
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    #[error(transparent)]
    Publish(#[from] PublishError),
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// The engine could not be made.
    #[error(transparent)]
    Made(#[from] SimError),
    /// A rule of the scheduler, the connector or the blocks was broken.
    #[error("a rule was broken: {0}")]
    Rule(#[from] Breach),
    /// The operating system refused something.
    #[error("{what}: {source}")]
    System {
        what: &'static str,
        source: std::io::Error,
    },
    /// The operating system has no random bytes.
    #[error("no random bytes: {0}")]
    Random(getrandom::Error),
    /// More memory than this machine has to give.
    #[error(
        "{what} would take {need} bytes of memory and {limit} are available for it; take fewer or \
         smaller blocks, or fewer layers"
    )]
    TooMuchMemory {
        what: &'static str,
        need: u64,
        limit: u64,
    },
    /// Somebody did not do something in time.
    #[error("{what} within {waited:?}")]
    Late { what: String, waited: Duration },
    /// The producer answered, but not with what was asked for.
    #[error("the producer {0}")]
    Producer(String),
    /// A process that was started is not of use.
    #[error("the {name} process {what}; its own messages are above")]
    Child { name: String, what: String },
    /// A process could not be started.
    #[error("the {name} process could not be started: {program}: {source}")]
    Spawn {
        name: String,
        program: String,
        source: std::io::Error,
    },
    /// A region or a table of blocks.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Register(#[from] RegisterError),
    #[error(transparent)]
    Table(#[from] TableError),
    /// A read was refused, or a transfer failed.
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// A plot could not be drawn.
    #[error("{path} could not be drawn: {reason}")]
    Plot { path: String, reason: String },
}

impl CliError {
    pub(crate) fn exit_status(&self) -> u8 {
        match self {
            Self::Usage(_) | Self::TooMuchMemory { .. } => 2,
            _ => 1,
        }
    }

    pub(crate) fn system(what: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::System { what, source }
    }
}

//! What handles ask of the progress thread.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam::channel::Sender;
use kvferry_wire::Description;

use crate::chunks::Chunks;
use crate::error::{ConnectError, RegisterError, TransferError};
use crate::fabric::Registered;
use crate::memory::MemoryRegion;
use crate::peer::Greeted;
use crate::region::RegionInner;
use crate::service::PeerId;
use crate::transfer::ReadCommand;

pub(crate) enum Command {
    Register {
        memory: MemoryRegion,
        chunks: Chunks,
        reply: Sender<Result<Vec<Registered>, RegisterError>>,
    },
    Release(ReleaseRegion),
    Connect(Box<ConnectCommand>),
    Disconnect {
        peer: PeerId,
    },
    Read(Box<ReadCommand>),
    /// Slot and generation are known to the cell's owner only after the start, so a transfer is
    /// cancelled by its own number.
    Cancel {
        transfer: u64,
    },
    Send {
        peer: PeerId,
        channel: u16,
        payload: Vec<u8>,
    },
    WakeServices,
    Shutdown {
        deadline: Instant,
        reply: Sender<()>,
    },
}

impl Command {
    /// Answers a command that came after the end of the engine.
    pub(crate) fn refuse(self) {
        match self {
            Self::Read(command) => {
                command.cell.complete(Err(TransferError::Stopped));
                command.cell.quiesce();
            }
            Self::Connect(command) => {
                let stopped = ConnectError::Engine("the engine has been shut down".into());
                let _ = command.reply.send(Err(stopped));
            }
            Self::Release(ReleaseRegion {
                waiter: Some((_, reply)),
                ..
            }) => {
                // Nothing of a stopped engine touches memory.
                let _ = reply.send(Holders::default());
            }
            // Dropping the others closes their answer channels, which reads as "stopped".
            _ => {}
        }
    }
}

pub(crate) struct ReleaseRegion {
    pub(crate) region: Arc<RegionInner>,
    /// Until when somebody waits, and where it goes who still uses it.
    pub(crate) waiter: Option<(Instant, Sender<Holders>)>,
}

/// Who still uses a region that is being given up; nobody, once it has been.
#[derive(Debug, Default)]
pub(crate) struct Holders {
    pub(crate) operations: u64,
    pub(crate) peers: Vec<String>,
}

pub(crate) struct ConnectCommand {
    pub(crate) description: Arc<Description>,
    pub(crate) timeout: Duration,
    pub(crate) reply: Sender<Result<Greeted, ConnectError>>,
}

//! A read in flight, as its caller sees it.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use kvferry_wire::TableDescription;

use crate::command::Command;
use crate::completion::CompletionCell;
use crate::error::TransferError;
use crate::lane::Lane;
use crate::plan::BlockPair;
use crate::region::RegionHold;
use crate::same_host::SameHost;
use crate::service::PeerId;
use crate::shared::Shared;
use crate::table::Table;

/// What a transfer did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TransferReport {
    /// Bytes that were read: blocks times tables times block length.
    pub bytes: u64,
    /// Contiguous runs that were read. On the native lane, where each is one operation, a run that
    /// crosses the end of a registered chunk on either side counts once per piece.
    pub operations: u64,
    /// How the bytes moved; `None` if there was nothing to read.
    pub lane: Option<Lane>,
    /// From the start on the progress thread to the outcome.
    pub elapsed: Duration,
}

pub(crate) type Outcome = Result<TransferReport, TransferError>;
pub(crate) type TransferCell = CompletionCell<Outcome>;

/// One local and one remote table of a read.
pub(crate) struct TablePair {
    pub(crate) local: Table,
    pub(crate) remote: Arc<TableDescription>,
}

/// A read that has been checked and waits for the progress thread.
pub(crate) struct ReadCommand {
    pub(crate) number: u64,
    pub(crate) peer: PeerId,
    pub(crate) lane: Lane,
    /// What the peer shares, for the mapped and the attached lane.
    pub(crate) same_host: Option<Arc<SameHost>>,
    pub(crate) tables: Vec<TablePair>,
    pub(crate) pairs: Vec<BlockPair>,
    /// One per local region, taken while its table was known to exist.
    pub(crate) holds: Vec<RegionHold>,
    pub(crate) timeout: Duration,
    pub(crate) deadline: Instant,
    pub(crate) cell: Arc<TransferCell>,
}

/// A read in flight.
///
/// It has two events. The *outcome*, exactly one, is there by the deadline. The transfer is
/// *quiesced* when nothing of it can touch memory any more; [`wait`](Self::wait) and `.await` end
/// only then, so that what they return can be acted on: after a failure too, the destination blocks
/// may be given to somebody else. Dropping a transfer does not cancel it; its memory stays
/// registered until it is quiesced.
#[must_use = "a transfer that nobody waits for reports to nobody"]
pub struct Transfer {
    pub(crate) number: u64,
    pub(crate) cell: Arc<TransferCell>,
    pub(crate) shared: Arc<Shared>,
}

impl Transfer {
    /// The outcome, if there is one. The memory may not be quiet yet: see
    /// [`is_quiesced`](Self::is_quiesced).
    #[must_use]
    pub fn poll_outcome(&self) -> Option<Result<TransferReport, TransferError>> {
        self.cell.outcome()
    }

    /// True once nothing of the transfer can touch memory any more.
    #[must_use]
    pub fn is_quiesced(&self) -> bool {
        self.cell.is_quiesced()
    }

    /// Waits until there is an outcome and the memory is quiet. `None` if `timeout` passes first;
    /// the transfer goes on then.
    #[must_use]
    pub fn wait(&self, timeout: Duration) -> Option<Result<TransferReport, TransferError>> {
        self.cell.wait(timeout)
    }

    /// Asks for the end of the transfer. The outcome is [`TransferError::Cancelled`] unless another
    /// came first; wait for it as for any other.
    pub fn cancel(&self) {
        // A stopped engine has ended every transfer already.
        let _ = self.shared.submit(Command::Cancel {
            transfer: self.number,
        });
    }
}

impl Future for Transfer {
    type Output = Result<TransferReport, TransferError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.cell.poll(context)
    }
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transfer")
            .field("number", &self.number)
            .field("outcome", &self.cell.outcome())
            .field("quiesced", &self.cell.is_quiesced())
            .finish()
    }
}

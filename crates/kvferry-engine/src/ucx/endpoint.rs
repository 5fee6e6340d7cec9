//! An endpoint's state: its two sides, and what must end before it is closed.

use std::ffi::c_void;
use std::fmt;
use std::rc::Rc;

use ucx_sys::{UCP_EP_CLOSE_FLAG_FORCE, UCS_OK, ucp_ep_close_nbx, ucp_ep_h, ucp_err_handler_t};

use super::callbacks::{EndpointRecord, Mailbox, on_endpoint_failure};
use super::operations::{How, Operation, Operations, Submitted};
use super::status;
use super::worker::Worker;
use crate::error::FabricError;
use crate::fabric::EndpointId;

/// Which of an endpoint's two UCX endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// The one in the message context.
    Message,
    /// The one in the data context.
    Data,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Side {
    /// The side, as the subject of an error.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Message => "message endpoint",
            Self::Data => "data endpoint",
        }
    }
}

/// A UCX endpoint. Not closed by dropping it: see [`Link::close`].
pub(super) struct Link {
    handle: ucp_ep_h,
    side: Side,
    /// UCX's error handler points to it.
    _record: Rc<EndpointRecord>,
}

impl Link {
    pub(super) fn create(
        worker: &Worker,
        endpoint: EndpointId,
        side: Side,
        address: &[u8],
        mailbox: &Rc<Mailbox>,
    ) -> Result<Self, FabricError> {
        let record = Rc::new(EndpointRecord {
            endpoint,
            side,
            mailbox: Rc::clone(mailbox),
        });
        let handler = ucp_err_handler_t {
            cb: Some(on_endpoint_failure),
            arg: Rc::as_ptr(&record).cast::<c_void>().cast_mut(),
        };
        let handle = worker.create_endpoint(address, handler)?;
        Ok(Self {
            handle,
            side,
            _record: record,
        })
    }

    pub(super) fn handle(&self) -> ucp_ep_h {
        self.handle
    }

    /// Starts a forced close; true if it goes on and an event will tell. The handle is not used
    /// again.
    pub(super) fn close(&self, endpoint: EndpointId, operations: &mut Operations) -> bool {
        let close = Operation::Close {
            endpoint,
            side: self.side,
        };
        let how = How::host(UCP_EP_CLOSE_FLAG_FORCE);
        let submitted = operations.submit(close, how, |_, param| {
            // SAFETY: the endpoint is live: it is closed once, as its `Endpoint` sees to.
            unsafe { ucp_ep_close_nbx(self.handle, param) }
        });
        match submitted {
            Submitted::Pending => true,
            Submitted::Ended(_, result) => {
                if result != UCS_OK {
                    tracing::warn!(?endpoint, status = status::text(result), "closing failed");
                }
                false
            }
        }
    }
}

/// How far an endpoint's life has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// In use.
    Open,
    /// Failed, which was reported; nothing is posted on it any more.
    Failed,
    /// Closed by the caller; its operations are ending.
    Closing,
}

/// An endpoint of the fabric.
pub(super) struct Endpoint {
    /// `None` when it was closed with sends under way: see `Lingering`.
    pub(super) message: Option<Link>,
    /// Or why there is none.
    pub(super) data: Result<Link, String>,
    pub(super) phase: Phase,
    /// Operations that UCX has not ended, the closing ones included.
    pub(super) pending: usize,
    /// Sends among them.
    pub(super) sends: usize,
}

impl Endpoint {
    pub(super) fn new(message: Link, data: Result<Link, String>) -> Self {
        Self {
            message: Some(message),
            data,
            phase: Phase::Open,
            pending: 0,
            sends: 0,
        }
    }

    /// Closes both sides by force; the message side only if it has no sends, or its worker is about to be
    /// destroyed.
    pub(super) fn close(&mut self, endpoint: EndpointId, operations: &mut Operations) {
        if self.phase == Phase::Closing {
            return;
        }
        self.phase = Phase::Closing;
        for link in [self.message.as_ref(), self.data.as_ref().ok()]
            .into_iter()
            .flatten()
        {
            self.pending += usize::from(link.close(endpoint, operations));
        }
    }

    /// Gives the message side away, with the sends on it.
    pub(super) fn take_message(&mut self) -> Option<(Link, usize)> {
        let sends = std::mem::take(&mut self.sends);
        self.pending -= sends.min(self.pending);
        Some((self.message.take()?, sends))
    }

    /// Closes the data side alone, whose worker is about to be destroyed.
    pub(super) fn close_data(&mut self, endpoint: EndpointId, operations: &mut Operations) {
        if self.phase != Phase::Closing
            && let Ok(data) = &self.data
        {
            self.pending += usize::from(data.close(endpoint, operations));
        }
    }

    /// Whether everything on it has ended.
    pub(super) fn is_closed(&self) -> bool {
        self.phase == Phase::Closing && self.pending == 0
    }
}

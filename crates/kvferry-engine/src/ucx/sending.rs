//! How segments are handed to UCX: at once, as soon as a connection is there, or in UCX's own order.

use ucx_sys::{UCP_AM_SEND_FLAG_EAGER, UCS_ERR_NO_RESOURCE, UCS_OK, ucp_am_send_nbx, ucs_status_t};

use super::UcxFabric;
use super::endpoint::{Link, Phase};
use super::opening::Turn;
use super::operations::{How, Operation, Submitted};
use super::status;
use super::worker::MESSAGE_ID;
use crate::fabric::{EndpointId, FabricError, Posted, SendBuffer, Sink};

const CALL: &str = "ucp_am_send_nbx";

/// The usual way.
const EAGER: How = How::host(UCP_AM_SEND_FLAG_EAGER);

/// Why a segment was not taken.
enum Refused {
    /// By us.
    Here(FabricError),
    /// By UCX.
    Ucx(ucs_status_t),
}

impl From<Refused> for FabricError {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Here(error) => error,
            Refused::Ucx(failed) => status::error(CALL, failed),
        }
    }
}

impl UcxFabric {
    /// Sends a segment, or keeps it until the endpoint's connection is there.
    pub(super) fn send_segment(
        &mut self,
        endpoint: EndpointId,
        buffer: SendBuffer,
    ) -> Result<Posted<SendBuffer>, (SendBuffer, FabricError)> {
        let refused = |(buffer, refused): (SendBuffer, Refused)| (buffer, refused.into());
        let kept = match self.opening.turn(endpoint) {
            Turn::Usual => return self.post(endpoint, buffer, EAGER).map_err(refused),
            Turn::Ask => {
                self.opening.end(endpoint);
                return self.post(endpoint, buffer, EAGER.queued()).map_err(refused);
            }
            Turn::Wait => buffer,
            Turn::AtOnce => match self.post(endpoint, buffer, EAGER.at_once()) {
                Ok(posted) => {
                    self.opening.connected(endpoint);
                    return Ok(posted);
                }
                Err((buffer, Refused::Ucx(UCS_ERR_NO_RESOURCE))) => buffer,
                Err(other) => return Err(refused(other)),
            },
        };
        match self.open(CALL, endpoint) {
            Ok((found, ..)) => {
                found.pending += 1;
                self.opening.hold(endpoint, kept);
                Ok(Posted::Pending)
            }
            Err(error) => Err((kept, error)),
        }
    }

    fn post(
        &mut self,
        endpoint: EndpointId,
        buffer: SendBuffer,
        how: How,
    ) -> Result<Posted<SendBuffer>, (SendBuffer, Refused)> {
        let (found, operations, _) = match self.open(CALL, endpoint) {
            Ok(open) => open,
            Err(error) => return Err((buffer, Refused::Here(error))),
        };
        let Some(link) = found.message.as_ref().map(Link::handle) else {
            let error = FabricError::new(CALL, "the endpoint is being closed");
            return Err((buffer, Refused::Here(error)));
        };
        let send = Operation::Send { endpoint, buffer };
        let submitted = operations.submit(send, how, |send, param| {
            let segment = match send {
                Operation::Send { buffer, .. } => buffer.segment(),
                Operation::Orphan { .. } | Operation::Read { .. } | Operation::Close { .. } => &[],
            };
            let (bytes, count) = (segment.as_ptr().cast(), segment.len());
            // SAFETY: the endpoint is open. The bytes are in their place and are not moved,
            // changed or dropped before the operation has ended. There is no header.
            unsafe { ucp_am_send_nbx(link, MESSAGE_ID, std::ptr::null(), 0, bytes, count, param) }
        });
        match submitted {
            Submitted::Ended(Operation::Send { buffer, .. }, UCS_OK) => Ok(Posted::Done(buffer)),
            Submitted::Ended(Operation::Send { buffer, .. }, failed) => {
                Err((buffer, Refused::Ucx(failed)))
            }
            Submitted::Ended(..) | Submitted::Pending => {
                found.pending += 1;
                found.sends += 1;
                Ok(Posted::Pending)
            }
        }
    }

    /// Tries what waits for a connection, and reports what will never be sent; true if anything came of it.
    pub(super) fn try_opening(&mut self, sink: &mut dyn Sink) -> bool {
        let mut any = false;
        for (endpoint, buffer) in std::mem::take(&mut self.unsent) {
            any = true;
            let error = FabricError::new(CALL, "the endpoint was closed");
            self.settle(endpoint, buffer, Err(error), sink);
        }
        for endpoint in self.opening.waiting() {
            any |= self.try_endpoint(endpoint, sink);
        }
        any
    }

    fn try_endpoint(&mut self, endpoint: EndpointId, sink: &mut dyn Sink) -> bool {
        let found = self.endpoints.get(&endpoint);
        if found.is_none_or(|found| found.phase != Phase::Open) {
            // It waits to be closed.
            return false;
        }
        let mut any = false;
        while let Some(buffer) = self.opening.next(endpoint) {
            match self.post(endpoint, buffer, EAGER.at_once()) {
                Err((buffer, Refused::Ucx(UCS_ERR_NO_RESOURCE))) => {
                    self.opening.hold_first(endpoint, buffer);
                    return any;
                }
                posted => self.settle_post(endpoint, posted, sink),
            }
            any = true;
        }
        self.opening.connected(endpoint);
        any
    }

    /// What came of a segment that had waited, and was counted as pending.
    fn settle_post(
        &mut self,
        endpoint: EndpointId,
        posted: Result<Posted<SendBuffer>, (SendBuffer, Refused)>,
        sink: &mut dyn Sink,
    ) {
        match posted {
            Ok(Posted::Done(buffer)) => self.settle(endpoint, buffer, Ok(()), sink),
            Ok(Posted::Pending) => {
                // UCX counts it now.
                if let Some(found) = self.endpoints.get_mut(&endpoint) {
                    found.pending -= 1;
                }
            }
            Err((buffer, refused)) => self.settle(endpoint, buffer, Err(refused.into()), sink),
        }
    }

    fn settle(
        &mut self,
        endpoint: EndpointId,
        buffer: SendBuffer,
        result: Result<(), FabricError>,
        sink: &mut dyn Sink,
    ) {
        if let Some(found) = self.endpoints.get_mut(&endpoint) {
            found.pending = found.pending.saturating_sub(1);
            if found.is_closed() {
                self.closing.push(endpoint);
            }
        }
        sink.sent(endpoint, buffer, result);
    }

    /// An endpoint is closed: what waits for its connection is reported with the next progress.
    pub(super) fn give_up_opening(&mut self, endpoint: EndpointId) {
        let left = self.opening.end(endpoint);
        self.unsent
            .extend(left.into_iter().map(|buffer| (endpoint, buffer)));
    }
}

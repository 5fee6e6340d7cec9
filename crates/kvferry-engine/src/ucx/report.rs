//! What the sink is told of operations, and errors that are not UCX's.

use super::operations::Operation;
use crate::fabric::{CopyEnd, EndpointId, FabricError, ReadToken, SendBuffer, Sink};

/// Tells the sink how an operation has ended. `result` is given the call that started it.
pub(super) fn report(
    operation: Operation,
    result: impl FnOnce(&'static str) -> Result<(), FabricError>,
    sink: &mut dyn Sink,
) {
    match operation {
        Operation::Send { endpoint, buffer } => {
            sink.sent(endpoint, buffer, result("ucp_am_send_nbx"));
        }
        // Reported when its endpoint was closed.
        Operation::Orphan { buffer, .. } => drop(buffer),
        Operation::Read { token, .. } => sink.read_done(token, result("ucp_get_nbx")),
        // That the endpoint is closed is said when its last operation has ended.
        Operation::Close { endpoint, .. } => {
            if let Err(error) = result("ucp_ep_close_nbx") {
                tracing::debug!(?endpoint, %error, "an endpoint was closed after a failure");
            }
        }
    }
}

/// A sink for a fabric that is dropped: nobody is interested any more.
pub(super) struct Nobody;

impl Sink for Nobody {
    fn segment(&mut self, _bytes: &[u8]) {}
    fn sent(&mut self, _: EndpointId, _: SendBuffer, _: Result<(), FabricError>) {}
    fn read_done(&mut self, _: ReadToken, _: Result<(), FabricError>) {}
    fn copy_done(&mut self, _: ReadToken, _: CopyEnd) {}
    fn endpoint_failed(&mut self, _: EndpointId, _: FabricError) {}
    fn closed(&mut self, _: EndpointId) {}
    fn protocol_error(&mut self, _: &'static str) {}
}

pub(super) fn shut_down(call: &'static str) -> FabricError {
    FabricError::new(call, "the fabric was shut down")
}

pub(super) fn no_native_reads(
    call: &'static str,
    endpoint: EndpointId,
    reason: &str,
) -> FabricError {
    FabricError::new(
        call,
        format!(
            "endpoint number {} has no one-sided reads: {reason}",
            endpoint.0
        ),
    )
}

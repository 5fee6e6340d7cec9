//! What UCX itself pins for RDMA devices, against the limit that holds.
//!
//! Registrations are held against it before they are tried (`progress/registering.rs`); the limit itself is
//! read in `memory/memlock.rs`.

use std::collections::BTreeSet;

use super::native::is_rdma;
use super::transports::Resource as Found;
use crate::error::FabricError;
use crate::memory::memlock;

/// What the buffers of UCX's two contexts lock for each RDMA device. 1.06 MiB were measured (1.13.1, rc and
/// ud of soft-RoCE).
const DEVICE_BYTES: u64 = 2 << 20;

/// Refuses RDMA devices whose buffers may not be locked. 1.13 does not return from making a worker then.
pub(super) fn check(found: &[Found]) -> Result<(), FabricError> {
    let devices: BTreeSet<&str> = found
        .iter()
        .filter(|it| is_rdma(it))
        .map(|it| it.device.as_str())
        .collect();
    let bytes = devices.len() as u64 * DEVICE_BYTES;
    match memlock::need(0, bytes) {
        Some(short) if short.need > short.limit => {
            let devices = devices.into_iter().collect::<Vec<_>>().join(", ");
            Err(FabricError::new(
                "ucp_worker_create",
                format!("UCX has buffers for {devices}: {short}; or leave RDMA out (UCX_TLS=^ib)"),
            ))
        }
        _ => Ok(()),
    }
}

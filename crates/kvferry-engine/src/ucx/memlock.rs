//! The limit for locked memory: what RDMA devices need of it, and what it has to do with a failed
//! registration.
//!
//! A network card reads pages that cannot move, and the kernel counts them against a limit that is 64 KiB
//! or 8 MiB on many systems. UCX passes on the kernel's "no memory" or less.

use std::collections::BTreeSet;

use rustix::process::{Resource, getrlimit};

use super::native::is_rdma;
use super::transports::Resource as Found;
use crate::error::FabricError;

/// What the buffers of UCX's two contexts lock for each RDMA device. 1.06 MiB were measured (1.13.1, rc and
/// ud of soft-RoCE).
const DEVICE_BYTES: u64 = 2 << 20;

/// `CAP_IPC_LOCK`: who has it is not held to the limit.
const CAP_IPC_LOCK: u32 = 14;

/// Refuses RDMA devices whose buffers may not be locked. 1.13 does not return from making a worker then.
pub(super) fn check(found: &[Found]) -> Result<(), FabricError> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let devices: BTreeSet<&str> = found
        .iter()
        .filter(|it| is_rdma(it))
        .map(|it| it.device.as_str())
        .collect();
    let Some(limit) = getrlimit(Resource::Memlock).current else {
        return Ok(());
    };
    let bytes = devices.len() as u64 * DEVICE_BYTES;
    if is_exempt(&status) {
        return Ok(());
    }
    match shortage(limit, pinned(&status), bytes) {
        None => Ok(()),
        Some(words) => {
            let devices = devices.into_iter().collect::<Vec<_>>().join(", ");
            Err(FabricError::new(
                "ucp_worker_create",
                format!("UCX has buffers for {devices}{words}, or leave RDMA out (UCX_TLS=^ib)"),
            ))
        }
    }
}

fn is_exempt(status: &str) -> bool {
    let effective = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|text| u64::from_str_radix(text.trim(), 16).ok());
    effective.unwrap_or(0) & (1 << CAP_IPC_LOCK) != 0
}

/// Adds limit and need to the error of a registration of `bytes` bytes, if the limit can be its cause.
pub(super) fn explain(mut error: FabricError, bytes: u64) -> FabricError {
    // `None` is "unlimited".
    let limit = getrlimit(Resource::Memlock).current;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    if let Some(words) = limit.and_then(|limit| shortage(limit, pinned(&status), bytes)) {
        error.status.push_str(&words);
    }
    error
}

fn shortage(limit: u64, pinned: u64, bytes: u64) -> Option<String> {
    (pinned.saturating_add(bytes) > limit).then(|| {
        format!(
            "; a network card needs them locked, and this process may lock {limit} bytes (RLIMIT_MEMLOCK), of \
             which {pinned} are used, and {bytes} more are needed; raise the limit (ulimit -l, LimitMEMLOCK=, \
             --ulimit memlock=)"
        )
    })
}

/// Bytes that are pinned for devices, of what the kernel says of a process.
fn pinned(status: &str) -> u64 {
    let kilobytes = status.lines().find_map(|line| {
        let value = line.strip_prefix("VmPin:")?.trim().strip_suffix("kB")?;
        value.trim().parse::<u64>().ok()
    });
    kilobytes.unwrap_or(0) * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_may_lock_what_it_likes_is_exempt() {
        assert!(is_exempt("CapPrm:\t0\nCapEff:\t000001ffffffffff\n"));
        assert!(is_exempt("CapEff:\t0000000000004000\n"));
        assert!(!is_exempt("CapEff:\t00000000a80425fb\n"));
        assert!(!is_exempt("CapEff:\t0000000000000000\n"));
        assert!(!is_exempt(""));
    }

    #[test]
    fn limit_and_need_are_named_where_the_limit_is_short() {
        let status = "Name:\tkvferry\nVmLck:\t       0 kB\nVmPin:\t    4096 kB\nVmHWM:\t 9 kB\n";
        assert_eq!(pinned(status), 4 << 20);
        assert_eq!(pinned("VmPin: many kB"), 0);
        assert_eq!(pinned(""), 0);
        let words = shortage(8 << 20, 4 << 20, 16 << 20).unwrap();
        for part in [
            "may lock 8388608 bytes",
            "4194304 are used",
            "16777216 more",
        ] {
            assert!(words.contains(part), "{words}");
        }
        assert_eq!(shortage(8 << 20, 4 << 20, 4 << 20), None);
        assert!(shortage(8 << 20, u64::MAX, 1).is_some());
    }
}

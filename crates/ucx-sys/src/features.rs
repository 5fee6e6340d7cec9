//! What the UCX that this process loaded is, and what it can do beyond 1.13.
//!
//! Responsible for finding out. Not for judging: whether a version will do is the caller's
//! decision. A function pointer is here only if the loaded library both exports the function and is
//! of a version that knows the layout which the pointer's type declares.

use std::ffi::{CStr, c_void};
use std::fmt;
use std::mem;
use std::path::PathBuf;

use crate::bindings::{kvf_ep_attr_t, ucp_ep_h, ucs_status_t};
use crate::library::library_of;

/// A UCX version. Versions order as their numbers do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// 1 in every UCX so far.
    pub major: u32,
    /// The generation, such as 13.
    pub minor: u32,
    /// The release within the generation.
    pub release: u32,
}

impl Version {
    /// Whether this is `major.minor` or newer.
    #[must_use]
    pub const fn at_least(self, major: u32, minor: u32) -> bool {
        self.major > major || (self.major == major && self.minor >= minor)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.release)
    }
}

/// `(major, minor)` of the headers that the bindings were generated from.
pub const HEADERS_VERSION: (u32, u32) = (
    decimal(env!("KVFERRY_UCX_HEADERS_MAJOR")),
    decimal(env!("KVFERRY_UCX_HEADERS_MINOR")),
);

/// `ucp_ep_query` with the attributes of 1.14: the transports and devices of an endpoint.
///
/// Set [`KVF_EP_ATTR_FIELD_TRANSPORTS`](crate::KVF_EP_ATTR_FIELD_TRANSPORTS) in `field_mask`, give
/// `transports.entries` room for `num_entries` elements of `entry_size` bytes; UCX fills them and
/// sets `num_entries`. The strings live as long as the endpoint.
///
/// # Safety
///
/// As for `ucp_ep_query`: both pointers are valid, the endpoint is not closed, and the call is made
/// on the worker's thread.
pub type EpQueryTransports =
    unsafe extern "C" fn(ep: ucp_ep_h, attr: *mut kvf_ep_attr_t) -> ucs_status_t;

/// The loaded UCX.
#[derive(Clone, Debug)]
pub struct Features {
    /// The version that `ucp_get_version` reports.
    pub version: Version,
    /// The file that `libucp` was loaded from, as the loader names it; `None` if it cannot tell
    /// (a static UCX).
    pub library: Option<PathBuf>,
    /// From 1.14 on, the query for an endpoint's transports.
    pub ep_transports: Option<EpQueryTransports>,
    /// The names under which `ucp_config_modify` takes the lengths of TCP's segments.
    pub tcp_segments: TcpSegmentKeys,
}

/// Names of two settings of the TCP transport, for `ucp_config_modify`.
///
/// Up to 1.16 it takes settings of transports without the transport's name, and answers `UCS_OK` to
/// any other name, which then has no effect but a warning when a worker is created. From 1.17 on it
/// wants the name that the environment has, less `UCX_`.
///
/// Set both: the interface does not open if it sends longer segments than it receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpSegmentKeys {
    /// The length of a sent segment.
    pub tx: &'static CStr,
    /// The length of a received segment; at least that of a sent one.
    pub rx: &'static CStr,
}

impl TcpSegmentKeys {
    const fn of(version: Version) -> Self {
        if version.at_least(1, 17) {
            Self {
                tx: c"TCP_TX_SEG_SIZE",
                rx: c"TCP_RX_SEG_SIZE",
            }
        } else {
            Self {
                tx: c"TX_SEG_SIZE",
                rx: c"RX_SEG_SIZE",
            }
        }
    }
}

impl Features {
    /// What a library of this version is, whose functions `symbol` finds (null for none).
    pub(crate) fn of(version: Version, symbol: impl Fn(&CStr) -> *mut c_void) -> Self {
        let ep_query = symbol(c"ucp_ep_query");
        let has_transports = version.at_least(1, 14) && !ep_query.is_null();
        Self {
            version,
            library: library_of(symbol(c"ucp_get_version")),
            // SAFETY: the symbol is UCX's function of that name. Its second parameter is declared there as
            // a longer structure that starts like ours (asserted in shim.c against the headers), and UCX
            // writes only fields named in the mask.
            ep_transports: has_transports
                .then(|| unsafe { mem::transmute::<*mut c_void, EpQueryTransports>(ep_query) }),
            tcp_segments: TcpSegmentKeys::of(version),
        }
    }
}

/// Reads a decimal number that the build script wrote.
const fn decimal(text: &str) -> u32 {
    match u32::from_str_radix(text, 10) {
        Ok(number) => number,
        Err(_) => panic!("the build script gives KVFERRY_UCX_HEADERS_* in decimal"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_decide_by_number() {
        let version = |minor, release| Version {
            major: 1,
            minor,
            release,
        };
        assert!(version(13, 0).at_least(1, 13));
        assert!(!version(9, 9).at_least(1, 13));
        assert!(
            Version {
                major: 2,
                minor: 0,
                release: 0
            }
            .at_least(1, 22)
        );
        assert!(version(13, 1) < version(22, 0));
        assert_eq!(version(13, 1).to_string(), "1.13.1");
        assert_eq!(TcpSegmentKeys::of(version(16, 9)).tx, c"TX_SEG_SIZE");
        assert_eq!(TcpSegmentKeys::of(version(17, 0)).tx, c"TCP_TX_SEG_SIZE");
    }
}

//! Which transports an endpoint uses, in words for logs.
//!
//! From 1.14 on UCX is asked; 1.13 only prints, so its text is read. What an endpoint "uses" is what
//! UCX chose for its lanes; it does not say which operations are native.

use std::ffi::{CStr, c_char, c_uint};

use ucx_sys::{
    EpQueryTransports, KVF_EP_ATTR_FIELD_TRANSPORTS, UCS_OK, features, kvf_ep_attr_t, kvf_ep_text,
    kvf_transport_entry_t, kvf_transports_t, ucp_ep_h,
};

use super::worker::owned;

/// More lanes than any endpoint has.
const MAX_LANES: usize = 64;

/// `transport/device`, without repetition, separated by commas.
///
/// # Safety
/// The endpoint is live and has not failed, and this is its worker's thread.
pub(super) unsafe fn of(endpoint: ucp_ep_h) -> String {
    let names = match features().ep_transports {
        // SAFETY: by contract.
        Some(query) => unsafe { queried(query, endpoint) },
        None => {
            // SAFETY: the endpoint is live by contract; the result is null or a string of malloc's.
            from_text(&unsafe { owned(kvf_ep_text(endpoint)) })
        }
    };
    joined(names)
}

fn joined(names: Vec<String>) -> String {
    let mut seen: Vec<String> = Vec::new();
    for name in names {
        if !seen.contains(&name) {
            seen.push(name);
        }
    }
    if seen.is_empty() {
        "unknown".to_owned()
    } else {
        seen.join(",")
    }
}

/// # Safety
/// As [`of`].
unsafe fn queried(query: EpQueryTransports, endpoint: ucp_ep_h) -> Vec<String> {
    let mut entries = [kvf_transport_entry_t::default(); MAX_LANES];
    let mut attributes = kvf_ep_attr_t {
        field_mask: u64::from(KVF_EP_ATTR_FIELD_TRANSPORTS),
        transports: kvf_transports_t {
            entries: entries.as_mut_ptr(),
            num_entries: MAX_LANES as c_uint,
            entry_size: size_of::<kvf_transport_entry_t>(),
        },
        ..Default::default()
    };
    // SAFETY: the endpoint is live by contract; the attributes name room for as many entries as they
    // say.
    if unsafe { query(endpoint, &raw mut attributes) } != UCS_OK {
        return Vec::new();
    }
    let name = |text: *const c_char| {
        if text.is_null() {
            return "?".to_owned();
        }
        // SAFETY: UCX's strings are NUL-terminated and live as long as the endpoint.
        unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned()
    };
    let filled = entries
        .iter()
        .take(attributes.transports.num_entries as usize);
    filled
        .map(|entry| format!("{}/{}", name(entry.transport_name), name(entry.device_name)))
        .collect()
}

/// Reads the lanes out of what `ucp_ep_print_info` prints: lines such as
/// `#  lane[0]:  4:tcp/lo.0 md[1]  -> md[1]/tcp/sysdev[255]  am am_bw#0 wireup`.
fn from_text(text: &str) -> Vec<String> {
    text.lines()
        .filter_map(|line| {
            let lane = line.split_once("lane[")?.1;
            let resource = lane.split_once(':')?.1.split_whitespace().next()?;
            let name = resource.split_once(':')?.1;
            // The path's number is behind the last dot; devices may have dots themselves.
            Some(
                name.rsplit_once('.')
                    .map_or(name, |(name, _)| name)
                    .to_owned(),
            )
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(lanes: &[&str]) -> String {
        let head = "#\n# UCP endpoint \n#\n#               peer: <no debug data>\n";
        let lane = |line: &&str| format!("#                 {line}\n");
        let tail = "#\n#                 am_send: 0..<egr/short>..262137..<rndv>..(inf)\n#\n";
        [head, &lanes.iter().map(lane).collect::<String>(), tail].concat()
    }

    /// Lines as the versions named print them.
    #[test]
    fn lanes_are_found_in_printed_text() {
        let tcp_1_13 = "lane[0]:  1:tcp/lo.0 md[1]                -> \
            md[1]/tcp/sysdev[255] am am_bw#0 keepalive wireup";
        let tcp_1_22 = "lane[0]:  0:tcp/lo.0 md[0]                -> \
            md[0]/tcp/sysdev[255] seg 4294967295 am keepalive wireup";
        let posix =
            "lane[0]:  5:posix/memory.0 md[4]           -> md[4]/posix/sysdev[255] am am_bw#0";
        let cma = "lane[1]:  7:cma/memory.0 md[6]             -> md[6]/cma/sysdev[255] rma_bw#0";
        let rc = "lane[0]:  4:rc_verbs/rxe0:1.0 md[3]         -> md[3]/ib/sysdev[255] rma_bw#0 am";
        let path = "lane[1]:  4:rc_verbs/rxe0:1.1 md[3]         -> md[3]/ib/sysdev[255] rma_bw#1";
        let vlan = "lane[0]:  2:tcp/eth0.100.0 md[1]           -> md[1]/tcp/sysdev[255] am";
        let table: [(&[&str], &str); 7] = [
            (&[tcp_1_13], "tcp/lo"),
            (&[tcp_1_22], "tcp/lo"),
            (&[posix, cma], "posix/memory,cma/memory"),
            (&[rc, path], "rc_verbs/rxe0:1"),
            (&[vlan], "tcp/eth0.100"),
            (&[], "unknown"),
            (&["lane[0]: <none>", "lane[1", "lane[2]:"], "unknown"),
        ];
        for (lanes, expected) in table {
            assert_eq!(joined(from_text(&text(lanes))), expected, "{lanes:?}");
        }
    }
}

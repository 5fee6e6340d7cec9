//! Which transports a context found and an endpoint uses.
//!
//! From 1.14 on UCX is asked for an endpoint's; 1.13 only prints, so its text is read. For a context
//! every version only prints. What an endpoint "uses" is what UCX chose for its lanes; which of them
//! have a real GET is said in `native`.

use std::ffi::{CStr, c_char, c_uint};
use std::fs;
use std::path::Path;

use ucx_sys::{
    EpQueryTransports, KVF_EP_ATTR_FIELD_TRANSPORTS, UCS_OK, features, kvf_context_text,
    kvf_ep_attr_t, kvf_ep_text, kvf_transport_entry_t, kvf_transports_t, ucp_context_h, ucp_ep_h,
};

use super::worker::owned;

/// More lanes than any endpoint has.
const MAX_LANES: usize = 64;

/// A transport on a device, as a context found it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Resource {
    /// Its name, such as `rc_verbs`.
    pub(super) transport: String,
    /// The device, such as `rxe0:1`.
    pub(super) device: String,
    /// True if it is for setting up connections of other transports only.
    pub(super) auxiliary: bool,
}

impl Resource {
    /// Whether it is this transport, for data.
    pub(super) fn is_primary(&self, transport: &str) -> bool {
        self.transport == transport && !self.auxiliary
    }

    /// Whether it is a loopback device of the network (`ARPHRD_LOOPBACK`).
    pub(super) fn is_loopback(&self) -> bool {
        let path = Path::new("/sys/class/net").join(&self.device).join("type");
        fs::read_to_string(path).is_ok_and(|kind| kind.trim() == "772")
    }
}

/// What a context found on this host, of what its configuration allows.
///
/// # Safety
/// The context is live, and this is the thread that uses it.
pub(super) unsafe fn found(context: ucp_context_h) -> Vec<Resource> {
    // SAFETY: the context is live by contract; the result is null or a string of malloc's.
    resources(&unsafe { owned(kvf_context_text(context)) })
}

/// Reads what `ucp_context_print_info` prints: lines such as
/// `#      resource 0  :  md 0  dev 0  flags a- ud_verbs/rxe0:1`.
fn resources(text: &str) -> Vec<Resource> {
    let of_line = |line: &str| {
        let fields = line
            .trim_start_matches(['#', ' '])
            .strip_prefix("resource ")?;
        let mut words = fields.split_once(" flags ")?.1.split_whitespace();
        let (flags, name) = (words.next()?, words.next()?);
        let (transport, device) = name.split_once('/')?;
        Some(Resource {
            transport: transport.to_owned(),
            device: device.to_owned(),
            auxiliary: flags.contains('a'),
        })
    };
    text.lines().filter_map(of_line).collect()
}

/// One of the transports that an endpoint uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Lane {
    /// `transport/device`.
    pub(super) name: String,
    /// Whether one-sided operations go over it; `None` where UCX does not say.
    pub(super) one_sided: Option<bool>,
}

/// The endpoint's lanes.
///
/// # Safety
/// The endpoint is live and has not failed, and this is its worker's thread.
pub(super) unsafe fn of(endpoint: ucp_ep_h) -> Vec<Lane> {
    match features().ep_transports {
        // SAFETY: by contract.
        Some(query) => unsafe { queried(query, endpoint) },
        None => {
            // SAFETY: the endpoint is live by contract; the result is null or a string of malloc's.
            from_text(&unsafe { owned(kvf_ep_text(endpoint)) })
        }
    }
}

/// The lanes' names, for people.
pub(super) fn names(lanes: &[Lane]) -> String {
    joined(lanes.iter().map(|lane| lane.name.clone()).collect())
}

/// Names without repetition, separated by commas.
pub(super) fn joined(names: Vec<String>) -> String {
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
unsafe fn queried(query: EpQueryTransports, endpoint: ucp_ep_h) -> Vec<Lane> {
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
        .map(|entry| Lane {
            name: format!("{}/{}", name(entry.transport_name), name(entry.device_name)),
            one_sided: None,
        })
        .collect()
}

/// Reads the lanes out of what `ucp_ep_print_info` of 1.13 prints: lines such as
/// `#  lane[0]:  4:tcp/lo.0 md[1]  -> md[1]/tcp/sysdev[255]  am am_bw#0 wireup`, and for each lane that
/// one-sided operations use `#  get[0]: 0..<bcopy>..1094..<zcopy>..(inf)`.
fn from_text(text: &str) -> Vec<Lane> {
    let numbered = |line: &str, what: &str| {
        let (number, rest) = line.split_once(what)?.1.split_once("]:")?;
        Some((number.parse::<usize>().ok()?, rest.to_owned()))
    };
    let reading: Vec<usize> = text
        .lines()
        .filter_map(|line| Some(numbered(line, "get[")?.0))
        .collect();
    text.lines()
        .filter_map(|line| {
            let (number, rest) = numbered(line, "lane[")?;
            let name = rest.split_whitespace().next()?.split_once(':')?.1;
            // The path's number is behind the last dot; devices may have dots themselves.
            let name = name.rsplit_once('.').map_or(name, |(name, _)| name);
            Some(Lane {
                name: name.to_owned(),
                one_sided: Some(reading.contains(&number)),
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::native::has_real_get;
    use super::*;

    /// Lines as the versions named print them.
    #[test]
    fn resources_are_found_in_printed_text() {
        let text = "#\n# UCP context\n#\n#     component 0  :  self\n#     component 4  :  ib\n#\n\
            #            md 0  :  component 0  self \n#            md 3  :  component 4  rxe0 \n#\n\
            #      resource 0  :  md 0  dev 0  flags -- self/memory\n\
            #      resource 1  :  md 1  dev 1  flags -s tcp/eth0.100\n\
            #      resource 3  :  md 3  dev 2  flags -- rc_verbs/rxe0:1\n\
            #      resource 12 :  md 3  dev 2  flags a- ud_verbs/rxe0:1\n\
            #      resource 13 :  md 3  dev\n#      resource 14 :  md 3  dev 2  flags --\n#\n";
        let got: Vec<_> = resources(text)
            .into_iter()
            .map(|it| (it.transport, it.device, it.auxiliary))
            .collect();
        let of = |transport: &str, device: &str, auxiliary| {
            (transport.to_owned(), device.to_owned(), auxiliary)
        };
        assert_eq!(
            got,
            [
                of("self", "memory", false),
                of("tcp", "eth0.100", false),
                of("rc_verbs", "rxe0:1", false),
                of("ud_verbs", "rxe0:1", true),
            ]
        );
        assert_eq!(resources(""), []);
    }

    fn text(lines: &[&str]) -> String {
        let head = "#\n# UCP endpoint \n#\n#               peer: <no debug data>\n";
        let body = |line: &&str| format!("#                 {line}\n");
        let tail = "#\n#                  rma_bw: mds #\n";
        [head, &lines.iter().map(body).collect::<String>(), tail].concat()
    }

    /// Lines as the versions named print them, those of rc from two soft-RoCE devices.
    #[test]
    fn lanes_are_found_in_printed_text() {
        let tcp_1_13 = "lane[0]:  1:tcp/lo.0 md[1]                -> \
            md[1]/tcp/sysdev[255] am am_bw#0 keepalive wireup";
        let tcp_1_22 = "lane[0]:  0:tcp/lo.0 md[0]                -> \
            md[0]/tcp/sysdev[255] seg 4294967295 am keepalive wireup";
        let posix =
            "lane[0]:  5:posix/memory.0 md[4]           -> md[4]/posix/sysdev[255] am am_bw#0";
        let cma = "lane[1]:  7:cma/memory.0 md[6]             -> md[6]/cma/sysdev[255] rma_bw#0";
        let rc = "lane[0]:  0:rc_verbs/rxe0:1.0 md[0]       -> md[0]/ib/sysdev[255] am am_bw#0";
        let path = "lane[1]:  0:rc_verbs/rxe0:1.1 md[0]       -> md[0]/ib/sysdev[255] rma_bw#1";
        let ud =
            "lane[1]:  1:ud_verbs/rxe0:1.0 md[0]       -> md[0]/ib/sysdev[255] keepalive wireup";
        let ud_alone = "lane[0]:  0:ud_verbs/rxe0:1.0 md[0]       -> \
            md[0]/ib/sysdev[255] am am_bw#0 keepalive wireup";
        let put = " put[0]: 0..<short>..81..<bcopy>..16384..<zcopy>..(inf)";
        let get = " get[0]: 0..<bcopy>..1094..<zcopy>..(inf)";
        let vlan = "lane[0]:  2:tcp/eth0.100.0 md[1]           -> md[1]/tcp/sysdev[255] am";
        // Lines, the names, and whether the endpoint's GETs are real.
        let table: [(&[&str], &str, bool); 11] = [
            (&[tcp_1_13], "tcp/lo", false),
            (&[tcp_1_22], "tcp/lo", false),
            (&[posix, cma], "posix/memory,cma/memory", false),
            (
                &[rc, ud, "", put, get],
                "rc_verbs/rxe0:1,ud_verbs/rxe0:1",
                true,
            ),
            (&[rc, path, "", put, get], "rc_verbs/rxe0:1", true),
            // The lane carries messages, and reads would be emulated over it.
            (&[rc, ud], "rc_verbs/rxe0:1,ud_verbs/rxe0:1", false),
            (&[rc, put], "rc_verbs/rxe0:1", false),
            (&[ud_alone], "ud_verbs/rxe0:1", false),
            (&[vlan], "tcp/eth0.100", false),
            (&[], "unknown", false),
            (
                &["lane[0]: <none>", "lane[1", "lane[2]:", "get[", get],
                "unknown",
                false,
            ),
        ];
        for (lines, expected, real) in table {
            let lanes = from_text(&text(lines));
            assert_eq!(names(&lanes), expected, "{lines:?}");
            assert_eq!(has_real_get(&lanes), real, "{lines:?}");
        }
    }
}

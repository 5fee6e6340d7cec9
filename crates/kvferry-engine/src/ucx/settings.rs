//! What kvferry sets in UCX's configuration, and what the user has set.
//!
//! A user's setting always wins over kvferry's own; of the user's, the typed one wins over the
//! environment. Pure, but for reading the environment and the names of devices.

use std::env;
use std::path::{Path, PathBuf};

use ucx_sys::Version;

use super::transports::Resource;

/// What a user decides about UCX. [`Default`] leaves all to the environment and UCX.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UcxOptions {
    /// Make a data context even where its GETs are emulated by active messages.
    pub allow_emulation: bool,
    /// The transports, in the syntax of `UCX_TLS`, which it overrides. `None` leaves that in force.
    pub transports: Option<String>,
    /// The network devices, as `UCX_NET_DEVICES` names them, which it overrides. `None` leaves that in
    /// force.
    pub net_devices: Option<String>,
    /// Which UCX to load, as [`EngineConfig::ucx_library`](crate::EngineConfig::ucx_library).
    pub library: Option<PathBuf>,
}

/// Names that UCX (1.13 to 1.22) takes for several transports, and those. Without those for set-up only.
const ALIASES: [(&str, &[&str]); 19] = [
    ("all", &[]),
    ("mm", &["posix", "sysv", "xpmem"]),
    ("sm", &["posix", "sysv", "xpmem", "knem", "cma"]),
    ("shm", &["posix", "sysv", "xpmem", "knem", "cma"]),
    (
        "ib",
        &[
            "rc_verbs", "ud_verbs", "rc_mlx5", "ud_mlx5", "dc_mlx5", "gga_mlx5", "srd", "rc_gda",
        ],
    ),
    ("ud_v", &["ud_verbs"]),
    ("ud_x", &["ud_mlx5"]),
    ("ud", &["ud_mlx5", "ud_verbs"]),
    ("rc_v", &["rc_verbs"]),
    ("rc_x", &["rc_mlx5"]),
    ("rc", &["rc_mlx5", "rc_verbs"]),
    ("dc", &["dc_mlx5"]),
    ("dc_x", &["dc_mlx5"]),
    ("ugni", &["ugni_smsg", "ugni_udt", "ugni_rdma"]),
    ("cuda", &["cuda_copy", "cuda_ipc", "gdr_copy"]),
    ("rocm", &["rocm_copy", "rocm_ipc", "rocm_gdr"]),
    ("ze", &["ze_copy", "ze_ipc", "ze_gdr"]),
    ("gaudi", &["gaudi_gdr"]),
    ("gga", &["gga_mlx5"]),
];

/// Transports that are in no alias.
const OTHERS: [&str; 2] = ["self", "tcp"];

/// A list as UCX reads it: names, and whether they are those that are left out.
struct List<'a> {
    negated: bool,
    names: Vec<&'a str>,
}

impl<'a> List<'a> {
    fn new(text: &'a str) -> Self {
        let text = text.trim();
        let (negated, text) = match text.strip_prefix('^') {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        Self {
            negated,
            names: text.split(',').map(str::trim).collect(),
        }
    }
}

/// What a typed list of transports must be, for errors.
pub(crate) const TRANSPORTS_EXPECTED: &str = "names of UCX transports or groups, such as all, tcp, rc, dc, ud, ib, sm \
     or rc_verbs, separated by commas; ^ before the list leaves them out, \\ before a name takes it for no \
     group, :aux behind it uses it for setting up connections only";

/// What a typed list of devices must be, for errors.
pub(crate) const DEVICES_EXPECTED: &str =
    "all, or names of network devices such as eth0 or mlx5_0:1, separated by commas";

/// Whether this is a list of transports: well-formed, and every name one that some UCX from 1.13 to 1.22
/// has. UCX itself only warns, and goes on without what was misspelt. Names of later versions go into
/// `UCX_TLS`.
pub(crate) fn is_transport_list(text: &str) -> bool {
    let list = List::new(text);
    let is_known = |name: &&str| {
        let name = name.strip_suffix(":aux").unwrap_or(name);
        let (name, exact) = match name.strip_prefix('\\') {
            Some(name) => (name, true),
            None => (name, false),
        };
        let is_alias = || ALIASES.iter().any(|(alias, _)| *alias == name);
        let is_transport =
            OTHERS.contains(&name) || ALIASES.iter().any(|(_, members)| members.contains(&name));
        is_transport || (!exact && is_alias())
    };
    let lone_all = list.names == ["all"] && !list.negated;
    lone_all || (list.names.iter().all(is_known) && !list.names.contains(&"all"))
}

/// Whether this is a list of devices: well-formed, whatever the devices are. Names to leave out are not
/// taken: UCX before 1.21 would look for a device of the name `^eth0`.
pub(crate) fn is_device_list(text: &str) -> bool {
    let names = List::new(text).names;
    let odd = |c: char| c.is_whitespace() || c.is_control() || matches!(c, '^' | '/' | '=' | '[');
    !text.contains('^')
        && names
            .iter()
            .all(|name| !name.is_empty() && !name.contains(odd))
        && (names == ["all"] || !names.contains(&"all"))
}

/// The first device in the list that this host does not have: UCX found no transport on it, and the
/// system knows no device of the name.
pub(super) fn missing_device<'a>(
    list: &'a str,
    found: &[Resource],
    exists: impl Fn(&str) -> bool,
) -> Option<&'a str> {
    let base = |device: &str| device.split(':').next().unwrap_or(device).to_owned();
    List::new(list).names.into_iter().find(|name| {
        let is_it = |it: &Resource| it.device == *name || base(&it.device) == **name;
        *name != "all" && !found.iter().any(is_it) && !exists(&base(name))
    })
}

/// Whether the system has a network or RDMA device of this name.
pub(super) fn device_exists(name: &str) -> bool {
    is_interface(name) || Path::new("/sys/class/infiniband").join(name).exists()
}

/// Whether the system has a network interface of this name.
pub(super) fn is_interface(name: &str) -> bool {
    Path::new("/sys/class/net").join(name).exists()
}

/// Whether UCX's own keep-alive must be off: 1.13, with RDMA. It then adds a lane over ud for it, takes that
/// lane for setting up connections, and aborts the process if such an endpoint is closed before the peer has
/// answered (`ucp_request_send_state_ff`: "got REQ message"; 1.14 took the assertion out). kvferry pings by
/// itself.
pub(super) fn without_keep_alive(version: Version, tls: &str) -> bool {
    !version.at_least(1, 14)
        && env::var_os("UCX_KEEPALIVE_INTERVAL").is_none()
        && ["rc_verbs", "rc_mlx5", "dc_mlx5"]
            .iter()
            .any(|name| allows(tls, name))
        && std::fs::read_dir("/sys/class/infiniband")
            .is_ok_and(|mut devices| devices.next().is_some())
}

/// Whether a context with these lists in force uses tcp: it is allowed, and so is an interface.
pub(super) fn uses_tcp(tls: &str, net_devices: &str, is_interface: impl Fn(&str) -> bool) -> bool {
    let devices = List::new(net_devices);
    let any = devices.negated || devices.names == ["all"];
    allows(tls, "tcp") && (any || devices.names.into_iter().any(is_interface))
}

/// Whether a list of transports, as UCX has it in force, lets a transport be used for data.
fn allows(tls: &str, transport: &str) -> bool {
    let list = List::new(tls);
    let is_listed = list.names.iter().any(|name| {
        let members = || ALIASES.iter().find(|(alias, _)| alias == name);
        match name.strip_prefix('\\') {
            Some(exact) => exact == transport,
            None => {
                *name == "all"
                    || *name == transport
                    || members().is_some_and(|(_, members)| members.contains(&transport))
            }
        }
    });
    is_listed != list.negated
}

/// Length of TCP's segments unless the user wants another, in bytes. UCX's own are 8 KiB for sending
/// and 64 KiB for receiving, and cost a third of the speed of the served lane.
const SEGMENT_BYTES: u64 = 256 << 10;

/// Room for the headers of UCX and its transports in a segment, in bytes. They take 13 (measured).
const HEADER_ROOM_BYTES: u64 = 256;

/// The range of [`TcpSegments::payload`], in bytes.
const PAYLOAD_RANGE: (u64, u64) = (4 << 10, 1 << 20);

/// Lengths of TCP's segments, in bytes.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TcpSegments {
    /// What to set for sending, unless the user has.
    pub(super) set_tx: Option<u64>,
    /// What to set for receiving, unless the user has.
    pub(super) set_rx: Option<u64>,
    /// What sending has in the end; `None` if the user's words are not understood.
    tx: Option<u64>,
}

impl TcpSegments {
    pub(super) fn from_environment() -> Self {
        Self::choose(|name| env::var(name).ok())
    }

    /// The interface does not open if it sends longer segments than it receives, so a side that the
    /// user left alone follows the other.
    fn choose(variable: impl Fn(&str) -> Option<String>) -> Self {
        let of = |names: [&str; 2]| names.into_iter().find_map(&variable);
        let tx = of(["UCX_TCP_TX_SEG_SIZE", "UCX_TX_SEG_SIZE"]);
        let rx = of(["UCX_TCP_RX_SEG_SIZE", "UCX_RX_SEG_SIZE"]);
        let (user_set_tx, user_set_rx) = (tx.is_some(), rx.is_some());
        let tx = tx.map_or(Some(SEGMENT_BYTES), |text| memory_units(&text));
        let rx = rx.map_or(Some(SEGMENT_BYTES), |text| memory_units(&text));
        let set_tx = rx.filter(|_| !user_set_tx).map(|rx| rx.min(SEGMENT_BYTES));
        let set_rx = tx.filter(|_| !user_set_rx).map(|tx| tx.max(SEGMENT_BYTES));
        Self {
            set_tx,
            set_rx,
            tx: if user_set_tx { tx } else { set_tx },
        }
    }

    /// The longest message that fits one segment, in bytes.
    ///
    /// Other transports may have shorter segments. Their messages are cut by UCX and still eager, so
    /// this is a matter of speed, and TCP is where it matters.
    pub(super) fn payload(&self) -> usize {
        let (least, most) = PAYLOAD_RANGE;
        let room = self.tx.unwrap_or(0).saturating_sub(HEADER_ROOM_BYTES);
        room.clamp(least, most) as usize
    }
}

/// Reads a size as UCX writes them: `8192`, `256k`, `1MB`, `inf`.
fn memory_units(text: &str) -> Option<u64> {
    let text = text.trim().to_ascii_lowercase();
    if text == "inf" {
        return Some(u64::MAX);
    }
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let unit: u64 = match unit {
        "" | "b" => 1,
        "k" | "kb" => 1 << 10,
        "m" | "mb" => 1 << 20,
        "g" | "gb" => 1 << 30,
        "t" | "tb" => 1 << 40,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(unit)
}

/// The value of `name` in the text that UCX prints of a configuration.
pub(super) fn in_text<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix('='))
        .map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_transports_are_read_as_ucx_reads_them() {
        // (list, does it let these be used for data: tcp, rc_verbs, ud_verbs, posix)
        let table = [
            ("all", [true, true, true, true]),
            (" all ", [true, true, true, true]),
            ("tcp", [true, false, false, false]),
            ("tcp,rc", [true, true, false, false]),
            ("tcp, rc_v", [true, true, false, false]),
            ("rc_x", [false, false, false, false]),
            ("ib", [false, true, true, false]),
            ("rc,ud:aux", [false, true, false, false]),
            ("rc_verbs,ud_verbs:aux", [false, true, false, false]),
            ("\\rc_verbs", [false, true, false, false]),
            ("\\rc", [false, false, false, false]),
            ("^tcp", [false, true, true, true]),
            ("^tcp,sm", [false, true, true, false]),
            ("^ib", [true, false, false, true]),
            ("^ud:aux", [true, true, true, true]),
            ("sm,self", [false, false, false, true]),
            ("mm", [false, false, false, true]),
        ];
        for (list, expected) in table {
            let got = ["tcp", "rc_verbs", "ud_verbs", "posix"].map(|name| allows(list, name));
            assert_eq!(got, expected, "{list:?}");
            assert!(is_transport_list(list) || list == "\\rc", "{list:?}");
        }
    }

    #[test]
    fn tcp_is_used_where_it_is_allowed_and_has_an_interface() {
        let is_interface = |name: &str| name == "eth0";
        let table = [
            ("all", "all", true),
            ("all", "eth0", true),
            ("tcp", "rxe0:1,eth0", true),
            ("all", "rxe0:1", false),
            ("all", "^eth0", true),
            ("rc", "all", false),
            ("^tcp", "eth0", false),
        ];
        for (tls, devices, expected) in table {
            let got = uses_tcp(tls, devices, is_interface);
            assert_eq!(got, expected, "{tls} {devices}");
        }
    }

    #[test]
    fn misspelt_transports_are_noticed() {
        for list in [
            "", " ", ",", "tcp,", "tpc", "tcp,tpc", "^", "^tpc", "rc:auxx", "\\ib", "tcp rc",
            "all,tcp", "^all", "tcp;rc", "rc,^tcp", "TCP",
        ] {
            assert!(!is_transport_list(list), "{list:?}");
        }
    }

    #[test]
    fn devices_that_are_not_there_are_found() {
        let found: Vec<Resource> = [("tcp", "eth0"), ("rc_verbs", "rxe0:1"), ("self", "memory")]
            .map(|(transport, device)| Resource {
                transport: transport.into(),
                device: device.into(),
                auxiliary: false,
            })
            .into();
        let exists = |name: &str| name == "docker0" || name == "mlx5_0";
        let table = [
            ("all", None),
            ("eth0", None),
            ("rxe0:1,eth0", None),
            ("rxe0", None),
            ("docker0,mlx5_0:1", None),
            ("eth1", Some("eth1")),
            ("eth0, eth1", Some("eth1")),
            ("rxe1:1", Some("rxe1:1")),
        ];
        for (list, missing) in table {
            assert!(is_device_list(list), "{list:?}");
            assert_eq!(missing_device(list, &found, exists), missing, "{list:?}");
        }
        for list in [
            "",
            " ",
            "eth0,",
            "eth0 eth1",
            "^",
            "^all",
            "all,eth0",
            "a/b",
            "eth0,^eth1",
        ] {
            assert!(!is_device_list(list), "{list:?}");
        }
    }

    fn choose(variables: &[(&str, &str)]) -> TcpSegments {
        TcpSegments::choose(|name| {
            let found = variables.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn sizes_are_read_as_ucx_reads_them() {
        let table = [
            ("8192", Some(8192)),
            ("64K", Some(65_536)),
            ("256k", Some(262_144)),
            ("1m", Some(1 << 20)),
            ("1MB", Some(1 << 20)),
            ("100b", Some(100)),
            ("2g", Some(2 << 30)),
            ("inf", Some(u64::MAX)),
            ("auto", None),
            ("", None),
            ("k", None),
            ("-1", None),
            ("99999999999999999999", None),
            ("99999999999999t", None),
        ];
        for (text, bytes) in table {
            assert_eq!(memory_units(text), bytes, "{text:?}");
        }
    }

    #[test]
    fn a_users_segment_sizes_win_and_the_other_side_follows() {
        let kib = |n: u64| Some(n << 10);
        // (environment, to set for sending, to set for receiving, payload)
        type Row<'a> = (&'a [(&'a str, &'a str)], Option<u64>, Option<u64>, usize);
        let table: [Row<'_>; 9] = [
            (&[], kib(256), kib(256), 261_888),
            (&[("UCX_TCP_TX_SEG_SIZE", "512k")], None, kib(512), 524_032),
            (&[("UCX_TX_SEG_SIZE", "16k")], None, kib(256), 16_128),
            (&[("UCX_TCP_RX_SEG_SIZE", "64K")], kib(64), None, 65_280),
            (&[("UCX_RX_SEG_SIZE", "1m")], kib(256), None, 261_888),
            (
                &[("UCX_TX_SEG_SIZE", "4k"), ("UCX_RX_SEG_SIZE", "8k")],
                None,
                None,
                4096,
            ),
            (
                &[("UCX_TX_SEG_SIZE", "4k"), ("UCX_TCP_TX_SEG_SIZE", "8k")],
                None,
                kib(256),
                7936,
            ),
            (
                &[("UCX_TX_SEG_SIZE", "8m"), ("UCX_RX_SEG_SIZE", "8m")],
                None,
                None,
                1 << 20,
            ),
            (&[("UCX_TX_SEG_SIZE", "many")], None, None, 4096),
        ];
        for (environment, tx, rx, payload) in table {
            let segments = choose(environment);
            assert_eq!(
                (segments.set_tx, segments.set_rx),
                (tx, rx),
                "{environment:?}"
            );
            assert_eq!(segments.payload(), payload, "{environment:?}");
        }
    }

    #[test]
    fn a_setting_is_found_in_printed_text() {
        let text = "UCX_NET_DEVICES=all\nUCX_TLS=posix,cma\nUCX_TLS_X=no\n";
        assert_eq!(in_text(text, "UCX_TLS"), Some("posix,cma"));
        assert_eq!(in_text(text, "UCX_TL"), None);
    }
}

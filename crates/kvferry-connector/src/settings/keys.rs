//! The keys, one line of a table each.

use std::path::PathBuf;
use std::time::Duration;

use kvferry_engine::{EngineConfig, EngineError, Lane, LaneChoice};
use kvferry_wire::EngineId;

use super::reading::{Key, Kind};
use super::{Settings, UcxChoice};
use crate::lease::MAX_LEASE;
use crate::storage::{MAX_IO_THREADS, MAX_TIME, StorageSettings};

/// What the connectors are called.
pub(super) const CONNECTOR: &str = "KvferryConnector";
pub(super) const STORAGE_ONLY: &str = "KvferryStorageConnector";

pub(super) const PATH: &str = "shared_storage_path";
pub(super) const MAX_BYTES: &str = "shared_storage_max_bytes";

/// The connector that is not this one.
pub(super) fn other(connector: &str) -> &'static str {
    if connector == CONNECTOR {
        STORAGE_ONLY
    } else {
        CONNECTOR
    }
}

/// Keys of vLLM's NixlConnector, and what serves in their place.
const NIXL: &[(&str, &str)] = &[
    ("kv_lease_duration", "lease_duration"),
    ("num_threads", "workers"),
    ("kv_recompute_threshold", "recompute_threshold_tokens"),
    (
        "backends",
        "nothing: bytes move over UCX, and lane says how",
    ),
    (
        "enforce_handshake_compat",
        "nothing: engines that do not fit are always refused",
    ),
    ("engine_ttl", "nothing: a peer is forgotten when it is lost"),
    (
        "bidirectional_kv_xfer",
        "nothing: decode servers are not read",
    ),
    (
        "decoder_kv_blocks_ttl",
        "nothing: decode servers are not read",
    ),
];

/// What is said of a key of NixlConnector.
pub(super) fn of_nixl(key: &str) -> Option<String> {
    let known = NIXL.iter().find(|(name, _)| *name == key);
    known.map(|(_, ours)| format!("it is one of NixlConnector, and {ours} serves in its place"))
}

/// What is read, of either connector.
#[derive(Debug, PartialEq)]
pub(super) struct Draft {
    pub(super) settings: Settings,
    /// Without a directory until there is one.
    pub(super) storage: StorageSettings,
}

impl Default for Draft {
    fn default() -> Self {
        Self {
            settings: Settings::default(),
            storage: StorageSettings::at(PathBuf::new()),
        }
    }
}

/// Shortest time, in seconds.
const SHORTEST: f64 = 0.001;
/// What leases and the times of loads may be at most.
const WEEK: f64 = MAX_LEASE.as_secs() as f64;
/// What a wait for the disk may be at most.
const HOUR: f64 = MAX_TIME.as_secs() as f64;
const HOST: &str = "a host name or address";
const LANES: &str = "auto, native, attached or served";
const NOT_MAPPED: &str = "auto, native, attached or served (mapped is for memory that kvferry has made, and vLLM makes its own)";
const UCX: &str = "system, libucx, or a path (with a slash in it)";
const DIRECTORY: &str = "a directory's path, beginning with /";

const STORAGE_PATH: Key<Draft> = Key {
    name: PATH,
    default: "none",
    kind: Kind::Text(DIRECTORY, |it, text| {
        let path = PathBuf::from(text);
        if !path.is_absolute() {
            return Err(DIRECTORY.to_owned());
        }
        it.storage.path = path;
        Ok(())
    }),
    help: "Directory where full blocks are saved as files and looked for, shared with any number of engines",
};

const STORAGE_MAX_BYTES: Key<Draft> = Key {
    name: MAX_BYTES,
    default: "68719476736",
    kind: Kind::Number(1..=u64::MAX, |it, number| it.storage.max_bytes = number),
    help: "Most bytes of all files in that directory, of all engines and models",
};

/// Those of `KvferryConnector`.
pub(super) const KVFERRY: &[Key<Draft>] = &[
    Key {
        name: "lease_duration",
        default: "30",
        kind: Kind::Seconds(SHORTEST..=WEEK, |it, time| {
            it.settings.lease_duration = time
        }),
        help: "How long blocks are held for a consumer that is not heard of",
    },
    Key {
        name: "lease_max",
        default: "600",
        kind: Kind::Seconds(SHORTEST..=WEEK, |it, time| it.settings.lease_max = time),
        help: "How long blocks are held at most, however often a consumer renews; at least lease_duration",
    },
    Key {
        name: "side_channel_host",
        default: "127.0.0.1",
        kind: Kind::Text(HOST, |it, text| {
            it.settings.side_channel_host = host(text)?;
            Ok(())
        }),
        help: "Where the directory listens that consumers ask for this engine's description",
    },
    Key {
        name: "side_channel_port",
        default: "0",
        kind: Kind::Number(0..=u16::MAX as u64, |it, number| {
            it.settings.side_channel_port = number as u16;
        }),
        help: "Its port; 0 takes any free one",
    },
    Key {
        name: "advertise_host",
        default: "none",
        kind: Kind::Text(HOST, |it, text| {
            it.settings.advertise_host = Some(host(text)?);
            Ok(())
        }),
        help: "The host that consumers are told instead of the address that is listened at",
    },
    Key {
        name: "lane",
        default: "auto",
        kind: Kind::Text(LANES, |it, text| {
            let lane = text.parse::<LaneChoice>();
            if lane == Ok(LaneChoice::Pinned(Lane::Mapped)) {
                return Err(NOT_MAPPED.to_owned());
            }
            it.settings.lane = lane.map_err(|_| LANES.to_owned())?;
            Ok(())
        }),
        help: "How bytes move",
    },
    Key {
        name: "require_rdma",
        default: "false",
        kind: Kind::Switch(|it, on| it.settings.require_rdma = on),
        help: "Refuse peers whose blocks cannot be read one-sidedly by hardware",
    },
    Key {
        name: "devices",
        default: "none",
        kind: Kind::Text(
            "names of network devices, as UCX_NET_DEVICES takes them",
            |it, text| {
                engine_takes(|config| config.net_devices = Some(text.to_owned()))?;
                it.settings.devices = Some(text.to_owned());
                Ok(())
            },
        ),
        help: "Network devices that UCX may use",
    },
    Key {
        name: "transports",
        default: "none",
        kind: Kind::Text("names of transports, as UCX_TLS takes them", |it, text| {
            engine_takes(|config| config.transports = Some(text.to_owned()))?;
            it.settings.transports = Some(text.to_owned());
            Ok(())
        }),
        help: "Transports that UCX may use",
    },
    Key {
        name: "workers",
        default: "2",
        kind: Kind::Number(1..=64, |it, number| it.settings.workers = number as usize),
        help: "Threads of a rank that copy blocks of peers on this host",
    },
    Key {
        name: "recompute_threshold_tokens",
        default: "2",
        kind: Kind::Number(0..=u32::MAX as u64, |it, number| {
            it.settings.recompute_threshold_tokens = number as u32;
        }),
        help: "Fewer remote tokens than this are computed here; less than 2 counts as 2",
    },
    Key {
        name: "max_concurrent_loads",
        default: "32",
        kind: Kind::Number(1..=u32::MAX as u64, |it, number| {
            it.settings.max_concurrent_loads = number as usize;
        }),
        help: "Loads that a rank runs at the same time",
    },
    Key {
        name: "read_timeout",
        default: "10",
        kind: Kind::Seconds(SHORTEST..=WEEK, |it, time| it.settings.read_timeout = time),
        help: "Time for the blocks of a load to arrive",
    },
    Key {
        name: "verify",
        default: "false",
        kind: Kind::Switch(|it, on| it.settings.verify = on),
        help: "Compare checksums of the blocks that were read with the producer's before they count; host memory only",
    },
    Key {
        name: "connect_timeout",
        default: "5",
        kind: Kind::Seconds(SHORTEST..=WEEK, |it, time| {
            it.settings.connect_timeout = time
        }),
        help: "Time for finding and greeting a peer",
    },
    Key {
        name: "confirm_timeout",
        default: "5",
        kind: Kind::Seconds(SHORTEST..=WEEK, |it, time| {
            it.settings.confirm_timeout = time
        }),
        help: "Time for a producer to confirm that the blocks were held; more than its lease_duration is of no use",
    },
    Key {
        name: "shutdown_timeout",
        default: "3",
        kind: Kind::Seconds(0.0..=HOUR, |it, time| it.settings.shutdown_timeout = time),
        help: "How long a worker that is ended waits for leases to end by themselves; vLLM ends workers that take \
               longer than it allows (--shutdown-timeout)",
    },
    STORAGE_PATH,
    STORAGE_MAX_BYTES,
    Key {
        name: "ucx",
        default: "none",
        kind: Kind::Text(UCX, |it, text| {
            it.settings.ucx = Some(match text {
                "system" => UcxChoice::System,
                "libucx" => UcxChoice::Libucx,
                path if path.contains('/') => UcxChoice::Path(PathBuf::from(path)),
                _ => return Err(UCX.to_owned()),
            });
            Ok(())
        }),
        help: "Which UCX is loaded",
    },
];

/// Those of `KvferryStorageConnector`.
pub(super) const STORAGE: &[Key<Draft>] = &[
    STORAGE_PATH,
    STORAGE_MAX_BYTES,
    Key {
        name: "shared_storage_io_threads",
        default: "4",
        kind: Kind::Number(1..=MAX_IO_THREADS as u64, |it, number| {
            it.storage.io_threads = number as usize;
        }),
        help: "Threads of a rank that read and write files; as many blocks are loaded at a time",
    },
    Key {
        name: "shared_storage_max_pending_saves",
        default: "4096",
        kind: Kind::Number(1..=u32::MAX as u64, |it, number| {
            it.storage.max_pending_saves = number as usize;
        }),
        help: "Most blocks of a rank that wait to be saved; further ones are not saved",
    },
    Key {
        name: "shared_storage_lookup_timeout",
        default: "0.5",
        kind: Kind::Seconds(SHORTEST..=HOUR, |it, time| {
            it.storage.lookup_timeout_ms = millis(time);
        }),
        help: "How long a request waits to hear which of its blocks are on disk",
    },
    Key {
        name: "shared_storage_io_timeout",
        default: "30",
        kind: Kind::Seconds(SHORTEST..=HOUR, |it, time| {
            it.storage.io_timeout_ms = millis(time)
        }),
        help: "How long a load or a save may take",
    },
];

/// To the nearest millisecond.
fn millis(time: Duration) -> u64 {
    // At most an hour.
    ((time.as_nanos() + 500_000) / 1_000_000) as u64
}

fn host(text: &str) -> Result<String, String> {
    // Names, and addresses of both families, in brackets or not, with a zone.
    let odd = |c: char| !(c.is_alphanumeric() || "-._:%[]".contains(c));
    if text.is_empty() || text.len() > 255 || text.contains(odd) {
        return Err(HOST.to_owned());
    }
    Ok(text.to_owned())
}

/// Whether the engine would take a value, or what it expects.
fn engine_takes(change: impl FnOnce(&mut EngineConfig)) -> Result<(), String> {
    let id = EngineId::new(CONNECTOR).map_err(|error| error.to_string())?;
    let mut config = EngineConfig::new(id);
    change(&mut config);
    config.validate().map_err(|error| match error {
        EngineError::Config { expected, .. } => expected.to_owned(),
        other => other.to_string(),
    })
}

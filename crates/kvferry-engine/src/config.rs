//! How an engine behaves: every knob, its unit, its default.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use kvferry_wire::{EngineId, Instance, Rank};

use crate::error::EngineError;
use crate::same_host::ShareSocket;
use crate::ucx::{
    DEVICES_EXPECTED, TRANSPORTS_EXPECTED, UcxOptions, is_device_list, is_transport_list,
};

/// An engine's configuration. Made by [`EngineConfig::new`] and changed field by field.
///
/// ```
/// use std::time::Duration;
/// use kvferry_engine::EngineConfig;
/// use kvferry_engine::wire::EngineId;
///
/// let mut config = EngineConfig::new(EngineId::new("prefill-0")?);
/// config.transfer_timeout = Duration::from_secs(5);
/// config.compatibility.insert("dtype".into(), "bfloat16".into());
/// config.validate()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct EngineConfig {
    /// The engine's id; stable over restarts.
    pub engine_id: EngineId,
    /// The worker's place in its engine.
    pub rank: Rank,
    /// The scheduler half's instance, where there is one; published in the description.
    pub instance: Option<Instance>,
    /// How long the progress thread polls after the last event before it sleeps. 0 to 1 s, default
    /// 20 microseconds.
    pub spin: Duration,
    /// Build a data context even where its GETs are emulated by active messages. For tests and
    /// people who insist; default false.
    pub allow_emulation: bool,
    /// Connect only to peers whose blocks come by a real GET (lane native, not emulated), and refuse
    /// others with [`ConnectError::NoRdma`](crate::ConnectError::NoRdma), instead of serving them a
    /// hundred times slower. Default false.
    pub require_rdma: bool,
    /// Which transports UCX may use, in the syntax of its variable `UCX_TLS`, such as `rc,tcp` or `^sm`.
    /// `None`, the default, leaves the variable in force, or UCX's default, which is all.
    pub transports: Option<String>,
    /// Which network devices UCX may use, by the names of its variable `UCX_NET_DEVICES`, such as `eth0`
    /// or `mlx5_0:1,mlx5_1:1`. `None`, the default, leaves the variable in force, or UCX's default,
    /// which is all.
    pub net_devices: Option<String>,
    /// Which UCX the process loads, at its first engine: the file `libucp.so.0`, or a directory with it.
    /// `None`, the default, leaves it to the variable `KVFERRY_UCX_LIBRARY`, or else to the dynamic loader.
    pub ucx_library: Option<PathBuf>,
    /// Quiet time after which a peer is pinged. Default 500 ms.
    pub ping_interval: Duration,
    /// Silence after which a peer is suspect: its transfers fail as stalled. Default 2 s.
    pub suspect_after: Duration,
    /// Further silence after which a suspect peer is dead. Default 10 s.
    pub dead_after: Duration,
    /// Time for a peer to let go of a region that is given up here; then it is disconnected. Longer
    /// than `suspect_after`, so that a hiccup costs nothing, and shorter than the time after which a
    /// silent peer is dead anyway. Default 5 s.
    pub withdraw_timeout: Duration,
    /// Time for a greeting to be answered. Default 10 s.
    pub connect_timeout: Duration,
    /// Time without another attempt after an attempt to connect to a worker has failed; doubled with
    /// each failure in a row, up to a quarter shorter at random. 0 for none. Default 100 ms.
    pub reconnect_backoff_min: Duration,
    /// The longest such time. At least `reconnect_backoff_min`, to 1 day. Default 5 s.
    pub reconnect_backoff_max: Duration,
    /// Deadline of a transfer that names none. Default 30 s.
    pub transfer_timeout: Duration,
    /// Time that each step of ending what is in flight gets before the next one: waiting, closing the
    /// endpoint, destroying the worker. Default 1 s.
    pub escalation_step: Duration,
    /// Time for the progress thread to take a registration or the like. Default 10 s.
    pub command_timeout: Duration,
    /// Segments in flight to one peer, served lane and messages together. 1 to 1,024, default 8.
    pub send_window: usize,
    /// Operations in flight from one peer: GETs, or batches of copies. 1 to 4,096, default 64.
    pub read_window: usize,
    /// Bytes in flight from one peer. An operation that is larger goes alone. 4,096 to 1 TiB, default
    /// 32 MiB.
    pub read_window_bytes: u64,
    /// Threads that copy from memory of peers on this host, started when the first such peer is read.
    /// 1 to 64, default 2.
    pub copy_threads: usize,
    /// Whether and where pools are shared with engines of the same user on this host.
    pub share_socket: ShareSocket,
    /// Longest range that is registered with UCX at once, in bytes: longer regions are registered in
    /// chunks of this length, for devices that limit a registration. At least a page and a multiple
    /// of the page size. Default `None`: whatever limit the fabric knows of.
    pub max_registration_bytes: Option<u64>,
    /// Strings that both sides must agree on, such as model and cache layout. A greeting between
    /// engines whose values for one name differ is refused; names that only one side has are not
    /// compared.
    pub compatibility: BTreeMap<String, String>,
}

impl EngineConfig {
    /// The defaults, for an engine of this id.
    #[must_use]
    pub fn new(engine_id: EngineId) -> Self {
        Self {
            engine_id,
            rank: Rank::default(),
            instance: None,
            spin: Duration::from_micros(20),
            allow_emulation: false,
            require_rdma: false,
            transports: None,
            net_devices: None,
            ucx_library: None,
            ping_interval: Duration::from_millis(500),
            suspect_after: Duration::from_secs(2),
            dead_after: Duration::from_secs(10),
            withdraw_timeout: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(10),
            reconnect_backoff_min: Duration::from_millis(100),
            reconnect_backoff_max: Duration::from_secs(5),
            transfer_timeout: Duration::from_secs(30),
            escalation_step: Duration::from_secs(1),
            command_timeout: Duration::from_secs(10),
            send_window: 8,
            read_window: 64,
            read_window_bytes: 32 << 20,
            copy_threads: 2,
            share_socket: ShareSocket::default(),
            max_registration_bytes: None,
            compatibility: BTreeMap::new(),
        }
    }

    /// Checks every range.
    ///
    /// # Errors
    /// [`EngineError::Config`] naming the first field that is out of range.
    pub fn validate(&self) -> Result<(), EngineError> {
        let bad = |field, value: String, expected| EngineError::Config {
            field,
            value,
            expected,
        };
        if self.spin > Duration::from_secs(1) {
            return Err(bad("spin", format!("{:?}", self.spin), "at most 1 s"));
        }
        for (field, value) in [
            ("ping_interval", self.ping_interval),
            ("suspect_after", self.suspect_after),
            ("dead_after", self.dead_after),
            ("withdraw_timeout", self.withdraw_timeout),
            ("connect_timeout", self.connect_timeout),
            ("transfer_timeout", self.transfer_timeout),
            ("escalation_step", self.escalation_step),
            ("command_timeout", self.command_timeout),
        ] {
            if value < Duration::from_millis(1) || value > Duration::from_secs(86_400) {
                return Err(bad(field, format!("{value:?}"), "1 ms to 1 day"));
            }
        }
        if self.suspect_after <= self.ping_interval {
            return Err(bad(
                "suspect_after",
                format!("{:?}", self.suspect_after),
                "more than ping_interval",
            ));
        }
        if let Some(list) = &self.transports
            && !is_transport_list(list)
        {
            return Err(bad("transports", format!("{list:?}"), TRANSPORTS_EXPECTED));
        }
        if let Some(list) = &self.net_devices
            && !is_device_list(list)
        {
            return Err(bad("net_devices", format!("{list:?}"), DEVICES_EXPECTED));
        }
        let (min, max) = (self.reconnect_backoff_min, self.reconnect_backoff_max);
        if max < min || max > Duration::from_secs(86_400) {
            return Err(bad(
                "reconnect_backoff_max",
                format!("{max:?}"),
                "reconnect_backoff_min to 1 day",
            ));
        }
        if !(1..=1024).contains(&self.send_window) {
            return Err(bad(
                "send_window",
                self.send_window.to_string(),
                "1 to 1024",
            ));
        }
        if !(1..=4096).contains(&self.read_window) {
            return Err(bad(
                "read_window",
                self.read_window.to_string(),
                "1 to 4096",
            ));
        }
        if !(4096..=1 << 40).contains(&self.read_window_bytes) {
            return Err(bad(
                "read_window_bytes",
                self.read_window_bytes.to_string(),
                "4096 to 1 TiB",
            ));
        }
        if !(1..=64).contains(&self.copy_threads) {
            return Err(bad(
                "copy_threads",
                self.copy_threads.to_string(),
                "1 to 64",
            ));
        }
        let page = rustix::param::page_size() as u64;
        if let Some(bytes) = self.max_registration_bytes
            && (bytes == 0 || bytes % page != 0)
        {
            return Err(bad(
                "max_registration_bytes",
                bytes.to_string(),
                "at least a page, in whole pages",
            ));
        }
        self.share_socket.validate()
    }
}

impl From<&EngineConfig> for UcxOptions {
    fn from(config: &EngineConfig) -> Self {
        Self {
            allow_emulation: config.allow_emulation,
            transports: config.transports.clone(),
            net_devices: config.net_devices.clone(),
            library: config.ucx_library.clone(),
        }
    }
}

/// The first name for which both sides have a value, and another one.
pub(crate) fn incompatibility(
    ours: &BTreeMap<String, String>,
    theirs: &BTreeMap<String, String>,
) -> Option<String> {
    ours.iter().find_map(|(name, value)| {
        let other = theirs.get(name).filter(|other| *other != value)?;
        Some(format!(
            "the engines differ in {name}: {value:?} here, {other:?} at the peer"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_out_of_range_are_named() {
        let good = EngineConfig::new(EngineId::new("e").unwrap());
        good.validate().unwrap();
        let mut bad = good.clone();
        bad.send_window = 0;
        assert_eq!(
            bad.validate().unwrap_err().to_string(),
            "configuration: send_window is 0, expected 1 to 1024"
        );
        let mut bad = good.clone();
        bad.suspect_after = bad.ping_interval;
        assert!(
            bad.validate()
                .unwrap_err()
                .to_string()
                .contains("suspect_after")
        );
        let mut bad = good.clone();
        bad.transports = Some("tcp,tpc".into());
        let text = bad.validate().unwrap_err().to_string();
        assert!(
            text.starts_with(
                "configuration: transports is \"tcp,tpc\", expected names of UCX transports"
            ),
            "{text}"
        );
        let mut bad = good.clone();
        bad.net_devices = Some("eth0 eth1".into());
        let text = bad.validate().unwrap_err().to_string();
        assert!(
            text.contains("net_devices is \"eth0 eth1\", expected all, or names"),
            "{text}"
        );
        let mut fine = good.clone();
        fine.transports = Some("^sm".into());
        fine.net_devices = Some("mlx5_0:1,eth0".into());
        fine.validate().unwrap();
        for bytes in [0, 1, 4095, (1 << 20) + 1] {
            let mut bad = good.clone();
            bad.max_registration_bytes = Some(bytes);
            let text = bad.validate().unwrap_err().to_string();
            assert!(text.contains("max_registration_bytes is"), "{text}");
        }
        let mut bad = good;
        bad.transfer_timeout = Duration::ZERO;
        assert!(
            bad.validate()
                .unwrap_err()
                .to_string()
                .contains("transfer_timeout is 0ns")
        );
    }
}

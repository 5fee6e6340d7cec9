//! What kvferry sets in UCX's configuration, and what the user has set.
//!
//! A user's setting always wins. Pure, but for reading the environment.

use std::env;

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

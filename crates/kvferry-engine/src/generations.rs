//! What engines on different versions of UCX cannot do with one another.
//!
//! UCX does not check versions, and 1.13 answers what it misreads by ending the process; so kvferry
//! compares descriptions before UCX sees anything of the peer. Measured with the releases 1.13.1 and
//! 1.17.0 to 1.22.0.

use kvferry_wire::UcxVersion;

/// The first version with its own form of loopback addresses.
const OTHER_LOOPBACK: (u32, u32) = (1, 22);

/// Whether a UCX of version `ours` reads the packed keys of version `theirs`.
///
/// The packed format changed after 1.13: later versions do not read 1.13's, while 1.13 reads theirs
/// (measured with 1.13.1 and 1.22.0 in both directions).
pub(crate) fn can_unpack(ours: UcxVersion, theirs: UcxVersion) -> bool {
    let old = |version: UcxVersion| (version.major, version.minor) <= (1, 13);
    old(ours) || !old(theirs)
}

/// Why no endpoint to this peer is made, where UCX would misread its address.
///
/// From 1.22 on, a loopback device's address has another form: versions before take it for another
/// host's, or end their process over the answer ("invalid wireup message"). Only engines on one host
/// try loopback at all. `loopback`: such a device is among ours.
pub(crate) fn misread(
    ours: Option<UcxVersion>,
    theirs: Option<UcxVersion>,
    same_host: bool,
    loopback: bool,
) -> Option<String> {
    let (ours, theirs) = (ours?, theirs?);
    let is_other = |version: UcxVersion| (version.major, version.minor) >= OTHER_LOOPBACK;
    if !loopback || !same_host || is_other(ours) == is_other(theirs) {
        return None;
    }
    Some(format!(
        "UCX {ours} here and UCX {theirs} there misread each other's addresses of the loopback device; \
         leave it out on both sides (net_devices or UCX_NET_DEVICES, such as eth0), or use one version \
         on this host"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn version(minor: u32) -> UcxVersion {
        UcxVersion {
            major: 1,
            minor,
            release: 0,
        }
    }

    #[test]
    fn keys_of_the_oldest_are_read_by_the_oldest_only() {
        let both = [13, 14, 22].map(|ours| [13, 14, 22].map(|theirs| (ours, theirs)));
        for (ours, theirs) in both.into_iter().flatten() {
            let reads = can_unpack(version(ours), version(theirs));
            assert_eq!(reads, ours == 13 || theirs != 13, "{ours} reads {theirs}");
        }
    }

    #[test]
    fn only_a_loopback_device_on_one_host_is_misread_across_the_change() {
        for (ours, theirs, same_host, loopback, refused) in [
            (13, 22, true, true, true),
            (22, 13, true, true, true),
            (21, 22, true, true, true),
            (22, 19, true, true, true),
            (13, 21, true, true, false),
            (22, 22, true, true, false),
            (22, 23, true, true, false),
            (13, 22, false, true, false),
            (13, 22, true, false, false),
        ] {
            let reason = misread(
                Some(version(ours)),
                Some(version(theirs)),
                same_host,
                loopback,
            );
            assert_eq!(reason.is_some(), refused, "{ours} to {theirs}");
            if let Some(reason) = reason {
                let versions = [
                    format!("UCX 1.{ours}.0 here"),
                    format!("UCX 1.{theirs}.0 there"),
                ];
                assert!(versions.iter().all(|it| reason.contains(it)), "{reason}");
            }
        }
        // The in-process fabric has none.
        assert_eq!(misread(None, Some(version(13)), true, true), None);
        assert_eq!(misread(Some(version(22)), None, true, true), None);
    }
}

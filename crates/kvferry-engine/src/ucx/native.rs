//! Which transports have a real GET, and what follows for the data context. Pure.
//!
//! A GET is *real* if it moves every byte without the peer's processor. UCX emulates it by active
//! messages wherever it has no such transport, says so nowhere, and answers with addresses taken from
//! the wire. So the data context is given no transport that it could emulate over, and what an
//! endpoint got is looked at again.
//!
//! Not responsible for asking UCX: see `transports`.

use super::transports::{Lane, Resource, joined, names};
use crate::fabric::NativeReads;

/// Transports that read host memory by themselves and report dead peers.
///
/// Taken from the capabilities that UCX's sources state (`cap.flags` in `src/uct`, 1.13.1 and 1.22.0):
/// GET with and without copies (`get_bcopy`, `get_zcopy`), which UCX wants for one-sided lanes, and
/// `ERRHANDLE_PEER_FAILURE`, without which a dead peer's operations might never end. Left out:
/// `gga_mlx5`, `ugni_rdma` and `rocm_ipc`, which do not report dead peers; `cma`, `knem`, `xpmem`,
/// `posix` and `sysv`, which UCX does not use for GETs where dead peers are to be reported; `srd`, which
/// has a real GET on some of Amazon's cards only, and an endpoint's description does not say which;
/// `ud`, which has messages only.
const REAL: [&str; 3] = ["dc_mlx5", "rc_mlx5", "rc_verbs"];

/// Transports over which connections of the others are set up. They carry no data.
const AUXILIARY: [&str; 2] = ["ud_mlx5", "ud_verbs"];

/// What UCX needs in a context to know GPU memory and to move it within a host. None carries messages,
/// so nothing can be emulated over them, and for the same reason UCX makes no endpoint with them alone.
const GPU: [&str; 4] = ["cuda_copy", "cuda_ipc", "gdr_copy", "rocm_copy"];

/// What the data context is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum DataPlan {
    /// These transports and no others, as `UCX_TLS` lists them.
    Real(String),
    /// The user's transports. Whether a GET is real depends on the endpoint.
    Anything,
    /// There is none, for this reason.
    None(String),
}

impl DataPlan {
    /// Plans from what UCX found in a context with the user's transports and devices.
    pub(super) fn new(found: &[Resource], tls: &str, allow_emulation: bool) -> Self {
        if allow_emulation {
            return Self::Anything;
        }
        match real_transports(found, tls) {
            Ok(list) => Self::Real(list),
            Err(reason) => Self::None(reason),
        }
    }

    /// What this means for reads, in general.
    pub(super) fn reads(&self, found: &[Resource], tls: &str) -> NativeReads {
        match self {
            Self::Real(_) => NativeReads::Real,
            Self::Anything if real_transports(found, tls).is_ok() => NativeReads::Real,
            Self::Anything => NativeReads::Emulated,
            Self::None(reason) => NativeReads::Unavailable(reason.clone()),
        }
    }
}

/// The list of transports with which nothing can be emulated, or why there is none.
fn real_transports(found: &[Resource], tls: &str) -> Result<String, String> {
    let is_found = |name: &&str| found.iter().any(|it| it.is_primary(name));
    let real: Vec<&str> = REAL.into_iter().filter(is_found).collect();
    // Found as such or for set-up only; a user who shuts both out does not want it.
    let set_up: Vec<String> = AUXILIARY
        .iter()
        .filter(|name| found.iter().any(|it| it.transport == **name))
        .map(|name| format!("{name}:aux"))
        .collect();
    let here = || format!("{} (UCX_TLS={tls})", summary(found));
    if real.is_empty() {
        let gpu = if is_found(&"cuda_ipc") || is_found(&"rocm_ipc") {
            "; UCX makes no endpoint of transports for GPU memory alone"
        } else {
            ""
        };
        return Err(format!(
            "no transport with a real GET: UCX found {}; {} over an RDMA device would do{gpu}; emulated \
             reads need allow_emulation",
            here(),
            REAL.join(", ")
        ));
    }
    // dc connects to a device; rc connects pairs, and asks the other side over something else.
    let usable: Vec<&str> = real
        .iter()
        .copied()
        .filter(|name| !set_up.is_empty() || !name.starts_with("rc_"))
        .collect();
    if usable.is_empty() {
        return Err(format!(
            "{} needs {} to set up its connections: UCX found {}; allow ud, or name rc without the rest",
            real.join(", "),
            AUXILIARY.join(" or "),
            here()
        ));
    }
    let mut list: Vec<String> = usable.into_iter().map(str::to_owned).collect();
    list.extend(set_up);
    list.extend(
        GPU.into_iter()
            .filter(|name| is_found(name))
            .map(str::to_owned),
    );
    Ok(list.join(","))
}

/// What UCX found, for people.
pub(super) fn summary(found: &[Resource]) -> String {
    let names = found.iter().filter(|it| !it.auxiliary);
    joined(
        names
            .map(|it| format!("{}/{}", it.transport, it.device))
            .collect(),
    )
}

/// Whether an endpoint of the data context, with these lanes, has a real GET.
///
/// 1.13 says which lanes are for one-sided operations. Later versions do not, but their lanes are chosen
/// for them, the context having no other feature.
pub(super) fn has_real_get(lanes: &[Lane]) -> bool {
    let is_real = |lane: &Lane| {
        let transport = lane.name.split('/').next().unwrap_or("");
        REAL.contains(&transport) && lane.one_sided != Some(false)
    };
    lanes.iter().any(is_real)
}

/// What an endpoint with these lanes can do, in a context of this plan.
pub(super) fn endpoint_reads(plan: &DataPlan, lanes: &[Lane]) -> NativeReads {
    match plan {
        _ if has_real_get(lanes) => NativeReads::Real,
        DataPlan::Anything => NativeReads::Emulated,
        DataPlan::Real(_) => NativeReads::Unavailable(format!(
            "UCX would emulate reads from this peer: its data endpoint is over {}, which has no real GET",
            names(lanes)
        )),
        DataPlan::None(reason) => NativeReads::Unavailable(reason.clone()),
    }
}

/// Whether a packed key was made where no device had registered the memory. UCX packs it all the same.
///
/// Keys of 1.13 to 1.22 begin with a set of memory domains in 64 bits and a byte for the kind of memory; then
/// comes for each domain the length of its own key, and the key. Domains without a device, such as tcp's,
/// have empty ones.
pub(super) fn is_for_no_device(packed: &[u8]) -> bool {
    let Some((domains, rest)) = packed.split_first_chunk::<8>() else {
        return true;
    };
    let domains = u64::from_ne_bytes(*domains).count_ones() as usize;
    // Empty keys are their length only, so up to the first other one it is a row of lengths.
    let lengths = rest.iter().skip(1).take(domains);
    lengths.into_iter().all(|length| *length == 0)
}

/// Whether it is a transport of an RDMA device, for data or for setting up.
pub(super) fn is_rdma(found: &Resource) -> bool {
    const FAMILIES: [&str; 4] = ["rc_", "dc_", "ud_", "srd"];
    FAMILIES
        .iter()
        .any(|family| found.transport.starts_with(family))
}

/// Whether messages can leave the host over what was found, if RDMA is among it. `None` if it is not, and
/// UCX is to be asked.
pub(super) fn reaches_over_rdma(found: &[Resource]) -> Option<bool> {
    found.iter().find(|it| is_rdma(it))?;
    let primary = |family: &str| {
        let mut found = found.iter().filter(|it| !it.auxiliary);
        found.any(|it| it.transport.starts_with(family))
    };
    let set_up = found
        .iter()
        .any(|it| AUXILIARY.contains(&it.transport.as_str()));
    let alone = ["tcp", "ud_", "dc_", "srd"].into_iter().any(primary);
    Some(alone || (primary("rc_") && set_up))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Resources from words: `transport/device`, with `:aux` behind it if UCX marks it so.
    fn found(words: &str) -> Vec<Resource> {
        words
            .split_whitespace()
            .map(|word| {
                let (name, auxiliary) = match word.strip_suffix(":aux") {
                    Some(name) => (name, true),
                    None => (word, false),
                };
                let (transport, device) = name.split_once('/').unwrap();
                Resource {
                    transport: transport.into(),
                    device: device.into(),
                    auxiliary,
                }
            })
            .collect()
    }

    const HOST: &str = "tcp/lo tcp/eth0 self/memory posix/memory sysv/memory cma/memory";

    #[test]
    fn the_data_context_gets_what_cannot_be_emulated() {
        let with = |more: &str| format!("{HOST} {more}");
        // What UCX found, and the data context's list or words of the refusal.
        let table: [(String, Result<&str, &[&str]>); 11] = [
            (
                with(""),
                Err(&[
                    "found tcp/lo,tcp/eth0,self/memory,posix/memory,sysv/memory,cma/memory (UCX_TLS=x)",
                    "dc_mlx5, rc_mlx5, rc_verbs over an RDMA device",
                    "allow_emulation",
                ]),
            ),
            (
                with("rc_verbs/rxe0:1 ud_verbs/rxe0:1"),
                Ok("rc_verbs,ud_verbs:aux"),
            ),
            (
                "rc_verbs/rxe0:1 ud_verbs/rxe0:1:aux".into(),
                Ok("rc_verbs,ud_verbs:aux"),
            ),
            (
                with(
                    "dc_mlx5/mlx5_0:1 rc_verbs/mlx5_0:1 rc_mlx5/mlx5_0:1 ud_verbs/mlx5_0:1 \
                     ud_mlx5/mlx5_0:1 dc_mlx5/mlx5_1:1 rc_mlx5/mlx5_1:1",
                ),
                Ok("dc_mlx5,rc_mlx5,rc_verbs,ud_mlx5:aux,ud_verbs:aux"),
            ),
            ("dc_mlx5/mlx5_0:1".into(), Ok("dc_mlx5")),
            ("dc_mlx5/mlx5_0:1 rc_mlx5/mlx5_0:1".into(), Ok("dc_mlx5")),
            (
                with("rc_verbs/rxe0:1"),
                Err(&[
                    "rc_verbs needs ud_mlx5 or ud_verbs to set up",
                    "rc_verbs/rxe0:1",
                ]),
            ),
            (
                with("ud_verbs/rxe0:1"),
                Err(&["no transport with a real GET", "ud_verbs/rxe0:1"]),
            ),
            (
                with("rc_verbs/rxe0:1:aux ud_verbs/rxe0:1:aux"),
                Err(&["no transport with a real GET"]),
            ),
            (
                with("cuda_copy/cuda cuda_ipc/cuda"),
                Err(&["for GPU memory alone", "cuda_ipc/cuda"]),
            ),
            (
                with(
                    "rc_mlx5/mlx5_0:1 ud_mlx5/mlx5_0:1 cuda_copy/cuda cuda_ipc/cuda gdr_copy/cuda",
                ),
                Ok("rc_mlx5,ud_mlx5:aux,cuda_copy,cuda_ipc,gdr_copy"),
            ),
        ];
        for (words, expected) in table {
            let found = found(&words);
            let plan = DataPlan::new(&found, "x", false);
            match (expected, &plan) {
                (Ok(list), DataPlan::Real(got)) => {
                    assert_eq!(got, list, "{words}");
                    for emulating in ["tcp", "self", "posix", "sysv", "cma", "ud_verbs"] {
                        let names = got.split(',').any(|name| name == emulating);
                        assert!(!names, "{words}: {emulating}");
                    }
                    assert_eq!(plan.reads(&found, "x"), NativeReads::Real, "{words}");
                }
                (Err(parts), DataPlan::None(reason)) => {
                    for part in parts {
                        assert!(reason.contains(part), "{words}: {reason}");
                    }
                    let reads = plan.reads(&found, "x");
                    assert_eq!(reads, NativeReads::Unavailable(reason.clone()), "{words}");
                }
                (_, plan) => panic!("{words}: {plan:?}"),
            }
            let emulating = DataPlan::new(&found, "x", true);
            assert_eq!(emulating, DataPlan::Anything, "{words}");
            let reads = match expected {
                Ok(_) => NativeReads::Real,
                Err(_) => NativeReads::Emulated,
            };
            assert_eq!(emulating.reads(&found, "x"), reads, "{words}");
        }
    }

    #[test]
    fn keys_that_no_device_made_are_told() {
        // As 1.13 packs them: none, tcp's, and one of rc behind tcp's.
        assert!(is_for_no_device(&[0; 9]));
        assert!(is_for_no_device(&[1, 0, 0, 0, 0, 0, 0, 0, 0, 0]));
        assert!(!is_for_no_device(&[
            3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8, 1, 2, 3, 4, 5, 6, 7, 8
        ]));
        assert!(!is_for_no_device(&[
            8, 0, 0, 0, 0, 0, 0, 0, 0, 8, 1, 2, 3, 4, 5, 6, 7, 8
        ]));
        // As 1.22 packs tcp's, with a system device behind it.
        assert!(is_for_no_device(&[1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255]));
        assert!(is_for_no_device(&[8, 0, 0]));
        assert!(is_for_no_device(&[]));
    }

    #[test]
    fn what_reaches_other_hosts_over_rdma() {
        let table = [
            (HOST, None),
            ("self/memory posix/memory", None),
            ("rc_verbs/rxe0:1 ud_verbs/rxe0:1:aux", Some(true)),
            ("rc_verbs/rxe0:1 self/memory", Some(false)),
            ("rc_verbs/rxe0:1 tcp/eth0", Some(true)),
            ("ud_verbs/rxe0:1", Some(true)),
            ("ud_verbs/rxe0:1:aux posix/memory", Some(false)),
            ("dc_mlx5/mlx5_0:1", Some(true)),
        ];
        for (words, expected) in table {
            assert_eq!(reaches_over_rdma(&found(words)), expected, "{words}");
        }
    }

    #[test]
    fn an_endpoint_has_a_real_get_if_a_lane_of_it_has() {
        let real = DataPlan::Real("rc_verbs,ud_verbs:aux".into());
        let none = DataPlan::None("nothing".into());
        // The endpoint's lanes, and whether its GETs are real.
        let table = [
            ("rc_verbs/rxe0:1", true),
            ("rc_mlx5/mlx5_0:1,rc_mlx5/mlx5_1:1", true),
            ("dc_mlx5/mlx5_0:1,cuda_ipc/cuda", true),
            ("tcp/eth0,rc_verbs/rxe0:1", true),
            ("tcp/lo", false),
            ("ud_verbs/rxe0:1", false),
            ("tcp/rc_verbs", false),
            ("self/memory", false),
            ("posix/memory,cma/memory", false),
            ("cuda_ipc/cuda", false),
            ("unknown", false),
            ("", false),
        ];
        for (lanes, is_real) in table {
            let lanes: Vec<Lane> = lanes
                .split(',')
                .map(|name| Lane {
                    name: name.to_owned(),
                    one_sided: None,
                })
                .collect();
            assert_eq!(has_real_get(&lanes), is_real, "{lanes:?}");
            let reads = |plan| endpoint_reads(plan, &lanes);
            if is_real {
                assert_eq!(reads(&real), NativeReads::Real);
                assert_eq!(reads(&DataPlan::Anything), NativeReads::Real);
                continue;
            }
            assert_eq!(reads(&DataPlan::Anything), NativeReads::Emulated);
            assert_eq!(reads(&none), NativeReads::Unavailable("nothing".into()));
            let NativeReads::Unavailable(reason) = reads(&real) else {
                panic!("{lanes:?} is taken for real");
            };
            assert!(reason.contains("UCX would emulate"), "{reason}");
        }
    }
}

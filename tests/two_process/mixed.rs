//! Two generations of UCX that talk to each other: the system's, which this run has loaded, and the
//! newest that `scripts/fetch-ucx` has brought.

use std::path::PathBuf;

use kvferry_tests::harness::{Case, Child, Environment};
use kvferry_tests::roles::{Order, Published, Reader, Settings};
use serde::Deserialize;

use super::support::{connect, obey, publisher, reads_all};

const BLOCKS: u32 = 64;
const BYTES: u64 = 4096;

/// What a child says of the UCX that it loaded.
#[derive(Debug, Deserialize)]
struct Says {
    ucx: (u32, u32),
}

/// The other UCX's prefix: named by `scripts/test`, or beside this build.
fn newest() -> Option<PathBuf> {
    let is_whole = |prefix: &PathBuf| prefix.join("lib/libucp.so.0").exists();
    if let Some(prefix) = std::env::var_os("KVFERRY_NEWEST_UCX") {
        return Some(PathBuf::from(prefix)).filter(is_whole);
    }
    let program = std::env::current_exe().ok()?;
    // target/debug/deps/program
    let target = program.ancestors().nth(3)?;
    let entries = std::fs::read_dir(target).ok()?;
    let prefixes = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let named = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| name.starts_with("ucx-"))
    };
    prefixes.filter(named).filter(is_whole).max()
}

/// Why there are no two generations here.
fn skip() -> Option<String> {
    let Some(newest) = newest() else {
        return Some("no second UCX: run scripts/fetch-ucx".to_owned());
    };
    let version = features_version();
    let name = newest
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let ours = format!("ucx-{}.{}.", version.0, version.1);
    if name.starts_with(&ours) {
        return Some(format!("this run is with {name} itself"));
    }
    None
}

/// Why they cannot talk to one another here.
fn skip_talk() -> Option<String> {
    let no_device = || "there is no network device but loopback".to_owned();
    skip().or_else(|| device().is_none().then(no_device))
}

/// A network device that is not loopback, over which two generations understand one another.
fn device() -> Option<String> {
    let devices = std::fs::read_dir("/sys/class/net").ok()?;
    let up = devices.filter_map(|device| {
        let path = device.ok()?.path();
        let state = std::fs::read_to_string(path.join("operstate")).ok()?;
        let name = path.file_name()?.to_str()?.to_owned();
        (state.trim() == "up").then_some(name)
    });
    up.min()
}

fn features_version() -> (u32, u32) {
    let version = ucx_sys::load(None).unwrap().version;
    (version.major, version.minor)
}

/// Runs a child with the newest UCX or with this run's, and checks that it did.
fn start<T: serde::de::DeserializeOwned>(
    role: &str,
    arguments: &impl serde::Serialize,
    new: bool,
    device: &str,
) -> (Child, T, (u32, u32)) {
    let library = newest().unwrap().join("lib");
    let library = library.to_str().unwrap();
    let device = ("UCX_NET_DEVICES", Some(device));
    let environment: Environment<'_> = if new {
        &[
            device,
            ("LD_LIBRARY_PATH", Some(library)),
            ("KVFERRY_EXPECT_UCX", None),
        ]
    } else {
        &[device]
    };
    let child = Child::start(role, arguments, environment);
    let said: serde_json::Value = child.hear();
    let says: Says = serde_json::from_value(said.clone()).unwrap();
    assert_eq!(says.ucx != features_version(), new, "{says:?}");
    (child, serde_json::from_value(said).unwrap(), says.ucx)
}

type Told = (Child, (u32, u32));

/// A producer with one generation, and a consumer with the other.
fn pair(new_consumer: bool, device: &str) -> ((Child, Published, (u32, u32)), Told) {
    let publisher = publisher("producer", BLOCKS, BYTES);
    let (producer, published, theirs): (_, Published, _) =
        start("publisher", &publisher, !new_consumer, device);
    let reader = Reader {
        name: "consumer".into(),
        blocks: BLOCKS,
        block_bytes: BYTES,
        settings: Settings::default(),
    };
    let (consumer, _, ours): (_, serde_json::Value, _) =
        start("reader", &reader, new_consumer, device);
    assert_ne!(ours, theirs);
    ((producer, published, theirs), (consumer, ours))
}

/// The served lane works in both directions; the native one where the consumer can read the
/// producer's keys, and elsewhere it is refused with both versions in the reason.
fn mixed_generations(new_consumer: bool) {
    let device = device().unwrap();
    let ((mut producer, published, theirs), (mut consumer, ours)) = pair(new_consumer, &device);
    reads_all(&mut consumer, "served", &published, "served");
    if new_consumer && theirs <= (1, 13) {
        let refused = connect(&mut consumer, "native", &published, "native");
        let versions = [
            format!("UCX {}.{}", ours.0, ours.1),
            format!("UCX {}.{}", theirs.0, theirs.1),
        ];
        assert!(
            refused.error.contains("cannot unpack remote keys")
                && versions
                    .iter()
                    .all(|version| refused.error.contains(version)),
            "{}",
            refused.error
        );
        // Whoever does not insist gets the other lane.
        reads_all(&mut consumer, "auto", &published, "auto");
    } else {
        reads_all(&mut consumer, "native", &published, "native");
    }
    let done = obey(&mut consumer, &Order::Shutdown { limit_ms: 5000 });
    assert_eq!(done.error, "");
    consumer.finish_well();
    producer.finish_well();
}

/// Where loopback is among the devices they misread one another's addresses, and 1.13 would end its
/// process: refused before UCX sees the address, and both go on.
fn mixed_generations_over_loopback_are_refused(new_consumer: bool) {
    let ((mut producer, published, theirs), (mut consumer, ours)) = pair(new_consumer, "lo");
    let refused = connect(&mut consumer, "served", &published, "served");
    for part in [
        format!("UCX {}.{}.", ours.0, ours.1),
        format!("UCX {}.{}.", theirs.0, theirs.1),
        "misread each other's addresses of the loopback device".to_owned(),
        "UCX_NET_DEVICES".to_owned(),
    ] {
        assert!(refused.error.contains(&part), "{}", refused.error);
    }
    let done = obey(&mut consumer, &Order::Shutdown { limit_ms: 5000 });
    assert_eq!(done.error, "");
    consumer.finish_well();
    producer.finish_well();
}

pub(crate) fn cases() -> Vec<Case> {
    let directions = [("old_reads_new", false), ("new_reads_old", true)];
    let talk = directions.map(|(name, new_consumer)| {
        let mut case = Case::new(format!("mixed_generations::{name}"), move || {
            mixed_generations(new_consumer);
        });
        case.skip = skip_talk();
        case
    });
    let refused = directions.map(|(name, new_consumer)| {
        let name = format!("mixed_generations_over_loopback_are_refused::{name}");
        let mut case = Case::new(name, move || {
            mixed_generations_over_loopback_are_refused(new_consumer);
        });
        case.skip = skip();
        case
    });
    talk.into_iter().chain(refused).collect()
}

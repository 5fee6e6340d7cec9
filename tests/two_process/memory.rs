//! Memory: registrations in chunks, limits on pinned and on shared memory, huge pages.

use std::fs;
use std::process::Command;

use kvferry_engine::wire::Description;
use kvferry_tests::harness::{Case, Child, is_child};
use kvferry_tests::roles::{
    HUGE_PAGES, Layout, MAX_REGISTRATION, Pinned, PinnedResult, Read, ReadResult, Started,
};
use rustix::fs::{FlockOperation, flock};
use serde::Deserialize;

const MIB: u64 = 1 << 20;

/// 205 blocks in a layer: 10.51 MiB.
const PRODUCER: Layout = Layout {
    layers: 3,
    blocks: 205,
    block_bytes: 17_920,
};
/// 5.13 MiB.
const CONSUMER: Layout = Layout {
    blocks: 100,
    ..PRODUCER
};

/// 90 blocks: a run of 60, and 30 whose neighbours are elsewhere.
fn pairs() -> Vec<(u32, u32)> {
    let run = (0..60).map(|n| (n, n + 70));
    let scattered = (0..30).map(|n| (60 + n, (n * 53) % 190));
    run.chain(scattered).collect()
}

fn request(started: &Started, lane: &str, layout: Layout, pairs: Vec<(u32, u32)>) -> Read {
    Read {
        from: started.description.clone(),
        lane: lane.into(),
        layout,
        pairs,
        timeout_ms: 0,
        wait: false,
    }
}

/// The pieces that reading `pairs` takes where registrations end every `limits` bytes, ours and the
/// producer's: a run, and one more for each end within.
fn pieces(limits: (u64, u64)) -> u64 {
    let mut count = 0;
    let (block, layers) = (PRODUCER.block_bytes, u64::from(PRODUCER.layers));
    for layer in 0..layers {
        let offset = |layout: Layout, id: u32| {
            layer * u64::from(layout.blocks) * block + u64::from(id) * block
        };
        let mut before = None;
        for (local, remote) in pairs() {
            let (l, r) = (offset(CONSUMER, local), offset(PRODUCER, remote));
            for at in 0..block {
                let cut = (l + at) % limits.0 == 0 || (r + at) % limits.1 == 0;
                let goes_on = at > 0 || before == Some((l, r));
                count += u64::from(cut || !goes_on);
            }
            before = Some((l + block, r + block));
        }
    }
    count
}

/// C79, over UCX: both sides have regions above their limits, and every byte arrives.
fn c79_a_read_across_registrations(transports: Option<&'static str>) {
    let (ours, theirs) = (3 * MIB / 4, MIB);
    let environment =
        |limit: &'static str| [("UCX_TLS", transports), (MAX_REGISTRATION, Some(limit))];
    let mut producer = Child::start("producer", &PRODUCER, &environment("1048576"));
    let started: Started = producer.hear();
    let description: Description = started.description.unpack();
    let region = &description.regions[0];
    assert_eq!(region.bytes, 11_020_800);
    assert_eq!((region.chunk_bytes, region.keys.len()), (theirs, 11));
    let request = request(&started, "native", CONSUMER, pairs());
    let mut consumer = Child::start("read", &request, &environment("786432"));
    let result: ReadResult = consumer.hear();
    let bytes = 3 * 90 * PRODUCER.block_bytes;
    assert_eq!(result.error, "");
    assert_eq!(
        (result.bytes, result.native_bytes, result.wrong_bytes),
        (bytes, bytes, 0)
    );
    let expected = pieces((ours, theirs));
    assert!(
        expected > result.runs,
        "{expected} pieces of {} runs",
        result.runs
    );
    assert_eq!(result.operations, expected);
    assert_eq!(result.ucx_operations, result.messages_sent + expected);
    consumer.finish_well();
    producer.finish_well();
}

fn pinned(pinned: &Pinned) -> PinnedResult {
    let mut child = Child::start("pinned", pinned, &[]);
    let result = child.hear();
    child.finish_well();
    result
}

/// C66: a limit on pinned memory that is too low is named, with the need, before anything is tried.
fn c66_a_memlock_limit_that_is_too_low_is_named_with_the_need() {
    let setup = |regions: &[usize]| Pinned {
        limit: Some(64 << 10),
        privileged: false,
        pins: true,
        refuses: false,
        max_registration: None,
        regions: regions.to_vec(),
    };
    // Three pages and the bytes of a fourth, then twelve pages: exactly the limit. Then one more.
    let result = pinned(&setup(&[(12 << 10) + 1, 48 << 10, 1]));
    assert_eq!(result.errors[..2], ["", ""]);
    assert_eq!(result.registrations, 2);
    let text = &result.errors[2];
    for part in [
        "1 bytes of host memory at 0x",
        "it takes 69632 bytes of pinned memory, 65536 of them pinned before",
        "(RLIMIT_MEMLOCK) is 65536",
        "ulimit -l",
        "LimitMEMLOCK",
        "--ulimit memlock=-1",
        "CAP_IPC_LOCK",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    // At once too large; what fits still does.
    let result = pinned(&setup(&[(64 << 10) + 1, 64 << 10]));
    assert!(
        result.errors[0].contains("it takes 69632 bytes of pinned memory, 0 of them"),
        "{result:?}"
    );
    assert_eq!((result.errors[1].as_str(), result.registrations), ("", 1));
    // In chunks, the same.
    let chunked = |bytes| Pinned {
        max_registration: Some(4096),
        ..setup(&[bytes])
    };
    let result = pinned(&chunked((64 << 10) + 1));
    assert!(
        result.errors[0].contains("it takes 69632 bytes"),
        "{result:?}"
    );
    assert_eq!(result.registrations, 0);
    assert_eq!(pinned(&chunked(64 << 10)).registrations, 16);
    // A fabric that pins nothing has no limit.
    let result = pinned(&Pinned {
        pins: false,
        ..setup(&[(64 << 10) + 1])
    });
    assert_eq!(result.errors, [""]);
}

/// C66, C78: what UCX says of a registration that failed does not name the limit; the error does.
fn c66_a_failed_registration_of_pinned_memory_names_limit_and_need() {
    let setup = |pins| Pinned {
        limit: Some(64 << 10),
        privileged: false,
        pins,
        refuses: true,
        max_registration: Some(16 << 10),
        regions: vec![32 << 10],
    };
    let result = pinned(&setup(true));
    let text = &result.errors[0];
    for part in [
        "32768 bytes of host memory at 0x",
        "chunk 0 of 2 (16384 bytes at 0x",
        "register failed: injected: refused; memory is pinned here",
        "it takes 32768 bytes of pinned memory, 0 of them",
        "(RLIMIT_MEMLOCK) is 65536",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    let result = pinned(&setup(false));
    assert!(
        result.errors[0].ends_with("injected: refused"),
        "{result:?}"
    );
}

/// C66: whoever may exceed the limit is not held to it.
fn c66_cap_ipc_lock_lifts_the_memlock_limit() {
    let result = pinned(&Pinned {
        limit: Some(64 << 10),
        privileged: true,
        pins: true,
        refuses: false,
        max_registration: None,
        regions: vec![1 << 20],
    });
    assert_eq!(result.errors, [""]);
}

/// The words that start a program in a mount namespace of its own, or why there is none.
fn own_mounts() -> Result<Vec<&'static str>, String> {
    let kinds: [&[&str]; 2] = [
        &["unshare", "--mount", "--"],
        &["unshare", "--user", "--map-root-user", "--mount", "--"],
    ];
    let works = |words: &&[&str]| {
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).args(["sh", "-c"]);
        command.arg("mount -t tmpfs tmpfs /dev/shm");
        command.output().is_ok_and(|output| output.status.success())
    };
    let found = kinds.into_iter().find(works);
    found
        .map(<[&str]>::to_vec)
        .ok_or_else(|| "unshare cannot make a mount namespace here".to_owned())
}

#[derive(Debug, Deserialize)]
struct StartedOrNot {
    started: bool,
    error: String,
    #[serde(default)]
    warnings: Vec<String>,
}

/// A child in a mount namespace with this /dev/shm.
fn in_small_shm(
    size: &str,
    role: &str,
    arguments: &impl serde::Serialize,
    environment: &[(&str, Option<&str>)],
) -> Child {
    let mut words = own_mounts().unwrap();
    let script = format!("mount -t tmpfs -o size={size} tmpfs /dev/shm && exec \"$0\" 2>&1");
    words.extend(["sh", "-c", &script]);
    Child::start_under(&words, role, arguments, environment)
}

/// C64: a small /dev/shm is said when the engine starts, in its log and to whoever asks, and engines in
/// one container with it transfer all the same.
fn c64_a_small_shm_is_said_and_transfers_work(size: &'static str, words: &'static [&'static str]) {
    let environment = [("UCX_TLS", None), ("KVFERRY_LOG", Some("warn"))];
    let mut child = in_small_shm(size, "start", &(), &environment);
    let mut log = Vec::new();
    let started: StartedOrNot = loop {
        let line = child.line();
        if line.starts_with('{') {
            break serde_json::from_str(&line).unwrap();
        }
        log.push(line);
    };
    assert!(started.started, "{started:?}");
    assert_eq!(started.warnings.len(), 1, "{started:?}");
    for word in words {
        assert!(started.warnings[0].contains(word), "{started:?}");
        let logged = |line: &String| line.contains("WARN") && line.contains(word);
        assert!(log.iter().any(logged), "{log:?}");
    }
    assert!(!log.iter().any(|line| line.contains("ERROR")), "{log:?}");
    child.finish_well();

    let environment = [("UCX_TLS", None), ("KVFERRY_LOG", Some("off"))];
    for lane in ["served", "native"] {
        let mut producer = in_small_shm(size, "producer", &PRODUCER, &environment);
        let started: Started = producer.hear();
        assert_eq!(started.warnings.len(), 1);
        let request = request(&started, lane, CONSUMER, pairs());
        // Into the producer's namespaces: one container. The first words have replaced themselves.
        let pid = producer.pid().to_string();
        let mut enter = vec!["nsenter", "--target", &pid, "--mount"];
        if own_mounts().unwrap().contains(&"--user") {
            enter.extend(["--user", "--preserve-credentials"]);
        }
        enter.push("--");
        let mut consumer = Child::start_under(&enter, "read", &request, &environment);
        let result: ReadResult = consumer.hear();
        assert_eq!((result.error.as_str(), result.wrong_bytes), ("", 0));
        assert_eq!(result.bytes, 3 * 90 * PRODUCER.block_bytes);
        assert_eq!(result.warnings.len(), 1, "{result:?}");
        consumer.finish_well();
        producer.finish_well();
    }
}

/// C64: a list that the user chose stays, and where UCX does not start with it, the error says why.
fn c64_a_chosen_list_without_room_is_an_error_that_says_so() {
    let environment = [
        ("UCX_TLS", Some("posix,cma,tcp")),
        ("KVFERRY_LOG", Some("off")),
    ];
    let mut child = in_small_shm("1m", "start", &(), &environment);
    let result: StartedOrNot = child.hear();
    let words = [
        "/dev/shm",
        "1048576 bytes",
        "--shm-size",
        "leave posix out of it",
    ];
    // 1.22 leaves the transport out by itself.
    let said = if result.started {
        &result.warnings[0]
    } else {
        &result.error
    };
    for word in words {
        assert!(said.contains(word), "{result:?}");
    }
    child.finish_well();
    // Where posix is not wanted, there is nothing to say.
    let environment = [("UCX_TLS", Some("tcp")), ("KVFERRY_LOG", Some("off"))];
    let mut child = in_small_shm("1m", "start", &(), &environment);
    let result: StartedOrNot = child.hear();
    assert!(result.started && result.warnings.is_empty(), "{result:?}");
    child.finish_well();
}

/// How many huge pages of 2 MiB may be made beyond those that are reserved.
const OVERCOMMIT: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages";

/// Far more than a test takes: every UCX on the machine takes some where it finds them.
const ALLOWED: u64 = 256;

/// Lets huge pages be made as they are asked for, until dropped.
struct Allowed {
    /// Held, so that runs beside this one take turns.
    _turn: fs::File,
}

fn overcommit() -> u64 {
    let text = fs::read_to_string(OVERCOMMIT).unwrap();
    text.trim().parse().unwrap()
}

impl Allowed {
    fn new() -> Self {
        let path = std::env::temp_dir().join("kvferry-huge-pages.lock");
        let turn = fs::File::create(path).unwrap();
        flock(&turn, FlockOperation::LockExclusive).unwrap();
        fs::write(OVERCOMMIT, (overcommit() + ALLOWED).to_string()).unwrap();
        Self { _turn: turn }
    }
}

impl Drop for Allowed {
    fn drop(&mut self) {
        let _ = fs::write(OVERCOMMIT, overcommit().saturating_sub(ALLOWED).to_string());
    }
}

/// Pools on huge pages at both ends, whose lengths are no multiple of one: same bytes.
fn huge_pages_back_pools_and_transfers(lane: &'static str) {
    let _allowed = Allowed::new();
    let environment = [(HUGE_PAGES, Some("2097152"))];
    let mut producer = Child::start("producer", &PRODUCER, &environment);
    let started: Started = producer.hear();
    assert_eq!(started.description.unpack().regions[0].bytes, 11_020_800);
    let request = request(&started, lane, CONSUMER, pairs());
    let mut consumer = Child::start("read", &request, &environment);
    let result: ReadResult = consumer.hear();
    assert_eq!((result.error.as_str(), result.wrong_bytes), ("", 0));
    assert_eq!(result.bytes, 3 * 90 * PRODUCER.block_bytes);
    consumer.finish_well();
    producer.finish_well();
}

/// A pool's pages: of the size asked for, the length rounded up, all given back with it.
fn huge_pages_are_taken_and_given_back() {
    use kvferry_engine::{HostPool, HostPoolOptions, HugePages};
    use rustix::fs::{SealFlags, fcntl_get_seals, fstat};

    let _allowed = Allowed::new();
    // Those of this process, in bytes, as far as they were touched.
    let mapped = || -> u64 {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("HugetlbPages:"));
        let kib = line.unwrap().trim().strip_suffix("kB").unwrap();
        kib.trim().parse::<u64>().unwrap() * 1024
    };
    let bytes = (2 * MIB + 5) as usize;
    for huge_pages in [HugePages::Require, HugePages::IfAvailable] {
        let options = HostPoolOptions {
            huge_pages,
            huge_page_bytes: Some(2 * MIB),
        };
        let pool = HostPool::with_options(bytes, options).unwrap();
        assert_eq!((pool.bytes(), pool.page_bytes()), (bytes, 2 * MIB));
        let file = fstat(pool.fd()).unwrap();
        assert_eq!(
            (file.st_size as u64, file.st_blksize as u64),
            (4 * MIB, 2 * MIB)
        );
        let seals = fcntl_get_seals(pool.fd()).unwrap();
        assert!(seals.contains(SealFlags::FUTURE_WRITE | SealFlags::SHRINK | SealFlags::GROW));
        let region = pool.region().unwrap();
        assert_eq!(region.bytes(), bytes as u64);
        region.write_at(2 * MIB, b"12345").unwrap();
        let mut end = [0; 6];
        region.read_at(2 * MIB - 1, &mut end).unwrap();
        assert_eq!(&end, b"\x0012345");
        assert!(region.write_at(2 * MIB, b"123456").is_err());
        assert_eq!(mapped(), 4 * MIB);
        drop((region, pool));
        assert_eq!(mapped(), 0, "unmapped, whole");
    }
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases: Vec<Case> = Vec::new();
    if is_child() {
        // What can run here need not be found out once more.
        return cases;
    }
    for (name, transports) in crate::reads::TRANSPORTS {
        cases.push(Case::new(
            format!("c79_a_read_across_registrations::{name}"),
            move || c79_a_read_across_registrations(transports),
        ));
    }
    cases.push(Case::new(
        "c66_a_memlock_limit_that_is_too_low_is_named_with_the_need",
        c66_a_memlock_limit_that_is_too_low_is_named_with_the_need,
    ));
    cases.push(Case::new(
        "c66_a_failed_registration_of_pinned_memory_names_limit_and_need",
        c66_a_failed_registration_of_pinned_memory_names_limit_and_need,
    ));
    let mut exempt = Case::new(
        "c66_cap_ipc_lock_lifts_the_memlock_limit",
        c66_cap_ipc_lock_lifts_the_memlock_limit,
    );
    exempt.skip = (!may_lock()).then(|| "this process has no CAP_IPC_LOCK".to_owned());
    cases.push(exempt);

    let no_mounts = own_mounts().err();
    let mut small = Vec::new();
    for (size, words) in [
        ("64m", &["/dev/shm has 67108864 bytes", "--shm-size"][..]),
        (
            "1m",
            &["(1048576 bytes,", "posix is left out", "--shm-size"],
        ),
    ] {
        small.push(Case::new(
            format!("c64_a_small_shm_is_said_and_transfers_work::{size}"),
            move || c64_a_small_shm_is_said_and_transfers_work(size, words),
        ));
    }
    small.push(Case::new(
        "c64_a_chosen_list_without_room_is_an_error_that_says_so",
        c64_a_chosen_list_without_room_is_an_error_that_says_so,
    ));
    for mut case in small {
        case.skip.clone_from(&no_mounts);
        cases.push(case);
    }

    let writable = fs::OpenOptions::new().write(true).open(OVERCOMMIT);
    let no_huge_pages = writable.err().map(|error| format!("{OVERCOMMIT}: {error}"));
    let mut huge = vec![Case::new(
        "huge_pages_are_taken_and_given_back",
        huge_pages_are_taken_and_given_back,
    )];
    for lane in ["served", "native"] {
        huge.push(Case::new(
            format!("huge_pages_back_pools_and_transfers::{lane}"),
            move || huge_pages_back_pools_and_transfers(lane),
        ));
    }
    for mut case in huge {
        case.skip.clone_from(&no_huge_pages);
        cases.push(case);
    }
    cases
}

/// Whether the kernel lets this process pin what it wants.
fn may_lock() -> bool {
    let initial = fs::read_link("/proc/self/ns/user");
    let capable = rustix::thread::capabilities(None);
    initial.is_ok_and(|namespace| namespace.as_os_str() == "user:[4026531837]")
        && capable.is_ok_and(|sets| {
            sets.effective
                .contains(rustix::thread::CapabilitySet::IPC_LOCK)
        })
}

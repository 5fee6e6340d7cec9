//! Which transports and devices are used, what is refused, and what the refusal says.

use std::process::Command;
use std::time::Instant;

use kvferry_tests::harness::{Case, Child, PATIENCE, is_child, run_through};
use kvferry_tests::roles::native::{Connected, Ended, Reader};
use kvferry_tests::roles::{EngineSettings, Layout, Packed, Started};
use serde_json::Value;

const LAYOUT: Layout = Layout {
    layers: 1,
    blocks: 64,
    block_bytes: 4096,
};

fn start(settings: &EngineSettings, tls: Option<&str>) -> (bool, String) {
    let settings = settings.to_json();
    let environment = [
        ("UCX_TLS", tls),
        (EngineSettings::VARIABLE, Some(&settings)),
    ];
    let mut child = Child::start("start", &(), &environment);
    let answer: Value = child.hear();
    child.finish_well();
    let error = answer["error"].as_str().unwrap().to_owned();
    (answer["started"].as_bool().unwrap(), error)
}

/// C49: shared memory alone is refused at the start, by both generations, with UCX's reason: none of its
/// transports tells of a dead peer. Beside tcp it does no harm.
fn c49_shared_memory_alone_is_refused() {
    for tls in ["posix,cma,self", "sm", "sysv,self"] {
        let (started, error) = start(&EngineSettings::default(), Some(tls));
        assert!(!started, "{tls}");
        let list = format!("UCX_TLS={tls},");
        for part in [list.as_str(), "no peer failure handler"] {
            assert!(error.contains(part), "{error}");
        }
    }
    let fine = start(&EngineSettings::default(), Some("posix,cma,self,tcp"));
    assert_eq!(fine, (true, String::new()));
}

/// What is configured wins over the environment, and misspelt names are errors before UCX is asked.
fn configured_lists_win_and_are_checked() {
    let with = |transports: Option<&str>, net_devices: Option<&str>| EngineSettings {
        transports: transports.map(str::to_owned),
        net_devices: net_devices.map(str::to_owned),
        ..EngineSettings::default()
    };
    let (started, error) = start(&with(Some("posix,cma,self"), None), Some("tcp"));
    assert!(!started);
    assert!(error.contains("UCX_TLS=posix,cma,self"), "{error}");
    let fine = start(&with(Some("tcp"), Some("lo")), Some("posix,cma,self"));
    assert_eq!(fine, (true, String::new()));
    let (_, error) = start(&with(Some("tcp,tpc"), None), None);
    assert!(
        error.starts_with(
            "configuration: transports is \"tcp,tpc\", expected names of UCX transports"
        ),
        "{error}"
    );
    let (_, error) = start(&with(None, Some("lo,nosuch0")), None);
    for part in [
        "no network device \"nosuch0\"",
        "UCX_NET_DEVICES=lo,nosuch0",
    ] {
        assert!(error.contains(part), "{error}");
    }
}

/// An engine that finds no RDMA says so where it is asked, and nowhere else.
fn nothing_is_logged_where_there_is_no_rdma() {
    let settings = EngineSettings {
        allow_emulation: false,
        ..EngineSettings::default()
    };
    let settings = settings.to_json();
    let environment = [
        ("UCX_TLS", None),
        ("UCX_LOG_LEVEL", None),
        ("KVFERRY_LOG", Some("warn")),
        (EngineSettings::VARIABLE, Some(settings.as_str())),
    ];
    let (said, logged) = run_through("start", &(), &environment);
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(said.contains("\"started\":true"), "{said}");
    // The progress thread may be late on a busy machine, and says so.
    let complaints: Vec<&str> = logged
        .lines()
        .filter(|line| !line.contains("the progress thread was held up"))
        .collect();
    assert_eq!(complaints, [""; 0]);
}

fn reader(from: &Packed, lane: &str) -> Reader {
    Reader {
        from: from.clone(),
        lane: lane.into(),
        layout: LAYOUT,
    }
}

/// C48: the strict option fails at connect, naming what was found, also where reads could be emulated.
fn c48_require_rdma_fails_instead_of_emulating() {
    let environment = [("UCX_TLS", Some("tcp"))];
    let mut producer = Child::start("producer", &LAYOUT, &environment);
    let started: Started = producer.hear();
    // Is emulation allowed, which lane is asked for, and what the refusal says of it.
    let table = [
        (false, "auto", "no transport with a real GET"),
        (false, "native", "no transport with a real GET"),
        (true, "auto", "UCX would emulate the reads"),
        (true, "native", "UCX would emulate the reads"),
        (true, "served", "lane served was asked for"),
    ];
    for (allow_emulation, lane, reason) in table {
        let strict = EngineSettings {
            allow_emulation,
            require_rdma: true,
            ..EngineSettings::default()
        };
        let strict = strict.to_json();
        let environment = [
            ("UCX_TLS", Some("tcp")),
            (EngineSettings::VARIABLE, Some(strict.as_str())),
        ];
        let mut consumer = Child::start(
            "native-reader",
            &reader(&started.description, lane),
            &environment,
        );
        let connected: Connected = consumer.hear();
        for part in [
            "peer producer pp0tp0 has no RDMA, which require_rdma asks for",
            reason,
            "found here: tcp/lo",
            "messages over tcp/lo",
        ] {
            assert!(connected.error.contains(part), "{}", connected.error);
        }
        consumer.finish_well();
    }
    producer.finish_well();
}

/// Two network namespaces with one link between them, and in each an interface that leads nowhere. They are
/// gone when this is dropped.
pub(crate) struct Namespaces {
    pub(crate) names: [String; 2],
}

/// Addresses of the link's ends, and of the interfaces that lead nowhere.
const LINK: [&str; 2] = ["10.71.0.1/24", "10.71.0.2/24"];
const NOWHERE: [&str; 2] = ["10.72.0.1/24", "10.73.0.1/24"];

impl Namespaces {
    pub(crate) fn new(test: &str) -> Self {
        let name = |side: &str| format!("kvf-{}-{test}-{side}", std::process::id());
        let made = Self {
            names: [name("a"), name("b")],
        };
        let [a, b] = &made.names;
        ip(&format!("netns add {a}"));
        ip(&format!("netns add {b}"));
        ip(&format!(
            "-n {a} link add a0 type veth peer name b0 netns {b}"
        ));
        for (namespace, side, link, nowhere) in
            [(a, "a", LINK[0], NOWHERE[0]), (b, "b", LINK[1], NOWHERE[1])]
        {
            ip(&format!(
                "-n {namespace} link add {side}1 type veth peer name {side}2"
            ));
            ip(&format!("-n {namespace} addr add {link} dev {side}0"));
            ip(&format!("-n {namespace} addr add {nowhere} dev {side}1"));
            for device in [
                "lo".to_owned(),
                format!("{side}0"),
                format!("{side}1"),
                format!("{side}2"),
            ] {
                ip(&format!("-n {namespace} link set {device} up"));
            }
        }
        for (namespace, side) in [(a, "a"), (b, "b")] {
            for device in [format!("{side}0"), format!("{side}1")] {
                wait_until_up(namespace, &device);
            }
        }
        made
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = Command::new("ip").args(["netns", "del", name]).output();
        }
    }
}

/// UCX passes over an interface whose carrier the kernel has not noticed yet.
fn wait_until_up(namespace: &str, device: &str) {
    let deadline = Instant::now() + PATIENCE;
    let is_up = || {
        let state = format!("/sys/class/net/{device}/operstate");
        let output = Command::new("ip")
            .args(["netns", "exec", namespace, "cat", &state])
            .output()
            .unwrap();
        output.stdout.starts_with(b"up")
    };
    while !is_up() {
        assert!(Instant::now() < deadline, "{device} does not come up");
    }
}

pub(crate) fn ip(arguments: &str) {
    let output = Command::new("ip")
        .args(arguments.split(' '))
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "ip {arguments}: {error}");
}

/// Why there can be no namespaces, if so.
pub(crate) fn no_namespaces() -> Option<String> {
    if is_child() {
        return None;
    }
    if !rustix::process::geteuid().is_root() {
        return Some("only root can make network namespaces".into());
    }
    let name = format!("kvf-{}-probe", std::process::id());
    match Command::new("ip").args(["netns", "add", &name]).output() {
        Err(error) => Some(format!("there is no ip: {error}")),
        Ok(output) if !output.status.success() => {
            let error = String::from_utf8_lossy(&output.stderr);
            Some(format!("ip netns add: {}", error.trim()))
        }
        Ok(_) => {
            let made = Command::new("ip")
                .args([
                    "-n", &name, "link", "add", "v0", "type", "veth", "peer", "name", "v1",
                ])
                .output();
            let _ = Command::new("ip").args(["netns", "del", &name]).output();
            let made = made.is_ok_and(|output| output.status.success());
            (!made).then(|| "this kernel has no veth".into())
        }
    }
}

/// A producer in the second namespace and a consumer in the first, each with these devices. The environment
/// names loopback, which what is configured wins over.
fn across(namespaces: &Namespaces, producers: &str, consumers: &str) -> (Child, Child, Connected) {
    let settings = |devices: &str| {
        EngineSettings {
            allow_emulation: false,
            net_devices: Some(devices.to_owned()),
            connect_ms: 10_000,
            ..EngineSettings::default()
        }
        .to_json()
    };
    let (ours, theirs) = (settings(consumers), settings(producers));
    let environment = |settings| {
        [
            ("UCX_TLS", Some("tcp")),
            ("UCX_NET_DEVICES", Some("lo")),
            (EngineSettings::VARIABLE, Some(settings)),
        ]
    };
    let [a, b] = &namespaces.names;
    let producer = Child::start_in(b, "producer", &LAYOUT, &environment(theirs.as_str()));
    let started: Started = producer.hear();
    let request = reader(&started.description, "auto");
    let consumer = Child::start_in(a, "native-reader", &request, &environment(ours.as_str()));
    let connected = consumer.hear();
    (producer, consumer, connected)
}

/// C71: of several interfaces the filter takes the one that leads to the peer.
fn c71_a_device_filter_picks_the_interface() {
    let namespaces = Namespaces::new("filter");
    let (mut producer, mut consumer, connected) = across(&namespaces, "b0", "a0");
    assert_eq!(connected.error, "");
    assert_eq!(connected.transports, "messages over tcp/a0");
    let _: Value = consumer.ask("start 30000");
    let ended: Ended = consumer.ask("finish");
    assert_eq!((ended.error.as_str(), ended.wrong_bytes), ("", 0));
    assert_eq!((ended.bytes, ended.served_bytes), (64 * 4096, 64 * 4096));
    consumer.finish_well();
    producer.finish_well();
}

/// C71: a peer that can only be reached over an interface that leads nowhere. The error comes at once and
/// lists what was tried.
fn c71_unreachable_lists_what_was_tried() {
    let namespaces = Namespaces::new("nowhere");
    let (mut producer, mut consumer, connected) = across(&namespaces, "b1", "a0,a1");
    let error = connected.error;
    for part in [
        "peer producer pp0tp0 cannot be reached over any of tcp/a",
        "tcp/a0",
        "tcp/a1",
        "UCX_NET_DEVICES=a0,a1",
        "10.73.0.1",
    ] {
        assert!(error.contains(part), "{error}");
    }
    consumer.finish_well();
    producer.finish_well();
}

/// C71: the link is dead, which only the silence tells. The error names what the greeting was sent over.
fn c71_silence_names_what_carried_the_greeting() {
    let namespaces = Namespaces::new("silence");
    let (mut producer, mut consumer, connected) = across(&namespaces, "b0", "a0");
    assert_eq!(connected.error, "");
    ip(&format!("-n {} link set b0 down", namespaces.names[1]));
    let connected: Connected = consumer.ask("reconnect");
    let error = connected.error;
    assert!(error.contains("peer producer pp0tp0"), "{error}");
    assert!(error.contains("tcp/a0"), "{error}");
    consumer.finish_well();
    producer.finish_well();
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = vec![
        Case::new(
            "c49_shared_memory_alone_is_refused",
            c49_shared_memory_alone_is_refused,
        ),
        Case::new(
            "configured_lists_win_and_are_checked",
            configured_lists_win_and_are_checked,
        ),
        Case::new(
            "nothing_is_logged_where_there_is_no_rdma",
            nothing_is_logged_where_there_is_no_rdma,
        ),
        Case::new(
            "c48_require_rdma_fails_instead_of_emulating",
            c48_require_rdma_fails_instead_of_emulating,
        ),
    ];
    let reason = no_namespaces();
    for (name, run) in [
        (
            "c71_a_device_filter_picks_the_interface",
            c71_a_device_filter_picks_the_interface as fn(),
        ),
        (
            "c71_unreachable_lists_what_was_tried",
            c71_unreachable_lists_what_was_tried,
        ),
        (
            "c71_silence_names_what_carried_the_greeting",
            c71_silence_names_what_carried_the_greeting,
        ),
    ] {
        let mut case = Case::new(name, run);
        case.skip.clone_from(&reason);
        cases.push(case);
    }
    cases
}

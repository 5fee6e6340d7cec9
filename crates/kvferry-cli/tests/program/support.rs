//! Starting the program and reading what it prints, always with a deadline.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use serde_json::Value;

/// Longest that anything here may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// A small run: 16 requests, of which one is read by half and one not at all.
pub(crate) const SIZES: [&str; 4] = [
    "--requests=16",
    "--blocks=9",
    "--block-bytes=4K",
    "--layers=2",
];
/// Blocks that it reads: 14 requests of 9, and 5.
pub(crate) const BLOCKS: u64 = 14 * 9 + 5;
/// Bytes that it reads.
pub(crate) const BYTES: u64 = BLOCKS * 2 * 4096;

/// The program with arguments, on loopback unless the environment says otherwise.
pub(crate) fn kvferry<'a>(args: impl IntoIterator<Item = &'a str>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvferry"));
    command
        .args(args)
        .env_remove("UCX_TLS")
        .env_remove("KVFERRY_LOG");
    if std::env::var_os("UCX_NET_DEVICES").is_none() {
        command.env("UCX_NET_DEVICES", "lo");
    }
    command
}

/// Runs a command to its end.
pub(crate) fn finish(mut command: Command) -> Output {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    Running::start(command).output()
}

/// A process that is killed if the test ends before it does.
pub(crate) struct Running(Option<Child>);

impl Running {
    pub(crate) fn start(mut command: Command) -> Self {
        Self(Some(command.spawn().unwrap()))
    }

    pub(crate) fn child(&mut self) -> &mut Child {
        self.0.as_mut().unwrap()
    }

    /// Waits for the end and everything that is printed until then.
    pub(crate) fn output(mut self) -> Output {
        let child = self.0.take().unwrap();
        let pid = child.id();
        let (sender, receiver) = mpsc::channel();
        std::thread::spawn(move || sender.send(child.wait_with_output()));
        match receiver.recv_timeout(PATIENCE) {
            Ok(output) => output.unwrap(),
            Err(_) => {
                signal(pid, "KILL");
                panic!("process {pid} did not end within {PATIENCE:?}");
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Sends a signal to a process that this test started.
pub(crate) fn signal(pid: u32, name: &str) {
    let status = Command::new("sh")
        .args(["-c", &format!("kill -s {name} {pid}")])
        .status();
    assert!(status.unwrap().success(), "signal {name} to process {pid}");
}

/// The first line of a process's output, and the rest of it unread.
pub(crate) fn first_line<R: Read + Send + 'static>(from: R) -> (String, BufReader<R>) {
    within_patience(move || {
        let mut reader = BufReader::new(from);
        let mut line = String::new();
        reader.read_line(&mut line).map(|_| (line, reader))
    })
}

/// What a stream holds until its end.
pub(crate) fn rest(mut from: impl Read + Send + 'static) -> String {
    within_patience(move || {
        let mut text = String::new();
        from.read_to_string(&mut text).map(|_| text)
    })
}

fn within_patience<T: Send + 'static>(
    read: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> T {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || sender.send(read()));
    receiver.recv_timeout(PATIENCE).unwrap().unwrap()
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// The JSON object that a run printed, which is all of its standard output. Checks that the UCX it
/// ran on is the one that these tests were started for.
pub(crate) fn object(output: &Output) -> Value {
    let text = stdout(output);
    let object: Value = serde_json::from_str(&text)
        .unwrap_or_else(|error| panic!("{error}: {text:?}, {}", stderr(output)));
    let version = object["ucx_version"].as_str().unwrap();
    if let Ok(expected) = std::env::var("KVFERRY_EXPECT_UCX") {
        assert!(
            version == expected || version.starts_with(&format!("{expected}.")),
            "UCX {version} instead of {expected}"
        );
    }
    object
}

/// Checks every count of a good run of [`SIZES`] over a lane.
pub(crate) fn check_good(object: &Value, lane: &str) {
    let number = |field: &str| object[field].as_u64().unwrap_or_else(|| panic!("{field}"));
    assert_eq!(object["failures"], Value::Array(vec![]), "{object}");
    assert_eq!(object["lane"], lane);
    assert_eq!(number("requests"), 16);
    assert_eq!(number("blocks"), BLOCKS);
    assert_eq!(number("bytes"), BYTES);
    assert_eq!(number("verified_bytes"), BYTES);
    for other in ["mapped", "native", "attached", "served"] {
        let carried = object["bytes_by_lane"][other].as_u64().unwrap();
        assert_eq!(carried, if other == lane { BYTES } else { 0 }, "{other}");
    }
    let (operations, ucx) = (number("operations"), number("ucx_operations"));
    assert!(
        (1..=2 * BLOCKS).contains(&operations),
        "{operations} operations"
    );
    assert_eq!(number("loaded_tokens"), 16 * BLOCKS);
    // What is not read is in the prefix cache; of each prompt the last token is computed.
    assert_eq!(number("cached_tokens"), 16 * (4 + 8));
    // One question and one release for each request, at least.
    assert!(ucx >= 32, "{ucx} UCX operations");
    let gets = if lane == "native" { operations } else { 0 };
    assert_eq!(number("gets"), gets);
    assert_eq!(number("leases_released"), 16);
    for field in [
        "leases_held",
        "leases_expired",
        "leases_revoked",
        "blocks_in_use",
    ] {
        assert_eq!(number(field), 0, "{field}");
    }
    assert_eq!(number("quarantined_bytes"), 0);
    assert!(object["gb_per_s"].as_f64().unwrap() > 0.0);
}

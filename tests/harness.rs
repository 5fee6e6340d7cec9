//! Child processes in a role, and the list of cases.
//!
//! A child is this binary again, with its role in the environment. Its arguments, as JSON, are the
//! first line on its standard input; requests follow, and the end of the input is the order to
//! finish. It answers in lines of JSON on standard output. A child never outlives its handle.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child as Process, ChildStdin, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, unbounded};
use libtest_mimic::{Arguments, Failed, Trial};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

const ROLE: &str = "KVFERRY_TEST_ROLE";

/// Nothing in these tests takes longer than this on a busy machine with two cores.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A test and, if it cannot run here, why.
pub struct Case {
    /// Its name, with the number of the field case it shows.
    pub name: String,
    /// What it does; a panic is a failure.
    pub run: Box<dyn FnOnce() + Send>,
    /// Why it is skipped on this machine.
    pub skip: Option<String>,
}

impl Case {
    /// A case that runs everywhere.
    pub fn new(name: impl Into<String>, run: impl FnOnce() + Send + 'static) -> Self {
        Self {
            name: name.into(),
            run: Box::new(run),
            skip: None,
        }
    }
}

/// Whether this process is a child in a role, which has no cases: what finds out whether some can run here
/// need not.
#[must_use]
pub fn is_child() -> bool {
    std::env::var_os(ROLE).is_some()
}

/// The `main` of a test binary: a child's role, or the cases.
#[must_use]
pub fn main(cases: Vec<Case>) -> ExitCode {
    only_loopback();
    if let Some(role) = std::env::var_os(ROLE) {
        let arguments = requests().next().unwrap();
        crate::roles::run(&role.to_string_lossy(), &arguments);
        return ExitCode::SUCCESS;
    }
    let trials = cases
        .into_iter()
        .map(|case| {
            let run = case.run;
            let trial = Trial::test(case.name, move || {
                run();
                Ok::<(), Failed>(())
            });
            match case.skip {
                Some(reason) => trial
                    .with_kind(format!("skipped: {reason}"))
                    .with_ignored_flag(true),
                None => trial,
            }
        })
        .collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// Engines of this process itself use loopback too, unless the environment says otherwise.
#[allow(unsafe_code)]
fn only_loopback() {
    if std::env::var_os("UCX_NET_DEVICES").is_none() {
        // SAFETY: called at the start of `main`, while there is no other thread.
        unsafe { std::env::set_var("UCX_NET_DEVICES", "lo") };
    }
}

/// Waits, by turns of the scheduler, until something is so.
///
/// # Panics
/// If it is not within [`PATIENCE`].
pub fn until(what: &str, mut happened: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !happened() {
        assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// The environment of a child, on top of ours: name, and value or removal.
pub type Environment<'a> = &'a [(&'a str, Option<&'a str>)];

/// This binary again, in a role.
pub struct Child {
    process: Process,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    role: String,
}

impl Child {
    /// Starts a child. Loopback is the only network device unless the environment says otherwise.
    #[must_use]
    pub fn start(role: &str, arguments: &impl Serialize, environment: Environment<'_>) -> Self {
        Self::start_under(&[], role, arguments, environment)
    }

    /// Starts a child in a network namespace that `ip netns` has made.
    #[must_use]
    pub fn start_in(
        namespace: &str,
        role: &str,
        arguments: &impl Serialize,
        environment: Environment<'_>,
    ) -> Self {
        // It becomes the program that it starts, so signals reach the child.
        let wrapper = ["ip", "netns", "exec", namespace];
        Self::start_under(&wrapper, role, arguments, environment)
    }

    /// Starts a child by another program, which is given as its name and arguments. That program is to
    /// become the child, or to end with it and to end it.
    #[must_use]
    pub fn start_under(
        wrapper: &[&str],
        role: &str,
        arguments: &impl Serialize,
        environment: Environment<'_>,
    ) -> Self {
        let this = std::env::current_exe().unwrap();
        let mut command = match wrapper.split_first() {
            None => Command::new(this),
            Some((program, arguments)) => {
                let mut command = Command::new(program);
                command.args(arguments).arg(this);
                command
            }
        };
        prepare(&mut command, role, environment);
        let mut process = command.spawn().unwrap();
        let (sender, lines) = unbounded();
        let stdout = BufReader::new(process.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        let stdin = process.stdin.take();
        let mut child = Self {
            process,
            stdin,
            lines,
            role: role.into(),
        };
        child.tell(&serde_json::to_string(arguments).unwrap());
        child
    }

    /// The child's process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// The child's next line, parsed.
    #[must_use]
    pub fn hear<T: DeserializeOwned>(&self) -> T {
        let line = self.line();
        serde_json::from_str(&line)
            .unwrap_or_else(|error| panic!("the {} said {line:?}: {error}", self.role))
    }

    /// The child's next line as it is: a child may be started so that its log comes this way.
    #[must_use]
    pub fn line(&self) -> String {
        self.lines
            .recv_timeout(PATIENCE)
            .unwrap_or_else(|error| panic!("the {} said nothing: {error}", self.role))
    }

    /// Sends a line and hears the answer.
    #[must_use]
    pub fn ask<T: DeserializeOwned>(&mut self, line: &str) -> T {
        self.tell(line);
        self.hear()
    }

    /// Sends a line.
    pub fn tell(&mut self, line: &str) {
        let stdin = self.stdin.as_mut().unwrap();
        writeln!(stdin, "{line}").unwrap();
        stdin.flush().unwrap();
    }

    /// True if nothing is said for `time`; an event-driven pause.
    #[must_use]
    pub fn is_quiet_for(&self, time: Duration) -> bool {
        self.lines.recv_timeout(time).is_err()
    }

    /// Sends a signal.
    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.process);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Stops the child where it is, until it is told to go on.
    pub fn stop(&self) {
        self.signal(rustix::process::Signal::STOP);
        // Stopped for good before this returns: the kernel says so in its state.
        let stat = format!("/proc/{}/stat", self.pid());
        let deadline = Instant::now() + PATIENCE;
        loop {
            let stat = std::fs::read_to_string(&stat).unwrap();
            if stat.rsplit_once(") ").unwrap().1.starts_with('T') {
                return;
            }
            assert!(Instant::now() < deadline, "the {} runs on", self.role);
            std::thread::yield_now();
        }
    }

    /// Lets a stopped child go on.
    pub fn go_on(&self) {
        self.signal(rustix::process::Signal::CONT);
    }

    /// Kills the child at once, as a crash would.
    pub fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Closes the child's input and waits for its end.
    pub fn finish(&mut self) -> ExitStatus {
        drop(self.stdin.take());
        // Its output ends when it does.
        let deadline = Instant::now() + PATIENCE;
        while self.lines.recv_deadline(deadline).is_ok() {}
        assert!(Instant::now() < deadline, "the {} did not end", self.role);
        self.process.wait().unwrap()
    }

    /// [`finish`](Self::finish), and the child must have succeeded.
    pub fn finish_well(&mut self) {
        let status = self.finish();
        assert!(status.success(), "the {} ended with {status}", self.role);
    }
}

fn prepare(command: &mut Command, role: &str, environment: Environment<'_>) {
    command
        .env(ROLE, role)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    if std::env::var_os("UCX_NET_DEVICES").is_none() {
        command.env("UCX_NET_DEVICES", "lo");
    }
    for &(name, value) in environment {
        match value {
            Some(value) => command.env(name, OsString::from(value)),
            None => command.env_remove(name),
        };
    }
}

/// Runs a role that needs no requests to its end, and returns what it has said and what it has logged.
#[must_use]
pub fn run_through(
    role: &str,
    arguments: &impl Serialize,
    environment: Environment<'_>,
) -> (String, String) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    prepare(&mut command, role, environment);
    let mut process = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut stdin = process.stdin.take().unwrap();
    writeln!(stdin, "{}", serde_json::to_string(arguments).unwrap()).unwrap();
    drop(stdin);
    let output = process.wait_with_output().unwrap();
    assert!(
        output.status.success(),
        "the {role} ended with {}",
        output.status
    );
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (text(output.stdout), text(output.stderr))
}

impl Drop for Child {
    fn drop(&mut self) {
        // Ended already if the test went well.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Says a line, from a child.
pub fn say(value: &Value) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{value}").unwrap();
    out.flush().unwrap();
}

/// The requests to a child, until its input ends.
pub fn requests() -> impl Iterator<Item = String> {
    std::io::stdin().lock().lines().map_while(Result::ok)
}

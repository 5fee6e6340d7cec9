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

/// The `main` of a test binary: a child's role, or the cases.
#[must_use]
pub fn main(cases: Vec<Case>) -> ExitCode {
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

    /// Starts a child that another program runs: its name and arguments, before ours.
    #[must_use]
    pub fn start_under(
        tool: &[&str],
        role: &str,
        arguments: &impl Serialize,
        environment: Environment<'_>,
    ) -> Self {
        let ours = std::env::current_exe().unwrap();
        let mut command = match tool {
            [] => Command::new(ours),
            [tool, options @ ..] => {
                let mut command = Command::new(tool);
                command.args(options).arg(ours);
                command
            }
        };
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
        let line = self
            .lines
            .recv_timeout(PATIENCE)
            .unwrap_or_else(|error| panic!("the {} said nothing: {error}", self.role));
        serde_json::from_str(&line)
            .unwrap_or_else(|error| panic!("the {} said {line:?}: {error}", self.role))
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

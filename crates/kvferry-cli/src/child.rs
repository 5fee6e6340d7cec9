//! Processes that this one starts and speaks to: the demo's producer, and those of the benchmarks.
//!
//! Invariant: the process does not outlive its handle. It is told to end by the end of its standard
//! input, which the operating system closes too should this process die; on every other path it is
//! killed.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::Duration;

use crossbeam::channel::{Receiver, RecvTimeoutError, unbounded};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::CliError;

/// The line that a producer prints when it can be found.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Ready {
    /// Where its directory listens.
    pub(crate) address: String,
}

/// A producer as a process of its own.
pub(crate) struct ProducerProcess {
    process: LineProcess,
    address: String,
}

impl ProducerProcess {
    /// Starts this program again as a producer, and waits until it is ready.
    pub(crate) fn start(options: &[String], timeout: Duration) -> Result<Self, CliError> {
        let mut command = this_program()?;
        command.args(["serve", "--machine"]).args(options);
        let process = LineProcess::start(command, "producer")?;
        let ready: Ready = process.answer(timeout)?;
        Ok(Self {
            process,
            address: ready.address,
        })
    }

    /// Where its directory listens.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// Tells the process to end and waits for it.
    pub(crate) fn finish(mut self, timeout: Duration) -> Result<(), CliError> {
        self.process.finish(timeout)
    }
}

/// This program, to be started again.
pub(crate) fn this_program() -> Result<Command, CliError> {
    let program = std::env::current_exe().map_err(CliError::system("finding this program"))?;
    Ok(Command::new(program))
}

/// In a process that was started so: prints an answer as a line.
pub(crate) fn say_line(answer: &impl Serialize) -> Result<(), CliError> {
    let mut line = serde_json::to_vec(answer)
        .map_err(|error| CliError::system("writing JSON")(error.into()))?;
    line.push(b'\n');
    let mut out = std::io::stdout();
    out.write_all(&line)
        .and_then(|()| out.flush())
        .map_err(CliError::system("writing to standard output"))
}

/// In a process that was started so: waits until nobody can speak to it any more.
pub(crate) fn wait_for_end_of_input() {
    let mut ignored = [0; 64];
    // Whatever is written there means nothing; an error is an end as well.
    while matches!(std::io::stdin().read(&mut ignored), Ok(1..)) {}
}

/// A process that is spoken to by lines, and ends when nobody can speak to it any more.
pub(crate) struct LineProcess {
    child: Child,
    /// Its end ends the process.
    stdin: Option<ChildStdin>,
    lines: Receiver<std::io::Result<String>>,
    name: String,
    /// Whether the processes that it starts are signalled and end with it.
    leads_group: bool,
}

impl LineProcess {
    /// Starts it; `name` says in errors whose process it is.
    pub(crate) fn start(command: Command, name: &str) -> Result<Self, CliError> {
        Self::spawn(command, name, false)
    }

    /// The same, with the processes that it will start as one group: see [`signal`](Self::signal).
    pub(crate) fn start_group(mut command: Command, name: &str) -> Result<Self, CliError> {
        command.process_group(0);
        Self::spawn(command, name, true)
    }

    fn spawn(mut command: Command, name: &str, leads_group: bool) -> Result<Self, CliError> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|source| CliError::Spawn {
                name: name.to_owned(),
                program: command.get_program().to_string_lossy().into_owned(),
                source,
            })?;
        let (sender, lines) = unbounded();
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let process = Self {
            child,
            stdin,
            lines,
            name: name.to_owned(),
            leads_group,
        };
        let Some(stdout) = stdout else {
            return Err(process.failed("has no standard output"));
        };
        // The pipe cannot be read with a deadline. The thread ends with the process, at the latest.
        std::thread::Builder::new()
            .name("kvf-lines".to_owned())
            .spawn(move || {
                for line in BufReader::new(stdout).lines() {
                    if sender.send(line).is_err() {
                        return;
                    }
                }
            })
            .map_err(CliError::system("starting a thread"))?;
        Ok(process)
    }

    /// The next line that it prints, as JSON.
    pub(crate) fn answer<T: DeserializeOwned>(&self, timeout: Duration) -> Result<T, CliError> {
        let line = match self.lines.recv_timeout(timeout) {
            Ok(line) => line.map_err(CliError::system("reading from a process"))?,
            Err(RecvTimeoutError::Timeout) => {
                return Err(CliError::Late {
                    what: format!("the {} process has not answered", self.name),
                    waited: timeout,
                });
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(self.failed("has ended before it answered"));
            }
        };
        serde_json::from_str(&line)
            .map_err(|error| self.failed(&format!("said {line:?}, which is no answer: {error}")))
    }

    /// Says something to it and waits for the answer.
    pub(crate) fn ask<T: DeserializeOwned>(
        &mut self,
        question: &impl Serialize,
        timeout: Duration,
    ) -> Result<T, CliError> {
        let mut line = serde_json::to_vec(question)
            .map_err(|error| CliError::system("writing JSON")(error.into()))?;
        line.push(b'\n');
        let said = match &mut self.stdin {
            Some(stdin) => stdin.write_all(&line).and_then(|()| stdin.flush()),
            None => Ok(()),
        };
        said.map_err(|_| self.failed("does not listen any more"))?;
        self.answer(timeout)
    }

    /// Sends a signal to all processes of its group, if it leads one and has not been waited for: then its number
    /// may be somebody else's.
    pub(crate) fn signal(&mut self, signal: Signal) {
        let runs = matches!(self.child.try_wait(), Ok(None));
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        if let Some(pid) = pid.filter(|_| runs && self.leads_group) {
            // It may have ended just now.
            let _ = kill_process_group(pid, signal);
        }
    }

    fn failed(&self, what: &str) -> CliError {
        CliError::Child {
            name: self.name.clone(),
            what: what.to_owned(),
        }
    }

    /// Tells the process to end and waits for it.
    pub(crate) fn finish(&mut self, timeout: Duration) -> Result<(), CliError> {
        self.stdin = None;
        let status = self.wait(timeout)?;
        if status.success() {
            Ok(())
        } else {
            Err(self.failed(&format!("failed ({status})")))
        }
    }

    /// Waits until the process has ended.
    fn wait(&mut self, timeout: Duration) -> Result<ExitStatus, CliError> {
        let failed = "waiting for a process";
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        let Some(pid) = pid else {
            return self.child.wait().map_err(CliError::system(failed));
        };
        let system = |errno: Errno| CliError::system(failed)(errno.into());
        let fd = pidfd_open(pid, PidfdFlags::empty()).map_err(system)?;
        let timespec = Timespec::try_from(timeout).ok();
        let mut fds = [PollFd::new(&fd, PollFlags::IN)];
        let ready = loop {
            match poll(&mut fds, timespec.as_ref()) {
                Err(Errno::INTR) => {}
                other => break other.map_err(system)?,
            }
        };
        if ready == 0 {
            return Err(CliError::Late {
                what: format!("the {} process did not end", self.name),
                waited: timeout,
            });
        }
        self.child.wait().map_err(CliError::system(failed))
    }
}

impl Drop for LineProcess {
    fn drop(&mut self) {
        // These do nothing if it has ended and was waited for.
        self.signal(Signal::KILL);
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

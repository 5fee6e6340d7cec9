//! The producer process that the demo starts.
//!
//! Invariant: the process does not outlive its handle. It is told to end by the end of its standard
//! input, which the operating system closes too should this process die; on every other path it is
//! killed.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::time::Duration;

use crossbeam::channel::{RecvTimeoutError, bounded};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
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
    child: Child,
    /// Its end ends the producer.
    stdin: Option<ChildStdin>,
    address: String,
}

impl ProducerProcess {
    /// Starts this program again as a producer, and waits until it is ready.
    pub(crate) fn start(options: &[String], timeout: Duration) -> Result<Self, CliError> {
        let program = std::env::current_exe().map_err(CliError::system("finding this program"))?;
        let mut child = Command::new(program)
            .args(["serve", "--machine"])
            .args(options)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(CliError::system("starting the producer process"))?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let mut process = Self {
            child,
            stdin,
            address: String::new(),
        };
        let Some(stdout) = stdout else {
            return Err(CliError::Child("has no standard output".to_owned()));
        };
        process.address = process.read_address(stdout, timeout)?;
        Ok(process)
    }

    /// Where its directory listens.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    fn read_address(&mut self, stdout: ChildStdout, timeout: Duration) -> Result<String, CliError> {
        let (sender, receiver) = bounded(1);
        // The pipe cannot be read with a deadline. The thread ends with the process, at the latest.
        std::thread::Builder::new()
            .name("kvf-ready".to_owned())
            .spawn(move || {
                let mut line = String::new();
                let read = BufReader::new(stdout).read_line(&mut line).map(|_| line);
                // Nobody listens any more when it took too long.
                let _ = sender.send(read);
            })
            .map_err(CliError::system("starting a thread"))?;
        let line = match receiver.recv_timeout(timeout) {
            Ok(line) => line.map_err(CliError::system("reading from the producer process"))?,
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                return Err(CliError::Late {
                    what: "the producer process was not ready",
                    waited: timeout,
                });
            }
        };
        if line.is_empty() {
            let status = self.wait(timeout)?;
            return Err(CliError::Child(format!("did not start ({status})")));
        }
        let ready: Ready = serde_json::from_str(&line)
            .map_err(|_| CliError::Child(format!("said {line:?} instead of its address")))?;
        Ok(ready.address)
    }

    /// Tells the process to end and waits for it.
    pub(crate) fn finish(mut self, timeout: Duration) -> Result<(), CliError> {
        self.stdin = None;
        let status = self.wait(timeout)?;
        if status.success() {
            Ok(())
        } else {
            Err(CliError::Child(format!("failed ({status})")))
        }
    }

    /// Waits until the process has ended.
    fn wait(&mut self, timeout: Duration) -> Result<ExitStatus, CliError> {
        let failed = "waiting for the producer process";
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
                what: "the producer process did not end",
                waited: timeout,
            });
        }
        self.child.wait().map_err(CliError::system(failed))
    }
}

impl Drop for ProducerProcess {
    fn drop(&mut self) {
        // Both do nothing if it has ended and was waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

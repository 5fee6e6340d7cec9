//! Copy threads: batches of copies from memory of other processes on this host, off the progress
//! thread.
//!
//! Responsible for the threads and for one report per batch. Not responsible for what is copied (see
//! [`CopyBatch`]) or for how much is in flight (that is the lanes').
//!
//! Invariant: a batch is with a thread or in the queue of ended ones until it is reported. A copy
//! cannot be called back, so an endpoint is not closed before its copies have been reported.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

use crossbeam::channel::{Receiver, Sender, unbounded};
use crossbeam::queue::SegQueue;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{Armed, CopyEnd, EndpointId, FabricError, ReadToken, Sink};
use crate::memory::{CopyBatch, Vectors};
use crate::wake::Waker;

/// Threads unless the configuration says otherwise.
const DEFAULT_THREADS: NonZeroUsize = NonZeroUsize::MIN;

struct Job {
    endpoint: EndpointId,
    token: ReadToken,
    batch: Box<CopyBatch>,
}

struct Ended {
    queue: SegQueue<(EndpointId, ReadToken, CopyEnd)>,
    waker: Waker,
}

/// See the module's text. Threads start with the first batch.
pub(crate) struct Copiers {
    threads: NonZeroUsize,
    /// `None` before the first batch. Closed, and so the threads', when this is dropped.
    jobs: Option<Sender<Job>>,
    ended: Arc<Ended>,
    in_flight: HashMap<EndpointId, usize>,
    announced: bool,
}

impl Copiers {
    /// # Errors
    /// If the operating system gives no descriptor.
    pub(crate) fn new() -> Result<Self, FabricError> {
        let waker = Waker::new().map_err(|error| FabricError::new("eventfd", error.to_string()))?;
        Ok(Self {
            threads: DEFAULT_THREADS,
            jobs: None,
            ended: Arc::new(Ended {
                queue: SegQueue::new(),
                waker,
            }),
            in_flight: HashMap::new(),
            announced: false,
        })
    }

    /// Sets the number of threads, for those that have not been started.
    pub(crate) fn set_threads(&mut self, threads: NonZeroUsize) {
        self.threads = threads;
    }

    /// Hands a batch to the threads.
    ///
    /// # Errors
    /// The batch, if no thread could be started.
    pub(crate) fn submit(
        &mut self,
        endpoint: EndpointId,
        token: ReadToken,
        batch: Box<CopyBatch>,
    ) -> Result<(), (Box<CopyBatch>, FabricError)> {
        let jobs = match &self.jobs {
            Some(jobs) => jobs,
            None => match self.start() {
                Ok(jobs) => self.jobs.insert(jobs),
                Err(error) => return Err((batch, error)),
            },
        };
        let job = Job {
            endpoint,
            token,
            batch,
        };
        if let Err(refused) = jobs.send(job) {
            let error = FabricError::new("copy", "the copy threads have ended");
            return Err((refused.into_inner().batch, error));
        }
        *self.in_flight.entry(endpoint).or_default() += 1;
        Ok(())
    }

    fn start(&self) -> Result<Sender<Job>, FabricError> {
        let (sender, receiver) = unbounded::<Job>();
        let mut started = 0;
        let mut failure = None;
        for _ in 0..self.threads.get() {
            let (receiver, ended) = (receiver.clone(), Arc::clone(&self.ended));
            let thread = std::thread::Builder::new().name("kvferry-copy".into());
            match thread.spawn(move || copy_loop(&receiver, &ended)) {
                Ok(_) => started += 1,
                Err(error) => failure = Some(error),
            }
        }
        match failure {
            Some(error) if started == 0 => Err(FabricError::new(
                "starting a copy thread",
                error.to_string(),
            )),
            Some(error) => {
                tracing::warn!(%error, started, "fewer copy threads than configured");
                Ok(sender)
            }
            None => Ok(sender),
        }
    }

    /// Batches of an endpoint that have not been reported.
    pub(crate) fn in_flight(&self, endpoint: EndpointId) -> usize {
        self.in_flight.get(&endpoint).copied().unwrap_or(0)
    }

    /// Reports what has ended. True if anything had.
    pub(crate) fn progress(&mut self, sink: &mut dyn Sink) -> bool {
        if std::mem::take(&mut self.announced) {
            self.ended.waker.awake();
        }
        let mut any = false;
        while let Some((endpoint, token, end)) = self.ended.queue.pop() {
            any = true;
            if let Some(count) = self.in_flight.get_mut(&endpoint) {
                *count -= 1;
                if *count == 0 {
                    self.in_flight.remove(&endpoint);
                }
            }
            sink.copy_done(token, end);
        }
        any
    }

    /// Prepares for sleep.
    pub(crate) fn arm(&mut self) -> Armed {
        if self.in_flight.is_empty() {
            return Armed::Idle;
        }
        self.announced = true;
        self.ended.waker.about_to_sleep();
        if self.ended.queue.is_empty() {
            Armed::Idle
        } else {
            Armed::Busy
        }
    }

    /// Readable when something has ended.
    pub(crate) fn event_fd(&self) -> BorrowedFd<'_> {
        self.ended.waker.fd()
    }

    /// Waits for the batches in flight and reports them; false if some had not ended by the
    /// deadline, which may still write.
    pub(crate) fn finish(&mut self, sink: &mut dyn Sink, deadline: Instant) -> bool {
        self.jobs = None;
        loop {
            self.progress(sink);
            if self.in_flight.is_empty() {
                return true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            if self.arm() == Armed::Idle {
                let timeout = Timespec {
                    tv_sec: left.as_secs().min(3600) as i64,
                    tv_nsec: i64::from(left.subsec_nanos()),
                };
                let mut fds = [PollFd::from_borrowed_fd(self.event_fd(), PollFlags::IN)];
                // Interrupted or not: looked at again above.
                let _ = poll(&mut fds, Some(&timeout));
            }
        }
    }
}

fn copy_loop(jobs: &Receiver<Job>, ended: &Ended) {
    let mut vectors = Vectors::default();
    while let Ok(Job {
        endpoint,
        token,
        batch,
    }) = jobs.recv()
    {
        let result = batch.run(&mut vectors);
        ended
            .queue
            .push((endpoint, token, CopyEnd { batch, result }));
        ended.waker.wake();
    }
}

//! `tracing` for Python's logging.
//!
//! Responsible for a bounded queue that a Python thread empties. Threads that log never touch the interpreter: a
//! progress thread that waited for it would let its peers down. What finds the queue full is counted and dropped.

use std::fmt::{self, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, bounded};
use pyo3::prelude::*;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::Registry;

/// Lines that may wait for Python.
const QUEUE: usize = 1024;
/// Most lines of one call.
const BATCH: usize = 128;

/// Python's level, the Rust module, the text, and the line of the module.
type Line = (u8, String, String, u32);

enum Item {
    Line(Line),
    Stop,
}

struct Queue {
    sender: Sender<Item>,
    receiver: Receiver<Item>,
    lost: AtomicU64,
    /// Lowest level that is kept, as Python numbers them.
    level: AtomicU64,
}

static QUEUE_OF_PROCESS: OnceLock<Queue> = OnceLock::new();

const fn number(level: Level) -> u8 {
    match level {
        Level::ERROR => 40,
        Level::WARN => 30,
        Level::INFO => 20,
        Level::DEBUG => 10,
        Level::TRACE => 5,
    }
}

struct ToPython;

impl<S: Subscriber> Layer<S> for ToPython {
    fn enabled(&self, metadata: &Metadata<'_>, _: Context<'_, S>) -> bool {
        let ours = ["kvferry", "ucx"];
        let is_ours = ours
            .iter()
            .any(|start| metadata.target().starts_with(start));
        let lowest = QUEUE_OF_PROCESS
            .get()
            .map(|queue| queue.level.load(Ordering::Relaxed));
        is_ours && lowest.is_some_and(|lowest| u64::from(number(*metadata.level())) >= lowest)
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let Some(queue) = QUEUE_OF_PROCESS.get() else {
            return;
        };
        let mut text = Text::default();
        event.record(&mut text);
        let metadata = event.metadata();
        let line = (
            number(*metadata.level()),
            metadata.target().to_owned(),
            text.finish(),
            metadata.line().unwrap_or(0),
        );
        if queue.sender.try_send(Item::Line(line)).is_err() {
            queue.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// An event as one line: its message, then its fields.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Text {
    fn finish(mut self) -> String {
        self.message.push_str(&self.fields);
        self.message
    }
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            // Nothing was held back.
            "held_back" | "suppressed" if format!("{value:?}") == "0" => Ok(()),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        let _ = match field.name() {
            "message" => write!(self.message, "{value}"),
            name => write!(self.fields, " {name}={value}"),
        };
    }
}

/// Sends this library's log lines of at least `level` (as Python numbers levels) to `next_log_lines`. Again: sets the
/// level. Returns whether lines come; another subscriber of this process may have been first.
#[pyfunction]
pub(crate) fn start_log(level: u64) -> bool {
    let queue = QUEUE_OF_PROCESS.get_or_init(|| {
        let (sender, receiver) = bounded(QUEUE);
        Queue {
            sender,
            receiver,
            lost: AtomicU64::new(0),
            level: AtomicU64::new(level),
        }
    });
    queue.level.store(level, Ordering::Relaxed);
    static IS_OURS: OnceLock<bool> = OnceLock::new();
    let is_ours = *IS_OURS.get_or_init(|| {
        tracing::subscriber::set_global_default(Registry::default().with(ToPython)).is_ok()
    });
    tracing::callsite::rebuild_interest_cache();
    is_ours
}

/// Waits for up to `timeout` seconds for log lines: `(level, target, text, line)`. `None` after `stop_log`.
#[pyfunction]
pub(crate) fn next_log_lines(py: Python<'_>, timeout: f64) -> Option<Vec<Line>> {
    let queue = QUEUE_OF_PROCESS.get()?;
    let timeout = Duration::try_from_secs_f64(timeout).unwrap_or_default();
    py.detach(|| {
        let mut lines = Vec::new();
        match queue.receiver.recv_timeout(timeout) {
            Ok(Item::Line(line)) => lines.push(line),
            Ok(Item::Stop) | Err(RecvTimeoutError::Disconnected) => return None,
            Err(RecvTimeoutError::Timeout) => return Some(lines),
        }
        while lines.len() < BATCH {
            match queue.receiver.try_recv() {
                Ok(Item::Line(line)) => lines.push(line),
                Ok(Item::Stop) => {
                    // For the next call.
                    let _ = queue.sender.try_send(Item::Stop);
                    break;
                }
                Err(_) => break,
            }
        }
        Some(lines)
    })
}

/// Ends the thread that calls `next_log_lines`, when it has had all lines.
#[pyfunction]
pub(crate) fn stop_log(py: Python<'_>) {
    if let Some(queue) = QUEUE_OF_PROCESS.get() {
        // A full queue has a reader who is about to make room, or none who needs to be told.
        let _ = py.detach(|| {
            queue
                .sender
                .send_timeout(Item::Stop, Duration::from_millis(500))
        });
    }
}

/// Lines that found the queue full, since the last call.
#[pyfunction]
pub(crate) fn lost_log_lines() -> u64 {
    QUEUE_OF_PROCESS
        .get()
        .map_or(0, |queue| queue.lost.swap(0, Ordering::Relaxed))
}

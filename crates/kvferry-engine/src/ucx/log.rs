//! UCX's log, forwarded to `tracing` under the target `ucx`.
//!
//! Also keeps the warnings and errors that a call logs on its own thread, because UCX's reasons
//! ("no peer failure handler") are in its log and not in its statuses.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::panic::catch_unwind;
use std::sync::{LazyLock, Mutex, Once, PoisonError};
use std::time::Instant;

use tracing::Level;
use ucx_sys::{
    UCS_LOG_LEVEL_DEBUG, UCS_LOG_LEVEL_DIAG, UCS_LOG_LEVEL_ERROR, UCS_LOG_LEVEL_INFO,
    UCS_LOG_LEVEL_WARN, kvf_disable_signals, kvf_log_set,
};

use crate::limit::LogLimits;

/// Longest text of one call that goes into an error, in lines.
const MAX_CAPTURED_LINES: usize = 4;

/// UCX's log is the process's, and so is its limit (C119).
static LIMITS: LazyLock<Mutex<LogLimits>> = LazyLock::new(Mutex::default);

thread_local! {
    static CAPTURED: RefCell<Option<Vec<String>>> = const { RefCell::new(None) };
}

/// Takes UCX's signal handlers out and its log over. For the process, once.
pub(super) fn take_over() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: takes out handlers that UCX itself installed; there is nothing to keep to.
        unsafe { kvf_disable_signals() };
        // SAFETY: `forward` has the type asked for, lives for ever and calls nothing of UCX.
        unsafe { kvf_log_set(Some(forward)) };
    });
}

/// Runs `call`, and returns what UCX complained of on this thread meanwhile.
pub(super) fn capture<T>(call: impl FnOnce() -> T) -> (T, Vec<String>) {
    CAPTURED.set(Some(Vec::new()));
    let result = call();
    (result, CAPTURED.take().unwrap_or_default())
}

unsafe extern "C" fn forward(level: c_int, file: *const c_char, line: c_uint, text: *const c_char) {
    // SAFETY: both are NUL-terminated strings that live until this function returns.
    let (file, text) = unsafe { (CStr::from_ptr(file), CStr::from_ptr(text)) };
    // A subscriber that panics must not unwind into C; its line is lost.
    let _ = catch_unwind(|| {
        record(
            level,
            &file.to_string_lossy(),
            line,
            &text.to_string_lossy(),
        )
    });
}

fn record(level: c_int, file: &str, line: c_uint, text: &str) {
    let level = level_of(level);
    // A thread that is ending has no thread-locals left, and nobody who asks for them.
    let _ = CAPTURED.try_with(|captured| {
        if let Ok(mut captured) = captured.try_borrow_mut()
            && let Some(lines) = captured.as_mut()
            && level <= Level::WARN
            && lines.len() < MAX_CAPTURED_LINES
        {
            lines.push(text.to_owned());
        }
    });
    // A line of UCX's code, as its texts have numbers and addresses in them.
    let held_back = match level {
        Level::ERROR | Level::WARN => {
            let mut limits = LIMITS.lock().unwrap_or_else(PoisonError::into_inner);
            limits.admit("ucx", &format!("{file}:{line}"), Instant::now())
        }
        _ => Some(0),
    };
    let Some(held_back) = held_back else {
        return;
    };
    match level {
        Level::ERROR => tracing::error!(target: "ucx", file, line, held_back, "{text}"),
        Level::WARN => tracing::warn!(target: "ucx", file, line, held_back, "{text}"),
        Level::INFO => tracing::info!(target: "ucx", file, line, "{text}"),
        Level::DEBUG => tracing::debug!(target: "ucx", file, line, "{text}"),
        _ => tracing::trace!(target: "ucx", file, line, "{text}"),
    }
}

fn level_of(level: c_int) -> Level {
    match c_uint::try_from(level).unwrap_or(0) {
        0..=UCS_LOG_LEVEL_ERROR => Level::ERROR,
        UCS_LOG_LEVEL_WARN => Level::WARN,
        UCS_LOG_LEVEL_INFO => Level::INFO,
        UCS_LOG_LEVEL_DIAG | UCS_LOG_LEVEL_DEBUG => Level::DEBUG,
        _ => Level::TRACE,
    }
}

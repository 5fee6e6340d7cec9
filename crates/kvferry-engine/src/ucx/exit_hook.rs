//! Has progress threads leave UCX before its destructors run.

use std::sync::Once;

use crate::exit::{EXIT_LIMIT, end_all};

/// Installs the hook, once per process. Functions given to `atexit` run in reverse order, and UCX's
/// destructors were registered when it was loaded, so this one runs before them.
pub(super) fn install() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        // SAFETY: the function is `extern "C"`, takes nothing, and does not unwind: it takes a lock
        // whose poison it ignores, and waits.
        let status = unsafe { libc::atexit(at_exit) };
        if status != 0 {
            tracing::warn!("no exit hook: shut engines down before the process ends");
        }
    });
}

extern "C" fn at_exit() {
    end_all(EXIT_LIMIT);
}

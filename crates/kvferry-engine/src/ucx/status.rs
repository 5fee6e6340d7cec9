//! UCX's statuses in words, and what an `nbx` call returned.

use std::ffi::CStr;

use ucx_sys::{
    UCS_OK, kvf_ptr_is_ptr, kvf_ptr_status, ucs_status_ptr_t, ucs_status_string, ucs_status_t,
};

use crate::error::FabricError;

/// UCX's text for a status.
pub(super) fn text(status: ucs_status_t) -> String {
    // SAFETY: the function takes any value and returns a string that it keeps (a static one, or for
    // values that it does not know a thread-local one); the text is copied here.
    let text = unsafe { CStr::from_ptr(ucs_status_string(status)) };
    text.to_string_lossy().into_owned()
}

pub(super) fn error(call: &'static str, status: ucs_status_t) -> FabricError {
    FabricError::new(call, text(status))
}

pub(super) fn check(call: &'static str, status: ucs_status_t) -> Result<(), FabricError> {
    if status == UCS_OK {
        Ok(())
    } else {
        Err(error(call, status))
    }
}

/// What an `nbx` call has come to when it returns.
pub(super) enum Outcome {
    /// It has completed and calls nobody.
    Done,
    /// Its callback will be called.
    Pending,
    /// Nothing was started, and nobody is called.
    Failed(ucs_status_t),
}

impl Outcome {
    pub(super) fn of(returned: ucs_status_ptr_t) -> Self {
        // SAFETY: both functions look at the pointer's value only.
        let (pending, status) = unsafe { (kvf_ptr_is_ptr(returned), kvf_ptr_status(returned)) };
        if pending {
            Self::Pending
        } else if status == UCS_OK {
            Self::Done
        } else {
            Self::Failed(status)
        }
    }
}

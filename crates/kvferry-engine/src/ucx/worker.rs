//! A UCX context with its one worker.
//!
//! Responsible for making them, with kvferry's settings, and for taking them down in order. Knows
//! two kinds: the message context, which has active messages only and so no handlers that read or
//! write addresses taken from the wire, and the data context, which has RMA.

use std::ffi::{CStr, CString, c_char, c_void};
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr;
use std::rc::Rc;
use std::slice;
use std::time::Instant;

use ucx_sys::*;

use super::callbacks::{Mailbox, on_message};
use super::sealed::Sealed;
use super::settings::{TcpSegments, in_text};
use super::status::Outcome;
use super::{log, status};
use crate::error::FabricError;

/// The id of the one active message that kvferry uses.
pub(super) const MESSAGE_ID: u32 = 1;

/// Rounds of one [`Worker::progress`]; bounds how long it keeps others waiting.
const MAX_ROUNDS: usize = 64;

/// Settings of UCX on top of the environment: names without `UCX_`, and values.
pub(super) type Settings<'a> = &'a [(&'a CStr, &'a CStr)];

/// What a context is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Active messages.
    Messages,
    /// One-sided reads.
    Data,
}

impl Purpose {
    fn features(self) -> u64 {
        let feature = match self {
            Self::Messages => UCP_FEATURE_AM,
            Self::Data => UCP_FEATURE_RMA,
        };
        u64::from(feature | UCP_FEATURE_WAKEUP)
    }
}

struct Configuration(*mut ucp_config_t);

impl Configuration {
    fn read() -> Result<Self, FabricError> {
        let mut config = ptr::null_mut();
        // SAFETY: null prefix and file mean "none"; the handle is written to a live place.
        let result = unsafe { ucp_config_read(ptr::null(), ptr::null(), &raw mut config) };
        status::check("ucp_config_read", result)?;
        Ok(Self(config))
    }

    fn set(&mut self, name: &CStr, value: &CStr) {
        // SAFETY: the configuration is live; both strings are NUL-terminated and copied.
        let result = unsafe { ucp_config_modify(self.0, name.as_ptr(), value.as_ptr()) };
        if result != UCS_OK {
            let status = status::text(result);
            tracing::warn!(
                ?name,
                ?value,
                status,
                "UCX refuses a setting; its default stays"
            );
        }
    }

    /// The transports in force, as the user or UCX's default has it.
    fn transports(&self) -> String {
        // SAFETY: the configuration is live; the result is null or a string of malloc's.
        let text = unsafe { owned(kvf_config_text(self.0)) };
        in_text(&text, "UCX_TLS").unwrap_or("unknown").to_owned()
    }
}

impl Drop for Configuration {
    fn drop(&mut self) {
        // SAFETY: read by `read`, released once.
        unsafe { ucp_config_release(self.0) };
    }
}

/// The transports that contexts have in force before kvferry's own settings.
pub(super) fn transports_in_force() -> Result<String, FabricError> {
    Ok(Configuration::read()?.transports())
}

/// Takes over a string that the shim made; empty if it had no memory.
///
/// # Safety
/// `text` is null or a NUL-terminated string from malloc that nobody else uses.
pub(super) unsafe fn owned(text: *mut c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: a NUL-terminated string by contract; copied here.
    let copy = unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned();
    // SAFETY: from malloc by contract, and not used again.
    unsafe { libc::free(text.cast()) };
    copy
}

pub(super) struct Context {
    handle: ucp_context_h,
    transports: String,
}

impl Context {
    fn new(purpose: Purpose, settings: Settings<'_>) -> Result<Self, FabricError> {
        let segments = TcpSegments::from_environment();
        let keys = features().tcp_segments;
        let mut config = Configuration::read()?;
        for (name, bytes) in [(keys.tx, segments.set_tx), (keys.rx, segments.set_rx)] {
            if let Some(bytes) = bytes {
                config.set(name, &CString::new(bytes.to_string()).unwrap_or_default());
            }
        }
        for (name, value) in settings {
            config.set(name, value);
        }
        let transports = config.transports();
        let params = ucp_params_t {
            field_mask: u64::from(UCP_PARAM_FIELD_FEATURES),
            features: purpose.features(),
            ..Default::default()
        };
        let mut handle = ptr::null_mut();
        let (result, said) = log::capture(|| {
            // SAFETY: parameters and configuration are valid for the call; UCX keeps neither.
            unsafe { kvf_init(&raw const params, config.0, &raw mut handle) }
        });
        explain("ucp_init", result, &transports, &said)?;
        Ok(Self { handle, transports })
    }

    pub(super) fn handle(&self) -> ucp_context_h {
        self.handle
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: live, cleaned up once, and every worker and registration of it is gone: those of
        // `Worker` by the order of its fields, those of the fabric before it lets the context go.
        unsafe { ucp_cleanup(self.handle) };
    }
}

/// A worker; destroyed before its context.
struct Handle(ucp_worker_h);

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: live and destroyed once. What its callbacks use outlives it: the mailbox by the
        // order of `Worker`'s fields, the records because the fabric drops its workers first.
        unsafe { ucp_worker_destroy(self.0) };
    }
}

/// A worker with its context.
pub(super) struct Worker {
    handle: Handle,
    context: Context,
    mailbox: Rc<Mailbox>,
    event_fd: RawFd,
    address: Vec<u8>,
}

impl Worker {
    pub(super) fn new(
        purpose: Purpose,
        settings: Settings<'_>,
        mailbox: Rc<Mailbox>,
    ) -> Result<Self, FabricError> {
        let context = Context::new(purpose, settings)?;
        let handle = create(&context)?;
        let mut event_fd = -1;
        // SAFETY: the worker is live and its context has the wake-up feature.
        let result = unsafe { ucp_worker_get_efd(handle.0, &raw mut event_fd) };
        status::check("ucp_worker_get_efd", result)?;
        let address = address(&handle)?;
        let worker = Self {
            handle,
            context,
            mailbox,
            event_fd,
            address,
        };
        if purpose == Purpose::Messages {
            worker.receive_messages()?;
        }
        Ok(worker)
    }

    fn receive_messages(&self) -> Result<(), FabricError> {
        let params = ucp_am_handler_param_t {
            field_mask: u64::from(
                UCP_AM_HANDLER_PARAM_FIELD_ID
                    | UCP_AM_HANDLER_PARAM_FIELD_CB
                    | UCP_AM_HANDLER_PARAM_FIELD_ARG,
            ),
            id: MESSAGE_ID,
            cb: Some(on_message),
            arg: Rc::as_ptr(&self.mailbox).cast::<c_void>().cast_mut(),
            ..Default::default()
        };
        // SAFETY: the worker is live and its context has active messages; the parameters are valid
        // for the call, and the mailbox outlives the worker.
        let result = unsafe { ucp_worker_set_am_recv_handler(self.handle.0, &raw const params) };
        status::check("ucp_worker_set_am_recv_handler", result)
    }

    /// Refuses a transport list over which no other process could be reached.
    ///
    /// A second worker stands for the other process: `self` does not reach it, shared memory is left
    /// out where peer failures are to be handled, and what remains is what another process would
    /// get. The worker is gone when this returns, and its endpoint with it.
    pub(super) fn check_reachable(&self) -> Result<(), FabricError> {
        let probe = create(&self.context)?;
        let params = endpoint_params(&self.address);
        let mut endpoint = ptr::null_mut();
        let (result, said) = log::capture(|| {
            // SAFETY: the probe is live; the address is our worker's own.
            unsafe { ucp_ep_create(probe.0, &raw const params, &raw mut endpoint) }
        });
        explain(
            "ucp_ep_create (self-check)",
            result,
            &self.context.transports,
            &said,
        )
    }

    /// Makes an endpoint with peer-failure handling.
    pub(super) fn create_endpoint(
        &self,
        address: &[u8],
        err_handler: ucp_err_handler_t,
    ) -> Result<ucp_ep_h, FabricError> {
        let opened = Sealed::Address.open(address);
        let address = opened.map_err(|reason| FabricError::new("ucp_ep_create", reason))?;
        let mut params = endpoint_params(address);
        params.field_mask |= u64::from(UCP_EP_PARAM_FIELD_ERR_HANDLER);
        params.err_handler = err_handler;
        let mut endpoint = ptr::null_mut();
        let (result, said) = log::capture(|| {
            // SAFETY: the worker is live; the address is one that a UCX packed, whole (its seal
            // says so); the handler's argument outlives the endpoint (see `Link`).
            unsafe { ucp_ep_create(self.handle.0, &raw const params, &raw mut endpoint) }
        });
        explain("ucp_ep_create", result, &self.context.transports, &said)?;
        Ok(endpoint)
    }

    /// Progresses until there is nothing to do, but not for ever; true if there was something.
    pub(super) fn progress(&self) -> bool {
        // SAFETY: the worker is live, and this is its thread.
        let rounds =
            (0..MAX_ROUNDS).take_while(|_| unsafe { ucp_worker_progress(self.handle.0) } != 0);
        rounds.count() > 0
    }

    /// Progresses until everything that was posted has gone out, UCX's own messages and answers to
    /// emulated reads included; false if that was not so by the deadline. 1.13 may crash if a worker
    /// is destroyed with any in its queues.
    pub(super) fn flush(&self, deadline: Instant) -> bool {
        let params = ucp_request_param_t::default();
        // SAFETY: the worker is live, the parameters are valid for the call.
        let request = unsafe { ucp_worker_flush_nbx(self.handle.0, &raw const params) };
        if !matches!(Outcome::of(request), Outcome::Pending) {
            return true;
        }
        // SAFETY: the request is live until it is freed below.
        while unsafe { ucp_request_check_status(request) } == UCS_INPROGRESS {
            if Instant::now() >= deadline {
                break;
            }
            self.progress();
        }
        // SAFETY: as above.
        let flushed = unsafe { ucp_request_check_status(request) } != UCS_INPROGRESS;
        // SAFETY: the request is not used again; UCX frees it when it ends, if it has not.
        unsafe { ucp_request_free(request) };
        flushed
    }

    /// Whether UCX agrees that nothing is pending.
    pub(super) fn arm(&self) -> bool {
        // SAFETY: the worker is live and its context has the wake-up feature.
        let result = unsafe { ucp_worker_arm(self.handle.0) };
        if result != UCS_OK && result != UCS_ERR_BUSY {
            // Polling on is safe, if not cheap.
            tracing::error!(status = status::text(result), "ucp_worker_arm failed");
        }
        result == UCS_OK
    }

    pub(super) fn event_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor belongs to the worker, which lives as long as the borrow.
        unsafe { BorrowedFd::borrow_raw(self.event_fd) }
    }

    /// Where others reach this worker, as [`Worker::create_endpoint`] takes it.
    pub(super) fn sealed_address(&self) -> Vec<u8> {
        Sealed::Address.seal(&self.address)
    }

    pub(super) fn context(&self) -> &Context {
        &self.context
    }

    /// Destroys the worker, which ends everything that is under way on it.
    pub(super) fn end(self) -> Context {
        let Self {
            handle,
            context,
            mailbox,
            ..
        } = self;
        drop(handle);
        drop(mailbox);
        context
    }
}

fn create(context: &Context) -> Result<Handle, FabricError> {
    let params = ucp_worker_params_t {
        field_mask: u64::from(UCP_WORKER_PARAM_FIELD_THREAD_MODE),
        thread_mode: UCS_THREAD_MODE_SINGLE,
        ..Default::default()
    };
    let mut worker = ptr::null_mut();
    let (result, said) = log::capture(|| {
        // SAFETY: the context is live, the parameters are valid for the call.
        unsafe { ucp_worker_create(context.handle, &raw const params, &raw mut worker) }
    });
    explain("ucp_worker_create", result, &context.transports, &said)?;
    Ok(Handle(worker))
}

fn address(worker: &Handle) -> Result<Vec<u8>, FabricError> {
    let (mut address, mut length) = (ptr::null_mut(), 0);
    // SAFETY: the worker is live; both results are written to live places.
    let result = unsafe { ucp_worker_get_address(worker.0, &raw mut address, &raw mut length) };
    status::check("ucp_worker_get_address", result)?;
    // SAFETY: UCX says that `length` bytes are there; copied here.
    let copy = unsafe { slice::from_raw_parts(address.cast::<u8>(), length) }.to_vec();
    // SAFETY: from this worker, released once.
    unsafe { ucp_worker_release_address(worker.0, address) };
    Ok(copy)
}

fn endpoint_params(address: &[u8]) -> ucp_ep_params_t {
    ucp_ep_params_t {
        field_mask: u64::from(
            UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE,
        ),
        address: address.as_ptr().cast(),
        err_mode: UCP_ERR_HANDLING_MODE_PEER,
        ..Default::default()
    }
}

/// An error with the transports in force and UCX's own reasons, which its statuses do not give.
fn explain(
    call: &'static str,
    result: ucs_status_t,
    transports: &str,
    said: &[String],
) -> Result<(), FabricError> {
    if result == UCS_OK {
        return Ok(());
    }
    let mut words = format!("{} (UCX_TLS={transports})", status::text(result));
    if !said.is_empty() {
        words.push_str("; UCX says: ");
        words.push_str(&said.join("; "));
    }
    Err(FabricError::new(call, words))
}

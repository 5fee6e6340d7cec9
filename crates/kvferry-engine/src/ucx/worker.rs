//! A UCX context with its one worker.
//!
//! Responsible for making them, with kvferry's settings, and for taking them down in order. Knows
//! two kinds: the message context, which has active messages only and so no handlers that read or
//! write addresses taken from the wire, and the data context, which has RMA.

use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_void};
use std::fmt;
use std::mem;
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr;
use std::rc::Rc;
use std::slice;
use std::time::Instant;

use ucx_sys::*;

use super::callbacks::{Mailbox, on_message};
use super::native::{is_rdma, reaches_over_rdma, summary};
use super::sealed::Sealed;
use super::settings::{
    TcpSegments, UcxOptions, device_exists, in_text, is_interface, missing_device, uses_tcp,
    without_keep_alive,
};
use super::status::Outcome;
use super::transports::{self, Resource};
use super::{log, memlock, status};
use crate::error::FabricError;

/// The id of the one active message that kvferry uses.
pub(super) const MESSAGE_ID: u32 = 1;

/// Rounds of one [`Worker::progress`]; bounds how long it keeps others waiting.
const MAX_ROUNDS: usize = 64;

/// What a context is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose<'a> {
    /// Active messages.
    Messages,
    /// One-sided reads, over these transports if any are named, else over the user's.
    Data(Option<&'a str>),
}

impl Purpose<'_> {
    fn features(self) -> u64 {
        let feature = match self {
            Self::Messages => UCP_FEATURE_AM,
            Self::Data(_) => UCP_FEATURE_RMA,
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

    fn modify(&mut self, name: &CStr, value: &str) -> Result<(), FabricError> {
        const CALL: &str = "ucp_config_modify";
        let text =
            CString::new(value).map_err(|error| FabricError::new(CALL, error.to_string()))?;
        // SAFETY: the configuration is live; both strings are NUL-terminated and copied.
        let result = unsafe { ucp_config_modify(self.0, name.as_ptr(), text.as_ptr()) };
        status::check(CALL, result).map_err(|error| {
            let name = name.to_string_lossy();
            FabricError::new(CALL, format!("{} (UCX_{name}={value})", error.status))
        })
    }

    /// Sets what is a matter of speed only.
    fn prefer(&mut self, name: &CStr, value: &str) {
        if let Err(error) = self.modify(name, value) {
            tracing::warn!(%error, "UCX refuses a setting; its default stays");
        }
    }

    /// Sets what the user and the purpose ask for. Before kvferry's preferences, as those depend on it.
    fn choose(&mut self, purpose: Purpose<'_>, options: &UcxOptions) -> Result<(), FabricError> {
        let tls = match purpose {
            Purpose::Data(Some(list)) => Some(list),
            Purpose::Data(None) | Purpose::Messages => options.transports.as_deref(),
        };
        if let Some(list) = tls {
            self.modify(c"TLS", list)?;
        }
        if let Some(list) = &options.net_devices {
            self.modify(c"NET_DEVICES", list)?;
        }
        Ok(())
    }

    /// The transports and network devices in force, as the user or UCX's default has them.
    fn in_force(&self) -> InForce {
        // SAFETY: the configuration is live; the result is null or a string of malloc's.
        let text = unsafe { owned(kvf_config_text(self.0)) };
        let of = |name| in_text(&text, name).unwrap_or("unknown").to_owned();
        InForce {
            tls: of("UCX_TLS"),
            net_devices: of("UCX_NET_DEVICES"),
        }
    }
}

/// Lists that a context has in force.
#[derive(Clone, Debug)]
pub(super) struct InForce {
    /// `UCX_TLS`.
    pub(super) tls: String,
    /// `UCX_NET_DEVICES`.
    pub(super) net_devices: String,
}

impl fmt::Display for InForce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "UCX_TLS={}, UCX_NET_DEVICES={}",
            self.tls, self.net_devices
        )
    }
}

impl Drop for Configuration {
    fn drop(&mut self) {
        // SAFETY: read by `read`, released once.
        unsafe { ucp_config_release(self.0) };
    }
}

/// The transports that contexts have in force before kvferry's own settings.
pub(super) fn transports_in_force(options: &UcxOptions) -> Result<String, FabricError> {
    let mut config = Configuration::read()?;
    config.choose(Purpose::Messages, options)?;
    Ok(config.in_force().tls)
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
    in_force: InForce,
    found: Vec<Resource>,
}

impl Context {
    fn new(purpose: Purpose<'_>, options: &UcxOptions) -> Result<Self, FabricError> {
        let mut config = Configuration::read()?;
        config.choose(purpose, options)?;
        let in_force = config.in_force();
        // UCX warns of settings for transports that it does not use.
        if uses_tcp(&in_force.tls, &in_force.net_devices, is_interface) {
            let (segments, keys) = (TcpSegments::from_environment(), features().tcp_segments);
            for (name, bytes) in [(keys.tx, segments.set_tx), (keys.rx, segments.set_rx)] {
                if let Some(bytes) = bytes {
                    config.prefer(name, &bytes.to_string());
                }
            }
        }
        if without_keep_alive(features().version, &in_force.tls) {
            config.prefer(c"KEEPALIVE_INTERVAL", "inf");
        }
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
        explain("ucp_init", result, &in_force, &said)?;
        // SAFETY: the context is live and this thread's.
        let found = unsafe { transports::found(handle) };
        let context = Self {
            handle,
            in_force,
            found,
        };
        context.check_devices(options, &said)?;
        memlock::check(&context.found)?;
        Ok(context)
    }

    /// Refuses a typed list with a device that is not here, which UCX passes over with a warning.
    fn check_devices(&self, options: &UcxOptions, said: &[String]) -> Result<(), FabricError> {
        let list = options.net_devices.as_deref().unwrap_or("all");
        let Some(device) = missing_device(list, &self.found, device_exists) else {
            return Ok(());
        };
        let mut words = format!(
            "there is no network device {device:?} here ({}); name devices of this host, or all",
            self.in_force
        );
        add_said(&mut words, said);
        Err(FabricError::new("ucp_init", words))
    }

    pub(super) fn handle(&self) -> ucp_context_h {
        self.handle
    }

    /// The lists in force.
    pub(super) fn in_force(&self) -> &InForce {
        &self.in_force
    }

    /// What UCX found with them.
    pub(super) fn found(&self) -> &[Resource] {
        &self.found
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
    /// Whether something stayed in its queues when it was flushed for the last time.
    stuck: Cell<bool>,
}

impl Worker {
    pub(super) fn new(
        purpose: Purpose<'_>,
        options: &UcxOptions,
        mailbox: Rc<Mailbox>,
    ) -> Result<Self, FabricError> {
        let context = Context::new(purpose, options)?;
        let handle = create(&context)?;
        let (address, event_fd) = (address(&handle)?, event_fd(&handle)?);
        let worker = Self {
            handle,
            context,
            mailbox,
            event_fd,
            address,
            stuck: Cell::new(false),
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
    /// With RDMA there is little to ask, and it must not be asked this way: 1.13 aborts if a worker is
    /// destroyed whose endpoint is to be connected over ud.
    ///
    /// Else a second worker stands for the other process: `self` does not reach it, shared memory is left
    /// out where peer failures are to be handled, and what remains is what another process would
    /// get. The worker is gone when this returns, and its endpoint with it.
    pub(super) fn check_reachable(&self) -> Result<(), FabricError> {
        const CALL: &str = "ucp_ep_create (self-check)";
        let found = self.context.found();
        match reaches_over_rdma(found) {
            Some(true) => return Ok(()),
            Some(false) => {
                let (found, in_force) = (summary(found), &self.context.in_force);
                let reason = format!(
                    "no transport for messages to other processes: UCX found {found} ({in_force}); rc needs \
                     ud to set up its connections, if only as ud:aux"
                );
                return Err(FabricError::new(CALL, reason));
            }
            None => {}
        }
        let probe = create(&self.context)?;
        let params = endpoint_params(&self.address);
        let mut endpoint = ptr::null_mut();
        let (result, said) = log::capture(|| {
            // SAFETY: the probe is live; the address is our worker's own.
            unsafe { ucp_ep_create(probe.0, &raw const params, &raw mut endpoint) }
        });
        explain(CALL, result, &self.context.in_force, &said)
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
        explain("ucp_ep_create", result, &self.context.in_force, &said)?;
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
        self.stuck.set(!flushed);
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

    /// Destroys the worker, which ends everything that is under way on it, and makes another in its
    /// context. Its address is another one then.
    ///
    /// # Errors
    /// If no other can be made; the old one is destroyed all the same when this is dropped.
    pub(super) fn renew(&mut self) -> Result<(), FabricError> {
        let handle = create(&self.context)?;
        let (address, event_fd) = (address(&handle)?, event_fd(&handle)?);
        self.handle = handle;
        self.address = address;
        self.event_fd = event_fd;
        Ok(())
    }

    /// Whether destroying it would abort the process: on 1.13, with RDMA, while an endpoint that was closed
    /// before its peer had answered waits for ud to give up, which takes minutes.
    pub(super) fn cannot_be_destroyed(&self) -> bool {
        self.stuck.get()
            && !features().version.at_least(1, 14)
            && self.context.found.iter().any(is_rdma)
    }

    /// Leaves worker and context as they are until the process ends. Nobody progresses them any more.
    pub(super) fn leave(self) {
        let Self {
            handle,
            context,
            mailbox,
            ..
        } = self;
        // UCX holds a pointer to the mailbox.
        mem::forget((handle, context, mailbox));
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
    explain("ucp_worker_create", result, &context.in_force, &said)?;
    Ok(Handle(worker))
}

fn event_fd(worker: &Handle) -> Result<RawFd, FabricError> {
    let mut event_fd = -1;
    // SAFETY: the worker is live and its context has the wake-up feature.
    let result = unsafe { ucp_worker_get_efd(worker.0, &raw mut event_fd) };
    status::check("ucp_worker_get_efd", result)?;
    Ok(event_fd)
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

/// An error with the lists in force and UCX's own reasons, which its statuses do not give.
fn explain(
    call: &'static str,
    result: ucs_status_t,
    in_force: &InForce,
    said: &[String],
) -> Result<(), FabricError> {
    if result == UCS_OK {
        return Ok(());
    }
    let mut words = format!("{} ({in_force})", status::text(result));
    add_said(&mut words, said);
    Err(FabricError::new(call, words))
}

fn add_said(words: &mut String, said: &[String]) {
    if !said.is_empty() {
        words.push_str("; UCX says: ");
        words.push_str(&said.join("; "));
    }
}

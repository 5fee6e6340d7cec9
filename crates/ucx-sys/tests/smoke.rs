//! The bindings against the UCX that this process loaded.
//!
//! Run it once with the system's UCX and once with `LD_LIBRARY_PATH` at another: one build must pass
//! with both. `KVFERRY_EXPECT_UCX` (such as `1.22`) says which UCX the run is meant for.
//!
//! It is one test function, as signal handlers, the log function and the environment belong to the
//! process.
#![allow(unsafe_code)]
// Helpers of a test are tests, which the lint cannot tell.
#![allow(clippy::unwrap_used)]

use std::env;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::{Mutex, MutexGuard};

use ucx_sys::*;

const OK: ucs_status_t = UCS_OK;

static MESSAGES: Mutex<Vec<(c_int, String)>> = Mutex::new(Vec::new());

fn messages() -> MutexGuard<'static, Vec<(c_int, String)>> {
    MESSAGES.lock().unwrap()
}

unsafe extern "C" fn record(
    level: c_int,
    file: *const c_char,
    line: c_uint,
    message: *const c_char,
) {
    // SAFETY: the shim passes NUL-terminated strings that live until this function returns.
    let (file, message) = unsafe { (CStr::from_ptr(file), CStr::from_ptr(message)) };
    assert!(!file.is_empty());
    assert_ne!(line, 0);
    messages().push((level, message.to_string_lossy().into_owned()));
}

#[test]
fn one_build_works_with_the_loaded_ucx() {
    // SAFETY: this is the only test of the process, and no other thread of it reads the environment.
    unsafe { env::set_var("UCX_NET_DEVICES", "lo") };
    // A user's settings would be tested instead of ours, and UCX warns about UCX_DIR.
    let settings = [
        "UCX_TLS",
        "UCX_LOG_LEVEL",
        "UCX_TCP_TX_SEG_SIZE",
        "UCX_TCP_RX_SEG_SIZE",
    ];
    for name in settings.into_iter().chain(["UCX_DIR"]) {
        // SAFETY: as above.
        unsafe { env::remove_var(name) };
    }

    the_expected_version_is_loaded();
    // SAFETY: takes out handlers of UCX's own and has no requirements.
    unsafe { kvf_disable_signals() };
    ucx_handles_no_signals();
    // SAFETY: `record` is a function of the type asked for, and calls nothing of UCX.
    unsafe { kvf_log_set(Some(record)) };
    status_pointers_are_told_apart();
    a_failed_init_is_logged_to_the_function();
    a_worker_has_an_address_and_an_endpoint_has_transports();
    ucx_handles_no_signals();
}

fn the_expected_version_is_loaded() {
    let features = load(None).unwrap();
    println!(
        "UCX {} from {:?}, built with headers of {:?}",
        features.version, features.library, HEADERS_VERSION
    );
    assert!(features.version.at_least(1, 13));
    assert!(HEADERS_VERSION >= (1, 13));
    // SAFETY: the function returns a static NUL-terminated string.
    let text = unsafe { CStr::from_ptr(ucp_get_version_string()) }
        .to_str()
        .unwrap();
    assert!(
        text.starts_with(&features.version.to_string()),
        "{text} is not {}",
        features.version
    );
    let library = features
        .library
        .as_deref()
        .expect("libucp is a shared library");
    assert!(
        library
            .file_name()
            .unwrap()
            .to_str()
            .unwrap()
            .starts_with("libucp.so")
    );
    assert_eq!(
        features.ep_transports.is_some(),
        features.version.at_least(1, 14)
    );

    if let Ok(expected) = env::var("KVFERRY_EXPECT_UCX") {
        let loaded = format!("{}.{}", features.version.major, features.version.minor);
        assert_eq!(
            loaded,
            expected,
            "the wrong UCX was loaded, from {}",
            library.display()
        );
    }
}

fn ucx_handles_no_signals() {
    // Rust's run-time has handlers for SIGSEGV and SIGBUS of its own, for stack overflows, which it
    // installs only if nobody was first. With 1.13 UCX was; now nobody is left.
    for signal in [libc::SIGFPE, libc::SIGILL] {
        assert_eq!(handler(signal), libc::SIG_DFL, "signal {signal}");
    }
    for signal in [libc::SIGSEGV, libc::SIGBUS] {
        let library = library_of(handler(signal));
        assert!(
            library
                .as_deref()
                .is_none_or(|name| !name.contains("libuc")),
            "signal {signal} is handled by {library:?}"
        );
    }
}

fn handler(signal: c_int) -> libc::sighandler_t {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: without a new action, sigaction only writes the present one, to the place given.
    let status = unsafe { libc::sigaction(signal, ptr::null(), action.as_mut_ptr()) };
    assert_eq!(status, 0);
    // SAFETY: sigaction succeeded and filled it in.
    unsafe { action.assume_init() }.sa_sigaction
}

/// The file that a handler's code comes from; `None` for the default and for "ignored".
fn library_of(handler: libc::sighandler_t) -> Option<String> {
    if [libc::SIG_DFL, libc::SIG_IGN].contains(&handler) {
        return None;
    }
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: dladdr takes any address and writes to the structure given.
    let found = unsafe { libc::dladdr(handler as *const c_void, info.as_mut_ptr()) };
    assert_ne!(found, 0, "a handler outside of every loaded file");
    // SAFETY: dladdr succeeded, so the structure is filled in and its name is NUL-terminated.
    let name = unsafe { CStr::from_ptr(info.assume_init().dli_fname) };
    Some(name.to_string_lossy().into_owned())
}

fn status_pointers_are_told_apart() {
    let of = |status: ucs_status_t| isize::from(status) as *const c_void;
    let place = 0_u64;
    let request = (&raw const place).cast::<c_void>();
    // (pointer, is an error, is a request, status)
    let cases = [
        (of(UCS_OK), false, false, UCS_OK),
        (of(UCS_ERR_NO_MESSAGE), true, false, UCS_ERR_NO_MESSAGE),
        (
            of(UCS_ERR_ENDPOINT_TIMEOUT),
            true,
            false,
            UCS_ERR_ENDPOINT_TIMEOUT,
        ),
        (of(UCS_ERR_LAST), true, false, UCS_ERR_LAST),
        (request, false, true, UCS_INPROGRESS),
    ];
    for (pointer, error, in_progress, status) in cases {
        // SAFETY: the three functions look at the pointer's value only.
        unsafe {
            assert_eq!(kvf_ptr_is_err(pointer), error, "{pointer:?}");
            assert_eq!(kvf_ptr_is_ptr(pointer), in_progress, "{pointer:?}");
            assert_eq!(kvf_ptr_status(pointer), status, "{pointer:?}");
        }
    }
    // SAFETY: arithmetic only.
    assert_eq!(unsafe { kvf_dt_contig(1) }, 1 << UCP_DATATYPE_SHIFT);
}

/// A configuration with `settings` on top of the environment.
fn config(settings: &[(&CStr, &CStr)]) -> *mut ucp_config_t {
    let mut config = ptr::null_mut();
    // SAFETY: null prefix and file mean "none"; the handle is written to a live place.
    let status = unsafe { ucp_config_read(ptr::null(), ptr::null(), &raw mut config) };
    assert_eq!(status, OK);
    for (name, value) in settings {
        // SAFETY: the configuration was read above; both strings are NUL-terminated and copied.
        let status = unsafe { ucp_config_modify(config, name.as_ptr(), value.as_ptr()) };
        assert_eq!(status, OK, "{name:?} = {value:?}");
    }
    config
}

fn init(settings: &[(&CStr, &CStr)]) -> Result<ucp_context_h, ucs_status_t> {
    let config = config(settings);
    let params = ucp_params_t {
        field_mask: u64::from(UCP_PARAM_FIELD_FEATURES),
        features: u64::from(UCP_FEATURE_AM | UCP_FEATURE_WAKEUP),
        ..Default::default()
    };
    let mut context = ptr::null_mut();
    // SAFETY: parameters and configuration are valid for the call; UCX keeps neither.
    let status = unsafe { kvf_init(&raw const params, config, &raw mut context) };
    // SAFETY: read by `config`, released once.
    unsafe { ucp_config_release(config) };
    if status == OK {
        Ok(context)
    } else {
        Err(status)
    }
}

fn a_failed_init_is_logged_to_the_function() {
    messages().clear();
    assert_eq!(init(&[(c"TLS", c"nosuch")]), Err(UCS_ERR_NO_DEVICE));
    let logged = messages().clone();
    let expect = |level, words| {
        assert!(
            logged
                .iter()
                .any(|(l, text)| *l == level && text.contains(words)),
            "no message of level {level} with {words:?} in {logged:?}"
        );
    };
    expect(
        UCS_LOG_LEVEL_WARN as c_int,
        "transport 'nosuch' is not available",
    );
    expect(
        UCS_LOG_LEVEL_ERROR as c_int,
        "no usable transports/devices (asked nosuch",
    );

    // A message longer than the shim's buffer arrives whole.
    messages().clear();
    let long = CString::new("x".repeat(5000)).unwrap();
    let config = config(&[]);
    // SAFETY: the configuration is live, both strings are NUL-terminated.
    let status = unsafe { ucp_config_modify(config, c"RNDV_THRESH".as_ptr(), long.as_ptr()) };
    // SAFETY: released once.
    unsafe { ucp_config_release(config) };
    assert_eq!(status, UCS_ERR_INVALID_PARAM);
    let whole = |(_, text): &(c_int, String)| text.contains(long.to_str().unwrap());
    assert!(messages().iter().any(whole), "{:?}", messages());
}

fn a_worker_has_an_address_and_an_endpoint_has_transports() {
    messages().clear();
    let keys = features().tcp_segments;
    let context = init(&[(c"TLS", c"tcp"), (keys.tx, c"256K"), (keys.rx, c"256K")])
        .expect("a context on tcp");

    let params = ucp_worker_params_t {
        field_mask: u64::from(UCP_WORKER_PARAM_FIELD_THREAD_MODE),
        thread_mode: UCS_THREAD_MODE_SINGLE,
        ..Default::default()
    };
    let mut worker = ptr::null_mut();
    // SAFETY: the context is live, the parameters are valid for the call.
    let status = unsafe { ucp_worker_create(context, &raw const params, &raw mut worker) };
    assert_eq!(status, OK);

    let mut efd = -1;
    // SAFETY: the worker is live and its context has the wake-up feature.
    let status = unsafe { ucp_worker_get_efd(worker, &raw mut efd) };
    assert_eq!(status, OK);
    assert!(efd >= 0);

    let (mut address, mut length) = (ptr::null_mut(), 0);
    // SAFETY: the worker is live; both results are written to live places.
    let status = unsafe { ucp_worker_get_address(worker, &raw mut address, &raw mut length) };
    assert_eq!(status, OK);
    assert!((16..1024).contains(&length), "an address of {length} bytes");

    let params = ucp_ep_params_t {
        field_mask: u64::from(
            UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE,
        ),
        address,
        err_mode: UCP_ERR_HANDLING_MODE_PEER,
        ..Default::default()
    };
    let mut ep = ptr::null_mut();
    // SAFETY: the address is the worker's own and still live.
    let status = unsafe { ucp_ep_create(worker, &raw const params, &raw mut ep) };
    assert_eq!(status, OK);

    let text = ep_text(ep);
    assert!(text.contains("tcp/lo"), "{text}");
    // The names of the settings are right only if they had an effect: eager messages of one long
    // segment, in the words of the old protocols and of the new ones.
    let eager = ["<egr/short>..262137", "0..262136"];
    assert!(
        eager.iter().any(|range| text.contains(range)),
        "no segments of 256 KiB in {text}"
    );
    if let Some(query) = features().ep_transports {
        assert_eq!(transports(query, ep), [("tcp".to_owned(), "lo".to_owned())]);
    }

    close(worker, ep);
    // SAFETY: each handle is live, released once, and the endpoint before its worker.
    unsafe {
        ucp_worker_release_address(worker, address);
        ucp_worker_destroy(worker);
        ucp_cleanup(context);
    }
    assert_eq!(messages().as_slice(), [], "UCX complained");
}

fn ep_text(ep: ucp_ep_h) -> String {
    // SAFETY: the endpoint is live.
    let text = unsafe { kvf_ep_text(ep) };
    assert!(!text.is_null());
    // SAFETY: the shim returned a NUL-terminated string.
    let owned = unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned();
    // SAFETY: it came from malloc, and is not used again.
    unsafe { libc::free(text.cast()) };
    owned
}

fn transports(query: EpQueryTransports, ep: ucp_ep_h) -> Vec<(String, String)> {
    let mut entries = [kvf_transport_entry_t::default(); 8];
    let mut attr = kvf_ep_attr_t {
        field_mask: u64::from(KVF_EP_ATTR_FIELD_TRANSPORTS),
        transports: kvf_transports_t {
            entries: entries.as_mut_ptr(),
            num_entries: c_uint::try_from(entries.len()).unwrap(),
            entry_size: size_of::<kvf_transport_entry_t>(),
        },
        ..Default::default()
    };
    // SAFETY: the endpoint is live, the attributes name room for as many entries as they say.
    assert_eq!(unsafe { query(ep, &raw mut attr) }, OK);
    let name = |text: *const c_char| {
        // SAFETY: UCX's strings are NUL-terminated and live as long as the endpoint.
        unsafe { CStr::from_ptr(text) }.to_str().unwrap().to_owned()
    };
    entries[..attr.transports.num_entries as usize]
        .iter()
        .map(|entry| (name(entry.transport_name), name(entry.device_name)))
        .collect()
}

fn close(worker: ucp_worker_h, ep: ucp_ep_h) {
    let params = ucp_request_param_t {
        op_attr_mask: UCP_OP_ATTR_FIELD_FLAGS,
        flags: UCP_EP_CLOSE_FLAG_FORCE,
        ..Default::default()
    };
    // SAFETY: the endpoint is live and not used again; the parameters are valid for the call.
    let request = unsafe { ucp_ep_close_nbx(ep, &raw const params) };
    // SAFETY: looks at the pointer's value only.
    if !unsafe { kvf_ptr_is_ptr(request) } {
        assert!(request.is_null(), "closing failed");
        return;
    }
    // SAFETY: the request is live until it is freed below, the worker throughout.
    unsafe {
        while ucp_request_check_status(request) == UCS_INPROGRESS {
            ucp_worker_progress(worker);
        }
        ucp_request_free(request);
    }
}

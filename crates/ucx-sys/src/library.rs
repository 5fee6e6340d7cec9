//! Loading UCX into this process.
//!
//! Responsible for one `libucp` per process, for its functions, and for saying which other copies are there.
//! Not responsible for choosing one: that is the caller's.
//!
//! Invariant: the table of functions is filled once, from one library, which is never unloaded.

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::{Mutex, OnceLock, PoisonError};

use thiserror::Error;

use crate::bindings::{Functions, kvf_bind};
use crate::features::{Features, Version};

/// The oldest UCX that kvferry runs with.
pub const MIN_VERSION: (u32, u32) = (1, 13);
/// The file that is looked for where no path is given; the same for every version so far.
const NAME: &str = "libucp.so.0";

/// Why there is no UCX in this process.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The dynamic loader does not have it.
    #[error(
        "UCX could not be loaded from {file}: {reason}; install it (Debian: apt-get install libucx0), or say where \
         libucp.so.0 is"
    )]
    NotLoaded {
        /// What was tried.
        file: String,
        /// The loader's words.
        reason: String,
    },
    /// It is no UCX from 1.13 on.
    #[error("{file} has no function {name}: it is not UCX {}.{} or newer", MIN_VERSION.0, MIN_VERSION.1)]
    Missing {
        /// The file.
        file: String,
        /// The function.
        name: String,
    },
    /// It is too old.
    #[error("{file} is UCX {version}; kvferry needs {}.{} or newer", MIN_VERSION.0, MIN_VERSION.1)]
    TooOld {
        /// The file.
        file: String,
        /// Its version.
        version: Version,
    },
    /// Another one is there, by the same name: its parts would be mixed.
    #[error(
        "UCX is loaded from {loaded} already, and {wanted} was asked for; one process can use only one of them: ask \
         for the first, or load this one before whoever loaded it"
    )]
    Other {
        /// The one that is there.
        loaded: String,
        /// The one that was asked for.
        wanted: String,
    },
}

struct Loaded {
    functions: Functions,
    features: Features,
}

static LOADED: OnceLock<Loaded> = OnceLock::new();
static LOADING: Mutex<()> = Mutex::new(());

/// Loads UCX, unless it is loaded: `libucp.so.0` as the dynamic loader finds it, or the one at `path`, a file or a
/// directory that has it. A path without a slash is as none.
///
/// # Errors
/// [`LoadError`]; a later call tries again.
pub fn load(path: Option<&Path>) -> Result<&'static Features, LoadError> {
    let _one_at_a_time = LOADING.lock().unwrap_or_else(PoisonError::into_inner);
    // A bare name is for the loader to find, like no path at all.
    let wanted = path
        .map(file_in)
        .filter(|file| file.components().count() > 1);
    if let Some(loaded) = LOADED.get() {
        refuse_other(loaded.features.library.as_deref(), wanted.as_deref())?;
        return Ok(&loaded.features);
    }
    if wanted.is_some() {
        // The loader takes a library of the same name for the same, path or not.
        let same_name = copies().into_iter().find(|file| has_name(file, NAME));
        refuse_other(same_name.as_deref(), wanted.as_deref())?;
    }
    let loaded = open(wanted.as_deref().unwrap_or(Path::new(NAME)))?;
    Ok(&LOADED.get_or_init(|| loaded).features)
}

/// What the loaded UCX is, if one is loaded by [`load`].
pub fn loaded() -> Option<&'static Features> {
    LOADED.get().map(|loaded| &loaded.features)
}

/// What the loaded UCX is.
///
/// # Panics
/// Before [`load`] has succeeded.
#[track_caller]
pub fn features() -> &'static Features {
    loaded().expect(UNLOADED)
}

const UNLOADED: &str = "ucx_sys::load comes before every other function";

/// The table. Every function's contract has it that [`load`] has succeeded.
#[inline]
#[track_caller]
pub(crate) fn functions() -> &'static Functions {
    &LOADED.get().expect(UNLOADED).functions
}

/// The files of all `libucp` in this process, whoever loaded them. Python wheels bring copies of their own under names
/// such as `libucp-0123abcd.so.0.0.0`.
#[must_use]
pub fn copies() -> Vec<PathBuf> {
    unsafe extern "C" fn visit(
        info: *mut libc::dl_phdr_info,
        _size: usize,
        found: *mut c_void,
    ) -> c_int {
        // SAFETY: `found` is the vector below, borrowed for the time of the walk; the loader passes a valid structure
        // whose name is NUL-terminated or null.
        let (found, name) = unsafe { (&mut *found.cast::<Vec<PathBuf>>(), (*info).dlpi_name) };
        if !name.is_null() {
            // SAFETY: as above.
            let name = unsafe { CStr::from_ptr(name) };
            let file = PathBuf::from(OsStr::from_bytes(name.to_bytes()));
            if has_name(&file, "libucp.so") || has_name(&file, "libucp-") {
                found.push(file);
            }
        }
        0
    }
    let mut found: Vec<PathBuf> = Vec::new();
    // SAFETY: the function has the type that is asked for and does not unwind; the vector outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut found).cast()) };
    found
}

fn has_name(file: &Path, start: &str) -> bool {
    let name = file.file_name().unwrap_or_default();
    name.as_bytes().starts_with(start.as_bytes())
}

fn file_in(path: &Path) -> PathBuf {
    if path.is_dir() {
        path.join(NAME)
    } else {
        path.to_owned()
    }
}

fn refuse_other(loaded: Option<&Path>, wanted: Option<&Path>) -> Result<(), LoadError> {
    let (Some(loaded), Some(wanted)) = (loaded, wanted) else {
        return Ok(());
    };
    let is_same = match (loaded.canonicalize(), wanted.canonicalize()) {
        (Ok(loaded), Ok(wanted)) => loaded == wanted,
        _ => loaded == wanted,
    };
    if is_same {
        return Ok(());
    }
    Err(LoadError::Other {
        loaded: loaded.display().to_string(),
        wanted: wanted.display().to_string(),
    })
}

fn open(file: &Path) -> Result<Loaded, LoadError> {
    let shown = file.display().to_string();
    let not_loaded = |reason: String| LoadError::NotLoaded {
        file: shown.clone(),
        reason,
    };
    let path = CString::new(file.as_os_str().as_bytes())
        .map_err(|_| not_loaded("the path has a NUL byte".to_owned()))?;
    // SAFETY: the path is NUL-terminated. The constructors that run are UCX's, which any program that links it runs.
    let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() {
        return Err(not_loaded(loader_error()));
    }
    let find = |name: &'static CStr| {
        let address = symbol(library, name);
        if address.is_null() {
            let name = name.to_string_lossy().into_owned();
            return Err(LoadError::Missing {
                file: shown.clone(),
                name,
            });
        }
        Ok(address)
    };
    // SAFETY: the addresses are those of the functions of these names in a library that calls itself libucp. That their
    // types are those of the headers is what UCX promises from 1.13 on for this file name.
    let functions = unsafe { Functions::find(find)? };
    let (mut major, mut minor, mut release) = (0, 0, 0);
    // SAFETY: the three pointers are to live integers, which is all that the function asks.
    unsafe { (functions.ucp_get_version)(&raw mut major, &raw mut minor, &raw mut release) };
    let version = Version {
        major,
        minor,
        release,
    };
    if !version.at_least(MIN_VERSION.0, MIN_VERSION.1) {
        return Err(LoadError::TooOld {
            file: shown,
            version,
        });
    }
    // SAFETY: `find_symbol` fits the library, which is a live handle; nobody uses the shim yet.
    let missing = unsafe { kvf_bind(Some(find_symbol), library) };
    if !missing.is_null() {
        // SAFETY: the shim returns one of its string literals.
        let name = unsafe { CStr::from_ptr(missing) };
        return Err(LoadError::Missing {
            file: shown,
            name: name.to_string_lossy().into_owned(),
        });
    }
    let features = Features::of(version, |name| symbol(library, name));
    Ok(Loaded {
        functions,
        features,
    })
}

unsafe extern "C" fn find_symbol(library: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: the shim passes the handle back and one of its string literals.
    unsafe { libc::dlsym(library, name) }
}

/// The address of `name` in a library or what it needs, or null.
fn symbol(library: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: the handle is live, since libraries are not closed here, and the name is NUL-terminated.
    unsafe { libc::dlsym(library, name.as_ptr()) }
}

/// The file that holds the code at `address`.
pub(crate) fn library_of(address: *mut c_void) -> Option<PathBuf> {
    if address.is_null() {
        return None;
    }
    let mut info = libc::Dl_info {
        dli_fname: ptr::null(),
        dli_fbase: ptr::null_mut(),
        dli_sname: ptr::null(),
        dli_saddr: ptr::null_mut(),
    };
    // SAFETY: dladdr accepts any address and writes to the structure that it is given.
    let found = unsafe { libc::dladdr(address, &raw mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: dladdr succeeded, so the name is a NUL-terminated string of the loader's, valid while the library is
    // loaded; it is copied here.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(OsStr::from_bytes(name.to_bytes())))
}

fn loader_error() -> String {
    // SAFETY: no requirements; the answer is null or a NUL-terminated string of this thread's.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "the loader does not say why".to_owned();
    }
    // SAFETY: as above; it is copied before the next call of the loader.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

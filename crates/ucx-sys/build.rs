//! Finds UCX's headers, generates the bindings and compiles `native/shim.c`.
//!
//! Nothing is linked: what bindgen declares as functions of UCX becomes a table of pointers that is filled
//! when UCX is loaded ([`table`]), and one Rust function of the same name per entry.
//!
//! Anything that is missing ends in one `cargo::error` line that says what was
//! looked for and what to install; nothing here panics over the machine's state.

use std::env;
use std::fs;
use std::panic;
use std::path::{Path, PathBuf};

use quote::quote;

/// The oldest UCX that kvferry runs with.
const MIN_VERSION: (u32, u32) = (1, 13);

const INSTALL_UCX: &str = "apt-get install libucx-dev pkg-config, or set UCX_DIR to a prefix with \
     include/ucp/api/ucp.h (scripts/fetch-ucx makes one)";
const INSTALL_LIBCLANG: &str = "apt-get install libclang-dev, or set LIBCLANG_PATH to the \
     directory that holds libclang.so";

/// The functions that kvferry calls; their types follow.
const FUNCTIONS: &[&str] = &[
    "kvf_.*",
    "ucp_am_data_release",
    "ucp_am_recv_data_nbx",
    "ucp_am_send_nbx",
    "ucp_cleanup",
    "ucp_config_modify",
    "ucp_config_read",
    "ucp_config_release",
    "ucp_context_query",
    "ucp_ep_close_nbx",
    "ucp_ep_create",
    "ucp_ep_flush_nbx",
    "ucp_ep_query",
    "ucp_get_nbx",
    "ucp_get_version",
    "ucp_get_version_string",
    "ucp_mem_map",
    "ucp_mem_query",
    "ucp_mem_unmap",
    "ucp_put_nbx",
    "ucp_request_cancel",
    "ucp_request_check_status",
    "ucp_request_free",
    "ucp_rkey_buffer_release",
    "ucp_rkey_destroy",
    "ucp_rkey_pack",
    "ucp_rkey_ptr",
    "ucp_ep_rkey_unpack",
    "ucp_worker_arm",
    "ucp_worker_create",
    "ucp_worker_destroy",
    "ucp_worker_flush_nbx",
    "ucp_worker_get_address",
    "ucp_worker_get_efd",
    "ucp_worker_progress",
    "ucp_worker_query",
    "ucp_worker_release_address",
    "ucp_worker_set_am_recv_handler",
    "ucp_worker_signal",
    "ucs_status_string",
];

/// Enumerations that the functions' signatures do not name: UCX passes flags and
/// masks as plain integers.
const TYPES: &[&str] = &[
    "kvf_.*",
    "ucp_am_cb_flags",
    "ucp_am_handler_param_field",
    "ucp_am_recv_attr_t",
    "ucp_cb_param_flags",
    "ucp_context_attr_field",
    "ucp_dt_type",
    "ucp_ep_attr_field",
    "ucp_ep_close_flags_t",
    "ucp_ep_params_field",
    "ucp_ep_params_flags_field",
    "ucp_feature",
    "ucp_mem_attr_field",
    "ucp_mem_map_params_field",
    "ucp_op_attr_t",
    "ucp_params_field",
    "ucp_send_am_flags",
    "ucp_worker_address_flags_t",
    "ucp_worker_attr_field",
    "ucp_worker_params_field",
    "ucs_log_level_t",
    "ucs_memory_type_t",
    "ucs_status_t",
    "ucs_thread_mode_t",
];

/// Constants; the unnamed enumerations of UCX are matched by their members.
const CONSTANTS: &[&str] = &["KVF_.*", "UCP_ENTITY_NAME_MAX", "UCP_MEM_MAP_.*"];

fn main() {
    if let Err(message) = run() {
        let line = message.split_whitespace().collect::<Vec<_>>().join(" ");
        println!("cargo::error={line}");
    }
}

fn run() -> Result<(), String> {
    println!("cargo::rerun-if-changed=build.rs");
    let native = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../native");
    for file in ["ucx.h", "shim.h", "shim.c"] {
        println!("cargo::rerun-if-changed={}", native.join(file).display());
    }
    for variable in ["UCX_DIR", "LIBCLANG_PATH", "LLVM_CONFIG_PATH", "CLANG_PATH"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }

    let ucx = Ucx::find()?;
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set: not run by cargo?")?);
    generate_bindings(&ucx, &native, &out)?;
    compile_shim(&ucx, &native)?;
    ucx.tell_cargo();
    Ok(())
}

/// The headers of a UCX.
struct Ucx {
    /// Directories with `ucp/api/ucp.h`.
    include: Vec<PathBuf>,
    version: (u32, u32),
}

impl Ucx {
    fn find() -> Result<Self, String> {
        match env::var_os("UCX_DIR").filter(|dir| !dir.is_empty()) {
            Some(dir) => Self::in_prefix(&PathBuf::from(dir)),
            None => Self::from_pkg_config(),
        }
    }

    fn in_prefix(prefix: &Path) -> Result<Self, String> {
        let include = prefix.join("include");
        let version = read_version(&include).map_err(|reason| {
            format!(
                "UCX_DIR={} holds no usable UCX: {reason}; {INSTALL_UCX}",
                prefix.display()
            )
        })?;
        Ok(Self {
            include: vec![include],
            version,
        })
    }

    fn from_pkg_config() -> Result<Self, String> {
        let found = pkg_config::Config::new()
            .cargo_metadata(false)
            .env_metadata(true)
            .probe("ucx")
            .map_err(|error| {
                let reason = match error {
                    pkg_config::Error::Command { command, cause } => {
                        format!("pkg-config could not be run ({command}: {cause})")
                    }
                    _ => "pkg-config knows no package `ucx`".to_owned(),
                };
                format!("UCX >= 1.13 was not found: {reason}; {INSTALL_UCX}")
            })?;
        let mut include = found.include_paths;
        if include.is_empty() {
            include.push(PathBuf::from("/usr/include"));
        }
        let reason = |reason| {
            format!(
                "pkg-config found UCX {}, which cannot be used: {reason}; {INSTALL_UCX}",
                found.version
            )
        };
        let version = match include.iter().find(|dir| dir.join(VERSION_HEADER).exists()) {
            Some(dir) => read_version(dir),
            None => read_version(&include[0]),
        }
        .map_err(reason)?;
        Ok(Self { include, version })
    }

    fn tell_cargo(&self) {
        let (major, minor) = self.version;
        // Cargo sets these for tests too, and UCX warns about every variable named UCX_* that it
        // does not know.
        println!("cargo::rustc-env=KVFERRY_UCX_HEADERS_MAJOR={major}");
        println!("cargo::rustc-env=KVFERRY_UCX_HEADERS_MINOR={minor}");
    }
}

const VERSION_HEADER: &str = "ucp/api/ucp_version.h";

/// The version that the headers under `include` declare, at least [`MIN_VERSION`].
fn read_version(include: &Path) -> Result<(u32, u32), String> {
    let path = include.join(VERSION_HEADER);
    println!("cargo::rerun-if-changed={}", path.display());
    let text = fs::read_to_string(&path)
        .map_err(|error| format!("its header {} cannot be read ({error})", path.display()))?;
    let number = |name: &str| {
        text.lines().find_map(|line| {
            let mut words = line.split_whitespace();
            let found = words.next() == Some("#define") && words.next() == Some(name);
            found.then(|| words.next()?.parse::<u32>().ok()).flatten()
        })
    };
    let (Some(major), Some(minor)) = (number("UCP_API_MAJOR"), number("UCP_API_MINOR")) else {
        return Err(format!(
            "{} states no UCP_API_MAJOR and UCP_API_MINOR",
            path.display()
        ));
    };
    if (major, minor) < MIN_VERSION {
        return Err(format!(
            "its version is {major}.{minor} ({}), and kvferry needs {}.{} or newer",
            path.display(),
            MIN_VERSION.0,
            MIN_VERSION.1
        ));
    }
    let header = include.join("ucp/api/ucp.h");
    if !header.exists() {
        return Err(format!("its header {} is missing", header.display()));
    }
    Ok((major, minor))
}

fn generate_bindings(ucx: &Ucx, native: &Path, out: &Path) -> Result<(), String> {
    check_libclang()?;
    let mut builder = bindgen::Builder::default()
        .header(native.join("ucx.h").display().to_string())
        .clang_args(ucx.include.iter().map(|dir| format!("-I{}", dir.display())))
        .parse_callbacks(Box::new(bindgen::CargoCallbacks::new()))
        .prepend_enum_name(false)
        .generate_comments(false)
        .derive_default(true)
        .rust_edition(bindgen::RustEdition::Edition2024);
    for function in FUNCTIONS {
        builder = builder.allowlist_function(function);
    }
    for name in TYPES {
        builder = builder.allowlist_type(name);
    }
    for name in CONSTANTS {
        builder = builder.allowlist_var(name);
    }
    let bindings = builder.generate().map_err(|error| {
        format!(
            "bindgen could not read UCX's headers: {error}. Where a standard header such as \
             stddef.h is missing, clang's own headers are: {INSTALL_LIBCLANG}; else: {INSTALL_UCX}"
        )
    })?;
    let bindings = table(&bindings.to_string())
        .map_err(|error| format!("what bindgen made of UCX's headers cannot be used: {error}"))?;
    let path = out.join("bindings.rs");
    fs::write(&path, bindings)
        .map_err(|error| format!("{} cannot be written: {error}", path.display()))
}

/// The bindings with UCX's functions behind pointers. The shim's own are linked, and stay as they are.
fn table(bindings: &str) -> syn::Result<String> {
    let mut file = syn::parse_file(bindings)?;
    let mut functions = Vec::new();
    for item in &mut file.items {
        let syn::Item::ForeignMod(block) = item else {
            continue;
        };
        block.items.retain(|item| match item {
            syn::ForeignItem::Fn(function)
                if !function.sig.ident.to_string().starts_with("kvf_") =>
            {
                functions.push(function.sig.clone());
                false
            }
            _ => true,
        });
    }
    let fields = functions.iter().map(|function| {
        let (name, inputs, output) = (&function.ident, &function.inputs, &function.output);
        quote!(pub(crate) #name: unsafe extern "C" fn(#inputs) #output)
    });
    let values = functions.iter().map(|function| {
        let name = &function.ident;
        let symbol = syn::LitCStr::new(
            &std::ffi::CString::new(name.to_string()).unwrap_or_default(),
            name.span(),
        );
        // SAFETY: see the generated comment.
        quote!(#name: unsafe { std::mem::transmute::<*mut std::ffi::c_void, _>(find(#symbol)?) })
    });
    let wrappers = functions.iter().map(|function| {
        let (name, inputs, output) = (&function.ident, &function.inputs, &function.output);
        let arguments = inputs.iter().filter_map(|input| match input {
            syn::FnArg::Typed(input) => Some(&input.pat),
            syn::FnArg::Receiver(_) => None,
        });
        quote! {
            #[inline]
            pub unsafe fn #name(#inputs) #output {
                unsafe { (crate::library::functions().#name)(#(#arguments),*) }
            }
        }
    });
    let added = quote! {
        /// The functions of the UCX that was loaded.
        #[derive(Debug)]
        pub(crate) struct Functions { #(#fields),* }

        impl Functions {
            /// # Safety
            /// `find` returns the address of UCX's function of that name, or an error.
            pub(crate) unsafe fn find<E>(
                find: impl Fn(&'static std::ffi::CStr) -> Result<*mut std::ffi::c_void, E>,
            ) -> Result<Self, E> {
                Ok(Self { #(#values),* })
            }
        }

        #(#wrappers)*
    };
    let file = quote!(#file #added);
    Ok(file.to_string())
}

/// bindgen panics with a page of text where libclang cannot be loaded.
fn check_libclang() -> Result<(), String> {
    let hook = panic::take_hook();
    panic::set_hook(Box::new(|_| {}));
    let loaded = panic::catch_unwind(bindgen::clang_version);
    panic::set_hook(hook);
    loaded.map(|_| ()).map_err(|_| {
        format!("libclang, which generates the bindings, was not found: {INSTALL_LIBCLANG}")
    })
}

fn compile_shim(ucx: &Ucx, native: &Path) -> Result<(), String> {
    let mut build = cc::Build::new();
    build
        .file(native.join("shim.c"))
        .std("gnu11")
        .warnings(true)
        .extra_warnings(true);
    for dir in &ucx.include {
        // As a system directory, so that only our own code is warned about.
        build.flag("-isystem").flag(dir);
    }
    build.try_compile("kvferry_ucx_shim").map_err(|error| {
        format!(
            "native/shim.c could not be compiled: {error}. Without a C compiler: apt-get install \
             build-essential"
        )
    })
}

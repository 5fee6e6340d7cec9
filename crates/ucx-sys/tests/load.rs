//! Loading, in a process of its own: what cannot be loaded, and that there is one UCX per process.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;

use ucx_sys::{LoadError, copies, load, loaded};

#[test]
fn one_ucx_is_loaded_once_and_another_is_refused() {
    // Nothing is loaded by linking.
    assert_eq!(copies(), Vec::<std::path::PathBuf>::new());
    assert!(loaded().is_none());

    let missing = load(Some(Path::new("/nonexistent/libucp.so.0"))).unwrap_err();
    assert!(
        matches!(&missing, LoadError::NotLoaded { file, reason }
            if file == "/nonexistent/libucp.so.0" && reason.contains("No such file")),
        "{missing}"
    );
    let folder = tempfile::tempdir().unwrap();
    let garbage = folder.path().join("libucp.so.0");
    fs::write(&garbage, "no library").unwrap();
    // A directory stands for the file in it.
    let error = load(Some(folder.path())).unwrap_err();
    let file = garbage.display().to_string();
    assert!(
        matches!(&error, LoadError::NotLoaded { file: found, .. } if *found == file),
        "{error}"
    );
    let libc = libc_file();
    let stranger = load(Some(&libc)).unwrap_err();
    assert!(
        matches!(&stranger, LoadError::Missing { file, name } if *file == libc.display().to_string() && name.starts_with("uc")),
        "{stranger}"
    );
    assert!(loaded().is_none());

    let features = load(None).unwrap();
    let library = features.library.clone().unwrap();
    assert_eq!(copies(), std::slice::from_ref(&library));
    // The same once more, by whatever name.
    assert_eq!(load(None).unwrap().version, features.version);
    let linked = folder.path().join("link.so");
    std::os::unix::fs::symlink(&library, &linked).unwrap();
    assert_eq!(load(Some(&linked)).unwrap().library, Some(library.clone()));
    let other = load(Some(Path::new("/opt/other/libucp.so.0"))).unwrap_err();
    assert_eq!(
        other,
        LoadError::Other {
            loaded: library.display().to_string(),
            wanted: "/opt/other/libucp.so.0".to_owned(),
        }
    );
    assert_eq!(copies().len(), 1);
}

/// The C library that this program runs with.
fn libc_file() -> std::path::PathBuf {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps
        .lines()
        .find(|line| line.contains("/libc.so.6") || line.contains("/libc-2"));
    line.unwrap().split_whitespace().last().unwrap().into()
}

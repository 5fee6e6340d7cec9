//! Which UCX this process uses.
//!
//! Responsible for loading it, at the first fabric, and for noticing other copies. One process, one UCX:
//! a later fabric that asks for another is refused.

use std::path::{Path, PathBuf};

use ucx_sys::Version;

use crate::fabric::FabricError;
use crate::warning::StartWarning;

/// Says which UCX to load where the configuration does not.
const VARIABLE: &str = "KVFERRY_UCX_LIBRARY";

/// Loads UCX, unless that was done.
pub(super) fn load(chosen: Option<&Path>) -> Result<Version, FabricError> {
    let variable = std::env::var_os(VARIABLE).filter(|value| !value.is_empty());
    let path = chosen
        .map(Path::to_owned)
        .or_else(|| variable.map(PathBuf::from));
    let first = ucx_sys::loaded().is_none();
    let features = ucx_sys::load(path.as_deref())
        .map_err(|error| FabricError::new("load UCX", error.to_string()))?;
    if first {
        let library = features.library.as_deref().unwrap_or(Path::new("?"));
        tracing::info!(version = %features.version, library = %library.display(), "UCX loaded");
    }
    Ok(features.version)
}

/// The files of all copies of UCX in this process, whoever loaded them. Loads none.
#[must_use]
pub fn ucx_copies() -> Vec<PathBuf> {
    ucx_sys::copies()
}

/// What is to be said of copies that others have loaded.
pub(super) fn warning() -> Option<StartWarning> {
    let ours = ucx_sys::loaded()?.library.as_deref()?.canonicalize().ok()?;
    let mut others = ucx_sys::copies();
    others.retain(|file| file.canonicalize().is_ok_and(|file| file != ours));
    let others: Vec<String> = others
        .iter()
        .map(|file| file.display().to_string())
        .collect();
    (!others.is_empty()).then(|| StartWarning::SeveralUcx {
        ours: ours.display().to_string(),
        others: others.join(", "),
    })
}

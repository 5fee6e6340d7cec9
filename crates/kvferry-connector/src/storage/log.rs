//! The storage's warnings, each kind at most once per second. Nothing is counted here.

use std::fmt::Display;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::file::Damage;
use kvferry_engine::LogLimit;

#[derive(Clone, Copy, Debug)]
enum Kind {
    Corrupt,
    Unreadable,
    SaveFailed,
    SavesStalled,
    Memory,
    NoSuchBlock,
    Lookup,
    Plan,
}

/// One limit per kind.
#[derive(Debug)]
pub(super) struct Log(Mutex<[LogLimit; 8]>);

impl Default for Log {
    fn default() -> Self {
        Self(Mutex::new(
            [const { LogLimit::new(Duration::from_secs(1)) }; 8],
        ))
    }
}

impl Log {
    fn admit(&self, kind: Kind) -> Option<u64> {
        let mut limits = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        limits[kind as usize].admit(Instant::now())
    }

    pub(super) fn corrupt(&self, path: &Path, damage: Damage, removed: bool) {
        if let Some(suppressed) = self.admit(Kind::Corrupt) {
            tracing::warn!(path = %path.display(), %damage, removed, suppressed, "shared storage: a block's file is not what it should be");
        }
    }

    pub(super) fn unreadable(&self, path: &Path, error: &std::io::Error) {
        if let Some(suppressed) = self.admit(Kind::Unreadable) {
            tracing::warn!(path = %path.display(), %error, suppressed, "shared storage: a block could not be read");
        }
    }

    pub(super) fn save_failed(&self, path: &Path, error: &dyn Display) {
        if let Some(suppressed) = self.admit(Kind::SaveFailed) {
            tracing::warn!(path = %path.display(), %error, suppressed, "shared storage: a block was not saved");
        }
    }

    pub(super) fn saves_stalled(&self, blocks: u64, within: Duration) {
        if let Some(suppressed) = self.admit(Kind::SavesStalled) {
            tracing::warn!(
                blocks,
                ?within,
                suppressed,
                "shared storage: blocks are not saved, because the disk does not answer"
            );
        }
    }

    pub(super) fn memory(&self, group: u32, block: u32, error: &dyn Display) {
        if let Some(suppressed) = self.admit(Kind::Memory) {
            tracing::warn!(group, block, %error, suppressed, "shared storage: a block could not be copied");
        }
    }

    pub(super) fn no_such_block(&self, group: u32, block: u32) {
        if let Some(suppressed) = self.admit(Kind::NoSuchBlock) {
            tracing::warn!(
                group,
                block,
                suppressed,
                "shared storage: this rank has no such block"
            );
        }
    }

    pub(super) fn lookup(&self, error: &std::io::Error) {
        if let Some(suppressed) = self.admit(Kind::Lookup) {
            tracing::warn!(%error, suppressed, "shared storage: blocks could not be looked up");
        }
    }

    pub(super) fn foreign_plan(&self) {
        if let Some(suppressed) = self.admit(Kind::Plan) {
            tracing::warn!(
                suppressed,
                "shared storage: dropped a plan of another connector; check that both halves have the same configuration"
            );
        }
    }
}

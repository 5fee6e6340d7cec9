//! How much the directory holds.
//!
//! Responsible for the bound on its size, over all processes that use it: room is reserved before a
//! file is written, and the files that were not used for longest make room. Not responsible for what is in the
//! files.
//!
//! Invariant: under the lock, the sum in the usage file is at least the lengths of all files there, or
//! a walk has just made it so; and it is never above `max_bytes` after a reservation. A process that
//! dies leaves the sum too high at most, which the next walk corrects.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use kvferry_wire::Incarnation;
use rustix::fs::{Timespec, Timestamps, UTIME_NOW, futimens};
use thiserror::Error;

use super::file::SUFFIX;

/// Characters of a namespace's directory.
pub(super) const NAMESPACE_CHARS: usize = 32;

const USAGE: &str = ".kvferry-usage";
const TEMPORARY: &str = ".tmp";
/// A temporary file that was not written for this long belongs to a process that is gone.
const STALE: Duration = Duration::from_secs(2 * 60 * 60);
/// How often the lock is tried.
const TRY: Duration = Duration::from_millis(1);
/// namespace / rank / group / digits.
const DEPTH: usize = 4;

/// Why there is no room for a file in the directory.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RoomError {
    /// Nothing is left that could be removed.
    #[error(
        "{bytes} bytes do not fit into `max_bytes` = {max_bytes}: {used} bytes are in use by files that \
         cannot be removed; raise it, or clear the directory"
    )]
    Full {
        /// Length of the new file.
        bytes: u64,
        /// Bytes of all files there.
        used: u64,
        /// The limit.
        max_bytes: u64,
    },
    /// Another process keeps the lock.
    #[error("the lock on {path} was held by another process for {waited:?}; is that one stopped?")]
    Locked {
        /// The locked file.
        path: PathBuf,
        /// How long it was waited for.
        waited: Duration,
    },
    /// The operating system refused.
    #[error("{step} {path}: {source}")]
    Io {
        /// What was tried.
        step: &'static str,
        /// With what.
        path: PathBuf,
        /// Its answer.
        source: io::Error,
    },
}

impl RoomError {
    fn io<'a>(step: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> Self + 'a {
        move |source| Self::Io {
            step,
            path: path.to_owned(),
            source,
        }
    }
}

/// What made room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Evicted {
    pub(super) files: u64,
    pub(super) bytes: u64,
}

/// Room for a file: an empty file of its full length under a name that nobody looks for.
#[derive(Debug)]
pub(super) struct Reserved {
    pub(super) file: File,
    path: PathBuf,
    bytes: u64,
}

#[derive(Debug)]
pub(super) struct Budget {
    root: PathBuf,
    max_bytes: u64,
    /// Longest wait for the lock.
    patience: Duration,
    /// Makes the names of this one's temporary files.
    me: Incarnation,
    next: AtomicU64,
}

impl Budget {
    /// Makes the directory if need be, and counts what is in it.
    pub(super) fn open(
        root: &Path,
        max_bytes: u64,
        patience: Duration,
        me: Incarnation,
    ) -> Result<(Self, Evicted), RoomError> {
        fs::create_dir_all(root).map_err(RoomError::io("create the directory", root))?;
        let budget = Self {
            root: root.to_owned(),
            max_bytes,
            patience,
            me,
            next: AtomicU64::new(0),
        };
        let usage = budget.lock()?;
        let (used, evicted) = budget.make_room(max_bytes)?;
        budget.set(&usage, used)?;
        Ok((budget, evicted))
    }

    /// Reserves `bytes` for a file in `directory`, which is made if need be.
    pub(super) fn reserve(
        &self,
        directory: &Path,
        bytes: u64,
    ) -> Result<(Reserved, Evicted), RoomError> {
        let usage = self.lock()?;
        let (mut used, mut evicted) = (self.get(&usage), Evicted::default());
        if used.is_none_or(|used| used.saturating_add(bytes) > self.max_bytes) {
            // A tenth more than is needed, so that not every file takes a walk.
            let spare = self.max_bytes / 10;
            let goal = self.max_bytes.saturating_sub(bytes.max(spare));
            let (counted, gone) = self.make_room(goal)?;
            (used, evicted) = (Some(counted), gone);
        }
        let used = used.unwrap_or(0);
        if used.saturating_add(bytes) > self.max_bytes {
            self.set(&usage, used)?;
            return Err(RoomError::Full {
                bytes,
                used,
                max_bytes: self.max_bytes,
            });
        }
        // First the sum: who dies in between leaves it too high, not too low.
        self.set(&usage, used + bytes)?;
        match self.create(directory, bytes) {
            Ok(reserved) => Ok((reserved, evicted)),
            Err(error) => {
                self.set(&usage, used)?;
                Err(error)
            }
        }
    }

    fn create(&self, directory: &Path, bytes: u64) -> Result<Reserved, RoomError> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let path = directory.join(format!(".{}-{number}{TEMPORARY}", self.me));
        let create = || OpenOptions::new().write(true).create_new(true).open(&path);
        let file = match create() {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                fs::create_dir_all(directory)
                    .map_err(RoomError::io("create the directory", directory))?;
                create()
            }
            other => other,
        };
        let file = file.map_err(RoomError::io("create", &path))?;
        let reserved = Reserved { file, path, bytes };
        match reserved.file.set_len(bytes) {
            Ok(()) => Ok(reserved),
            Err(source) => {
                let _ = fs::remove_file(&reserved.path);
                Err(RoomError::Io {
                    step: "reserve room for",
                    path: reserved.path,
                    source,
                })
            }
        }
    }

    /// Gives a written file its name. What had the name before is gone; its bytes count on until the next walk.
    pub(super) fn publish(&self, reserved: Reserved, path: &Path) -> Result<(), RoomError> {
        match fs::rename(&reserved.path, path) {
            Ok(()) => Ok(()),
            Err(source) => {
                self.give_back(reserved);
                Err(RoomError::Io {
                    step: "rename a file to",
                    path: path.to_owned(),
                    source,
                })
            }
        }
    }

    /// Nothing was written.
    pub(super) fn give_back(&self, reserved: Reserved) {
        let gone = fs::remove_file(&reserved.path).is_ok();
        drop(reserved.file);
        if gone {
            self.freed(reserved.bytes);
        }
    }

    /// Removes `path` if it still is `file`. True if it is gone by this call.
    pub(super) fn remove(&self, path: &Path, file: &File) -> bool {
        let (Ok(meant), Ok(found)) = (file.metadata(), path.symlink_metadata()) else {
            return false;
        };
        let same = (meant.dev(), meant.ino()) == (found.dev(), found.ino());
        let gone = same && fs::remove_file(path).is_ok();
        if gone {
            self.freed(meant.len());
        }
        gone
    }

    /// Best effort: a sum that stays too high is corrected by the next walk.
    fn freed(&self, bytes: u64) {
        if let Ok(usage) = self.lock()
            && let Some(used) = self.get(&usage)
        {
            let _ = self.set(&usage, used.saturating_sub(bytes));
        }
    }

    /// The usage file, locked until it is dropped.
    fn lock(&self) -> Result<File, RoomError> {
        let path = self.root.join(USAGE);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(RoomError::io("open", &path))?;
        let since = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(source)) => {
                    return Err(RoomError::io("lock", &path)(source));
                }
            }
            let waited = since.elapsed();
            if waited >= self.patience {
                return Err(RoomError::Locked { path, waited });
            }
            std::thread::sleep(TRY);
        }
    }

    /// What is written there, if it is a sum at all.
    fn get(&self, usage: &File) -> Option<u64> {
        let mut text = [0; 20];
        usage.read_exact_at(&mut text, 0).ok()?;
        std::str::from_utf8(&text).ok()?.parse().ok()
    }

    fn set(&self, usage: &File, used: u64) -> Result<(), RoomError> {
        usage
            .write_all_at(format!("{used:020}").as_bytes(), 0)
            .map_err(RoomError::io("write", &self.root.join(USAGE)))
    }

    /// Counts everything, and removes what was not used for longest until at most `goal` bytes are
    /// left.
    fn make_room(&self, goal: u64) -> Result<(u64, Evicted), RoomError> {
        let mut found = Vec::new();
        walk(&self.root, DEPTH, &mut found)
            .map_err(RoomError::io("list the files in", &self.root))?;
        let mut used: u64 = found.iter().map(|file| file.bytes).sum();
        found.retain(|file| !file.temporary);
        found.sort_unstable_by(|a, b| (a.used, &a.path).cmp(&(b.used, &b.path)));
        let mut evicted = Evicted::default();
        for file in found {
            if used <= goal {
                break;
            }
            match fs::remove_file(&file.path) {
                Ok(()) => {
                    evicted.files += 1;
                    evicted.bytes += file.bytes;
                }
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(_) => continue,
            }
            used -= file.bytes;
        }
        Ok((used, evicted))
    }
}

#[derive(Debug)]
struct Found {
    used: SystemTime,
    bytes: u64,
    path: PathBuf,
    temporary: bool,
}

/// Files of kvferry under `directory`, `depth` levels down, and nobody else's. Those that vanish
/// meanwhile are not there.
fn walk(directory: &Path, depth: usize, found: &mut Vec<Found>) -> io::Result<()> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in entries {
        let entry = entry?;
        let Ok(kind) = entry.file_type() else {
            continue;
        };
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        if depth > 0 {
            if kind.is_dir() && (depth < DEPTH || is_hex(name, NAMESPACE_CHARS)) {
                walk(&entry.path(), depth - 1, found)?;
            }
            continue;
        }
        let temporary = name.starts_with('.') && name.ends_with(TEMPORARY);
        let block = name.strip_suffix(SUFFIX).is_some_and(|key| is_hex(key, 64));
        if !kind.is_file() || !(temporary || block) {
            continue;
        }
        let Ok(metadata) = entry.metadata() else {
            continue;
        };
        let Ok(used) = metadata.modified() else {
            continue;
        };
        let temporary = temporary && used.elapsed().map_or(true, |age| age < STALE);
        found.push(Found {
            used,
            bytes: metadata.len(),
            path: entry.path(),
            temporary,
        });
    }
    Ok(())
}

fn is_hex(text: &str, chars: usize) -> bool {
    text.len() == chars && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// The file was used now. Whoever may not say so leaves it older than it is.
pub(super) fn touch(file: &File) {
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: UTIME_NOW,
    };
    let _ = futimens(
        file,
        &Timestamps {
            last_access: now,
            last_modification: now,
        },
    );
}

#[cfg(test)]
mod tests;

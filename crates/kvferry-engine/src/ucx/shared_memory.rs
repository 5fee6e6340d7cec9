//! Whether UCX's shared-memory segments have room.
//!
//! Every worker whose transports include posix allocates its receive queue in `/dev/shm` when it is
//! made, whether a peer is ever reached that way or not. Without room UCX 1.13 makes no worker; 1.22
//! leaves the transport out. Containers often have 64 MB there. So this is looked at before anything
//! is made: the engine says what it found and, where the user named no transports, does without
//! posix, which no endpoint with peer-failure handling uses.

use std::path::Path;

use rustix::fs::{Access, access, statvfs};

use crate::error::FabricError;
use crate::warning::StartWarning;

/// What a worker allocates there, in bytes: 4,308,992 with UCX 1.13, 4,333,568 with 1.22 (measured).
const WORKER_BYTES: u64 = 4_333_568;

/// Engines that a host should have room for: a producer and a consumer for each of eight GPUs.
const ENGINES: u64 = 16;

/// Where UCX puts its segments unless told otherwise.
const DIRECTORY: &str = "/dev/shm";

/// What was found, and what is to be done.
#[derive(Debug, Default)]
pub(super) struct SharedMemory {
    pub(super) warning: Option<StartWarning>,
    /// UCX is to do without posix.
    pub(super) avoid: bool,
}

impl SharedMemory {
    /// Looks, and logs what is not as it should be. `transports` is the list in force, `chosen`
    /// whether it is the user's, `workers` how many will use it.
    pub(super) fn look(transports: &str, chosen: bool, workers: u64) -> Self {
        let directory = std::env::var("UCX_POSIX_DIR");
        let directory = directory.as_deref().unwrap_or(DIRECTORY);
        let found = Self::judge(&room(directory), directory, transports, chosen, workers);
        if let Some(warning) = &found.warning {
            tracing::warn!("{warning}");
        }
        found
    }

    fn judge(
        room: &Result<Room, String>,
        directory: &str,
        transports: &str,
        chosen: bool,
        workers: u64,
    ) -> Self {
        let need = workers * WORKER_BYTES;
        if need == 0 || !has_posix(transports) {
            return Self::default();
        }
        let recommended = ENGINES * need;
        let found = match room {
            Ok(room) if room.free >= recommended => return Self::default(),
            Ok(room) if room.free >= need => {
                let warning = StartWarning::LittleSharedMemory {
                    directory: directory.to_owned(),
                    size: room.size,
                    free: room.free,
                    need,
                    recommended,
                    engines: ENGINES,
                };
                return Self {
                    warning: Some(warning),
                    avoid: false,
                };
            }
            Ok(room) => format!("{} bytes, {} of them free", room.size, room.free),
            Err(reason) => reason.clone(),
        };
        let consequence = if chosen {
            format!("UCX may not start with UCX_TLS={transports}; leave posix out of it")
        } else {
            "posix is left out of its transports".to_owned()
        };
        let warning = StartWarning::NoSharedMemory {
            directory: directory.to_owned(),
            found,
            need,
            consequence,
        };
        Self {
            warning: Some(warning),
            avoid: !chosen,
        }
    }

    /// An error of UCX's start, with what was found if that may be the reason.
    pub(super) fn explain(&self, mut error: FabricError) -> FabricError {
        if let Some(warning @ StartWarning::NoSharedMemory { .. }) = &self.warning {
            error.status = format!("{}; {warning}", error.status);
        }
        error
    }
}

/// A file system's size and what is free of it, in bytes.
#[derive(Debug)]
struct Room {
    size: u64,
    free: u64,
}

fn room(directory: &str) -> Result<Room, String> {
    let path = Path::new(directory);
    let found = access(path, Access::WRITE_OK).and_then(|()| statvfs(path));
    let found = found.map_err(|errno| errno.to_string())?;
    Ok(Room {
        size: found.f_blocks.saturating_mul(found.f_frsize),
        free: found.f_bavail.saturating_mul(found.f_frsize),
    })
}

/// Whether a list of transports, as UCX has it in force, has posix, by its name or by a group's.
fn has_posix(transports: &str) -> bool {
    let list = transports.trim();
    let (names, negated) = match list.strip_prefix('^') {
        Some(names) => (names, true),
        None => (list, false),
    };
    let named = names.split(',').any(|name| {
        matches!(
            name.trim(),
            "all" | "posix" | "\\posix" | "mm" | "sm" | "shm"
        )
    });
    named != negated
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_with_posix_are_told_from_others() {
        let table = [
            ("all", true),
            ("posix,cma,tcp", true),
            ("tcp, sm", true),
            ("shm", true),
            ("mm,self", true),
            ("\\posix", true),
            ("^tcp", true),
            ("^posix", false),
            ("^sm,tcp", false),
            ("tcp", false),
            ("sysv,cma", false),
            ("rc,dc", false),
            ("unknown", false),
        ];
        for (list, posix) in table {
            assert_eq!(has_posix(list), posix, "{list:?}");
        }
    }

    #[test]
    fn c64_room_is_judged_by_what_the_workers_take() {
        let judge = |room: Result<Room, String>, transports: &str, chosen, workers| {
            let found = SharedMemory::judge(&room, "/dev/shm", transports, chosen, workers);
            let text = found.warning.map(|warning| warning.to_string());
            (text.unwrap_or_default(), found.avoid)
        };
        let free = |free: u64| {
            let size = 64 << 20;
            Ok(Room { size, free })
        };
        // Docker's 64 MB are enough for this engine and too little for a host full of them.
        for workers in [1, 2] {
            let (text, avoid) = judge(free(64 << 20), "all", false, workers);
            assert!(
                text.contains("/dev/shm has 67108864 bytes, 67108864 of them free"),
                "{text}"
            );
            let need = format!("takes {} of them", workers * WORKER_BYTES);
            assert!(
                text.contains(&need) && text.contains("--shm-size"),
                "{text}"
            );
            assert!(!avoid);
        }
        assert_eq!(
            judge(free(ENGINES * WORKER_BYTES), "all", false, 1),
            (String::new(), false)
        );
        // One byte less than it takes, or no such directory: without posix.
        let (text, avoid) = judge(free(WORKER_BYTES - 1), "all", false, 1);
        assert!(
            text.contains("4333567 of them free") && text.contains("posix is left out"),
            "{text}"
        );
        assert!(avoid);
        let (text, avoid) = judge(Err("No such file".into()), "all", false, 1);
        assert!(text.contains("(No such file)"), "{text}");
        assert!(avoid);
        // The user's own list stays.
        let (text, avoid) = judge(free(0), "posix,tcp", true, 1);
        assert!(
            text.contains("UCX_TLS=posix,tcp; leave posix out"),
            "{text}"
        );
        assert!(!avoid);
        // Nothing of it is needed.
        assert_eq!(judge(free(0), "tcp", true, 1), (String::new(), false));
        assert_eq!(judge(free(0), "all", false, 0), (String::new(), false));
    }
}

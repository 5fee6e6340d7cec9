//! A block's file: where it is, what is in it, how it is read and checked.
//!
//! Invariant: bytes that come out of [`read`] are those that were written under this key, or it is an
//! error. A file is never changed in place; it appears by a rename and goes by an unlink.
//!
//! Files are read with `pread`, not mapped. Anybody with access to the directory may truncate a file,
//! and a disk or a network file system may fail to deliver it: under a mapping that is a SIGBUS for
//! the engine, here it is an error for one block. A mapping would save no copy either: what others
//! may change has to be copied before its checksum says anything.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use thiserror::Error;
use xxhash_rust::xxh3::Xxh3;

use super::key::{BlockKey, namespace};
use super::{StorageConfig, budget};

/// Version of the files; also in every key's seed, so that versions do not meet in practice.
pub(super) const VERSION: u32 = 1;
/// Bytes before the block's own.
pub(super) const HEADER_BYTES: usize = 64;

const MAGIC: [u8; 8] = *b"kvferrys";
/// What a block's file is called, after its key.
pub(super) const SUFFIX: &str = ".kv";

/// Where the files of one configuration are.
#[derive(Clone, Debug)]
pub(super) struct Files {
    namespace: PathBuf,
    world: u32,
}

impl Files {
    pub(super) fn new(config: &StorageConfig) -> Self {
        let mut name = namespace(config).to_string();
        name.truncate(budget::NAMESPACE_CHARS);
        Self {
            namespace: config.settings.path.join(name),
            world: config.world,
        }
    }

    /// `<path>/<namespace>/<rank>-of-<world>/g<group>/<2 digits>/<key>.kv`
    pub(super) fn path(&self, rank: u32, group: u32, key: BlockKey) -> PathBuf {
        let key = key.to_string();
        let mut path = self.namespace.join(format!("{rank}-of-{}", self.world));
        path.push(format!("g{group}"));
        path.push(&key[..2]);
        path.push(key + SUFFIX);
        path
    }

    /// Whether every rank has a file for a block; not whether it is good.
    ///
    /// # Errors
    /// What the operating system says, other than that there is none.
    pub(super) fn present(&self, group: u32, key: BlockKey) -> io::Result<bool> {
        for rank in 0..self.world {
            let path = self.path(rank, group, key);
            match path.symlink_metadata() {
                Ok(found) if found.is_file() && found.len() >= HEADER_BYTES as u64 => {}
                Ok(_) => return Ok(false),
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }
}

/// Why a file does not hold what it should.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(super) enum Damage {
    #[error("it is no regular file")]
    Kind,
    #[error("it has {found} bytes instead of {expected}")]
    Length { expected: u64, found: u64 },
    #[error("it does not begin like a file of kvferry")]
    Magic,
    #[error("it is of version {found}, this is version {VERSION}")]
    Version { found: u32 },
    #[error("its header names another block")]
    Key,
    #[error("its checksum is {found:#018x}, its bytes give {computed:#018x}")]
    Checksum { found: u64, computed: u64 },
}

#[derive(Debug)]
pub(super) enum ReadError {
    Missing,
    /// With the file, so that whoever removes it can tell it from one that has replaced it.
    Damaged(Damage, File),
    Io(io::Error),
}

/// The header in front of `payload`.
pub(super) fn header(key: BlockKey, payload: &[u8]) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..8].copy_from_slice(&MAGIC);
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header[16..24].copy_from_slice(&(payload.len() as u64).to_le_bytes());
    header[32..].copy_from_slice(key.as_bytes());
    let sum = checksum(&header, payload);
    header[24..32].copy_from_slice(&sum.to_le_bytes());
    header
}

/// Over everything but the checksum's own place.
fn checksum(header: &[u8; HEADER_BYTES], payload: &[u8]) -> u64 {
    let mut hasher = Xxh3::new();
    hasher.update(&header[..24]);
    hasher.update(&header[32..]);
    hasher.update(payload);
    hasher.digest()
}

fn check(key: BlockKey, bytes: &[u8]) -> Result<(), Damage> {
    let Some((header, payload)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
        return Err(Damage::Length {
            expected: HEADER_BYTES as u64,
            found: bytes.len() as u64,
        });
    };
    let word = |at: usize| {
        let mut word = [0; 8];
        word.copy_from_slice(&header[at..at + 8]);
        u64::from_le_bytes(word)
    };
    if header[..8] != MAGIC {
        return Err(Damage::Magic);
    }
    // The upper half of the word is zero in this version, which the checksum covers.
    let version = word(8) as u32;
    if version != VERSION {
        return Err(Damage::Version { found: version });
    }
    if word(16) != payload.len() as u64 {
        return Err(Damage::Length {
            expected: word(16).saturating_add(HEADER_BYTES as u64),
            found: bytes.len() as u64,
        });
    }
    if header[32..] != key.as_bytes()[..] {
        return Err(Damage::Key);
    }
    let computed = checksum(header, payload);
    if word(24) != computed {
        return Err(Damage::Checksum {
            found: word(24),
            computed,
        });
    }
    Ok(())
}

/// Reads a block's file of `payload` bytes into `scratch`, checks it, and returns the bytes. The file
/// counts as used now.
pub(super) fn read<'a>(
    path: &Path,
    key: BlockKey,
    payload: usize,
    scratch: &'a mut Vec<u8>,
) -> Result<&'a [u8], ReadError> {
    let file = open(path)?;
    let found = file.metadata().map_err(ReadError::Io)?;
    if !found.is_file() {
        return Err(ReadError::Damaged(Damage::Kind, file));
    }
    let expected = HEADER_BYTES + payload;
    if found.len() != expected as u64 {
        let damage = Damage::Length {
            expected: expected as u64,
            found: found.len(),
        };
        return Err(ReadError::Damaged(damage, file));
    }
    scratch.resize(expected, 0);
    match file.read_exact_at(scratch, 0) {
        Ok(()) => {}
        // It became shorter after it was measured.
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
            let damage = Damage::Length {
                expected: expected as u64,
                found: file.metadata().map_or(0, |found| found.len()),
            };
            return Err(ReadError::Damaged(damage, file));
        }
        Err(error) => return Err(ReadError::Io(error)),
    }
    if let Err(damage) = check(key, scratch) {
        return Err(ReadError::Damaged(damage, file));
    }
    budget::touch(&file);
    Ok(&scratch[HEADER_BYTES..])
}

/// Opens what is there without waiting for it (a pipe) and without following it elsewhere.
fn open(path: &Path) -> Result<File, ReadError> {
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    OpenOptions::new()
        .read(true)
        .custom_flags(flags.bits().cast_signed())
        .open(path)
        .map_err(|error| match error.kind() {
            ErrorKind::NotFound => ReadError::Missing,
            _ => ReadError::Io(error),
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: [u8; 32] = [7; 32];

    fn write(path: &Path, key: BlockKey, payload: &[u8]) {
        let mut bytes = header(key, payload).to_vec();
        bytes.extend(payload);
        std::fs::write(path, bytes).unwrap();
    }

    fn damage(path: &Path, payload: usize) -> Damage {
        match read(path, KEY.into(), payload, &mut Vec::new()) {
            Err(ReadError::Damaged(damage, _)) => damage,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_was_written_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.kv");
        write(&path, KEY.into(), b"keys and values");
        let mut scratch = vec![9; 500];
        let bytes = read(&path, KEY.into(), 15, &mut scratch).unwrap();
        assert_eq!(bytes, b"keys and values");
        let missing = read(&directory.path().join("b.kv"), KEY.into(), 15, &mut scratch);
        assert!(matches!(missing, Err(ReadError::Missing)));
    }

    #[test]
    fn any_changed_bit_is_found() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.kv");
        write(&path, KEY.into(), b"keys and values");
        let good = std::fs::read(&path).unwrap();
        for bit in 0..good.len() * 8 {
            let mut bytes = good.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            std::fs::write(&path, bytes).unwrap();
            damage(&path, 15);
        }
    }

    #[test]
    fn a_file_that_is_not_what_it_should_be_is_told_apart() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.kv");
        write(&path, KEY.into(), b"keys and values");
        let good = std::fs::read(&path).unwrap();
        for length in [0, 1, 63, 64, 78] {
            std::fs::write(&path, &good[..length]).unwrap();
            let expected = 79;
            let found = length as u64;
            assert_eq!(damage(&path, 15), Damage::Length { expected, found });
        }
        std::fs::write(&path, &good).unwrap();
        assert!(matches!(
            damage(&path, 16),
            Damage::Length {
                expected: 80,
                found: 79
            }
        ));
        let with = |at: usize, value: u8| {
            let mut bytes = good.clone();
            bytes[at] = value;
            std::fs::write(&path, bytes).unwrap();
            damage(&path, 15)
        };
        assert_eq!(with(0, b'K'), Damage::Magic);
        assert_eq!(with(8, 2), Damage::Version { found: 2 });
        assert!(matches!(with(12, 1), Damage::Checksum { .. }));
        assert!(matches!(
            with(17, 1),
            Damage::Length {
                expected: 335,
                found: 79
            }
        ));
        assert_eq!(with(40, 8), Damage::Key);
        assert!(matches!(with(70, 0), Damage::Checksum { .. }));
    }

    #[test]
    fn links_and_pipes_are_not_followed_and_not_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("a.kv");
        write(&target, KEY.into(), b"keys and values");
        let link = directory.path().join("link.kv");
        std::os::unix::fs::symlink(&target, &link).unwrap();
        let mut scratch = Vec::new();
        let read_link = read(&link, KEY.into(), 15, &mut scratch);
        assert!(matches!(read_link, Err(ReadError::Io(_))));
        let pipe = directory.path().join("pipe.kv");
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        assert_eq!(damage(&pipe, 15), Damage::Kind);
    }
}

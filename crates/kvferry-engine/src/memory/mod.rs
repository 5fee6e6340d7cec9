//! Memory that transfers read from and write to.
//!
//! Responsible for: who owns a range ([`MemoryRegion`]), memory made for sharing ([`HostPool`]),
//! every raw copy, memory of other processes on this host ([`RemotePool`], [`RemoteProcess`]), and the
//! map of what is registered ([`RegionMap`]). Not responsible for: what
//! UCX thinks of a region (that is the fabric's), or who may read it (that is a lease's).
//!
//! Invariant: no `&[u8]` or `&mut [u8]` ever covers memory that another process or a device may
//! touch. Bytes go in and out by copy, behind [`MemoryRegion::read_at`],
//! [`MemoryRegion::write_at`] and [`MemoryRegion::copy`].
#![allow(unsafe_code)]

mod copies;
mod credentials;
mod huge;
mod map;
pub(crate) mod memlock;
mod pool;
mod region;
mod remote;

pub use copies::CopyBatch;
pub(crate) use copies::{CopyError, CopyStats, MAX_PIECES, Vectors, probe};
pub(crate) use credentials::{Credentials, credentials};
pub use huge::HugePages;
pub(crate) use map::{Inserted, RegionMap};
pub use pool::{HostPool, HostPoolOptions, available_memory};
pub use region::{MemoryError, MemoryRegion};
pub(crate) use remote::{IncarnationWord, RemotePool, RemoteProcess};

//! What is not as it should be and does not stop an engine.

use thiserror::Error;

/// Something found when an engine started, that may be the reason of something else later.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum StartWarning {
    /// There is little room for UCX's shared-memory segments.
    #[error(
        "{directory} has {size} bytes, {free} of them free: UCX takes {need} of them for an engine and \
         {recommended} for the {engines} that may run on a host, and other programs take their own; \
         enlarge it (docker: --shm-size=1g; Kubernetes: an emptyDir of medium Memory at {directory})"
    )]
    LittleSharedMemory {
        /// The directory.
        directory: String,
        /// Size of its file system, in bytes.
        size: u64,
        /// Bytes that are free.
        free: u64,
        /// Bytes that this engine needs.
        need: u64,
        /// Bytes that should be free.
        recommended: u64,
        /// Engines that `recommended` is for.
        engines: u64,
    },
    /// There is no room for UCX's shared-memory segments, so that it goes without.
    #[error(
        "{directory} has no room for UCX's shared memory ({found}), of which an engine takes {need} \
         bytes: {consequence}; enlarge it (docker: --shm-size=1g; Kubernetes: an emptyDir of medium \
         Memory at {directory})"
    )]
    NoSharedMemory {
        /// The directory.
        directory: String,
        /// What was found there.
        found: String,
        /// Bytes that this engine needs.
        need: u64,
        /// What was done about it, or what follows.
        consequence: String,
    },
    /// The process has more than one UCX.
    #[error(
        "kvferry uses {ours}, and somebody else in this process has loaded {others}: each patches functions of the \
         process for itself. Where the other is not needed, do not load it (Python's nixl packages bring one)"
    )]
    SeveralUcx {
        /// The file of ours.
        ours: String,
        /// The files of the others.
        others: String,
    },
}

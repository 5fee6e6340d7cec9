//! What an engine has done and holds, as numbers.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Live counters, written by the progress thread and read by anybody.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: AtomicU64,)*
        }

        /// A copy of an engine's counters at one moment. Monotonic unless the text says "now".
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct CounterSnapshot {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
            pub(crate) fn snapshot(&self) -> CounterSnapshot {
                CounterSnapshot { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counters! {
    /// UCX data operations posted: one per active message sent and per GET.
    ucx_operations,
    /// One-sided block operations: contiguous runs read by transfers of this engine.
    block_operations,
    /// Bytes that transfers of this engine read over the served lane.
    served_bytes,
    /// Bytes that transfers of this engine read over the native lane.
    native_bytes,
    /// Bytes that transfers of this engine copied out of peers' mapped pools.
    mapped_bytes,
    /// Bytes that transfers of this engine read out of peers' processes.
    attached_bytes,
    /// Calls of `process_vm_readv` for them.
    attached_calls,
    /// Those of them that moved less than was asked for.
    attached_short_calls,
    /// Batches of copies handed to the copy threads, mapped and attached lane together.
    copy_batches,
    /// Bytes gathered and sent to peers by the served lane.
    bytes_served_to_peers,
    /// Transfers started.
    transfers_started,
    /// Transfers that ended in success.
    transfers_succeeded,
    /// Transfers that ended in a failure of any kind.
    transfers_failed,
    /// Messages (greetings, pings, requests, service messages) handed to the fabric.
    messages_sent,
    /// Messages received whole and in order.
    messages_received,
    /// Segments that were refused: unreadable, from a stranger, duplicates, or for an ended transfer.
    segments_dropped,
    /// Messages dropped because their peer was gone or their channel has no service.
    messages_dropped,
    /// Read requests of peers that were refused.
    reads_rejected,
    /// Peers greeted and answered.
    peers_connected,
    /// Peers that ended: goodbye, failure or replacement.
    peers_lost,
    /// Peers that have been silent for too long and are not given up yet, now.
    peers_suspect,
    /// Connections of which anything is kept, now: greeted, in use, or not closed yet.
    connections_held,
    /// Bytes of destinations whose transfer has its outcome but may still be written to, now.
    quarantined_bytes,
    /// Regions that were dropped in use and wait for their last operation, now.
    quarantined_regions,
    /// Bytes of those whose operations have not ended although everything was tried, now. They are kept
    /// until they do.
    kept_bytes,
    /// Times that an endpoint was closed because operations of an ended transfer did not end.
    forced_closes,
    /// Times that the data worker was destroyed because closing an endpoint did not end its operations.
    worker_resets,
    /// Times the progress thread went to sleep.
    sleeps,
}

pub(crate) fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}

pub(crate) fn subtract(counter: &AtomicU64, amount: u64) {
    counter.fetch_sub(amount, Ordering::Relaxed);
}

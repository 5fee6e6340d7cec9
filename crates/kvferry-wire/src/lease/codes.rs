//! One-byte answers of the lease protocol.

use crate::fixed::code;

code! {
    /// A producer rank's judgement of a release.
    Verdict in "released.verdict", "1 to 8":
    /// The lease was live: what was read counts.
    Valid = 1, "valid";
    /// The lease had ended before.
    Ended = 2, "lease ended";
    /// The rank's scheduler half is another one.
    UnknownInstance = 3, "unknown instance";
    /// No such lease that is remembered: never issued, skipped, or ended long ago.
    UnknownEpoch = 4, "unknown epoch";
    /// The epoch belongs to another request.
    RequestMismatch = 5, "epoch belongs to another request";
    /// Another number of consumers than the first release named.
    ConsumersMismatch = 6, "another number of consumers than in the first release";
    /// Another load of the same consumer engine has released this lease.
    RepeatedReader = 7, "another load of this engine has released";
    /// Over a bound: early releases kept for this peer, distance of the epoch above the mark, or
    /// consumers of one lease.
    Overloaded = 8, "over a bound of the producer";
}

code! {
    /// What became of a lease that can not be renewed.
    Gone in "renewed.why", "1 to 6":
    /// All its readers released it.
    Released = 1, "released";
    /// Nobody renewed it in time.
    Expired = 2, "expired";
    /// The producer took it back.
    Revoked = 3, "revoked";
    /// It was never issued, and will not be.
    NeverIssued = 4, "never issued";
    /// The rank's scheduler half is another one.
    UnknownInstance = 5, "unknown instance";
    /// It lived as long as a lease may.
    LeaseMax = 6, "maximum lifetime reached";
}

impl Verdict {
    /// Whether what was read under the lease counts.
    #[must_use]
    pub const fn is_valid(self) -> bool {
        matches!(self, Self::Valid)
    }
}

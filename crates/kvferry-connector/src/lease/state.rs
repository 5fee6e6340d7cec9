//! One lease: its state, its transitions, and the judgement of a release.
//!
//! A lease that has ended keeps its request and its readers, so that the same function judges a
//! release before and after the end, with the checks in the same order. That is what makes
//! refusals repeatable without remembering them: everything a check looks at is either fixed or
//! only grows.

use std::fmt;
use std::time::Instant;

use kvferry_wire::lease::{Gone, Verdict};
use kvferry_wire::{ReaderId, RequestId};

use serde::{Deserialize, Serialize};

use super::LeaseConfig;

/// How a lease ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum End {
    /// Every expected reader released it.
    Released,
    /// Its time ran out.
    Expired,
    /// The scheduler half, or a shutdown, took it back.
    Revoked,
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Released => "released",
            Self::Expired => "expired",
            Self::Revoked => "revoked",
        })
    }
}

/// What a release did to its lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Judgement {
    /// Nothing.
    Refused(Verdict),
    /// Nothing: this reader was recorded before.
    Remembered,
    /// The reader is recorded; `last` if no other is expected.
    Recorded { last: bool },
}

impl Judgement {
    pub(super) const fn verdict(self) -> Verdict {
        match self {
            Self::Refused(verdict) => verdict,
            Self::Remembered | Self::Recorded { .. } => Verdict::Valid,
        }
    }
}

/// When a held lease expires.
#[derive(Clone, Copy, Debug)]
enum State {
    Reserved {
        until: Instant,
    },
    /// `until` never passes `cap`.
    Activated {
        until: Instant,
        cap: Instant,
    },
    /// Kept as a tombstone.
    Ended {
        gone: Gone,
    },
}

/// One lease, from its reservation until its tombstone is dropped.
#[derive(Debug)]
pub(super) struct Lease {
    request: RequestId,
    state: State,
    /// Fixed by the first release that is recorded.
    consumers: Option<u32>,
    /// Those answered `Valid`, in order, one per incarnation.
    readers: Vec<ReaderId>,
}

impl Lease {
    pub(super) fn reserve(request: RequestId, now: Instant, config: &LeaseConfig) -> Self {
        let state = State::Reserved {
            until: now + config.lease_max,
        };
        Self {
            request,
            state,
            consumers: None,
            readers: Vec::new(),
        }
    }

    /// Starts the lease's duration and returns its deadline; `None` unless it is reserved.
    pub(super) fn activate(&mut self, now: Instant, config: &LeaseConfig) -> Option<Instant> {
        let State::Reserved { .. } = self.state else {
            return None;
        };
        let until = now + config.duration;
        self.state = State::Activated {
            until,
            cap: now + config.lease_max,
        };
        Some(until)
    }

    /// Restarts the duration of an activated lease, up to its cap. A reserved one has nothing to
    /// renew and is held all the same.
    pub(super) fn renew(&mut self, now: Instant, config: &LeaseConfig) -> Result<(), Gone> {
        match &mut self.state {
            State::Reserved { .. } => Ok(()),
            State::Activated { until, cap } => {
                *until = (now + config.duration).clamp(*until, *cap);
                Ok(())
            }
            State::Ended { gone } => Err(*gone),
        }
    }

    /// Ends the lease; `false` if it had ended before.
    pub(super) fn end(&mut self, how: End) -> bool {
        let at_cap = match self.state {
            State::Reserved { .. } => true,
            State::Activated { until, cap } => until == cap,
            State::Ended { .. } => return false,
        };
        let gone = match how {
            End::Released => Gone::Released,
            End::Revoked => Gone::Revoked,
            End::Expired if at_cap => Gone::LeaseMax,
            End::Expired => Gone::Expired,
        };
        self.state = State::Ended { gone };
        self.readers.shrink_to_fit();
        true
    }

    /// When the lease expires; `None` once it has ended.
    pub(super) const fn deadline(&self) -> Option<Instant> {
        match self.state {
            State::Reserved { until } | State::Activated { until, .. } => Some(until),
            State::Ended { .. } => None,
        }
    }

    pub(super) const fn is_activated(&self) -> bool {
        matches!(self.state, State::Activated { .. })
    }

    pub(super) const fn is_held(&self) -> bool {
        !matches!(self.state, State::Ended { .. })
    }

    pub(super) const fn request(&self) -> &RequestId {
        &self.request
    }

    pub(super) const fn readers(&self) -> &Vec<ReaderId> {
        &self.readers
    }

    /// Judges a release and records its reader if it is valid. Ending the lease after the last
    /// one is left to the caller, who knows what else an end involves.
    pub(super) fn release(
        &mut self,
        request: &RequestId,
        reader: ReaderId,
        consumers: u32,
        config: &LeaseConfig,
    ) -> Judgement {
        if *request != self.request {
            return Judgement::Refused(Verdict::RequestMismatch);
        }
        if consumers > config.max_consumers {
            return Judgement::Refused(Verdict::Overloaded);
        }
        if consumers == 0 || self.consumers.is_some_and(|fixed| fixed != consumers) {
            return Judgement::Refused(Verdict::ConsumersMismatch);
        }
        let by_incarnation = |recorded: &ReaderId| recorded.incarnation;
        let place = self
            .readers
            .binary_search_by_key(&reader.incarnation, by_incarnation);
        let free = match place {
            Ok(at) if self.readers.get(at) == Some(&reader) => return Judgement::Remembered,
            Ok(_) => return Judgement::Refused(Verdict::RepeatedReader),
            Err(free) => free,
        };
        if !self.is_held() {
            return Judgement::Refused(Verdict::Ended);
        }
        self.readers.insert(free, reader);
        self.consumers = Some(consumers);
        Judgement::Recorded {
            last: self.readers.len() >= consumers as usize,
        }
    }
}

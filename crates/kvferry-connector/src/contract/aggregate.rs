//! The reports of several ranks as one.
//!
//! Responsible for saying that a load or a send is over only when every rank has said so. Not
//! responsible for what that means.

use std::collections::HashMap;

use kvferry_wire::RequestId;

use super::{Received, ReportPart, WorkerReport};

/// What all ranks have reported.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Aggregated {
    /// Async loads that are over on every rank; failed if any rank's failed, with the failed blocks of
    /// all.
    pub received: Vec<Received>,
    /// Requests that are sent on every rank.
    pub sent: Vec<RequestId>,
    /// The ranks' own parts: the rank, and what it said.
    pub parts: Vec<(u32, ReportPart)>,
}

impl Aggregated {
    /// Whether there is nothing in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.received.is_empty() && self.sent.is_empty() && self.parts.is_empty()
    }
}

/// Counts over ranks.
#[derive(Debug)]
pub struct Aggregator {
    ranks: u32,
    receiving: HashMap<RequestId, (u32, Received)>,
    sending: HashMap<RequestId, u32>,
}

impl Aggregator {
    /// For this many ranks, at least 1; 0 is taken for 1.
    #[must_use]
    pub fn new(ranks: u32) -> Self {
        Self {
            ranks: ranks.max(1),
            receiving: HashMap::new(),
            sending: HashMap::new(),
        }
    }

    /// Takes the reports of one step, with the rank that each is of.
    pub fn take(&mut self, reports: impl IntoIterator<Item = (u32, WorkerReport)>) -> Aggregated {
        let mut all = Aggregated::default();
        for (rank, report) in reports {
            for received in report.received {
                self.received(received, &mut all);
            }
            for request in report.sent {
                self.sent(request, &mut all);
            }
            all.parts.extend(report.part.map(|part| (rank, part)));
        }
        all
    }

    fn received(&mut self, received: Received, all: &mut Aggregated) {
        let (count, mut whole) = match self.receiving.remove(&received.request) {
            Some((count, mut whole)) => {
                whole.failure = whole.failure.or(received.failure);
                whole.failed.extend(received.failed);
                (count + 1, whole)
            }
            None => (1, received),
        };
        if count < self.ranks {
            self.receiving.insert(whole.request.clone(), (count, whole));
        } else {
            whole.failed.sort_unstable();
            whole.failed.dedup();
            all.received.push(whole);
        }
    }

    fn sent(&mut self, request: RequestId, all: &mut Aggregated) {
        let count = self.sending.remove(&request).unwrap_or(0) + 1;
        if count < self.ranks {
            self.sending.insert(request, count);
        } else {
            all.sent.push(request);
        }
    }

    /// Requests that some ranks have reported and others have not.
    #[must_use]
    pub fn incomplete(&self) -> usize {
        self.receiving.len() + self.sending.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::{FailedBlock, LoadFailure};

    fn id(text: &str) -> RequestId {
        RequestId::new(text).unwrap()
    }

    fn received(request: &str, failed: &[u32]) -> Received {
        Received {
            request: id(request),
            failure: (!failed.is_empty()).then_some(LoadFailure::Peer),
            failed: failed
                .iter()
                .map(|&block| FailedBlock { group: 0, block })
                .collect(),
        }
    }

    #[test]
    fn a_load_is_over_when_the_last_rank_says_so_and_fails_with_any() {
        let mut ranks = Aggregator::new(3);
        let report = |received: Vec<Received>| WorkerReport {
            received,
            ..WorkerReport::default()
        };
        let first = ranks.take([
            (0, report(vec![received("a", &[]), received("b", &[])])),
            (1, report(vec![received("a", &[7, 3])])),
        ]);
        assert!(first.is_empty() && ranks.incomplete() == 2);
        let second = ranks.take([
            (2, report(vec![received("a", &[3]), received("b", &[])])),
            (1, report(vec![received("b", &[])])),
        ]);
        assert_eq!(
            second.received,
            [received("a", &[3, 7]), received("b", &[])]
        );
        assert_eq!(ranks.incomplete(), 0);
        // The same id may be used again.
        let rest = ranks.take([(0, report(vec![received("a", &[])]))]);
        assert!(rest.is_empty() && ranks.incomplete() == 1);
    }

    #[test]
    fn a_send_is_over_when_every_rank_has_reported_it() {
        let mut ranks = Aggregator::new(2);
        let report = |sent: &[&str]| WorkerReport {
            sent: sent.iter().map(|text| id(text)).collect(),
            ..WorkerReport::default()
        };
        assert!(
            ranks
                .take([(0, report(&["a"])), (1, report(&["b"]))])
                .is_empty()
        );
        let all = ranks.take([(1, report(&["a"]))]);
        assert_eq!(all.sent, [id("a")]);
    }
}

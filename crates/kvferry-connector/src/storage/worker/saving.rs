//! Saves of one rank: their start, their end, and what a disk that does not answer costs.
//!
//! Responsible for when a save may read its block, and for each being counted and reported once. Not for the
//! writing ([`super::super::io`]).
//!
//! Invariant: a save that is over touches its block no more, whatever its thread waits for; what waits for threads
//! is bounded.

use std::mem::take;
use std::sync::Arc;
use std::time::Instant;

use kvferry_wire::RequestId;

use super::{Queues, StorageWorker};
use crate::storage::io::{SaveEnd, SaveJob};
use crate::storage::plan::Save;
use crate::storage::stats::add;

#[derive(Debug)]
pub(super) struct Saving {
    pub(super) request: RequestId,
    pub(super) job: Arc<SaveJob>,
    pub(super) since: Instant,
}

impl StorageWorker {
    pub(super) fn start_saves(&mut self) {
        if self.step.is_empty() {
            return;
        }
        let timeout = self.config.io_timeout();
        let is_stuck = self.shared.busy.all_longer_than(timeout);
        let mut stalled = 0;
        for Save {
            number,
            request,
            block,
        } in take(&mut self.step)
        {
            let job = Arc::new(SaveJob::new(number, block));
            add(&self.shared.counters.pending_saves, 1);
            let end = match &self.jobs {
                // Given up ones stay in the queue until a thread comes.
                Some(Queues { saves, .. })
                    if is_stuck || saves.len() >= self.config.settings.max_pending_saves =>
                {
                    stalled += 1;
                    Some(SaveEnd::Stalled)
                }
                Some(Queues { saves, .. }) if saves.send(Arc::clone(&job)).is_ok() => None,
                _ => Some(SaveEnd::Cancelled),
            };
            if let Some(end) = end {
                job.count(&self.shared.counters, &end);
                self.ended.push(number);
                continue;
            }
            *self.saving.entry(request.clone()).or_default() += 1;
            let since = Instant::now();
            self.saves.insert(
                number,
                Saving {
                    request,
                    job,
                    since,
                },
            );
        }
        if stalled > 0 {
            self.shared.log.saves_stalled(stalled, timeout);
        }
    }

    /// The save reads its block no more.
    pub(super) fn save_over(&mut self, number: u64) {
        let Some(saving) = self.saves.remove(&number) else {
            return;
        };
        self.ended.push(number);
        if let Some(count) = self.saving.get_mut(&saving.request) {
            *count -= 1;
            if *count == 0 {
                self.saving.remove(&saving.request);
                if self.finished.remove(&saving.request) {
                    self.report.sent.push(saving.request);
                }
            }
        }
    }

    pub(super) fn revoke(&mut self, numbers: &[u64]) {
        for &number in numbers {
            // One that has not even started: of a step that is not over.
            if let Some(at) = self.step.iter().position(|save| save.number == number) {
                self.step.remove(at);
                add(&self.shared.counters.saves_cancelled, 1);
                self.ended.push(number);
            }
            self.take_back(number);
        }
    }

    /// The save reads its block no more, or what it has read counts for nothing.
    pub(super) fn take_back(&mut self, number: u64) {
        let Some(saving) = self.saves.get(&number) else {
            return;
        };
        if saving.job.claim.take_back() {
            saving.job.count(&self.shared.counters, &SaveEnd::Cancelled);
        }
        self.save_over(number);
    }

    pub(super) fn finish(&mut self, request: RequestId) {
        if self.saving.contains_key(&request) {
            self.finished.insert(request);
        } else {
            self.report.sent.push(request);
        }
    }

    /// Saves that took too long have failed. Their threads may wait for the disk as long as they like.
    pub(super) fn give_up_late_saves(&mut self) {
        let timeout = self.config.io_timeout();
        let late_saves = self
            .saves
            .iter()
            .take_while(|(_, saving)| saving.since.elapsed() >= timeout);
        let late_saves: Vec<u64> = late_saves.map(|(&number, _)| number).collect();
        let mut stalled = 0;
        for number in late_saves {
            let job = &self.saves[&number].job;
            // A copy that runs is over in a moment, whatever the disk does.
            if job.claim.cancel() || job.claim.is_over() {
                stalled += u64::from(job.count(&self.shared.counters, &SaveEnd::Stalled));
                self.save_over(number);
            }
        }
        if stalled > 0 {
            self.shared.log.saves_stalled(stalled, timeout);
        }
    }
}

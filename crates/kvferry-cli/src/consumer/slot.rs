//! One of the consumer's requests at a time: ask, poison, read, release, verify, confirm.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crossbeam::channel::Receiver;
use kvferry_engine::{BlockPair, Peer, RemoteTable, SendError, Table, TransferReport};
use kvferry_wire::{
    DEMO_CHANNEL, DemoOffer, DemoPlan, DemoReply, DemoRequest, Incarnation, LEASE_CHANNEL, LeaseId,
    ReaderId, Verdict, encode_release,
};

use super::answers::Answer;
use super::clock::ReadClock;
use super::tally::Tally;
use super::{IN_FLIGHT, verify};
use crate::blocks::{Blocks, FreeIds};
use crate::fault::Faults;
use crate::pattern::request_digest;
use crate::progress::Progress;
use crate::share::Share;

/// Time for an offer. It covers the end of leases that a lost consumer left behind.
const OFFER_PATIENCE: Duration = Duration::from_secs(90);
/// Time for a read. The engine's own deadline is shorter; this one covers its escalation.
const READ_PATIENCE: Duration = Duration::from_secs(90);
/// Time after which an unanswered release is sent again.
const RESEND_AFTER: Duration = Duration::from_secs(2);
/// Time after which an unanswered release is a failure: well below the lease duration.
const CONFIRM_PATIENCE: Duration = Duration::from_secs(15);
/// The same where the release is dropped on purpose.
const DROPPED_PATIENCE: Duration = Duration::from_secs(1);

/// What the slots of a run have in common.
pub(super) struct Shared<'a> {
    pub(super) peer: &'a Peer,
    pub(super) incarnation: Incarnation,
    pub(super) plan: &'a DemoPlan,
    pub(super) blocks: &'a Blocks,
    pub(super) tables: &'a [(Table, RemoteTable)],
    pub(super) free: Mutex<FreeIds>,
    pub(super) faults: Faults,
    pub(super) tally: &'a Tally,
    pub(super) clock: &'a ReadClock,
    pub(super) progress: &'a Progress,
}

impl Shared<'_> {
    fn free(&self) -> std::sync::MutexGuard<'_, FreeIds> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) struct Slot<'a> {
    shared: &'a Shared<'a>,
    answers: &'a Receiver<Answer>,
    /// The next ticket, which is also the number of the load.
    ticket: u64,
}

impl<'a> Slot<'a> {
    pub(super) const fn new(
        shared: &'a Shared<'a>,
        number: u64,
        answers: &'a Receiver<Answer>,
    ) -> Self {
        Self {
            shared,
            answers,
            ticket: number,
        }
    }

    /// Goes through requests until there are no more. Without a producer there is no going on; what
    /// is wrong with one request only is counted, and the next one gets its turn.
    pub(super) fn run(mut self) {
        if let Err(failure) = self.requests() {
            self.shared.tally.fail(failure);
        }
    }

    fn requests(&mut self) -> Result<(), String> {
        while let Some(offer) = self.next_offer()? {
            self.request(&offer)?;
            self.ticket += u64::from(IN_FLIGHT);
        }
        Ok(())
    }

    fn next_offer(&self) -> Result<Option<DemoOffer>, String> {
        let ticket = self.ticket;
        let question = DemoRequest::Next { ticket };
        let question = question.encode().map_err(|error| error.to_string())?;
        self.send(DEMO_CHANNEL, question)?;
        let until = Instant::now() + OFFER_PATIENCE;
        loop {
            match self.receive(until)? {
                Some(Answer::Demo(DemoReply::Offer { ticket: of, offer })) if of == ticket => {
                    self.check_offer(&offer)?;
                    return Ok(Some(offer));
                }
                Some(Answer::Demo(DemoReply::NoMore { ticket: of })) if of == ticket => {
                    return Ok(None);
                }
                // A repeated answer to something older.
                Some(_) => {}
                None => {
                    return Err(format!(
                        "the producer offered no request within {OFFER_PATIENCE:?}"
                    ));
                }
            }
        }
    }

    fn check_offer(&self, offer: &DemoOffer) -> Result<(), String> {
        let (plan, request) = (self.shared.plan, offer.request);
        if request >= plan.requests || offer.block_ids.len() != plan.blocks as usize {
            return Err(format!(
                "the producer offered request {request} of {} blocks, its plan has {} requests of {}",
                offer.block_ids.len(),
                plan.requests,
                plan.blocks
            ));
        }
        if request_digest(&offer.digests) != offer.digest {
            return Err(format!(
                "request {request}: the producer's digests contradict one another"
            ));
        }
        Ok(())
    }

    /// One request from poison to confirmation.
    fn request(&self, offer: &DemoOffer) -> Result<(), String> {
        let Shared { plan, tally, .. } = *self.shared;
        let destinations = self.shared.free().take(plan.blocks);
        let destinations =
            destinations.ok_or("more requests in flight than there is memory for")?;
        let share = Share::of(plan.seed, offer.request);
        self.poison(&destinations)?;
        let read = self.read(offer, share, &destinations).ok_or_else(|| {
            format!(
                "request {}: the read did not end within {READ_PATIENCE:?}",
                offer.request
            )
        })?;
        if let Ok(report) = &read {
            tally.add(|totals| {
                totals.blocks += u64::from(share.count(plan.blocks));
                totals.bytes += report.bytes;
                totals.operations += report.operations;
            });
        }
        // The read has ended, so the producer may have its blocks back while ours are checked; that
        // goes for a read that failed as well.
        let dropped = self.release(&offer.lease)?;
        let verified = read.and_then(|report| {
            self.damage(share, &destinations)?;
            let blocks = self.shared.blocks;
            verify::check_request(plan, offer, share, blocks, &destinations)?;
            Ok(report.bytes)
        });
        self.shared.free().give(destinations);
        let confirmed = self.confirm(&offer.lease, dropped)?;
        match (verified, confirmed) {
            (Ok(bytes), Verdict::Valid) => {
                tally.add(|totals| {
                    totals.requests += 1;
                    totals.verified_bytes += bytes;
                });
                self.shared.progress.add(bytes);
            }
            (Err(failure), _) => tally.fail(failure),
            (Ok(_), verdict) => {
                tally.fail(format!(
                    "request {}: the producer did not confirm its lease: {verdict}",
                    offer.request
                ));
            }
        }
        Ok(())
    }

    fn poison(&self, destinations: &[u32]) -> Result<(), String> {
        let blocks = self.shared.blocks;
        let poisoned = destinations.iter().try_for_each(|&id| blocks.poison(id));
        poisoned.map_err(|error| error.to_string())
    }

    /// Reads a share of a request's blocks. `None` if the read has not ended, so that its
    /// destinations are nobody's to use.
    fn read(
        &self,
        offer: &DemoOffer,
        share: Share,
        destinations: &[u32],
    ) -> Option<Result<Done, String>> {
        let Shared { plan, peer, .. } = *self.shared;
        let pairs: Vec<BlockPair> = (0..)
            .zip(destinations.iter().zip(&offer.block_ids))
            .filter(|(block, _)| share.takes(*block))
            .map(|(_, (&local, &remote))| BlockPair::new(local, remote))
            .collect();
        let bytes = pairs.len() as u64 * u64::from(plan.layers) * plan.block_bytes;
        if pairs.is_empty() || self.shared.faults.skips_read() {
            return Some(Ok(Done {
                bytes,
                operations: 0,
            }));
        }
        self.shared.clock.enter();
        let outcome = match peer.read(self.shared.tables, &pairs) {
            Ok(transfer) => transfer
                .wait(READ_PATIENCE)
                .map(|outcome| outcome.map_err(|error| error.to_string())),
            Err(error) => Some(Err(error.to_string())),
        };
        self.shared.clock.leave();
        let checked = outcome?.and_then(|report| match report.bytes {
            moved if moved == bytes => Ok(Done::from(report)),
            moved => Err(format!("{bytes} bytes were to be read, and {moved} were")),
        });
        Some(checked.map_err(|error| format!("request {}: {error}", offer.request)))
    }

    /// Sends the release, unless this is the one to be dropped; says whether it was.
    fn release(&self, lease: &LeaseId) -> Result<bool, String> {
        if self.shared.faults.drops_release() {
            return Ok(true);
        }
        self.send_release(lease)?;
        Ok(false)
    }

    fn send_release(&self, lease: &LeaseId) -> Result<(), String> {
        let reader = ReaderId {
            incarnation: self.shared.incarnation,
            load: self.ticket,
        };
        let payload = encode_release(lease, reader, 1).map_err(|error| error.to_string())?;
        self.send(LEASE_CHANNEL, payload)
    }

    /// Waits for the producer's verdict, and asks again when it does not come.
    fn confirm(&self, lease: &LeaseId, dropped: bool) -> Result<Verdict, String> {
        let patience = if dropped {
            DROPPED_PATIENCE
        } else {
            CONFIRM_PATIENCE
        };
        let until = Instant::now() + patience;
        loop {
            let turn = until.min(Instant::now() + RESEND_AFTER);
            match self.receive(turn)? {
                Some(Answer::Released {
                    epoch,
                    load,
                    verdict,
                }) if epoch == lease.epoch && load == self.ticket => return Ok(verdict),
                Some(_) => {}
                None if Instant::now() >= until => {
                    return Err(format!(
                        "{}: the producer did not confirm the release within {patience:?}",
                        lease.request
                    ));
                }
                None if dropped => {}
                None => self.send_release(lease)?,
            }
        }
    }

    /// Flips a bit of the last block, if this is the request to damage.
    fn damage(&self, share: Share, destinations: &[u32]) -> Result<(), String> {
        let Some(&id) = destinations.last() else {
            return Ok(());
        };
        if share != Share::All || !self.shared.faults.damages() {
            return Ok(());
        }
        let blocks = self.shared.blocks;
        let mut bytes = vec![0; blocks.shape().block_bytes as usize];
        let flipped = blocks.read(0, id, &mut bytes).and_then(|()| {
            let middle = bytes.len() / 2;
            if let Some(byte) = bytes.get_mut(middle) {
                *byte ^= 0x10;
            }
            blocks.write(0, id, &bytes)
        });
        flipped.map_err(|error| error.to_string())
    }

    fn send(&self, channel: u16, payload: Vec<u8>) -> Result<(), String> {
        let sent = self.shared.peer.send(channel, payload);
        sent.map_err(|error| match error {
            SendError::PeerGone(reason) => format!("the producer is gone: {reason}"),
            other => other.to_string(),
        })
    }

    /// The next answer for this slot; `None` when it is `until`.
    fn receive(&self, until: Instant) -> Result<Option<Answer>, String> {
        match self.answers.recv_deadline(until) {
            Ok(Answer::Gone) => Err(match self.shared.peer.gone() {
                Some(reason) => format!("the producer is gone: {reason}"),
                None => "the producer is gone".to_owned(),
            }),
            Ok(Answer::Unreadable(reason)) => {
                Err(format!("the producer sent what cannot be read: {reason}"))
            }
            Ok(Answer::Demo(DemoReply::Refused { reason })) => {
                Err(format!("the producer refused: {reason}"))
            }
            Ok(answer) => Ok(Some(answer)),
            Err(_) => Ok(None),
        }
    }
}

/// What a read did, or is said to have done.
struct Done {
    bytes: u64,
    operations: u64,
}

impl From<TransferReport> for Done {
    fn from(report: TransferReport) -> Self {
        Self {
            bytes: report.bytes,
            operations: report.operations,
        }
    }
}

//! What is held: posts that have not begun, reports that wait, operations that are stuck.
//!
//! Invariant: an operation is in exactly one place, and leaves the last one as one report.

use std::collections::{BTreeMap, HashMap, VecDeque};

use kvferry_wire::{SEGMENT_HEADER_BYTES, Segment, SegmentBody};

use super::injected;
use super::schedule::{Draw, Fault, FaultControl, FaultRates, Stream};
use crate::fabric::{
    CopyEnd, EndpointId, FabricError, KeyId, ReadOperation, ReadToken, RegionHandle, SendBuffer,
    Sink,
};
use crate::memory::{CopyBatch, CopyError, CopyStats, MemoryRegion};

/// What becomes of an operation's completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Deliver,
    /// It is reported this many turns later.
    Delay(u64),
    /// An error is reported instead, this many turns later.
    Fail(u64),
    /// It is not reported before the endpoint is closed.
    Withhold,
}

/// A read that the inner fabric knows, or that has no need of it.
pub(super) struct InnerRead {
    pub(super) endpoint: EndpointId,
    /// The caller's.
    pub(super) token: ReadToken,
    pub(super) fate: Fate,
}

/// A [`ReadOperation`] for later.
pub(super) struct OwnedRead {
    pub(super) token: ReadToken,
    key: KeyId,
    remote_address: u64,
    local: MemoryRegion,
    local_handle: RegionHandle,
    local_offset: u64,
    bytes: u64,
}

impl OwnedRead {
    pub(super) fn new(token: ReadToken, operation: &ReadOperation<'_>) -> Self {
        Self {
            token,
            key: operation.key,
            remote_address: operation.remote_address,
            local: operation.local.clone(),
            local_handle: operation.local_handle,
            local_offset: operation.local_offset,
            bytes: operation.bytes,
        }
    }

    pub(super) fn operation(&self) -> ReadOperation<'_> {
        ReadOperation {
            key: self.key,
            remote_address: self.remote_address,
            local: &self.local,
            local_handle: self.local_handle,
            local_offset: self.local_offset,
            bytes: self.bytes,
        }
    }
}

pub(super) enum Post {
    Send(SendBuffer),
    Read(OwnedRead),
    Copy(ReadToken, Box<CopyBatch>),
}

/// A post that has not begun.
pub(super) struct Deferred {
    pub(super) endpoint: EndpointId,
    due: u64,
    pub(super) post: Post,
}

enum Report {
    Segment {
        bytes: Box<[u8]>,
        /// Also due when so many segments have arrived.
        arrivals: u64,
    },
    Sent(SendBuffer, Result<(), FabricError>),
    ReadDone(ReadToken, Result<(), FabricError>),
    CopyDone(ReadToken, CopyEnd),
    EndpointFailed(FabricError),
    Closed,
    ProtocolError(&'static str),
}

struct Held {
    due: u64,
    /// `None` for segments and what else belongs to no endpoint.
    endpoint: Option<EndpointId>,
    report: Report,
}

/// An endpoint that the caller may still hear of.
#[derive(Default)]
struct Open {
    /// When its end may be reported, once it is being closed.
    closing: Option<u64>,
    failed: bool,
    /// What is stuck on it stays so after the close; the inner fabric may have closed it.
    outlasts_close: bool,
    inner_closed: bool,
    /// Fates of sends that the inner fabric has not reported, in the order of the posts.
    sends: VecDeque<Fate>,
    stuck: Vec<Report>,
}

pub(super) struct State {
    pub(super) control: FaultControl,
    pub(super) next_read: u64,
    turn: u64,
    /// Operations of each kind so far.
    drawn: [u64; Stream::COUNT],
    endpoints: BTreeMap<EndpointId, Open>,
    /// Reads and copies that the inner fabric will report, by our number.
    reads: HashMap<u64, InnerRead>,
    deferred: VecDeque<Deferred>,
    held: VecDeque<Held>,
    arrivals: u64,
    /// Segments that arrive now are due then at the earliest.
    segments_due: u64,
}

impl State {
    pub(super) fn new(control: FaultControl) -> Self {
        Self {
            control,
            next_read: 0,
            turn: 0,
            drawn: [0; Stream::COUNT],
            endpoints: BTreeMap::new(),
            reads: HashMap::new(),
            deferred: VecDeque::new(),
            held: VecDeque::new(),
            arrivals: 0,
            segments_due: 0,
        }
    }

    /// The random numbers of the next operation of a kind.
    pub(super) fn draw(&mut self, stream: Stream) -> Draw {
        let number = &mut self.drawn[stream as usize];
        *number += 1;
        Draw::new(self.control.seed(), stream, *number)
    }

    pub(super) fn opened(&mut self, endpoint: EndpointId) {
        self.endpoints.insert(endpoint, Open::default());
    }

    pub(super) fn is_open(&self, endpoint: EndpointId) -> bool {
        self.endpoints
            .get(&endpoint)
            .is_some_and(|open| open.closing.is_none())
    }

    pub(super) fn open_endpoints(&self) -> Vec<EndpointId> {
        let open = self.endpoints.iter();
        open.filter(|(_, open)| open.closing.is_none())
            .map(|(&endpoint, _)| endpoint)
            .collect()
    }

    fn hold(&mut self, delay: u64, endpoint: Option<EndpointId>, report: Report) {
        self.held.push_back(Held {
            due: self.turn + delay,
            endpoint,
            report,
        });
    }

    pub(super) fn defer(&mut self, endpoint: EndpointId, delay: u64, post: Post) {
        self.deferred.push_back(Deferred {
            endpoint,
            due: self.turn + delay,
            post,
        });
    }

    /// The inner fabric has taken a send and will report it.
    pub(super) fn await_send(&mut self, endpoint: EndpointId, fate: Fate) {
        if let Some(open) = self.endpoints.get_mut(&endpoint) {
            open.sends.push_back(fate);
        }
    }

    /// The inner fabric has taken a read and will report it.
    pub(super) fn await_read(&mut self, number: u64, read: InnerRead) {
        self.reads.insert(number, read);
    }

    /// A send has ended, as far as anybody but us is concerned.
    pub(super) fn end_send(
        &mut self,
        endpoint: EndpointId,
        buffer: SendBuffer,
        result: Result<(), FabricError>,
        fate: Fate,
    ) {
        let result = match fate {
            Fate::Fail(_) => Err(injected("send", "failed")),
            _ => result,
        };
        self.end(endpoint, fate, Report::Sent(buffer, result));
    }

    /// A read has ended, as far as anybody but us is concerned.
    pub(super) fn end_read(&mut self, read: InnerRead, result: Result<(), FabricError>) {
        let result = match read.fate {
            Fate::Fail(_) => Err(injected("read", "failed")),
            _ => result,
        };
        let report = Report::ReadDone(read.token, result);
        self.end(read.endpoint, read.fate, report);
    }

    /// A batch of copies has ended, as far as anybody but us is concerned.
    pub(super) fn end_copy(&mut self, copy: InnerRead, mut end: CopyEnd) {
        if let Fate::Fail(_) = copy.fate {
            end.result = Err(copy_failed("failed"));
        }
        let report = Report::CopyDone(copy.token, end);
        self.end(copy.endpoint, copy.fate, report);
    }

    fn end(&mut self, endpoint: EndpointId, fate: Fate, report: Report) {
        let open = self.endpoints.get_mut(&endpoint);
        let delay = match (open.filter(|open| open.closing.is_none()), fate) {
            // A close ends every delay but its own.
            (None, _) | (_, Fate::Deliver) => 0,
            (Some(_), Fate::Delay(turns) | Fate::Fail(turns)) => turns,
            (Some(open), Fate::Withhold) => {
                open.stuck.push(report);
                return;
            }
        };
        self.hold(delay, Some(endpoint), report);
    }

    /// Perhaps reports an endpoint as failed, soon.
    pub(super) fn maybe_fail(&mut self, endpoint: EndpointId, draw: &mut Draw) {
        let (fault, rates) = self.control.choose(draw, &[Fault::EndpointFailed]);
        let delay = draw.up_to(rates.max_delay);
        if fault.is_some() {
            self.fail(endpoint, delay, injected("endpoint", "failed"));
        }
    }

    fn fail(&mut self, endpoint: EndpointId, delay: u64, error: FabricError) {
        if let Some(open) = self.endpoints.get_mut(&endpoint)
            && open.closing.is_none()
            && !std::mem::replace(&mut open.failed, true)
        {
            self.hold(delay, Some(endpoint), Report::EndpointFailed(error));
        }
    }

    /// An endpoint is being closed: everything on it ends.
    pub(super) fn closing(&mut self, endpoint: EndpointId) {
        if !self.is_open(endpoint) {
            return;
        }
        let mut draw = self.draw(Stream::Close);
        let faults = [Fault::CloseDelayed, Fault::CloseStuck];
        let (fault, rates) = self.control.choose(&mut draw, &faults);
        let delay = match fault {
            Some(Fault::CloseDelayed) => draw.up_to(rates.max_delay),
            _ => 0,
        };
        let turn = self.turn;
        // What has completed is reported at once; what failed need not be told any more.
        self.held.retain_mut(|held| {
            let ours = held.endpoint == Some(endpoint);
            if ours {
                held.due = held.due.min(turn);
            }
            !(ours && matches!(held.report, Report::EndpointFailed(_)))
        });
        let Some(open) = self.endpoints.get_mut(&endpoint) else {
            return;
        };
        open.closing = Some(turn + delay);
        if fault == Some(Fault::CloseStuck) && !open.stuck.is_empty() {
            open.outlasts_close = true;
        } else {
            self.end_stuck(endpoint, delay);
        }
    }

    /// Ends what outlasted the close of its endpoint.
    pub(super) fn end_what_is_stuck(&mut self) {
        let outlasting: Vec<EndpointId> = self
            .endpoints
            .iter()
            .filter(|(_, open)| open.outlasts_close)
            .map(|(&endpoint, _)| endpoint)
            .collect();
        for endpoint in outlasting {
            self.end_stuck(endpoint, 0);
        }
    }

    fn end_stuck(&mut self, endpoint: EndpointId, delay: u64) {
        let Some(open) = self.endpoints.get_mut(&endpoint) else {
            return;
        };
        let was_closed = std::mem::take(&mut open.outlasts_close) && open.inner_closed;
        let mut ended = std::mem::take(&mut open.stuck);
        let (ours, others) = std::mem::take(&mut self.deferred)
            .into_iter()
            .partition(|deferred| deferred.endpoint == endpoint);
        self.deferred = others;
        ended.extend(
            VecDeque::into_iter(ours).map(|deferred| match deferred.post {
                Post::Send(buffer) => Report::Sent(buffer, Ok(())),
                Post::Read(read) => Report::ReadDone(read.token, Ok(())),
                Post::Copy(token, batch) => Report::CopyDone(token, not_copied(batch)),
            }),
        );
        for report in ended {
            let report = match report {
                Report::Sent(buffer, _) => {
                    Report::Sent(buffer, Err(injected("send", "stuck until the close")))
                }
                Report::ReadDone(token, _) => {
                    Report::ReadDone(token, Err(injected("read", "stuck until the close")))
                }
                Report::CopyDone(token, mut end) => {
                    end.result = Err(copy_failed("stuck until the close"));
                    Report::CopyDone(token, end)
                }
                other => other,
            };
            self.hold(delay, Some(endpoint), report);
        }
        if was_closed {
            self.hold(delay, Some(endpoint), Report::Closed);
        }
    }

    /// Begins a call of `progress`.
    pub(super) fn begin_turn(&mut self) {
        self.turn += 1;
        for endpoint in self.control.take_failures() {
            self.fail(endpoint, 0, injected("endpoint", "failed as asked"));
        }
    }

    pub(super) fn take_due_posts(&mut self) -> Vec<Deferred> {
        let mut due = Vec::new();
        for _ in 0..self.deferred.len() {
            let Some(deferred) = self.deferred.pop_front() else {
                break;
            };
            let stalled = self.control.is_stalled(Some(deferred.endpoint));
            if deferred.due <= self.turn && !stalled {
                due.push(deferred);
            } else {
                self.deferred.push_back(deferred);
            }
        }
        due
    }

    fn is_closing(&self, endpoint: Option<EndpointId>) -> bool {
        let open = endpoint.and_then(|endpoint| self.endpoints.get(&endpoint));
        open.is_some_and(|open| open.closing.is_some())
    }

    fn is_stalled(&self, endpoint: Option<EndpointId>) -> bool {
        !self.is_closing(endpoint) && self.control.is_stalled(endpoint)
    }

    /// True if a later call of `progress` will do something by itself.
    pub(super) fn waits_for_a_turn(&self) -> bool {
        let posts = self.deferred.iter();
        let reports = self.held.iter().map(|held| held.endpoint);
        self.control.has_failures()
            || posts
                .map(|deferred| Some(deferred.endpoint))
                .chain(reports)
                .any(|endpoint| !self.is_stalled(endpoint))
    }

    /// Reports what is due. True if anything was.
    pub(super) fn deliver(&mut self, sink: &mut dyn Sink) -> bool {
        let most = if self.control.one_report() {
            1
        } else {
            usize::MAX
        };
        let mut delivered = 0;
        let mut kept = VecDeque::new();
        while delivered < most
            && let Some(held) = self.held.pop_front()
        {
            let due = held.due <= self.turn || self.is_overtaken(&held.report);
            if due && !self.is_stalled(held.endpoint) {
                delivered += 1;
                self.report(held, sink);
            } else {
                kept.push_back(held);
            }
        }
        kept.append(&mut self.held);
        self.held = kept;
        delivered > 0
    }

    fn is_overtaken(&self, report: &Report) -> bool {
        matches!(report, Report::Segment { arrivals, .. } if *arrivals <= self.arrivals)
    }

    /// Reports everything, due or not, when the fabric has ended.
    pub(super) fn deliver_all(&mut self, sink: &mut dyn Sink) {
        while let Some(held) = self.held.pop_front() {
            self.report(held, sink);
        }
    }

    fn report(&mut self, held: Held, sink: &mut dyn Sink) {
        match (held.report, held.endpoint) {
            (Report::Segment { bytes, .. }, _) => sink.segment(&bytes),
            (Report::Sent(buffer, result), Some(endpoint)) => sink.sent(endpoint, buffer, result),
            (Report::ReadDone(token, result), _) => sink.read_done(token, result),
            (Report::CopyDone(token, end), _) => sink.copy_done(token, end),
            (Report::EndpointFailed(error), Some(endpoint)) => {
                sink.endpoint_failed(endpoint, error);
            }
            (Report::Closed, Some(endpoint)) => {
                self.endpoints.remove(&endpoint);
                sink.closed(endpoint);
            }
            (Report::ProtocolError(what), _) => sink.protocol_error(what),
            // Held with their endpoint, always.
            (Report::Sent(..) | Report::EndpointFailed(_) | Report::Closed, None) => {}
        }
    }

    fn hold_segment(&mut self, bytes: Box<[u8]>, due: u64, arrivals: u64) {
        self.held.push_back(Held {
            due,
            endpoint: None,
            report: Report::Segment { bytes, arrivals },
        });
    }
}

/// What the inner fabric reports.
impl Sink for State {
    fn segment(&mut self, bytes: &[u8]) {
        const FAULTS: &[Fault] = &[
            Fault::SegmentLost,
            Fault::SegmentGarbled,
            Fault::SegmentDuplicated,
            Fault::SegmentReordered,
            Fault::SegmentDelayed,
            Fault::SegmentCorrupted,
        ];
        self.arrivals += 1;
        let carries_data = Segment::parse(bytes).is_ok_and(|segment| {
            matches!(segment.header.body, SegmentBody::Data { .. }) && !segment.payload.is_empty()
        });
        // Corruption is the last.
        let faults = &FAULTS[..FAULTS.len() - usize::from(!carries_data)];
        let mut draw = self.draw(Stream::Segment);
        let (fault, rates) = self.control.choose(&mut draw, faults);
        let delay = draw.up_to(rates.max_delay);
        let mut bytes: Box<[u8]> = bytes.into();
        let mut due = self.segments_due.max(self.turn);
        let mut arrivals = u64::MAX;
        match fault {
            Some(Fault::SegmentLost) => return,
            Some(Fault::SegmentGarbled) => bytes = garble(bytes, &mut draw),
            Some(Fault::SegmentCorrupted) => {
                flip(bytes.get_mut(SEGMENT_HEADER_BYTES..), &mut draw);
            }
            Some(Fault::SegmentDuplicated) => {
                self.hold_segment(bytes.clone(), due + delay, u64::MAX);
            }
            Some(Fault::SegmentReordered) => {
                due += delay;
                arrivals = overtaken_at(self.arrivals, &rates, &mut draw);
            }
            Some(Fault::SegmentDelayed) => {
                due += delay;
                self.segments_due = due;
            }
            _ => {}
        }
        self.hold_segment(bytes, due, arrivals);
    }

    fn sent(&mut self, endpoint: EndpointId, buffer: SendBuffer, result: Result<(), FabricError>) {
        let open = self.endpoints.get_mut(&endpoint);
        let fate = open.and_then(|open| open.sends.pop_front());
        let fate = fate.unwrap_or(Fate::Deliver);
        self.end_send(endpoint, buffer, result, fate);
    }

    fn read_done(&mut self, token: ReadToken, result: Result<(), FabricError>) {
        if let Some(read) = self.reads.remove(&token.0) {
            self.end_read(read, result);
        }
    }

    fn copy_done(&mut self, token: ReadToken, end: CopyEnd) {
        if let Some(copy) = self.reads.remove(&token.0) {
            self.end_copy(copy, end);
        }
    }

    fn endpoint_failed(&mut self, endpoint: EndpointId, error: FabricError) {
        self.fail(endpoint, 0, error);
    }

    fn closed(&mut self, endpoint: EndpointId) {
        let open = self.endpoints.get_mut(&endpoint);
        let until = open
            .as_ref()
            .and_then(|open| open.closing)
            .unwrap_or_default();
        if let Some(open) = open.filter(|open| open.outlasts_close) {
            open.inner_closed = true;
            return;
        }
        let delay = until.saturating_sub(self.turn);
        self.hold(delay, Some(endpoint), Report::Closed);
    }

    fn protocol_error(&mut self, what: &'static str) {
        self.hold(0, None, Report::ProtocolError(what));
    }
}

/// The end of a batch of which nothing was copied, as if all was.
pub(super) fn not_copied(batch: Box<CopyBatch>) -> CopyEnd {
    CopyEnd {
        batch,
        result: Ok(CopyStats::default()),
    }
}

fn copy_failed(what: &str) -> CopyError {
    CopyError::System {
        pid: 0,
        status: injected("copy", what).to_string(),
    }
}

fn overtaken_at(arrivals: u64, rates: &FaultRates, draw: &mut Draw) -> u64 {
    arrivals + draw.up_to(rates.reorder_window)
}

/// Cuts a segment short, or changes up to three bits of its header.
fn garble(bytes: Box<[u8]>, draw: &mut Draw) -> Box<[u8]> {
    let mut bytes = bytes.into_vec();
    if draw.coin() {
        bytes.truncate(draw.below(bytes.len() as u64) as usize);
        return bytes.into();
    }
    let header = bytes.len().min(SEGMENT_HEADER_BYTES);
    for _ in 0..draw.up_to(3) {
        flip(bytes.get_mut(..header), draw);
    }
    bytes.into()
}

/// Changes one bit.
fn flip(bytes: Option<&mut [u8]>, draw: &mut Draw) {
    let bytes = bytes.unwrap_or_default();
    let place = draw.below(bytes.len() as u64) as usize;
    if let Some(byte) = bytes.get_mut(place) {
        *byte ^= 1 << draw.below(8);
    }
}

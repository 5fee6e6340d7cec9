//! A fabric around any other that loses, delays, reorders, repeats, damages, fails and stalls what
//! goes through it, on a seeded schedule.
//!
//! It follows the fabric's contract itself: whatever is injected, every [`Posted::Pending`] has one
//! report, at the latest after [`Fabric::close`] or [`Fabric::shutdown`], buffers come back,
//! [`Sink::closed`] comes once and last, and no memory is touched after the report of its read.
//! Three faults break what the contract promises, for those who check it: duplicated, garbled and
//! corrupted segments. [`Fault::ReadEmpty`] and [`Fault::CopyEmpty`] break the promise of a read.
//!
//! Time is counted in calls of [`Fabric::progress`], never in seconds, and [`Fabric::arm`] says
//! *busy* while something waits for a later call.

mod held;
mod schedule;
#[cfg(test)]
mod tests;

use std::fmt;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use kvferry_wire::Addresses;
use rustix::event::epoll;

use self::held::{Deferred, Fate, InnerRead, OwnedRead, Post, State, not_copied};
use self::schedule::Stream;
pub use self::schedule::{Fault, FaultControl, FaultRates};
use super::{
    Armed, Capabilities, EndpointId, Fabric, FabricError, KeyId, NativeReads, Posted,
    ReadOperation, ReadToken, RegionHandle, Registered, SendBuffer, Sink,
};
use crate::memory::{CopyBatch, MemoryRegion};

/// A fabric that injects faults into another. See the module's text.
pub struct FaultFabric<F> {
    inner: F,
    state: State,
    /// Readable when the inner fabric's descriptors or the control's are.
    events: OwnedFd,
}

pub(super) fn injected(call: &'static str, what: &str) -> FabricError {
    FabricError::new(call, format!("injected: {what}"))
}

impl<F: Fabric> FaultFabric<F> {
    /// Wraps a fabric. `control` is to drive this fabric only.
    ///
    /// # Errors
    /// If the operating system gives no descriptor.
    pub fn new(inner: F, control: &FaultControl) -> Result<Self, FabricError> {
        let failed = |error: rustix::io::Errno| FabricError::new("epoll", error.to_string());
        let events = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
        let inner_fds = inner.event_fds().into_iter().flatten();
        for fd in inner_fds.chain([control.event()]) {
            let data = epoll::EventData::new_u64(0);
            epoll::add(&events, fd, data, epoll::EventFlags::IN).map_err(failed)?;
        }
        Ok(Self {
            inner,
            state: State::new(control.clone()),
            events,
        })
    }

    /// The handle that drives it.
    #[must_use]
    pub fn control(&self) -> &FaultControl {
        &self.state.control
    }

    fn refused(&mut self, stream: Stream, fault: Fault) -> bool {
        let mut draw = self.state.draw(stream);
        self.state.control.choose(&mut draw, &[fault]).0.is_some()
    }

    /// Gives a send to the inner fabric and sees to its fate.
    fn pass_send(
        &mut self,
        endpoint: EndpointId,
        buffer: SendBuffer,
        fate: Fate,
    ) -> Result<Posted<SendBuffer>, (SendBuffer, FabricError)> {
        match (self.inner.send(endpoint, buffer)?, fate) {
            (Posted::Done(buffer), Fate::Deliver) => Ok(Posted::Done(buffer)),
            (Posted::Done(buffer), fate) => {
                self.state.end_send(endpoint, buffer, Ok(()), fate);
                Ok(Posted::Pending)
            }
            (Posted::Pending, fate) => {
                self.state.await_send(endpoint, fate);
                Ok(Posted::Pending)
            }
        }
    }

    /// Gives a read to the inner fabric, under a number of ours: the caller's need not be unique.
    fn pass_read(
        &mut self,
        endpoint: EndpointId,
        token: ReadToken,
        operation: &ReadOperation<'_>,
        fate: Fate,
    ) -> Result<Posted<()>, FabricError> {
        let number = self.state.next_read;
        self.state.next_read += 1;
        let posted = self.inner.read(endpoint, ReadToken(number), operation)?;
        let read = InnerRead {
            endpoint,
            token,
            fate,
        };
        match (posted, fate) {
            (Posted::Done(()), Fate::Deliver) => return Ok(Posted::Done(())),
            (Posted::Done(()), _) => self.state.end_read(read, Ok(())),
            (Posted::Pending, _) => self.state.await_read(number, read),
        }
        Ok(Posted::Pending)
    }

    /// Gives a batch of copies to the inner fabric, under a number of ours.
    fn pass_copy(
        &mut self,
        endpoint: EndpointId,
        token: ReadToken,
        batch: Box<CopyBatch>,
        fate: Fate,
    ) -> Result<(), (Box<CopyBatch>, FabricError)> {
        let number = self.state.next_read;
        self.state.next_read += 1;
        self.inner.copy(endpoint, ReadToken(number), batch)?;
        let copy = InnerRead {
            endpoint,
            token,
            fate,
        };
        self.state.await_read(number, copy);
        Ok(())
    }

    /// Begins what was held before its start and is due.
    fn begin_deferred(&mut self) -> bool {
        let due = self.state.take_due_posts();
        let any = !due.is_empty();
        for Deferred { endpoint, post, .. } in due {
            match post {
                Post::Send(buffer) => match self.pass_send(endpoint, buffer, Fate::Deliver) {
                    Ok(Posted::Pending) => {}
                    Ok(Posted::Done(buffer)) => {
                        self.state.end_send(endpoint, buffer, Ok(()), Fate::Deliver);
                    }
                    Err((buffer, error)) => {
                        self.state
                            .end_send(endpoint, buffer, Err(error), Fate::Deliver);
                    }
                },
                Post::Read(read) => {
                    let token = read.token;
                    let result = self.pass_read(endpoint, token, &read.operation(), Fate::Deliver);
                    let ended = InnerRead {
                        endpoint,
                        token,
                        fate: Fate::Deliver,
                    };
                    match result {
                        Ok(Posted::Pending) => {}
                        Ok(Posted::Done(())) => self.state.end_read(ended, Ok(())),
                        Err(error) => self.state.end_read(ended, Err(error)),
                    }
                }
                Post::Copy(token, batch) => {
                    let passed = self.pass_copy(endpoint, token, batch, Fate::Deliver);
                    if let Err((batch, _)) = passed {
                        let fate = Fate::Fail(0);
                        let copy = InnerRead {
                            endpoint,
                            token,
                            fate,
                        };
                        self.state.end_copy(copy, not_copied(batch));
                    }
                }
            }
        }
        any
    }
}

impl<F: Fabric> Fabric for FaultFabric<F> {
    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn addresses(&self) -> Addresses {
        self.inner.addresses()
    }

    fn register(&mut self, memory: &MemoryRegion) -> Result<Registered, FabricError> {
        if self.refused(Stream::Register, Fault::RegisterRefused) {
            return Err(injected("register", "refused"));
        }
        self.inner.register(memory)
    }

    fn deregister(&mut self, region: RegionHandle) {
        self.inner.deregister(region);
    }

    fn connect(&mut self, endpoint: EndpointId, to: &Addresses) -> Result<(), FabricError> {
        if self.refused(Stream::Connect, Fault::ConnectRefused) {
            return Err(injected("connect", "refused"));
        }
        self.inner.connect(endpoint, to)?;
        self.state.opened(endpoint);
        Ok(())
    }

    fn native_reads(&self, endpoint: EndpointId) -> NativeReads {
        self.inner.native_reads(endpoint)
    }

    fn transports(&self, endpoint: EndpointId) -> String {
        self.inner.transports(endpoint)
    }

    fn send(
        &mut self,
        endpoint: EndpointId,
        buffer: SendBuffer,
    ) -> Result<Posted<SendBuffer>, (SendBuffer, FabricError)> {
        const FAULTS: &[Fault] = &[
            Fault::SendRefused,
            Fault::SendStuck,
            Fault::SendLost,
            Fault::SendFailed,
            Fault::SendDelayed,
        ];
        if !self.state.is_open(endpoint) {
            return self.inner.send(endpoint, buffer);
        }
        let mut draw = self.state.draw(Stream::Send);
        if self.state.control.is_stalled(Some(endpoint)) {
            self.state.defer(endpoint, 0, Post::Send(buffer));
            return Ok(Posted::Pending);
        }
        self.state.maybe_fail(endpoint, &mut draw);
        let (fault, rates) = self.state.control.choose(&mut draw, FAULTS);
        let (delay, coin) = (draw.up_to(rates.max_delay), draw.coin());
        match fault {
            None => self.pass_send(endpoint, buffer, Fate::Deliver),
            Some(Fault::SendRefused) => Err((buffer, injected("send", "refused"))),
            Some(Fault::SendStuck) if coin => self.pass_send(endpoint, buffer, Fate::Withhold),
            Some(Fault::SendFailed) if coin => self.pass_send(endpoint, buffer, Fate::Fail(delay)),
            Some(Fault::SendDelayed) if coin => {
                self.pass_send(endpoint, buffer, Fate::Delay(delay))
            }
            Some(Fault::SendLost) if coin => Ok(Posted::Done(buffer)),
            Some(Fault::SendDelayed) => {
                self.state.defer(endpoint, delay, Post::Send(buffer));
                Ok(Posted::Pending)
            }
            Some(other) => {
                let fate = match other {
                    Fault::SendStuck => Fate::Withhold,
                    Fault::SendFailed => Fate::Fail(delay),
                    _ => Fate::Delay(delay),
                };
                self.state.end_send(endpoint, buffer, Ok(()), fate);
                Ok(Posted::Pending)
            }
        }
    }

    fn import_key(&mut self, endpoint: EndpointId, key: &[u8]) -> Result<KeyId, FabricError> {
        if self.refused(Stream::Key, Fault::KeyRefused) {
            return Err(injected("import_key", "refused"));
        }
        self.inner.import_key(endpoint, key)
    }

    fn forget_key(&mut self, endpoint: EndpointId, key: KeyId) {
        self.inner.forget_key(endpoint, key);
    }

    fn read(
        &mut self,
        endpoint: EndpointId,
        token: ReadToken,
        operation: &ReadOperation<'_>,
    ) -> Result<Posted<()>, FabricError> {
        const FAULTS: &[Fault] = &[
            Fault::ReadRefused,
            Fault::ReadStuck,
            Fault::ReadFailed,
            Fault::ReadEmpty,
            Fault::ReadDelayed,
        ];
        if !self.state.is_open(endpoint) {
            return self.pass_read(endpoint, token, operation, Fate::Deliver);
        }
        let mut draw = self.state.draw(Stream::Read);
        if self.state.control.is_stalled(Some(endpoint)) {
            let read = OwnedRead::new(token, operation);
            self.state.defer(endpoint, 0, Post::Read(read));
            return Ok(Posted::Pending);
        }
        self.state.maybe_fail(endpoint, &mut draw);
        let (fault, rates) = self.state.control.choose(&mut draw, FAULTS);
        let (delay, coin) = (draw.up_to(rates.max_delay), draw.coin());
        let fate = match fault {
            None => return self.pass_read(endpoint, token, operation, Fate::Deliver),
            Some(Fault::ReadRefused) => return Err(injected("read", "refused")),
            Some(Fault::ReadEmpty) if coin => return Ok(Posted::Done(())),
            Some(Fault::ReadDelayed) if !coin => {
                let read = OwnedRead::new(token, operation);
                self.state.defer(endpoint, delay, Post::Read(read));
                return Ok(Posted::Pending);
            }
            Some(Fault::ReadStuck) => Fate::Withhold,
            Some(Fault::ReadFailed) => Fate::Fail(delay),
            Some(_) => Fate::Delay(delay),
        };
        if coin {
            return self.pass_read(endpoint, token, operation, fate);
        }
        // Never begun: nothing is written.
        let read = InnerRead {
            endpoint,
            token,
            fate,
        };
        self.state.end_read(read, Ok(()));
        Ok(Posted::Pending)
    }

    fn copy(
        &mut self,
        endpoint: EndpointId,
        token: ReadToken,
        batch: Box<CopyBatch>,
    ) -> Result<(), (Box<CopyBatch>, FabricError)> {
        const FAULTS: &[Fault] = &[
            Fault::CopyRefused,
            Fault::CopyStuck,
            Fault::CopyFailed,
            Fault::CopyEmpty,
            Fault::CopyDelayed,
        ];
        if !self.state.is_open(endpoint) {
            return self.pass_copy(endpoint, token, batch, Fate::Deliver);
        }
        let mut draw = self.state.draw(Stream::Copy);
        if self.state.control.is_stalled(Some(endpoint)) {
            self.state.defer(endpoint, 0, Post::Copy(token, batch));
            return Ok(());
        }
        self.state.maybe_fail(endpoint, &mut draw);
        let (fault, rates) = self.state.control.choose(&mut draw, FAULTS);
        let (delay, coin) = (draw.up_to(rates.max_delay), draw.coin());
        let fate = match fault {
            None => return self.pass_copy(endpoint, token, batch, Fate::Deliver),
            Some(Fault::CopyRefused) => return Err((batch, injected("copy", "refused"))),
            Some(Fault::CopyDelayed) if !coin => {
                self.state.defer(endpoint, delay, Post::Copy(token, batch));
                return Ok(());
            }
            Some(Fault::CopyStuck) => Fate::Withhold,
            Some(Fault::CopyFailed) => Fate::Fail(delay),
            Some(_) => Fate::Delay(delay),
        };
        // An empty success is never begun.
        if coin && fault != Some(Fault::CopyEmpty) {
            return self.pass_copy(endpoint, token, batch, fate);
        }
        let copy = InnerRead {
            endpoint,
            token,
            fate,
        };
        self.state.end_copy(copy, not_copied(batch));
        Ok(())
    }

    fn set_copy_threads(&mut self, threads: NonZeroUsize) {
        self.inner.set_copy_threads(threads);
    }

    fn reset(&mut self, sink: &mut dyn Sink) -> Result<(), FabricError> {
        let done = self.inner.reset(&mut self.state);
        let mut draw = self.state.draw(Stream::Reset);
        if self
            .state
            .control
            .choose(&mut draw, &[Fault::ResetStuck])
            .0
            .is_none()
        {
            self.state.end_what_is_stuck();
        }
        self.state.deliver(sink);
        done
    }

    fn close(&mut self, endpoint: EndpointId) {
        self.state.closing(endpoint);
        self.inner.close(endpoint);
    }

    fn progress(&mut self, sink: &mut dyn Sink) -> bool {
        self.state.begin_turn();
        let mut any = self.begin_deferred();
        any |= self.inner.progress(&mut self.state);
        any | self.state.deliver(sink)
    }

    fn arm(&mut self) -> Armed {
        self.state.control.drain_event();
        if self.state.waits_for_a_turn() {
            return Armed::Busy;
        }
        self.inner.arm()
    }

    fn event_fds(&self) -> [Option<BorrowedFd<'_>>; 3] {
        [Some(self.events.as_fd()), None, None]
    }

    fn shutdown(&mut self, sink: &mut dyn Sink, deadline: Instant) -> bool {
        for endpoint in self.state.open_endpoints() {
            self.close(endpoint);
        }
        let quiet = self.inner.shutdown(&mut self.state, deadline);
        self.state.end_what_is_stuck();
        self.state.deliver_all(sink);
        quiet
    }
}

impl<F: Fabric> fmt::Debug for FaultFabric<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultFabric")
            .field("inner", &self.inner.capabilities().name)
            .field("control", &self.state.control)
            .finish_non_exhaustive()
    }
}

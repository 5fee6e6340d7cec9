//! What UCX calls, and where it leaves its news.
//!
//! Callbacks run inside of UCX. They record an [`Event`] in the [`Mailbox`] and return; the fabric
//! does the work later. The exception is an arriving segment: its bytes are UCX's and go to the sink
//! at once, so that they are copied only to where they belong. The sink never calls UCX.
//!
//! Invariant: nothing unwinds into C. A panic of the sink is kept and goes on when UCX has returned.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::NonNull;
use std::rc::Rc;
use std::slice;

use ucx_sys::{
    UCP_AM_RECV_ATTR_FLAG_RNDV, UCS_OK, ucp_am_recv_param_t, ucp_ep_h, ucp_request_free,
    ucs_status_t,
};

use super::endpoint::Side;
use crate::fabric::{EndpointId, Sink};

/// News from UCX.
#[derive(Debug)]
pub(super) enum Event {
    /// An operation that was pending has ended.
    Ended {
        operation: usize,
        status: ucs_status_t,
    },
    /// An endpoint has failed.
    Failed {
        endpoint: EndpointId,
        side: Side,
        status: ucs_status_t,
    },
    /// Something arrived that no kvferry sends.
    Protocol(&'static str),
    /// A segment arrived while nobody was listening.
    Segment(Box<[u8]>),
}

/// Where callbacks leave their news. One per fabric; all on the fabric's thread.
#[derive(Default)]
pub(super) struct Mailbox {
    events: RefCell<VecDeque<Event>>,
    /// Points to the `&mut dyn Sink` of the progress call that is under way, on its stack.
    listener: Cell<Option<NonNull<c_void>>>,
    panic: Cell<Option<Box<dyn Any + Send>>>,
}

impl Mailbox {
    pub(super) fn push(&self, event: Event) {
        self.events.borrow_mut().push_back(event);
    }

    pub(super) fn pop(&self) -> Option<Event> {
        self.events.borrow_mut().pop_front()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.events.borrow().is_empty()
    }

    /// Runs `body`, which progresses UCX; segments that arrive meanwhile go to `sink`.
    pub(super) fn listening<R>(&self, mut sink: &mut dyn Sink, body: impl FnOnce() -> R) -> R {
        struct Deaf<'a>(&'a Mailbox);
        impl Drop for Deaf<'_> {
            fn drop(&mut self) {
                self.0.listener.set(None);
            }
        }
        self.listener.set(NonNull::new((&raw mut sink).cast()));
        let deaf = Deaf(self);
        let result = body();
        drop(deaf);
        if let Some(panic) = self.panic.take() {
            resume_unwind(panic);
        }
        result
    }

    fn segment(&self, bytes: &[u8]) {
        // Taken out for the time of the call: nothing can make a second `&mut` of it.
        let Some(listener) = self.listener.take() else {
            self.push(Event::Segment(bytes.into()));
            return;
        };
        let called = catch_unwind(AssertUnwindSafe(|| {
            // SAFETY: `listening` set the pointer to its own variable and takes it back before it
            // returns, so the variable and what it borrows are live; it does not use the variable
            // meanwhile, and the pointer was taken out above, so this is the only access.
            let sink = unsafe { listener.cast::<&mut dyn Sink>().as_mut() };
            sink.segment(bytes);
        }));
        match called {
            Ok(()) => self.listener.set(Some(listener)),
            // Nobody listens any more; later segments wait.
            Err(panic) => self.panic.set(Some(panic)),
        }
    }
}

/// What the callback of an operation is given. Lives as long as the worker.
pub(super) struct OperationRecord {
    pub(super) operation: usize,
    pub(super) mailbox: Rc<Mailbox>,
}

/// What the error handler of an endpoint is given. Lives until the endpoint is closed.
pub(super) struct EndpointRecord {
    pub(super) endpoint: EndpointId,
    pub(super) side: Side,
    pub(super) mailbox: Rc<Mailbox>,
}

/// `ucp_send_nbx_callback_t`; `user_data` is an [`OperationRecord`].
pub(super) unsafe extern "C" fn on_operation_end(
    request: *mut c_void,
    status: ucs_status_t,
    user_data: *mut c_void,
) {
    // SAFETY: `Operations::submit` passed a record that it owns, and that outlives the worker.
    let record = unsafe { &*user_data.cast::<OperationRecord>() };
    record.mailbox.push(Event::Ended {
        operation: record.operation,
        status,
    });
    // SAFETY: the request is the one that has ended; nobody else knows it, and UCX allows it to be
    // given back from its own callback.
    unsafe { ucp_request_free(request) };
}

/// `ucp_err_handler_cb_t`; `arg` is an [`EndpointRecord`].
pub(super) unsafe extern "C" fn on_endpoint_failure(
    arg: *mut c_void,
    _endpoint: ucp_ep_h,
    status: ucs_status_t,
) {
    // SAFETY: `Link::create` passed a record that the link owns; the link is dropped after the
    // endpoint is closed, and UCX calls no handler of a closed endpoint.
    let record = unsafe { &*arg.cast::<EndpointRecord>() };
    let (endpoint, side) = (record.endpoint, record.side);
    record.mailbox.push(Event::Failed {
        endpoint,
        side,
        status,
    });
}

/// `ucp_am_recv_callback_t`; `arg` is a [`Mailbox`].
pub(super) unsafe extern "C" fn on_message(
    arg: *mut c_void,
    _header: *const c_void,
    header_length: usize,
    data: *mut c_void,
    length: usize,
    param: *const ucp_am_recv_param_t,
) -> ucs_status_t {
    // SAFETY: `Worker::create` passed the mailbox that the worker owns.
    let mailbox = unsafe { &*arg.cast::<Mailbox>() };
    // SAFETY: UCX passes parameters that live until this function returns.
    let attributes = unsafe { (*param).recv_attr };
    if attributes & u64::from(UCP_AM_RECV_ATTR_FLAG_RNDV) != 0 {
        // Answering OK without fetching drops the message and tells the sender.
        mailbox.push(Event::Protocol("a rendezvous active message"));
    } else if header_length != 0 {
        mailbox.push(Event::Protocol("an active message with a header"));
    } else if length == 0 {
        mailbox.segment(&[]);
    } else {
        // SAFETY: not a rendezvous, so `data` is `length` bytes that UCX has received and that stay
        // unchanged until this function returns.
        mailbox.segment(unsafe { slice::from_raw_parts(data.cast::<u8>(), length) });
    }
    // The bytes are not kept.
    UCS_OK
}

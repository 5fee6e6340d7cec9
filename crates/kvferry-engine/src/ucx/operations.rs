//! Operations that UCX has not ended yet, and what they hold.
//!
//! Invariant: what UCX reads or calls back with (a send's buffer, a record) does not move or go away
//! before its operation has ended. Slots are reused, so that nothing is allocated per operation.

use std::ffi::c_void;
use std::rc::Rc;

use ucx_sys::{
    UCP_OP_ATTR_FIELD_CALLBACK, UCP_OP_ATTR_FIELD_FLAGS, UCP_OP_ATTR_FIELD_MEMORY_TYPE,
    UCP_OP_ATTR_FIELD_USER_DATA, UCP_OP_ATTR_FLAG_FORCE_IMM_CMPL, UCP_OP_ATTR_FLAG_NO_IMM_CMPL,
    UCS_MEMORY_TYPE_HOST, UCS_OK, ucp_request_param_t, ucp_request_param_t__bindgen_ty_1,
    ucs_memory_type_t, ucs_status_ptr_t, ucs_status_t,
};

use super::callbacks::{Mailbox, OperationRecord, on_operation_end};
use super::endpoint::Side;
use super::status::Outcome;
use crate::fabric::{EndpointId, ReadToken, SendBuffer};

/// What an operation is, and what it holds.
#[derive(Debug)]
pub(super) enum Operation {
    /// An active message.
    Send {
        endpoint: EndpointId,
        buffer: SendBuffer,
    },
    /// One whose endpoint was closed for its owner; its buffer interests nobody.
    Orphan {
        endpoint: EndpointId,
        buffer: SendBuffer,
    },
    /// A GET.
    Read {
        endpoint: EndpointId,
        token: ReadToken,
    },
    /// The closing of one side of an endpoint.
    Close { endpoint: EndpointId, side: Side },
}

impl Operation {
    pub(super) fn endpoint(&self) -> EndpointId {
        match self {
            Self::Send { endpoint, .. }
            | Self::Orphan { endpoint, .. }
            | Self::Read { endpoint, .. }
            | Self::Close { endpoint, .. } => *endpoint,
        }
    }
}

/// How an operation is handed to UCX.
#[derive(Clone, Copy, Debug)]
pub(super) struct How {
    /// The call's flags.
    pub(super) flags: u32,
    /// What kind of memory it works on.
    pub(super) memory: ucs_memory_type_t,
    /// `UCP_OP_ATTR_FLAG_FORCE_IMM_CMPL` or `UCP_OP_ATTR_FLAG_NO_IMM_CMPL`, or nothing.
    pub(super) only: u32,
}

impl How {
    /// As the flags say, on host memory.
    pub(super) const fn host(flags: u32) -> Self {
        Self {
            flags,
            memory: UCS_MEMORY_TYPE_HOST,
            only: 0,
        }
    }

    /// At once or not at all: `UCS_ERR_NO_RESOURCE` if it cannot be.
    pub(super) const fn at_once(self) -> Self {
        Self {
            only: UCP_OP_ATTR_FLAG_FORCE_IMM_CMPL,
            ..self
        }
    }

    /// Not at once, even if it could be.
    pub(super) const fn queued(self) -> Self {
        Self {
            only: UCP_OP_ATTR_FLAG_NO_IMM_CMPL,
            ..self
        }
    }
}

/// What became of a submission.
pub(super) enum Submitted {
    /// It is under way; an event will tell.
    Pending,
    /// It has ended already: completed, or never started.
    Ended(Operation, ucs_status_t),
}

struct Slot {
    record: Rc<OperationRecord>,
    operation: Option<Operation>,
}

/// The operations of a fabric.
pub(super) struct Operations {
    slots: Vec<Slot>,
    free: Vec<usize>,
    mailbox: Rc<Mailbox>,
}

impl Operations {
    pub(super) fn new(mailbox: Rc<Mailbox>) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            mailbox,
        }
    }

    /// How many are under way.
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Hands an operation to UCX: `post` makes the `nbx` call with the parameters that it is given.
    /// The operation is in its place by then, so that pointers into its buffer stay good.
    pub(super) fn submit(
        &mut self,
        operation: Operation,
        how: How,
        post: impl FnOnce(&Operation, *const ucp_request_param_t) -> ucs_status_ptr_t,
    ) -> Submitted {
        let index = self.free.pop().unwrap_or_else(|| self.grow());
        let slot = &mut self.slots[index];
        let param = ucp_request_param_t {
            op_attr_mask: UCP_OP_ATTR_FIELD_CALLBACK
                | UCP_OP_ATTR_FIELD_USER_DATA
                | UCP_OP_ATTR_FIELD_FLAGS
                | UCP_OP_ATTR_FIELD_MEMORY_TYPE
                | how.only,
            flags: how.flags,
            cb: ucp_request_param_t__bindgen_ty_1 {
                send: Some(on_operation_end),
            },
            user_data: Rc::as_ptr(&slot.record).cast::<c_void>().cast_mut(),
            memory_type: how.memory,
            ..Default::default()
        };
        let operation = slot.operation.insert(operation);
        let status = match Outcome::of(post(operation, &raw const param)) {
            Outcome::Pending => return Submitted::Pending,
            Outcome::Done => UCS_OK,
            Outcome::Failed(status) => status,
        };
        match self.take(index) {
            Some(operation) => Submitted::Ended(operation, status),
            None => Submitted::Pending,
        }
    }

    fn grow(&mut self) -> usize {
        let operation = self.slots.len();
        let record = OperationRecord {
            operation,
            mailbox: Rc::clone(&self.mailbox),
        };
        self.slots.push(Slot {
            record: Rc::new(record),
            operation: None,
        });
        operation
    }

    /// Takes out an operation that has ended.
    pub(super) fn take(&mut self, index: usize) -> Option<Operation> {
        let operation = self.slots.get_mut(index)?.operation.take()?;
        self.free.push(index);
        Some(operation)
    }

    /// Makes orphans of an endpoint's sends. Their buffers stay where they are.
    pub(super) fn orphan(&mut self, of: EndpointId) {
        for slot in &mut self.slots {
            slot.operation = match slot.operation.take() {
                Some(Operation::Send { endpoint, buffer }) if endpoint == of => {
                    Some(Operation::Orphan { endpoint, buffer })
                }
                other => other,
            };
        }
    }

    /// Takes out what belongs to the data worker. Only when that is gone and cannot end it any more.
    pub(super) fn take_data(&mut self) -> Vec<Operation> {
        let on_data = |slot: &Slot| {
            matches!(
                &slot.operation,
                Some(
                    Operation::Read { .. }
                        | Operation::Close {
                            side: Side::Data,
                            ..
                        }
                )
            )
        };
        let indices: Vec<usize> = (0..self.slots.len())
            .filter(|&index| on_data(&self.slots[index]))
            .collect();
        indices
            .into_iter()
            .filter_map(|index| self.take(index))
            .collect()
    }

    /// Takes out everything. Only when no worker is left that could end it.
    pub(super) fn take_all(&mut self) -> Vec<Operation> {
        (0..self.slots.len())
            .filter_map(|index| self.take(index))
            .collect()
    }
}

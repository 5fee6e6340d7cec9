//! The two contexts of a fabric, with their workers.
//!
//! Responsible for whether there is a data context and over what. Invariant: if reads need not be emulated,
//! the data context has no transport over which they could be.

use std::rc::Rc;

use kvferry_wire::Addresses;

use super::callbacks::Mailbox;
use super::native::DataPlan;
use super::settings::UcxOptions;
use super::transports::Resource;
use super::worker::{Purpose, Worker};
use crate::error::FabricError;
use crate::fabric::NativeReads;

pub(super) struct Workers {
    pub(super) message: Worker,
    pub(super) data: Option<Worker>,
    /// What the data context was made of, or why there is none.
    pub(super) plan: DataPlan,
}

impl Workers {
    /// `plan` decides on the data context, from what was found, the list in force and whether emulation
    /// is allowed.
    pub(super) fn new(
        options: &UcxOptions,
        plan: impl FnOnce(&[Resource], &str, bool) -> DataPlan,
        mailbox: &Rc<Mailbox>,
    ) -> Result<Self, FabricError> {
        let worker = |purpose| Worker::new(purpose, options, Rc::clone(mailbox));
        let message = worker(Purpose::Messages)?;
        message.check_reachable()?;
        let context = message.context();
        let mut plan = plan(
            context.found(),
            &context.in_force().tls,
            options.allow_emulation,
        );
        let data = match &plan {
            DataPlan::Anything => Some(worker(Purpose::Data(None))?),
            DataPlan::Real(list) => match worker(Purpose::Data(Some(list))) {
                Ok(data) => Some(data),
                // Messages work all the same, and the lane's refusal carries the reason.
                Err(error) => {
                    let reason = format!("there is no data context over {list}: {error}");
                    tracing::warn!(%reason, "no native lane");
                    plan = DataPlan::None(reason);
                    None
                }
            },
            DataPlan::None(_) => None,
        };
        Ok(Self {
            message,
            data,
            plan,
        })
    }

    /// What one-sided reads there are, at best.
    pub(super) fn reads(&self) -> NativeReads {
        let context = self.message.context();
        self.plan.reads(context.found(), &context.in_force().tls)
    }

    /// Where others reach them.
    pub(super) fn addresses(&self) -> Addresses {
        Addresses {
            message: self.message.sealed_address(),
            data: self.data.as_ref().map(Worker::sealed_address),
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Worker> {
        [Some(&self.message), self.data.as_ref()]
            .into_iter()
            .flatten()
    }
}

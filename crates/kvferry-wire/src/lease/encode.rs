//! Writers of the lease protocol's messages. What they write, the parser accepts.

use std::borrow::Borrow;

use zerocopy::{
    Immutable, IntoBytes,
    little_endian::{U32, U64},
};

use super::{
    Gone, GoneLayout, KIND_RELEASE, KIND_RELEASED, KIND_RENEW, KIND_RENEWED, LEASE_VERSION,
    MAX_RENEWALS, ReaderLayout, ReleaseLayout, ReleasedLayout, RenewLayout, RenewedLayout, Verdict,
    check_consumers, check_renewals,
};
use crate::{Epoch, Instance, LeaseId, ReaderId, WireError, fixed, packed::check_at_most};

impl From<ReaderId> for ReaderLayout {
    fn from(reader: ReaderId) -> Self {
        Self {
            incarnation: reader.incarnation.to_bytes(),
            load: reader.load.into(),
        }
    }
}

fn start(kind: u8, body: &(impl IntoBytes + Immutable), more: usize) -> Vec<u8> {
    fixed::start(LEASE_VERSION, kind, body, more)
}

/// Writes [`LeaseMessage::Release`](super::LeaseMessage::Release).
///
/// # Errors
/// [`WireError::BadValue`] if `consumers` is 0.
pub fn encode_release(
    lease: &LeaseId,
    reader: ReaderId,
    consumers: u32,
) -> Result<Vec<u8>, WireError> {
    check_consumers(consumers)?;
    let request = lease.request.as_str().as_bytes();
    let request_bytes = u16::try_from(request.len()).map_err(|_| WireError::TooLong {
        what: "release.request",
        max: u16::MAX.into(),
        got: request.len(),
    })?;
    let layout = ReleaseLayout {
        instance: lease.instance.to_bytes(),
        epoch: lease.epoch.get().into(),
        reader: reader.into(),
        consumers: consumers.into(),
        request_bytes: request_bytes.into(),
    };
    let mut bytes = start(KIND_RELEASE, &layout, request.len());
    bytes.extend_from_slice(request);
    Ok(bytes)
}

/// Writes [`LeaseMessage::Released`](super::LeaseMessage::Released).
#[must_use]
pub fn encode_released(
    instance: Instance,
    epoch: Epoch,
    reader: ReaderId,
    verdict: Verdict,
) -> Vec<u8> {
    let layout = ReleasedLayout {
        instance: instance.to_bytes(),
        epoch: epoch.get().into(),
        reader: reader.into(),
        verdict: verdict as u8,
    };
    start(KIND_RELEASED, &layout, 0)
}

/// Writes [`LeaseMessage::Renew`](super::LeaseMessage::Renew). Takes epochs by value or by reference.
///
/// # Errors
/// [`WireError::BadValue`] for no epochs, [`WireError::TooLong`] for more than [`MAX_RENEWALS`].
pub fn encode_renew(
    instance: Instance,
    token: u64,
    epochs: impl IntoIterator<Item: Borrow<Epoch>>,
) -> Result<Vec<u8>, WireError> {
    let epochs = capped_epochs(epochs);
    check_renewals(epochs.len())?;
    let layout = RenewLayout {
        instance: instance.to_bytes(),
        token: token.into(),
        count: count("renew.epochs", epochs.len())?,
    };
    let mut bytes = start(KIND_RENEW, &layout, size_of_val(&*epochs));
    bytes.extend_from_slice(epochs.as_bytes());
    Ok(bytes)
}

/// Writes [`LeaseMessage::Renewed`](super::LeaseMessage::Renewed). Takes items by value or by reference.
///
/// # Errors
/// [`WireError::TooLong`] if either list has more than [`MAX_RENEWALS`].
pub fn encode_renewed(
    instance: Instance,
    token: u64,
    gone: impl IntoIterator<Item: Borrow<(Epoch, Gone)>>,
    unknown: impl IntoIterator<Item: Borrow<Epoch>>,
) -> Result<Vec<u8>, WireError> {
    let gone: Vec<GoneLayout> = gone
        .into_iter()
        .take(MAX_RENEWALS + 1)
        .map(|lease| {
            let (epoch, why) = *lease.borrow();
            GoneLayout {
                epoch: epoch.get().into(),
                why: why as u8,
            }
        })
        .collect();
    let unknown = capped_epochs(unknown);
    check_at_most("renewed.gone", gone.len(), MAX_RENEWALS)?;
    check_at_most("renewed.unknown", unknown.len(), MAX_RENEWALS)?;
    let layout = RenewedLayout {
        instance: instance.to_bytes(),
        token: token.into(),
        gone: count("renewed.gone", gone.len())?,
        unknown: count("renewed.unknown", unknown.len())?,
    };
    let more = size_of_val(&*gone) + size_of_val(&*unknown);
    let mut bytes = start(KIND_RENEWED, &layout, more);
    bytes.extend_from_slice(gone.as_bytes());
    bytes.extend_from_slice(unknown.as_bytes());
    Ok(bytes)
}

/// Epochs as bytes, at most one more than is allowed, which the caller then refuses.
fn capped_epochs(epochs: impl IntoIterator<Item: Borrow<Epoch>>) -> Vec<U64> {
    epochs
        .into_iter()
        .take(MAX_RENEWALS + 1)
        .map(|epoch| epoch.borrow().get().into())
        .collect()
}

fn count(what: &'static str, items: usize) -> Result<U32, WireError> {
    u32::try_from(items)
        .map(U32::new)
        .map_err(|_| WireError::TooLong {
            what,
            max: MAX_RENEWALS,
            got: items,
        })
}

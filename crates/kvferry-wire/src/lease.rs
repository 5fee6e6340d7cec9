//! The lease protocol's messages: payloads of [`Message::Service`](crate::Message::Service) on
//! [`LEASE_CHANNEL`].
//!
//! Responsible for their layouts. Not responsible for what becomes of a lease: that is the
//! connector's lease table.
//!
//! Invariant: every epoch of a parsed message is at least 1, every id is valid, and the lists have
//! the lengths that the message announced. Layouts are fixed and little-endian; only durations
//! would ever cross the wire, and version 1 has none.
//!
//! Every payload starts with two bytes, version and kind.
//!
//! | kind | name | then |
//! | --- | --- | --- |
//! | 1 | release | instance (16 bytes), epoch `u64`, reader's incarnation (16 bytes), reader's load `u64`, consumers `u32`, length of the request id `u16`, request id |
//! | 2 | released | instance, epoch, reader's incarnation, reader's load, verdict `u8` |
//! | 3 | renew | instance, token `u64`, count `u32`, epochs `u64` |
//! | 4 | renewed | instance, token, gone `u32`, unknown `u32`, gone (epoch `u64`, why `u8`), unknown epochs |
//!
//! # HISTORY
//! Version 1: the first.

use std::fmt;

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U16, U32, U64},
};

use crate::{
    Epoch, Incarnation, Instance, LeaseId, ReaderId, RequestId, WireError,
    fixed::{exact_slice, open, prefix},
    packed::{check_at_most, shown},
};

mod codes;
mod encode;

pub use codes::{Gone, Verdict};
pub use encode::{encode_release, encode_released, encode_renew, encode_renewed};

/// The service channel of the lease protocol.
pub const LEASE_CHANNEL: u16 = 1;
/// Version of the lease layouts.
pub const LEASE_VERSION: u8 = 1;
/// Most leases in one renewal.
pub const MAX_RENEWALS: usize = 65_536;

const KIND_RELEASE: u8 = 1;
const KIND_RELEASED: u8 = 2;
const KIND_RENEW: u8 = 3;
const KIND_RENEWED: u8 = 4;

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct ReaderLayout {
    incarnation: [u8; 16],
    load: U64,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct ReleaseLayout {
    instance: [u8; 16],
    epoch: U64,
    reader: ReaderLayout,
    consumers: U32,
    request_bytes: U16,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct ReleasedLayout {
    instance: [u8; 16],
    epoch: U64,
    reader: ReaderLayout,
    verdict: u8,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RenewLayout {
    instance: [u8; 16],
    token: U64,
    count: U32,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RenewedLayout {
    instance: [u8; 16],
    token: U64,
    gone: U32,
    unknown: U32,
}

#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
struct GoneLayout {
    epoch: U64,
    why: u8,
}

/// Epochs as they lie in a message, each at least 1.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Epochs<'a>(&'a [U64]);

impl<'a> Epochs<'a> {
    fn parse(field: &'static str, epochs: &'a [U64]) -> Result<Self, WireError> {
        for epoch in epochs {
            parse_epoch(field, *epoch)?;
        }
        Ok(Self(epochs))
    }

    /// The epochs in the order of the message.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = Epoch> + Clone + use<'a> {
        // None of them is refused: `parse` went through them.
        self.0
            .iter()
            .filter_map(|epoch| Epoch::new(epoch.get()).ok())
    }

    /// How many there are.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Debug for Epochs<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter().map(Epoch::get)).finish()
    }
}

/// Leases that are gone, as they lie in a message.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct GoneEpochs<'a>(&'a [GoneLayout]);

impl<'a> GoneEpochs<'a> {
    fn parse(gone: &'a [GoneLayout]) -> Result<Self, WireError> {
        for lease in gone {
            parse_epoch("renewed.gone", lease.epoch)?;
            Gone::parse(lease.why)?;
        }
        Ok(Self(gone))
    }

    /// The leases and what became of each, in the order of the message.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (Epoch, Gone)> + Clone + use<'a> {
        // None of them is refused: `parse` went through them.
        self.0.iter().filter_map(|lease| {
            Epoch::new(lease.epoch.get())
                .ok()
                .zip(Gone::parse(lease.why).ok())
        })
    }

    /// How many there are.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Debug for GoneEpochs<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list()
            .entries(self.iter().map(|(epoch, why)| (epoch.get(), why)))
            .finish()
    }
}

/// One message of the lease protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseMessage<'a> {
    /// Consumer to producer rank: this reader is done with the lease.
    Release {
        /// The lease.
        lease: LeaseId,
        /// The reader that is done.
        reader: ReaderId,
        /// How many readers are expected in all, at least 1.
        consumers: u32,
    },
    /// Answers a release.
    Released {
        /// The lease's instance, as the release named it.
        instance: Instance,
        /// The lease's epoch, as the release named it.
        epoch: Epoch,
        /// The reader that released.
        reader: ReaderId,
        /// Whether what it read counts.
        verdict: Verdict,
    },
    /// Consumer to producer rank: these leases are still needed.
    Renew {
        /// The instance that issued them all.
        instance: Instance,
        /// Returned in the answer.
        token: u64,
        /// The leases, 1 to [`MAX_RENEWALS`].
        epochs: Epochs<'a>,
    },
    /// Answers a renewal. Leases of the batch that it does not name are renewed.
    Renewed {
        /// The renewal's instance.
        instance: Instance,
        /// The renewal's token.
        token: u64,
        /// Those that are gone, at most [`MAX_RENEWALS`].
        gone: GoneEpochs<'a>,
        /// Those that this rank has not seen issued yet, at most [`MAX_RENEWALS`].
        unknown: Epochs<'a>,
    },
}

impl<'a> LeaseMessage<'a> {
    /// Reads a payload and checks it.
    ///
    /// # Errors
    /// [`WireError::Version`] for another layout; otherwise what is wrong, with the field and its
    /// value.
    pub fn parse(payload: &'a [u8]) -> Result<Self, WireError> {
        let (kind, body) = open("lease message", LEASE_VERSION, payload)?;
        match kind {
            KIND_RELEASE => parse_release(body),
            KIND_RELEASED => parse_released(body),
            KIND_RENEW => parse_renew(body),
            KIND_RENEWED => parse_renewed(body),
            kind => Err(WireError::bad("lease message.kind", kind, "1 to 4")),
        }
    }
}

fn parse_release(body: &[u8]) -> Result<LeaseMessage<'_>, WireError> {
    let (layout, rest) = prefix::<ReleaseLayout>("release", body)?;
    let request = exact_slice::<u8>("release", rest, layout.request_bytes.get().into())?;
    let request = str::from_utf8(request).map_err(|_| {
        WireError::bad(
            "release.request",
            shown(&String::from_utf8_lossy(request)),
            "UTF-8",
        )
    })?;
    let consumers = layout.consumers.get();
    check_consumers(consumers)?;
    Ok(LeaseMessage::Release {
        lease: LeaseId {
            instance: parse_instance("release.instance", layout.instance)?,
            epoch: parse_epoch("release.epoch", layout.epoch)?,
            request: RequestId::new(request)?,
        },
        reader: parse_reader("release.reader", layout.reader)?,
        consumers,
    })
}

fn parse_released(body: &[u8]) -> Result<LeaseMessage<'_>, WireError> {
    let (layout, rest) = prefix::<ReleasedLayout>("released", body)?;
    exact_slice::<u8>("released", rest, 0)?;
    Ok(LeaseMessage::Released {
        instance: parse_instance("released.instance", layout.instance)?,
        epoch: parse_epoch("released.epoch", layout.epoch)?,
        reader: parse_reader("released.reader", layout.reader)?,
        verdict: Verdict::parse(layout.verdict)?,
    })
}

fn parse_renew(body: &[u8]) -> Result<LeaseMessage<'_>, WireError> {
    let (layout, rest) = prefix::<RenewLayout>("renew", body)?;
    let count = layout.count.get() as usize;
    check_renewals(count)?;
    let epochs = exact_slice::<U64>("renew", rest, count)?;
    Ok(LeaseMessage::Renew {
        instance: parse_instance("renew.instance", layout.instance)?,
        token: layout.token.get(),
        epochs: Epochs::parse("renew.epochs", epochs)?,
    })
}

fn parse_renewed(body: &[u8]) -> Result<LeaseMessage<'_>, WireError> {
    let (layout, rest) = prefix::<RenewedLayout>("renewed", body)?;
    let (gone, unknown) = (layout.gone.get() as usize, layout.unknown.get() as usize);
    check_at_most("renewed.gone", gone, MAX_RENEWALS)?;
    check_at_most("renewed.unknown", unknown, MAX_RENEWALS)?;
    let need = gone * size_of::<GoneLayout>();
    let Some((gone, unknown_bytes)) = <[GoneLayout]>::ref_from_prefix_with_elems(rest, gone).ok()
    else {
        return Err(WireError::TooShort {
            what: "renewed",
            need,
            got: rest.len(),
        });
    };
    let unknown = exact_slice::<U64>("renewed", unknown_bytes, unknown)?;
    Ok(LeaseMessage::Renewed {
        instance: parse_instance("renewed.instance", layout.instance)?,
        token: layout.token.get(),
        gone: GoneEpochs::parse(gone)?,
        unknown: Epochs::parse("renewed.unknown", unknown)?,
    })
}

fn parse_instance(field: &'static str, bytes: [u8; 16]) -> Result<Instance, WireError> {
    Instance::from_bytes(bytes).map_err(|_| WireError::bad(field, 0_u8, "not zero"))
}

fn parse_epoch(field: &'static str, epoch: U64) -> Result<Epoch, WireError> {
    Epoch::new(epoch.get()).map_err(|_| WireError::bad(field, epoch, "at least 1"))
}

fn parse_reader(field: &'static str, reader: ReaderLayout) -> Result<ReaderId, WireError> {
    let incarnation = Incarnation::from_bytes(reader.incarnation)
        .map_err(|_| WireError::bad(field, 0_u8, "not zero"))?;
    Ok(ReaderId {
        incarnation,
        load: reader.load.get(),
    })
}

fn check_consumers(consumers: u32) -> Result<(), WireError> {
    if consumers == 0 {
        return Err(WireError::bad("release.consumers", consumers, "at least 1"));
    }
    Ok(())
}

fn check_renewals(count: usize) -> Result<(), WireError> {
    if count == 0 {
        return Err(WireError::bad("renew.epochs", count, "1 to 65536"));
    }
    check_at_most("renew.epochs", count, MAX_RENEWALS)
}

#[cfg(test)]
mod tests;

//! What goes wrong, how often, and the handle that says so while a fabric runs.
//!
//! Invariant: the fate of the n-th operation of a kind depends on the seed, on n and on the rates in
//! force, and on nothing else: not on time, not on the other kinds of operations, and not on rates
//! that were in force before.

use std::collections::BTreeSet;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, eventfd};

use crate::fabric::{EndpointId, FabricError};

macro_rules! faults {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// A way in which an operation goes wrong.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum Fault {
            $($(#[$doc])* $name,)*
        }

        impl Fault {
            /// Every fault there is.
            pub const ALL: &[Self] = &[$(Self::$name,)*];
        }
    };
}

faults! {
    /// A registration is refused.
    RegisterRefused,
    /// No endpoint can be made.
    ConnectRefused,
    /// A key cannot be imported.
    KeyRefused,
    /// A send is refused; its buffer comes back with the error.
    SendRefused,
    /// A send does not complete before its endpoint is closed. The segment arrives, or does not.
    SendStuck,
    /// A send completes and the segment is gone.
    SendLost,
    /// A send completes with an error. The segment arrives, or does not.
    SendFailed,
    /// A send starts or completes later.
    SendDelayed,
    /// A read is refused.
    ReadRefused,
    /// A read does not complete before its endpoint is closed. The bytes are written, or are not.
    ReadStuck,
    /// A read completes with an error. The bytes are written, or are not.
    ReadFailed,
    /// A read completes with success and has written nothing. Only a verifier above notices.
    ReadEmpty,
    /// A read starts or completes later.
    ReadDelayed,
    /// A batch of copies is refused.
    CopyRefused,
    /// A batch of copies is not reported before its endpoint is closed. The bytes are copied, or are
    /// not.
    CopyStuck,
    /// A batch of copies fails. The bytes are copied, or are not.
    CopyFailed,
    /// A batch of copies is reported as done, and nothing was copied. Only a verifier above notices.
    CopyEmpty,
    /// A batch of copies starts or ends later.
    CopyDelayed,
    /// An arriving segment is dropped.
    SegmentLost,
    /// An arriving segment loses its end, or bits of its header are changed. Parsers and the checks
    /// of upper layers notice.
    SegmentGarbled,
    /// An arriving segment is delivered twice.
    SegmentDuplicated,
    /// An arriving segment is overtaken by later ones.
    SegmentReordered,
    /// An arriving segment is delivered later, and so are those behind it.
    SegmentDelayed,
    /// One bit is changed in the bytes that an arriving data segment carries. Only a verifier above
    /// notices.
    SegmentCorrupted,
    /// The endpoint of a send or read is reported as failed.
    EndpointFailed,
    /// The end of a closed endpoint, and of what is stuck on it, is reported later.
    CloseDelayed,
    /// A close does not end what is stuck on its endpoint; a reset of the fabric does.
    CloseStuck,
    /// Neither does the next reset; the one after it does, or the fabric's end.
    ResetStuck,
}

/// How often each fault is injected, and how far the harmless ones reach. Made by
/// [`FaultRates::none`]; unknown rates do not exist, so there is nothing to validate.
///
/// ```
/// use kvferry_engine::fabric::{Fault, FaultRates};
///
/// let mut rates = FaultRates::none().with(Fault::SegmentLost, 5);
/// rates.max_delay = 100;
/// assert_eq!(rates.rate(Fault::SegmentLost), 5);
/// assert_eq!(rates.rate(Fault::ReadStuck), 0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FaultRates {
    per_mille: [u16; Fault::ALL.len()],
    /// Delays are 1 to this many calls of `progress`. Default 16; 0 is taken for 1.
    pub max_delay: u32,
    /// A reordered segment is overtaken by 1 to this many later ones, as long as they come within
    /// `max_delay`. Default 16; 0 is taken for 1. A receiver that bounds how far apart segments may
    /// be gives up a peer whose segments are further apart.
    pub reorder_window: u32,
    /// `progress` reports one thing per call at most. Default false.
    pub one_report: bool,
}

impl FaultRates {
    /// Nothing goes wrong.
    #[must_use]
    pub const fn none() -> Self {
        Self {
            per_mille: [0; Fault::ALL.len()],
            max_delay: 16,
            reorder_window: 16,
            one_report: false,
        }
    }

    /// The same with one rate changed: 0 for never to 1000 for always; more is taken for 1000.
    ///
    /// Where several faults of one kind of operation have a rate, they are tried in the order of
    /// [`Fault`], and the first that hits is the operation's.
    #[must_use]
    pub const fn with(mut self, fault: Fault, per_mille: u16) -> Self {
        self.per_mille[fault as usize] = if per_mille > 1000 { 1000 } else { per_mille };
        self
    }

    /// The rate of a fault, per mille.
    #[must_use]
    pub const fn rate(&self, fault: Fault) -> u16 {
        self.per_mille[fault as usize]
    }
}

impl Default for FaultRates {
    fn default() -> Self {
        Self::none()
    }
}

struct Shared {
    settings: Mutex<Settings>,
    /// Wakes the progress thread when something that was held may go on.
    event: OwnedFd,
}

struct Settings {
    rates: FaultRates,
    all_stalled: bool,
    stalled: BTreeSet<EndpointId>,
    to_fail: Vec<EndpointId>,
    injected: [u64; Fault::ALL.len()],
}

/// Changes what a [`FaultFabric`](super::FaultFabric) does while it runs, and counts what it did.
/// Cheap to clone; for any thread. One control drives one fabric.
#[derive(Clone)]
pub struct FaultControl {
    seed: u64,
    shared: Arc<Shared>,
}

impl FaultControl {
    /// A schedule that begins with these rates.
    ///
    /// # Errors
    /// If the operating system gives no descriptor.
    pub fn new(seed: u64, rates: FaultRates) -> Result<Self, FabricError> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| FabricError::new("eventfd", error.to_string()))?;
        let settings = Settings {
            rates,
            all_stalled: false,
            stalled: BTreeSet::new(),
            to_fail: Vec::new(),
            injected: [0; Fault::ALL.len()],
        };
        Ok(Self {
            seed,
            shared: Arc::new(Shared {
                settings: Mutex::new(settings),
                event,
            }),
        })
    }

    fn settings(&self) -> MutexGuard<'_, Settings> {
        self.shared
            .settings
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // A counter that is full has woken the thread already.
        let _ = rustix::io::write(&self.shared.event, &1_u64.to_ne_bytes());
    }

    /// The seed.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The rates in force.
    #[must_use]
    pub fn rates(&self) -> FaultRates {
        self.settings().rates
    }

    /// Sets the rates for operations from now on. What is held or stuck stays so.
    pub fn set_rates(&self, rates: FaultRates) {
        self.settings().rates = rates;
    }

    /// Holds everything: posts are taken and not begun, and nothing is reported, segments included.
    /// A close still ends the operations of its endpoint.
    pub fn stall(&self) {
        self.settings().all_stalled = true;
    }

    /// Holds the posts and reports of one endpoint. Segments belong to none and arrive.
    pub fn stall_endpoint(&self, endpoint: EndpointId) {
        self.settings().stalled.insert(endpoint);
    }

    /// Ends every stall.
    pub fn release(&self) {
        let mut settings = self.settings();
        settings.all_stalled = false;
        settings.stalled.clear();
        drop(settings);
        self.wake();
    }

    /// Reports an endpoint as failed, if it is open and was not reported before.
    pub fn fail_endpoint(&self, endpoint: EndpointId) {
        self.settings().to_fail.push(endpoint);
        self.wake();
    }

    /// How often a fault was injected.
    #[must_use]
    pub fn injected(&self, fault: Fault) -> u64 {
        self.settings().injected[fault as usize]
    }

    /// Every fault that was injected, with its number.
    #[must_use]
    pub fn all_injected(&self) -> Vec<(Fault, u64)> {
        let injected = self.settings().injected;
        let counted = Fault::ALL.iter().copied().zip(injected);
        counted.filter(|&(_, count)| count > 0).collect()
    }

    /// The first of `faults` that hits, counted, and the rates in force.
    pub(super) fn choose(&self, draw: &mut Draw, faults: &[Fault]) -> (Option<Fault>, FaultRates) {
        let mut settings = self.settings();
        let rates = settings.rates;
        let mut hit = None;
        for &fault in faults {
            // A draw each, hit or not: a rate that changes leaves the other faults' draws alone.
            let drawn = draw.below(1000);
            if hit.is_none() && drawn < u64::from(rates.rate(fault)) {
                hit = Some(fault);
            }
        }
        if let Some(fault) = hit {
            settings.injected[fault as usize] += 1;
        }
        (hit, rates)
    }

    pub(super) fn is_stalled(&self, endpoint: Option<EndpointId>) -> bool {
        let settings = self.settings();
        settings.all_stalled
            || endpoint.is_some_and(|endpoint| settings.stalled.contains(&endpoint))
    }

    pub(super) fn one_report(&self) -> bool {
        self.settings().rates.one_report
    }

    pub(super) fn take_failures(&self) -> Vec<EndpointId> {
        std::mem::take(&mut self.settings().to_fail)
    }

    pub(super) fn has_failures(&self) -> bool {
        !self.settings().to_fail.is_empty()
    }

    pub(super) fn event(&self) -> BorrowedFd<'_> {
        self.shared.event.as_fd()
    }

    pub(super) fn drain_event(&self) {
        let _ = rustix::io::read(&self.shared.event, &mut [0_u8; 8]);
    }
}

impl fmt::Debug for FaultControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultControl")
            .field("seed", &self.seed)
            .field("injected", &self.all_injected())
            .finish_non_exhaustive()
    }
}

/// What kind of operation draws.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stream {
    Register,
    Connect,
    Key,
    Send,
    Read,
    Segment,
    Close,
    Copy,
    Reset,
}

impl Stream {
    pub(super) const COUNT: usize = Self::Reset as usize + 1;
}

/// Random numbers of one operation: `SplitMix64` (Steele, Lea and Flood, 2014).
#[derive(Debug)]
pub(super) struct Draw(u64);

impl Draw {
    pub(super) fn new(seed: u64, stream: Stream, number: u64) -> Self {
        let mut of_stream = Self(seed ^ (stream as u64 + 1).wrapping_mul(0xA24B_AED4_963E_E407));
        let mut of_operation = Self(of_stream.next() ^ number);
        Self(of_operation.next())
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `bound`; 0 if that is 0.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        // The upper half of a product is as even as a schedule needs.
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    /// 1 to `most`, which is taken for 1 if it is 0.
    pub(super) fn up_to(&mut self, most: u32) -> u64 {
        1 + self.below(u64::from(most.max(1)))
    }

    pub(super) fn coin(&mut self) -> bool {
        self.below(2) == 0
    }
}

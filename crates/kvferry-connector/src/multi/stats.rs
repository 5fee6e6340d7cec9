//! What the halves count.

/// What a scheduler half has done since it started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MultiSchedulerStats {
    /// Loads that began, per child.
    pub loads: Vec<u64>,
    /// Loads that failed, per child.
    pub loads_failed: Vec<u64>,
    /// Calls and reports for requests that are unknown or finished, and reports that do not fit the
    /// children.
    pub unknown: u64,
    /// Parameters of a child that the client was not given, because the first child's own have something else
    /// in their place.
    pub params_dropped: u64,
}

/// What a worker half has done since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MultiWorkerStats {
    /// "Received" of a child that had not been chosen, or a second one. Dropped.
    pub stray_received: u64,
    /// "Sent" of a child that did not hold the request, or a second one. Dropped.
    pub stray_sent: u64,
    /// Plans that were not of a MultiConnector with as many children. Dropped.
    pub foreign_plans: u64,
    /// Finished requests that some child still holds now.
    pub held: u64,
    /// Loads that are under way now.
    pub loading: u64,
}

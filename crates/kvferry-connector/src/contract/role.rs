//! What an engine is for a connector.

/// Which side of transfers an engine is on, for one connector (vLLM's `kv_role`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// It saves, sends, or holds blocks for others, and loads nothing.
    Producer,
    /// It loads, and saves nothing.
    Consumer,
    /// Both, per request.
    Both,
}

impl Role {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Producer, Self::Consumer, Self::Both];

    /// Whether it loads.
    #[must_use]
    pub const fn loads(self) -> bool {
        !matches!(self, Self::Producer)
    }

    /// Whether it saves, sends, or holds blocks for others.
    #[must_use]
    pub const fn saves(self) -> bool {
        !matches!(self, Self::Consumer)
    }

    /// What it is called in `kv_role`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Producer => "kv_producer",
            Self::Consumer => "kv_consumer",
            Self::Both => "kv_both",
        }
    }
}

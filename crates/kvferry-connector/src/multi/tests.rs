//! A MultiConnector over scripted children, with its halves in two places: plans and reports go
//! through msgpack.

mod counting;
mod scheduling;
mod script;
mod with_storage;

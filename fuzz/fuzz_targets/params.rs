//! Transfer parameters, which pass through clients.
//!
//! No bytes make the parser panic, and what it accepts is the same when it is written again.
#![no_main]

#[path = "../../crates/kvferry-wire/tests/wire/roundtrip.rs"]
#[expect(dead_code, reason = "each target uses one of the checks")]
mod roundtrip;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = roundtrip::params(bytes);
});

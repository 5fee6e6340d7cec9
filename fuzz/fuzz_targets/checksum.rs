//! Messages about checksums.
//!
//! No bytes make the parser panic, and what it accepts is written again as it was.
#![no_main]

#[path = "../../crates/kvferry-wire/tests/wire/roundtrip.rs"]
#[expect(dead_code, reason = "each target uses one of the checks")]
mod roundtrip;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = roundtrip::checksum(bytes);
});

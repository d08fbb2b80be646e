//! Handshakes with a peer that may send anything.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| pyroclast_fuzz::handshake(data));

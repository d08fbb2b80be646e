//! Frames from a peer that may send anything.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| pyroclast_fuzz::frames(data));

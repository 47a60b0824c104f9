//! Bytes as a session's frames: see `tensord_fuzz::frames`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tensord_fuzz::frames::run(data));

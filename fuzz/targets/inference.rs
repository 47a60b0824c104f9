//! Bytes as a request for an inference: see `tensord_fuzz::inference`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tensord_fuzz::inference::run(data));

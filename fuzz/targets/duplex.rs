//! Two ends of a session over a connection that fails: see `tensord_fuzz::duplex`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tensord_fuzz::duplex::run(data));

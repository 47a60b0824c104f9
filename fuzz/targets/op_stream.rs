//! Bytes as the frames of an op stream: see `tensord_fuzz::op_stream`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tensord_fuzz::op_stream::run(data));

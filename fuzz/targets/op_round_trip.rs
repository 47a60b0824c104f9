//! Ops, encoded and decoded again: see `tensord_fuzz::op_round_trip`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tensord_fuzz::op_round_trip::run(data));

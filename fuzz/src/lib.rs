//! The fuzz targets, as plain functions of bytes.
//!
//! A target feeds its input to code that reads bytes from a peer, and asserts what must
//! hold for any input. The binaries in `targets/` only connect these functions to
//! libFuzzer, so ordinary tests run them as well, on the seeds and on slightly corrupted
//! seeds.
//!
//! - [`op_stream`]: decodes bytes to ops.
//! - [`op_round_trip`]: encodes ops and decodes them again.
//! - [`frames`]: processes bytes as frames, at one end of a session.
//! - [`duplex`]: exchanges frames between two ends over a connection that fails.
//! - [`inference`]: decodes bytes as requests for inferences.
//! - [`execute`]: runs ops through decoder, rules, tensor table and backend. It is not a
//!   target of libFuzzer but the program `execute`, with an allocator of its own, [`guard`].
//!
//! [`input`] parses an input, [`seeds`] has the first inputs, and [`memory`] measures
//! allocations.

pub mod duplex;
pub mod execute;
pub mod frames;
pub mod guard;
pub mod inference;
pub mod input;
pub mod memory;
pub mod op_round_trip;
pub mod op_stream;
pub mod seeds;

use burn_ir::OperationIr;

/// A target, called with an input.
pub type Target = fn(&[u8]);

/// The targets by name.
pub const TARGETS: [(&str, Target); 5] = [
    ("op_stream", op_stream::run),
    ("op_round_trip", op_round_trip::run),
    ("frames", frames::run),
    ("duplex", duplex::run),
    ("inference", inference::run),
];

/// Returns ops as bytes, for comparisons in which a NaN must be equal to itself.
pub(crate) fn plain<'a>(ops: impl IntoIterator<Item = &'a OperationIr>) -> Vec<u8> {
    ops.into_iter().fold(Vec::new(), |bytes, op| {
        postcard::to_extend(op, bytes).expect("ops serialize without failing")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seeds::Rng;

    /// Changes an input at a few places.
    fn corrupt(data: &mut Vec<u8>, rng: &mut Rng) {
        for _ in 0..=rng.below(3) {
            if data.is_empty() {
                return;
            }
            let at = rng.below(data.len());
            match rng.below(4) {
                0 => data[at] ^= 1 << rng.below(8),
                1 => data[at] = rng.next() as u8,
                2 => drop(data.remove(at)),
                _ => data.truncate(at),
            }
        }
    }

    #[test]
    fn targets_accept_seeds_and_corrupted_seeds() {
        let mut rng = Rng(5);
        for (name, run) in TARGETS {
            let seeds = seeds::of(name);
            assert!(seeds.len() >= 4, "{name}");
            for seed in seeds {
                run(&seed);
                for _ in 0..20 {
                    let mut corrupted = seed.clone();
                    corrupt(&mut corrupted, &mut rng);
                    run(&corrupted);
                }
            }
        }
    }
}

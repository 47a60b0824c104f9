//! What the fuzz targets do, as plain functions of bytes.
//!
//! A target feeds bytes of its input to something that reads what a peer sent,
//! and asserts what must hold whatever they are. The binaries in `targets/` only
//! tie these functions to libFuzzer, so that everything here runs in an ordinary
//! test as well: over the seeds, and over seeds that were spoilt a little.
//!
//! - [`op_stream`]: bytes to ops.
//! - [`op_round_trip`]: ops to bytes to ops.
//! - [`frames`]: bytes to frames, at one end of a session.
//! - [`duplex`]: two ends of a session, and a connection that fails.
//! - [`execute`]: ops through decoder, rules, table and backend; no target of libFuzzer's,
//!   but a program, `execute`, with its own allocator, [`guard`].
//!
//! [`input`] takes an input apart, [`seeds`] has inputs to begin with, and
//! [`memory`] measures what something allocates.

pub mod duplex;
pub mod execute;
pub mod frames;
pub mod guard;
pub mod input;
pub mod memory;
pub mod op_round_trip;
pub mod op_stream;
pub mod seeds;

use burn_ir::OperationIr;

/// A target: what it does with an input.
pub type Target = fn(&[u8]);

/// The targets by name.
pub const TARGETS: [(&str, Target); 4] = [
    ("op_stream", op_stream::run),
    ("op_round_trip", op_round_trip::run),
    ("frames", frames::run),
    ("duplex", duplex::run),
];

/// Ops in a form that can be compared: a NaN is not equal to itself.
pub(crate) fn plain<'a>(ops: impl IntoIterator<Item = &'a OperationIr>) -> Vec<u8> {
    ops.into_iter().fold(Vec::new(), |bytes, op| {
        postcard::to_extend(op, bytes).expect("ops serialize without failing")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seeds::Rng;

    /// Spoils an input at a few places.
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
                    let mut spoilt = seed.clone();
                    corrupt(&mut spoilt, &mut rng);
                    run(&spoilt);
                }
            }
        }
    }
}

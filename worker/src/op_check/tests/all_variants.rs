//! Tests that each variant is accepted as clients send it.

use std::collections::BTreeSet;

use tensord_proto::codec::OpName;

use super::{super::samples::ops, *};

/// Number of variants in Burn's enums, except those that no client sends: an `Init` is an
/// upload, booleans have no casts and no tuples of indices, floats no random integers, and
/// nothing is quantized.
const VARIANTS: usize = BASE + NUMERIC + (35 - 2) + 13 + 6 + 53 + 14 + 2 + 2;
const BASE: usize = 30 + 30 + (30 - 3);
const NUMERIC: usize = (56 - 1) + 56;

#[test]
fn each_variant_is_accepted_as_clients_send_it() {
    let ops = ops();
    let names: BTreeSet<String> = ops.iter().map(|op| OpName::of(op).to_string()).collect();
    assert_eq!(names.len(), ops.len(), "each once");
    assert_eq!(names.len(), VARIANTS, "all of them");
    for op in &ops {
        assert_accepted(op);
    }
}

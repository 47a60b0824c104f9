//! What the decision when to send costs an op: `cargo bench -p tensord-client --features
//! testing`.

use divan::{Bencher, black_box, counter::ItemsCount};
use tensord_client::testing::frames_of;

/// Ops of a run.
const OPS: usize = 10_000;

fn main() {
    divan::main();
}

#[divan::bench]
fn record(bencher: Bencher) {
    bencher
        .counter(ItemsCount::new(OPS))
        .bench(|| frames_of(black_box(OPS)));
}

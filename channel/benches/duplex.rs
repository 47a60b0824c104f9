//! Frames of a resumable channel, from the queue of one end to the body at the other:
//! `cargo bench -p tensord-channel`.

use bytes::Bytes;
use divan::{Bencher, counter::ItemsCount};
use tensord_channel::duplex::Duplex;
use tensord_proto::v1::{Chunk, Ops, frame::Body};

const CAPACITY_BYTES: usize = 64 << 20;
const WINDOW_BYTES: u64 = 64 << 20;

/// Frames of a round trip.
const FRAMES: u64 = 64;

fn main() {
    divan::main();
}

fn ends() -> [Duplex; 2] {
    [(); 2].map(|()| Duplex::new(CAPACITY_BYTES, WINDOW_BYTES, WINDOW_BYTES))
}

/// Sends [`FRAMES`] frames with `body` from one end to the other, which consumes and
/// acknowledges them.
fn exchange([left, right]: &mut [Duplex; 2], body: &Body) {
    (0..FRAMES).for_each(|_| left.push(body.clone()));
    while let Some(parts) = left.next_to_send() {
        let frame: Bytes = parts.concat().into();
        let received = right.receive(frame).expect("the frame is valid");
        let (_, bytes) = received.expect("the frame is new");
        right.inbox().consume(bytes);
    }
    left.receive(right.ping()).expect("the ping is valid");
    assert!(left.outbox().is_empty());
}

fn bench(bencher: Bencher, body: Body) {
    let mut ends = ends();
    bencher
        .counter(ItemsCount::new(FRAMES))
        .bench_local(|| exchange(&mut ends, &body));
}

/// A frame of a training step's ops.
#[divan::bench]
fn ops(bencher: Bencher) {
    let ops = Ops {
        count: 64,
        encoded: vec![1; 64].into(),
        ..Ops::default()
    };
    bench(bencher, Body::Ops(ops));
}

/// A chunk of a tensor; the copy of its bytes into a frame is included.
#[divan::bench]
fn chunk(bencher: Bencher) {
    let chunk = Chunk {
        size_bytes: 0,
        bytes: vec![1; 16 << 10].into(),
    };
    bench(bencher, Body::Chunk(chunk));
}

//! A session between a client's end of its connections and a real device, without a
//! network.

mod collective_requests;
mod harness;
mod overdue;
mod reads_in_flight;
mod upload_sharing;

use burn_backend::{DType, Shape};
use burn_ir::{BinaryOpIr, NumericOperationIr, OperationIr, TensorId, TensorIr, TensorStatus};
use tensord_proto::{
    CHUNK_BYTES,
    bulk::chunks,
    codec::encode_tensor,
    content::{Content, Entry, HASH_BYTES, kept_cost},
    v1::{self, ErrorCode, frame::Body},
};

use tensord_transport::channel::Next;

use self::harness::{KEPT, PAIR, SessionHarness, add, bytes_of, init, random, tensor};
use super::{outbound::WINDOW_BYTES, *};
use crate::{
    blobs::BlobStore,
    executor::{Executor, TimeSliceEnd, TimeSliced},
};

#[test]
fn reads_of_one_frame_share_a_reply_frame() {
    let mut harness = SessionHarness::new();
    harness.upload(1, &[1.0, 2.0]);
    harness.upload(2, &[3.0, 4.0]);
    let tensors = [1, 2, 1].map(|id| encode_tensor(&tensor(id, TensorStatus::ReadOnly)));
    harness.client.push(Body::Reads(v1::Reads {
        request_id: 5,
        tensors: tensors.to_vec(),
    }));
    harness.run_all();
    let frames = harness.replies.iter();
    assert_eq!(frames.filter(|a| matches!(a, Body::Values(_))).count(), 1);
    assert_eq!(
        harness.values(),
        [
            (5, Ok(vec![1.0, 2.0])),
            (6, Ok(vec![3.0, 4.0])),
            (7, Ok(vec![1.0, 2.0]))
        ]
    );
}

#[test]
fn small_reads_of_an_idle_session_bypass_the_executor() {
    let mut harness = SessionHarness::new();
    harness.upload(1, &[1.0, 2.0]);
    harness.run_all();
    harness.read(1, &tensor(1, TensorStatus::ReadOnly));
    harness.deliver(usize::MAX).unwrap();
    assert!(harness.queue.try_pop().is_none() && harness.take_wake());
    harness.receive_replies();
    assert_eq!(harness.values(), [(1, Ok(vec![1.0, 2.0]))]);
    // A read waits for the executor if it is large, its tensor does not exist, or other
    // work comes before it.
    let large = TensorIr {
        shape: Shape::new([1 << 20]),
        ..tensor(1, TensorStatus::ReadOnly)
    };
    for waits in [large, tensor(9, TensorStatus::ReadOnly)] {
        harness.read(2, &waits);
        harness.deliver(usize::MAX).unwrap();
        let waiting = harness.queue.try_pop().expect("it is in the queue");
        harness.queue.push(waiting);
        harness.run_all();
    }
    let _ = harness.take_wake();
    harness.ops(&[add(1, 1, 2)]);
    harness.read(3, &tensor(1, TensorStatus::ReadWrite));
    harness.deliver(usize::MAX).unwrap();
    assert!(!harness.take_wake());
    harness.run_all();
    assert_eq!(harness.values()[3], (3, Ok(vec![1.0, 2.0])));
    assert_eq!(harness.memory.live_bytes(), PAIR);
}

#[test]
fn no_work_is_lost_between_reader_and_executor() {
    let executor = Executor::start(0, Default::default()).unwrap();
    let mut harness = SessionHarness::with(BlobStore::new(0), executor.queue().clone());
    harness.upload(1, &[1.0, 2.0]);
    for number in 0..10_000u64 {
        // The read arrives about when the op's turn ends.
        harness.ops(&[add(1, 1, 2 + number)]);
        harness.deliver(usize::MAX).unwrap();
        (0..number % 50 * 20).for_each(|_| std::hint::spin_loop());
        harness.read(number, &tensor(2 + number, TensorStatus::ReadWrite));
        harness.deliver(usize::MAX).unwrap();
        let started_at = Instant::now();
        while harness.replies.is_empty() {
            assert!(
                started_at.elapsed().as_secs() < 20,
                "read {number} has no answer"
            );
            std::thread::yield_now();
            harness.receive_replies();
        }
        assert_eq!(harness.values(), [(number, Ok(vec![2.0, 4.0]))]);
        harness.replies.clear();
    }
}

#[test]
fn ops_run_once_across_reconnects() {
    let mut harness = SessionHarness::new();
    harness.upload(1, &[1.0, 2.0]);
    for step in 0..20 {
        harness.ops(&[add(1 + step, 1, 2 + step)]);
    }
    harness.read(1, &tensor(21, TensorStatus::ReadOnly));
    for frames in [3, 1, 0, 7, 2] {
        harness.deliver(frames).unwrap();
        // The session's frames, acknowledgements included, are lost with the connection.
        harness.connect();
    }
    harness.run_all();
    assert_eq!(harness.values(), [(1, Ok(vec![21.0, 42.0]))]);
}

#[test]
fn lost_reply_is_resent() {
    let mut harness = SessionHarness::new();
    harness.upload(1, &[1.0, 2.0]);
    harness.read(9, &tensor(1, TensorStatus::ReadOnly));
    harness.deliver(usize::MAX).unwrap();
    harness.run();
    while let Next::Frames(_) = harness.session.next_to_send(Track::Ops, harness.connection) {}
    harness.connect();
    harness.receive_replies();
    assert_eq!(harness.values(), [(9, Ok(vec![1.0, 2.0]))]);
}

#[test]
fn consecutive_replies_share_a_frame_and_do_not_wait_for_ops() {
    let mut harness = SessionHarness::new();
    harness.upload(1, &[1.0, 2.0]);
    (0..5).for_each(|request| harness.read(request, &tensor(1, TensorStatus::ReadOnly)));
    harness.ops(&[add(1, 1, 2)]);
    harness.read(5, &tensor(2, TensorStatus::ReadOnly));
    harness.deliver(usize::MAX).unwrap();
    // Clears earlier wake-ups of the writer.
    let _ = harness.take_wake();
    let mut wakes = Vec::new();
    let session = harness.queue.try_pop().unwrap();
    // Each turn executes one piece of work.
    while session.run(&mut || false) == TimeSliceEnd::MoreWork {
        wakes.push(harness.take_wake());
    }
    wakes.push(harness.take_wake());
    assert_eq!(wakes.iter().filter(|wakes| **wakes).count(), 6, "{wakes:?}");
    harness.receive_replies();
    assert_eq!(harness.values().len(), 6);

    (6..11).for_each(|request| harness.read(request, &tensor(1, TensorStatus::ReadOnly)));
    harness.deliver(usize::MAX).unwrap();
    harness.run();
    assert!(harness.take_wake());
    let Next::Frames(frames) = harness.session.next_to_send(Track::Ops, harness.connection) else {
        panic!("nothing was said");
    };
    assert_eq!(frames.len(), 1);
}

#[test]
fn replaced_connection_is_ignored() {
    let mut harness = SessionHarness::new();
    harness.upload(1, &[1.0, 2.0]);
    let late = harness.client.next_to_send().unwrap().concat().into();
    let old = harness.connection;
    harness.connect();
    assert!(!harness.session.receive(Track::Ops, old, late).unwrap());
    assert!(matches!(
        harness.session.next_to_send(Track::Ops, old),
        Next::Replaced
    ));
    // An acknowledgement on it would count as sent.
    assert_eq!(harness.session.ping(Track::Ops, old, true), None);
    assert!(
        harness
            .session
            .ping(Track::Ops, harness.connection, true)
            .is_some()
    );
}

#[test]
fn malformed_ops_end_the_session_with_their_position() {
    let mut harness = SessionHarness::new();
    harness.upload(1, &[1.0, 2.0]);
    harness.run_all();
    assert_eq!(harness.memory.live_bytes(), PAIR);
    let encoded = bytes::Bytes::from_static(&[0xff; 7]);
    harness.client.push(Body::Ops(v1::Ops {
        count: 1,
        encoded,
        contents: Bytes::new(),
    }));
    harness.run_all();
    let Some(Body::Closed(closed)) = harness.replies.last() else {
        panic!("no farewell: {:?}", harness.replies);
    };
    let error = closed.error.as_ref().unwrap();
    assert_eq!(error.code(), ErrorCode::Protocol);
    assert!(error.message.contains("malformed ops at byte 7"), "{error}");
    assert!(harness.session.has_ended());
    assert_eq!(harness.memory.live_bytes(), 0, "its memory is back");
}

#[test]
fn random_values_depend_on_the_seed_only() {
    let draw = |between: bool| {
        let mut harness = SessionHarness::new();
        harness.client.push(Body::Seed(v1::Seed { seed: 42 }));
        harness.upload(1, &[1.0, 2.0]);
        harness.ops(&[random(2)]);
        if between {
            harness.ops(&[add(1, 1, 3), add(1, 1, 4)]);
        }
        harness.ops(&[random(5)]);
        harness.read(1, &tensor(2, TensorStatus::ReadOnly));
        harness.read(2, &tensor(5, TensorStatus::ReadOnly));
        harness.run_all();
        harness.values()
    };
    let values = draw(false);
    assert_eq!(values, draw(true));
    assert_ne!(values[0].1, values[1].1);
}

#[test]
fn client_that_reads_no_replies_blocks_only_its_own_session() {
    let mut harness = SessionHarness::new();
    let elements = 1 << 22;
    let shape = Shape::new([elements]);
    let ones = burn_ir::FullOpIr {
        out: TensorIr::uninit(TensorId::new(1), shape.clone(), DType::F32),
        value: burn_ir::ScalarIr::Float(1.0),
    };
    harness.ops(&[OperationIr::NumericFloat(
        DType::F32,
        NumericOperationIr::Full(ones),
    )]);
    let big = TensorIr {
        shape,
        status: TensorStatus::ReadOnly,
        ..tensor(1, TensorStatus::ReadOnly)
    };
    // 16 MiB each; the outbox keeps 64 MiB.
    (1..=8).for_each(|request| harness.read(request, &big));
    harness.deliver(usize::MAX).unwrap();
    harness.run();
    let announced = |harness: &SessionHarness| {
        let values = |body: &Body| match body {
            Body::Values(values) => values.values.len(),
            _ => 0,
        };
        harness.replies.iter().map(values).sum::<usize>()
    };
    harness.receive_replies();
    assert_eq!(
        announced(&harness),
        4,
        "it waits for its client, and its turn is over"
    );
    // The client's next frame acknowledges the values that it received.
    let (ping, connection) = (harness.bulk.ping(), harness.bulk_connection);
    harness
        .session
        .receive(Track::Bulk, connection, ping)
        .unwrap();
    harness.run();
    harness.receive_replies();
    assert_eq!(announced(&harness), 8);
}

#[test]
fn only_the_upload_op_waits_for_its_payload() {
    let mut harness = SessionHarness::new();
    harness.upload(1, &[1.0, 2.0]);
    let entry = Entry::Upload(Content::Payload { keep: None });
    harness.ops_with(&[add(1, 1, 2), init(3), add(2, 3, 4)], &[entry]);
    harness.read(1, &tensor(2, TensorStatus::ReadOnly));
    harness.read(2, &tensor(4, TensorStatus::ReadOnly));
    harness.run_all();
    assert_eq!(harness.values(), [], "reads keep their places, too");
    assert_eq!(harness.memory.live_bytes(), 2 * PAIR);
    let payload = bytes_of(&[10.0, 20.0]);
    chunks(payload).for_each(|chunk| harness.bulk.push(Body::Chunk(chunk)));
    harness.deliver_bulk();
    harness.run_all();
    let expected = [(1, Ok(vec![2.0, 4.0])), (2, Ok(vec![12.0, 24.0]))];
    assert_eq!(harness.values(), expected);
}

#[test]
fn early_payloads_are_kept_within_a_limit() {
    let mut harness = SessionHarness::new();
    let large = Bytes::from(vec![0; WINDOW_BYTES as usize]);
    for payload in [bytes_of(&[1.0, 2.0]), large, bytes_of(&[3.0, 4.0])] {
        chunks(payload).for_each(|chunk| harness.bulk.push(Body::Chunk(chunk)));
    }
    let mut frames = harness.deliver_bulk();
    harness.receive_replies();
    frames += harness.deliver_bulk();
    let all = WINDOW_BYTES as usize / CHUNK_BYTES + 2;
    assert!(frames < all, "the first one waits, so the rest has to");
    let payload = || Content::Payload { keep: None };
    harness.upload_from(1, payload());
    harness.read(1, &tensor(1, TensorStatus::ReadOnly));
    for _ in 0..2 {
        harness.run_all();
        frames += harness.deliver_bulk();
    }
    // The large payload is not a pair of values: its upload fails, and the next succeeds.
    harness.upload_from(2, payload());
    harness.upload_from(3, payload());
    harness.read(2, &tensor(2, TensorStatus::ReadOnly));
    harness.read(3, &tensor(3, TensorStatus::ReadOnly));
    for _ in 0..3 {
        harness.run_all();
        frames += harness.deliver_bulk();
    }
    let values = harness.values();
    assert_eq!(values[0], (1, Ok(vec![1.0, 2.0])));
    assert!(values[1].1.is_err(), "{values:?}");
    assert_eq!(values[2], (3, Ok(vec![3.0, 4.0])));
    assert_eq!(frames, all, "all chunks of the large one and the others");
}

#[test]
fn cached_uploads_serve_later_sessions_of_the_tenant() {
    let mut harness = SessionHarness::new();
    let (bytes, keep) = (bytes_of(&[1.0, 2.0]), Some(5));
    harness.upload_from(
        1,
        Content::Inline {
            bytes: bytes.clone(),
            keep,
        },
    );
    // Burn may add in place, which must not change the kept bytes.
    let owned = tensor(1, TensorStatus::ReadWrite);
    let op = BinaryOpIr {
        lhs: owned.clone(),
        rhs: owned,
        out: tensor(2, TensorStatus::NotInit),
    };
    harness.ops(&[OperationIr::NumericFloat(
        DType::F32,
        NumericOperationIr::Add(op),
    )]);
    harness.upload_from(3, Content::Slot(5));
    harness.read(1, &tensor(3, TensorStatus::ReadOnly));
    harness.run_all();
    assert_eq!(harness.values(), [(1, Ok(vec![1.0, 2.0]))]);
    harness.client.push(Body::Close(v1::Close {}));
    harness.run_all();
    let blobs = harness.blobs.clone();
    // Drops the runtime, which waits until the blob store has the kept uploads.
    drop(harness);

    let mut next = SessionHarness::with_blobs(blobs);
    next.upload_from(1, Content::Held(0));
    next.read(1, &tensor(1, TensorStatus::ReadOnly));
    next.run_all();
    let hash = blake3::hash(&bytes).as_bytes()[..HASH_BYTES].to_vec();
    let Some(Body::Held(held)) = next.replies.first() else {
        panic!("it was not told: {:?}", next.replies);
    };
    assert_eq!(held.hashes, hash);
    assert_eq!(next.values(), [(1, Ok(vec![1.0, 2.0]))]);
}

#[test]
fn upload_without_a_source_ends_the_session_with_its_position() {
    let over = KEPT as usize - kept_cost(0) as usize + 1;
    for (content, rule) in [
        (
            Content::Slot(1),
            "malformed contents at byte 1: slot 1 has no upload",
        ),
        (Content::Held(0), "place 0 has no upload"),
        (
            Content::Payload { keep: Some(1) },
            "the kept uploads take 1025 bytes, more than 1024 bytes",
        ),
    ] {
        let mut harness = SessionHarness::new();
        harness.upload_from(1, content);
        let payload = Bytes::from(vec![0; over]);
        chunks(payload).for_each(|chunk| harness.bulk.push(Body::Chunk(chunk)));
        harness.deliver_bulk();
        harness.run_all();
        let Some(Body::Closed(closed)) = harness.replies.last() else {
            panic!("no farewell: {:?}", harness.replies);
        };
        let error = closed.error.as_ref().unwrap();
        assert!(error.message.contains(rule), "{error}");
    }
}

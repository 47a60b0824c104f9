//! A session between a client's end of its connections and a real device, without a
//! network.

mod bench;
mod collective_requests;
mod later;
mod overdue;

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

use self::bench::{Bench, KEPT, PAIR, add, bytes_of, init, random, tensor};
use super::*;
use crate::executor::Executor;

#[test]
fn reads_of_a_frame_are_answered_in_one() {
    let mut bench = Bench::new();
    bench.upload(1, &[1.0, 2.0]);
    bench.upload(2, &[3.0, 4.0]);
    let tensors = [1, 2, 1].map(|id| encode_tensor(&tensor(id, TensorStatus::ReadOnly)));
    bench.client.push(Body::Reads(v1::Reads {
        request_id: 5,
        tensors: tensors.to_vec(),
    }));
    bench.all();
    let frames = bench.answers.iter();
    assert_eq!(frames.filter(|a| matches!(a, Body::Values(_))).count(), 1);
    assert_eq!(
        bench.values(),
        [
            (5, Ok(vec![1.0, 2.0])),
            (6, Ok(vec![3.0, 4.0])),
            (7, Ok(vec![1.0, 2.0]))
        ]
    );
}

#[test]
fn small_reads_of_a_session_that_rests_need_no_executor() {
    let mut bench = Bench::new();
    bench.upload(1, &[1.0, 2.0]);
    bench.all();
    bench.read(1, &tensor(1, TensorStatus::ReadOnly));
    bench.carry(usize::MAX).unwrap();
    assert!(bench.queue.try_pop().is_none() && bench.was_told());
    bench.hear();
    assert_eq!(bench.values(), [(1, Ok(vec![1.0, 2.0]))]);
    // A read waits for the executor if it is large, its tensor does not exist, or other
    // work comes before it.
    let large = TensorIr {
        shape: Shape::new([1 << 20]),
        ..tensor(1, TensorStatus::ReadOnly)
    };
    for waits in [large, tensor(9, TensorStatus::ReadOnly)] {
        bench.read(2, &waits);
        bench.carry(usize::MAX).unwrap();
        let waiting = bench.queue.try_pop().expect("it is in the queue");
        bench.queue.push(waiting);
        bench.all();
    }
    let _ = bench.was_told();
    bench.ops(&[add(1, 1, 2)]);
    bench.read(3, &tensor(1, TensorStatus::ReadWrite));
    bench.carry(usize::MAX).unwrap();
    assert!(!bench.was_told());
    bench.all();
    assert_eq!(bench.values()[3], (3, Ok(vec![1.0, 2.0])));
    assert_eq!(bench.memory.live_bytes(), PAIR);
}

#[test]
fn no_work_is_forgotten_between_the_reader_and_the_executor() {
    let executor = Executor::start(0).unwrap();
    let mut bench = Bench::with(BlobStore::new(0), executor.queue().clone());
    bench.upload(1, &[1.0, 2.0]);
    for number in 0..10_000u64 {
        // The read arrives about when the op's turn ends.
        bench.ops(&[add(1, 1, 2 + number)]);
        bench.carry(usize::MAX).unwrap();
        (0..number % 50 * 20).for_each(|_| std::hint::spin_loop());
        bench.read(number, &tensor(2 + number, TensorStatus::ReadWrite));
        bench.carry(usize::MAX).unwrap();
        let asked = Instant::now();
        while bench.answers.is_empty() {
            assert!(
                asked.elapsed().as_secs() < 20,
                "read {number} has no answer"
            );
            std::thread::yield_now();
            bench.hear();
        }
        assert_eq!(bench.values(), [(number, Ok(vec![2.0, 4.0]))]);
        bench.answers.clear();
    }
}

#[test]
fn each_op_runs_once_however_often_the_connection_is_lost() {
    let mut bench = Bench::new();
    bench.upload(1, &[1.0, 2.0]);
    for step in 0..20 {
        bench.ops(&[add(1 + step, 1, 2 + step)]);
    }
    bench.read(1, &tensor(21, TensorStatus::ReadOnly));
    for frames in [3, 1, 0, 7, 2] {
        bench.carry(frames).unwrap();
        // The session's frames, acknowledgements included, are lost with the connection.
        bench.connect();
    }
    bench.all();
    assert_eq!(bench.values(), [(1, Ok(vec![21.0, 42.0]))]);
}

#[test]
fn a_lost_answer_is_given_again() {
    let mut bench = Bench::new();
    bench.upload(1, &[1.0, 2.0]);
    bench.read(9, &tensor(1, TensorStatus::ReadOnly));
    bench.carry(usize::MAX).unwrap();
    bench.run();
    while let Next::Frames(_) = bench.session.next_to_send(Track::Ops, bench.connection) {}
    bench.connect();
    bench.hear();
    assert_eq!(bench.values(), [(9, Ok(vec![1.0, 2.0]))]);
}

#[test]
fn answers_in_a_row_are_sent_together_and_none_waits_for_ops() {
    let mut bench = Bench::new();
    bench.upload(1, &[1.0, 2.0]);
    (0..5).for_each(|request| bench.read(request, &tensor(1, TensorStatus::ReadOnly)));
    bench.ops(&[add(1, 1, 2)]);
    bench.read(5, &tensor(2, TensorStatus::ReadOnly));
    bench.carry(usize::MAX).unwrap();
    // Clears earlier wake-ups of the writer.
    let _ = bench.was_told();
    let mut told = Vec::new();
    let session = bench.queue.try_pop().unwrap();
    // Each turn executes one piece of work.
    while session.run(&mut || false) == Turn::Again {
        told.push(bench.was_told());
    }
    told.push(bench.was_told());
    assert_eq!(told.iter().filter(|told| **told).count(), 6, "{told:?}");
    bench.hear();
    assert_eq!(bench.values().len(), 6);

    (6..11).for_each(|request| bench.read(request, &tensor(1, TensorStatus::ReadOnly)));
    bench.carry(usize::MAX).unwrap();
    bench.run();
    assert!(bench.was_told());
    let Next::Frames(frames) = bench.session.next_to_send(Track::Ops, bench.connection) else {
        panic!("nothing was said");
    };
    assert_eq!(frames.len(), 1);
}

#[test]
fn a_replaced_connection_has_no_say() {
    let mut bench = Bench::new();
    bench.upload(1, &[1.0, 2.0]);
    let late = bench.client.next_to_send().unwrap().concat().into();
    let old = bench.connection;
    bench.connect();
    assert!(!bench.session.receive(Track::Ops, old, late).unwrap());
    assert!(matches!(
        bench.session.next_to_send(Track::Ops, old),
        Next::Replaced
    ));
    // An acknowledgement on it would count as sent.
    assert_eq!(bench.session.ping(Track::Ops, old, true), None);
    assert!(
        bench
            .session
            .ping(Track::Ops, bench.connection, true)
            .is_some()
    );
}

#[test]
fn bytes_that_are_no_ops_end_the_session_and_say_where() {
    let mut bench = Bench::new();
    bench.upload(1, &[1.0, 2.0]);
    bench.all();
    assert_eq!(bench.memory.live_bytes(), PAIR);
    let encoded = bytes::Bytes::from_static(&[0xff; 7]);
    bench.client.push(Body::Ops(v1::Ops {
        count: 1,
        encoded,
        contents: Bytes::new(),
    }));
    bench.all();
    let Some(Body::Closed(closed)) = bench.answers.last() else {
        panic!("no farewell: {:?}", bench.answers);
    };
    let error = closed.error.as_ref().unwrap();
    assert_eq!(error.code(), ErrorCode::Protocol);
    assert!(error.message.contains("malformed ops at byte 7"), "{error}");
    assert!(bench.session.has_ended());
    assert_eq!(bench.memory.live_bytes(), 0, "its memory is back");
}

#[test]
fn draws_depend_on_the_seed_and_on_nothing_in_between() {
    let draw = |between: bool| {
        let mut bench = Bench::new();
        bench.client.push(Body::Seed(v1::Seed { seed: 42 }));
        bench.upload(1, &[1.0, 2.0]);
        bench.ops(&[random(2)]);
        if between {
            bench.ops(&[add(1, 1, 3), add(1, 1, 4)]);
        }
        bench.ops(&[random(5)]);
        bench.read(1, &tensor(2, TensorStatus::ReadOnly));
        bench.read(2, &tensor(5, TensorStatus::ReadOnly));
        bench.all();
        bench.values()
    };
    let values = draw(false);
    assert_eq!(values, draw(true));
    assert_ne!(values[0].1, values[1].1);
}

#[test]
fn a_client_that_takes_no_answers_stops_its_own_session_alone() {
    let mut bench = Bench::new();
    let elements = 1 << 22;
    let shape = Shape::new([elements]);
    let ones = burn_ir::FullOpIr {
        out: TensorIr::uninit(TensorId::new(1), shape.clone(), DType::F32),
        value: burn_ir::ScalarIr::Float(1.0),
    };
    bench.ops(&[OperationIr::NumericFloat(
        DType::F32,
        NumericOperationIr::Full(ones),
    )]);
    let big = TensorIr {
        shape,
        status: TensorStatus::ReadOnly,
        ..tensor(1, TensorStatus::ReadOnly)
    };
    // 16 MiB each; the outbox keeps 64 MiB.
    (1..=8).for_each(|request| bench.read(request, &big));
    bench.carry(usize::MAX).unwrap();
    bench.run();
    let announced = |bench: &Bench| {
        let values = |body: &Body| match body {
            Body::Values(values) => values.values.len(),
            _ => 0,
        };
        bench.answers.iter().map(values).sum::<usize>()
    };
    bench.hear();
    assert_eq!(
        announced(&bench),
        4,
        "it waits for its client, and its turn is over"
    );
    // The client's next frame acknowledges the values that it received.
    let (beat, connection) = (bench.bulk.beat(), bench.bulk_connection);
    bench
        .session
        .receive(Track::Bulk, connection, beat)
        .unwrap();
    bench.run();
    bench.hear();
    assert_eq!(announced(&bench), 8);
}

#[test]
fn an_upload_waits_for_its_payload_and_nothing_before_it_does() {
    let mut bench = Bench::new();
    bench.upload(1, &[1.0, 2.0]);
    let entry = Entry::Upload(Content::Payload { keep: None });
    bench.ops_with(&[add(1, 1, 2), init(3), add(2, 3, 4)], &[entry]);
    bench.read(1, &tensor(2, TensorStatus::ReadOnly));
    bench.read(2, &tensor(4, TensorStatus::ReadOnly));
    bench.all();
    assert_eq!(bench.values(), [], "reads keep their places, too");
    assert_eq!(bench.memory.live_bytes(), 2 * PAIR);
    let payload = bytes_of(&[10.0, 20.0]);
    chunks(payload).for_each(|chunk| bench.bulk.push(Body::Chunk(chunk)));
    bench.carry_bulk();
    bench.all();
    let expected = [(1, Ok(vec![2.0, 4.0])), (2, Ok(vec![12.0, 24.0]))];
    assert_eq!(bench.values(), expected);
}

#[test]
fn payloads_may_come_first_and_what_waits_is_bounded() {
    let mut bench = Bench::new();
    let large = Bytes::from(vec![0; WINDOW_BYTES as usize]);
    for payload in [bytes_of(&[1.0, 2.0]), large, bytes_of(&[3.0, 4.0])] {
        chunks(payload).for_each(|chunk| bench.bulk.push(Body::Chunk(chunk)));
    }
    let mut frames = bench.carry_bulk();
    bench.hear();
    frames += bench.carry_bulk();
    let all = WINDOW_BYTES as usize / CHUNK_BYTES + 2;
    assert!(frames < all, "the first one waits, so the rest has to");
    let payload = || Content::Payload { keep: None };
    bench.upload_from(1, payload());
    bench.read(1, &tensor(1, TensorStatus::ReadOnly));
    for _ in 0..2 {
        bench.all();
        frames += bench.carry_bulk();
    }
    // The large payload is not a pair of values: its upload fails, and the next succeeds.
    bench.upload_from(2, payload());
    bench.upload_from(3, payload());
    bench.read(2, &tensor(2, TensorStatus::ReadOnly));
    bench.read(3, &tensor(3, TensorStatus::ReadOnly));
    for _ in 0..3 {
        bench.all();
        frames += bench.carry_bulk();
    }
    let values = bench.values();
    assert_eq!(values[0], (1, Ok(vec![1.0, 2.0])));
    assert!(values[1].1.is_err(), "{values:?}");
    assert_eq!(values[2], (3, Ok(vec![3.0, 4.0])));
    assert_eq!(frames, all, "all chunks of the large one and the others");
}

#[test]
fn what_is_kept_serves_this_session_and_the_next_of_its_tenant() {
    let mut bench = Bench::new();
    let (bytes, keep) = (bytes_of(&[1.0, 2.0]), Some(5));
    bench.upload_from(
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
    bench.ops(&[OperationIr::NumericFloat(
        DType::F32,
        NumericOperationIr::Add(op),
    )]);
    bench.upload_from(3, Content::Slot(5));
    bench.read(1, &tensor(3, TensorStatus::ReadOnly));
    bench.all();
    assert_eq!(bench.values(), [(1, Ok(vec![1.0, 2.0]))]);
    bench.client.push(Body::Close(v1::Close {}));
    bench.all();
    let blobs = bench.blobs.clone();
    // Drops the runtime, which waits until the blob store has the kept uploads.
    drop(bench);

    let mut next = Bench::with_blobs(blobs);
    next.upload_from(1, Content::Held(0));
    next.read(1, &tensor(1, TensorStatus::ReadOnly));
    next.all();
    let hash = blake3::hash(&bytes).as_bytes()[..HASH_BYTES].to_vec();
    let Some(Body::Held(held)) = next.answers.first() else {
        panic!("it was not told: {:?}", next.answers);
    };
    assert_eq!(held.hashes, hash);
    assert_eq!(next.values(), [(1, Ok(vec![1.0, 2.0]))]);
}

#[test]
fn an_upload_from_nowhere_ends_the_session_and_says_where() {
    let over = KEPT as usize - kept_cost(0) as usize + 1;
    for (content, rule) in [
        (
            Content::Slot(1),
            "malformed contents at byte 1: slot 1 has no upload",
        ),
        (Content::Held(0), "place 0 has no upload"),
        (
            Content::Payload { keep: Some(1) },
            "the kept uploads take more than 1024 bytes",
        ),
    ] {
        let mut bench = Bench::new();
        bench.upload_from(1, content);
        let payload = Bytes::from(vec![0; over]);
        chunks(payload).for_each(|chunk| bench.bulk.push(Body::Chunk(chunk)));
        bench.carry_bulk();
        bench.all();
        let Some(Body::Closed(closed)) = bench.answers.last() else {
            panic!("no farewell: {:?}", bench.answers);
        };
        let error = closed.error.as_ref().unwrap();
        assert!(error.message.contains(rule), "{error}");
    }
}

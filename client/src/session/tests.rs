//! When a session's driver sends, and when it is woken: without a link, against the
//! worker's end of the frames.

use burn_backend::{DType, TensorData};
use burn_ir::{NumericOperationIr, OperationIr, ScalarIr, ScalarOpIr, TensorIr, TensorStatus};
use bytes::Bytes;
use tensord_proto::{
    codec::encode_type,
    v1::{TensorValue, Value, Values, tensor_value, value},
};

use super::{wire::Outgoing, *};

/// A session whose worker lets it send all, and that worker's end.
fn pair() -> (Arc<Session>, Duplex) {
    let session = Session::new(SessionId(7), Seat::default());
    session.lock().duplex.rewind(0, u64::MAX).unwrap();
    (session, Duplex::new(1 << 20, u64::MAX, 1 << 30))
}

fn tensor(id: TensorId, status: TensorStatus) -> TensorIr {
    TensorIr {
        status,
        ..TensorIr::uninit(id, [1].into(), DType::F32)
    }
}

fn record(session: &Session, count: usize) {
    for _ in 0..count {
        let lhs = tensor(session.new_tensor(), TensorStatus::ReadOnly);
        let out = tensor(session.new_tensor(), TensorStatus::NotInit);
        let rhs = ScalarIr::Float(1.0);
        session.record(OperationIr::NumericFloat(
            DType::F32,
            NumericOperationIr::AddScalar(ScalarOpIr { lhs, rhs, out }),
        ));
    }
}

/// What the driver finds, in a word, and what it sends to `worker`.
fn look(session: &Session, worker: &mut Duplex, patient: bool, rested: bool) -> String {
    match session.next_to_send(Track::Ops, patient, rested) {
        Outgoing::Frames(frames) => {
            for parts in &frames {
                worker.receive(parts.concat().into()).unwrap();
            }
            format!("{} frames", frames.len())
        }
        Outgoing::Few(before) => format!("few after {before}"),
        Outgoing::News => "news".into(),
        Outgoing::Nothing => "nothing".into(),
        Outgoing::Goodbye => "goodbye".into(),
    }
}

/// The worker answers the read of this number.
fn answer(session: &Session, worker: &mut Duplex, request_id: u64) {
    let data = TensorData::from([1f32]);
    let tensor = TensorValue {
        r#type: Some(encode_type(data.shape(), data.dtype())),
        content: Some(tensor_value::Content::Bytes(Bytes::copy_from_slice(
            data.as_bytes(),
        ))),
    };
    let value = Value {
        request_id,
        result: Some(value::Result::Tensor(tensor)),
    };
    worker.push(Body::Values(Values {
        values: vec![value],
    }));
    let frame = worker.next_to_send().unwrap().concat().into();
    let mut deliveries = Vec::new();
    let received = session.receive(Track::Ops, frame, &mut deliveries);
    assert!(received.is_ok());
    deliveries.into_iter().for_each(values::Delivery::deliver);
}

#[test]
fn few_ops_wait_for_more_and_longer_each_time_until_something_is_urgent() {
    let (session, mut worker) = pair();
    let mut look = |patient| look(&session, &mut worker, patient, false);
    record(&session, 3);
    assert_eq!(look(true), "few after 0");
    record(&session, 3);
    assert_eq!(look(true), "few after 0");
    assert_eq!(look(false), "1 frames");
    assert_eq!(look(true), "nothing");
    record(&session, 1);
    assert_eq!(look(true), "few after 1");
    record(&session, EAGER_OPS - 1);
    assert_eq!(look(true), "1 frames");
    record(&session, 1);
    assert_eq!(look(true), "few after 1");
    assert_eq!(look(false), "1 frames");
    record(&session, 1);
    assert_eq!(look(true), "few after 2");
    let _sync = session.sync();
    assert_eq!(look(true), "2 frames");
    record(&session, 1);
    assert_eq!(look(true), "few after 0");
}

#[test]
fn an_answer_wakes_a_driver_only_for_an_ack_that_it_would_not_see() {
    let (session, mut worker) = pair();
    let mut answers = Vec::new();
    for (number, rested) in [(1, false), (2, true), (3, false)] {
        let read = tensor(session.new_tensor(), TensorStatus::ReadOnly);
        answers.push(session.read(&read));
        assert_eq!(look(&session, &mut worker, true, false), "1 frames");
        assert_eq!(look(&session, &mut worker, true, rested), "nothing");
        answer(&session, &mut worker, number);
        let woken = session.lock().driver == Waiting::No;
        assert_eq!(woken, rested, "read {number}");
        // The ack rides on the next read's frame, or goes alone.
        assert_eq!(look(&session, &mut worker, true, rested), "news");
    }
    for mut answer in answers {
        assert!(answer.try_recv().unwrap().is_ok());
    }
    let beat = session.beat(Track::Ops).concat().into();
    worker.receive(beat).unwrap();
    assert!(worker.outbox().is_empty());
    assert_eq!(look(&session, &mut worker, true, true), "nothing");
}

//! All-reduces and transfers in a session's op stream. The test itself is the other rank.

use tensord_proto::{
    codec::encode_type,
    collective_op::{AllReduce, CollectiveOp},
};

use super::*;
use crate::collective::{
    AllReduceCall, Arrival, Capability, Members, Offer, ReceivedValue, Take, Value,
};

/// The session on the lease's second device.
#[derive(Default)]
struct OtherRank(Mutex<Vec<(u64, Outcome)>>);

impl Member for OtherRank {
    fn deliver(self: Arc<Self>, ticket: u64, outcome: Outcome) {
        lock(&self.0).push((ticket, outcome));
    }
}

impl OtherRank {
    fn enter(harness: &SessionHarness) -> Arc<Self> {
        let other = Arc::new(Self::default());
        let member: Weak<dyn Member> = Arc::downgrade(&other) as _;
        assert!(harness.session.cohort.enter(1, member));
        other
    }

    fn call(&self, harness: &SessionHarness, ticket: u64, values: &[f32]) {
        let cohort = &harness.session.cohort;
        let call = AllReduceCall {
            members: Members::new(vec![0, 1], cohort.lease_members()).unwrap(),
            ticket,
            arrival: Arrival {
                shape: Shape::new([values.len()]),
                dtype: DType::F32,
                mean: false,
                fault: None,
                ring_bytes: None,
            },
            bytes: bytes_of(values),
        };
        cohort.call(1, vec![call]);
    }

    fn take_outcomes(&self) -> Vec<(u64, Result<Bytes, String>)> {
        let take_outcomes = std::mem::take(&mut *lock(&self.0));
        let bytes = |(ticket, outcome): (u64, Outcome)| {
            let bytes = outcome.map_err(|failure| format!("{failure:?}"));
            let bytes = bytes.map(|arrived| match arrived {
                ReceivedValue::Reduced(bytes) => bytes,
                ReceivedValue::Taken(value) => value.bytes,
            });
            (ticket, bytes)
        };
        take_outcomes.into_iter().map(bytes).collect()
    }
}

fn all_reduce(input: TensorIr, out: u64, lease_ranks: &[u32]) -> OperationIr {
    let op = CollectiveOp::AllReduce(AllReduce {
        tensor: input,
        out: tensor(out, TensorStatus::NotInit),
        mean: false,
        lease_ranks: lease_ranks.to_vec(),
    });
    op.into()
}

fn sync() -> OperationIr {
    CollectiveOp::Sync.into()
}

fn used(id: u64) -> TensorIr {
    tensor(id, TensorStatus::ReadWrite)
}

fn kept(id: u64) -> TensorIr {
    tensor(id, TensorStatus::ReadOnly)
}

#[test]
fn only_ops_that_need_a_result_wait_for_it() {
    let mut harness = SessionHarness::new();
    let other = OtherRank::enter(&harness);
    harness.upload(1, &[1.0, 2.0]);
    harness.upload(2, &[5.0, 5.0]);
    harness.ops(&[all_reduce(used(1), 3, &[0, 1]), sync()]);
    harness.read(1, &kept(2));
    harness.read(2, &kept(3));
    harness.read(3, &kept(2));
    harness.sync(4, false);
    harness.ops(&[add(2, 2, 4), add(3, 2, 5), add(2, 4, 6)]);
    harness.read(5, &used(6));
    harness.read(6, &kept(5));
    harness.run_all();
    let five = Ok(vec![5.0, 5.0]);
    let mut values = vec![(1, five.clone()), (3, five), (5, Ok(vec![15.0, 15.0]))];
    assert_eq!(harness.values(), values);
    assert!(
        !harness
            .replies
            .iter()
            .any(|body| matches!(body, Body::Synced(_)))
    );
    other.call(&harness, 7, &[10.0, 20.0]);
    harness.run_all();
    values.extend([(2, Ok(vec![11.0, 22.0])), (6, Ok(vec![16.0, 27.0]))]);
    assert_eq!(harness.values(), values);
    assert!(
        harness
            .replies
            .iter()
            .any(|body| matches!(body, Body::Synced(_)))
    );
    assert_eq!(other.take_outcomes(), [(7, Ok(bytes_of(&[11.0, 22.0])))]);
    assert_eq!(
        harness.memory.live_bytes(),
        4 * PAIR,
        "inputs are gone with their last use"
    );
}

#[test]
fn deferred_ops_keep_their_inputs_and_order() {
    let mut harness = SessionHarness::new();
    let other = OtherRank::enter(&harness);
    harness.upload(1, &[1.0, 2.0]);
    harness.upload(2, &[5.0, 5.0]);
    harness.ops(&[
        all_reduce(used(1), 3, &[0, 1]),
        // Deferred; the tensors that it uses must not be dropped before it runs.
        add(3, 2, 4),
        OperationIr::Drop(used(2)),
        OperationIr::Drop(used(3)),
        add(4, 4, 5),
        OperationIr::Drop(used(4)),
        random(6),
    ]);
    harness.read(1, &used(5));
    harness.read(2, &kept(6));
    harness.run_all();
    let random = harness.values();
    assert_eq!(
        random.len(),
        1,
        "the random op waits for nothing: {random:?}"
    );
    other.call(&harness, 7, &[10.0, 20.0]);
    harness.run_all();
    assert_eq!(harness.values()[1], (1, Ok(vec![32.0, 54.0])));
    assert_eq!(harness.memory.live_bytes(), PAIR, "the random tensor alone");
}

#[test]
fn long_queue_of_deferred_ops_resumes_in_order() {
    let mut harness = SessionHarness::new();
    let other = OtherRank::enter(&harness);
    harness.upload(1, &[1.0, 2.0]);
    let calls = 50;
    let mut ops = Vec::new();
    for call in 0..calls {
        // 10 ops per round, which depend on the round before.
        let base = 1 + 10 * call;
        ops.push(all_reduce(used(base), base + 1, &[0, 1]));
        ops.extend((1..10).map(|i| {
            let op = NumericOperationIr::Sub(BinaryOpIr {
                lhs: kept(base + i),
                rhs: used(base + i),
                out: tensor(base + i + 1, TensorStatus::NotInit),
            });
            match i {
                1 => add(base + i, base + i, base + i + 1),
                9 => OperationIr::NumericFloat(DType::F32, op),
                _ => add(base + i, base + i, base + i + 1),
            }
        }));
    }
    harness.ops(&ops);
    harness.sync(9, false);
    harness.read(1, &kept(1 + 10 * calls));
    for call in 0..calls {
        harness.run_all();
        assert_eq!(harness.values(), []);
        other.call(&harness, call, &[call as f32, 1.0]);
    }
    harness.run_all();
    assert_eq!(harness.values(), [(1, Ok(vec![0.0, 0.0]))]);
    let take_outcomes = other.take_outcomes();
    let sum = |call: u64| match call {
        0 => bytes_of(&[1.0, 3.0]),
        call => bytes_of(&[call as f32, 1.0]),
    };
    let expected: Vec<_> = (0..calls).map(|call| (call, Ok(sum(call)))).collect();
    assert_eq!(take_outcomes, expected);
    let synced = |body: &&Body| matches!(body, Body::Synced(_));
    assert_eq!(harness.replies.iter().filter(synced).count(), 1);
}

#[test]
fn ranks_may_join_groups_in_different_orders() {
    let mut harness = SessionHarness::new();
    let other = OtherRank::enter(&harness);
    harness.upload(1, &[1.0, 2.0]);
    // An all-reduce of a group of one between two of another group, with ops that use the
    // results.
    harness.ops(&[
        all_reduce(kept(1), 2, &[0, 1]),
        add(2, 2, 3),
        all_reduce(kept(3), 4, &[0, 1]),
        all_reduce(kept(1), 5, &[0]),
        add(5, 5, 6),
    ]);
    harness.read(1, &kept(6));
    harness.read(2, &kept(4));
    harness.run_all();
    assert_eq!(harness.values(), [(1, Ok(vec![2.0, 4.0]))]);
    other.call(&harness, 1, &[0.0, 0.0]);
    harness.run_all();
    other.call(&harness, 2, &[1.0, 1.0]);
    harness.run_all();
    assert_eq!(harness.values()[1], (2, Ok(vec![3.0, 5.0])));
}

#[test]
fn all_reduce_begins_as_soon_as_its_input_is_ready() {
    let mut harness = SessionHarness::new();
    let other = OtherRank::enter(&harness);
    harness.upload(1, &[1.0, 2.0]);
    // This upload waits for a payload that has not arrived.
    harness.upload_from(2, Content::Payload { keep: None });
    harness.ops(&[
        add(1, 2, 3),
        all_reduce(used(1), 4, &[0, 1]),
        all_reduce(kept(3), 5, &[0, 1]),
    ]);
    other.call(&harness, 1, &[10.0, 20.0]);
    other.call(&harness, 2, &[0.0, 0.0]);
    harness.run_all();
    assert_eq!(other.take_outcomes(), [(1, Ok(bytes_of(&[11.0, 22.0])))]);
    chunks(bytes_of(&[3.0, 4.0])).for_each(|chunk| harness.bulk.push(Body::Chunk(chunk)));
    harness.deliver_bulk();
    harness.read(1, &kept(4));
    harness.read(2, &kept(5));
    harness.run_all();
    assert_eq!(other.take_outcomes(), [(2, Ok(bytes_of(&[4.0, 6.0])))]);
    let values = [(1, Ok(vec![11.0, 22.0])), (2, Ok(vec![4.0, 6.0]))];
    assert_eq!(harness.values(), values);
}

#[test]
fn result_dropped_in_flight_leaves_no_state() {
    let mut harness = SessionHarness::new();
    let other = OtherRank::enter(&harness);
    harness.upload(1, &[1.0, 2.0]);
    harness.ops(&[all_reduce(used(1), 2, &[0, 1]), OperationIr::Drop(used(2))]);
    harness.run_all();
    assert_eq!(harness.memory.live_bytes(), 0);
    other.call(&harness, 1, &[0.0, 0.0]);
    harness.read(1, &kept(2));
    harness.run_all();
    let [(1, Err(reason))] = &harness.values()[..] else {
        panic!("{:?}", harness.values());
    };
    assert!(
        reason.contains("never created or has been dropped"),
        "{reason}"
    );
}

#[test]
fn refused_all_reduce_is_in_flight_until_the_other_ranks_have_reached_it() {
    let mut harness = SessionHarness::new();
    let other = OtherRank::enter(&harness);
    harness.upload(1, &[1.0, 2.0]);
    harness.upload(2, &[5.0, 5.0]);
    // Its output exists.
    harness.ops(&[all_reduce(kept(1), 2, &[0, 1])]);
    harness.sync(4, false);
    harness.run_all();
    let is_synced = |harness: &SessionHarness| {
        let mut replies = harness.replies.iter();
        replies.any(|body| matches!(body, Body::Synced(_)))
    };
    assert!(
        !is_synced(&harness),
        "it counts against the limit of results in flight"
    );
    other.call(&harness, 7, &[1.0, 1.0]);
    harness.run_all();
    assert!(is_synced(&harness));
    assert_eq!(other.take_outcomes(), [(7, Ok(bytes_of(&[2.0, 3.0])))]);
}

#[test]
fn invalid_group_faults_only_its_op() {
    let mut harness = SessionHarness::new();
    let other = OtherRank::enter(&harness);
    harness.upload(1, &[1.0, 2.0]);
    harness.ops(&[
        all_reduce(kept(1), 2, &[0, 1, 1]),
        all_reduce(kept(1), 3, &[1]),
        all_reduce(kept(1), 4, &[0, 9]),
        all_reduce(kept(1), 5, &[0]),
        all_reduce(kept(1), 6, &[0, 1]),
    ]);
    (2..7).for_each(|id| harness.read(id, &kept(id)));
    other.call(&harness, 1, &[1.0, 1.0]);
    harness.run_all();
    let values = harness.values();
    let wrong = [
        "ranks 1 and 2 of the group are both device 1 of worker bench",
        "the tensor is on device 0 of worker bench, which is not in the group",
        "the group includes device 9 of the lease, which has 2 devices",
    ];
    for ((_, value), words) in values.iter().zip(wrong) {
        let reason = value.as_ref().unwrap_err();
        assert!(reason.contains(words), "{reason}");
    }
    assert_eq!(values[3].1, Ok(vec![1.0, 2.0]), "a group of one");
    assert_eq!(values[4].1, Ok(vec![2.0, 3.0]));
}

#[test]
fn missing_input_is_reported_to_all_ranks() {
    let mut harness = SessionHarness::new();
    let other = OtherRank::enter(&harness);
    harness.ops(&[all_reduce(kept(1), 2, &[0, 1]), sync()]);
    other.call(&harness, 1, &[1.0, 1.0]);
    harness.read(1, &kept(2));
    harness.run_all();
    let [(1, Err(reason))] = &other.take_outcomes()[..] else {
        panic!("it has no value");
    };
    assert!(reason.contains("tensor 1 was never created"), "{reason}");
    let reason = harness.values()[0].1.clone().unwrap_err();
    assert!(reason.contains("tensor 1 was never created"), "{reason}");
}

#[test]
fn ended_session_fails_pending_peers() {
    let mut harness = SessionHarness::new();
    let other = OtherRank::enter(&harness);
    harness.upload(1, &[1.0, 2.0]);
    harness.run_all();
    other.call(&harness, 1, &[1.0, 1.0]);
    harness.client.push(Body::Close(v1::Close {}));
    harness.run_all();
    let [(1, Err(reason))] = &other.take_outcomes()[..] else {
        panic!("nobody brings the other part");
    };
    let words = "the session of rank 0 (device 0 of worker bench) has ended";
    assert!(reason.contains(words), "{reason}");
    assert_eq!(harness.memory.live_bytes(), 0);
}

#[test]
fn tensor_is_transferred_by_offer_and_take() {
    const KEY: Capability = [3; 16];
    let mut harness = SessionHarness::new();
    let other = OtherRank::enter(&harness);
    harness.upload(1, &[1.0, 2.0]);
    harness.client.push(Body::Offer(v1::Offer {
        tensor: encode_tensor(&used(1)),
        capability: KEY.to_vec().into(),
        to: 1,
    }));
    harness.run_all();
    assert_eq!(harness.memory.live_bytes(), 8, "the offer holds its place");
    let take = Take {
        from: 0,
        to: 1,
        ticket: Some(4),
        size: 8,
    };
    harness.session.cohort.take(KEY, take);
    assert_eq!(other.take_outcomes(), [(4, Ok(bytes_of(&[1.0, 2.0])))]);
    assert_eq!(harness.memory.live_bytes(), 0);

    let kind = encode_type(&Shape::new([2]), DType::F32);
    harness.client.push(Body::Take(v1::Take {
        tensor_id: 2,
        r#type: Some(kind),
        capability: KEY.to_vec().into(),
        from: 1,
    }));
    harness.encoder.note_tensor(TensorId::new(2));
    harness.read(1, &kept(2));
    harness.run_all();
    assert_eq!(harness.values(), [], "it waits for the offer");
    let value = Value {
        shape: Shape::new([2]),
        dtype: DType::F32,
        bytes: bytes_of(&[7.0, 8.0]),
    };
    let offer = Offer {
        from: 1,
        to: 0,
        value: Ok(value),
        _memory: None,
    };
    harness.session.cohort.offer(KEY, offer);
    harness.run_all();
    assert_eq!(harness.values(), [(1, Ok(vec![7.0, 8.0]))]);
}

#[test]
fn value_without_room_does_not_stay_with_the_session_that_offers_it() {
    const KEY: Capability = [4; 16];
    let mut harness = SessionHarness::new();
    let _other = OtherRank::enter(&harness);
    let kind = encode_type(&Shape::new([1 << 29]), DType::F32);
    harness.client.push(Body::Take(v1::Take {
        tensor_id: 1,
        r#type: Some(kind),
        capability: KEY.to_vec().into(),
        from: 1,
    }));
    harness.encoder.note_tensor(TensorId::new(1));
    harness.read(1, &kept(1));
    harness.run_all();
    let [(1, Err(reason))] = &harness.values()[..] else {
        panic!("{:?}", harness.values());
    };
    assert!(reason.contains("needs more memory"), "{reason}");
    let before = harness.memory.live_bytes();
    let mut memory = harness.memory.open();
    memory.take(8).unwrap();
    let value = Value {
        shape: Shape::new([2]),
        dtype: DType::F32,
        bytes: bytes_of(&[7.0, 8.0]),
    };
    let offer = Offer {
        from: 1,
        to: 0,
        value: Ok(value),
        _memory: Some(memory),
    };
    harness.session.cohort.offer(KEY, offer);
    assert_eq!(harness.memory.live_bytes(), before);
}

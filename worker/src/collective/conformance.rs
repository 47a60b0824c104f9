//! Checks the laws of [`Algorithm`] for one implementation: simulates the workers of a
//! group, whose messages are delivered in random order.

mod world;

use std::{sync::Arc, time::Duration};

use burn_backend::{DType, Shape};
use burn_std::{bf16, f16};
use bytes::Bytes;
use proptest::{prelude::*, test_runner::TestRunner};
use tensord_proto::v1::{Fault, FaultKind, PieceKind};

use self::world::{Sum, World};
use super::algorithm::{Algorithm, Arrival, Failure, Piece, Rank};

/// Makes an algorithm's state machine for one worker.
pub(super) type Make = fn(Vec<Rank>, usize) -> Box<dyn Algorithm>;

/// Checks all laws.
pub(super) fn run(make: Make) {
    all_ranks_get_the_sum_in_a_fixed_order(make);
    sum_does_not_depend_on_the_number_of_the_call(make);
    half_types_are_rounded_once(make);
    minimum_of_bytes_is_sent(make);
    small_tensors_share_messages(make);
    mismatch_fails_one_call_and_names_both_ranks(make);
    integers_and_missing_values_fail_on_all_ranks(make);
    missing_rank_is_named_to_all(make);
    stalled_worker_is_named(make);
    waiting_ranks_are_not_blamed(make);
    rule_violations_are_reported(make);
}

/// Every rank gets the same bits, in whatever order ranks arrive and messages are
/// delivered, and whatever the workers have measured of their links: the sum in the order
/// of the workers, starting at one of them.
fn all_ranks_get_the_sum_in_a_fixed_order(make: Make) {
    let sizes = prop_oneof![0usize..40, 1000usize..3000];
    let worlds = (
        prop::collection::vec(0usize..4, 1..6),
        prop::collection::vec(sizes, 1..6),
        prop::collection::vec((any::<u16>(), any::<u16>()), 0..400),
    );
    let config = ProptestConfig::with_cases(128);
    let mut runner = TestRunner::new(config);
    let ran = runner.run(&worlds, |(worker_of_rank, sizes, turns)| {
        let bits = |done: Vec<(u64, Sum)>| {
            let sums = done.into_iter().map(|(_, sum)| sum.unwrap());
            let bits = sums.map(|sum| sum.into_iter().map(f32::to_bits).collect());
            bits.collect::<Vec<Vec<u32>>>()
        };
        let in_turn = bits(run_in_order(make, worker_of_rank.clone(), &sizes, &[]));
        prop_assert_eq!(
            bits(run_in_order(make, worker_of_rank, &sizes, &turns)),
            in_turn
        );
        Ok(())
    });
    ran.unwrap();
}

/// A process that goes on from a snapshot numbers its calls from 0 again.
fn sum_does_not_depend_on_the_number_of_the_call(make: Make) {
    for size in [1, 37, 3000] {
        let mut world = World::new(make, &[0, 1, 2, 0]);
        for call in 0..4 {
            for rank in 0..4 {
                let values: Vec<f32> = (0..size).map(|i| value(rank, 0, i)).collect();
                world.arrive(rank, call, &values);
            }
        }
        world.deliver_all();
        let sums = world.done[0].iter().map(|(_, sum)| sum.clone().unwrap());
        let sums: Vec<_> = sums.collect();
        assert!(sums.len() == 4 && sums.iter().all(|sum| *sum == sums[0]));
    }
}

/// Runs a world in which `turns` decide the order of events. Returns the results of the
/// first rank.
fn run_in_order(
    make: Make,
    mut worker_of_rank: Vec<usize>,
    sizes: &[usize],
    turns: &[(u16, u16)],
) -> Vec<(u64, Sum)> {
    // Workers are numbered by their first ranks.
    let mut order: Vec<usize> = Vec::new();
    for worker_index in &mut worker_of_rank {
        let at = order.iter().position(|n| n == worker_index);
        *worker_index = at.unwrap_or_else(|| {
            order.push(*worker_index);
            order.len() - 1
        });
    }
    let ranks = worker_of_rank.len();
    let mut world = World::new(make, &worker_of_rank);
    let mut next = vec![0; ranks];
    let mut arrive = |world: &mut World, rank: usize| {
        let call = next[rank];
        if call < sizes.len() {
            let values: Vec<f32> = (0..sizes[call]).map(|i| value(rank, call, i)).collect();
            world.arrive(rank, call as u64, &values);
            next[rank] += 1;
        }
    };
    let pairs = world.pairs();
    for (what, actor) in turns {
        match what % 4 {
            3 => {
                let group = *actor as usize % world.groups.len();
                let ring_bytes = [None, Some(0), Some(900)][(what / 4) as usize % 3];
                world.groups[group].set_ring_bytes(ring_bytes);
            }
            0 => arrive(&mut world, *actor as usize % ranks),
            _ if pairs.is_empty() => {}
            _ => {
                let (from, to) = pairs[*actor as usize % pairs.len()];
                world.deliver(from, to);
            }
        }
    }
    for rank in (0..ranks).flat_map(|rank| vec![rank; sizes.len()]) {
        arrive(&mut world, rank);
    }
    world.deliver_all();

    check_sums(&world, sizes);
    world.done.into_iter().next().unwrap_or_default()
}

/// Returns element `i` of the tensor of `rank` in a call.
fn value(rank: usize, call: usize, i: usize) -> f32 {
    ((rank * 7919 + call * 104_729 + i * 31) % 1000) as f32 * 1.1e-3 + 1e3 * rank as f32
}

/// Checks that all ranks got the same sums of calls of these sizes, in some fixed order.
fn check_sums(world: &World, sizes: &[usize]) {
    let workers = world.groups.len();
    for (call, size) in sizes.iter().enumerate() {
        let part = |worker_index: usize, i: usize| {
            let here = (0..world.worker_of_rank.len())
                .filter(|rank| world.worker_of_rank[*rank] == worker_index);
            here.map(|rank| value(rank, call, i)).reduce(|a, b| a + b)
        };
        let sum_from = |first: usize, i: usize| {
            let order = (0..workers).map(|offset| (first + offset) % workers);
            let parts = order.map(|worker_index| part(worker_index, i).expect("each has ranks"));
            parts.reduce(|a, b| a + b).expect("there are some")
        };
        let result = &world.done[0][call];
        for done in &world.done {
            assert_eq!(done.len(), sizes.len());
            assert_eq!(&done[call], result);
        }
        let (_, Ok(sums)) = result else {
            panic!("{result:?}");
        };
        assert_eq!((result.0, sums.len()), (call as u64, *size));
        for (i, sum) in sums.iter().enumerate() {
            assert!(
                (0..workers).any(|first| sum_from(first, i) == *sum),
                "{sum}"
            );
        }
    }
}

fn half_types_are_rounded_once(make: Make) {
    // f16 has no 2049 and bf16 no 257: rounded at each step, the sum would not change.
    let f16s = [2048.0, 1.0, 1.0].map(|v| f16::from_f32(v).to_le_bytes());
    let bf16s = [256.0, 1.0, 1.0].map(|v| bf16::from_f32(v).to_le_bytes());
    let sums = [
        f16::from_f32(2050.0).to_le_bytes(),
        bf16::from_f32(258.0).to_le_bytes(),
    ];
    for ((dtype, values), sum) in [(DType::F16, f16s), (DType::BF16, bf16s)]
        .into_iter()
        .zip(sums)
    {
        let mut world = World::new(make, &[0, 1, 2]);
        for (rank, value) in values.into_iter().enumerate() {
            let arrival = Arrival {
                shape: Shape::new([1]),
                dtype,
                mean: false,
                fault: None,
                ring_bytes: None,
            };
            let bytes = Bytes::copy_from_slice(&value);
            world.groups[rank].arrive(rank, 1, arrival, bytes, world.now);
        }
        while world
            .pairs()
            .into_iter()
            .any(|(from, to)| world.deliver(from, to))
        {}
        for group in &mut world.groups {
            let done = group.take_done();
            assert_eq!(done[0].result.as_deref(), Ok(&sum[..]));
        }
    }
}

fn minimum_of_bytes_is_sent(make: Make) {
    for workers in [2, 3, 4, 8] {
        let worker_of_rank: Vec<usize> = (0..workers).collect();
        let mut world = World::new(make, &worker_of_rank);
        let size = 4 * 30_000;
        for rank in worker_of_rank {
            world.arrive(rank, 1, &vec![1.0; size / 4]);
        }
        world.deliver_all();
        let least = 2 * (workers - 1) * size / workers;
        for sent in &world.sent {
            assert!(sent.abs_diff(least) <= 2 * 4 * workers, "{sent} {least}");
        }
        assert_eq!(world.done[0][0].1, Ok(vec![workers as f32; size / 4]));
    }
}

fn small_tensors_share_messages(make: Make) {
    let mut world = World::new(make, &[0, 1]);
    for call in 0..100 {
        world.arrive(0, call, &[1.0; 10]);
        world.arrive(1, call, &[2.0; 10]);
    }
    let mut messages = 0;
    while world
        .pairs()
        .into_iter()
        .any(|(from, to)| world.deliver(from, to))
    {
        messages += 1;
    }
    world.collect();
    assert_eq!(world.done[1].len(), 100);
    assert!(
        messages <= 10,
        "{messages} messages for 100 small all-reduces"
    );
}

fn mismatch_fails_one_call_and_names_both_ranks(make: Make) {
    let mut world = World::new(make, &[0, 1, 2]);
    for rank in 0..3 {
        world.arrive(rank, 1, &vec![1.0; if rank == 1 { 2000 } else { 3000 }]);
        world.arrive(rank, 2, &[rank as f32; 1500]);
    }
    world.deliver_all();
    let expected = "rank 0 (device 0 of worker w0) contributes [3000] of f32 for the sum, \
                    but rank 1 (device 0 of worker w1) contributes [2000] of f32 for the sum";
    let Failure::New(FaultKind::Mismatch, reason) = world.failure(1) else {
        panic!("{:?}", world.failure(1));
    };
    assert_eq!(reason, expected);
    for done in &world.done {
        assert_eq!(done[1], (2, Ok(vec![3.0; 1500])));
    }
}

fn integers_and_missing_values_fail_on_all_ranks(make: Make) {
    let mut world = World::new(make, &[0, 0, 1]);
    let arrival = |dtype, fault| Arrival {
        shape: Shape::new([1]),
        dtype,
        mean: true,
        fault,
        ring_bytes: None,
    };
    let fault = Arc::new(Fault {
        reason: "out of memory".into(),
        ..Fault::default()
    });
    for rank in 0..3 {
        world.arrive_as(rank, 1, arrival(DType::I32, None), &[1.0]);
        let fault = (rank == 2).then(|| fault.clone());
        world.arrive_as(rank, 2, arrival(DType::F32, fault), &[1.0]);
        world.arrive(rank, 3, &[1.0]);
    }
    world.deliver_all();
    let Failure::New(FaultKind::Mismatch, reason) = world.failure(1) else {
        panic!("{:?}", world.failure(1));
    };
    assert!(
        reason.contains("ranks 0 to 2 contribute [1] of i32"),
        "{reason}"
    );
    assert_eq!(world.failure(2), Failure::Inherited(fault));
    assert_eq!(world.done[1][2], (3, Ok(vec![3.0])));
}

fn missing_rank_is_named_to_all(make: Make) {
    let deadline = Duration::from_secs(30);
    let mut world = World::new(make, &[0, 0, 1, 2]);
    world.arrive(0, 1, &[1.0]);
    world.arrive(2, 1, &[1.0]);
    world.now += Duration::from_secs(10);
    world.arrive(3, 1, &[1.0]);
    world.deliver_all();
    let (now, third) = (world.now, 2);
    world.groups[third].tick(now + deadline - Duration::from_secs(1), deadline, &[]);
    assert!(!world.groups[third].has_message(0));
    world.groups[third].tick(now + deadline, deadline, &[]);
    world.deliver_all();
    let expected = "rank 1 (device 0 of worker w0) did not reach all-reduce 1 of the group \
                    within 30s";
    for rank in [0, 2, 3] {
        let failure = Failure::New(FaultKind::Peer, expected.into());
        assert_eq!(world.done[rank], [(1, Err(failure))]);
    }
    // The late rank, and every later call, fails with the same message.
    world.arrive(1, 1, &[1.0]);
    world.deliver_all();
    assert_eq!(world.done[1][0].1, world.done[0][0].1);
}

fn stalled_worker_is_named(make: Make) {
    let deadline = Duration::from_secs(3);
    let mut world = World::new(make, &[0, 1, 2]);
    for rank in 0..3 {
        world.arrive(rank, 1, &[1.0; 9000]);
    }
    // Worker 1 receives everything and announces its arrival, but sends nothing more.
    for _ in 0..50 {
        for (from, to) in [(0, 1), (2, 1), (0, 2), (2, 0)] {
            world.deliver(from, to);
        }
    }
    world.deliver(1, 0);
    world.deliver(1, 2);
    while [(0, 2), (2, 0)]
        .into_iter()
        .any(|(from, to)| world.deliver(from, to))
    {}
    world.groups[0].tick(world.now + deadline, deadline, &[1]);
    let done = world.groups[0].take_done();
    let Err(Failure::New(FaultKind::Peer, reason)) = &done[0].result else {
        panic!("{done:?}");
    };
    let expected = "rank 1 (device 0 of worker w1) sent no data of all-reduce 1";
    assert!(reason.starts_with(expected), "{reason}");
}

fn waiting_ranks_are_not_blamed(make: Make) {
    let deadline = Duration::from_secs(3);
    let mut world = World::new(make, &[0, 1, 2]);
    for rank in 0..3 {
        // A small tensor: worker 0 reduces the first one alone and lacks worker 1's part.
        world.arrive(rank, 1, &[1.0; 4]);
    }
    // Worker 1 announces that its rank has arrived, but sends nothing more.
    world.deliver(1, 0);
    world.deliver(1, 2);
    let live = [(0, 1), (0, 2), (2, 0), (2, 1)];
    while live.into_iter().any(|(from, to)| world.deliver(from, to)) {}
    // Rank 2 is ahead: rank 0 has not reached this call.
    world.arrive(2, 2, &[1.0; 4]);
    let overdue = world.now + deadline;
    world.groups[2].tick(overdue, deadline, &[]);
    assert!(world.groups[2].take_done().is_empty(), "it must wait");
    world.groups[0].tick(overdue, deadline, &[1]);
    while live.into_iter().any(|(from, to)| world.deliver(from, to)) {}
    world.collect();
    for rank in [0, 2] {
        let Some((1, Err(Failure::New(FaultKind::Peer, reason)))) = world.done[rank].first() else {
            panic!("{:?}", world.done[rank]);
        };
        let expected = "rank 1 (device 0 of worker w1) sent no data of all-reduce 1";
        assert!(reason.starts_with(expected), "{reason}");
    }
}

fn rule_violations_are_reported(make: Make) {
    let mut world = World::new(make, &[0, 1]);
    world.arrive(0, 1, &[1.0; 2]);
    let arrival = Arrival {
        shape: Shape::new([2]),
        dtype: DType::F32,
        mean: false,
        fault: None,
        ring_bytes: None,
    };
    let (group, now) = (&mut world.groups[0], world.now);
    for rank in [0, 2] {
        let broke = group.on_arrival(1, rank, arrival.clone(), now).unwrap_err();
        assert!(broke.to_string().contains("announced rank"), "{broke}");
    }
    let piece = |bytes| Piece {
        kind: PieceKind::Part,
        bytes: Bytes::from_static(bytes),
    };
    assert_eq!(group.piece(1, piece(&[0; 8]), now), Ok(()));
    let broke = group.piece(1, piece(&[0; 1]), now);
    assert!(
        broke
            .unwrap_err()
            .to_string()
            .contains("more bytes than the open calls have")
    );
}

use burn_backend::{DType, Shape};

use super::{super::conformance, *};

fn rank(worker_index: usize) -> Rank {
    Rank {
        worker_index,
        description: String::new(),
    }
}

#[test]
fn direct_algorithm_conforms() {
    conformance::run(|ranks, me| Box::new(Sliced::new(ranks, me)));
}

#[test]
fn ring_algorithm_conforms() {
    conformance::run(|ranks, me| {
        let mut group = Sliced::new(ranks, me);
        group.set_ring_bytes(Some(0));
        Box::new(group)
    });
}

#[test]
fn all_workers_choose_the_same_algorithm() {
    let agreed = |element, ring_bytes| Agreed {
        element,
        size: 6000,
        mean: false,
        ring_bytes,
    };
    let f32 = |ring_bytes| agreed(Element::F32, ring_bytes);
    assert_eq!(route(&f32(Some(2000)), 3), Route::Ring);
    assert_eq!(route(&f32(Some(2001)), 3), Route::Direct);
    assert_eq!(route(&f32(None), 3), Route::Direct);
    assert_eq!(route(&f32(Some(0)), 2), Route::Direct);
    assert_eq!(route(&f32(Some(0)), 1), Route::Local);
    assert_eq!(route(&agreed(Element::Bf16, Some(0)), 3), Route::Direct);
    let uncut = Agreed {
        size: 3000,
        ..f32(Some(0))
    };
    assert_eq!(route(&uncut, 3), Route::Direct);
}

#[test]
fn ring_accepts_data_from_the_predecessor_only() {
    let mut group = Sliced::new((0..3).map(rank).collect(), 0);
    let piece = |bytes: &'static [u8]| Piece {
        kind: PieceKind::Ring,
        bytes: Bytes::from_static(bytes),
    };
    let now = Instant::now();
    let arrival = Arrival {
        shape: Shape::new([1]),
        dtype: DType::F32,
        mean: false,
        fault: None,
        ring_bytes: None,
    };
    group.arrive(0, 1, arrival, Bytes::from_static(&[0; 4]), now);
    assert_eq!(group.piece(2, piece(&[0; 4]), now), Ok(()));
    let broke = group.piece(1, piece(&[0; 4]), now).unwrap_err().to_string();
    assert!(broke.contains("but worker 2 is before it in"), "{broke}");
    let broke = group.piece(2, piece(&[]), now).unwrap_err().to_string();
    assert!(broke.contains("a piece without bytes"), "{broke}");
}

#[test]
fn finished_calls_leave_no_state() {
    let mut group = Sliced::new(vec![rank(0), rank(0)], 0);
    let arrival = |size| Arrival {
        shape: Shape::new([size]),
        dtype: DType::F32,
        mean: false,
        fault: None,
        ring_bytes: None,
    };
    let now = Instant::now();
    for call in 0..3 {
        for rank in 0..2 {
            // The second call is a mismatch.
            let size = if call == 1 { 1 + rank } else { 1 };
            let bytes = vec![0; 4 * size].into();
            group.arrive(rank, call, arrival(size), bytes, now);
        }
    }
    assert_eq!(group.take_done().len(), 6);
    assert!(group.calls.front().is_none());
    assert_eq!((group.calls.open_bytes(), group.calls.first()), (0, 3));
}

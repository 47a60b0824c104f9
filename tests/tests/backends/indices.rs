//! Indices and slices far out of bounds, and uninitialised memory.
//!
//! A kernel that trusted such an index would read or write the device memory around the
//! tensor.

use burn_backend::{DType, Slice, tensor::IndexingUpdateOp};
use burn_ir::{
    BaseOperationIr as Op, Conv2dOpIr, Conv2dOptionsIr, CreationOpIr, EmbeddingOpIr, GatherNdOpIr,
    GatherOpIr, ModuleOperationIr, OperationIr, RepeatDimOpIr, ScatterNdOpIr, ScatterOpIr,
    SelectAssignOpIr, SelectOpIr, ShapeOpIr, SliceAssignOpIr, SliceOpIr, TensorIr,
};
use tensord_testkit::{
    host,
    raw::{self, ClientStream, RawSession, Target},
};

/// Rows and columns of the indexed tensor.
const ROWS: usize = 4;
const COLUMNS: usize = 3;

/// Indices before, inside and beyond any axis here, near and far.
const INDICES: [i32; 8] = [0, 2, -1, 4, 1 << 10, 1 << 20, i32::MIN, i32::MAX];

/// The value in the tensors around the indexed one, which no result may contain.
const SECRET: f32 = 7777.0;
const PADDING_ELEMENTS: usize = 1 << 12;

/// Runs `attack` on a leased device of each available kind.
fn on_each_kind(attack: impl AsyncFn(&Target)) {
    for kind in host::kinds() {
        let mut cluster = host::cluster(&[]);
        cluster.add_worker(&format!("{kind}:0"));
        cluster.wait_for_workers(1);
        raw::block(async {
            let mut attached = ClientStream::to(cluster.client_url()).await.unwrap();
            let target = attached.lease(1).await.unwrap().remove(0);
            attack(&target).await;
        });
    }
}

fn ints(session: &mut RawSession, shape: &[usize], values: &[i32]) -> TensorIr {
    let id = session.new_id();
    let bytes = values.iter().flat_map(|value| value.to_le_bytes());
    session.upload_as(raw::typed(id, shape, DType::I32), bytes.collect())
}

fn floats(session: &mut RawSession, shape: &[usize], values: &[f32]) -> TensorIr {
    let id = session.new_id();
    session.upload_as(raw::tensor(id, shape), raw::bytes_of(values))
}

/// Uploads the indexed tensor, which holds 0, 1, 2 and so on, between two that hold the
/// secret.
fn table(session: &mut RawSession) -> [TensorIr; 3] {
    let values: Vec<_> = (0u8..).map(f32::from).take(ROWS * COLUMNS).collect();
    let around = [SECRET; PADDING_ELEMENTS];
    [
        floats(session, &[PADDING_ELEMENTS], &around),
        floats(session, &[ROWS, COLUMNS], &values),
        floats(session, &[PADDING_ELEMENTS], &around),
    ]
}

/// Runs the op that `make` builds for an output, and reads that output.
async fn run(
    session: &mut RawSession,
    shape: &[usize],
    make: impl FnOnce(TensorIr) -> OperationIr,
) -> Vec<f32> {
    let id = session.new_id();
    session.ops(&[make(raw::out(id, shape))]);
    let read = session.fetch(&raw::tensor(id, shape)).await.unwrap();
    raw::floats(&read.unwrap())
}

fn clamped(index: i32, dim: usize) -> usize {
    usize::try_from(index).unwrap_or(0).min(dim - 1)
}

/// Returns the table's values at the given rows and columns.
fn at(places: impl IntoIterator<Item = (usize, usize)>) -> Vec<f32> {
    let places = places.into_iter();
    let values = places.map(|(row, column)| u8::try_from(row * COLUMNS + column).unwrap());
    values.map(f32::from).collect()
}

#[test]
fn out_of_bounds_indices_read_no_other_memory() {
    on_each_kind(async |target| {
        let session = &mut RawSession::open(target).await.unwrap();
        let [_before, tensor, _after] = table(session);
        let places = INDICES.len();
        let rows = INDICES.map(|index| clamped(index, ROWS));
        let whole_rows = at(rows
            .iter()
            .flat_map(|&row| (0..COLUMNS).map(move |c| (row, c))));

        let indices = ints(session, &[places], &INDICES);
        let (of, dim) = (tensor.clone(), 0);
        let op = |out| {
            Op::Select(SelectOpIr {
                tensor: of,
                dim,
                indices,
                out,
            })
        };
        let found = run(session, &[places, COLUMNS], |out| {
            OperationIr::BaseFloat(op(out))
        })
        .await;
        assert_eq!(found, whole_rows, "select");

        let indices = ints(session, &[1, places], &INDICES);
        let weights = tensor.clone();
        let op = |out| EmbeddingOpIr {
            weights,
            indices,
            out,
        };
        let op = |out| OperationIr::Module(ModuleOperationIr::Embedding(op(out)));
        let found = run(session, &[1, places, COLUMNS], op).await;
        assert_eq!(found, whole_rows, "embedding");

        let each: Vec<_> = INDICES.iter().flat_map(|index| [*index; COLUMNS]).collect();
        let indices = ints(session, &[places, COLUMNS], &each);
        let (of, dim) = (tensor.clone(), 0);
        let op = |out| {
            Op::Gather(GatherOpIr {
                tensor: of,
                dim,
                indices,
                out,
            })
        };
        let found = run(session, &[places, COLUMNS], |out| {
            OperationIr::BaseFloat(op(out))
        })
        .await;
        assert_eq!(found, whole_rows, "gather");

        let tuples: Vec<_> = INDICES.iter().flat_map(|index| [*index; 2]).collect();
        let indices = ints(session, &[places, 2], &tuples);
        let data = tensor.clone();
        let op = |out| Op::GatherNd(GatherNdOpIr { data, indices, out });
        let found = run(session, &[places], |out| OperationIr::BaseFloat(op(out))).await;
        let expected = INDICES.map(|index| (clamped(index, ROWS), clamped(index, COLUMNS)));
        assert_eq!(found, at(expected), "gather_nd");
    });
}

#[test]
fn out_of_bounds_indices_change_no_other_memory() {
    on_each_kind(async |target| {
        let session = &mut RawSession::open(target).await.unwrap();
        let [before, tensor, after] = table(session);
        let (places, dim, update) = (INDICES.len(), 0, IndexingUpdateOp::Add);
        let mut added = at((0..ROWS * COLUMNS).map(|i| (i / COLUMNS, i % COLUMNS)));
        for index in INDICES {
            let row = clamped(index, ROWS) * COLUMNS;
            added[row..row + COLUMNS]
                .iter_mut()
                .for_each(|sum| *sum += 1.0);
        }
        let ones = vec![1.0; places * COLUMNS];
        let value = floats(session, &[places, COLUMNS], &ones);
        let shape = [ROWS, COLUMNS];

        let each: Vec<_> = INDICES.iter().flat_map(|index| [*index; COLUMNS]).collect();
        let indices = ints(session, &[places, COLUMNS], &each);
        let (of, ones) = (tensor.clone(), value.clone());
        let op = |out| {
            let (tensor, value) = (of, ones);
            Op::Scatter(ScatterOpIr {
                tensor,
                dim,
                indices,
                value,
                update,
                out,
            })
        };
        let found = run(session, &shape, |out| OperationIr::BaseFloat(op(out))).await;
        assert_eq!(found, added, "scatter");

        let indices = ints(session, &[places], &INDICES);
        let (of, ones) = (tensor.clone(), value.clone());
        let op = |out| {
            let (tensor, value) = (of, ones);
            Op::SelectAssign(SelectAssignOpIr {
                tensor,
                dim,
                indices,
                value,
                update,
                out,
            })
        };
        let found = run(session, &shape, |out| OperationIr::BaseFloat(op(out))).await;
        assert_eq!(found, added, "select_assign");

        check_scatter_nd(session, tensor, update).await;

        for around in [before, after] {
            let read = session.fetch(&around).await.unwrap();
            assert_eq!(raw::floats(&read.unwrap()), [SECRET; PADDING_ELEMENTS]);
        }
    });
}

#[test]
fn slices_change_no_other_memory() {
    on_each_kind(async |target| {
        let session = &mut RawSession::open(target).await.unwrap();
        let [before, tensor, after] = table(session);
        let all = |column| (0..ROWS).map(move |row| row * COLUMNS + column);
        let range = |start, end, step| Slice { start, end, step };
        let whole = range(isize::MIN, Some(isize::MAX), 1);
        // The last row, the last column, every other row from the last one, one row by a far step, and nothing.
        let slices = [
            ([range(-1, None, 1), whole], vec![9, 10, 11]),
            (
                [whole, range(-1, Some(COLUMNS as isize), 1)],
                all(2).collect(),
            ),
            ([range(-9, None, -2), range(0, Some(1), 1)], vec![9, 3]),
            ([range(-2, None, 1 << 40), whole], vec![6, 7, 8]),
            ([range(3, Some(1), 1), whole], vec![]),
        ];
        for (ranges, places) in slices {
            let value: Vec<_> = (100u8..).map(f32::from).take(places.len()).collect();
            let mut expected = at((0..ROWS * COLUMNS).map(|i| (i / COLUMNS, i % COLUMNS)));
            for (place, value) in places.iter().zip(&value) {
                expected[*place] = *value;
            }
            let part = [ROWS, COLUMNS].iter().zip(&ranges);
            let part: Vec<_> = part.map(|(dim, range)| range.output_size(*dim)).collect();
            let value = floats(session, &part, &value);
            let of = tensor.clone();
            let op = |out| {
                let (tensor, ranges) = (of, ranges.to_vec());
                OperationIr::BaseFloat(Op::SliceAssign(SliceAssignOpIr {
                    tensor,
                    ranges,
                    value,
                    out,
                }))
            };
            let found = run(session, &[ROWS, COLUMNS], op).await;
            assert_eq!(found, expected, "{ranges:?}");
            let of = tensor.clone();
            let op = |out| {
                let (tensor, ranges) = (of, ranges.to_vec());
                OperationIr::BaseFloat(Op::Slice(SliceOpIr {
                    tensor,
                    ranges,
                    out,
                }))
            };
            let found = run(session, &part, op).await;
            assert_eq!(found, at(places.iter().map(|i| (i / COLUMNS, i % COLUMNS))));
        }
        for around in [before, after] {
            let read = session.fetch(&around).await.unwrap();
            assert_eq!(raw::floats(&read.unwrap()), [SECRET; PADDING_ELEMENTS]);
        }
    });
}

/// A view whose elements are all the same one: a kernel that takes it for a row of elements reads what comes after it.
#[test]
fn expanded_bias_is_the_same_for_all_channels() {
    const CHANNELS: usize = 512;
    on_each_kind(async |target| {
        let session = &mut RawSession::open(target).await.unwrap();
        let [_before, _tensor, _after] = table(session);
        for (groups, is_repeated) in [(1, false), (2, false), (2, true)] {
            let one = floats(session, &[1], &[1.0]);
            let bias = session.new_id();
            let out = raw::out(bias, &[CHANNELS]);
            let expanded = match is_repeated {
                false => Op::Expand(ShapeOpIr { input: one, out }),
                true => Op::RepeatDim(RepeatDimOpIr {
                    tensor: one,
                    dim: 0,
                    times: CHANNELS,
                    out,
                }),
            };
            session.ops(&[OperationIr::BaseFloat(expanded)]);
            let x = floats(session, &[1, groups, 1, 1], &vec![0.0; groups]);
            let weight = floats(session, &[CHANNELS, 1, 1, 1], &[1.0; CHANNELS]);
            let conv = |out| {
                OperationIr::Module(ModuleOperationIr::Conv2d(Conv2dOpIr {
                    x,
                    weight,
                    bias: Some(raw::tensor(bias, &[CHANNELS])),
                    options: Conv2dOptionsIr {
                        stride: [1, 1],
                        padding: [(0, 0); 2],
                        dilation: [1, 1],
                        groups,
                    },
                    out,
                }))
            };
            let found = run(session, &[1, CHANNELS, 1, 1], conv).await;
            assert_eq!(found, [1.0; CHANNELS], "{groups} groups, {is_repeated}");
        }
    });
}

async fn check_scatter_nd(session: &mut RawSession, tensor: TensorIr, update: IndexingUpdateOp) {
    // Two updates of one row would race, so each row has one.
    let indices = ints(session, &[2, 1], &[i32::MIN, i32::MAX]);
    let values = floats(session, &[2, COLUMNS], &[1.0; 2 * COLUMNS]);
    let (data, reduction) = (tensor, update);
    let op = |out| {
        Op::ScatterNd(ScatterNdOpIr {
            data,
            indices,
            values,
            reduction,
            out,
        })
    };
    let found = run(session, &[ROWS, COLUMNS], |out| {
        OperationIr::BaseFloat(op(out))
    })
    .await;
    let mut ends = at((0..ROWS * COLUMNS).map(|i| (i / COLUMNS, i % COLUMNS)));
    ends[..COLUMNS].iter_mut().for_each(|sum| *sum += 1.0);
    ends[(ROWS - 1) * COLUMNS..]
        .iter_mut()
        .for_each(|sum| *sum += 1.0);
    assert_eq!(found, ends, "scatter_nd");
}

#[test]
fn uninitialized_memory_is_zero() {
    on_each_kind(async |target| {
        let empty = |out| OperationIr::BaseFloat(Op::Empty(CreationOpIr { out }));
        let mut first = RawSession::open(target).await.unwrap();
        for _ in 0..4 {
            let secret = floats(&mut first, &[PADDING_ELEMENTS], &[SECRET; PADDING_ELEMENTS]);
            let read = first.fetch(&raw::last(&secret)).await.unwrap();
            assert_eq!(raw::floats(&read.unwrap()), [SECRET; PADDING_ELEMENTS]);
        }
        // First memory that this session has released, then memory that it released when it
        // ended.
        let found = run(&mut first, &[PADDING_ELEMENTS], empty).await;
        assert_eq!(found, [0.0; PADDING_ELEMENTS]);
        drop(first);
        let mut second = RawSession::open(target).await.unwrap();
        let found = run(&mut second, &[PADDING_ELEMENTS], empty).await;
        assert_eq!(found, [0.0; PADDING_ELEMENTS]);
    });
}

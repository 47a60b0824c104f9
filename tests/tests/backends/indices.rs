//! Indices far out of bounds, and uninitialised memory.
//!
//! A kernel that trusted such an index would read or write the device memory around the
//! tensor.

use burn_backend::{DType, tensor::IndexingUpdateOp};
use burn_ir::{
    BaseOperationIr as Op, CreationOpIr, EmbeddingOpIr, GatherNdOpIr, GatherOpIr,
    ModuleOperationIr, OperationIr, ScatterNdOpIr, ScatterOpIr, SelectAssignOpIr, SelectOpIr,
    TensorIr,
};
use tensord_tests::{
    host,
    raw::{self, Attached, RawSession, Target},
};

/// Rows and columns of the indexed tensor.
const ROWS: usize = 4;
const COLUMNS: usize = 3;

/// Indices before, inside and beyond any axis here, near and far.
const PLACES: [i32; 8] = [0, 2, -1, 4, 1 << 10, 1 << 20, i32::MIN, i32::MAX];

/// The value in the tensors around the indexed one, which no result may contain.
const SECRET: f32 = 7777.0;
const AROUND: usize = 1 << 12;

/// Runs `attack` on a leased device of each available kind.
fn on_each_kind(attack: impl AsyncFn(&Target)) {
    for kind in host::kinds() {
        let mut cluster = host::cluster(&[]);
        cluster.add_worker(&format!("{kind}:0"));
        cluster.wait_for_workers(1);
        raw::block(async {
            let mut attached = Attached::to(cluster.client_url()).await.unwrap();
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
    let around = [SECRET; AROUND];
    [
        floats(session, &[AROUND], &around),
        floats(session, &[ROWS, COLUMNS], &values),
        floats(session, &[AROUND], &around),
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

fn within(place: i32, dim: usize) -> usize {
    usize::try_from(place).unwrap_or(0).min(dim - 1)
}

/// Returns the table's values at the given rows and columns.
fn at(places: impl IntoIterator<Item = (usize, usize)>) -> Vec<f32> {
    let places = places.into_iter();
    let values = places.map(|(row, column)| u8::try_from(row * COLUMNS + column).unwrap());
    values.map(f32::from).collect()
}

#[test]
fn nothing_beside_a_tensor_is_read_by_an_index() {
    on_each_kind(async |target| {
        let session = &mut RawSession::open(target).await.unwrap();
        let [_before, tensor, _after] = table(session);
        let places = PLACES.len();
        let rows = PLACES.map(|place| within(place, ROWS));
        let whole_rows = at(rows
            .iter()
            .flat_map(|&row| (0..COLUMNS).map(move |c| (row, c))));

        let indices = ints(session, &[places], &PLACES);
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

        let indices = ints(session, &[1, places], &PLACES);
        let weights = tensor.clone();
        let op = |out| EmbeddingOpIr {
            weights,
            indices,
            out,
        };
        let op = |out| OperationIr::Module(ModuleOperationIr::Embedding(op(out)));
        let found = run(session, &[1, places, COLUMNS], op).await;
        assert_eq!(found, whole_rows, "embedding");

        let each: Vec<_> = PLACES.iter().flat_map(|place| [*place; COLUMNS]).collect();
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

        let tuples: Vec<_> = PLACES.iter().flat_map(|place| [*place; 2]).collect();
        let indices = ints(session, &[places, 2], &tuples);
        let data = tensor.clone();
        let op = |out| Op::GatherNd(GatherNdOpIr { data, indices, out });
        let found = run(session, &[places], |out| OperationIr::BaseFloat(op(out))).await;
        let expected = PLACES.map(|place| (within(place, ROWS), within(place, COLUMNS)));
        assert_eq!(found, at(expected), "gather_nd");
    });
}

#[test]
fn nothing_beside_a_tensor_is_changed_by_an_index() {
    on_each_kind(async |target| {
        let session = &mut RawSession::open(target).await.unwrap();
        let [before, tensor, after] = table(session);
        let (places, dim, update) = (PLACES.len(), 0, IndexingUpdateOp::Add);
        let mut added = at((0..ROWS * COLUMNS).map(|i| (i / COLUMNS, i % COLUMNS)));
        for place in PLACES {
            let row = within(place, ROWS) * COLUMNS;
            added[row..row + COLUMNS]
                .iter_mut()
                .for_each(|sum| *sum += 1.0);
        }
        let ones = vec![1.0; places * COLUMNS];
        let value = floats(session, &[places, COLUMNS], &ones);
        let shape = [ROWS, COLUMNS];

        let each: Vec<_> = PLACES.iter().flat_map(|place| [*place; COLUMNS]).collect();
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

        let indices = ints(session, &[places], &PLACES);
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

        // Two updates of one row would race, so each row has one.
        let indices = ints(session, &[2, 1], &[i32::MIN, i32::MAX]);
        let values = floats(session, &[2, COLUMNS], &[1.0; 2 * COLUMNS]);
        let (data, reduction) = (tensor.clone(), update);
        let op = |out| {
            Op::ScatterNd(ScatterNdOpIr {
                data,
                indices,
                values,
                reduction,
                out,
            })
        };
        let found = run(session, &shape, |out| OperationIr::BaseFloat(op(out))).await;
        let mut ends = at((0..ROWS * COLUMNS).map(|i| (i / COLUMNS, i % COLUMNS)));
        ends[..COLUMNS].iter_mut().for_each(|sum| *sum += 1.0);
        ends[(ROWS - 1) * COLUMNS..]
            .iter_mut()
            .for_each(|sum| *sum += 1.0);
        assert_eq!(found, ends, "scatter_nd");

        for around in [before, after] {
            let read = session.fetch(&around).await.unwrap();
            assert_eq!(raw::floats(&read.unwrap()), [SECRET; AROUND]);
        }
    });
}

#[test]
fn memory_that_nobody_filled_is_zero() {
    on_each_kind(async |target| {
        let empty = |out| OperationIr::BaseFloat(Op::Empty(CreationOpIr { out }));
        let mut first = RawSession::open(target).await.unwrap();
        for _ in 0..4 {
            let secret = floats(&mut first, &[AROUND], &[SECRET; AROUND]);
            let read = first.fetch(&raw::last(&secret)).await.unwrap();
            assert_eq!(raw::floats(&read.unwrap()), [SECRET; AROUND]);
        }
        // First memory that this session has released, then memory that it released when it
        // ended.
        let found = run(&mut first, &[AROUND], empty).await;
        assert_eq!(found, [0.0; AROUND]);
        drop(first);
        let mut second = RawSession::open(target).await.unwrap();
        let found = run(&mut second, &[AROUND], empty).await;
        assert_eq!(found, [0.0; AROUND]);
    });
}

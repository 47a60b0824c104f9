//! Reads that complete later, as on GPUs.

use burn_backend::{ExecutionError, TensorData};
use burn_flex::{Flex, FlexDevice};
use burn_std::future::DynFut;
use tensord_proto::codec::DeviceProfile;
use tokio::sync::oneshot;

use super::*;
use crate::{
    backend::{BurnDevice, StorageInfo, TensorStore},
    custom::CustomOps,
};

/// A device that executes nothing, and completes a read when the test signals it.
#[derive(Default)]
struct Slow(Arc<Mutex<VecDeque<oneshot::Sender<()>>>>);

impl Device for Slow {
    fn open(&self) -> Box<dyn TensorStore> {
        Box::new(Self(self.0.clone()))
    }

    fn profile(&self) -> DeviceProfile {
        BurnDevice::<Flex>::shared(FlexDevice, &CustomOps::new()).profile()
    }

    fn reserved_bytes(&self) -> Option<u64> {
        None
    }
}

impl TensorStore for Slow {
    fn lacks(&self, _custom_op: &str) -> Option<String> {
        None
    }

    fn execute(&mut self, _op: Box<OperationIr>) {}

    fn execute_seeded(&mut self, _op: Box<OperationIr>, _seed: u64) {}

    fn upload(&mut self, _id: TensorId, _data: TensorData) {}

    fn alias(&mut self, _id: TensorId, _source: TensorId) {}

    fn read(&mut self, _tensor: TensorIr) -> DynFut<Result<TensorData, ExecutionError>> {
        let (done, wait) = oneshot::channel();
        lock(&self.0).push_back(done);
        Box::pin(async {
            // An error means that the test has ended.
            let _ = wait.await;
            Ok(TensorData::from([1.0f32, 2.0]))
        })
    }

    fn forget(&mut self, _tensor: TensorIr) {}

    fn sync(&mut self) -> Result<(), ExecutionError> {
        Ok(())
    }

    fn is_at_hand(&mut self, _tensor: &TensorIr) -> bool {
        false
    }

    fn is_in_host_memory(&self) -> bool {
        false
    }

    fn storage(&mut self, _tensor: &TensorIr) -> Option<StorageInfo> {
        None
    }
}

/// Makes a tensor of `elements` and reads it `reads` times. Returns the bench and the
/// senders that complete the reads.
pub(super) fn asked(
    elements: usize,
    reads: u64,
) -> (Bench, Arc<Mutex<VecDeque<oneshot::Sender<()>>>>) {
    let device = Slow::default();
    let waiting = device.0.clone();
    let mut bench = Bench::on(Arc::new(device), BlobStore::new(0), Arc::default());
    let shape = Shape::new([elements]);
    let full = burn_ir::FullOpIr {
        out: TensorIr::uninit(TensorId::new(1), shape.clone(), DType::F32),
        value: burn_ir::ScalarIr::Float(1.0),
    };
    let full = NumericOperationIr::Full(full);
    bench.ops(&[OperationIr::NumericFloat(DType::F32, full)]);
    let tensor = TensorIr {
        shape,
        ..tensor(1, TensorStatus::ReadOnly)
    };
    (0..reads).for_each(|request| bench.read(request, &tensor));
    bench.all();
    (bench, waiting)
}

/// Completes the next `values` reads, and runs the session.
pub(super) fn give(
    bench: &mut Bench,
    waiting: &Mutex<VecDeque<oneshot::Sender<()>>>,
    values: usize,
) {
    for _ in 0..values {
        let done = lock(waiting).pop_front().expect("a read waits");
        done.send(()).expect("the session waits for it");
    }
    bench.settle();
    bench.all();
}

#[test]
fn bytes_of_reads_in_flight_are_bounded() {
    let (mut bench, waiting) = asked(4 << 20, 10);
    assert_eq!(lock(&waiting).len(), 4, "16 MiB each, of 64");
    give(&mut bench, &waiting, 1);
    assert_eq!((bench.values().len(), lock(&waiting).len()), (1, 4));
    while !lock(&waiting).is_empty() {
        give(&mut bench, &waiting, 1);
    }
    assert_eq!(bench.values().len(), 10);
}

#[test]
fn one_read_may_be_of_any_size() {
    let (mut bench, waiting) = asked(32 << 20, 3);
    for _ in 0..3 {
        assert_eq!(lock(&waiting).len(), 1);
        give(&mut bench, &waiting, 1);
    }
    assert_eq!(bench.values().len(), 3);
}

#[test]
fn reads_in_flight_are_bounded_by_number() {
    let (mut bench, waiting) = asked(2, 1500);
    assert_eq!(lock(&waiting).len(), MAX_LATER);
    give(&mut bench, &waiting, 1000);
    assert_eq!(lock(&waiting).len(), 500);
    give(&mut bench, &waiting, 500);
    assert_eq!(bench.values().len(), 1500);
}

#[test]
fn a_session_that_ends_waits_for_no_read() {
    let (mut bench, waiting) = asked(4 << 20, 10);
    bench
        .session
        .end(Error::new(ErrorCode::Lease, "the lease ended"));
    bench.all();
    assert!(bench.session.has_ended());
    assert_eq!(bench.memory.live_bytes(), 0);
    give(&mut bench, &waiting, 4);
    assert_eq!(bench.values(), []);
}

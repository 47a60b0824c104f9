//! Reads that complete later, as on GPUs.

use std::collections::VecDeque;

use burn_backend::{ExecutionError, TensorData};
use burn_std::future::DynFut;
use tensord_backend::{
    CustomOps, DeferredValues, StorageInfo, StoredTensor, TensorStore, flex_device,
};
use tensord_proto::codec::{DeviceProfile, encode_tensor};
use tokio::sync::oneshot;

use super::{
    super::{peer_requests::MAX_QUEUED_REQUESTS, work_queue::MAX_READS_IN_FLIGHT},
    *,
};

/// A device that executes nothing, and completes a read when the test signals it.
#[derive(Default)]
struct SlowDevice(Arc<Mutex<VecDeque<oneshot::Sender<()>>>>);

impl Device for SlowDevice {
    fn open(&self) -> Box<dyn TensorStore> {
        Box::new(Self(self.0.clone()))
    }

    fn profile(&self) -> DeviceProfile {
        flex_device(&CustomOps::new()).profile()
    }

    fn reserved_bytes(&self) -> Option<u64> {
        None
    }
}

impl TensorStore for SlowDevice {
    fn custom_op_error(&self, _custom_op: &str) -> Option<String> {
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

    fn is_host_readable(&mut self, _tensor: &TensorIr) -> bool {
        false
    }

    fn is_in_host_memory(&self) -> bool {
        false
    }

    fn storage(&mut self, _tensor: &TensorIr) -> Option<StorageInfo> {
        None
    }

    fn stored(&mut self, _: Vec<TensorIr>, _: u64) -> Result<DeferredValues, String> {
        Err("not in this test".into())
    }

    fn restore(&mut self, _: Vec<(TensorId, StoredTensor)>) -> Result<(), String> {
        Err("not in this test".into())
    }
}

/// Makes a tensor of `elements` and reads it `reads` times. Returns the bench and the
/// senders that complete the reads.
pub(super) fn start_reads(
    elements: usize,
    reads: u64,
) -> (SessionHarness, Arc<Mutex<VecDeque<oneshot::Sender<()>>>>) {
    let device = SlowDevice::default();
    let waiting = device.0.clone();
    let mut harness =
        SessionHarness::on_device(Arc::new(device), BlobStore::new(0), Arc::default());
    let shape = Shape::new([elements]);
    let full = burn_ir::FullOpIr {
        out: TensorIr::uninit(TensorId::new(1), shape.clone(), DType::F32),
        value: burn_ir::ScalarIr::Float(1.0),
    };
    let full = NumericOperationIr::Full(full);
    harness.ops(&[OperationIr::NumericFloat(DType::F32, full)]);
    let tensor = TensorIr {
        shape,
        ..tensor(1, TensorStatus::ReadOnly)
    };
    (0..reads).for_each(|request| harness.read(request, &tensor));
    harness.run_all();
    (harness, waiting)
}

/// Completes the next `values` reads, and runs the session.
pub(super) fn complete_reads(
    harness: &mut SessionHarness,
    waiting: &Mutex<VecDeque<oneshot::Sender<()>>>,
    values: usize,
) {
    for _ in 0..values {
        let done = lock(waiting).pop_front().expect("a read waits");
        done.send(()).expect("the session waits for it");
    }
    harness.settle();
    harness.run_all();
}

#[test]
fn bytes_of_reads_in_flight_are_bounded() {
    let (mut harness, waiting) = start_reads(4 << 20, 10);
    assert_eq!(lock(&waiting).len(), 4, "16 MiB each, of 64");
    complete_reads(&mut harness, &waiting, 1);
    assert_eq!((harness.values().len(), lock(&waiting).len()), (1, 4));
    while !lock(&waiting).is_empty() {
        complete_reads(&mut harness, &waiting, 1);
    }
    assert_eq!(harness.values().len(), 10);
}

#[test]
fn single_read_may_exceed_the_byte_limit() {
    let (mut harness, waiting) = start_reads(32 << 20, 3);
    for _ in 0..3 {
        assert_eq!(lock(&waiting).len(), 1);
        complete_reads(&mut harness, &waiting, 1);
    }
    assert_eq!(harness.values().len(), 3);
}

#[test]
fn reads_in_flight_are_bounded_by_number() {
    let (mut harness, waiting) = start_reads(2, 1500);
    assert_eq!(lock(&waiting).len(), MAX_READS_IN_FLIGHT);
    complete_reads(&mut harness, &waiting, 1000);
    assert_eq!(lock(&waiting).len(), 500);
    complete_reads(&mut harness, &waiting, 500);
    assert_eq!(harness.values().len(), 1500);
}

#[test]
fn ending_session_does_not_wait_for_reads() {
    let (mut harness, waiting) = start_reads(4 << 20, 10);
    harness
        .session
        .end(Error::new(ErrorCode::Lease, "the lease ended"));
    harness.run_all();
    assert!(harness.session.has_ended());
    assert_eq!(harness.memory.live_bytes(), 0);
    complete_reads(&mut harness, &waiting, 4);
    assert_eq!(harness.values(), []);
}

#[test]
fn offers_behind_a_slow_read_are_bounded() {
    let offer = |id: u64, elements: usize, key: u64| {
        let mut capability = [0; 16];
        capability[..8].copy_from_slice(&key.to_le_bytes());
        let tensor = TensorIr {
            shape: Shape::new([elements]),
            ..tensor(id, TensorStatus::ReadOnly)
        };
        Body::Offer(v1::Offer {
            tensor: encode_tensor(&tensor),
            capability: capability.to_vec().into(),
            to: 1,
        })
    };
    let (mut harness, waiting) = start_reads(2, 0);
    harness.client.push(offer(1, 2, 0));
    // Offers of a tensor that does not exist: a fault each, and no memory of the device.
    for key in 1..=MAX_QUEUED_REQUESTS as u64 + 500 {
        harness.client.push(offer(9, 2, key));
    }
    harness.run_all();
    assert_eq!(lock(&waiting).len(), 1, "the first value is being read");
    let queued = harness.session.peer_requests.len();
    assert_eq!(
        queued, MAX_QUEUED_REQUESTS,
        "the session pauses at the limit"
    );
    complete_reads(&mut harness, &waiting, 1);
    assert_eq!(
        harness.session.peer_requests.len(),
        0,
        "the session went on"
    );
}

/// Delivers the client's confirmation of all replies.
#[cfg(target_os = "linux")]
fn confirm(harness: &mut SessionHarness) {
    let (ping, connection) = (harness.client.ping(), harness.connection);
    harness
        .session
        .receive(Track::Ops, connection, ping)
        .unwrap();
}

#[cfg(target_os = "linux")]
#[test]
fn session_is_busy_until_nothing_is_left_to_do() {
    let (mut harness, waiting) = start_reads(2, 1);
    assert!(!harness.session.is_idle(), "the device is reading a value");
    complete_reads(&mut harness, &waiting, 1);
    assert!(!harness.session.is_idle(), "the value may be on its way");
    confirm(&mut harness);
    assert!(harness.session.is_idle());
    let steps = harness.session.steps();
    harness.ops(&[add(1, 1, 2)]);
    harness.deliver(usize::MAX).unwrap();
    assert!(!harness.session.is_idle(), "an op is queued");
    harness.run_all();
    assert!(harness.session.is_idle() && harness.session.steps() > steps);
    harness.upload_from(3, Content::Payload { keep: None });
    harness.run_all();
    assert!(!harness.session.is_idle(), "the bytes are missing");
}

//! Tests with a real executor and a device that the test breaks and repairs.

use std::time::Duration;

use burn_backend::{ExecutionError, TensorData};
use burn_ir::{OperationIr, TensorId, TensorIr};
use burn_std::future::DynFut;
use tensord_backend::{
    CustomOps, DeferredValues, StorageInfo, StoredTensor, TensorStore, flex_device,
};

use super::*;
use crate::{
    blobs::BlobStore, memory::DeviceMemory, op_progress::Signals, session::KeptLimits,
    usage::Meters,
};

const LEASE: LeaseId = LeaseId(7);

/// The behaviour of a device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Mode {
    #[default]
    Right,
    /// Returns a wrong result.
    Wrong,
    /// Returns an error, as if its context had died.
    Dead,
    Panics,
}

#[derive(Clone, Default)]
struct FlakyDevice(Arc<Mutex<Mode>>);

impl Device for FlakyDevice {
    fn open(&self) -> Box<dyn TensorStore> {
        Box::new(self.clone())
    }

    fn profile(&self) -> DeviceProfile {
        flex().profile()
    }

    fn reserved_bytes(&self) -> Option<u64> {
        None
    }
}

impl TensorStore for FlakyDevice {
    fn custom_op_error(&self, _custom_op: &str) -> Option<String> {
        None
    }

    fn execute(&mut self, _op: Box<OperationIr>) {
        assert_ne!(*lock(&self.0), Mode::Panics, "the driver is gone");
    }

    fn execute_seeded(&mut self, _op: Box<OperationIr>, _seed: u64) {}

    fn upload(&mut self, _id: TensorId, _data: TensorData) {}

    fn alias(&mut self, _id: TensorId, _source: TensorId) {}

    fn read(&mut self, _tensor: TensorIr) -> DynFut<Result<TensorData, ExecutionError>> {
        let mode = *lock(&self.0);
        Box::pin(async move {
            match mode {
                Mode::Wrong => Ok(TensorData::from([5.0f32, 10.0, 18.0])),
                Mode::Dead => {
                    let reason = "the context has died".into();
                    Err(ExecutionError::WithContext { reason })
                }
                Mode::Right | Mode::Panics => Ok(TensorData::from([5.0f32, 10.0, 19.0])),
            }
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

fn flex() -> Arc<dyn Device> {
    flex_device(&CustomOps::new())
}

fn device_slot(device: Arc<dyn Device>) -> DeviceSlot {
    let executor = Executor::start(0, Default::default()).unwrap();
    let limit = Duration::from_secs(60);
    let memory = DeviceMemory::new(1 << 20);
    let device_context = DeviceContext {
        device,
        meters: Meters::new(&memory),
        memory,
        queue: executor.queue().clone(),
        signals: Signals::new("w".into(), limit, Arc::default()),
        runtime: Handle::current(),
        blobs: BlobStore::new(0),
        kept_limits: KeptLimits {
            new: 0,
            restored: 0,
        },
        snapshots: None,
    };
    DeviceSlot::new(3, executor, device_context)
}

/// Checks the device at `now` until it is released from a lease or goes out of or into
/// service. Returns the released leases.
async fn wait_for_change(device_slot: &DeviceSlot, now: Instant) -> Vec<LeaseId> {
    let until = Instant::now() + Duration::from_secs(20);
    while Instant::now() < until {
        let outcome = device_slot.check(now, &[]);
        if outcome.has_changed || !outcome.released.is_empty() {
            return outcome.released;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    panic!("nothing comes of the test op");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flex_passes_the_probe_and_is_released() {
    let device_slot = device_slot(flex());
    device_slot.open(LEASE).unwrap();
    device_slot.end_lease(LEASE, false);
    assert!(device_slot.is_ending(LEASE));
    assert_eq!(wait_for_change(&device_slot, Instant::now()).await, [LEASE]);
    assert!(!device_slot.is_ending(LEASE) && device_slot.out_of_service().is_none());
    assert_eq!(device_slot.device_context.memory.live_bytes(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_device_is_out_of_service_until_a_probe_passes() {
    let cases = [
        (Mode::Wrong, "gave"),
        (Mode::Dead, "the context has died"),
        (Mode::Panics, "the driver is gone"),
    ];
    for (mode, words) in cases {
        let device = FlakyDevice::default();
        let device_slot = device_slot(Arc::new(device.clone()));
        let now = Instant::now();
        device_slot.open(LEASE).unwrap();
        *lock(&device.0) = mode;
        device_slot.end_lease(LEASE, false);
        assert_eq!(wait_for_change(&device_slot, now).await, []);
        let reason = device_slot.out_of_service().expect("it is out of service");
        assert!(reason.contains(words), "{mode:?}: {reason}");
        assert_eq!(
            device_slot.open(LeaseId(8)).map(drop),
            Err(format!(
                "device 3 of this worker is out of service: {reason}"
            ))
        );
        assert!(device_slot.is_ending(LEASE), "{mode:?}: it is not released");
        *lock(&device.0) = Mode::Right;
        let later = now + Duration::from_secs(10);
        assert_eq!(wait_for_change(&device_slot, later).await, [LEASE]);
        assert_eq!(device_slot.out_of_service(), None);
        device_slot.open(LeaseId(8)).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn backend_failure_during_a_lease_is_detected() {
    let device = FlakyDevice::default();
    let device_slot = device_slot(Arc::new(device.clone()));
    device_slot.open(LEASE).unwrap();
    *lock(&device.0) = Mode::Dead;
    device_slot.device_context.signals.record_failure();
    assert_eq!(wait_for_change(&device_slot, Instant::now()).await, []);
    assert!(device_slot.out_of_service().is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_executor_thread_takes_over_queued_jobs() {
    let device_slot = device_slot(flex());
    let (begin, begun) = std::sync::mpsc::channel();
    let (block, blocked) = std::sync::mpsc::channel::<()>();
    let (done, is_done) = std::sync::mpsc::channel();
    let queue = &device_slot.device_context.queue;
    queue.push_task(Box::new(move || {
        begin.send(()).unwrap();
        // An error ends the wait too: the test has dropped the sender.
        let _ = blocked.recv();
    }));
    // A thread that retires before it has begun a task would end at once.
    begun.recv_timeout(Duration::from_secs(20)).unwrap();
    device_slot.executor.retire();
    queue.push_task(Box::new(move || done.send(()).unwrap()));
    assert!(device_slot.executor.has_thread());
    drop(block);
    let until = Instant::now() + Duration::from_secs(20);
    while device_slot.executor.has_thread() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(!device_slot.executor.has_thread() && is_done.try_recv().is_err());
    device_slot.executor.restart().unwrap();
    is_done.recv_timeout(Duration::from_secs(20)).unwrap();
}

#[tokio::test]
async fn each_lease_counts_by_itself() {
    let device_slot = device_slot(flex());
    let first = device_slot.open(LEASE).unwrap().meters;
    first.lease.add_ops(5);
    assert_eq!(device_slot.ops(), 5);
    let second = device_slot.open(LeaseId(8)).unwrap().meters;
    assert_eq!(
        device_slot.ops(),
        0,
        "those of another lease are not revealed"
    );
    drop(first.begin(Instant::now()));
    second.lease.add_ops(7);
    let now = Instant::now();
    let used = [LEASE, LeaseId(8), LeaseId(9)].map(|lease| device_slot.used_by(lease, now));
    assert_eq!(used.map(|it| it.used.ops), [5, 7, 0]);
    assert_eq!(used[0].used.busy_us, used[0].device_busy_us);
    // A session that opens again goes on with the same meter.
    device_slot.open(LEASE).unwrap();
    assert_eq!(device_slot.ops(), 5);
    for lease in 100..200 {
        device_slot.open(LeaseId(lease)).unwrap();
    }
    assert_eq!(lock(&device_slot.lease_meters).len(), MAX_LEASE_METERS);
}

//! Devices that exceed the op timeout, and sessions that end without waiting for them.

use std::time::Duration;

use burn_backend::{ExecutionError, TensorData};
use burn_std::future::DynFut;
use tensord_backend::{
    CustomOps, DeferredValues, StorageInfo, StoredTensor, TensorStore, flex_device,
};
use tensord_proto::codec::DeviceProfile;

use super::{harness::OP_TIMEOUT, reads_in_flight::start_reads, *};

/// A device whose ops do not return until the test unlocks it.
#[derive(Default)]
struct StuckDevice(Arc<Mutex<()>>);

impl Device for StuckDevice {
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

impl TensorStore for StuckDevice {
    fn custom_op_error(&self, _custom_op: &str) -> Option<String> {
        None
    }

    fn execute(&mut self, _op: Box<OperationIr>) {
        drop(lock(&self.0));
    }

    fn execute_seeded(&mut self, _op: Box<OperationIr>, _seed: u64) {}

    fn upload(&mut self, _id: TensorId, _data: TensorData) {}

    fn alias(&mut self, _id: TensorId, _source: TensorId) {}

    fn read(&mut self, _tensor: TensorIr) -> DynFut<Result<TensorData, ExecutionError>> {
        Box::pin(async { Ok(TensorData::from([1.0f32, 2.0])) })
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

/// Returns the error in the last frame, if that is `Closed`.
fn closed_error(harness: &SessionHarness) -> Option<String> {
    match harness.replies.last() {
        Some(Body::Closed(closed)) => closed.error.as_ref().map(ToString::to_string),
        _ => None,
    }
}

#[test]
fn session_with_a_stuck_op_is_ended() {
    let device = StuckDevice::default();
    let stuck = device.0.clone();
    let mut harness =
        SessionHarness::on_device(Arc::new(device), BlobStore::new(0), Arc::default());
    harness.upload(1, &[1.0, 2.0]);
    harness.run_all();
    // The first add does not return.
    harness.ops(&[add(1, 1, 2), add(1, 1, 3)]);
    harness.read(1, &tensor(3, TensorStatus::ReadOnly));
    let held = lock(&stuck);
    harness.deliver(usize::MAX).unwrap();
    let (session, queue) = (harness.session.clone(), harness.queue.clone());
    let executor = std::thread::spawn(move || {
        let waiting = queue.try_pop().expect("there is work");
        assert_eq!(waiting.run(&mut || true), TimeSliceEnd::Parked);
    });
    let until = Instant::now() + Duration::from_secs(20);
    // `now` advances by the timeout, so a step that the check before saw is overdue.
    let mut now = Instant::now();
    assert_eq!(session.overdue(now), None);
    let overdue = loop {
        assert!(Instant::now() < until, "the op is not overdue");
        std::thread::sleep(Duration::from_millis(20));
        now += OP_TIMEOUT;
        if let Some(overdue) = session.overdue(now) {
            break overdue;
        }
    };
    assert!(
        overdue.starts_with("op 2 (NumericFloat.Add) has not ended within 2s"),
        "{overdue}"
    );
    assert!(session.has_ended() && !session.is_torn_down());
    harness.receive_replies();
    assert!(closed_error(&harness).unwrap().contains(&overdue));
    // Later frames are ignored, and another check has no effect.
    harness.read(2, &tensor(1, TensorStatus::ReadOnly));
    harness.deliver(usize::MAX).unwrap();
    assert!(session.overdue(now + 2 * OP_TIMEOUT).is_some());
    drop(held);
    executor.join().unwrap();
    assert!(session.is_torn_down());
    assert_eq!(session.overdue(now + 9 * OP_TIMEOUT), None);
    assert_eq!(harness.memory.live_bytes(), 0);
    harness.receive_replies();
    assert_eq!(harness.values(), [], "nothing is said after the end");
}

#[test]
fn session_with_an_unanswered_read_is_ended() {
    let (mut harness, waiting) = start_reads(4, 1);
    let over = OP_TIMEOUT + Duration::from_millis(500);
    harness.wait(over);
    let overdue = harness.session.overdue(Instant::now()).unwrap();
    assert!(
        overdue.contains("(Read) has not ended within 2s"),
        "{overdue}"
    );
    harness.run_all();
    assert!(closed_error(&harness).unwrap().contains(&overdue));
    assert!(harness.session.has_ended() && !harness.session.is_torn_down());
    reads_in_flight::complete_reads(&mut harness, &waiting, 1);
    assert!(harness.session.is_torn_down());
    assert_eq!(harness.session.overdue(Instant::now()), None);
    assert_eq!(harness.values(), []);
}

//! Memory that could escape a device's account: aliases, views that outlive their tensors,
//! hundreds of thousands of faults and empty tensors, replies that the client never takes.
//! A worker's resident memory must stay within 8 MiB of the account, and be released when
//! the session has ended.

use std::time::{Duration, Instant};

use burn_ir::{
    BaseOperationIr, Conv1dOptionsIr, Conv1dWeightBackwardOpIr, ModuleOperationIr, OperationIr,
    SliceOpIr, TensorIr,
};
use burn_std::Slice;
use tensord_proto::v1::{self, frame::Body};
use tensord_testkit::{
    cluster::Cluster,
    raw::{self, ClientStream, RawSession},
    resource_usage::{Bound, ResourceUsage},
};

use crate::ops::full;

/// Memory that a session may take in addition to its account, in bytes.
const OVERHEAD_BYTES: u64 = 8 << 20;

/// Memory of the device, in bytes.
const DEVICE_BYTES: u64 = 128 << 20;

/// Elements and bytes of a large tensor. The device holds seven of this size.
const LARGE: usize = 4 << 20;
const LARGE_BYTES: u64 = 4 * LARGE as u64;

/// Number of ops that a session runs before its test.
const WARMUP_OPS: u64 = 4;

fn drop_of(tensor: &TensorIr) -> OperationIr {
    OperationIr::Drop(raw::last(tensor))
}

/// Returns the bytes in the account of the pool's only device, and the number of ops that
/// the device has run.
fn account(cluster: &Cluster) -> (u64, u64) {
    let status = cluster.pool().status().unwrap();
    let device = &status.workers[0].devices[0];
    (device.live_bytes, device.ops_executed)
}

/// A session on a device of its own, and the worker's usage before an attack.
struct AttackFixture {
    cluster: Cluster,
    _attached: ClientStream,
    session: RawSession,
    before: ResourceUsage,
}

impl AttackFixture {
    fn new() -> Self {
        Self::of(DEVICE_BYTES)
    }

    /// Starts a worker whose device has `device_bytes` of memory, and opens a session.
    fn of(device_bytes: u64) -> Self {
        let mut cluster = Cluster::start(&[]);
        let memory = format!("{}MiB", device_bytes >> 20);
        let more = ["--memory", &memory, "--upload-cache", "0"];
        cluster.add_worker_with("flex", &more);
        cluster.wait_for_workers(1);
        let (attached, session) = raw::block(async {
            let mut attached = ClientStream::to(cluster.client_url()).await.unwrap();
            let target = attached.lease(1).await.unwrap().remove(0);
            let mut session = RawSession::open(&target).await.unwrap();
            let warm = session.upload(&[1.0]);
            session.fetch(&warm).await.unwrap().unwrap();
            let made = session.new_id();
            session.ops(&[
                drop_of(&warm),
                full(raw::out(made, &[4])),
                drop_of(&raw::tensor(made, &[4])),
            ]);
            session.sync().await.unwrap();
            (attached, session)
        });
        cluster.workers[0].wait_for_processes(1, 1);
        let before = cluster.workers[0].resource_usage();
        Self {
            cluster,
            _attached: attached,
            session,
            before,
        }
    }

    /// Sends all queued frames and waits until the worker has executed them.
    fn flush_and_sync(&mut self) {
        // A fault of an op that did not fit is expected.
        raw::block(self.session.sync()).unwrap();
    }

    /// Checks that the worker's resident memory grows by at most its account and
    /// `OVERHEAD_BYTES`, and that the account does not exceed the device by more than
    /// `OVERHEAD_BYTES`.
    fn assert_bounded(&self) {
        let worker = &self.cluster.workers[0];
        self.cluster
            .wait("resident memory as the account says", || {
                let (bytes, _) = account(&self.cluster);
                assert!(
                    bytes <= DEVICE_BYTES + OVERHEAD_BYTES,
                    "{bytes} in the account"
                );
                let resident = worker.resource_usage().resident_bytes;
                resident <= self.before.resident_bytes + bytes + OVERHEAD_BYTES
            });
    }

    /// Ends the session and checks that the worker releases all its memory.
    fn end_and_check_released(mut self) {
        raw::block(async {
            self.session.push(Body::Close(v1::Close {}));
            self.session.end().await
        });
        let bound = Bound {
            resident_bytes: 2 * OVERHEAD_BYTES,
            ..Bound::default()
        };
        self.cluster.workers[0].wait_until_settled(&self.before, bound);
        let is_empty = || account(&self.cluster).0 == 0;
        self.cluster.wait("an empty account", is_empty);
    }
}

#[test]
fn aliases_do_not_evade_memory_accounting() {
    let mut scene = AttackFixture::new();
    let session = &mut scene.session;
    for _ in 0..40 {
        let (first, second) = (session.new_id(), session.new_id());
        session.ops(&[full(raw::out(first, &[LARGE]))]);
        let alias = Body::Alias(v1::Alias {
            tensor_id: second,
            source_id: first,
        });
        session.push_made(second, alias);
        session.ops(&[drop_of(&raw::tensor(first, &[LARGE]))]);
    }
    scene.flush_and_sync();
    scene.assert_bounded();
    assert!(
        account(&scene.cluster).0 >= 7 * LARGE_BYTES,
        "what fits is there"
    );
    scene.end_and_check_released();
}

#[test]
fn slice_is_charged_for_the_storage_it_keeps() {
    let mut scene = AttackFixture::new();
    let session = &mut scene.session;
    let mut slices = Vec::new();
    for _ in 0..40 {
        let (whole, slice) = (session.new_id(), session.new_id());
        let op = SliceOpIr {
            tensor: raw::tensor(whole, &[LARGE]),
            ranges: vec![Slice::from(0..1)],
            out: raw::out(slice, &[1]),
        };
        session.ops(&[
            full(raw::out(whole, &[LARGE])),
            OperationIr::BaseFloat(BaseOperationIr::Slice(op)),
            drop_of(&raw::tensor(whole, &[LARGE])),
        ]);
        slices.push(raw::tensor(slice, &[1]));
    }
    scene.flush_and_sync();
    scene.assert_bounded();
    let session = &mut scene.session;
    let first = raw::block(session.fetch(&slices[0])).unwrap().unwrap();
    assert_eq!(raw::floats(&first), [1.0]);
    let fault = raw::block(session.fetch(&slices[39])).unwrap().unwrap_err();
    assert_eq!(fault.kind(), v1::FaultKind::OutOfMemory, "{fault}");
    // Dropping the slices releases their sources.
    let drops: Vec<_> = slices.iter().map(drop_of).collect();
    session.ops(&drops);
    let id = session.new_id();
    session.ops(&[full(raw::out(id, &[LARGE]))]);
    scene.flush_and_sync();
    scene.cluster.wait("room", || {
        let bytes = account(&scene.cluster).0;
        (LARGE_BYTES..2 * LARGE_BYTES).contains(&bytes)
    });
    scene.end_and_check_released();
}

#[test]
fn gradient_is_charged_for_the_padding_it_keeps() {
    /// The kernel reaches each element of the padded input, of which one is no padding.
    const STRIDE: usize = (1 << 15) + 1;
    const CHANNELS: usize = 32;
    let mut scene = AttackFixture::new();
    let session = &mut scene.session;
    let [x, weight, output_grad] = [[1, 1, 1], [CHANNELS, 1, 1], [1, CHANNELS, 1]].map(|dims| {
        let id = session.new_id();
        session.ops(&[full(raw::out(id, &dims))]);
        raw::tensor(id, &dims)
    });
    let gradient = |out| {
        OperationIr::Module(ModuleOperationIr::Conv1dWeightBackward(
            Conv1dWeightBackwardOpIr {
                x: x.clone(),
                weight: weight.clone(),
                output_grad: output_grad.clone(),
                options: Conv1dOptionsIr {
                    stride: [STRIDE],
                    padding: [(STRIDE / 2, STRIDE / 2)],
                    dilation: [1],
                    groups: 1,
                },
                out,
            },
        ))
    };
    let dims = [CHANNELS, 1, 1];
    // The threads that compute keep what one op has needed beside its output.
    let first = session.new_id();
    session.ops(&[
        gradient(raw::out(first, &dims)),
        drop_of(&raw::tensor(first, &dims)),
    ]);
    scene.flush_and_sync();
    scene.before = scene.cluster.workers[0].resource_usage();
    let session = &mut scene.session;
    let mut gradients = Vec::new();
    for _ in 0..40 {
        let id = session.new_id();
        session.ops(&[gradient(raw::out(id, &dims))]);
        gradients.push(raw::tensor(id, &dims));
    }
    raw::block(session.fetch(&gradients[0])).unwrap().unwrap();
    let fault = raw::block(session.fetch(&gradients[39])).unwrap();
    assert_eq!(fault.unwrap_err().kind(), v1::FaultKind::OutOfMemory);
    scene.assert_bounded();
}

#[test]
fn fault_texts_are_charged_and_truncated() {
    let mut scene = AttackFixture::new();
    let session = &mut scene.session;
    let poison = |id, reason: String| {
        let fault = v1::Fault {
            reason,
            ..v1::Fault::default()
        };
        Body::Poison(v1::Poison {
            tensor_id: id,
            fault: Some(fault),
            ..v1::Poison::default()
        })
    };
    let huge = session.new_id();
    session.push_made(huge, poison(huge, "x".repeat(3 << 20)));
    let fault = raw::block(session.fetch(&raw::tensor(huge, &[1])));
    let fault = fault.unwrap().unwrap_err();
    assert!(fault.reason.len() < 2048 && fault.reason.ends_with("[cut, 3145728 bytes]"));
    for _ in 0..100 {
        for _ in 0..1000 {
            let id = session.new_id();
            session.push_made(id, poison(id, "y".repeat(1000)));
        }
        raw::block(session.flush()).unwrap();
    }
    scene.flush_and_sync();
    scene.assert_bounded();
    scene.end_and_check_released();
}

#[test]
fn empty_tensors_are_charged() {
    let mut scene = AttackFixture::new();
    let session = &mut scene.session;
    for _ in 0..100 {
        let mut out = || full(raw::out(session.new_id(), &[0]));
        let ops: Vec<_> = (0..4000).map(|_| out()).collect();
        session.ops(&ops);
    }
    scene.flush_and_sync();
    scene.assert_bounded();
    scene.end_and_check_released();
}

#[test]
fn unread_replies_are_charged() {
    let mut scene = AttackFixture::new();
    let session = &mut scene.session;
    // Each tensor takes more than half of the device. The first is read for the last time,
    // and its bytes wait for a track that is never opened.
    let elements = 5 * LARGE;
    let (first, second) = (session.new_id(), session.new_id());
    session.ops(&[full(raw::out(first, &[elements]))]);
    session.reads(&[raw::last(&raw::tensor(first, &[elements]))]);
    session.ops(&[full(raw::out(second, &[elements]))]);
    raw::block(session.stay_connected(Duration::from_millis(500))).unwrap();
    let all = WARMUP_OPS + 2;
    scene
        .cluster
        .wait("the ops", || account(&scene.cluster).1 == all);
    scene.assert_bounded();
    assert!(
        account(&scene.cluster).0 < 6 * LARGE_BYTES,
        "one of them alone"
    );
    scene.end_and_check_released();
}

#[test]
fn idle_worker_returns_memory_of_ended_leases() {
    const GIB: u64 = 1 << 30;
    let mut scene = AttackFixture::of(GIB + (256 << 20));
    let session = &mut scene.session;
    for _ in 0..GIB / LARGE_BYTES {
        let id = session.new_id();
        session.ops(&[full(raw::out(id, &[LARGE]))]);
    }
    // Small tensors as well, which share an allocator's pages.
    for _ in 0..10 {
        let mut out = || full(raw::out(session.new_id(), &[256]));
        let ops: Vec<_> = (0..2000).map(|_| out()).collect();
        session.ops(&ops);
    }
    scene.flush_and_sync();
    let (worker, before) = (&scene.cluster.workers[0], scene.before);
    let peak = worker.resource_usage();
    assert!(peak.resident_bytes > before.resident_bytes + GIB, "{peak}");
    let session = &mut scene.session;
    raw::block(async {
        session.push(Body::Close(v1::Close {}));
        session.end().await
    });
    let ended = Instant::now();
    let bound = Bound {
        resident_bytes: GIB / 16,
        ..Bound::default()
    };
    let after = worker.wait_until_settled(&before, bound);
    println!("{before}; {peak}; {after} after {:?}", ended.elapsed());
}

//! A test bench for one session: delivers its frames and runs its turns.

use std::{
    pin::pin,
    task::{Context, Waker},
    time::Duration,
};

use burn_backend::{DType, Shape, TensorData};
use burn_ir::{
    BinaryOpIr, FloatOperationIr, InitOperationIr, NumericOperationIr, OperationIr, RandomOpIr,
    TensorId, TensorIr, TensorStatus,
};
use tensord_backend::{CustomOps, flex_device};
use tensord_proto::{
    codec::{OpEncoder, decode_type, encode_tensor},
    content::{Content, Entry, put},
    ids::WorkerId,
    v1::{self, frame::Body, tensor_value, value},
};
use tensord_transport::channel::{Next, duplex::Duplex};

use super::super::{dataflow::NAME_BYTES, *};
use crate::{
    blobs::BlobStore,
    collective::{CollectiveSettings, LeaseMembers},
    executor::{TimeSliceEnd, TimeSliced},
    op_progress::Signals,
    usage::Meters,
};

pub(super) const CAPACITY: u64 = 1 << 30;
pub(super) const KEPT: u64 = 1 << 10;

/// The op timeout: short, as tests wait for it.
pub(super) const OP_TIMEOUT: Duration = Duration::from_secs(2);

/// Bytes charged for a tensor of two `f32` values.
pub(super) const PAIR: u64 = 8 + NAME_BYTES;

/// A session, the client's end of its connections, and the bodies that the client
/// received.
pub(super) struct SessionHarness {
    pub(super) session: Arc<Session>,
    pub(super) queue: Arc<RunQueue<Session>>,
    pub(super) memory: Arc<DeviceMemory>,
    pub(super) blobs: Arc<BlobStore>,
    pub(super) client: Duplex,
    pub(super) bulk: Duplex,
    pub(super) encoder: OpEncoder,
    pub(super) connection: Connection,
    pub(super) bulk_connection: Connection,
    pub(super) replies: Vec<Body>,
    runtime: tokio::runtime::Runtime,
}

impl SessionHarness {
    pub(super) fn new() -> Self {
        Self::with_blobs(BlobStore::new(1 << 20))
    }

    pub(super) fn with_blobs(blobs: Arc<BlobStore>) -> Self {
        Self::with(blobs, Arc::default())
    }

    /// Creates a bench whose session is scheduled in `queue`.
    pub(super) fn with(blobs: Arc<BlobStore>, queue: Arc<RunQueue<Session>>) -> Self {
        let device = flex_device(&CustomOps::new());
        Self::on_device(device, blobs, queue)
    }

    /// Creates a bench on `device`.
    pub(super) fn on_device(
        device: Arc<dyn Device>,
        blobs: Arc<BlobStore>,
        queue: Arc<RunQueue<Session>>,
    ) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap();
        let memory = DeviceMemory::new(CAPACITY);
        let device_context = DeviceContext {
            device,
            memory: memory.clone(),
            queue: queue.clone(),
            signals: Signals::new("bench".into(), OP_TIMEOUT, Arc::default()),
            meters: Meters::new(&memory),
            runtime: runtime.handle().clone(),
            blobs: blobs.clone(),
            kept_limits: KeptLimits {
                new: KEPT,
                restored: KEPT,
            },
            snapshots: None,
        };
        let grant = Grant {
            lease: LeaseId(1),
            tenant: "a".into(),
            device_index: 0,
        };
        let settings = CollectiveSettings {
            deadline: std::time::Duration::from_secs(30),
            bucket_bytes: None,
            runtime: runtime.handle().clone(),
            identity: None,
        };
        // Two devices of this worker; the second has no session.
        let share = |device_index| v1::LeaseShare {
            worker_id: 1,
            device_index,
            worker: "bench".into(),
            ..v1::LeaseShare::default()
        };
        let lease_members = LeaseMembers::new(vec![share(0), share(1)], WorkerId(1));
        let cohort = Cohort::new(1, LeaseId(1), lease_members, Bytes::new(), settings);
        let begin = SessionBegin::New { seed: 7 };
        let session =
            Session::new(SessionId(1), grant, begin, None, device_context, cohort).unwrap();
        let mut client = Duplex::new(1 << 30, 0, u64::MAX);
        let mut bulk = Duplex::new(1 << 30, 0, u64::MAX);
        Self {
            connection: attach(&session, Track::Ops, &mut client),
            bulk_connection: attach(&session, Track::Bulk, &mut bulk),
            session,
            queue,
            memory,
            blobs,
            client,
            bulk,
            encoder: OpEncoder::default(),
            replies: Vec::new(),
            runtime,
        }
    }

    /// Opens a new connection for each track, as after a loss.
    pub(super) fn connect(&mut self) {
        self.connection = attach(&self.session, Track::Ops, &mut self.client);
        self.bulk_connection = attach(&self.session, Track::Bulk, &mut self.bulk);
    }

    pub(super) fn ops(&mut self, ops: &[OperationIr]) {
        self.ops_with(ops, &[]);
    }

    pub(super) fn ops_with(&mut self, ops: &[OperationIr], entries: &[Entry]) {
        let mut contents = Vec::new();
        entries.iter().for_each(|entry| put(&mut contents, entry));
        let mut encoded = Vec::new();
        ops.iter()
            .for_each(|op| self.encoder.encode(op, &mut encoded));
        self.encoder.finish(&mut encoded);
        let count = ops.len() as u32;
        self.client.push(Body::Ops(v1::Ops {
            count,
            encoded: encoded.into(),
            contents: contents.into(),
        }));
    }

    pub(super) fn upload(&mut self, id: u64, values: &[f32]) {
        let bytes = bytes_of(values);
        self.upload_from(id, Content::Inline { bytes, keep: None });
    }

    /// Uploads two values.
    pub(super) fn upload_from(&mut self, id: u64, content: Content) {
        self.ops_with(&[init(id)], &[Entry::Upload(content)]);
    }

    pub(super) fn read(&mut self, request_id: u64, tensor: &TensorIr) {
        self.client.push(Body::Reads(v1::Reads {
            request_id,
            tensors: vec![encode_tensor(tensor)],
        }));
    }

    pub(super) fn sync(&mut self, request_id: u64, share_uploads: bool) {
        self.client.push(Body::Sync(v1::Sync {
            request_id,
            share_uploads,
        }));
    }

    /// Delivers at most `count` frames from the client.
    pub(super) fn deliver(&mut self, count: usize) -> Result<(), InboundError> {
        for _ in 0..count {
            let Some(parts) = self.client.next_to_send() else {
                break;
            };
            let frame = parts.concat().into();
            self.session.receive(Track::Ops, self.connection, frame)?;
        }
        Ok(())
    }

    /// Delivers all frames of bulk bytes that may be sent, and returns their number.
    pub(super) fn deliver_bulk(&mut self) -> usize {
        let mut frames = 0;
        while let Some(parts) = self.bulk.next_to_send() {
            let (frame, connection) = (parts.concat().into(), self.bulk_connection);
            self.session
                .receive(Track::Bulk, connection, frame)
                .unwrap();
            frames += 1;
        }
        frames
    }

    /// Runs turns until the queue is empty.
    pub(super) fn run(&mut self) {
        while let Some(session) = self.queue.try_pop() {
            if session.run(&mut || true) == TimeSliceEnd::MoreWork {
                self.queue.push(session);
            }
        }
    }

    /// Runs spawned tasks until they wait.
    pub(super) fn settle(&self) {
        self.runtime.block_on(async {
            for _ in 0..64 {
                tokio::task::yield_now().await;
            }
        });
    }

    /// Runs spawned tasks for `time`.
    pub(super) fn wait(&self, time: Duration) {
        self.runtime
            .block_on(async { tokio::time::sleep(time).await });
    }

    /// Returns whether the writer was woken since the last call.
    pub(super) fn take_wake(&self) -> bool {
        let mut context = Context::from_waker(Waker::noop());
        let woken = pin!(self.session.writer_notify(Track::Ops).notified()).poll(&mut context);
        woken.is_ready()
    }

    /// Delivers the session's frames to the client.
    pub(super) fn receive_replies(&mut self) {
        for (track, connection, client) in [
            (Track::Ops, self.connection, &mut self.client),
            (Track::Bulk, self.bulk_connection, &mut self.bulk),
        ] {
            while let Next::Frames(frames) = self.session.next_to_send(track, connection) {
                for parts in frames {
                    let received = client.receive(parts.concat().into()).unwrap();
                    self.replies.extend(received.map(|(body, _)| body));
                }
            }
        }
    }

    pub(super) fn run_all(&mut self) {
        self.deliver(usize::MAX).unwrap();
        self.run();
        self.receive_replies();
    }

    /// Returns the values that the client received, by request.
    pub(super) fn values(&self) -> Vec<(u64, Result<Vec<f32>, String>)> {
        let values = |body: &Body| match body {
            Body::Values(values) => values.values.clone(),
            _ => Vec::new(),
        };
        let values = self.replies.iter().flat_map(values);
        values
            .map(|value| (value.request_id, result(&value)))
            .collect()
    }
}

pub(super) fn attach(session: &Session, track: Track, client: &mut Duplex) -> Connection {
    let received = client.inbox().received();
    let attached = session.attach(track, received).unwrap();
    client
        .rewind(attached.received, attached.credit_bytes)
        .unwrap();
    attached.connection
}

pub(super) fn bytes_of(values: &[f32]) -> Bytes {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

pub(super) fn init(id: u64) -> OperationIr {
    let out = tensor(id, TensorStatus::NotInit);
    OperationIr::Init(InitOperationIr { out })
}

pub(super) fn result(value: &v1::Value) -> Result<Vec<f32>, String> {
    match value.result.as_ref().unwrap() {
        value::Result::Fault(fault) => Err(fault.to_string()),
        value::Result::Tensor(tensor) => {
            let (shape, dtype, _) = decode_type(tensor.r#type.as_ref()).unwrap();
            let Some(tensor_value::Content::Bytes(bytes)) = &tensor.content else {
                panic!("a small value is whole");
            };
            let data = TensorData::from_bytes_vec(bytes.to_vec(), shape, dtype);
            Ok(data.try_to_vec().unwrap())
        }
    }
}

pub(super) fn tensor(id: u64, status: TensorStatus) -> TensorIr {
    TensorIr {
        id: TensorId::new(id),
        shape: Shape::new([2]),
        status,
        dtype: DType::F32,
    }
}

pub(super) fn add(lhs: u64, rhs: u64, out: u64) -> OperationIr {
    let read = |id| tensor(id, TensorStatus::ReadOnly);
    let op = BinaryOpIr {
        lhs: read(lhs),
        rhs: read(rhs),
        out: tensor(out, TensorStatus::NotInit),
    };
    OperationIr::NumericFloat(DType::F32, NumericOperationIr::Add(op))
}

pub(super) fn random(out: u64) -> OperationIr {
    let distribution = burn_backend::Distribution::Uniform(0.0, 1.0);
    let out = tensor(out, TensorStatus::NotInit);
    OperationIr::Float(
        DType::F32,
        FloatOperationIr::Random(RandomOpIr { out, distribution }),
    )
}

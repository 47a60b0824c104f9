//! Burn's `Backend`, through its router: every op of a [`TensordDevice`] goes to
//! the session behind it.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::Instant,
};

use burn_backend::{
    BoolStore, DType, DTypeUsageSet, DeviceId, DeviceOps, DeviceSettings, ExecutionError, Shape,
    StreamId, TensorData, distributed::ReduceOperation,
};
use burn_ir::{
    AllReduceOpIr, DeviceIdIr, DistributedOperationIr, GraphBindings, GraphId, OperationIr,
    TensorId, TensorIr, TensorStatus,
};
use burn_router::{
    BackendRouter, Graph, MultiBackendBridge, RouterChannel, RouterClient,
    RouterClientRegistration, RouterTensor, get_client, register_scoped_client,
};

use burn_std::future::DynFut;
use dashmap::DashMap;
use std::sync::LazyLock;
use tensord_proto::collective_op::AllReduce;
use tensord_session::{Answer, Capability};

use crate::session::{Session, closed};

/// Burn's `Backend` over a pool; `Autodiff<Tensord>` differentiates through it.
/// Programs written against `burn::tensor::Device` use
/// [`Lease::devices`](crate::Lease::devices) instead.
pub type Tensord = BackendRouter<TensordChannel>;

/// The number by which Burn knows tensord's device type.
const DEVICE_TYPE: u16 = 0x7e50;

/// A sync on this stream only waits until the bridge has recorded all ops from before it. Any other sync goes to the
/// worker, which reports each fault to one sync only.
pub(crate) const BRIDGE_ORDER: StreamId = StreamId { value: u64::MAX };

/// Sessions by device number. A number is never reused.
static SESSIONS: LazyLock<DashMap<u16, Arc<Session>>> = LazyLock::new(DashMap::new);
static NEXT_DEVICE: AtomicU32 = AtomicU32::new(0);

/// A leased device, identified by a number that is unique in this process.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use burn_backend::Backend;
/// use tensord_client::{LeaseRequest, Pool, Tensord, TensordDevice};
///
/// fn train<B: Backend>(device: &B::Device) { /* … */ }
///
/// let lease = Pool::connect_env()?.lease(LeaseRequest::devices(1))?;
/// let device: TensordDevice = lease.backend_devices()[0];
/// train::<Tensord>(&device);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct TensordDevice {
    index: u16,
}

impl TensordDevice {
    /// Registers a new device backed by `session`. Returns `None` when this process has
    /// used up its 65,536 device numbers.
    pub(crate) fn register(session: Arc<Session>) -> Option<Self> {
        let index = NEXT_DEVICE.fetch_add(1, Ordering::Relaxed);
        let index = u16::try_from(index).ok()?;
        SESSIONS.insert(index, session);
        Some(Self { index })
    }

    /// Removes the device from the table. Tensors that still exist keep their
    /// session alive.
    pub(crate) fn unregister(self) {
        SESSIONS.remove(&self.index);
    }

    fn session(self) -> Arc<Session> {
        let session = SESSIONS.get(&self.index).map(|session| session.clone());
        // The lease is gone: a closed session ignores every op and fails every read.
        session.unwrap_or_else(closed)
    }
}

impl burn_std::device::Device for TensordDevice {
    fn from_id(id: DeviceId) -> Self {
        Self { index: id.index_id }
    }

    fn to_id(&self) -> DeviceId {
        DeviceId::new(DEVICE_TYPE, self.index)
    }
}

impl DeviceOps for TensordDevice {
    fn defaults(&self) -> DeviceSettings {
        let usual =
            || DeviceSettings::with_dtypes(DType::F32, DType::I32, DType::Bool(BoolStore::Native));
        self.session().settings().unwrap_or_else(usual)
    }
}

/// Keeps a device registered with Burn's router.
pub(crate) type Registration = RouterClientRegistration<TensordChannel>;

/// The channel type that connects Burn's router to tensord's sessions.
#[derive(Debug, Clone)]
pub struct TensordChannel;

/// Burn's handle on one device: records ops and reads values.
///
/// Each tensor has a clone of the client, and each op makes a tensor. So the client is a
/// single `Arc`, whose reference count the session's driver never changes.
#[derive(Clone)]
pub struct TensordClient(Arc<Client>);

struct Client {
    device: TensordDevice,
    session: Arc<Session>,
    /// Op graphs that a layer above registered for this device.
    graphs: Mutex<std::collections::HashMap<GraphId, Graph>>,
}

impl std::fmt::Debug for TensordClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TensordClient")
            .field("device", &self.0.device)
            .finish_non_exhaustive()
    }
}

impl RouterClient for TensordClient {
    type Device = TensordDevice;

    fn register_op(&self, op: OperationIr) {
        // An op is large, and a `match` would move every other op once more.
        if let OperationIr::Distributed(DistributedOperationIr::AllReduce(op)) = op {
            return self.all_reduce(op);
        }
        self.0.session.record(op);
    }

    fn read_tensor_async(&self, tensor: TensorIr) -> DynFut<Result<TensorData, ExecutionError>> {
        let answered = self.0.session.read(&tensor);
        Box::pin(async move { answered.await.unwrap_or_else(|_| Err(no_reply_error())) })
    }

    fn sync(&self) -> Result<(), ExecutionError> {
        if StreamId::current() == BRIDGE_ORDER {
            return Ok(());
        }
        block_on(self.0.session.sync()).unwrap_or_else(|_| Err(no_reply_error()))
    }

    fn flush(&self) {
        // Nothing to do: the session's send policy decides when the driver sends recorded ops.
    }

    fn create_empty_handle(&self) -> TensorId {
        self.0.session.new_tensor()
    }

    fn register_tensor_data(&self, data: TensorData) -> RouterTensor<Self> {
        let id = self.0.session.new_tensor();
        let (shape, dtype) = (data.shape().clone(), data.dtype());
        self.0.session.upload(id, data);
        RouterTensor::new(id, shape, dtype, self.clone())
    }

    fn device(&self) -> TensordDevice {
        self.0.device
    }

    fn seed(&self, seed: u64) {
        self.0.session.seed(seed);
    }

    fn dtype_usage(&self, dtype: DType) -> DTypeUsageSet {
        DTypeUsageSet::from_u8_truncated(self.0.session.dtype_usage(dtype))
    }

    fn register_and_execute_graph(
        &self,
        graph_id: GraphId,
        relative_graph: Vec<OperationIr>,
        bindings: GraphBindings,
    ) {
        let graph = Graph::new(relative_graph);
        let mut graphs = self.0.graphs.lock().unwrap_or_else(PoisonError::into_inner);
        graphs.insert(graph_id, graph.clone());
        drop(graphs);
        self.replay(&graph, bindings);
    }

    fn execute_graph(&self, graph_id: GraphId, bindings: GraphBindings) {
        let graphs = self.0.graphs.lock().unwrap_or_else(PoisonError::into_inner);
        let graph = graphs.get(&graph_id).cloned();
        drop(graphs);
        match graph {
            Some(graph) => self.replay(&graph, bindings),
            // The outputs never get a value, so reading them fails with an error.
            None => tracing::error!("op graph {graph_id:?} was never registered with this client"),
        }
    }

    fn register_alias(&self, new_id: TensorId, src_id: TensorId) {
        self.0.session.alias(new_id, src_id);
    }
}

impl TensordClient {
    fn new(device: TensordDevice) -> Self {
        Self(Arc::new(Client {
            device,
            session: device.session(),
            graphs: Mutex::default(),
        }))
    }

    /// Registers `device` with Burn's router for as long as the returned guard lives. Returns
    /// `None` if the router already has a client for `device`.
    pub(crate) fn register(device: TensordDevice) -> Option<Registration> {
        register_scoped_client::<TensordChannel>(&device, Self::new(device))
    }

    /// Reads tensors, and sends each value to the [`Answer`] in the same pair.
    pub(crate) fn read(&self, reads: Vec<(TensorIr, Answer<TensorData>)>) {
        self.0.session.read_many(reads);
    }

    fn replay(&self, graph: &Graph, bindings: GraphBindings) {
        for op in graph.bind(bindings).operations {
            self.register_op(op);
        }
    }
}

impl TensordClient {
    /// Records an all-reduce, with lease ranks in place of Burn's device numbers, which are
    /// local to this process. Poisons the output if a device belongs to another lease.
    fn all_reduce(&self, op: AllReduceOpIr) {
        let mut lease_ranks = Vec::with_capacity(op.device_ids.len());
        for id in &op.device_ids {
            match self.lease_rank(*id) {
                Ok(lease_rank) => lease_ranks.push(lease_rank),
                Err(reason) => {
                    self.0.session.poison(op.out.id, &op.out, reason);
                    if op.tensor.status == TensorStatus::ReadWrite {
                        self.0.session.record(OperationIr::Drop(op.tensor));
                    }
                    return;
                }
            }
        }
        lease_ranks.sort_unstable();
        let op = AllReduce {
            tensor: op.tensor,
            out: op.out,
            mean: op.op == ReduceOperation::Mean,
            lease_ranks,
        };
        self.0.session.record_all_reduce(op, Instant::now());
    }

    /// Returns the lease rank of the device that Burn knows by `id`, or the text of an error
    /// if that device does not belong to this client's lease.
    fn lease_rank(&self, id: DeviceIdIr) -> Result<u32, String> {
        let DeviceIdIr { type_id, index_id } = id;
        let session = SESSIONS.get(&index_id).filter(|_| type_id == DEVICE_TYPE);
        let cohort_member = session.map(|session| session.cohort_member.clone());
        let cohort = self.0.session.cohort_member.cohort.id;
        cohort_member
            .filter(|cohort_member| cohort_member.cohort.id == cohort)
            .map(|cohort_member| cohort_member.lease_rank)
            .ok_or_else(|| {
                format!(
                    "an all-reduce on device {} names device {index_id} (of type {type_id}), \
                     which belongs to another lease; lease all devices of a collective together",
                    self.0.device.index
                )
            })
    }
}

pub(crate) fn no_reply_error() -> ExecutionError {
    ExecutionError::with_context("the session ended before it answered")
}

/// Blocks on `answer`, also on a thread that is inside a runtime, where Tokio's
/// own blocking receive panics: Burn calls us from its runtimes and from plain
/// threads. The wait is bounded, as a session that gets no answers fails.
pub(crate) fn block_on<F: Future>(answer: F) -> F::Output {
    // Inside a Tokio task the cooperative budget would run out: the task does not
    // yield while we wait, and Tokio would defer every poll from then on.
    burn_std::future::block_on(tokio::task::unconstrained(answer))
}

impl RouterChannel for TensordChannel {
    type Device = TensordDevice;
    type Bridge = NoBridge;
    type Client = TensordClient;

    fn name(_device: &TensordDevice) -> String {
        "tensord".into()
    }

    fn init_client(device: &TensordDevice) -> TensordClient {
        TensordClient::new(*device)
    }

    fn get_tensor_handle(_tensor: &TensorIr, _client: &TensordClient) {}

    fn register_tensor(
        client: &TensordClient,
        _handle: (),
        shape: Shape,
        dtype: DType,
    ) -> RouterTensor<TensordClient> {
        // Only the default `change_client_backend` would call this.
        RouterTensor::new(client.create_empty_handle(), shape, dtype, client.clone())
    }

    fn change_client_backend(
        tensor: RouterTensor<TensordClient>,
        device: &TensordDevice,
    ) -> RouterTensor<TensordClient> {
        let source = tensor.client.clone();
        let target = get_client::<Self>(device);
        let tensor = tensor.into_ir();
        let (from, to) = (
            &source.0.session.cohort_member,
            &target.0.session.cohort_member,
        );
        if from.cohort.id == to.cohort.id && from.lease_rank != to.lease_rank {
            // The tensor goes from worker to worker, or stays within one.
            let capability: Capability = rand::random();
            let id = target.0.session.new_tensor();
            let now = Instant::now();
            let (offering, taking) = (&source.0.session, &target.0.session);
            offering.offer(&tensor, &capability, to.lease_rank, now);
            taking.take_offer(id, &tensor, &capability, from.lease_rank, now);
            return RouterTensor::new(id, tensor.shape, tensor.dtype, target);
        }
        // Between leases, the tensor has to pass through this process.
        match block_on(source.0.session.read(&tensor)).unwrap_or_else(|_| Err(no_reply_error())) {
            Ok(data) => target.register_tensor_data(data),
            Err(e) => {
                let id = target.0.session.new_tensor();
                target.0.session.poison(id, &tensor, e.reason().to_owned());
                RouterTensor::new(id, tensor.shape, tensor.dtype, target)
            }
        }
    }
}

/// Burn's router requires a bridge between backends. This one does nothing, as
/// [`TensordChannel`] moves tensors itself.
#[derive(Debug)]
pub struct NoBridge;

impl MultiBackendBridge for NoBridge {
    type TensorHandle = ();
    type Device = TensordDevice;

    fn change_backend_float(_tensor: (), _shape: Shape, _target: &TensordDevice) {}
    fn change_backend_int(_tensor: (), _shape: Shape, _target: &TensordDevice) {}
    fn change_backend_bool(_tensor: (), _shape: Shape, _target: &TensordDevice) {}
}

//! Ops with false declarations: a kernel that trusted them would read beyond its tensors or
//! allocate more than any memory.

use burn_backend::{DType, tensor::IndexingUpdateOp};
use burn_ir::{
    BaseOperationIr, BinaryOpIr, Conv1dOpIr, Conv1dOptionsIr, FlipOpIr, FloatOperationIr, FullOpIr,
    GatherOpIr, MatmulOpIr, ModuleOperationIr, NumericOperationIr, OperationIr, RepeatDimOpIr,
    ScalarIr, ScatterOpIr, TensorIr,
};
use tensord_proto::v1::FaultKind;
use tensord_testkit::{
    cluster::Cluster,
    raw::{self, ClientStream, RawSession},
};

fn base(op: BaseOperationIr) -> OperationIr {
    OperationIr::BaseFloat(op)
}

fn matmul(lhs: &TensorIr, rhs: &TensorIr, out: &TensorIr) -> OperationIr {
    let (lhs, rhs, out) = (lhs.clone(), rhs.clone(), out.clone());
    OperationIr::Float(
        DType::F32,
        FloatOperationIr::Matmul(MatmulOpIr { lhs, rhs, out }),
    )
}

fn repeat(tensor: &TensorIr, times: usize, out: &TensorIr) -> OperationIr {
    base(BaseOperationIr::RepeatDim(RepeatDimOpIr {
        tensor: tensor.clone(),
        dim: 0,
        times,
        out: out.clone(),
    }))
}

fn double(tensor: &TensorIr, out: &TensorIr) -> OperationIr {
    let (lhs, rhs, out) = (tensor.clone(), tensor.clone(), out.clone());
    let add = NumericOperationIr::Add(BinaryOpIr { lhs, rhs, out });
    OperationIr::NumericFloat(DType::F32, add)
}

/// Uploads `values` under any shape.
pub(crate) fn shaped(session: &mut RawSession, values: &[f32], shape: &[usize]) -> TensorIr {
    let id = session.new_id();
    session.upload_as(raw::tensor(id, shape), raw::bytes_of(values))
}

/// Returns the op that fills a tensor with ones.
pub(crate) fn full(out: TensorIr) -> OperationIr {
    let value = ScalarIr::Float(1.0);
    let full = NumericOperationIr::Full(FullOpIr { out, value });
    OperationIr::NumericFloat(DType::F32, full)
}

/// Returns a convolution of one group that moves by one element, without padding or a bias.
pub(crate) fn conv1d(x: TensorIr, weight: TensorIr, out: TensorIr) -> OperationIr {
    let options = Conv1dOptionsIr {
        stride: [1],
        padding: [(0, 0)],
        dilation: [1],
        groups: 1,
    };
    OperationIr::Module(ModuleOperationIr::Conv1d(Conv1dOpIr {
        x,
        weight,
        bias: None,
        options,
        out,
    }))
}

fn indices(session: &mut RawSession, values: &[i64]) -> TensorIr {
    let id = session.new_id();
    let bytes = values.iter().flat_map(|value| value.to_le_bytes());
    session.upload_as(raw::typed(id, &[values.len()], DType::I64), bytes.collect())
}

/// Sessions of two leases on one worker. The first one attacks.
struct TwoSessions {
    attacker: RawSession,
    innocent: RawSession,
    victim_tensor: TensorIr,
    cluster: Cluster,
    _attached: ClientStream,
}

impl TwoSessions {
    async fn start() -> Self {
        let cluster = tokio::task::spawn_blocking(|| Cluster::start(&["flex*2"]));
        let cluster = cluster.await.unwrap();
        let mut attached = ClientStream::to(cluster.client_url()).await.unwrap();
        let attacker = attached.lease(1).await.unwrap().remove(0);
        let innocent = attached.lease(1).await.unwrap().remove(0);
        let attacker = RawSession::open(&attacker).await.unwrap();
        let mut innocent = RawSession::open(&innocent).await.unwrap();
        let victim_tensor = innocent.upload(&[1.0, 2.0, 3.0]);
        Self {
            attacker,
            innocent,
            victim_tensor,
            cluster,
            _attached: attached,
        }
    }

    /// Checks that the output of the attacker's op, and an output that depends on it, are
    /// faults of `kind`, and that both sessions go on.
    async fn assert_refused(&mut self, op: OperationIr, kind: FaultKind, reason: &str) {
        let out = op.outputs().next().unwrap().clone();
        let read = raw::tensor(out.id.value(), out.shape.as_slice());
        let heir = self.attacker.new_id();
        let heir = raw::out(heir, out.shape.as_slice());
        self.attacker.ops(&[op]);
        self.attacker.ops(&[double(&read, &heir)]);
        for tensor in [read, raw::last(&heir)] {
            let fault = self.attacker.fetch(&tensor).await.unwrap().unwrap_err();
            assert_eq!(fault.kind(), kind, "{fault}");
            assert!(fault.reason.contains(reason), "{fault}");
        }
        self.assert_both_work().await;
    }

    async fn assert_both_work(&mut self) {
        for (session, source) in [
            (&mut self.attacker, None),
            (&mut self.innocent, Some(self.victim_tensor.clone())),
        ] {
            let source = source.unwrap_or_else(|| session.upload(&[1.0, 2.0, 3.0]));
            let id = session.new_id();
            session.ops(&[double(&source, &raw::out(id, &[3]))]);
            let doubled = session.fetch(&raw::tensor(id, &[3])).await.unwrap();
            assert_eq!(raw::floats(&doubled.unwrap()), [2.0, 4.0, 6.0]);
        }
    }

    /// Ends the cluster's processes on a thread that may block.
    async fn end(self) {
        drop((self.attacker, self.innocent));
        let cluster = self.cluster;
        tokio::task::spawn_blocking(|| drop(cluster)).await.unwrap();
    }
}

#[test]
fn matmul_with_mismatched_batches_reads_no_other_memory() {
    raw::block(async {
        let mut two = TwoSessions::start().await;
        // As observed: 64 batches of one number, multiplied with two rows. The kernel read
        // the memory after the second row.
        let lhs = shaped(&mut two.attacker, &[1.0; 64], &[64, 1, 1]);
        let row = [1.0; 2 * 8];
        let rhs = shaped(&mut two.attacker, &row, &[2, 1, 8]);
        for out_batches in [64, 2, 1] {
            let out = raw::out(two.attacker.new_id(), &[out_batches, 1, 8]);
            let op = matmul(&lhs, &rhs, &out);
            let reason = "batches of 64 and 2";
            two.assert_refused(op, FaultKind::Mismatch, reason).await;
        }
        // A view that starts beyond its tensor; the same kernel would start reading there.
        let twice = raw::out(two.attacker.new_id(), &[64, 1, 1]);
        let flip = BaseOperationIr::Flip(FlipOpIr {
            input: lhs.clone(),
            out: twice,
            axes: vec![0, 0],
        });
        let reason = "axis 0 is given twice";
        two.assert_refused(base(flip), FaultKind::Mismatch, reason)
            .await;
        two.end().await;
    });
}

#[test]
fn oversized_repeat_does_not_crash_the_worker() {
    raw::block(async {
        let mut two = TwoSessions::start().await;
        let four = two.attacker.upload(&[1.0; 4]);
        // As observed: the declared output has the wrong shape.
        let out = raw::out(two.attacker.new_id(), &[4]);
        let op = repeat(&four, 1 << 44, &out);
        two.assert_refused(op, FaultKind::Mismatch, "declares [4]")
            .await;
        // The declared shape is right.
        let out = raw::out(two.attacker.new_id(), &[4 << 44]);
        let op = repeat(&four, 1 << 44, &out);
        two.assert_refused(op, FaultKind::OutOfMemory, "requested")
            .await;
        let out = raw::out(two.attacker.new_id(), &[4]);
        let op = repeat(&four, usize::MAX, &out);
        two.assert_refused(op, FaultKind::OutOfMemory, "cannot be addressed")
            .await;
        // An empty tensor, repeated a huge number of times.
        let nothing = shaped(&mut two.attacker, &[], &[0]);
        let out = raw::out(two.attacker.new_id(), &[0]);
        let op = repeat(&nothing, 1 << 44, &out);
        two.assert_refused(op, FaultKind::OutOfMemory, "too large for any device")
            .await;
        two.end().await;
    });
}

#[test]
fn convolution_with_excess_channels_reads_no_other_memory() {
    raw::block(async {
        let mut two = TwoSessions::start().await;
        let x = shaped(&mut two.attacker, &[1.0; 8], &[1, 2, 4]);
        let weight = shaped(&mut two.attacker, &[1.0; 64], &[1, 64, 1]);
        let out = raw::out(two.attacker.new_id(), &[1, 1, 4]);
        let op = conv1d(x, weight, out);
        let reason = "a weight [1, 64, 1] in 1 groups does not fit an input [1, 2, 4]";
        two.assert_refused(op, FaultKind::Mismatch, reason).await;
        two.end().await;
    });
}

#[test]
fn out_of_bounds_indices_reach_no_other_memory() {
    raw::block(async {
        let mut two = TwoSessions::start().await;
        let row = two.attacker.upload(&[1.0, 2.0, 3.0]);
        for beyond in [3, -1, 1 << 40, i64::MIN, i64::MAX] {
            let at = indices(&mut two.attacker, &[0, beyond]);
            let out = raw::out(two.attacker.new_id(), &[2]);
            let gather = BaseOperationIr::Gather(GatherOpIr {
                tensor: row.clone(),
                dim: 0,
                indices: at.clone(),
                out,
            });
            let reason = "out of bounds";
            two.assert_refused(base(gather), FaultKind::Panic, reason)
                .await;
            let value = two.attacker.upload(&[7.0, 7.0]);
            let out = raw::out(two.attacker.new_id(), &[3]);
            let scatter = BaseOperationIr::Scatter(ScatterOpIr {
                tensor: row.clone(),
                dim: 0,
                indices: at,
                value,
                update: IndexingUpdateOp::Add,
                out,
            });
            two.assert_refused(base(scatter), FaultKind::Panic, reason)
                .await;
        }
        two.end().await;
    });
}

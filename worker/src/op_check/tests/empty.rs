//! Indices into an axis of 0. No such index is valid, so a kernel that clamps or does not
//! check indices would access memory outside its tensor.

use burn_backend::tensor::IndexingUpdateOp;
use burn_ir::*;

use super::*;

const ADD: IndexingUpdateOp = IndexingUpdateOp::Add;

fn base(op: BaseOperationIr) -> OperationIr {
    OperationIr::BaseFloat(op)
}

/// Returns each op that reads or writes `count` elements of an axis of 0; `width` is the
/// other dim.
fn ops(count: usize, width: usize) -> Vec<OperationIr> {
    let none = || float([0, width]);
    let some = || float([count, width]);
    let embedding = EmbeddingOpIr {
        weights: none(),
        indices: int([1, count]),
        out: as_output(float([1, count, width])),
    };
    let backward = EmbeddingBackwardOpIr {
        weights: none(),
        out_grad: float([1, count, width]),
        indices: int([1, count]),
        out: as_output(none()),
    };
    let gather = GatherOpIr {
        tensor: none(),
        dim: 0,
        indices: int([count, width]),
        out: as_output(some()),
    };
    let scatter = ScatterOpIr::create(none(), 0, int([count, width]), some(), ADD, id);
    let assign = SelectAssignOpIr::create(none(), 0, int([count]), some(), ADD, id);
    let put = ScatterNdOpIr::create(none(), int([count, 1]), some(), ADD, id);
    vec![
        base(BaseOperationIr::Gather(gather)),
        base(BaseOperationIr::Scatter(scatter)),
        base(BaseOperationIr::Select(SelectOpIr::create(
            none(),
            0,
            int([count]),
            id,
        ))),
        base(BaseOperationIr::SelectAssign(assign)),
        base(BaseOperationIr::GatherNd(GatherNdOpIr {
            data: none(),
            indices: int([count, 1]),
            out: as_output(some()),
        })),
        base(BaseOperationIr::ScatterNd(put)),
        OperationIr::Module(ModuleOperationIr::Embedding(embedding)),
        OperationIr::Module(ModuleOperationIr::EmbeddingBackward(backward)),
    ]
}

#[test]
fn indexing_an_empty_axis_is_refused() {
    for op in ops(3, 2) {
        let reason = assert_refused(&op);
        assert!(reason.contains("into an axis of 0"), "{reason}");
    }
}

#[test]
fn taking_no_elements_is_accepted() {
    for op in ops(0, 2).iter().chain(&ops(3, 0)) {
        assert_accepted(op);
    }
}

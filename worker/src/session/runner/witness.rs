//! What became of each op, for who tests sessions.

use burn_backend::{DType, Shape};
use burn_ir::{OperationIr, TensorId, TensorIr};
use tensord_proto::v1::FaultKind;

use super::{super::dataflow::Refusal, Runner, schedule::Plan};

/// What became of an op.
#[derive(Debug, Clone)]
pub(crate) enum Seen {
    /// The backend carried it out.
    Ran,
    /// It has a fault of its own.
    Refused(FaultKind, String),
    /// An earlier fault left an input without a value.
    Inherited,
}

impl Runner {
    pub(super) fn saw_ran(&mut self) {
        self.seen.get_or_insert(Seen::Ran);
    }

    pub(super) fn saw_refused(&mut self, refusal: &Refusal) {
        // Of several reasons the first counts, as for a program.
        self.seen.get_or_insert_with(|| match refusal {
            Refusal::New(kind, reason) => Seen::Refused(*kind, reason.clone()),
            Refusal::Inherited(_) => Seen::Inherited,
        });
    }

    /// What became of the op whose turn was last, if one had its turn since this was
    /// asked last.
    pub(crate) fn take_seen(&mut self) -> Option<Seen> {
        self.seen.take()
    }

    /// The op whose turn is next, unless something else is.
    pub(crate) fn next_planned(&self) -> Option<&OperationIr> {
        match self.plans.front() {
            Some((Plan::Ops(ops, _), _)) => ops.front().map(|op| &**op),
            _ => None,
        }
    }

    /// The shape and dtype that the backend has for `tensor`, if the table has it with a
    /// value and the backend can say.
    pub(crate) fn made(&mut self, tensor: &TensorIr) -> Option<(Shape, DType)> {
        match self.flow.is_live(tensor.id) {
            true => self.backend.made(tensor),
            false => None,
        }
    }

    /// Whether a tensor is in the table, with a value.
    pub(crate) fn is_live(&self, id: TensorId) -> bool {
        self.flow.is_live(id)
    }

    /// Number of tensors in the table.
    pub(crate) fn tensors(&self) -> usize {
        self.flow.len()
    }
}

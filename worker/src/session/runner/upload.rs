//! Uploads: makes tensors of bytes from the client.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn_ir::TensorIr;
use tensord_proto::{
    codec::{CodecError, tensor_bytes},
    v1::FaultKind,
};

use super::{
    super::{
        dataflow::Refusal,
        uploads::{Next, Payload, Source},
    },
    Runner, Step, panic_text,
};
use crate::{memory::SessionMemory, op_check};

impl Runner {
    /// Executes an upload, or begins to wait for its payload.
    pub(super) fn init(&mut self, out: TensorIr) -> Result<Step, CodecError> {
        let size = tensor_bytes(&out.shape, out.dtype).ok_or_else(|| {
            self.uploads
                .error("the upload is too large to be addressed")
        })?;
        let source = match self.uploads.next(size)? {
            Next::Here(source) => source,
            Next::Payload(keep) => {
                self.awaiting = Some((out, keep));
                return Ok(Step::NeedsPayload);
            }
        };
        let memory = self.flow.reserve(size as u64);
        self.upload(&out, source, memory);
        Ok(Step::Ran(0, None))
    }

    /// Executes the upload for which [`step`](Self::step) needs a payload.
    pub(crate) fn payload(&mut self, payload: Payload) -> Result<Step, CodecError> {
        let (out, keep) = self
            .awaiting
            .take()
            .expect("a payload is passed only to an upload that awaits it");
        // Kept even if the device has no room for the tensor: the client relies on the
        // slot.
        let source = self.uploads.keep(payload.bytes, keep)?;
        self.upload(&out, source, payload.memory);
        self.begin_early();
        Ok(Step::Ran(0, None))
    }

    fn upload(&mut self, out: &TensorIr, source: Source, memory: Result<SessionMemory, Refusal>) {
        let Err(refusal) = self.try_upload(out, source, memory) else {
            return self.saw_ran();
        };
        self.saw_refused(&refusal);
        let fault = self.fault_of(refusal, "Upload");
        self.flow.insert_poisoned(out.id, fault);
    }

    fn try_upload(
        &mut self,
        out: &TensorIr,
        source: Source,
        memory: Result<SessionMemory, Refusal>,
    ) -> Result<(), Refusal> {
        let mut memory = memory?;
        op_check::check_tensor(out)?;
        self.flow.name_new(out.id, &mut memory)?;
        let data = source.into_data(out)?;
        self.at_hand.begin(self.op_number, "Upload".into());
        let backend = &mut self.backend;
        catch_unwind(AssertUnwindSafe(|| backend.upload(out.id, data)))
            .map_err(|panic| Refusal::New(FaultKind::Panic, panic_text(panic.as_ref())))?;
        self.flow
            .insert(out.id, out.shape.clone(), out.dtype, memory);
        Ok(())
    }
}

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
        uploads::{Payload, UploadBytes, UploadLocation},
    },
    Runner, Step, panic_message,
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
            UploadLocation::Available(source) => source,
            UploadLocation::Payload(keep) => {
                self.awaited_upload = Some((out, keep));
                return Ok(Step::NeedsPayload);
            }
        };
        let memory = self.flow.reserve(size as u64);
        self.upload(&out, source, memory);
        Ok(Step::Ran(0, None))
    }

    /// Executes the upload for which [`begin_step`](Self::begin_step) needs a payload.
    pub(crate) fn payload(&mut self, payload: Payload) -> Result<Step, CodecError> {
        let (out, keep) = self
            .awaited_upload
            .take()
            .expect("a payload is passed only to an upload that awaits it");
        // Kept even if the device has no room for the tensor: the client relies on the
        // slot.
        let source = self.uploads.keep(payload.bytes, keep)?;
        self.upload(&out, source, payload.memory);
        self.begin_ready_all_reduces();
        Ok(Step::Ran(0, None))
    }

    fn upload(
        &mut self,
        out: &TensorIr,
        source: UploadBytes,
        memory: Result<SessionMemory, Refusal>,
    ) {
        let Err(refusal) = self.try_upload(out, source, memory) else {
            return self.record_executed();
        };
        self.record_refused(&refusal);
        let fault = self.fault_for_refusal(refusal, "Upload");
        self.flow.insert_poisoned(out.id, fault);
    }

    fn try_upload(
        &mut self,
        out: &TensorIr,
        source: UploadBytes,
        memory: Result<SessionMemory, Refusal>,
    ) -> Result<(), Refusal> {
        let mut memory = memory?;
        op_check::check_tensor(out)?;
        self.flow.charge_name(out.id, &mut memory)?;
        let data = source.into_data(out)?;
        self.op_progress.begin_op(self.op_number, "Upload".into());
        let backend = &mut self.backend;
        catch_unwind(AssertUnwindSafe(|| backend.upload(out.id, data)))
            .map_err(|panic| Refusal::New(FaultKind::Panic, panic_message(panic.as_ref())))?;
        self.flow
            .insert(out.id, out.shape.clone(), out.dtype, memory);
        Ok(())
    }
}

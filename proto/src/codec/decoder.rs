//! Decodes ops from bytes that it does not trust.

use burn_ir::{OperationIr, TensorId};

use super::{
    CodecError, MAX_OPS_PER_FRAME, MAX_PLAIN_BYTES_PER_FRAME,
    model::Model,
    take,
    template::{Hole, Template},
    value::{HoleKind, Value},
    wire::{Reader, RecordKind, ones, unzigzag},
};

/// Number of ops for which memory is reserved before any was decoded. A frame of a few
/// bytes may claim to hold very many.
const FIRST_OPS: usize = 1 << 10;

/// The largest capacity that the buffers for the current op keep between frames, in values and in bytes. Usual ops
/// fit; a client may send one op that takes megabytes.
const KEPT_VALUES: usize = 1 << 10;
const KEPT_BYTES: usize = 16 << 10;

/// The ops of a frame, in order.
pub type DecodedOps = Vec<DecodedOp>;

/// An op of a frame.
#[derive(Debug)]
pub struct DecodedOp {
    /// The op. It is boxed, as an op has over 600 bytes and is moved several times. The
    /// allocator often reuses the memory of an op just freed.
    pub op: Box<OperationIr>,
    /// Size of the op in bytes, as postcard writes it. In memory an op takes over 600 bytes,
    /// and with many tensors some 25 times this size.
    pub plain_bytes: u32,
}

/// Decodes a session's ops, in order.
#[derive(Debug, Default)]
pub struct OpDecoder {
    model: Model,
    /// The values of the current op; this field and the next two are kept for their
    /// allocations.
    values: Vec<Value>,
    holes: Vec<Hole>,
    plain: Vec<u8>,
}

/// A frame being decoded.
struct Frame<'a> {
    reader: Reader<'a>,
    count: usize,
    ops: DecodedOps,
    /// Size of the ops decoded so far, in bytes, as postcard writes them.
    plain_bytes: usize,
}

impl OpDecoder {
    /// Creates a decoder for a stream from where the encoder [began anew](super::OpEncoder::restart).
    /// `counter` is the value of [`counter`](Self::counter) at that point.
    pub fn starting_at(counter: u64) -> Self {
        Self {
            model: Model::starting_at(counter),
            ..Self::default()
        }
    }

    /// Returns the state that outlives a [restart](Self::restart): one more than the highest
    /// tensor id seen.
    pub fn counter(&self) -> u64 {
        self.model.counter
    }

    /// Forgets all ops. The encoder must have done so at the same point of the stream.
    pub fn restart(&mut self) {
        *self = Self::starting_at(self.model.counter);
    }

    /// Decodes the ops of one frame that claims to hold `count` ops.
    ///
    /// # Errors
    ///
    /// When the bytes are not such ops. The session cannot go on after that, as the state
    /// of the two ends may differ.
    pub fn decode(&mut self, frame: &[u8], count: u32) -> Result<DecodedOps, CodecError> {
        if count > MAX_OPS_PER_FRAME {
            let rule = format!("a frame has {count} ops; the limit is {MAX_OPS_PER_FRAME}");
            return Err(CodecError::new("ops", 0, rule));
        }
        let count = count as usize;
        let mut frame = Frame {
            reader: Reader::new(frame),
            count,
            ops: Vec::with_capacity(count.min(FIRST_OPS)),
            plain_bytes: 0,
        };
        while frame.ops.len() < count {
            self.record(&mut frame)?;
        }
        self.shrink_buffers();
        match frame.reader.left() {
            0 => Ok(frame.ops),
            left => {
                let rule = format!("{left} bytes follow the last of {count} ops");
                Err(frame.reader.error(rule))
            }
        }
    }

    fn shrink_buffers(&mut self) {
        self.values.clear();
        self.values.shrink_to(KEPT_VALUES);
        self.holes.clear();
        self.holes.shrink_to(KEPT_VALUES);
        self.plain.clear();
        self.plain.shrink_to(KEPT_BYTES);
    }

    /// Records a tensor that no op made, such as an upload. The encoder must have
    /// recorded it at the same point of the stream.
    pub fn note_tensor(&mut self, id: TensorId) {
        self.model.note(id.value());
    }

    #[cfg(test)]
    pub(super) fn model(&self) -> &Model {
        &self.model
    }

    fn record(&mut self, frame: &mut Frame<'_>) -> Result<(), CodecError> {
        let (kind, n) = frame.reader.head()?;
        match kind {
            RecordKind::Run => {
                let left = frame.count - frame.ops.len();
                if n == 0 || n > left as u64 {
                    let rule = format!("a run has {n} ops; it must have 1 to {left}");
                    return Err(frame.reader.error(rule));
                }
                (0..n).try_for_each(|_| self.again(frame, 0))
            }
            RecordKind::Move => {
                let cursor = self.model.cursor.wrapping_add_signed(unzigzag(n));
                if self.model.history.get(cursor).is_none() {
                    let rule = format!("the history has no op {cursor} to move to");
                    return Err(frame.reader.error(rule));
                }
                self.model.cursor = cursor;
                Ok(())
            }
            RecordKind::Patch => self.again(frame, n),
            RecordKind::Known => self.known(frame, n),
            RecordKind::New => self.new_template(frame, n),
        }
    }

    /// Decodes the op at the cursor again, except for the values whose bits are set in
    /// `changed`.
    fn again(&mut self, frame: &mut Frame<'_>, changed: u64) -> Result<(), CodecError> {
        let model = &mut self.model;
        let kept = model.history.get(model.cursor);
        let kept = kept.and_then(|past| Some((past, model.templates.get(past.template)?)));
        let Some((past, template)) = kept else {
            return Err(frame
                .reader
                .error("the cursor is not at an op of the history"));
        };
        self.values.clear();
        self.values.extend(model.predict(past));
        for i in ones(changed) {
            let (Some(hole), Some(value)) = (template.holes.get(i), self.values.get_mut(i)) else {
                let rule = format!(
                    "value {i} does not exist in an op with {} values",
                    template.holes.len()
                );
                return Err(frame.reader.error(rule));
            };
            *value = Value::read(hole.kind, &mut frame.reader)?;
        }
        frame.op(template, &self.values, model.counter, &mut self.plain)?;
        model.learn(past, &self.values, changed);
        model.push(Some(past.template), &self.values);
        Ok(())
    }

    fn known(&mut self, frame: &mut Frame<'_>, number: u64) -> Result<(), CodecError> {
        let model = &mut self.model;
        let number = u32::try_from(number).unwrap_or(u32::MAX);
        let Some(template) = model.templates.get(number) else {
            let rule = format!("there is no template {number}");
            return Err(frame.reader.error(rule));
        };
        frame.values(template.holes, &mut self.values)?;
        frame.op(template, &self.values, model.counter, &mut self.plain)?;
        model.push(Some(number), &self.values);
        Ok(())
    }

    fn new_template(&mut self, frame: &mut Frame<'_>, len: u64) -> Result<(), CodecError> {
        let bytes = frame.reader.take(len)?;
        frame.holes(bytes.len(), &mut self.holes)?;
        let holes = &self.holes;
        frame.values(holes, &mut self.values)?;
        let template = Template { bytes, holes };
        frame.op(template, &self.values, self.model.counter, &mut self.plain)?;
        let (number, _) = self.model.define(template);
        self.model.push(number, &self.values);
        Ok(())
    }
}

impl Frame<'_> {
    /// Reads the holes of a template of `len` bytes.
    fn holes(&mut self, len: usize, holes: &mut Vec<Hole>) -> Result<(), CodecError> {
        let count = self.reader.varint()?;
        holes.clear();
        let mut at = 0;
        // `count` needs no limit: each hole takes at least a byte, and the frame's bytes
        // end.
        for _ in 0..count {
            let hole = self.reader.varint()?;
            let kind = HoleKind::from_number(hole & 3)
                .ok_or_else(|| self.reader.error("there is no hole kind 3"))?;
            at += hole >> 2;
            if at > len as u64 {
                let rule = format!("a hole is at byte {at} of a template of {len} bytes");
                return Err(self.reader.error(rule));
            }
            holes.push(Hole {
                at: at as u32,
                kind,
            });
        }
        Ok(())
    }

    fn values(&mut self, holes: &[Hole], values: &mut Vec<Value>) -> Result<(), CodecError> {
        values.clear();
        for hole in holes {
            values.push(Value::read(hole.kind, &mut self.reader)?);
        }
        Ok(())
    }

    /// Creates the op of a template and its values, and adds it to the frame's ops.
    /// Relative ids count from `counter`; `plain` is a scratch buffer.
    fn op(
        &mut self,
        template: Template<'_>,
        values: &[Value],
        counter: u64,
        plain: &mut Vec<u8>,
    ) -> Result<(), CodecError> {
        template.fill(values.iter().map(|value| value.resolve(counter)), plain);
        self.plain_bytes += plain.len();
        if self.plain_bytes > MAX_PLAIN_BYTES_PER_FRAME {
            let rule =
                format!("the ops of a frame have more than {MAX_PLAIN_BYTES_PER_FRAME} bytes");
            return Err(self.reader.error(rule));
        }
        let rule = match take(plain) {
            Ok((op, len)) if len == plain.len() => {
                let plain_bytes = plain.len() as u32;
                self.ops.push(DecodedOp { op, plain_bytes });
                return Ok(());
            }
            Ok((_, len)) => format!("{} bytes follow the end of an op", plain.len() - len),
            Err((at, e)) => format!("malformed op: {e}, at byte {at} of the op"),
        };
        Err(self.reader.error(rule))
    }
}

#[cfg(test)]
mod tests {
    use burn_backend::DType;
    use burn_ir::{CustomOpIr, TensorIr};

    use super::{super::OpEncoder, *};

    #[test]
    fn buffers_of_a_large_op_are_not_kept() {
        let (mut encoder, mut decoder) = (OpEncoder::default(), OpDecoder::default());
        let mut send = |inputs: u64| {
            let tensor = |id| TensorIr::uninit(TensorId::new(id), [1].into(), DType::F32);
            let inputs: Vec<_> = (0..inputs).map(tensor).collect();
            let op = OperationIr::Custom(CustomOpIr::new("op", &inputs, &[]));
            let mut frame = Vec::new();
            encoder.encode(&op, &mut frame);
            encoder.finish(&mut frame);
            assert_eq!(decoder.decode(&frame, 1).unwrap().len(), 1);
            let OpDecoder {
                values,
                holes,
                plain,
                ..
            } = &decoder;
            (values.capacity(), holes.capacity(), plain.capacity())
        };
        let (values, holes, plain) = send(100_000);
        assert!(values <= KEPT_VALUES && holes <= KEPT_VALUES && plain <= KEPT_BYTES);
        // They are kept for the next frame of usual ops.
        let small = send(100);
        assert!(
            small.0 >= 100 && small.1 >= 100 && small.2 >= 400,
            "{small:?}"
        );
    }
}

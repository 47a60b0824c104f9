//! Encodes ops to bytes, writing of each op only what the decoder does not predict.
//!
//! Most ops are what the cursor predicts, and only extend the current run. An op that
//! differs ends the run. The first such op is treated as an exception, such as a changed
//! scalar or an op added or left out, and the position in the loop is kept. If the next
//! op differs too, the program has moved on to something else, and the encoder searches
//! the history for an earlier occurrence.

use std::iter;

use burn_ir::{OperationIr, TensorId};

use super::{
    MAX_OPS_PER_FRAME, MAX_PLAIN_BYTES_PER_FRAME,
    finder::Finder,
    flatten::FlatOp,
    model::Model,
    template::Template,
    value::Value,
    wire::{HEAD_BITS, RecordKind, ones, put_head, put_varint, zigzag},
};

/// How far from its expected position an op is searched for: this many ops earlier (the
/// order changed) or later (some ops were left out).
const SEARCH_WINDOW: (u64, u64) = (4, 8);

/// Encodes a session's ops, in order.
///
/// [`encode`](Self::encode) appends ops to a frame. The frame is complete after
/// [`finish`](Self::finish), and the next op begins the next frame.
#[derive(Debug, Default)]
pub struct OpEncoder {
    model: Model,
    finder: Finder,
    /// The current op.
    flat: FlatOp,
    /// The predicted values of the current op, or its values as they were written.
    values: Vec<Value>,
    /// Number of correctly predicted ops that were not written yet.
    run: u64,
    /// Number of ops since the last op that was predicted correctly.
    mispredictions: u32,
    /// The position in the history that was expected before the first of the ops that
    /// `mispredictions` counts.
    anchor: u64,
    frame_ops: u32,
    frame_plain_bytes: usize,
}

impl OpEncoder {
    /// Encodes `op` into the frame at the end of `out`. Some of it is only written by
    /// [`finish`](Self::finish).
    ///
    /// # Panics
    ///
    /// Never for ops that Burn builds: all types of the IR serialize.
    pub fn encode(&mut self, op: &OperationIr, out: &mut Vec<u8>) {
        self.flat
            .take(op)
            .expect("IR types serialize without failing");
        self.frame_ops += 1;
        self.frame_plain_bytes += self.flat.plain_bytes();
        if self.changes(self.model.cursor) == Some(0) {
            return self.extend_run();
        }
        self.end_run(out);
        self.write_mispredicted(out);
    }

    /// Completes the frame in `out`. Must be called at the end of each frame.
    pub fn finish(&mut self, out: &mut Vec<u8>) {
        self.end_run(out);
        self.frame_ops = 0;
        self.frame_plain_bytes = 0;
    }

    /// Returns whether the frame must end here, as a decoder accepts no more ops in one
    /// frame.
    pub fn is_full(&self) -> bool {
        // The op that fills the frame may be large: half of the decoder's limit is left
        // for it.
        self.frame_ops >= MAX_OPS_PER_FRAME
            || self.frame_plain_bytes >= MAX_PLAIN_BYTES_PER_FRAME / 2
    }

    /// Forgets all ops, so that a decoder [made for this point](super::OpDecoder::starting_at)
    /// of the stream can decode what follows. Must be called between two frames, and at the same
    /// point of the stream on the decoder.
    pub fn restart(&mut self) {
        assert_eq!(self.frame_ops, 0, "a stream begins anew between frames");
        *self = Self {
            model: Model::starting_at(self.model.counter),
            ..Self::default()
        };
    }

    /// Records a tensor that no op made, such as an upload. Must be called between two
    /// frames, and at the same point of the stream on the decoder.
    ///
    /// Optional, as long as both ends agree: it makes ids shorter.
    pub fn note_tensor(&mut self, id: TensorId) {
        assert_eq!(self.frame_ops, 0, "a tensor must be noted between frames");
        self.model.note(id.value());
    }

    #[cfg(test)]
    pub(super) fn model(&self) -> &Model {
        &self.model
    }

    /// Returns which values of the current op differ from the prediction of past op `at`,
    /// as a set of bits. Returns `None` if that op is forgotten, had another template, or
    /// differs in a value beyond the bits of a record's head. Leaves the prediction in
    /// `self.values`.
    fn changes(&mut self, at: u64) -> Option<u64> {
        let past = self.model.history.get(at)?;
        let template = self.model.templates.get(past.template)?;
        if template.bytes != self.flat.bytes {
            return None;
        }
        self.values.clear();
        self.values.extend(self.model.predict(past));
        let counter = self.model.counter;
        let pairs = self.values.iter().zip(&self.flat.values);
        let mut changes = 0;
        for (i, _) in pairs
            .enumerate()
            .filter(|(_, (old, new))| old.resolve(counter) != **new)
        {
            if i >= HEAD_BITS as usize {
                return None;
            }
            changes |= 1 << i;
        }
        Some(changes)
    }

    /// Adds the current op to the run: it is the op at the cursor, as predicted in
    /// `self.values`.
    fn extend_run(&mut self) {
        let past = self
            .model
            .history
            .get(self.model.cursor)
            .expect("the op at the cursor was just compared");
        self.run += 1;
        self.mispredictions = 0;
        self.push(Some(past.template));
    }

    fn push(&mut self, template: Option<u32>) {
        if let Some(template) = template {
            self.finder.note(template, self.model.history.end());
        }
        self.model.push(template, &self.values);
    }

    fn end_run(&mut self, out: &mut Vec<u8>) {
        if self.run > 0 {
            put_head(out, RecordKind::Run, self.run);
            self.run = 0;
        }
    }

    /// Writes the current op, which the op at the cursor does not predict.
    fn write_mispredicted(&mut self, out: &mut Vec<u8>) {
        if self.mispredictions == 0 {
            self.anchor = self.model.cursor;
        }
        let Some(number) = self.finder.number(&self.flat.bytes, &self.model.templates) else {
            self.mispredictions += 1;
            return self.write_new(out);
        };
        if let Some(at) = self.find_exact(number) {
            self.move_to(at, out);
            return self.extend_run();
        }
        match self.find_similar(number) {
            Some((at, changes)) => {
                self.move_to(at, out);
                self.write_patch(changes, out);
            }
            None => self.write_known(number, out),
        }
        self.mispredictions += 1;
    }

    /// Returns the position of a past op that predicts all values of the current op.
    /// Leaves the prediction in `self.values`.
    fn find_exact(&mut self, number: u32) -> Option<u64> {
        let near = self.anchor.saturating_sub(SEARCH_WINDOW.0)..=self.anchor + SEARCH_WINDOW.1;
        near.chain(self.other_candidates(number))
            .find(|&at| self.changes(at) == Some(0))
    }

    /// Returns a past op with the template of the current op, and the values that differ.
    /// Leaves the prediction in `self.values`.
    fn find_similar(&mut self, number: u32) -> Option<(u64, u64)> {
        let here = iter::once(self.model.cursor);
        here.chain(self.other_candidates(number))
            .find_map(|at| Some((at, self.changes(at)?)))
    }

    /// Returns other positions in the history to try; none for the first mispredicted op,
    /// which is treated as an exception in the loop.
    fn other_candidates(&self, number: u32) -> impl Iterator<Item = u64> + use<> {
        let positions = (self.mispredictions > 0).then(|| self.finder.positions(number));
        positions.into_iter().flatten()
    }

    fn move_to(&mut self, at: u64, out: &mut Vec<u8>) {
        let by = at.wrapping_sub(self.model.cursor) as i64;
        if by != 0 {
            put_head(out, RecordKind::Move, zigzag(by));
            self.model.cursor = at;
        }
    }

    /// Writes the op at the cursor again, with `changes` to `self.values`.
    fn write_patch(&mut self, changes: u64, out: &mut Vec<u8>) {
        let past = self
            .model
            .history
            .get(self.model.cursor)
            .expect("the op at the cursor was just compared");
        put_head(out, RecordKind::Patch, changes);
        for i in ones(changes) {
            let (value, new) = (&mut self.values[i], self.flat.values[i]);
            // If the id is the same as in the past op, the tensor outlives the loop, so
            // its absolute id predicts better than its distance from the counter.
            let lives_on = value.resolve(past.counter) == new;
            *value = if lives_on {
                new
            } else {
                new.relative(self.model.counter)
            };
            value.put(out);
        }
        self.model.learn(past, &self.values, changes);
        self.push(Some(past.template));
    }

    /// Writes an op of a template that occurred before, but not at a position that was
    /// tried.
    fn write_known(&mut self, number: u32, out: &mut Vec<u8>) {
        put_head(out, RecordKind::Known, number.into());
        self.put_values(out);
        self.push(Some(number));
    }

    /// Writes an op of a new template.
    fn write_new(&mut self, out: &mut Vec<u8>) {
        let FlatOp { bytes, holes, .. } = &self.flat;
        put_head(out, RecordKind::New, bytes.len() as u64);
        out.extend(bytes);
        put_varint(out, holes.len() as u64);
        let mut before = 0;
        for hole in holes {
            put_varint(out, u64::from(hole.at - before) << 2 | hole.kind as u64);
            before = hole.at;
        }
        let (number, began_anew) = self.model.define(Template { bytes, holes });
        if began_anew {
            self.finder = Finder::default();
        }
        if let Some(number) = number {
            self.finder.define(bytes, number);
        }
        self.put_values(out);
        self.push(number);
    }

    /// Writes all values of the current op, and leaves them in `self.values` as written.
    fn put_values(&mut self, out: &mut Vec<u8>) {
        let counter = self.model.counter;
        let values = self.flat.values.iter();
        self.values.clear();
        self.values
            .extend(values.map(|value| value.relative(counter)));
        self.values.iter().for_each(|value| value.put(out));
    }
}

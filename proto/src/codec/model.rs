//! The state that both ends of an op stream keep in step.
//!
//! Encoder and decoder each have a [`Model`] and change it in the same way in the same
//! order, record by record, so both make the same predictions.

use super::{
    history::{History, PastOp},
    template::{Dictionary, Template},
    value::Value,
};

/// The state that both ends have of a stream.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Model {
    /// One more than the highest tensor id seen: usually the id of the next new tensor.
    pub(super) counter: u64,
    /// The number of the past op that is expected to repeat next.
    pub(super) cursor: u64,
    pub(super) templates: Dictionary,
    pub(super) history: History,
    successors: Successors,
}

impl Model {
    /// Creates the state after a reset, with `counter` as the counter of tensor ids.
    pub(super) fn starting_at(counter: u64) -> Self {
        Self {
            counter,
            ..Self::default()
        }
    }

    /// Returns the values to expect if `past` repeats.
    pub(super) fn predict(&self, past: PastOp) -> impl Iterator<Item = Value> {
        let values = self.history.values(past);
        values.map(|value| self.successors.of(value))
    }

    /// Records that `past` repeated with `values`, of which those with a bit in `changed`
    /// are new.
    pub(super) fn learn(&mut self, past: PastOp, values: &[Value], changed: u64) {
        for (i, old) in self
            .history
            .values(past)
            .enumerate()
            .take(u64::BITS as usize)
        {
            if changed >> i & 1 == 1 {
                self.successors.learn(old, values[i]);
            }
        }
    }

    /// Records an op; ids among `values` are in the form to be remembered.
    pub(super) fn push(&mut self, template: Option<u32>, values: &[Value]) {
        let counter = self.counter;
        self.history.push(template, counter, values);
        self.cursor += 1;
        for value in values.iter().filter(|value| value.is_id()) {
            self.note(value.resolve(counter).bits);
        }
    }

    /// Records a tensor id, whether an op made the tensor or not.
    pub(super) fn note(&mut self, id: u64) {
        self.counter = self.counter.max(id.saturating_add(1));
    }

    /// Keeps a new template and returns its number, or `None` if it is too large.
    ///
    /// When there is no more room, all templates and past ops are forgotten first; the
    /// returned flag is then `true`.
    pub(super) fn define(&mut self, template: Template<'_>) -> (Option<u32>, bool) {
        if !template.is_kept() {
            return (None, false);
        }
        let is_full = !self.templates.has_room(template);
        if is_full {
            self.templates.clear();
            self.history.clear();
            self.successors = Successors::default();
            self.cursor = 0;
        }
        (Some(self.templates.push(template)), is_full)
    }
}

/// Values that replaced other values.
///
/// Values that change from step to step, such as an optimiser's bias correction, change
/// in the same way for every parameter. The table has a fixed size, with room for two
/// values with the same hash: a third one replaces the older of the two.
#[derive(Debug, PartialEq)]
struct Successors(Box<[[(Value, Value); 2]; 1 << SUCCESSOR_BITS]>);

const SUCCESSOR_BITS: u32 = 8;

impl Default for Successors {
    fn default() -> Self {
        let none = (Value::NONE, Value::NONE);
        Self(Box::new([[none; 2]; 1 << SUCCESSOR_BITS]))
    }
}

impl Successors {
    /// Returns the row of a value, by Fibonacci hashing: the multiplier is 2^64 over the
    /// golden ratio.
    fn place(value: Value) -> usize {
        let bits = value.bits.wrapping_add(value.form as u64);
        (bits.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - SUCCESSOR_BITS)) as usize
    }

    fn of(&self, old: Value) -> Value {
        if old.is_id() {
            return old;
        }
        let place = &self.0[Self::place(old)];
        let known = place.iter().find(|(from, _)| *from == old);
        known.map_or(old, |(_, to)| *to)
    }

    fn learn(&mut self, old: Value, new: Value) {
        if old.is_id() {
            return;
        }
        let [newer, older] = &mut self.0[Self::place(old)];
        if newer.0 != old {
            *older = *newer;
        }
        *newer = (old, new);
    }
}

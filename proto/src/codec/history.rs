//! The last ops of a stream, as both ends remember them.
//!
//! Two rings of fixed capacity, one of ops and one of the values in their holes. Ops are
//! numbered from the beginning; an op is forgotten when either ring overwrites it.

use super::value::Value;

/// Number of ops remembered: a training step of a deep model has some thousands.
const MAX_OPS: usize = 1 << 15;
/// Number of values remembered; an op has three or four.
const MAX_VALUES: usize = 1 << 17;

/// A past op.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct PastOp {
    /// The number of the op's template.
    pub(super) template: u32,
    /// The value of the id counter before the op.
    pub(super) counter: u64,
    /// The index of the op's first value in the history; its `len` values are consecutive.
    values: u64,
    len: u32,
}

/// Marks a past op whose template is not kept.
const UNKNOWN: u32 = u32::MAX;

/// The last ops of a stream.
#[derive(Debug, Default, PartialEq)]
pub(super) struct History {
    ops: Ring<PastOp, MAX_OPS>,
    values: Ring<Value, MAX_VALUES>,
}

impl History {
    /// Returns the number of the next op.
    pub(super) fn end(&self) -> u64 {
        self.ops.end
    }

    /// Returns op number `at`, if it is still remembered and its template is kept.
    pub(super) fn get(&self, at: u64) -> Option<PastOp> {
        let past = self.ops.get(at)?;
        let is_whole = past.values + MAX_VALUES as u64 >= self.values.end;
        (past.template != UNKNOWN && is_whole).then_some(past)
    }

    /// Returns the values of an op that [`get`](Self::get) has just returned.
    pub(super) fn values(&self, past: PastOp) -> impl Iterator<Item = Value> {
        (past.values..past.values + u64::from(past.len))
            .map(|at| self.values.slots[at as usize % MAX_VALUES])
    }

    /// Adds an op; `template` is `None` if its template is not kept.
    pub(super) fn push(&mut self, template: Option<u32>, counter: u64, values: &[Value]) {
        // An op without a template cannot be looked up, so its values are not kept.
        let values = if template.is_some() { values } else { &[] };
        self.ops.push(PastOp {
            template: template.unwrap_or(UNKNOWN),
            counter,
            values: self.values.end,
            len: values.len() as u32,
        });
        for &value in values {
            self.values.push(value);
        }
    }

    pub(super) fn clear(&mut self) {
        self.ops.clear();
        self.values.clear();
    }
}

/// A ring of the last `N` items of a sequence. Its memory grows as it fills.
#[derive(Debug, PartialEq)]
struct Ring<T, const N: usize> {
    slots: Vec<T>,
    end: u64,
}

impl<T, const N: usize> Default for Ring<T, N> {
    fn default() -> Self {
        let (slots, end) = (Vec::new(), 0);
        Self { slots, end }
    }
}

impl<T: Copy, const N: usize> Ring<T, N> {
    fn get(&self, at: u64) -> Option<T> {
        let is_here = at < self.end && self.end - at <= N as u64;
        is_here.then(|| self.slots[at as usize % N])
    }

    fn push(&mut self, item: T) {
        match self.slots.get_mut(self.end as usize % N) {
            Some(slot) => *slot = item,
            None => self.slots.push(item),
        }
        self.end += 1;
    }

    fn clear(&mut self) {
        self.slots.clear();
        self.end = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::{super::value::Form, *};

    fn values(n: u64, len: usize) -> Vec<Value> {
        vec![Value::new(Form::Int, n); len]
    }

    #[test]
    fn the_oldest_op_is_forgotten_first() {
        let mut history = History::default();
        for n in 0..MAX_OPS as u64 + 10 {
            history.push(Some(n as u32), n, &values(n, 2));
        }
        assert!(history.get(9).is_none() && history.get(history.end()).is_none());
        for n in [10, MAX_OPS as u64, MAX_OPS as u64 + 9] {
            let past = history.get(n).unwrap();
            assert_eq!(u64::from(past.template), n);
            assert_eq!(history.values(past).collect::<Vec<_>>(), values(n, 2));
        }
    }

    #[test]
    fn ops_are_forgotten_with_their_values() {
        let mut history = History::default();
        let many = MAX_VALUES / 16;
        for n in 0..20 {
            history.push(Some(0), 0, &values(n, many));
        }
        assert!(history.get(3).is_none());
        let past = history.get(4).unwrap();
        assert!(history.values(past).eq(values(4, many)));
        history.push(None, 0, &values(0, many));
        assert!(history.get(20).is_none() && history.get(4).is_some());
    }
}

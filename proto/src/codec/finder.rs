//! Finds positions in the history where an op like the current one occurred. Only the
//! encoder has it: the encoder writes what it found, so the decoder need not know how.

use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
};

use super::template::Dictionary;

/// Number of contexts remembered, a power of two.
const CONTEXTS: usize = 1 << 12;

/// Finds positions in the history from which to continue.
///
/// Each result is a guess that must be checked: hashes may collide, and the history may
/// have forgotten the position.
#[derive(Debug, Default)]
pub(super) struct Finder {
    /// Numbers of templates, by the hash of their bytes.
    numbers: HashMap<u64, u32>,
    /// Latest position of each template.
    latest: Vec<u64>,
    /// Latest position of an op after the same two ops, by the hash of the three
    /// templates.
    contexts: Vec<u64>,
    /// The templates of the last two ops.
    before: [u32; 2],
}

impl Finder {
    /// Returns the number of the template with these bytes, if it is in `dictionary`.
    pub(super) fn number(&self, bytes: &[u8], dictionary: &Dictionary) -> Option<u32> {
        let &number = self.numbers.get(&hash(bytes))?;
        let is_it = dictionary.get(number).is_some_and(|t| t.bytes == bytes);
        is_it.then_some(number)
    }

    /// Returns positions where a template occurred before, the likeliest first.
    pub(super) fn positions(&self, template: u32) -> impl Iterator<Item = u64> + use<> {
        let context = self.contexts.get(self.context(template)).copied();
        let latest = self.latest.get(template as usize).copied();
        context.into_iter().chain(latest)
    }

    /// Records a template's number.
    pub(super) fn define(&mut self, bytes: &[u8], number: u32) {
        self.numbers.insert(hash(bytes), number);
    }

    /// Records that op number `at` has `template`.
    pub(super) fn note(&mut self, template: u32, at: u64) {
        let (index, context) = (template as usize, self.context(template));
        if self.latest.len() <= index {
            self.latest.resize(index + 1, 0);
        }
        self.latest[index] = at;
        self.contexts.resize(CONTEXTS, u64::MAX);
        self.contexts[context] = at;
        self.before = [self.before[1], template];
    }

    fn context(&self, template: u32) -> usize {
        let [far, near] = self.before.map(u64::from);
        let key = (far << 40) ^ (near << 20) ^ u64::from(template);
        // Fibonacci hashing, as in `model`.
        let hash = key.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (hash >> (u64::BITS - CONTEXTS.trailing_zeros())) as usize
    }
}

fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

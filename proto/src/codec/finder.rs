//! Where in the history an op like this one came before. The encoder's alone:
//! it says what it found, so the decoder need not know how.

use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
};

use super::template::Dictionary;

/// Places remembered by context, a power of two.
const CONTEXTS: usize = 1 << 12;

/// Finds places in the history to go on from.
///
/// What it says is a guess, to be checked: hashes may meet, and the history may
/// have forgotten the place.
#[derive(Debug, Default)]
pub(super) struct Finder {
    /// Templates by the hash of their bytes.
    numbers: HashMap<u64, u32>,
    /// Where each template came last.
    latest: Vec<u64>,
    /// Where an op came last after the same two others, by the hash of the three.
    contexts: Vec<u64>,
    /// The templates of the last two ops.
    before: [u32; 2],
}

impl Finder {
    /// The number of the template with these bytes, if it is in `dictionary`.
    pub(super) fn number(&self, bytes: &[u8], dictionary: &Dictionary) -> Option<u32> {
        let &number = self.numbers.get(&hash(bytes))?;
        let is_it = dictionary.get(number).is_some_and(|t| t.bytes == bytes);
        is_it.then_some(number)
    }

    /// Places where a template came before, the likeliest first.
    pub(super) fn places(&self, template: u32) -> impl Iterator<Item = u64> + use<> {
        let context = self.contexts.get(self.context(template)).copied();
        let latest = self.latest.get(template as usize).copied();
        context.into_iter().chain(latest)
    }

    /// Takes note of a template's number.
    pub(super) fn define(&mut self, bytes: &[u8], number: u32) {
        self.numbers.insert(hash(bytes), number);
    }

    /// Takes note that op number `at` is of `template`.
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

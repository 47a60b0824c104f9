//! Templates: what an op is made of besides its ids, scalars and indices.
//!
//! Both ends number the templates in the order in which they first came. What
//! may be kept is bounded: an op that is very large is never kept, and when the
//! dictionary is full it starts anew, which costs a loop one more learning.

use super::value::{HoleKind, Value};

/// Most templates kept.
const MAX_TEMPLATES: usize = 1 << 14;
/// Most bytes of templates kept.
const MAX_BYTES: usize = 1 << 20;
/// Most holes of templates kept.
const MAX_HOLES: usize = 1 << 17;
/// A template that is larger than this is not kept.
const MAX_TEMPLATE_BYTES: usize = 8 << 10;
/// A template with more holes than this is not kept.
const MAX_TEMPLATE_HOLES: usize = 1 << 10;

/// Where a value goes in a template's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hole {
    pub(super) at: u32,
    pub(super) kind: HoleKind,
}

/// A template, wherever it is kept.
#[derive(Debug, Clone, Copy)]
pub(super) struct Template<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) holes: &'a [Hole],
}

impl Template<'_> {
    /// Whether a dictionary keeps templates of this size.
    pub(super) fn is_kept(&self) -> bool {
        self.bytes.len() <= MAX_TEMPLATE_BYTES && self.holes.len() <= MAX_TEMPLATE_HOLES
    }

    /// Writes the op, as postcard spells it, with `values` in the holes.
    pub(super) fn fill(&self, values: impl Iterator<Item = Value>, out: &mut Vec<u8>) {
        out.clear();
        let mut from = 0;
        for (hole, value) in self.holes.iter().zip(values) {
            let at = hole.at as usize;
            out.extend(&self.bytes[from..at]);
            value.put_plain(out);
            from = at;
        }
        out.extend(&self.bytes[from..]);
    }
}

/// The templates that were kept, by number.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Dictionary {
    bytes: Vec<u8>,
    holes: Vec<Hole>,
    /// Where each template ends in `bytes` and `holes`.
    ends: Vec<(u32, u32)>,
}

impl Dictionary {
    pub(super) fn get(&self, number: u32) -> Option<Template<'_>> {
        let number = number as usize;
        let &(bytes, holes) = self.ends.get(number)?;
        let (from_byte, from_hole) = match number.checked_sub(1) {
            Some(before) => self.ends[before],
            None => (0, 0),
        };
        Some(Template {
            bytes: &self.bytes[from_byte as usize..bytes as usize],
            holes: &self.holes[from_hole as usize..holes as usize],
        })
    }

    /// Whether one more `template` can be kept.
    pub(super) fn has_room(&self, template: Template<'_>) -> bool {
        self.ends.len() < MAX_TEMPLATES
            && self.bytes.len() + template.bytes.len() <= MAX_BYTES
            && self.holes.len() + template.holes.len() <= MAX_HOLES
    }

    /// Keeps `template`; the number it then has.
    pub(super) fn push(&mut self, template: Template<'_>) -> u32 {
        self.bytes.extend(template.bytes);
        self.holes.extend(template.holes);
        let end = (self.bytes.len() as u32, self.holes.len() as u32);
        self.ends.push(end);
        self.ends.len() as u32 - 1
    }

    pub(super) fn clear(&mut self) {
        self.bytes.clear();
        self.holes.clear();
        self.ends.clear();
    }
}

//! Templates: an op without its ids, scalars and indices.
//!
//! Both ends number templates in the order of their first occurrence. Memory is bounded:
//! a very large op is never kept, and a full dictionary is cleared, after which a loop
//! must be learnt once more.

use super::value::{HoleKind, Value};

/// Maximum number of templates kept.
const MAX_TEMPLATES: usize = 1 << 14;
/// Maximum number of bytes of templates kept.
const MAX_BYTES: usize = 1 << 20;
/// Maximum number of holes of templates kept.
const MAX_HOLES: usize = 1 << 17;
/// Maximum size in bytes of a template that is kept.
const MAX_TEMPLATE_BYTES: usize = 8 << 10;
/// Maximum number of holes of a template that is kept.
const MAX_TEMPLATE_HOLES: usize = 1 << 10;

/// Position of a value in a template's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hole {
    pub(super) at: u32,
    pub(super) kind: HoleKind,
}

/// A borrowed template.
#[derive(Debug, Clone, Copy)]
pub(super) struct Template<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) holes: &'a [Hole],
}

impl Template<'_> {
    /// Returns whether a dictionary keeps templates of this size.
    pub(super) fn is_kept(&self) -> bool {
        self.bytes.len() <= MAX_TEMPLATE_BYTES && self.holes.len() <= MAX_TEMPLATE_HOLES
    }

    /// Writes the op in postcard form, with `values` in the holes.
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

/// The templates that are kept, by number.
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

    /// Returns whether `template` can be added.
    pub(super) fn has_room(&self, template: Template<'_>) -> bool {
        self.ends.len() < MAX_TEMPLATES
            && self.bytes.len() + template.bytes.len() <= MAX_BYTES
            && self.holes.len() + template.holes.len() <= MAX_HOLES
    }

    /// Adds `template` and returns its number.
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

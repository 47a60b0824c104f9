//! Parses an input. At its end there are zeros, so that every input is valid and a fuzzer
//! may cut it anywhere.

/// The rest of an input.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    /// Returns whether everything was read.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the next `n` bytes, or fewer if fewer are left.
    pub fn bytes(&mut self, n: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(n.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// Returns the next byte.
    pub fn byte(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    /// Returns the next two bytes as a little-endian number.
    pub fn short(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    /// Returns the next eight bytes as a little-endian number.
    pub fn long(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let taken = self.bytes(N);
        array[..taken.len()].copy_from_slice(taken);
        array
    }
}

//! Values that fill the holes of a template: tensor ids, scalars and indices.
//!
//! An id is kept in the form that is likely to hold for the next op of the same kind. For
//! a tensor made in the loop, this is the distance from the id counter, which is the same
//! in each iteration; for a tensor that outlives the loop, the id itself.

use super::{
    CodecError,
    wire::{Reader, put_marked, put_varint, unzigzag, zigzag},
};

/// What kind of value a template's hole takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HoleKind {
    /// A tensor id.
    Id,
    /// A scalar, with its variant.
    Scalar,
    /// A bound of a slice.
    Index,
}

impl HoleKind {
    pub(super) fn from_number(number: u64) -> Option<Self> {
        [Self::Id, Self::Scalar, Self::Index]
            .get(number as usize)
            .copied()
    }
}

/// How a value's bits are to be interpreted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// An id, given by its distance below the id counter.
    Relative,
    /// An id itself.
    Absolute,
    Float,
    Int,
    UInt,
    Bool,
    Index,
}

/// A value that fills a hole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Value {
    pub(super) form: Form,
    pub(super) bits: u64,
}

impl Value {
    /// Neither a scalar nor an index: marks an empty entry.
    pub(super) const NONE: Self = Self::new(Form::Absolute, 0);

    pub(super) const fn new(form: Form, bits: u64) -> Self {
        Self { form, bits }
    }

    /// Returns the value, with an id in absolute form; the distance of a relative id
    /// counts from `counter`.
    pub(super) fn resolve(self, counter: u64) -> Self {
        match self.form {
            Form::Relative => Self::new(Form::Absolute, counter.wrapping_sub(self.bits)),
            _ => self,
        }
    }

    /// Reverses [`resolve`](Self::resolve): returns an id as its distance from the
    /// counter.
    pub(super) fn relative(self, counter: u64) -> Self {
        match self.form {
            Form::Absolute => Self::new(Form::Relative, counter.wrapping_sub(self.bits)),
            _ => self,
        }
    }

    pub(super) fn is_id(self) -> bool {
        matches!(self.form, Form::Relative | Form::Absolute)
    }

    /// Writes the value in its wire form.
    pub(super) fn put(self, out: &mut Vec<u8>) {
        let signed = zigzag(self.bits as i64);
        match self.form {
            Form::Relative => put_marked(out, signed, false),
            Form::Absolute => put_marked(out, self.bits, true),
            Form::Float => {
                let single = f64::from_bits(self.bits) as f32;
                if f64::from(single).to_bits() == self.bits {
                    out.push(1);
                    out.extend(single.to_le_bytes());
                } else {
                    out.push(0);
                    out.extend(self.bits.to_le_bytes());
                }
            }
            Form::Int => {
                out.push(2);
                put_varint(out, signed);
            }
            Form::UInt => {
                out.push(3);
                put_varint(out, self.bits);
            }
            Form::Bool => out.push(4 + self.bits as u8),
            Form::Index => put_varint(out, signed),
        }
    }

    /// Reads a value that [`put`](Self::put) wrote.
    pub(super) fn read(kind: HoleKind, reader: &mut Reader<'_>) -> Result<Self, CodecError> {
        let value = match kind {
            HoleKind::Id => match reader.marked()? {
                (back, false) => Self::new(Form::Relative, unzigzag(back) as u64),
                (id, true) => Self::new(Form::Absolute, id),
            },
            HoleKind::Scalar => match reader.array()? {
                [0] => Self::new(Form::Float, u64::from_le_bytes(reader.array()?)),
                [1] => {
                    let single = f32::from_le_bytes(reader.array()?);
                    Self::new(Form::Float, f64::from(single).to_bits())
                }
                [2] => Self::new(Form::Int, unzigzag(reader.varint()?) as u64),
                [3] => Self::new(Form::UInt, reader.varint()?),
                [tag @ 4..=5] => Self::new(Form::Bool, u64::from(tag - 4)),
                [tag] => return Err(reader.error(format!("there is no scalar kind {tag}"))),
            },
            HoleKind::Index => Self::new(Form::Index, unzigzag(reader.varint()?) as u64),
        };
        Ok(value)
    }

    /// Writes the resolved value as postcard writes it within an op: a scalar with the
    /// number of its variant in `burn_ir::ScalarIr`.
    pub(super) fn put_plain(self, out: &mut Vec<u8>) {
        let signed = zigzag(self.bits as i64);
        match self.form {
            Form::Relative | Form::Absolute => put_varint(out, self.bits),
            Form::Float => {
                out.push(0);
                out.extend(self.bits.to_le_bytes());
            }
            Form::Int => {
                out.push(1);
                put_varint(out, signed);
            }
            Form::UInt => {
                out.push(2);
                put_varint(out, self.bits);
            }
            Form::Bool => out.extend([3, self.bits as u8]),
            Form::Index => put_varint(out, signed),
        }
    }
}

#[cfg(test)]
mod tests {
    use burn_ir::ScalarIr;

    use super::*;

    fn edges() -> Vec<(HoleKind, Value)> {
        use Form::*;
        let wide = [0, 1, 63, 64, 1 << 31, i64::MAX as u64, 1 << 63, u64::MAX];
        let floats = [
            0.0,
            -0.0,
            0.1,
            0.5,
            f64::NAN,
            f64::INFINITY,
            f64::MIN_POSITIVE,
        ];
        let of = |form: Form, kind| wide.map(|bits| (kind, Value::new(form, bits)));
        let float = |f: f64| (HoleKind::Scalar, Value::new(Float, f.to_bits()));
        let mut edges: Vec<_> = floats.map(float).into();
        edges.extend([0, 1].map(|b| (HoleKind::Scalar, Value::new(Bool, b))));
        edges.extend(
            [Relative, Absolute]
                .into_iter()
                .flat_map(|f| of(f, HoleKind::Id)),
        );
        edges.extend(
            [Float, Int, UInt]
                .into_iter()
                .flat_map(|f| of(f, HoleKind::Scalar)),
        );
        edges.extend(of(Index, HoleKind::Index));
        edges
    }

    #[test]
    fn values_survive_the_round_trip() {
        for (kind, value) in edges() {
            let mut bytes = Vec::new();
            value.put(&mut bytes);
            let mut reader = Reader::new(&bytes);
            assert_eq!(Value::read(kind, &mut reader).unwrap(), value);
            assert_eq!(reader.left(), 0);
            assert_eq!(value.resolve(9).relative(9).resolve(9), value.resolve(9));
        }
    }

    #[test]
    fn scalars_are_written_as_postcard_writes_them() {
        let scalars = [
            (
                Value::new(Form::Float, 0.1f64.to_bits()),
                ScalarIr::Float(0.1),
            ),
            (Value::new(Form::Int, -3i64 as u64), ScalarIr::Int(-3)),
            (Value::new(Form::UInt, 300), ScalarIr::UInt(300)),
            (Value::new(Form::Bool, 1), ScalarIr::Bool(true)),
        ];
        for (value, scalar) in scalars {
            let mut plain = Vec::new();
            value.put_plain(&mut plain);
            assert_eq!(plain, postcard::to_stdvec(&scalar).unwrap());
        }
    }
}

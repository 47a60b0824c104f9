//! Names of ops: the names of their enum variants in Burn's IR. They are taken from the
//! IR's serialization, so that no list of some two hundred names is needed.

use std::fmt;

use burn_ir::OperationIr;
use serde::{
    Serialize, Serializer,
    ser::{Impossible, SerializeTupleVariant},
};

/// The name of an op for people, such as `NumericFloat.Add`. It is cheap to copy and
/// keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct OpName {
    /// The outer variant, mostly the kind of tensor; the whole name if `op` is `None`.
    family: &'static str,
    op: Option<&'static str>,
}

impl OpName {
    /// Returns the name of `op`.
    pub fn of(op: &OperationIr) -> Self {
        let mut names = VariantRecorder::default();
        // The serialization is ended early with an error.
        let _ = op.serialize(&mut names);
        Self {
            family: names.outer.unwrap_or("op"),
            op: names.inner,
        }
    }

    /// Writes as much of the name to `buffer` as there is room for, without the cost of
    /// formatting. Returns the number of bytes.
    pub fn write_to(&self, buffer: &mut [u8]) -> usize {
        let parts = match self.op {
            Some(op) => [self.family, ".", op],
            None => [self.family, "", ""],
        };
        let mut at = 0;
        for part in parts {
            let room = &mut buffer[at..];
            let length = part.len().min(room.len());
            room[..length].copy_from_slice(&part.as_bytes()[..length]);
            at += length;
        }
        at
    }
}

impl From<&'static str> for OpName {
    /// Creates a name for something that is not an op of the IR.
    fn from(family: &'static str) -> Self {
        Self { family, op: None }
    }
}

impl fmt::Display for OpName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.family)?;
        match self.op {
            Some(op) => write!(f, ".{op}"),
            None => Ok(()),
        }
    }
}

/// A serializer that records the variant it is given and the variant within that one.
#[derive(Default)]
struct VariantRecorder {
    outer: Option<&'static str>,
    inner: Option<&'static str>,
}

type Done = Result<(), fmt::Error>;
type Never = Impossible<(), fmt::Error>;

impl VariantRecorder {
    /// Records a variant, and returns whether it is the outer one.
    fn note(&mut self, variant: &'static str) -> bool {
        let is_outer = self.outer.is_none();
        match is_outer {
            true => self.outer = Some(variant),
            false => self.inner = Some(variant),
        }
        is_outer
    }
}

/// Generates methods for values without a name.
macro_rules! nameless {
    ($($method:ident: $type:ty;)*) => {
        $(fn $method(self, _: $type) -> Done {
            Err(fmt::Error)
        })*
    };
}

impl<'a> Serializer for &'a mut VariantRecorder {
    type Ok = ();
    type Error = fmt::Error;
    type SerializeSeq = Never;
    type SerializeTuple = Never;
    type SerializeTupleStruct = Never;
    type SerializeTupleVariant = &'a mut VariantRecorder;
    type SerializeMap = Never;
    type SerializeStruct = Never;
    type SerializeStructVariant = Never;

    nameless! {
        serialize_bool: bool;
        serialize_i8: i8;
        serialize_i16: i16;
        serialize_i32: i32;
        serialize_i64: i64;
        serialize_u8: u8;
        serialize_u16: u16;
        serialize_u32: u32;
        serialize_u64: u64;
        serialize_f32: f32;
        serialize_f64: f64;
        serialize_char: char;
        serialize_str: &str;
        serialize_bytes: &[u8];
        serialize_unit_struct: &'static str;
    }

    fn serialize_none(self) -> Done {
        Err(fmt::Error)
    }

    fn serialize_some<T: Serialize + ?Sized>(self, _: &T) -> Done {
        Err(fmt::Error)
    }

    fn serialize_unit(self) -> Done {
        Err(fmt::Error)
    }

    fn serialize_unit_variant(self, _: &'static str, _: u32, variant: &'static str) -> Done {
        self.note(variant);
        Ok(())
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(self, _: &'static str, _: &T) -> Done {
        Err(fmt::Error)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        value: &T,
    ) -> Done {
        match self.note(variant) {
            true => value.serialize(self),
            false => Ok(()),
        }
    }

    fn serialize_seq(self, _: Option<usize>) -> Result<Never, fmt::Error> {
        Err(fmt::Error)
    }

    fn serialize_tuple(self, _: usize) -> Result<Never, fmt::Error> {
        Err(fmt::Error)
    }

    fn serialize_tuple_struct(self, _: &'static str, _: usize) -> Result<Never, fmt::Error> {
        Err(fmt::Error)
    }

    fn serialize_tuple_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        _: usize,
    ) -> Result<Self, fmt::Error> {
        match self.note(variant) {
            true => Ok(self),
            false => Err(fmt::Error),
        }
    }

    fn serialize_map(self, _: Option<usize>) -> Result<Never, fmt::Error> {
        Err(fmt::Error)
    }

    fn serialize_struct(self, _: &'static str, _: usize) -> Result<Never, fmt::Error> {
        Err(fmt::Error)
    }

    fn serialize_struct_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        _: usize,
    ) -> Result<Never, fmt::Error> {
        self.note(variant);
        Err(fmt::Error)
    }
}

impl SerializeTupleVariant for &mut VariantRecorder {
    type Ok = ();
    type Error = fmt::Error;

    /// In variants with a dtype the op comes after the dtype, so the last field has the name.
    fn serialize_field<T: Serialize + ?Sized>(&mut self, value: &T) -> Done {
        value.serialize(&mut **self)
    }

    fn end(self) -> Done {
        Ok(())
    }
}

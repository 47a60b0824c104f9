//! Splits an op into what stays the same in each iteration of a loop and what changes.
//!
//! [`FlatOp`] serializes an op as postcard would, but leaves holes at tensor ids, scalars
//! and the bounds of slices, and keeps these values in a list. The bytes between the
//! holes are the op's *template*. Splitting any op takes one pass, and no allocation once
//! the buffers have grown.
//!
//! Two ops with the same template bytes have their holes at the same positions: the bytes
//! before a position determine what follows there. So comparing the bytes is enough to
//! compare templates.

use burn_ir::OperationIr;
use postcard::Error;
use serde::{Serialize, Serializer, ser};

use super::{
    template::Hole,
    value::{Form, HoleKind, Value},
    wire::{put_varint, zigzag},
};

/// An op split into its template and values.
#[derive(Debug, Default)]
pub(super) struct FlatOp {
    /// The template's bytes.
    pub(super) bytes: Vec<u8>,
    /// The places of the template at which values are missing.
    pub(super) holes: Vec<Hole>,
    /// The values that fill the holes; ids are absolute.
    pub(super) values: Vec<Value>,
    /// Kind of hole for the numbers serialized next, if they belong in one.
    within: Option<HoleKind>,
}

impl FlatOp {
    /// Splits `op`, replacing the previous contents.
    pub(super) fn take(&mut self, op: &OperationIr) -> Result<(), Error> {
        self.bytes.clear();
        self.holes.clear();
        self.values.clear();
        self.within = None;
        op.serialize(self)
    }

    /// Returns an upper limit on the op's size in bytes as postcard writes it.
    pub(super) fn plain_bytes(&self) -> usize {
        self.bytes.len() + 11 * self.holes.len()
    }

    fn hole(&mut self, kind: HoleKind, form: Form, bits: u64) {
        let at = self.bytes.len() as u32;
        self.holes.push(Hole { at, kind });
        self.values.push(Value::new(form, bits));
    }

    fn varint(&mut self, n: u64) {
        put_varint(&mut self.bytes, n);
    }
}

/// Names in Burn's IR of the types whose numbers go into holes.
const ID: &str = "TensorId";
const SCALAR: &str = "ScalarIr";
const SLICE: &str = "Slice";

/// Generates methods that only write their number.
macro_rules! numbers {
    ($($method:ident: $type:ty => |$flat:ident, $n:ident| $write:expr;)*) => {
        $(fn $method(self, $n: $type) -> Result<(), Error> {
            let $flat = self;
            $write;
            Ok(())
        })*
    };
}

impl Serializer for &mut FlatOp {
    type Ok = ();
    type Error = Error;
    type SerializeSeq = Self;
    type SerializeTuple = Self;
    type SerializeTupleStruct = Self;
    type SerializeTupleVariant = Self;
    type SerializeMap = Self;
    type SerializeStruct = Self;
    type SerializeStructVariant = Self;

    numbers! {
        serialize_u8: u8 => |flat, n| flat.bytes.push(n);
        serialize_i8: i8 => |flat, n| flat.bytes.push(n as u8);
        serialize_u16: u16 => |flat, n| flat.varint(n.into());
        serialize_u32: u32 => |flat, n| flat.varint(n.into());
        serialize_i16: i16 => |flat, n| flat.varint(zigzag(n.into()));
        serialize_i32: i32 => |flat, n| flat.varint(zigzag(n.into()));
        serialize_f32: f32 => |flat, n| flat.bytes.extend(n.to_le_bytes());
    }

    fn serialize_bool(self, b: bool) -> Result<(), Error> {
        match self.within {
            Some(kind) => self.hole(kind, Form::Bool, b.into()),
            None => self.bytes.push(b.into()),
        }
        Ok(())
    }

    fn serialize_u64(self, n: u64) -> Result<(), Error> {
        match self.within {
            Some(HoleKind::Id) => self.hole(HoleKind::Id, Form::Absolute, n),
            Some(kind) => self.hole(kind, Form::UInt, n),
            None => self.varint(n),
        }
        Ok(())
    }

    fn serialize_i64(self, n: i64) -> Result<(), Error> {
        match self.within {
            Some(HoleKind::Index) => self.hole(HoleKind::Index, Form::Index, n as u64),
            Some(kind) => self.hole(kind, Form::Int, n as u64),
            None => self.varint(zigzag(n)),
        }
        Ok(())
    }

    fn serialize_f64(self, n: f64) -> Result<(), Error> {
        match self.within {
            Some(kind) => self.hole(kind, Form::Float, n.to_bits()),
            None => self.bytes.extend(n.to_le_bytes()),
        }
        Ok(())
    }

    fn serialize_char(self, v: char) -> Result<(), Error> {
        self.serialize_str(v.encode_utf8(&mut [0; 4]))
    }

    fn serialize_str(self, v: &str) -> Result<(), Error> {
        self.serialize_bytes(v.as_bytes())
    }

    fn serialize_bytes(self, v: &[u8]) -> Result<(), Error> {
        self.varint(v.len() as u64);
        self.bytes.extend(v);
        Ok(())
    }

    fn serialize_none(self) -> Result<(), Error> {
        self.serialize_u8(0)
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<(), Error> {
        self.bytes.push(1);
        value.serialize(self)
    }

    fn serialize_unit(self) -> Result<(), Error> {
        Ok(())
    }

    fn serialize_unit_struct(self, _: &'static str) -> Result<(), Error> {
        Ok(())
    }

    fn serialize_unit_variant(
        self,
        _: &'static str,
        index: u32,
        _: &'static str,
    ) -> Result<(), Error> {
        self.serialize_u32(index)
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        value: &T,
    ) -> Result<(), Error> {
        value.serialize(self)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        name: &'static str,
        index: u32,
        _: &'static str,
        value: &T,
    ) -> Result<(), Error> {
        if name == SCALAR {
            self.within = Some(HoleKind::Scalar);
            value.serialize(&mut *self)?;
            self.within = None;
            return Ok(());
        }
        self.varint(index.into());
        value.serialize(self)
    }

    fn serialize_seq(self, len: Option<usize>) -> Result<Self, Error> {
        self.varint(len.ok_or(Error::SerializeSeqLengthUnknown)? as u64);
        Ok(self)
    }

    fn serialize_tuple(self, _: usize) -> Result<Self, Error> {
        Ok(self)
    }

    fn serialize_tuple_struct(self, _: &'static str, _: usize) -> Result<Self, Error> {
        Ok(self)
    }

    fn serialize_tuple_variant(
        self,
        _: &'static str,
        index: u32,
        _: &'static str,
        _: usize,
    ) -> Result<Self, Error> {
        self.varint(index.into());
        Ok(self)
    }

    fn serialize_map(self, len: Option<usize>) -> Result<Self, Error> {
        self.serialize_seq(len)
    }

    fn serialize_struct(self, name: &'static str, _: usize) -> Result<Self, Error> {
        self.within = match name {
            ID => Some(HoleKind::Id),
            SLICE => Some(HoleKind::Index),
            _ => None,
        };
        Ok(self)
    }

    fn serialize_struct_variant(
        self,
        _: &'static str,
        index: u32,
        _: &'static str,
        _: usize,
    ) -> Result<Self, Error> {
        self.varint(index.into());
        Ok(self)
    }

    fn is_human_readable(&self) -> bool {
        false
    }
}

/// Implements serde's traits for compound values, whose parts are written one after the
/// other.
macro_rules! compound {
    ($($trait:ident: $method:ident($($key:ident)?);)*) => {
        $(impl ser::$trait for &mut FlatOp {
            type Ok = ();
            type Error = Error;

            fn $method<T: Serialize + ?Sized>(
                &mut self,
                $($key: &'static str,)?
                value: &T,
            ) -> Result<(), Error> {
                value.serialize(&mut **self)
            }

            fn end(self) -> Result<(), Error> {
                self.within = None;
                Ok(())
            }
        })*
    };
}

compound! {
    SerializeSeq: serialize_element();
    SerializeTuple: serialize_element();
    SerializeTupleStruct: serialize_field();
    SerializeTupleVariant: serialize_field();
    SerializeStruct: serialize_field(_key);
    SerializeStructVariant: serialize_field(_key);
}

impl ser::SerializeMap for &mut FlatOp {
    type Ok = ();
    type Error = Error;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), Error> {
        key.serialize(&mut **self)
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Error> {
        value.serialize(&mut **self)
    }

    fn end(self) -> Result<(), Error> {
        Ok(())
    }
}

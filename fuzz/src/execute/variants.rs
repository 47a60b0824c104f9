//! The variants of Burn's ops, read from their `Deserialize` implementations, so that a
//! variant that Burn adds appears in the list without a change here.

use burn_ir::OperationIr;
use serde::{
    Deserialize, Deserializer,
    de::{
        DeserializeSeed, EnumAccess, Error as _, IntoDeserializer, SeqAccess, VariantAccess,
        Visitor,
        value::{Error, StrDeserializer, U32Deserializer},
    },
    forward_to_deserialize_any,
};

type Names = &'static [&'static str];

/// Returns the names of all variants, as [`OpName`](tensord_proto::codec::OpName) prints
/// them.
pub fn names() -> Vec<String> {
    let families = list(None);
    let families = families.outer.unwrap_or_default();
    let ops = families.iter().enumerate().map(|(i, family)| {
        let found = list(Some(i));
        match found.inner {
            Some(ops) => ops.iter().map(|op| format!("{family}.{op}")).collect(),
            None => vec![(*family).to_owned()],
        }
    });
    ops.collect::<Vec<_>>().concat()
}

/// The lists of variant names that the deserializers were given.
#[derive(Default)]
struct Found {
    outer: Option<Names>,
    inner: Option<Names>,
}

/// Deserializes an op of a family until the names of its variants are known.
fn list(family: Option<usize>) -> Found {
    let mut found = Found::default();
    // Deserialization always ends with the error of `stop`.
    let _ = OperationIr::deserialize(Outer {
        family,
        found: &mut found,
    });
    found
}

/// Returns the error that ends the deserialization.
fn stop<T>() -> Result<T, Error> {
    Err(Error::custom("the variants are known"))
}

struct Outer<'a> {
    family: Option<usize>,
    found: &'a mut Found,
}

/// Methods for types that are no enum, which all end the deserialization.
macro_rules! no_enum {
    () => {
        forward_to_deserialize_any! {
            bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes
            byte_buf option unit unit_struct newtype_struct seq tuple tuple_struct map
            struct identifier ignored_any
        }

        fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Error> {
            stop()
        }
    };
}

impl<'de> Deserializer<'de> for Outer<'_> {
    type Error = Error;

    no_enum!();

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: Names,
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.found.outer = Some(variants);
        match self.family {
            Some(family) => visitor.visit_enum(Family {
                index: family as u32,
                found: self.found,
            }),
            None => stop(),
        }
    }
}

struct Family<'a> {
    index: u32,
    found: &'a mut Found,
}

impl<'de, 'a> EnumAccess<'de> for Family<'a> {
    type Error = Error;
    type Variant = Inner<'a>;

    fn variant_seed<V: DeserializeSeed<'de>>(
        self,
        seed: V,
    ) -> Result<(V::Value, Inner<'a>), Error> {
        let index: U32Deserializer<Error> = self.index.into_deserializer();
        let fields = 0;
        let found = self.found;
        Ok((seed.deserialize(index)?, Inner { found, fields }))
    }
}

/// The op of a family, alone or after a dtype.
struct Inner<'a> {
    found: &'a mut Found,
    fields: usize,
}

impl<'de> VariantAccess<'de> for Inner<'_> {
    type Error = Error;

    fn unit_variant(self) -> Result<(), Error> {
        stop()
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, Error> {
        seed.deserialize(self)
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_seq(self)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        _: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, Error> {
        stop()
    }
}

impl<'de> SeqAccess<'de> for Inner<'_> {
    type Error = Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, Error> {
        self.fields += 1;
        if self.fields == 1 {
            // The dtype, which is an enum without values here.
            let dtype: StrDeserializer<'_, Error> = "F32".into_deserializer();
            return seed.deserialize(dtype).map(Some);
        }
        let (found, fields) = (&mut *self.found, 0);
        seed.deserialize(Inner { found, fields }).map(Some)
    }
}

impl<'de> Deserializer<'de> for Inner<'_> {
    type Error = Error;

    no_enum!();

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: Names,
        _: V,
    ) -> Result<V::Value, Error> {
        self.found.inner = Some(variants);
        stop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variant_names_cover_every_family() {
        let names = names();
        for name in ["BaseBool.Select", "NumericInt.IntRandom", "Drop", "Init"] {
            assert!(names.iter().any(|one| one == name), "{name} of {names:?}");
        }
        assert!(names.len() > 250, "{}", names.len());
    }
}

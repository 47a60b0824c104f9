//! The types of elements, by their names in the protocol.

use std::fmt;

use burn::tensor::{BoolStore, DType};

/// The type of a tensor's elements. The protocol has one more, `BYTES`, for strings, of which Burn has no tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum DataType {
    Bool,
    UInt8,
    UInt16,
    UInt32,
    UInt64,
    Int8,
    Int16,
    Int32,
    Int64,
    Fp16,
    Bf16,
    Fp32,
    Fp64,
}

impl DataType {
    pub(crate) const ALL: [Self; 13] = [
        Self::Bool,
        Self::UInt8,
        Self::UInt16,
        Self::UInt32,
        Self::UInt64,
        Self::Int8,
        Self::Int16,
        Self::Int32,
        Self::Int64,
        Self::Fp16,
        Self::Bf16,
        Self::Fp32,
        Self::Fp64,
    ];

    /// Returns the type with this name in the protocol.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|it| it.name() == name)
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Bool => "BOOL",
            Self::UInt8 => "UINT8",
            Self::UInt16 => "UINT16",
            Self::UInt32 => "UINT32",
            Self::UInt64 => "UINT64",
            Self::Int8 => "INT8",
            Self::Int16 => "INT16",
            Self::Int32 => "INT32",
            Self::Int64 => "INT64",
            Self::Fp16 => "FP16",
            Self::Bf16 => "BF16",
            Self::Fp32 => "FP32",
            Self::Fp64 => "FP64",
        }
    }

    /// Returns the size of an element in bytes.
    pub(crate) fn size(self) -> usize {
        match self {
            Self::Bool | Self::UInt8 | Self::Int8 => 1,
            Self::UInt16 | Self::Int16 | Self::Fp16 | Self::Bf16 => 2,
            Self::UInt32 | Self::Int32 | Self::Fp32 => 4,
            Self::UInt64 | Self::Int64 | Self::Fp64 => 8,
        }
    }

    /// Returns Burn's type for elements with these bytes.
    pub(crate) fn dtype(self) -> DType {
        match self {
            Self::Bool => DType::Bool(BoolStore::Native),
            Self::UInt8 => DType::U8,
            Self::UInt16 => DType::U16,
            Self::UInt32 => DType::U32,
            Self::UInt64 => DType::U64,
            Self::Int8 => DType::I8,
            Self::Int16 => DType::I16,
            Self::Int32 => DType::I32,
            Self::Int64 => DType::I64,
            Self::Fp16 => DType::F16,
            Self::Bf16 => DType::BF16,
            Self::Fp32 => DType::F32,
            Self::Fp64 => DType::F64,
        }
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

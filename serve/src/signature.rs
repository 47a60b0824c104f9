//! What tensors a model takes and returns, declared once: the names, types and shapes that requests are checked
//! against, and the types of Burn's tensors that the model's function has.

use std::{future::Future, marker::PhantomData, pin::Pin};

use burn::{
    backend::ExecutionError,
    tensor::{Bool, Device, Float, Int, Tensor, TensorData},
};
use tensord_client::data::{self, Kind};

use crate::protocol::{DataType, MAX_DIMS};

/// The size of a dimension that differs between requests. As the first dimension of every tensor of a model, it
/// is the rows of a batch: requests are put together along it.
pub const BATCH: i64 = -1;

/// The declaration of a tensor that a model takes or returns: its name, element type and shape.
///
/// The length of the shape is the number of dimensions of the tensor in the model's function. A dimension is [`BATCH`],
/// which stands for any size, or a fixed size.
///
/// ```
/// use tensord_serve::{BATCH, Port};
///
/// let image = Port::f32("image", [BATCH, 1, 28, 28]); // a Tensor<4>
/// let tokens = Port::i64("tokens", [BATCH, BATCH]); // a Tensor<2, Int>, of any two sizes
/// # let _ = (image, tokens);
/// ```
#[derive(Debug)]
pub struct Port<T> {
    spec: TensorSpec,
    tensor: PhantomData<fn() -> T>,
}

/// What a tensor of a request must be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    pub(crate) name: String,
    pub(crate) datatype: DataType,
    /// [`BATCH`] for a dimension of any size.
    pub(crate) shape: Vec<i64>,
}

impl TensorSpec {
    /// Returns whether the first dimension is the rows of a batch.
    pub(crate) fn has_batch(&self) -> bool {
        self.shape.first() == Some(&BATCH)
    }

    /// Returns whether a tensor may have this shape.
    pub(crate) fn accepts(&self, shape: &[usize]) -> bool {
        let is_allowed = |(declared, size): (&i64, &usize)| {
            *declared == BATCH || usize::try_from(*declared) == Ok(*size)
        };
        shape.len() == self.shape.len() && self.shape.iter().zip(shape).all(is_allowed)
    }
}

impl<T> Port<T> {
    fn new<const D: usize>(name: impl Into<String>, datatype: DataType, shape: [i64; D]) -> Self {
        Self {
            spec: TensorSpec {
                name: name.into(),
                datatype,
                shape: shape.into(),
            },
            tensor: PhantomData,
        }
    }
}

macro_rules! constructors {
    ($kind:ty: $($function:ident $datatype:ident $text:literal),*) => {
        impl<const D: usize> Port<Tensor<D, $kind>> {
            $(
                #[doc = concat!("Declares a tensor of ", $text, ".")]
                pub fn $function(name: impl Into<String>, shape: [i64; D]) -> Self {
                    Self::new(name, DataType::$datatype, shape)
                }
            )*
        }
    };
}

constructors!(Float:
    f16 Fp16 "floats of 16 bits (`FP16`)",
    bf16 Bf16 "floats of 16 bits with 8 bits of exponent (`BF16`)",
    f32 Fp32 "floats of 32 bits (`FP32`)",
    f64 Fp64 "floats of 64 bits (`FP64`)");
constructors!(Int:
    i8 Int8 "integers of 8 bits (`INT8`). The model computes with the device's integers",
    i16 Int16 "integers of 16 bits (`INT16`). The model computes with the device's integers",
    i32 Int32 "integers of 32 bits (`INT32`). The model computes with the device's integers",
    i64 Int64 "integers of 64 bits (`INT64`). The model computes with the device's integers",
    u8 UInt8 "natural numbers of 8 bits (`UINT8`). The model computes with the device's integers",
    u16 UInt16 "natural numbers of 16 bits (`UINT16`). The model computes with the device's integers",
    u32 UInt32 "natural numbers of 32 bits (`UINT32`). The model computes with the device's integers",
    u64 UInt64 "natural numbers of 64 bits (`UINT64`). The model computes with the device's integers");
constructors!(Bool:
    bool Bool "truth values (`BOOL`)");

/// A tensor that is being read.
pub(crate) type Reading = Pin<Box<dyn Future<Output = Result<TensorData, ExecutionError>> + Send>>;

/// The tensors that a model takes, or those that it returns: one [`Port`], or a tuple of up to eight.
///
/// The other methods are the server's; nothing else can implement the trait.
pub trait Ports: sealed::Sealed + Send + Sync + 'static {
    /// What the model's function takes or returns: a tensor, or a tuple of tensors.
    type Tensors: 'static;

    #[doc(hidden)]
    fn specs(&self) -> Vec<TensorSpec>;

    /// Uploads one value for each port, in order.
    ///
    /// # Panics
    ///
    /// If there are too few values, or one has elements that do not convert to those of the device.
    #[doc(hidden)]
    fn upload(values: &mut dyn Iterator<Item = TensorData>, device: &Device) -> Self::Tensors;

    /// Begins to read the tensors.
    #[doc(hidden)]
    fn read(tensors: Self::Tensors, into: &mut Vec<Reading>);
}

/// The kinds of elements: [`Float`], [`Int`] and [`Bool`].
pub trait PortKind: Kind + sealed::Sealed {
    /// Whether the elements on the device have the declared type; otherwise they have the device's default.
    #[doc(hidden)]
    const HAS_DECLARED_TYPE: bool;
}

mod sealed {
    /// Keeps other crates from implementing a trait.
    pub trait Sealed {}
}

impl sealed::Sealed for Float {}
impl sealed::Sealed for Int {}
impl sealed::Sealed for Bool {}

impl PortKind for Float {
    const HAS_DECLARED_TYPE: bool = true;
}

// Devices have one type of integers and one of truth values, on which Burn's ops agree.
impl PortKind for Int {
    const HAS_DECLARED_TYPE: bool = false;
}

impl PortKind for Bool {
    const HAS_DECLARED_TYPE: bool = false;
}

impl<T> sealed::Sealed for Port<T> {}

impl<const D: usize, K: PortKind> Ports for Port<Tensor<D, K>> {
    type Tensors = Tensor<D, K>;

    fn specs(&self) -> Vec<TensorSpec> {
        const { assert!(D <= MAX_DIMS, "a tensor has at most 16 dimensions") };
        vec![self.spec.clone()]
    }

    fn upload(values: &mut dyn Iterator<Item = TensorData>, device: &Device) -> Self::Tensors {
        let value = values.next().expect("there is a value for each input");
        match (K::HAS_DECLARED_TYPE, value.dtype()) {
            (true, dtype) => data::from_data(value, (device, dtype)),
            (false, _) => data::from_data(value, device),
        }
    }

    fn read(tensor: Self::Tensors, into: &mut Vec<Reading>) {
        into.push(Box::pin(data::into_data_async(tensor)));
    }
}

macro_rules! tuple {
    ($($port:ident $index:tt),*) => {
        impl<$($port),*> sealed::Sealed for ($($port,)*) {}

        impl<$($port: Ports),*> Ports for ($($port,)*) {
            type Tensors = ($($port::Tensors,)*);

            fn specs(&self) -> Vec<TensorSpec> {
                [$(self.$index.specs()),*].concat()
            }

            fn upload(values: &mut dyn Iterator<Item = TensorData>, device: &Device) -> Self::Tensors {
                ($($port::upload(values, device),)*)
            }

            fn read(tensors: Self::Tensors, into: &mut Vec<Reading>) {
                $($port::read(tensors.$index, into);)*
            }
        }
    };
}

tuple!(A 0);
tuple!(A 0, B 1);
tuple!(A 0, B 1, C 2);
tuple!(A 0, B 1, C 2, D 3);
tuple!(A 0, B 1, C 2, D 3, E 4);
tuple!(A 0, B 1, C 2, D 3, E 4, F 5);
tuple!(A 0, B 1, C 2, D 3, E 4, F 5, G 6);
tuple!(A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7);

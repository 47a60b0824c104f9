//! A case is a name, a computation on a given device, and a bound on how far the results of
//! two kinds of backend may differ.
//!
//! A case depends neither on its runner nor on the reference.

use burn::tensor::kind::Basic;
use burn::tensor::{DType, Device, Tensor, TensorData};

/// Relative and absolute bound of Burn's own backend tests.
const RELATIVE: f32 = 0.005;
const ABSOLUTE: f32 = 1e-5;

/// Maximum difference between the results of two *different* kinds of backend. Two devices
/// of the same kind must give the same bits in every case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Tolerance {
    /// No difference: ops that move, compare or count values give the same results on every
    /// backend.
    Exact,
    /// `|x - y| <= max(r * max(|x|, |y|), 1e-5)`, the rule of Burn's own
    /// backend tests. For half precision `r` is at least 1 %.
    Relative(f32),
    /// Like [`BALANCED`](Self::BALANCED), but never stricter than `|x - y| <= a`: for ops
    /// that backends compute by different formulas.
    Absolute(f32),
}

impl Tolerance {
    /// Burn's "balanced" tolerance, the one its backend tests use by default.
    pub const BALANCED: Self = Self::Relative(RELATIVE);

    /// For gradients through GELU: Flex computes its derivative exactly, other
    /// backends by a tanh formula whose error is below `1e-3` for each element.
    pub const GELU: Self = Self::Absolute(5e-3);

    /// Returns the relative and the absolute bound. The wider one applies.
    pub(super) fn bounds(self) -> (f64, f64) {
        match self {
            Self::Exact => (0.0, 0.0),
            Self::Relative(relative) => (relative.into(), ABSOLUTE.into()),
            Self::Absolute(absolute) => (RELATIVE.into(), absolute.into()),
        }
    }
}

/// Computes the outputs of a case on a device.
pub(super) type Compute = Box<dyn Fn(&Device) -> Vec<TensorData> + Send + Sync>;

/// The work of a case on a device.
pub(super) enum Body {
    /// Computes values, which are compared with those of the reference device.
    Values(Compute),
    /// Checks a property that needs no reference, such as the statistics of a random op.
    /// The error has the expected and the actual value.
    Law(fn(&Device) -> Result<(), String>),
}

/// One named check of one op or module.
pub struct Case {
    /// `theme.op` or `theme.op/variant`; unique in the suite.
    pub name: &'static str,
    /// The bound that applies if the two devices have different kinds of backend.
    pub tolerance: Tolerance,
    /// Element types that the case needs. A backend without one of these types (WebGPU has
    /// no `f64`) skips the case.
    pub dtypes: &'static [DType],
    /// Why no Remote device of this Burn release can run the case, on any backend. Local
    /// devices can.
    pub gap: Option<&'static str>,
    pub(super) body: Body,
}

impl Case {
    fn new<O: Outputs>(
        name: &'static str,
        tolerance: Tolerance,
        run: impl Fn(&Device) -> O + Send + Sync + 'static,
    ) -> Self {
        let body = Body::Values(Box::new(move |device| run(device).into_outputs()));
        Self {
            name,
            tolerance,
            dtypes: &[],
            gap: None,
            body,
        }
    }

    /// Creates a case whose values are the same on every backend.
    pub fn exact<O: Outputs>(
        name: &'static str,
        run: impl Fn(&Device) -> O + Send + Sync + 'static,
    ) -> Self {
        Self::new(name, Tolerance::Exact, run)
    }

    /// Creates a case of float arithmetic, compared with [`Tolerance::BALANCED`].
    pub fn approx<O: Outputs>(
        name: &'static str,
        run: impl Fn(&Device) -> O + Send + Sync + 'static,
    ) -> Self {
        Self::new(name, Tolerance::BALANCED, run)
    }

    /// Creates a case that checks a property of one device.
    pub fn law(name: &'static str, law: fn(&Device) -> Result<(), String>) -> Self {
        Self {
            name,
            tolerance: Tolerance::Exact,
            dtypes: &[],
            gap: None,
            body: Body::Law(law),
        }
    }

    /// Sets the element types that the case needs.
    pub fn needs(mut self, dtypes: &'static [DType]) -> Self {
        self.dtypes = dtypes;
        self
    }

    /// Marks the case as one that no Remote device of this Burn release can run.
    pub fn gap(mut self, reason: &'static str) -> Self {
        self.gap = Some(reason);
        self
    }

    /// Replaces the tolerance, for an op that is ill-conditioned.
    pub fn within(mut self, tolerance: Tolerance) -> Self {
        self.tolerance = tolerance;
        self
    }

    /// Returns the op or module under test: the name without its variant.
    pub fn op(&self) -> &'static str {
        self.name.split('/').next().unwrap_or(self.name)
    }

    /// Returns the theme: the first part of the name.
    pub fn theme(&self) -> &'static str {
        self.name.split('.').next().unwrap_or(self.name)
    }
}

/// A result of a case: tensors, host data, or a collection of these.
pub trait Outputs {
    /// Appends the data of every tensor, in order.
    fn read_into(self, outputs: &mut Vec<TensorData>);

    /// Returns the data of every tensor, in order.
    fn into_outputs(self) -> Vec<TensorData>
    where
        Self: Sized,
    {
        let mut outputs = Vec::new();
        self.read_into(&mut outputs);
        outputs
    }
}

impl Outputs for TensorData {
    fn read_into(self, outputs: &mut Vec<TensorData>) {
        outputs.push(self);
    }
}

impl<const D: usize, K: Basic> Outputs for Tensor<D, K> {
    fn read_into(self, outputs: &mut Vec<TensorData>) {
        outputs.push(self.into_data());
    }
}

impl<T: Outputs> Outputs for Vec<T> {
    fn read_into(self, outputs: &mut Vec<TensorData>) {
        self.into_iter().for_each(|item| item.read_into(outputs));
    }
}

impl<T: Outputs, const N: usize> Outputs for [T; N] {
    fn read_into(self, outputs: &mut Vec<TensorData>) {
        self.into_iter().for_each(|item| item.read_into(outputs));
    }
}

impl<A: Outputs, B: Outputs> Outputs for (A, B) {
    fn read_into(self, outputs: &mut Vec<TensorData>) {
        self.0.read_into(outputs);
        self.1.read_into(outputs);
    }
}

impl<A: Outputs, B: Outputs, C: Outputs> Outputs for (A, B, C) {
    fn read_into(self, outputs: &mut Vec<TensorData>) {
        (self.0, self.1).read_into(outputs);
        self.2.read_into(outputs);
    }
}

impl<A: Outputs, B: Outputs, C: Outputs, D: Outputs> Outputs for (A, B, C, D) {
    fn read_into(self, outputs: &mut Vec<TensorData>) {
        (self.0, self.1, self.2).read_into(outputs);
        self.3.read_into(outputs);
    }
}

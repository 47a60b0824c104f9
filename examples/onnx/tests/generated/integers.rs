// Generated from ONNX "models/integers.onnx" by burn-onnx
extern crate alloc;
use burn::prelude::*;
use burn::tensor::Bytes;
use burn_store::BurnpackStore;
use burn_store::ModuleSnapshot;


#[derive(Module, Debug)]
pub struct Model {
    constant2: burn::module::Param<Tensor<1, Int>>,
    constant3: burn::module::Param<Tensor<1>>,
    #[module(skip)]
    device: Device,
}


extern crate std;

impl Default for Model {
    fn default() -> Self {
        Self::from_file("tests/generated/integers.bpk", &Default::default())
    }
}

impl Model {
    /// Load model weights from a burnpack file.
    pub fn from_file<P: AsRef<std::path::Path>>(file: P, device: &Device) -> Self {
        let mut model = Self::new(device);
        let mut store = BurnpackStore::from_file(&file);
        model
            .load_from(&mut store)
            .unwrap_or_else(|e| {
                panic!("Failed to load burnpack file {}: {e}", file.as_ref().display())
            });
        model
    }

    /// Load model weights from in-memory bytes.
    ///
    /// The bytes must be the contents of a `.bpk` file.
    pub fn from_bytes(bytes: Bytes, device: &Device) -> Self {
        let mut model = Self::new(device);
        let mut store = BurnpackStore::from_bytes(Some(bytes));
        model
            .load_from(&mut store)
            .unwrap_or_else(|e| panic!("Failed to load burnpack bytes: {e}"));
        model
    }
}

impl Model {
    #[allow(unused_variables)]
    pub fn new(device: &Device) -> Self {
        let constant2: burn::module::Param<Tensor<1, Int>> = burn::module::Param::uninitialized(
            burn::module::ParamId::new(),
            move |device, _require_grad| Tensor::<
                1,
                Int,
            >::zeros([4], (device, burn::tensor::DType::I8)),
            device.clone(),
            false,
            [4].into(),
        );
        let constant3: burn::module::Param<Tensor<1>> = burn::module::Param::uninitialized(
            burn::module::ParamId::new(),
            move |device, _require_grad| Tensor::<
                1,
            >::zeros([1], (device, burn::tensor::DType::F32)),
            device.clone(),
            false,
            [1].into(),
        );
        Self {
            constant2,
            constant3,
            device: device.clone(),
        }
    }

    #[allow(clippy::let_and_return, clippy::approx_constant)]
    pub fn forward(
        &self,
        x: Tensor<2>,
    ) -> (Tensor<2, Int>, Tensor<1, Int>, Tensor<2, Int>, Tensor<2>) {
        let constant2_out1 = self.constant2.val();
        let constant3_out1 = self.constant3.val();
        let (topk1_out1, topk1_out2) = {
            let (values, indices) = x.clone().topk_with_indices(2, 1);
            (values, indices.cast(burn::tensor::DType::I64))
        };
        let argmin_result = x.clone().argmin(1);
        let argmin1_out1 = argmin_result
            .squeeze_dim::<1usize>(1)
            .cast(burn::tensor::DType::I64);
        let cast1_out1 = x.clone().int().cast(burn::tensor::DType::I64);
        let dequantizelinear1_out1 = ((constant2_out1)
            .float()
            .cast(burn::tensor::DType::F32))
            .mul(constant3_out1);
        let add1_out1 = x.add((dequantizelinear1_out1).unsqueeze_dims(&[0isize]));
        (topk1_out2, argmin1_out1, cast1_out1, add1_out1)
    }
}

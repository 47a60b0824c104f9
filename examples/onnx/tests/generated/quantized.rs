// Generated from ONNX "models/quantized.onnx" by burn-onnx
extern crate alloc;
use burn::prelude::*;
use burn::tensor::Bytes;
use burn_store::BurnpackStore;
use burn_store::ModuleSnapshot;


#[derive(Module, Debug)]
pub struct Model {
    constant1: burn::module::Param<Tensor<1>>,
    constant2: burn::module::Param<Tensor<1, Int>>,
    #[module(skip)]
    device: Device,
}


extern crate std;

impl Default for Model {
    fn default() -> Self {
        Self::from_file("tests/generated/quantized.bpk", &Default::default())
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
        let constant1: burn::module::Param<Tensor<1>> = burn::module::Param::uninitialized(
            burn::module::ParamId::new(),
            move |device, _require_grad| Tensor::<
                1,
            >::zeros([1], (device, burn::tensor::DType::F32)),
            device.clone(),
            false,
            [1].into(),
        );
        let constant2: burn::module::Param<Tensor<1, Int>> = burn::module::Param::uninitialized(
            burn::module::ParamId::new(),
            move |device, _require_grad| Tensor::<
                1,
                Int,
            >::zeros([1], (device, burn::tensor::DType::U8)),
            device.clone(),
            false,
            [1].into(),
        );
        Self {
            constant1,
            constant2,
            device: device.clone(),
        }
    }

    #[allow(clippy::let_and_return, clippy::approx_constant)]
    pub fn forward(&self, x: Tensor<1>) -> Tensor<1> {
        let constant1_out1 = self.constant1.val();
        let constant2_out1 = self.constant2.val();
        let quantizelinear1_out1 = (((((x).cast(burn::tensor::DType::F32))
            .div((constant1_out1.clone()).cast(burn::tensor::DType::F32)))
            .round()
            .add(
                (constant2_out1.clone())
                    .cast(burn::tensor::DType::I32)
                    .float()
                    .cast(burn::tensor::DType::F32),
            ))
            .clamp(0f32, 255f32))
            .int()
            .cast(burn::tensor::DType::U8);
        let dequantizelinear1_out1 = (((quantizelinear1_out1)
            .cast(burn::tensor::DType::I32)
            .float()
            .cast(burn::tensor::DType::F32))
            .sub(
                (constant2_out1)
                    .cast(burn::tensor::DType::I32)
                    .float()
                    .cast(burn::tensor::DType::F32),
            ))
            .mul(constant1_out1);
        dequantizelinear1_out1
    }
}
